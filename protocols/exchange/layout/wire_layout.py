"""Divides a fragment of a model into vectors and slices, and averages encoded slices.

A fragment consists of some of the model's entries. Its values are stored as flat vectors, one for each role and dtype.
The roles are:

- ``"stepped"``: parameters, in float32 or float64. They are encoded with the codec.
- ``"averaged"``: floating buffers, such as BatchNorm's statistics, and optimizer states that are averaged with the
  weights. They are never encoded with a lossy codec.
- ``"copied"``: integer and bool entries, as bytes. Instead of a mean, members take the first donor's values.

Each vector is cut into slices, which are sent and averaged separately. Sums are elementwise, so the slices can be
averaged on different ranks. The means have a separate codec if the contributions' codec would lose too much precision
(:func:`asyncdist.tensors.codecs.codec_of_means`).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from asyncdist.tensors.byte_views import new_memory
from asyncdist.tensors.codecs import Codec, codec_of_means, find_codec
from asyncdist.tensors.compiled_names import plain_name
from asyncdist.tensors.flat_state import Entry, accumulate_dtype
from asyncdist.tensors.means import mean_into, weighted_mean_into
from asyncdist.tensors.optimizers.weights import STATE_PREFIX

#: Function that writes the weighted mean of flat tensors into its first argument.
MeanInto: TypeAlias = Callable[[Tensor, Sequence[Tensor], Sequence[float]], None]
Role: TypeAlias = Literal["stepped", "averaged", "copied"]

#: Copied entries, and vectors in a block of memory, start at multiples of this number of bytes, so that they can be
#: viewed with their own dtype.
_ALIGNMENT_NBYTES: Final = 16
_PIECE_COUNT: Final = 1 << 16  # number of elements averaged at a time: 256 KiB of float32 stay in a core's cache
_EXACT: Final = find_codec("float32")


class Scratch:
    """Keeps memory for decoded values from one round to the next.

    The kernel clears and maps each page of new memory. For 64 MiB, this takes as long as encoding the values as int8.
    """

    def __init__(self) -> None:
        self._memory: dict[torch.dtype, Tensor] = {}

    @torch.inference_mode(False)  # the memory is used after the caller's inference mode has ended
    def values(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return memory for ``count`` values, with undefined contents. It is reused by the next call."""
        memory = self._memory.get(dtype)
        if memory is None or len(memory) < count:
            memory = self._memory[dtype] = torch.empty(count, dtype=dtype, device="cpu")
        return memory[:count]


@dataclass(frozen=True, slots=True)
class Encoding:
    """Defines how the values of a vector are encoded.

    Attributes:
        codec: Codec of the values, or None if they are sent unchanged.
        width: Number of consecutive values for each element of the vector. Above 1 only without a codec.
    """

    dtype: torch.dtype
    codec: Codec | None
    width: int = 1

    def place_of(self, index: int) -> int:
        """Return the position of element ``index``, the first of a codec block, in the encoded vector."""
        return index * self.width if self.codec is None else self.codec.nbytes(index)

    @property
    def encoded_dtype(self) -> torch.dtype:
        """Dtype of the encoded vector: uint8, or the vector's own dtype without a codec."""
        return self.dtype if self.codec is None else torch.uint8

    def nbytes(self, first: int, last: int) -> int:
        """Return the encoded size in bytes of elements ``first`` (the first of a block) to ``last``."""
        return (self.place_of(last) - self.place_of(first)) * self.encoded_dtype.itemsize

    def decode(self, encoded: Tensor, values: Tensor) -> None:
        """Write the values of an encoded vector into ``values``."""
        if self.codec is None:
            values.copy_(encoded)
        else:
            self.codec.decode(encoded, values)


