"""Represents a model's state as a few contiguous tensors, in order to snapshot, send, average and restore it.

`FlatState` copies between a model's parameters and persistent buffers and `FlatBuffers`, which contain one 1-D tensor
per dtype. Weights are written in place, so the model's tensors remain the same objects.

- Tensors that share memory are one entry with several names. Entries never overlap.
- The layout depends only on names, shapes and dtypes, so equal fingerprints imply equal layouts.
- Every arithmetic step is elementwise and rounded separately, so results do not depend on the chunk size.
"""

import functools
import hashlib
import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from asyncdist.tensors.byte_views import dtype_name
from asyncdist.tensors.device_copy import DeviceCopy, copy_stream
from asyncdist.tensors.means import mixed
from asyncdist.tensors.model_tensors import (
    check_overlap,
    check_supported,
    digest_of,
    frozen_places,
    gather,
    identity_of,
    local_part,
    names_of,
    take_local_parts,
    trained_names,
)
from asyncdist.tensors.optimizers.weights import AveragedStates

_PIECE_COUNT: Final = 1 << 16  # elements per temporary tensor: pieces of 256 KiB took half the time of 1 MiB
_SAMPLE_COUNT: Final = 16  # number of values of each entry in the checksum that detects different weights
_CHANGED: Final = (
    "the model must keep its names, shapes, dtypes and sharing after its policy has started. To continue with the "
    "changed model, as after adding adapters, leave the policy and enter a new one on all ranks"
)


@dataclass(frozen=True, slots=True)
class Entry:
    """Describes a parameter or buffer of the model, and its place in the flat tensors.

    Attributes:
        names: All names, in the order of the modules. Tied weights have several.
        averaged: Whether the values are averaged (floating and complex dtypes). All other values (integers and bool)
            are copied from the best rank.
        offset: Index of the first element in the flat tensor of this dtype.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    averaged: bool
    offset: int


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Identifies a layout by the names, shape and dtype of each entry, in order. It must be equal on all ranks."""

    lines: tuple[tuple[tuple[str, ...], tuple[int, ...], str], ...]

    def to_text(self) -> str:
        """Return the fingerprint as JSON without line breaks, to be sent in a message."""
        return json.dumps(self.lines, separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> "Fingerprint":
        """Return the fingerprint that `to_text` wrote as JSON. Raise ValueError for any other string."""
        try:
            lines = tuple((tuple(names), tuple(map(int, shape)), dtype) for names, shape, dtype in json.loads(text))
            known = {name for line in lines for name in line[0]}
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"the text must be the JSON of a fingerprint, got {text[:80]!r}") from error
        fingerprint = cls(lines)
        is_once = len(known) == sum(len(line[0]) for line in lines)
        if not is_once or not all(line[0] for line in lines) or fingerprint.to_text() != text:
            raise ValueError(f"the text must be the JSON of a fingerprint, got {text[:80]!r}")
        return fingerprint

    @property
    def digest(self) -> str:
        """SHA-256 digest of :meth:`to_text`, in hexadecimal."""
        return hashlib.sha256(self.to_text().encode()).hexdigest()


