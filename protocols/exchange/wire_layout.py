"""Divides a fragment of a model into vectors and slices, and encodes a slice as one message.

A fragment is a part of the model: some of its entries. Its values are kept as flat vectors, one for each role and
dtype. The roles are:

- ``"stepped"``: parameters, in float32 or float64. They are encoded with the codec.
- ``"averaged"``: floating buffers, such as BatchNorm's statistics, and optimizer states that are averaged with the
  weights. They are never encoded with a lossy codec.
- ``"copied"``: integer and bool entries, as bytes. Their mean is the value of the first donor.

Each vector is cut into the same number of slices. A slice of the fragment consists of the slices of all vectors, and is
encoded as one uint8 tensor, a blob. Sums are elementwise, so the slices can be averaged on different ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import torch
from torch import Tensor

from asyncdist.tensors.byte_views import flat_bytes
from asyncdist.tensors.codecs import Codec, find_codec
from asyncdist.tensors.flat_state import Entry, accumulate_dtype
from asyncdist.tensors.means import WeightedMean

Role: TypeAlias = Literal["stepped", "averaged", "copied"]

#: Vectors begin at multiples of this number of bytes in a blob, so that they can be viewed with their own dtype.
_ALIGNMENT_NBYTES: Final = 16
_EXACT: Final = find_codec("float32")


@dataclass(frozen=True, slots=True)
class Vector:
    """A flat vector that contains all entries of a fragment with one role and one dtype.

    Attributes:
        dtype: Dtype of the values: float32, float64 or, for copied entries, uint8.
        places: For each entry, its index in the model's entries, and its first and last element in the vector.
        bounds: First elements of the slices, and the number of elements.
        codec: Codec of the slices; None if they are sent unchanged.
    """

    role: Role
    dtype: torch.dtype
    places: tuple[tuple[int, int, int], ...]
    bounds: tuple[int, ...]
    codec: Codec | None

    @property
    def count(self) -> int:
        """Number of elements."""
        return self.bounds[-1]

    def slice_of(self, flat: Tensor, number: int) -> Tensor:
        """Return slice ``number`` of a flat tensor with the vector's elements."""
        return flat[self.bounds[number] : self.bounds[number + 1]]

    def nbytes(self, number: int) -> int:
        """Return the encoded size of slice ``number`` in bytes."""
        count = self.bounds[number + 1] - self.bounds[number]
        return count * self.dtype.itemsize if self.codec is None else self.codec.nbytes(count)

    def raw(self, part: Tensor) -> Tensor:
        """View an unencoded slice in a blob with the vector's dtype."""
        return part.view(self.dtype)

    def decoded(self, part: Tensor, number: int) -> Tensor:
        """Return the values of an encoded slice, as a view of it if it is not encoded."""
        if self.codec is None:
            return self.raw(part)
        values = torch.empty(self.bounds[number + 1] - self.bounds[number], dtype=self.dtype, device="cpu")
        self.codec.decode(part, values)
        return values


