"""Averaging gradients or weights once, now, over a group: the plain synchronous way, without a policy.

Everything of one dtype goes through one collective, however many tensors there are. Sums are in float32 or wider, and
are divided by the group's size. Before any data is sent the members compare what they are about to average, so another
model on one of them is an error that names the first difference, on all of them.

**Cancellation**: the collectives end in the background; this rank's tensors stay as they are.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from asyncdist.api import place
from asyncdist.collectives import Collectives
from asyncdist.errors import DisagreementError
from asyncdist.flat import Fingerprint, FlatBuffers, FlatState, accumulate_dtype, divide, first_difference
from asyncdist.groups import Group
from asyncdist.outcomes import Frame, Outcome, attempt, meet, raise_first_error, settle, share
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
    outcome = await attempt(lambda: _snapshot(world, model), lambda pair: pair[0].fingerprint.digest.encode())

    async def reduce(collectives: Collectives) -> list[Frame]:
        frames = await meet(collectives, group, outcome)
        if not any(frame.has_error for frame in frames):
            state, buffers = outcome.value
            await _check_equal(collectives, group, frames, state.fingerprint)
            for tensor in buffers.averaged().values():
                await collectives.all_reduce(tensor, group, "sum")
            for tensor in buffers.exact().values():
                await collectives.broadcast(tensor, group, group.ranks[0])
        return frames

    raise_first_error(await settle(world, group, outcome, reduce))
    state, buffers = outcome.value
    for tensor in buffers.averaged().values():
        divide(tensor, group.size)
    state.load(buffers)
    for dtype, tensor in buffers.tensors.items():
        world.scratch.give_back(model, ("state", dtype), tensor)


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
        frames = await meet(collectives, group, outcome)
        if not any(frame.has_error for frame in frames):
            gradients = outcome.value
            await _check_equal(collectives, group, frames, gradients.fingerprint)
            if any(frame.inline != frames[0].inline for frame in frames):
                await collectives.all_reduce(gradients.present, group, "max")
                gradients.collect()
            for flat in gradients.flats.values():
                await collectives.all_reduce(flat, group, "sum")
        return frames

    raise_first_error(await settle(world, group, outcome, reduce))
    outcome.value.write_mean(group.size)


def _snapshot(world: World, model: nn.Module) -> tuple[FlatState, FlatBuffers]:
    """The state in accumulators from the scratch memory: a sum of bfloat16 must not be rounded before division."""
    state = FlatState(model)
    counts: dict[torch.dtype, int] = {}
    for entry in state.entries:
        counts[entry.dtype] = entry.offset + math.prod(entry.shape)
    pinned = any(parameter.is_cuda for parameter in model.parameters())
    tensors = {
        dtype: world.scratch.take(model, ("state", dtype), counts[dtype], accumulate_dtype(dtype), pinned=pinned)
        for dtype in sorted(counts, key=str)
    }
    views = tuple(
        tensors[entry.dtype][entry.offset : entry.offset + math.prod(entry.shape)].view(entry.shape)
        for entry in state.entries
    )
    buffers = FlatBuffers(state.entries, tensors, views)
    state.snapshot(buffers)
    return state, buffers


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


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a gradient lies in the flat tensor of its accumulation dtype, in elements."""

    parameter: nn.Parameter
    wide: torch.dtype
    first: int
    count: int


class _Gradients:
    """The gradients of a model as one flat tensor per accumulation dtype.

    Args:
        model: checked here.
        world: whose scratch memory is used.

    Attributes:
        present: 1 for each parameter that has a gradient, 0 for the others; uint8.
        flats: the values of those that are present.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model is a {type(model).__name__}; allowed: a torch.nn.Module")
        self._model = model
        self._world = world
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
        self.summary = self.fingerprint.digest.encode() + self._presence_digest()
        self.flats: dict[torch.dtype, Tensor] = {}
        self._places: list[_Place] = []
        self.collect()

    def collect(self) -> None:
        """Copy what is present into the flat tensors; zeros where this rank has no gradient."""
        self._places = list(self._lay_out())
        counts = {place.wide: place.first + place.count for place in self._places}
        pinned = any(place.parameter.is_cuda for place in self._places)
        self.flats = {
            wide: self._world.scratch.take(self._model, ("gradients", wide), counts[wide], wide, pinned=pinned)
            for wide in sorted(counts, key=str)
        }
        with torch.no_grad():
            for place in self._places:
                if place.parameter.grad is None:
                    self._view(place).zero_()
                else:
                    self._view(place).copy_(place.parameter.grad)

    def write_mean(self, size: int) -> None:
        """Divide the sums, write them into the gradients, and give the flat tensors back."""
        for flat in self.flats.values():
            divide(flat, size)
        with torch.no_grad():
            for place in self._places:
                parameter = place.parameter
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_(self._view(place))
        for wide, flat in self.flats.items():
            self._world.scratch.give_back(self._model, ("gradients", wide), flat)

    def _lay_out(self) -> Iterator[_Place]:
        sizes: dict[torch.dtype, int] = {}
        for parameter, is_present in zip(self._parameters, self.present.tolist(), strict=True):
            if is_present:
                wide = accumulate_dtype(parameter.dtype)
                first = sizes.get(wide, 0)
                sizes[wide] = first + parameter.numel()
                yield _Place(parameter, wide, first, parameter.numel())

    def _view(self, place: _Place) -> Tensor:
        flat = self.flats[place.wide]
        return flat[place.first : place.first + place.count].view(place.parameter.shape)

    def _presence_digest(self) -> bytes:
        return hashlib.sha256(self.present.numpy().tobytes()).digest()
