"""Averaging gradients or weights once, now, over a group: the plain synchronous way, without a policy.

Everything of one dtype goes through one collective, however many tensors there are. Sums are in float32 or wider, and
are divided by the group's size. Before any data is sent the members compare what they are about to average, so another
model on one of them is an error that names the first difference, on all of them.

**Cancellation**: the collectives end in the background; this rank's tensors stay as they are.
"""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, cast

import torch
from torch import Tensor, nn

from asyncdist.api import place
from asyncdist.collectives import Collectives
from asyncdist.errors import DisagreementError
from asyncdist.flat import Fingerprint, FlatBuffers, FlatState, accumulate_dtype, first_difference
from asyncdist.groups import Group
from asyncdist.outcomes import Call, Frame, Outcome, attempt, meet, raise_first_error, settle, share
from asyncdist.world import World

_DIGEST_LENGTH: Final = 64


async def average_models(model: nn.Module, training_group: Group | None = None, *, world: World | None = None) -> None:
    """Replace the model's state on every member by the mean over the group, in place.

    Floating and complex parameters and persistent buffers become the sum divided by the group's size, rounded once to
    their dtype; integer and bool ones (BatchNorm's counter) become the first member's. Tied weights count once. With
    one member nothing changes. One flat copy of the state is kept for the next call, as long as the model lives.

    Args:
        model: of one layout on all members: names, shapes, dtypes, sharing; any device.
        training_group: who averages; everybody by default.
        world: the current one by default.

    Raises:
        DisagreementError: the models differ; the first difference is named on every member.
        TypeError, ValueError: ``model`` is no module, has no state, or an entry that cannot be averaged; as a
            RemoteError on the other members.
        LocalProtocolError: this rank is not in the group.
    """
    world, group = place(world, training_group)
    outcome = await attempt(lambda: _snapshot(world, model), lambda snapshot: snapshot.digest)

    async def reduce(collectives: Collectives) -> list[Frame]:
        frames = await meet(collectives, group, outcome, Call("average_models"))
        if not any(frame.has_error for frame in frames):
            buffers = outcome.value.buffers
            await _check_equal(collectives, group, frames, outcome.value.state.fingerprint)
            for tensor in buffers.averaged().values():
                await collectives.all_mean(tensor, group)
            for tensor in buffers.exact().values():
                await collectives.broadcast(tensor, group, group.ranks[0])
        return frames

    raise_first_error(await settle(world, group, outcome, reduce))
    snapshot = outcome.value
    snapshot.state.load(snapshot.buffers)
    world.scratch.give_back(model, "state", snapshot)


async def average_gradients(model: nn.Module, group: Group | None = None, *, world: World | None = None) -> None:
    """Replace every gradient on every member by the mean over the group, in place.

    A parameter without a gradient here counts as zero where another member has one, and gets the mean like the others;
    without one on any member it stays without. One flat copy of the gradients is kept for the next call, as long as the
    model lives.

    Args:
        model: with the same parameters on all members; gradients dense, of any dtype and device.
        group: who averages; everybody by default.
        world: the current one by default.

    Raises:
        DisagreementError: the parameters differ; the first difference is named on every member.
        TypeError, ValueError: ``model`` is no module, has no parameters, or a sparse gradient; as a RemoteError on the
            other members.
        LocalProtocolError: this rank is not in the group.
    """
    world, group = place(world, group)
    outcome = await attempt(lambda: _Gradients(model, world), lambda gradients: gradients.summary)

    async def reduce(collectives: Collectives) -> list[Frame]:
        frames = await meet(collectives, group, outcome, Call("average_gradients"))
        if not any(frame.has_error for frame in frames):
            gradients = outcome.value
            await _check_equal(collectives, group, frames, gradients.fingerprint)
            if any(frame.inline != frames[0].inline for frame in frames):
                await collectives.all_reduce(gradients.present, group, "max")
                gradients.collect()
            for flat in gradients.flats.values():
                await collectives.all_mean(flat, group)
        return frames

    raise_first_error(await settle(world, group, outcome, reduce))
    outcome.value.write()


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """A model's layout, and its state in accumulators: a sum of bfloat16 must not be rounded before division.

    Attributes:
        state: refers to the model weakly.
        buffers: the values.
        digest: of the state's fingerprint.
    """

    state: FlatState
    buffers: FlatBuffers
    digest: bytes


