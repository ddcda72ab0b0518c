"""Lays out a model's flat state in one block of memory, which other ranks read in chunks.

Each dtype has one aligned segment. The averaged dtypes come first, so a rank that needs only these reads a prefix.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from asyncdist.tensors.byte_views import dtype_name
from asyncdist.tensors.flat_state import Entry, FlatBuffers

#: Alignment of segments in bytes: the size of a cache line, which is a multiple of every element size.
ALIGNMENT_NBYTES: Final = 64


@dataclass(frozen=True, slots=True)
class Piece:
    """Describes a part of a chunk, or of the whole block, whose elements all have the same dtype.

    Attributes:
        first: Index of the piece's first element in the flat tensor of this dtype.
        offset: Offset of the piece in the chunk, in bytes.
        averaged: Whether the elements are averaged (and not copied from the best rank).
    """

    dtype: torch.dtype
    first: int
    count: int
    offset: int
    averaged: bool

    @property
    def end(self) -> int:
        """Offset of the end of the piece in the chunk, in bytes."""
        return self.offset + self.count * self.dtype.itemsize

    def of_chunk(self, chunk: torch.Tensor) -> torch.Tensor:
        """Return a view, in the piece's dtype, of the piece in a chunk (1-D uint8)."""
        return chunk[self.offset : self.end].view(self.dtype)

    def of_flat(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a view of the piece in the flat tensor of its dtype."""
        return flat[self.first : self.first + self.count]


class Packing:
    """Describes the layout of a model's flat state in one block of memory, with one segment per dtype.

    Attributes:
        nbytes: Size of the block in bytes, including the padding between segments.
        averaged_nbytes: Size in bytes of the prefix that contains all averaged entries.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries = tuple(entries)
        sizes: dict[tuple[bool, str], tuple[torch.dtype, int]] = {}
        for entry in self._entries:
            key = not entry.averaged, dtype_name(entry.dtype)
            size = sizes[key][1] if key in sizes else 0
            sizes[key] = entry.dtype, max(size, entry.offset + math.prod(entry.shape))
        self._segments: list[Piece] = []
        self.nbytes = self.averaged_nbytes = 0
        for is_exact, name in sorted(sizes):
            dtype, size = sizes[is_exact, name]
            start = -(-self.nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES
            self._segments.append(Piece(dtype, 0, size, start, averaged=not is_exact))
            self.nbytes = self._segments[-1].end
            if not is_exact:
                self.averaged_nbytes = self.nbytes

    @torch.inference_mode(False)  # otherwise, the views would belong to the caller's inference mode
    def buffers(self, memory: torch.Tensor) -> FlatBuffers:
        """Return flat buffers that are views of ``memory``, an aligned 1-D uint8 tensor of ``nbytes`` elements."""
        segments = sorted(self._segments, key=lambda segment: dtype_name(segment.dtype))
        return FlatBuffers.of(self._entries, {segment.dtype: segment.of_chunk(memory) for segment in segments})

    def pieces(self, start: int, end: int) -> Iterator[Piece]:
        """Yield the pieces between two byte offsets, each of which is a multiple of ``ALIGNMENT_NBYTES`` or the end."""
        for segment in self._segments:
            first, last = max(start, segment.offset), min(end, segment.end)
            if first < last:
                itemsize = segment.dtype.itemsize
                index, count = (first - segment.offset) // itemsize, (last - first) // itemsize
                yield Piece(segment.dtype, index, count, first - start, segment.averaged)
