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
#: Maximum number of shares (lists of one donor's chunks and their memory) that a layout caches.
SHARE_COUNT_MAX: Final = 2 * ASKED_COUNT_MAX
#: Alignment of chunks in a page: the size of the widest element.
_ALIGNMENT_NBYTES: Final = 16


class ChunkRing:
    """Ring of ``WINDOW_COUNT`` receive buffers (pages) of ``chunk_nbytes`` each, allocated when they are first used."""

    def __init__(self, chunk_nbytes: int) -> None:
        self.chunk_nbytes = chunk_nbytes
        self._buffers: dict[int, torch.Tensor] = {}
        self._layouts: WeakKeyDictionary[FlatBuffers, Layout] = WeakKeyDictionary()
        self._next = 0
        self._scratch: torch.Tensor | None = None

    def layout_of(self, accumulator: FlatBuffers) -> Layout:
        """Return the cached layout, which assigns memory to the chunks of streams into ``accumulator``."""
        found = self._layouts.get(accumulator)
        if found is None:
            found = self._layouts[accumulator] = Layout(accumulator, self.chunk_nbytes)
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


class LandingPiece(NamedTuple):
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


class Landing(NamedTuple):
    """One chunk from one donor. ``chunk`` is its buffer, or None if it is received directly into the accumulator."""

    piece: LandingPiece
    page: int
    chunk: torch.Tensor | None


class _Share(NamedTuple):
    """One donor's chunks, their total size, and the page and offset at which the next donor's chunks begin."""

    landings: list[Landing]
    targets: list[memoryview]
    nbytes: int
    page: int
    offset: int


class Layout:
    """Assigns memory to received chunks: the tensors of one accumulator, or the pages of a ring of buffers."""

    def __init__(self, accumulator: FlatBuffers, chunk_nbytes: int) -> None:
        self.pieces = _pieces(accumulator, chunk_nbytes)
        self._shares: dict[tuple[int, int, bool, bool], _Share] = {}

    def share(self, ring: ChunkRing, page: int, offset: int, *, first: bool, exact: bool) -> _Share:
        """Return the chunks of one donor, with the memory in which they are received.

        Args:
            page: Page in which the previous donor's chunks end. Pages limit the number of outstanding receives, so
                chunks received into the accumulator count towards a page as well.
            first: Whether this is the first donor. Its chunks are received directly into the accumulator if that has
                their dtype.
            exact: Whether the donor also sends the tensors that are not averaged. They are always received directly.
        """
        key = page, offset, first, exact
        found = self._shares.get(key)
        if found is None:
            found = self._new_share(ring, *key)
            if found.page < WINDOW_COUNT and len(self._shares) < SHARE_COUNT_MAX:
                self._shares[key] = found
        return found

    def _new_share(self, ring: ChunkRing, page: int, offset: int, first: bool, exact: bool) -> _Share:
        landings, targets, share_nbytes = [], [], 0
        for piece in self.pieces:
            if not (piece.averaged or exact):
                continue
            nbytes = piece.nbytes
            if offset + nbytes > ring.chunk_nbytes:
                page, offset = page + 1, 0
            chunk, target = None, piece.view
            if target is None or (piece.averaged and not first):
                place = ring.page(page)[offset : offset + nbytes]
                chunk, target = place.view(piece.dtype), byte_view(place)
            landings.append(Landing(piece, page, chunk))
            targets.append(target)
            share_nbytes += nbytes
            offset += -(-nbytes // _ALIGNMENT_NBYTES) * _ALIGNMENT_NBYTES
        return _Share(landings, targets, share_nbytes, page, offset)


def _pieces(accumulator: FlatBuffers, chunk_nbytes: int) -> list[LandingPiece]:
    pieces = []
    averaged = accumulator.averaged().keys()
    for number, (dtype, tensor) in enumerate(parts_of(accumulator, exact=True)):
        count = chunk_nbytes // dtype.itemsize
        for place, into in enumerate(torch.split(tensor, count) if tensor.numel() else ()):
            view = byte_view(into) if into.dtype == dtype else None
            nbytes = into.numel() * dtype.itemsize
            pieces.append(LandingPiece(into, dtype, nbytes, dtype in averaged, view, number, place * count))
    return pieces
