"""Averages gradients or weights over a group once, synchronously, without a policy.

Sums are computed in float32 or wider, in rank order, and divided by the group's size. Results are therefore bitwise
identical on all transports. Equal values remain unchanged, and the mean of finite values is finite even if their sum is
not (:mod:`asyncdist.tensors.means`).

Tensors are read and written in pieces, so no other task may use the model during the call. Tensors of 64 KiB or more
are read directly from the memory of other processes on the host, if possible
(:mod:`asyncdist.collectives.algorithms.shared_memory_reduce`).

**Cancellation**: the collectives end in the background, without changing this rank's tensors.
"""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, cast

import torch
from torch import Tensor, nn

from asyncdist.collectives.algorithms.shared_memory_reduce import SharedFlatBuffers
from asyncdist.collectives.collectives import Collectives
from asyncdist.collectives.error_exchange import (
    Call,
    LocalResult,
    ResultHeader,
    attempt,
    exchange_headers,
    raise_first_error,
    run_and_raise,
    share,
)
from asyncdist.collectives.groups import Group
from asyncdist.errors import DisagreementError
from asyncdist.functional.collectives import resolve_group
from asyncdist.runtime.world import World
from asyncdist.tensors.bucket import Bucket
from asyncdist.tensors.byte_views import check_writable, dtype_name
from asyncdist.tensors.flat_state import Fingerprint, FlatBuffers, FlatState, accumulate_dtype, first_difference
from asyncdist.tensors.model_tensors import check_gradient

_DIGEST_LENGTH: Final = 64


async def average_models(model: nn.Module, training_group: Group | None = None, *, world: World | None = None) -> None:
    """Replace the model's state on every member with the mean over the group, in place.

    Floating and complex parameters and persistent buffers are averaged, and rounded once to their dtype. Integer and
    bool entries, such as BatchNorm's counter, are copied from the first member. Tied weights count once. A flat copy of
    the state is kept for later calls, at most until the model is freed.

    Args:
        model: Model with the same names, shapes, dtypes and tied weights on all members, on any device.
        training_group: Ranks that average, by default all.
        world: World of the call, by default the current one.

    Raises:
        DisagreementError: The models differ. Every member raises the error, which names the first difference.
        TypeError, ValueError: ``model`` is not a module, has no state, or has an entry that cannot be averaged. The
            other members get RemoteError.
        LocalProtocolError: This rank is not in the group.
    """
    await average_state(model, None, training_group, world=world)


async def average_state(
    model: nn.Module, state: FlatState | None, training_group: Group | None = None, *, world: World | None = None
) -> None:
    """Average a part of the model's state, and possibly of the optimizer's, over the group, in place.

    If ``state`` is None, the whole model is averaged. Otherwise, the layout ``state`` is kept for later calls, until
    the world's cache evicts the model. Means and errors are the same as for :func:`average_models`.
    """
    world, group = resolve_group(world, training_group)
    await _average(world, group, "average_models", lambda: _Models(model, world, state))


def prepare_average(model: nn.Module, state: FlatState, world: World) -> None:
    """Allocate and touch the memory that :func:`average_state` uses, so that its first call causes no page faults.

    The model is not changed. The memory is kept for later calls, as in :func:`average_state`.
    """
    models = _Models(model, world, state)
    for spread in models.spreads:
        (spread.flat if spread.memory is None else spread.memory.tensor).zero_()
    models.finish()


async def average_gradients(model: nn.Module, group: Group | None = None, *, world: World | None = None) -> None:
    """Replace every gradient on every member with the mean over the group, in place.

    If only some members have a gradient for a parameter, a missing gradient counts as zero, and is then set to the
    mean. If no member has one, the gradient remains None. A flat copy of the gradients is kept for later calls, at most
    until the model is freed.

    Args:
        model: Model with the same parameters on all members. Gradients must be dense, of any dtype, on any device.
        group: Ranks that average, by default all.
        world: World of the call, by default the current one.

    Raises:
        DisagreementError: The parameters differ. Every member raises the error, which names the first difference.
        TypeError, ValueError: ``model`` is not a module, has no parameters, or has a sparse or DTensor gradient. The
            other members get RemoteError.
        LocalProtocolError: This rank is not in the group.
    """
    world, group = resolve_group(world, group)
    await _average(world, group, "average_gradients", lambda: _Gradients(model, world))