@dataclass(frozen=True, slots=True)
class Vector:
    """Defines a flat vector that contains all entries of a fragment with one role and one dtype.

    Attributes:
        dtype: Dtype of the values: float32, float64 or, for copied entries, uint8.
        places: For each entry, its index in the model's entries, and its first and end element in the vector.
        bounds: First element of each slice, followed by the number of elements.
        sent: Encoding of the contributions.
        mean: Encoding of the mean.
    """

    role: Role
    dtype: torch.dtype
    places: tuple[tuple[int, int, int], ...]
    bounds: tuple[int, ...]
    sent: Encoding
    mean: Encoding

    @property
    def count(self) -> int:
        """Number of elements."""
        return self.bounds[-1]

    @property
    def codec(self) -> Codec | None:
        """Codec of the contributions, or None if they are sent unchanged."""
        return self.sent.codec

    @property
    def has_gaps(self) -> bool:
        """True if there are unused elements between entries, so that each entry starts at a block of the codec."""
        return sum(end - first for _, first, end in self.places) < self.count

    @torch.inference_mode(False)  # the tensor is used after the caller's inference mode has ended
    def new_flat(self) -> Tensor:
        """Allocate a zero-filled flat tensor for the vector's values."""
        return torch.zeros(self.count, dtype=self.dtype, device="cpu")

    @torch.inference_mode(False)
    def values_of(self, encoded: Tensor, scratch: Scratch) -> Tensor:
        """Return memory for a contribution's values: ``encoded`` without a codec, otherwise memory of ``scratch``.

        The values in gaps are 0.
        """
        if self.sent.codec is None:
            return encoded
        values = scratch.values(self.count, self.dtype)
        return values.zero_() if self.has_gaps else values

    @torch.inference_mode(False)
    def decoded(self, encoded: Tensor, *, of_mean: bool = False) -> Tensor:
        """Return the values of an encoded vector. Without a codec, this is the encoded vector itself."""
        return self.decoded_parts([encoded], Scratch(), of_mean=of_mean)[0]

    @torch.inference_mode(False)
    def decoded_parts(self, encoded: Sequence[Tensor], scratch: Scratch, *, of_mean: bool = True) -> list[Tensor]:
        """Return the values of the parts of an encoded vector: its slices, or the whole vector as one part.

        With a codec, the values are in the memory of ``scratch``.
        """
        encoding = _encoding(self, of_mean)
        if encoding.codec is None:
            return list(encoded)
        values = scratch.values(self.count, self.dtype)
        cuts = list(pairwise(dict.fromkeys(self.bounds))) if len(encoded) != 1 else [(0, self.count)]
        parts = [values[first:last] for first, last in cuts]
        for each, part in zip(encoded, parts, strict=True):
            encoding.decode(each, part)
        return parts


class Piece(NamedTuple):
    """Defines a part of a slice that is averaged at once, as byte ranges of encoded contributions and means."""

    first: int
    end: int
    mean_first: int
    mean_end: int


@dataclass(frozen=True, slots=True)
class Slice:
    """Defines one slice of one vector. A slice is sent and averaged as a unit.

    Attributes:
        number: Number of the slice among all slices of the fragment.
        owner: Number that selects the rank that averages the slice. Equal numbers select the same rank.
        first, last: First and end element of the slice in the vector.
        cuts: Elements at which the slice is divided into pieces. Empty unless some pieces are whole tensors.
        whole: Numbers of the pieces that are whole tensors.
    """

    number: int
    vector: int
    owner: int
    first: int
    last: int
    cuts: tuple[int, ...] = ()
    whole: frozenset[int] = frozenset()


def average_into(into: Tensor, parts: Sequence[Tensor], weights: Sequence[float]) -> None:
    """Write the weighted mean of flat tensors into ``into``. The tensors are added in the given order."""
    if len(parts) > 1 and all(weight == 1.0 for weight in weights):
        mean_into(into, parts)
    else:
        weighted_mean_into(into, parts, weights)