def first_difference(mine: Fingerprint, theirs: Fingerprint) -> str | None:
    """Describe the first difference between two layouts. Return None if they are equal."""
    other = {name: line for line in theirs.lines for name in line[0]}
    for names, shape, dtype in mine.lines:
        if names[0] not in other:
            return f"{names[0]!r} exists here and not there"
        their_names, their_shape, their_dtype = other[names[0]]
        if shape != their_shape:
            return f"{names[0]!r} has shape {shape} here and {their_shape} there"
        if dtype != their_dtype:
            return f"{names[0]!r} has dtype {dtype} here and {their_dtype} there"
        if names != their_names:
            return f"{names[0]!r} shares its memory as {names} here and as {their_names} there"
    known = {name for line in mine.lines for name in line[0]}
    for line in theirs.lines:
        for name in line[0]:
            if name not in known:
                return f"{name!r} exists there and not here"
    for one, two in zip(mine.lines, theirs.lines, strict=True):
        if one != two:
            return f"{one[0][0]!r} is here in the place of {two[0][0]!r} there, so the entries have another order"
    return None


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class FlatBuffers:
    """Holds one contiguous 1-D tensor for each dtype of a model, and a view of each entry.

    Attributes:
        tensors: Flat tensor for each dtype of the model, in the same order on all ranks. If it is for sums, it may have
            a wider dtype than its key.
        views: View of each entry's elements, with the entry's shape.
    """

    entries: tuple[Entry, ...]
    tensors: Mapping[torch.dtype, Tensor]
    views: tuple[Tensor, ...]

    @classmethod
    def of(cls, entries: tuple[Entry, ...], tensors: Mapping[torch.dtype, Tensor]) -> "FlatBuffers":
        """Return buffers that consist of these flat tensors and a view of each entry in them."""
        flats = (tensors[each.dtype][each.offset : each.offset + math.prod(each.shape)] for each in entries)
        return cls(entries, tensors, tuple(flat.view(each.shape) for flat, each in zip(flats, entries, strict=True)))

    @property
    def nbytes(self) -> int:
        """Total size of the tensors in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def averaged(self) -> dict[torch.dtype, Tensor]:
        """Return the flat tensors to average, by dtype."""
        return {dtype: tensor for dtype, tensor in self.tensors.items() if _is_averaged(dtype)}

    def exact(self) -> dict[torch.dtype, Tensor]:
        """Return the flat tensors that are copied from the best rank instead of being averaged, by dtype."""
        return {dtype: tensor for dtype, tensor in self.tensors.items() if not _is_averaged(dtype)}

    def by_name(self) -> dict[str, Tensor]:
        """Return the flat tensors, keyed by the name of the model's dtype, such as `"float32"`."""
        return {dtype_name(dtype): tensor for dtype, tensor in self.tensors.items()}