def _snapshot(world: World, model: nn.Module) -> _Snapshot:
    """The model's state now, in the kept memory if the model is laid out as it was."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; allowed: a torch.nn.Module")
    kept: _Snapshot | None = world.scratch.take(model, "state")
    if kept is not None:
        with contextlib.suppress(ValueError):  # it has been changed since: another layer, another dtype
            kept.state.snapshot(kept.buffers)
            return kept
    state = FlatState(cast(nn.Module, weakref.proxy(model)))
    buffers = state.new_buffers(accumulate=True)
    state.snapshot(buffers)
    return _Snapshot(state, buffers, state.fingerprint.digest.encode())


async def _check_equal(
    collectives: Collectives, group: Group, frames: Sequence[Frame], fingerprint: Fingerprint
) -> None:
    """Raise on every member if one of them is about to average something else than the first."""
    digests = [frame.inline[:_DIGEST_LENGTH] for frame in frames]
    if all(digest == digests[0] for digest in digests):
        return
    other = next(frame.rank for frame, digest in zip(frames, digests, strict=True) if digest != digests[0])
    first = group.ranks[0]
    own = group.ranks[group.index]
    text = Outcome(payload=fingerprint.to_text().encode() if own == first else None)
    _, reference = await share(collectives, group, text, first)
    found = b""
    if own == other:
        difference = first_difference(fingerprint, Fingerprint.from_text(reference.decode()))
        found = f"the model on rank {other} is not the one on rank {first}: {difference}".encode()
    _, sentence = await share(collectives, group, Outcome(payload=found), other)
    raise DisagreementError(f"{sentence.decode()} (here: rank {other})", ranks=(first, other))


class _Gradients:
    """The gradients of a model as one flat tensor per accumulation dtype.

    Args:
        model: checked here.
        world: whose scratch memory is used.

    Attributes:
        fingerprint: of the parameters, whether they have gradients or not.
        present: 1 for each parameter that has a gradient, 0 for the others; uint8.
        summary: digests of both, as bytes.
        flats: by dtype, the values of those that are present.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model is a {type(model).__name__}; allowed: a torch.nn.Module")
        self._model = model
        self._scratch = world.scratch
        named = list(model.named_parameters())
        if not named:
            raise ValueError(f"{type(model).__name__} has no parameters: nothing to average")
        for name, parameter in named:
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise ValueError(
                    f"the gradient of {name!r} is sparse ({parameter.grad.layout}); allowed: dense gradients"
                )
        self._parameters = [parameter for _, parameter in named]
        self.fingerprint = Fingerprint(
            tuple(((name,), tuple(p.shape), str(p.dtype).removeprefix("torch.")) for name, p in named)
        )
        self.present = torch.tensor([p.grad is not None for p in self._parameters], dtype=torch.uint8)
        present_digest = hashlib.sha256(self.present.numpy().tobytes()).digest()
        self.flats: dict[torch.dtype, Tensor] = {}
        kept = self._scratch.take(model, "gradients")
        before: Fingerprint | None = None
        if kept is not None:
            self.flats, before, self._digest = kept
        if before != self.fingerprint:
            self._digest = self.fingerprint.digest.encode()
        self.summary = self._digest + present_digest
        self._views: list[tuple[nn.Parameter, Tensor]] = []
        self.collect()

    def collect(self) -> None:
        """Copy what is present into the flat tensors; zeros where this rank has no gradient."""
        self._lay_out()
        with torch.no_grad():
            for parameter, view in self._views:
                if parameter.grad is None:
                    view.zero_()
                else:
                    view.copy_(parameter.grad)

    def write(self) -> None:
        """Write the flat tensors into the gradients, and let them be kept."""
        with torch.no_grad():
            for parameter, view in self._views:
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_(view)
        self._scratch.give_back(self._model, "gradients", (self.flats, self.fingerprint, self._digest))

    def _lay_out(self) -> None:
        """One after the other, those of one accumulation dtype in one tensor; a kept one where it fits."""
        chosen = [p for p, is_present in zip(self._parameters, self.present.tolist(), strict=True) if is_present]
        sizes: dict[torch.dtype, list[int]] = {}
        for parameter in chosen:
            sizes.setdefault(accumulate_dtype(parameter.dtype), []).append(parameter.numel())
        kept, self.flats = self.flats, {}
        pinned = any(parameter.is_cuda for parameter in chosen)
        for wide in sorted(sizes, key=str):
            count, flat = sum(sizes[wide]), kept.get(wide)
            if flat is None or flat.numel() != count:
                flat = torch.empty(count, dtype=wide, pin_memory=pinned)
            self.flats[wide] = flat
        parts = {wide: iter(torch.split(flat, sizes[wide])) for wide, flat in self.flats.items()}
        self._views = [(p, next(parts[accumulate_dtype(p.dtype)]).view(p.shape)) for p in chosen]
