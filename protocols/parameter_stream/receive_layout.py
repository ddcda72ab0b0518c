"""Chooses the memory in which chunks of other ranks' weights are received: an accumulator, or a ring of buffers.

If the accumulator has the dtype of the snapshots, the first donor's chunks are received directly into it. All other
chunks are received into the pages of the ring, where small chunks share a page.
"""

from __future__ import annotations

from typing import Final, NamedTuple
from weakref import WeakKeyDictionary

import torch

from asyncdist.messaging.streams import WINDOW_COUNT
from asyncdist.protocols.parameter_stream.messages import parts_of
from asyncdist.tensors.byte_views import byte_view, new_memory
from asyncdist.tensors.flat_state import FlatBuffers

#: Maximum number of concurrently requested snapshots. Each iteration of the event loop tests all their receives.
ASKED_COUNT_MAX: Final = 16
#: Maximum number of lists of one donor's chunks, with their memory, that a layout caches.
CACHED_COUNT_MAX: Final = 2 * ASKED_COUNT_MAX
#: Alignment of chunks in a page: the size of the widest element.
_ALIGNMENT_NBYTES: Final = 16


class ChunkRing:
    """Ring of ``WINDOW_COUNT`` receive buffers (pages) of ``chunk_nbytes`` each, allocated when they are first used."""

    def __init__(self, chunk_nbytes: int) -> None:
        self.chunk_nbytes = chunk_nbytes
        self._buffers: dict[int, torch.Tensor] = {}
        self._layouts: WeakKeyDictionary[FlatBuffers, ReceiveLayout] = WeakKeyDictionary()
        self._next = 0
        self._scratch: torch.Tensor | None = None

    def __reduce__(self) -> tuple[type[ChunkRing], tuple[int]]:
        """Copy and pickle the ring without its buffers, whose content is valid only while chunks are received."""
        return ChunkRing, (self.chunk_nbytes,)

    def layout_of(self, accumulator: FlatBuffers) -> ReceiveLayout:
        """Return the cached layout, which assigns memory to the chunks of streams into ``accumulator``."""
        found = self._layouts.get(accumulator)
        if found is None:
            found = self._layouts[accumulator] = ReceiveLayout(accumulator, self.chunk_nbytes)
        return found

    def take(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        """Return the ring's next buffer, as ``count`` elements of ``dtype``."""
        self._next += 1
        return self.page(self._next)[: count * dtype.itemsize].view(dtype)

    def page(self, number: int) -> torch.Tensor:
        """Return the buffer of a page as bytes. Pages whose numbers differ by ``WINDOW_COUNT`` share a buffer."""
        place = number % WINDOW_COUNT
        found = self._buffers.get(place)
        if found is None:
            found = new_memory(self.chunk_nbytes)
            self._buffers[place] = found
        return found

    def scratch(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        """Return a buffer of ``count`` elements of ``dtype``, whose memory the next call reuses."""
        nbytes = count * dtype.itemsize
        if self._scratch is None or self._scratch.nbytes < nbytes:
            self._scratch = new_memory(nbytes)
        return self._scratch[:nbytes].view(dtype)

    @property
    def nbytes(self) -> int:
        """Number of bytes allocated for pages and the scratch buffer."""
        scratch = [] if self._scratch is None else [self._scratch]
        return sum(buffer.nbytes for buffer in (*self._buffers.values(), *scratch))


class SnapshotChunk(NamedTuple):
    """A chunk of a model's weights, which every donor sends.

    Attributes:
        into: Elements of the accumulator to which the chunk is added or copied.
        view: Memory of ``into`` if the chunk can be received directly into it; otherwise None.
    """

    into: torch.Tensor
    dtype: torch.dtype
    nbytes: int
    averaged: bool
    view: memoryview | None
    number: int
    first: int


class ReceivedChunk(NamedTuple):
    """One received chunk of one donor's weights, with the memory in which it is received.

    ``memory`` is None if the memory is the accumulator itself.
    """

    chunk: SnapshotChunk
    page: int
    memory: torch.Tensor | None


class _DonorChunks(NamedTuple):
    """One donor's chunks, their total size, and the page and offset at which the next donor's chunks begin."""

    chunks: list[ReceivedChunk]
    targets: list[memoryview]
    nbytes: int
    page: int
    offset: int


class ReceiveLayout:
    """Assigns memory to received chunks: the tensors of one accumulator, or the pages of a ring of buffers."""

    def __init__(self, accumulator: FlatBuffers, chunk_nbytes: int) -> None:
        self.chunks = _snapshot_chunks(accumulator, chunk_nbytes)
        self._cached: dict[tuple[int, int, bool, bool], _DonorChunks] = {}

    def donor_chunks(self, ring: ChunkRing, page: int, offset: int, *, first: bool, exact: bool) -> _DonorChunks:
        """Return the chunks of one donor, with the memory in which they are received.

        Args:
            page: Page in which the previous donor's chunks end. Pages limit the number of outstanding receives, so
                chunks received into the accumulator count towards a page as well.
            first: Whether this is the first donor. Its chunks are received directly into the accumulator if the
                accumulator has their dtype.
            exact: Whether the donor also sends the tensors that are not averaged. They are always received directly.
        """
        key = page, offset, first, exact
        found = self._cached.get(key)
        if found is None:
            found = self._new_donor_chunks(ring, *key)
            if found.page < WINDOW_COUNT and len(self._cached) < CACHED_COUNT_MAX:
                self._cached[key] = found
        return found

    def _new_donor_chunks(self, ring: ChunkRing, page: int, offset: int, first: bool, exact: bool) -> _DonorChunks:
        chunks, targets, total_nbytes = [], [], 0
        for chunk in self.chunks:
            if not (chunk.averaged or exact):
                continue
            nbytes = chunk.nbytes
            if offset + nbytes > ring.chunk_nbytes:
                page, offset = page + 1, 0
            memory, target = None, chunk.view
            if target is None or (chunk.averaged and not first):
                place = ring.page(page)[offset : offset + nbytes]
                memory, target = place.view(chunk.dtype), byte_view(place)
            chunks.append(ReceivedChunk(chunk, page, memory))
            targets.append(target)
            total_nbytes += nbytes
            offset += -(-nbytes // _ALIGNMENT_NBYTES) * _ALIGNMENT_NBYTES
        return _DonorChunks(chunks, targets, total_nbytes, page, offset)


def _snapshot_chunks(accumulator: FlatBuffers, chunk_nbytes: int) -> list[SnapshotChunk]:
    chunks = []
    averaged = accumulator.averaged().keys()
    for number, (dtype, tensor) in enumerate(parts_of(accumulator, exact=True)):
        count = chunk_nbytes // dtype.itemsize
        for place, into in enumerate(torch.split(tensor, count) if tensor.numel() else ()):
            view = byte_view(into) if into.dtype == dtype else None
            nbytes = into.numel() * dtype.itemsize
            chunks.append(SnapshotChunk(into, dtype, nbytes, dtype in averaged, view, number, place * count))
    return chunks