async def _average(world: World, group: Group, operation: str, prepare: Callable[[], _Models | _Gradients]) -> None:
    """Average the prepared tensors over the group. If this fails, raise the error and leave every tensor unchanged."""
    outcome = await attempt(prepare, lambda prepared: prepared.summary)

    async def reduce(collectives: Collectives) -> list[ResultHeader]:
        headers = await exchange_headers(collectives, group, outcome, Call(operation))
        if not any(header.has_error for header in headers):
            prepared: _Models | _Gradients = outcome.value
            await _check_equal(collectives, group, headers, prepared.fingerprint)
            if isinstance(prepared, _Gradients) and any(header.inline != headers[0].inline for header in headers):
                await collectives.all_reduce(prepared.present, group, "max")
                prepared.lay_out()
            for spread in prepared.spreads:
                await collectives.all_mean_bucket(spread, group)
            for tensor in prepared.exact:
                await collectives.broadcast(tensor, group, group.ranks[0])
        return headers

    try:
        raise_first_error(await run_and_raise(world.collectives, group, outcome, reduce))
    except BaseException:
        for spread in [] if outcome.error is not None else outcome.value.spreads:
            spread.rollback()
        raise
    outcome.value.finish()


@dataclass(frozen=True, slots=True)
class _CachedBuffers:
    """A model's layout, and the flat buffers in which its state was averaged. The next call reuses both."""

    state: FlatState
    is_whole: bool
    buffers: FlatBuffers
    commons: SharedFlatBuffers
    digest: bytes


class _Models:
    """Prepares a model's state for averaging, and writes the average back. Raises an error for an invalid model.

    ``summary`` is a digest of the layout. ``spreads`` has the tensors to average, and ``exact`` has the integer and
    boolean tensors to copy.
    """

    def __init__(self, model: nn.Module, world: World, state: FlatState | None = None) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got a {type(model).__name__}")
        self._model = model
        self._scratch = world.scratch
        self._shares_memory = world.shares_memory
        self._kept, pairs = self._find(state)
        self.fingerprint = self._kept.state.fingerprint
        self.summary = self._kept.digest
        by_dtype: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
        for entry, pair in zip(self._kept.state.entries, pairs, strict=True):
            by_dtype.setdefault(entry.dtype, []).append(pair)
        buffers = self._kept.buffers
        self.spreads = [
            Bucket(flat, by_dtype[dtype], self._kept.commons.memory_of(flat))
            for dtype, flat in buffers.averaged().items()
        ]
        self._exact_pairs = [pair for dtype in buffers.exact() for pair in by_dtype[dtype]]
        self.exact = list(buffers.exact().values())
        with torch.no_grad():
            for tensor, view in self._exact_pairs:
                view.copy_(tensor)

    def finish(self) -> None:
        """Copy the integer and boolean entries into the model, and keep the buffers for the next call."""
        with torch.no_grad():
            for tensor, view in self._exact_pairs:
                tensor.copy_(view)
        self._scratch.give_back(self._model, "state", self._kept)

    def _find(self, state: FlatState | None) -> tuple[_CachedBuffers, list[tuple[Tensor, Tensor]]]:
        """Return the layout and buffers, reused if possible, and pairs of a model tensor and its view of a buffer."""
        kept: _CachedBuffers | None = self._scratch.take(self._model, "state")
        if kept is not None and (kept.state is state if state is not None else kept.is_whole):
            with contextlib.suppress(ValueError):  # raised if layers or dtypes have changed since the last call
                return kept, kept.state.pairs(kept.buffers)
        is_whole = state is None
        if state is None:
            state = FlatState(cast(nn.Module, weakref.proxy(self._model)))
        commons = SharedFlatBuffers(self._shares_memory)
        buffers = state.new_buffers(accumulate=True, new=commons.new)
        kept = _CachedBuffers(state, is_whole, buffers, commons, state.fingerprint.digest.encode())
        return kept, state.pairs(kept.buffers)


async def _check_equal(
    collectives: Collectives, group: Group, headers: Sequence[ResultHeader], fingerprint: Fingerprint
) -> None:
    """Raise an error on every member if any member's state differs from the first member's."""
    digests = [header.inline[:_DIGEST_LENGTH] for header in headers]
    if all(digest == digests[0] for digest in digests):
        return
    other = next(header.rank for header, digest in zip(headers, digests, strict=True) if digest != digests[0])
    first = group.ranks[0]
    own = group.ranks[group.index]
    text = LocalResult(payload=fingerprint.to_text().encode() if own == first else None)
    _, reference = await share(collectives, group, text, first)
    found = b""
    if own == other:
        difference = first_difference(fingerprint, Fingerprint.from_text(reference.decode()))
        found = f"the models of rank {first} and rank {other} must have the same layout, but {difference}".encode()
    _, sentence = await share(collectives, group, LocalResult(payload=found), other)
    raise DisagreementError(f"{sentence.decode()} (in this group: rank {other})", ranks=(first, other))