class WireLayout:
    """Divides one model fragment into vectors and slices, in the same way on all members.

    Args:
        chosen: Indices of the fragment's entries in ``entries``.
        parameters: Names of the model's parameters, except those with infinities, such as frozen masks, because
            differences of infinities are NaN. All other floating entries have the role ``"averaged"``.
        owner_count: Number of ranks among which each vector is divided.
        codec: Codec of the float32 parameters.
        divisible: Names of the parameters that may be cut into pieces, or None if all may be. Each other parameter is
            one piece, so that it is combined as a whole.
        width: Number of values in the mean for each element of a parameter vector. Usually 1; the number of donors if
            the "mean" consists of all donors' values.

    Attributes:
        slices: All non-empty slices.
        is_cut: Whether all vectors may be cut anywhere. Otherwise some tensors are whole.
        nbytes: Total size in bytes of all encoded vectors of a contribution.
        mean_nbytes: Total size in bytes of all encoded vectors of a mean.
        unencoded_nbytes: Total size in bytes of all vectors without encoding.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        chosen: Sequence[int],
        parameters: set[str],
        owner_count: int,
        codec: Codec,
        divisible: Set[str] | None = None,
        width: int = 1,
    ) -> None:
        self._width = width
        self._source = entries, tuple(chosen), parameters
        self._divisible = None if divisible is None else _indices(entries, divisible)
        self._owner_count = owner_count
        self.codec = codec
        grouped: dict[tuple[Role, torch.dtype], list[tuple[int, int]]] = {}
        for index in chosen:
            entry = entries[index]
            count = math.prod(entry.shape)
            if not entry.averaged:
                grouped.setdefault(("copied", torch.uint8), []).append((index, count * entry.dtype.itemsize))
                continue
            wide = accumulate_dtype(entry.dtype)
            if wide.is_complex:
                wide, count = wide.to_real(), count * 2
            role: Role = "stepped" if not parameters.isdisjoint(entry.names) else "averaged"
            grouped.setdefault((role, wide), []).append((index, count))
        self.vectors = tuple(self._vector(*key, grouped[key]) for key in sorted(grouped, key=str, reverse=True))
        self.is_cut = divisible is None
        self.stepped = tuple(vector for vector in self.vectors if vector.role == "stepped")
        self.stepped_entries = frozenset(index for vector in self.stepped for index, *_ in vector.places)
        self.slices = tuple(self._slices())
        self.nbytes = sum(vector.sent.nbytes(0, vector.count) for vector in self.vectors)
        self.mean_nbytes = sum(vector.mean.nbytes(0, vector.count) for vector in self.vectors)
        self.unencoded_nbytes = sum(vector.count * vector.dtype.itemsize for vector in self.vectors)

    def checksum_of_names(self) -> int:
        """Return a checksum of the entries' names, in the order in which the vectors contain their values.

        The names include neither the wrappers of `torch.compile` nor the ranks of a sharded replica.
        """
        names = [self._source[0][index].names[0] for vector in self.vectors for index, *_ in vector.places]
        return zlib.crc32("\n".join(_plain(name.rpartition(": ")[2]) for name in names).encode())

    def check_names(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if the flat tensors in ``state`` belong to other entries, or have them in another order.

        States saved by earlier versions have no checksum of the names (``"names"``), and are not checked.
        """
        own = self.checksum_of_names()
        if state.get("names", own) != own:
            raise ValueError(
                "the state must be of tensors with the same names in the same order as in this policy; use the model "
                "and, with fragments, the fragment_pattern of the run that saved it"
            )

    def exact(self) -> WireLayout:
        """Return a layout of the same entries without a codec."""
        return self if self.codec is _EXACT else WireLayout(*self._source, self._owner_count, _EXACT)

    def _vector(self, role: Role, dtype: torch.dtype, counts: Sequence[tuple[int, int]]) -> Vector:
        is_coded = role == "stepped" and dtype == torch.float32 and self.codec is not _EXACT
        block = self.codec.block if is_coded else 1
        is_whole = role == "stepped" and self._divisible is not None
        # A copied entry starts at an index at which it can be viewed with its own dtype, and a whole tensor at an index
        # at which a slice may start.
        alignment = _ALIGNMENT_NBYTES if role == "copied" else block if is_whole else 1
        places, end = [], 0
        for index, count in counts:
            places.append((index, end, end + count))
            end = _aligned(end + count, alignment)
        codec = self.codec if is_coded else None
        of_mean = None if codec is None else codec_of_means(codec, self._owner_count, end)
        of_mean = None if of_mean is _EXACT else of_mean
        total = self._owner_count if role != "copied" else 1  # copied from the first donor, so not divided among owners
        bounds = (*(end * number // total // block * block for number in range(total)), end)
        if is_whole:
            bounds = _moved(bounds, self._cuts(places, end, block)[0])
        mean = Encoding(dtype, of_mean, self._width if role == "stepped" else 1)
        return Vector(role, dtype, tuple(places), bounds, Encoding(dtype, codec), mean)

    def _slices(self) -> Iterator[Slice]:
        number = 0
        for place, vector in enumerate(self.vectors):
            for owner, (first, last) in enumerate(pairwise(vector.bounds)):
                if first < last:
                    yield Slice(number, place, owner, first, last, *self._pieces_of(vector, first, last))
                    number += 1

    def _pieces_of(self, vector: Vector, first: int, last: int) -> tuple[tuple[int, ...], frozenset[int]]:
        """Return a slice's cuts, and the numbers of the pieces that are whole tensors."""
        if vector.role != "stepped" or self._divisible is None:
            return (), frozenset()
        cuts, whole = self._cuts(vector.places, vector.count, 1 if vector.codec is None else vector.codec.block)
        inside = tuple(cut for cut in cuts if first <= cut <= last)
        return inside, frozenset(number for number, cut in enumerate(inside[:-1]) if cut in whole)

    def _cuts(self, places: Sequence[tuple[int, int, int]], end: int, block: int) -> tuple[list[int], set[int]]:
        """Return the elements at which a vector may be cut, and the first elements of its whole tensors."""
        assert self._divisible is not None, "only a layout with whole tensors has cuts"
        cuts, whole = list[int](), set[int]()
        step = max(1, _PIECE_COUNT // block) * block
        ends = [first for _, first, _ in places[1:]] + [end]
        for (index, first, _), following in zip(places, ends, strict=True):
            if first == following:
                continue
            cuts += range(first, following, step) if index in self._divisible else [first]
            if index not in self._divisible:
                whole.add(first)
        return [*cuts, end], whole

    def memory_nbytes(self, *, of_mean: bool = False) -> int:
        """Return the size in bytes of the memory for all encoded vectors, including gaps between them."""
        return sum(_aligned(_encoding(vector, of_mean).nbytes(0, vector.count)) for vector in self.vectors)

    @torch.inference_mode(False)  # otherwise views might be inference tensors, as in the caller's inference mode
    def encoded_in(self, memory: Tensor, *, of_mean: bool = False) -> list[Tensor]:
        """Return a view of ``memory``, which has at least :meth:`memory_nbytes` bytes, for each encoded vector.

        The gaps between entries and between vectors are set to zero, because they are sent with the data. Otherwise the
        digest of a simulation would depend on what the memory contained before.
        """
        views, end = [], 0
        for vector in self.vectors:
            encoding = _encoding(vector, of_mean)
            nbytes = encoding.nbytes(0, vector.count)
            view = memory[end : end + nbytes].view(encoding.encoded_dtype)
            if vector.role == "copied":  # gaps of other vectors are encoded as zeros: see Vector.values_of
                starts = [first for _, first, _ in vector.places[1:]] + [vector.count]
                for (_, _, gap), start in zip(vector.places, starts, strict=True):
                    view[gap:start].zero_()
            memory[end + nbytes : end + _aligned(nbytes)].zero_()
            views.append(view)
            end += _aligned(nbytes)
        return views

    def new_encoded(self, *, of_mean: bool = False) -> list[Tensor]:
        """Allocate memory for each encoded vector. Only the gaps between values are initialised."""
        return self.encoded_in(new_memory(self.memory_nbytes(of_mean=of_mean)), of_mean=of_mean)

    @torch.inference_mode(False)
    def part(self, encoded: Sequence[Tensor], each: Slice, *, of_mean: bool = False) -> Tensor:
        """Return a slice of encoded vectors as a uint8 tensor."""
        encoding = _encoding(self.vectors[each.vector], of_mean)
        return encoded[each.vector][encoding.place_of(each.first) : encoding.place_of(each.last)].view(torch.uint8)

    def divided(self, encoded: Sequence[Tensor], read_in_place: Mapping[Slice, Tensor]) -> list[list[Tensor]]:
        """Return the parts of an encoded mean, by vector: slices of parameters, and all other vectors as a whole.

        Args:
            encoded: Encoded vectors.
            read_in_place: Slices of stepped vectors, as uint8, to use instead of those in ``encoded``.
        """
        parts = [[] if vector.role == "stepped" else [each] for vector, each in zip(self.vectors, encoded, strict=True)]
        for each in self.slices:
            vector = self.vectors[each.vector]
            if vector.role == "stepped":
                part = read_in_place[each] if each in read_in_place else self.part(encoded, each, of_mean=True)
                parts[each.vector].append(part.view(vector.mean.encoded_dtype))
        return parts

    def nbytes_of(self, each: Slice, *, of_mean: bool = False) -> int:
        """Return the encoded size of a slice in bytes."""
        return _encoding(self.vectors[each.vector], of_mean).nbytes(each.first, each.last)

    def pieces(self, each: Slice) -> list[Piece]:
        """Divide a slice into pieces that each fit into a core's cache."""
        vector, start = self.vectors[each.vector], each.first
        if vector.role == "copied":
            return [Piece(0, each.last - start, 0, each.last - start)]
        sent, mean = vector.sent, vector.mean
        return [
            Piece(sent.nbytes(start, a), sent.nbytes(start, b), mean.nbytes(start, a), mean.nbytes(start, b))
            for a, b in pairwise(each.cuts or [*range(start, each.last, _piece_count(vector)), each.last])
        ]

    def average(
        self,
        each: Slice,
        number: int,
        parts: Sequence[Tensor],
        weights: Sequence[float],
        into: Tensor,
        combine: MeanInto = average_into,
    ) -> None:
        """Write the encoded weighted mean of one piece of a slice. The donors are added in order.

        Args:
            number: Number of the piece in :meth:`pieces`.
            parts: Each donor's piece, as uint8.
            weights: Weight of each donor, above 0.
            into: Piece of the mean, as uint8.
            combine: Function that writes the weighted mean of flat tensors into its first argument.
        """
        vector = self.vectors[each.vector]
        if vector.role == "copied":
            into.copy_(parts[0])
            return
        if vector.codec is None:
            combine(into.view(vector.dtype), [part.view(vector.dtype) for part in parts], weights)
            return
        step = _piece_count(vector)
        count = min(step, each.last - each.first - number * step)
        if each.cuts:
            count = each.cuts[number + 1] - each.cuts[number]
        values = torch.empty(len(parts) + 1, count, dtype=vector.dtype, device="cpu")
        for part, row in zip(parts, values, strict=False):
            vector.sent.decode(part, row)
        if vector.mean.codec is None:
            combine(into.view(vector.dtype), list(values[:-1]), weights)
        else:
            combine(values[-1], list(values[:-1]), weights)
            vector.mean.codec.encode(values[-1], into)


def _encoding(vector: Vector, of_mean: bool) -> Encoding:
    return vector.mean if of_mean else vector.sent


def _piece_count(vector: Vector) -> int:
    """Return the number of elements in a piece, a multiple of the codec's block."""
    block = 1 if vector.codec is None else vector.codec.block
    return max(1, _PIECE_COUNT // block) * block


def _aligned(size: int, alignment: int = _ALIGNMENT_NBYTES) -> int:
    return -(-size // alignment) * alignment


def _indices(entries: Sequence[Entry], names: Set[str]) -> frozenset[int]:
    return frozenset(index for index, entry in enumerate(entries) if not names.isdisjoint(entry.names))


def _moved(bounds: Sequence[int], cuts: Sequence[int]) -> tuple[int, ...]:
    """Return the bounds of slices, each moved to the nearest element at which the vector may be cut."""
    inner = [min(cuts, key=lambda cut: (abs(cut - bound), cut)) for bound in bounds[1:-1]]
    return (0, *inner, bounds[-1]) if len(bounds) > 1 else tuple(bounds)


def _plain(name: str) -> str:
    """Return an entry's name without ``torch.compile``'s wrappers, even if it is a parameter's optimizer state."""
    parameter = name.removeprefix(STATE_PREFIX)
    return name.removesuffix(parameter) + plain_name(parameter)
