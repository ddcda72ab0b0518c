"""Lays out a model's flat state in one block of memory, which other ranks read in chunks.

Each dtype has one aligned segment. The averaged dtypes are first, so that a rank can read only these as a prefix.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from asyncdist.tensors.flat_state import Entry, FlatBuffers

#: Alignment of segments in bytes: a cache line, and a multiple of every element size.
ALIGNMENT_NBYTES: Final = 64


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a chunk whose elements all have the same dtype.

    Attributes:
        first: Index of the piece's first element in the flat tensor of this dtype.
        offset: Offset of the piece in the chunk, in bytes.
        averaged: Whether the elements are averaged instead of copied from the best rank.
    """

    dtype: torch.dtype
    first: int
    count: int
    offset: int
    averaged: bool

    def of_chunk(self, chunk: torch.Tensor) -> torch.Tensor:
        """Return the piece as a view of a chunk (1-D uint8), in the piece's dtype."""
        return chunk[self.offset : self.offset + self.count * self.dtype.itemsize].view(self.dtype)

    def of_flat(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the piece as a view of the flat tensor of its dtype."""
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
    """The layout of a model's flat state in one block of memory, with one segment per dtype.

    Attributes:
        nbytes: Size of the block in bytes, including the padding between segments.
        averaged_nbytes: Size in bytes of the prefix that contains all averaged entries.
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

    @torch.inference_mode(False)  # otherwise, the views would belong to the caller's inference mode
    def buffers(self, memory: torch.Tensor) -> FlatBuffers:
        """Return flat buffers that are views of ``memory``, an aligned 1-D uint8 tensor of ``nbytes`` elements."""
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
        """Yield the pieces between two byte offsets. Each offset is a multiple of ``ALIGNMENT_NBYTES`` or the end."""
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