class _Gradients:
    """The gradients of a model, as one flat tensor per accumulation dtype. Raises an error for an invalid model.

    ``present`` is 1 for each parameter that has a gradient, otherwise 0. ``summary`` has digests of ``present`` and of
    all parameters. ``spreads`` has the gradients that any member has.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got a {type(model).__name__}")
        self._model = model
        self._scratch = world.scratch
        named = list(model.named_parameters())
        if not named:
            raise ValueError(
                f"model must have at least one parameter to average, got a {type(model).__name__} without parameters"
            )
        for name, parameter in named:
            check_gradient(name, parameter)
            if parameter.grad is not None and 0 in parameter.grad.stride():
                check_writable(parameter.grad, f"the gradient of {name!r}")
        self._parameters = [parameter for _, parameter in named]
        self.fingerprint = Fingerprint(tuple(((name,), tuple(p.shape), dtype_name(p.dtype)) for name, p in named))
        self.present = torch.tensor([p.grad is not None for p in self._parameters], dtype=torch.uint8, device="cpu")
        present_digest = hashlib.sha256(self.present.numpy().tobytes()).digest()
        self._flats: dict[torch.dtype, Tensor] = {}
        self._views: dict[torch.dtype, list[Tensor]] = {}
        self._commons = SharedFlatBuffers(world.shares_memory)
        kept = self._scratch.take(model, "gradients")
        before: Fingerprint | None = None
        if kept is not None:
            self._flats, before, self._digest, self._views, self._commons = kept
        if before != self.fingerprint:
            self._views = {}
            self._digest = self.fingerprint.digest.encode()
        self.summary = self._digest + present_digest
        self.spreads: list[Bucket] = []
        self.exact: tuple[Tensor, ...] = ()  # integers have no gradients
        self._missing: list[tuple[nn.Parameter, Tensor]] = []
        self.lay_out()

    @torch.inference_mode(False)  # the flat tensors must be usable outside the caller's inference mode
    def lay_out(self) -> None:
        """Collect the gradients that any member has. Gradients that this rank lacks are zero."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for parameter, is_present in zip(self._parameters, self.present.tolist(), strict=True):
            if is_present:
                gradient = parameter.grad
                if gradient is None:
                    gradient = torch.zeros_like(parameter, requires_grad=False)
                    self._missing.append((parameter, gradient))
                by_dtype.setdefault(accumulate_dtype(parameter.dtype), []).append(gradient)
        self._flats = {wide: self._flat(wide, by_dtype[wide]) for wide in sorted(by_dtype, key=str)}
        self._commons.keep(self._flats.values())
        self._views = {wide: _views(self._views.get(wide), flat, by_dtype[wide]) for wide, flat in self._flats.items()}
        self.spreads = [
            Bucket(flat, list(zip(by_dtype[wide], self._views[wide], strict=True)), self._commons.memory_of(flat))
            for wide, flat in self._flats.items()
        ]

    def finish(self) -> None:
        """Set the gradients that this rank lacked, and keep the flat tensors for the next call."""
        for parameter, gradient in self._missing:
            parameter.grad = gradient
        kept = self._flats, self.fingerprint, self._digest, self._views, self._commons
        self._scratch.give_back(self._model, "gradients", kept)

    def _flat(self, dtype: torch.dtype, tensors: Sequence[Tensor]) -> Tensor:
        """Return a flat tensor for the elements of ``tensors``.

        Reuse the previous flat tensor if it has the right size.
        """
        kept = self._flats.get(dtype)
        count = sum(tensor.numel() for tensor in tensors)
        if kept is not None and kept.numel() == count:
            return kept
        if any(tensor.is_cuda for tensor in tensors):
            return torch.empty(count, dtype=dtype, device="cpu", pin_memory=True)
        return self._commons.new(count, dtype=dtype)


def _views(kept: list[Tensor] | None, flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return consecutive views of ``flat`` with the shapes of ``tensors``. Reuse the previous views if they fit."""
    if kept and kept[0].data_ptr() == flat.data_ptr() and [k.shape for k in kept] == [t.shape for t in tensors]:
        return kept
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for tensor, part in zip(tensors, parts, strict=True)]
