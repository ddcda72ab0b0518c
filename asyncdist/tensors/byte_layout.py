"""Lays a flat state of any dtypes out in one stretch of memory, which readers read in chunks.

One segment per dtype, each aligned, those that are averaged first: so a reader that wants only these reads a prefix.
The layout follows from the entries alone, as that of :mod:`asyncdist.tensors.flat_state` does, and is equal where
fingerprints are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from asyncdist.tensors.flat_state import Entry, FlatBuffers

#: Of segments, in bytes: a cache line, and a multiple of every element's size.
ALIGNMENT_NBYTES: Final = 64


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of one chunk that has one dtype.

    Attributes:
        dtype: the model's.
        first: the piece's first element, counted in the flat tensor of that dtype.
        count: its elements.
        offset: where it begins in the chunk, in bytes.
        averaged: whether its values are averaged, or copied from the best donor.
    """

    dtype: torch.dtype
    first: int
    count: int
    offset: int
    averaged: bool

    def of_chunk(self, chunk: torch.Tensor) -> torch.Tensor:
        """Return the piece in a chunk of bytes (1-D uint8), as elements."""
        return chunk[self.offset : self.offset + self.count * self.dtype.itemsize].view(self.dtype)

    def of_flat(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the same elements of the flat tensor."""
        return flat[self.first : self.first + self.count]


@dataclass(frozen=True, slots=True)
class _Segment:
    dtype: torch.dtype
    start: int
    count: int
    averaged: bool

    @property
    def end(self) -> int:
        return self.start + self.count * self.dtype.itemsize


class Packing:
    """Knows where each dtype lies in the memory.

    Args:
        entries: of a :class:`asyncdist.tensors.flat_state.FlatState`.

    Attributes:
        nbytes: of the whole, padding between the segments included.
        averaged_nbytes: of the prefix that holds everything that is averaged.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries = tuple(entries)
        counts: dict[tuple[bool, str], tuple[torch.dtype, int]] = {}
        for entry in self._entries:
            key = (not entry.averaged, str(entry.dtype))
            count = counts.get(key, (entry.dtype, 0))[1]
            counts[key] = (entry.dtype, max(count, entry.offset + math.prod(entry.shape)))
        segments: list[_Segment] = []
        end = 0
        for key, (dtype, count) in sorted(counts.items(), key=lambda item: item[0]):
            start = -(-end // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES
            segments.append(_Segment(dtype, start, count, averaged=not key[0]))
            end = segments[-1].end
        self._segments = tuple(segments)
        self.nbytes = end
        self.averaged_nbytes = max((segment.end for segment in segments if segment.averaged), default=0)

    def buffers(self, memory: torch.Tensor) -> FlatBuffers:
        """Make flat buffers over ``memory`` itself.

        Args:
            memory: 1-D uint8 of at least ``nbytes`` elements, contiguous, aligned as torch aligns.
        """
        tensors = {
            segment.dtype: memory[segment.start : segment.end].view(segment.dtype)
            for segment in sorted(self._segments, key=lambda segment: str(segment.dtype))
        }
        views = tuple(
            tensors[entry.dtype][entry.offset : entry.offset + math.prod(entry.shape)].view(entry.shape)
            for entry in self._entries
        )
        return FlatBuffers(self._entries, tensors, views)

    def pieces(self, start: int, end: int) -> Iterator[Piece]:
        """Return the pieces from byte ``start`` to ``end``; both are multiples of ``ALIGNMENT_NBYTES`` or an end."""
        for segment in self._segments:
            first, last = max(start, segment.start), min(end, segment.end)
            if first < last:
                itemsize = segment.dtype.itemsize
                yield Piece(
                    segment.dtype,
                    (first - segment.start) // itemsize,
                    (last - first) // itemsize,
                    first - start,
                    segment.averaged,
                )