class FlatState:
    """Copies a model's parameters and persistent buffers to and from flat tensors.

    Each copy looks up the model's tensors again, which takes a millisecond for a thousand modules. This is necessary,
    because a module may replace a buffer in its forward, and a user may replace `p.data` or a submodule. If names,
    shapes, dtypes or the sharing of memory have changed, an error is raised.

    Args:
        model: Module whose state is copied. The constructor does not change it.
        takes_shards: Whether DTensors are allowed. Of each DTensor, the state contains only this rank's shard.
        trained_only: Whether to omit parameters that require no gradient. These must be equal on all ranks.
        states: Optimizer states to average with the weights. They become the last entries.

    Attributes:
        fingerprint: Identity of the layout. For a DTensor, it includes the placement and the global shape.
        sizes: Number of elements of each dtype, in the order of the flat tensors.
        mesh_ranks: Global torch.distributed ranks over which entries are sharded, or empty if no entry is sharded.

    Raises:
        TypeError: The model is not an `nn.Module`.
        ValueError: The model has no state, or has an entry that cannot be averaged.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        takes_shards: bool = False,
        trained_only: bool = False,
        states: AveragedStates | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got a {type(model).__name__}")
        self._model = model
        self._states = states
        self.trained_only = trained_only
        # The context manager is reused, because creating it takes as long as entering it. The code inside it never
        # awaits.
        self._no_grad = torch.no_grad()
        # Keys and names are in the order of the modules. The "places" of an entry are the indices of its names.
        self._keys: list[str | None] = []
        tensors: list[Tensor] = []
        gather(model, self._keys, tensors)
        self._names = names_of(self._keys)
        self._left_out = frozen_places(tensors) if trained_only else []
        shardings, meshes = take_local_parts(self._names, tensors) if takes_shards else ({}, set())
        self.mesh_ranks = tuple(sorted(meshes))
        groups = self._group(tensors)
        if not groups:
            what = "neither trained parameters" if trained_only else "neither parameters"
            raise ValueError(
                f"model must have tensors to average, got a {model.__class__.__name__} with {what} nor persistent "
                "buffers"
            )
        if states is not None:
            self._names += states.names
            groups += [[place] for place in range(len(tensors), len(self._names))]
            tensors += [local_part(parameter) for parameter in states.parameters]
        sizes: dict[torch.dtype, int] = {}
        entries = []
        for places in groups:
            names, tensor = tuple(self._names[place] for place in places), tensors[places[0]]
            offset = sizes.get(tensor.dtype, 0)
            sizes[tensor.dtype] = offset + tensor.numel()
            entries.append(Entry(names, tuple(tensor.shape), tensor.dtype, _is_averaged(tensor.dtype), offset))
        self.entries = tuple(entries)
        self._firsts = [places[0] for places in groups]
        self._tied = [(entry, tuple(own)) for entry, own in zip(entries, groups, strict=True) if len(own) > 1]
        self._shapes = [tensors[place].shape for place in self._firsts]
        own_count = len(groups) - (0 if states is None else len(states.names))
        self._dtypes = [tensors[place].dtype for place in self._firsts[:own_count]]  # without optimizer states
        self.sizes = {dtype: sizes[dtype] for dtype in sorted(sizes, key=dtype_name)}
        self._devices = {tensors[place].device for place in self._firsts if tensors[place].is_cuda}
        self.fingerprint = Fingerprint(
            tuple((e.names, e.shape, dtype_name(e.dtype) + shardings.get(e.names[0], "")) for e in self.entries)
        )

    def _group(self, tensors: Sequence[Tensor]) -> list[list[int]]:
        """Check the model's tensors. Return each entry's indices into the names, several if names share memory."""
        left_out = set(self._left_out)
        shared: dict[tuple[Any, ...], list[int]] = {}
        for place, (name, tensor) in enumerate(zip(self._names, tensors, strict=True)):
            if place not in left_out:
                check_supported(name, tensor)
                shared.setdefault(identity_of(tensor), []).append(place)
        check_overlap([(self._names[places[0]], tensors[places[0]]) for places in shared.values()])
        return list(shared.values())

    def follow(self, model: nn.Module) -> None:
        """From now on, use ``model`` instead of the current model. It must have the same layout."""
        self._model = model

    @property
    def nbytes(self) -> int:
        """Size of one snapshot in bytes."""
        return sum(size * dtype.itemsize for dtype, size in self.sizes.items())

    @torch.inference_mode(False)  # the buffers outlive the caller's inference mode
    def new_buffers(
        self,
        *,
        accumulate: bool = False,
        device: torch.device | str = "cpu",
        new: Callable[..., Tensor] | None = None,
    ) -> FlatBuffers:
        """Allocate zeroed buffers for one state.

        Args:
            accumulate: Whether to widen floating dtypes to at least float32, and complex dtypes to at least complex64,
                so that the buffers can hold sums.
            device: Device of the buffers. Host memory is pinned if the model is in CUDA memory.
            new: Function to call instead of `torch.zeros(size, dtype=...)` if the model is in host memory. It need not
                initialise the memory.
        """
        pinned = bool(self._devices) and torch.device(device).type == "cpu"
        if new is None or self._devices:
            new = functools.partial(torch.zeros, device=device, pin_memory=pinned)
        tensors = {
            dtype: new(size, dtype=accumulate_dtype(dtype) if accumulate else dtype)
            for dtype, size in self.sizes.items()
        }
        return FlatBuffers.of(self.entries, tensors)

    def snapshot(self, into: FlatBuffers) -> None:
        """Copy the model's current state into the buffers. Raise ValueError if the model's layout has changed."""
        tensors = self.tensors(into)
        # All entries are copied by one call. For a small model, separate calls would take longer than the copies
        # themselves.
        with self._no_grad:
            torch._foreach_copy_(into.views, tensors)

    def start_snapshot(self, into: FlatBuffers) -> "DeviceCopy | None":
        """Start copying the model's current state into buffers in host memory.

        If the memory is pinned, the call does not wait for a device. CUDA tensors are copied on a separate stream,
        after the work already queued on the current stream. Work queued later waits for the copy, so that the next
        optimizer step cannot change the weights too early. The buffers must not be used before the copy is complete.

        Returns:
            The pending copy, or None if the model is not in CUDA memory. In that case, the snapshot is already
            complete.

        Raises:
            ValueError: The buffers were made for a different layout, or the model's layout has changed.
        """
        if not self._devices:
            self.snapshot(into)
            return None
        pairs = self.pairs(into)
        streams = {device: copy_stream(device) for device in {tensor.device for tensor, _ in pairs if tensor.is_cuda}}
        for device, stream in streams.items():
            stream.wait_stream(torch.cuda.current_stream(device))
        with torch.no_grad():
            for tensor, view in pairs:
                if tensor.is_cuda:
                    with torch.cuda.stream(streams[tensor.device]):
                        # After copying a conjugated or negated tensor, torch would change the host memory immediately,
                        # before the device has written it.
                        view.copy_(tensor.resolve_conj().resolve_neg(), non_blocking=True)
                    tensor.record_stream(streams[tensor.device])
                else:
                    view.copy_(tensor)
        events = []
        for device, stream in streams.items():
            events.append(stream.record_event())
            torch.cuda.current_stream(device).wait_event(events[-1])
        return DeviceCopy(events)

    def load(self, buffers: FlatBuffers, *, momentum: float = 0.0) -> None:
        """Write a state into the model's tensors, in place.

        Averaged entries become ``momentum * own + (1 - momentum) * average``, where ``own`` is the model's current
        value. Both products and the sum are rounded separately in the accumulation dtype. The sum is clamped to the
        interval between ``own`` and ``average``, and rounded to the entry's dtype. Equal values therefore remain equal,
        and finite values remain finite. Momentum 0 copies the average bit for bit, and momentum 1 keeps the model's
        values. Integer and bool entries are always copied.

        Args:
            buffers: A snapshot or a mean. It is not changed.
            momentum: Weight of the model's own values, from 0 to 1.

        Raises:
            ValueError: ``momentum`` is out of range, the buffers were made for a different layout, or the model's
                layout has changed. The model is unchanged.
        """
        if not 0.0 <= momentum <= 1.0:
            raise ValueError(f"momentum must be from 0 to 1, got {momentum!r}")
        tensors, views = self.tensors(buffers), list(buffers.views)
        with self._no_grad:
            if momentum:
                for entry, tensor, view in zip(self.entries, tensors, views, strict=True):
                    if entry.averaged and momentum != 1.0:
                        _mix(tensor, view, momentum)
                exact = [place for place, entry in enumerate(self.entries) if not entry.averaged]
                tensors, views = [tensors[place] for place in exact], [views[place] for place in exact]
            if any(tensor.is_conj() or tensor.is_neg() for tensor in tensors):  # _foreach_copy_ rejects such tensors
                for tensor, view in zip(tensors, views, strict=True):
                    tensor.copy_(view)
            elif tensors:
                torch._foreach_copy_(tensors, views)

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that the optimizer has only this model's parameters, and does not update them in backward hooks.

        Raises:
            TypeError: The optimizer has no parameter groups.
            ValueError: The optimizer has a parameter that is not in the model, or updates them in backward hooks.
        """
        groups = getattr(optimizer, "param_groups", None)
        if groups is None:
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got a {type(optimizer).__name__}")
        known = {id(parameter) for parameter in self._model.parameters()}
        held = [id(parameter) for group in groups for parameter in group["params"]]
        # Some optimizers, such as transformers' LayerWiseDummyOptimizer, wrap one optimizer per parameter.
        steps_in_hooks = isinstance(getattr(optimizer, "optimizer_dict", None), dict)
        if held and known.isdisjoint(held) and steps_in_hooks:
            raise ValueError(
                f"optimizer must hold the model's parameters, but this {type(optimizer).__name__} updates them in "
                "hooks of the backward pass. Use an optimizer without layer-wise updates, such as "
                "optim='galore_adamw' instead of 'galore_adamw_layerwise'"
            )
        for group_index, group in enumerate(groups):
            for index, parameter in enumerate(group["params"]):
                if id(parameter) not in known:
                    raise ValueError(
                        f"optimizer must hold only parameters of the {type(self._model).__name__}, not copies such as "
                        f"float32 masters, got another parameter of shape {tuple(parameter.shape)} at "
                        f"param_groups[{group_index}]['params'][{index}]"
                    )

    def pairs(self, buffers: FlatBuffers) -> list[tuple[Tensor, Tensor]]:
        """Return pairs of each entry's current tensor in the model and its view in the buffers."""
        return list(zip(self.tensors(buffers), buffers.views, strict=True))

    def tensors(self, buffers: FlatBuffers) -> list[Tensor]:
        """Return the result of :meth:`own_tensors`.

        Raise ValueError if the buffers were made for a different layout.
        """
        if buffers.entries is not self.entries and buffers.entries != self.entries:
            raise ValueError("the flat buffers must be made for a model of this layout, got buffers of another layout")
        return self.own_tensors()

    def own_tensors(self) -> list[Tensor]:
        """Return each entry's current tensor in the model.

        For a DTensor, the result contains this rank's shard, without gradient tracking. Raise ValueError if the model's
        layout has changed.
        """
        keys: list[str | None] = []
        found: list[Tensor] = []
        gather(self._model, keys, found)
        if keys != self._keys:
            found = self._in_order(dict(zip(names_of(keys), found, strict=True)))
        for place in self._left_out:
            if found[place].requires_grad:
                raise ValueError(
                    f"the parameter {self._names[place]!r} is trained now, but it was not when the policy was made "
                    "with parameters='trainable'. Leave the policy and enter a new one to train it"
                )
        if self.mesh_ranks:
            found = [local_part(tensor) for tensor in found]
        if self._states is not None:
            found += self._states.tensors()
        tensors = [found[place] for place in self._firsts]
        # All entries are compared at once. For a small model, separate checks took a third of a snapshot's time.
        dtypes = [tensor.dtype for tensor in tensors[: len(self._dtypes)]]
        if [tensor.shape for tensor in tensors] != self._shapes or dtypes != self._dtypes:
            self._refuse_changed(tensors)
        for entry, places in self._tied:
            tensor = found[places[0]]
            for name, place in zip(entry.names[1:], places[1:], strict=True):
                other = found[place]
                if tensor.numel() and other is not tensor and identity_of(other) != identity_of(tensor):
                    raise ValueError(
                        f"the tensors {name!r} and {entry.names[0]!r} no longer share their memory; {_CHANGED}"
                    )
        return tensors

    def _in_order(self, now: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the model's tensors in their original order. Raise ValueError if the names have changed."""
        names = self._names[: len(self._names) - len(self._states.names)] if self._states else self._names
        changed = sorted(now.keys() ^ set(names))
        if changed:
            raise ValueError(f"the tensor {changed[0]!r} {'is new' if changed[0] in now else 'is gone'}; {_CHANGED}")
        return [now[name] for name in names]

    def left_out_digest(self) -> str:
        """Return a hash of the omitted parameters (see ``trained_only``): their names, shapes, dtypes and values."""
        keys: list[str | None] = []
        tensors: list[Tensor] = []
        gather(self._model, keys, tensors)
        return digest_of((self._names[place], tensors[place]) for place in self._left_out)

    @torch.no_grad()
    def sample_checksum(self) -> int:
        """Return a checksum over a few values of each averaged entry. This takes one transfer per device."""
        by_device: dict[torch.device, list[Tensor]] = {}
        for entry, tensor in zip(self.entries, self.own_tensors(), strict=True):
            if entry.averaged and tensor.numel():
                by_device.setdefault(tensor.device, []).append(_sample(tensor))
        samples = (torch.cat(some).cpu().numpy().tobytes() for some in by_device.values())
        return functools.reduce(lambda found, sample: zlib.crc32(sample, found), samples, 0)

    def trained(self) -> set[str]:
        """Return all names of the model's parameters that currently require a gradient."""
        return trained_names(self._model)

    def _refuse_changed(self, tensors: Sequence[Tensor]) -> None:
        for entry, tensor in zip(self.entries, tensors, strict=True):
            if tensor.shape != entry.shape or tensor.dtype != entry.dtype:
                raise ValueError(
                    f"the tensor {entry.names[0]!r} was {dtype_name(entry.dtype)} {entry.shape} and is now "
                    f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}; {_CHANGED}"
                )