class WireLayout:
    """Vectors and slices of one fragment, equal on all members.

    Args:
        entries: All entries of the model.
        chosen: Indices of the fragment's entries.
        parameters: Names of the model's parameters; all other floating entries have the role ``"averaged"``.
        slice_count: Number of slices.
        codec: Codec of the stepped float32 vector.
    """

    def __init__(
        self, entries: Sequence[Entry], chosen: Sequence[int], parameters: set[str], slice_count: int, codec: Codec
    ) -> None:
        self.slice_count = slice_count
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
        self.stepped = tuple(vector for vector in self.vectors if vector.role == "stepped")
        self._places = [self._places_of(number) for number in range(slice_count)]

    def _vector(self, role: Role, dtype: torch.dtype, counts: Sequence[tuple[int, int]]) -> Vector:
        places, end = [], 0
        for index, count in counts:
            places.append((index, end, end + count))
            end += count
            if role == "copied":  # each entry begins where it can be viewed with its own dtype
                end = -(-end // _ALIGNMENT_NBYTES) * _ALIGNMENT_NBYTES
        is_coded = role == "stepped" and dtype == torch.float32 and self.codec is not _EXACT
        block = self.codec.block if is_coded else 1
        inner = [end * number // self.slice_count // block * block for number in range(self.slice_count)]
        bounds = (*([0] * self.slice_count if role == "copied" else inner), end)
        if role == "copied":  # only the first donor's values count, so they need not be divided
            bounds = (0, *[end] * self.slice_count)
        return Vector(role, dtype, tuple(places), bounds, self.codec if is_coded else None)

    def _places_of(self, number: int) -> list[tuple[int, int]]:
        places, end = [], 0
        for vector in self.vectors:
            nbytes = vector.nbytes(number)
            places.append((end, end + nbytes))
            end += -(-nbytes // _ALIGNMENT_NBYTES) * _ALIGNMENT_NBYTES
        return places

    def blob_nbytes(self, number: int) -> int:
        """Return the size in bytes of the blob of slice ``number``."""
        return self._places[number][-1][1]

    @property
    def nbytes(self) -> int:
        """Total size in bytes of all blobs of one contribution."""
        return sum(map(self.blob_nbytes, range(self.slice_count)))

    def parts(self, blob: Tensor, number: int) -> list[Tensor]:
        """Return the part of a blob that contains each vector's slice."""
        return [blob[first:end] for first, end in self._places[number]]

    @torch.inference_mode(False)  # the tensors outlive the caller's inference mode
    def new_blobs(self) -> list[Tensor]:
        """Allocate the uninitialised blobs of all slices."""
        return [
            torch.empty(self.blob_nbytes(number), dtype=torch.uint8, device="cpu") for number in range(self.slice_count)
        ]

    @torch.inference_mode(False)
    def new_flats(self, vectors: Sequence[Vector] | None = None) -> list[Tensor]:
        """Allocate a zero-filled flat tensor for each vector."""
        return [torch.zeros(vector.count, dtype=vector.dtype, device="cpu") for vector in vectors or self.vectors]

    def encode(self, flats: Sequence[Tensor], blobs: Sequence[Tensor]) -> None:
        """Write the values of all vectors into blobs."""
        for number, blob in enumerate(blobs):
            for vector, flat, part in zip(self.vectors, flats, self.parts(blob, number), strict=True):
                values = vector.slice_of(flat, number)
                if vector.codec is None:
                    vector.raw(part).copy_(values)
                else:
                    vector.codec.encode(values, part)

    def decode(self, blobs: Sequence[Tensor], flats: Sequence[Tensor]) -> None:
        """Write the values in blobs into the flat tensors of all vectors."""
        for number, blob in enumerate(blobs):
            for vector, flat, part in zip(self.vectors, flats, self.parts(blob, number), strict=True):
                into = vector.slice_of(flat, number)
                if vector.codec is None:
                    into.copy_(vector.raw(part))
                else:
                    vector.codec.decode(part, into)

    def average(self, number: int, blobs: Sequence[Tensor], weights: Sequence[float], into: Tensor) -> None:
        """Write the encoded weighted mean of the donors' blobs of one slice, added up in the order of the donors.

        Args:
            blobs: Blob of each donor.
            weights: Weight of each donor, above 0.
        """
        given = [self.parts(blob, number) for blob in blobs]
        for place, (vector, part) in enumerate(zip(self.vectors, self.parts(into, number), strict=True)):
            if vector.role == "copied":
                part.copy_(given[0][place])
                continue
            count = vector.bounds[number + 1] - vector.bounds[number]
            result = vector.raw(part) if vector.codec is None else torch.empty(count, dtype=vector.dtype, device="cpu")
            mean = WeightedMean(len(blobs))
            for parts, weight in zip(given, weights, strict=True):
                mean.begin(weight)
                mean.add(result, vector.decoded(parts[place], number))
            if vector.codec is not None:
                vector.codec.encode(result, part)


def gather(vector: Vector, tensors: Sequence[Tensor], flat: Tensor) -> None:
    """Copy the model's tensors into a flat tensor; a bfloat16 value becomes a float32."""
    for index, first, end in vector.places:
        flat[first:end].copy_(_values_of(vector, tensors[index]))


def scatter(vector: Vector, flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy a flat tensor into the model's tensors, rounding each value once to the tensor's dtype."""
    for index, first, end in vector.places:
        tensor = tensors[index]
        values = flat[first:end]
        if vector.role == "copied":
            values = values.view(tensor.dtype)
        elif tensor.is_complex():
            values = torch.view_as_complex(values.view(-1, 2))
        tensor.copy_(values.view(tensor.shape))


def _values_of(vector: Vector, tensor: Tensor) -> Tensor:
    if vector.role == "copied":
        return flat_bytes(tensor.detach().cpu().contiguous())
    if tensor.is_complex():
        return torch.view_as_real(tensor.detach().resolve_conj()).reshape(-1)
    return tensor.detach().reshape(-1)