def is_finite(tensor: Tensor) -> bool:
    """Return whether a floating or complex tensor is finite, in one pass and without large temporaries.

    If the L2 norm is finite, all values are finite. Otherwise, the norm may have overflowed, so the minimum and the
    maximum are tested. Both are NaN if any value is NaN. With one thread, the norm of 64 MiB of float32 took 6.3 ms,
    and the minimum and maximum together took 8.8 ms.
    """
    real = _as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    if real.itemsize >= 2:
        return real.numel() == 0 or _bounds_are_finite(real)
    pieces = torch.split(real.reshape(-1), _PIECE_COUNT)
    return all(_bounds_are_finite(piece.float()) for piece in pieces if piece.numel())


def _bounds_are_finite(tensor: Tensor) -> bool:
    if math.isfinite(torch.linalg.vector_norm(tensor).item()):
        return True
    low, high = torch.aminmax(tensor)
    return math.isfinite(low.item()) and math.isfinite(high.item())


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums of `dtype` values: at least float32 or complex64. Integer dtypes are unchanged."""
    if dtype.is_complex:
        return torch.promote_types(dtype, torch.complex64)
    if dtype.is_floating_point:
        return torch.float32 if dtype.itemsize < 4 else dtype
    return dtype


class SnapshotPool:
    """Reuses flat buffers for the layout of ``state``, so that snapshots need no new memory."""

    def __init__(self, state: FlatState, *, accumulate: bool = False) -> None:
        self._state = state
        self._accumulate = accumulate
        self._free: list[FlatBuffers] = []
        self._used: dict[int, FlatBuffers] = {}

    @property
    def in_use(self) -> int:
        """Number of buffers that are acquired and not yet released."""
        return len(self._used)

    def acquire(self) -> FlatBuffers:
        """Return buffers with undefined contents, which the caller owns until :meth:`release`."""
        buffers = self._free.pop() if self._free else self._state.new_buffers(accumulate=self._accumulate)
        self._used[id(buffers)] = buffers
        return buffers

    def release(self, buffers: FlatBuffers) -> None:
        """Return buffers from :meth:`acquire` to the pool. Raise ValueError if they were already released."""
        if self._used.pop(id(buffers), None) is None:
            raise ValueError(
                "flat buffers must be released once, to the pool that lent them; these were released before or belong "
                "to another pool"
            )
        self._free.append(buffers)


def _sample(tensor: Tensor) -> Tensor:
    """Return evenly spaced values of a tensor as float32, in memory order. A non-contiguous tensor is copied."""
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    if not tensor.is_contiguous():
        tensor = tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))
    values = tensor.reshape(-1)
    step = max(1, values.numel() // _SAMPLE_COUNT)
    return values[: step * _SAMPLE_COUNT : step].to(torch.float32)


def _mix(tensor: Tensor, average: Tensor, momentum: float) -> None:
    """Mix the average into an entry, in pieces along the entry's longest dimension, to keep temporaries small."""
    tensor, wide = tensor.detach(), accumulate_dtype(tensor.dtype)
    if tensor.is_complex():  # treated as pairs of real numbers, because only real numbers can be compared
        if tensor.is_conj():
            average = average.conj().resolve_conj()
        tensor, average, wide = _as_real(tensor), torch.view_as_real(average), wide.to_real()
    if tensor.ndim == 0:
        tensor, average = tensor.view(1), average.view(1)
    dim = max(range(tensor.ndim), key=lambda index: tensor.shape[index])
    size = tensor.shape[dim]
    step = max(1, _PIECE_COUNT * size // max(1, tensor.numel()))
    for start in range(0, size, step):
        own = tensor.narrow(dim, start, min(step, size - start))
        other = average.narrow(dim, start, min(step, size - start)).to(wide)
        before = own.to(device=other.device, dtype=wide)
        own.copy_(mixed(before, other, momentum))


def _as_real(tensor: Tensor) -> Tensor:
    """View a complex tensor's memory as pairs of real numbers, ignoring a pending conjugation."""
    return torch.view_as_real(tensor.conj() if tensor.is_conj() else tensor)


def _is_averaged(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
