"""Says where a replacer receives what donors stream: in its accumulator, or in the pages of a ring of buffers.

Every donor's chunks are cut alike. Those of the first one land in the accumulator itself, where its dtype is the stored
one; the others pass through the ring, where small chunks share a page.
"""

from __future__ import annotations

from typing import Final, NamedTuple
from weakref import WeakKeyDictionary

import torch

from asyncdist.messaging.streams import WINDOW_COUNT
from asyncdist.protocols.parameter_stream.messages import parts_of
from asyncdist.tensors.byte_views import byte_view
from asyncdist.tensors.flat_state import FlatBuffers

#: Donors that a replacer has asked and not yet taken: each posted receive is tested in every pass.
ASKED_COUNT_MAX: Final = 16
#: Shares of donors that a layout keeps: of as many as a replacer asks at once, with the exact tensors and without.
SHARE_COUNT_MAX: Final = 2 * ASKED_COUNT_MAX
#: Places in a page begin at multiples of the widest element.
_ALIGNMENT_NBYTES: Final = 16


class ChunkRing:
    """Keeps ``WINDOW_COUNT`` buffers of one chunk each, allocated when first needed.

    The ring remembers the layouts of the accumulators that were used with it.

    Args:
        chunk_nbytes: of each.
    """

    def __init__(self, chunk_nbytes: int) -> None:
        self.chunk_nbytes = chunk_nbytes
        self._buffers: dict[int, torch.Tensor] = {}
        self._layouts: WeakKeyDictionary[FlatBuffers, Layout] = WeakKeyDictionary()
        self._next = 0
        self._scratch: torch.Tensor | None = None

    def layout_of(self, accumulator: FlatBuffers) -> Layout:
        """Return where streams into ``accumulator`` are received."""
        found = self._layouts.get(accumulator)
        if found is None:
            found = self._layouts[accumulator] = Layout(accumulator, self.chunk_nbytes)
        return found

    def take(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        """Return the next buffer, as ``count`` elements of ``dtype``."""
        self._next += 1
        return self.page(self._next)[: count * dtype.itemsize].view(dtype)

    def page(self, number: int) -> torch.Tensor:
        """Return the bytes of a buffer; pages that are ``WINDOW_COUNT`` apart are the same one."""
        place = number % WINDOW_COUNT
        found = self._buffers.get(place)
        if found is None:
            found = torch.empty(self.chunk_nbytes, dtype=torch.uint8, device="cpu")
            self._buffers[place] = found
        return found

    def scratch(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        """Return memory for what is read and added at once, as ``count`` elements of ``dtype``; always the same."""
        nbytes = count * dtype.itemsize
        if self._scratch is None or self._scratch.nbytes < nbytes:
            self._scratch = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return self._scratch[:nbytes].view(dtype)

    @property
    def nbytes(self) -> int:
        """The bytes that are allocated."""
        scratch = [] if self._scratch is None else [self._scratch]
        return sum(buffer.nbytes for buffer in (*self._buffers.values(), *scratch))


class LandingPiece(NamedTuple):
    """A chunk of the state, as it is cut for every donor.

    ``view`` is where it is received if it can land in place. It begins with element ``first`` of tensor ``number``.
    """

    into: torch.Tensor
    dtype: torch.dtype
    nbytes: int
    averaged: bool
    view: memoryview | None
    number: int
    first: int


class Landing(NamedTuple):
    """A chunk of one donor, and the page that it counts to. ``chunk`` is where it lies there, unless it is in place."""

    piece: LandingPiece
    page: int
    chunk: torch.Tensor | None


class _Share(NamedTuple):
    """Says what comes from one donor, its size, and the place of the next donor's first chunk."""

    landings: list[Landing]
    targets: list[memoryview]
    nbytes: int
    page: int
    offset: int


class Layout:
    """Says where streams into one accumulator are received: in its tensors, or in pages of the ring that made this.

    The first shares that fit into the ring are kept: small states lie in the same places in each round.

    Attributes:
        pieces: of the whole state, averaged ones first.
    """

    def __init__(self, accumulator: FlatBuffers, chunk_nbytes: int) -> None:
        self.pieces = _pieces(accumulator, chunk_nbytes)
        self._shares: dict[tuple[int, int, bool, bool], _Share] = {}

    def share(self, ring: ChunkRing, page: int, offset: int, *, first: bool, exact: bool) -> _Share:
        """Return the share of the donor whose first chunk is received there.

        Args:
            ring: the one that made this.
            page, offset: behind the donor before; the page bounds what is under way, and chunks in place have one too.
            first: whether it is the first donor: its chunks land in place where the accumulator has their dtype, as do
                all that are not summed.
            exact: whether it gives what is not averaged, too.
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
    """Return the chunks of a stream, averaged ones first."""
    pieces = []
    averaged = accumulator.averaged().keys()
    for number, (dtype, tensor) in enumerate(parts_of(accumulator, exact=True)):
        count = chunk_nbytes // dtype.itemsize
        for place, into in enumerate(torch.split(tensor, count) if tensor.numel() else ()):
            view = byte_view(into) if into.dtype == dtype else None
            nbytes = into.numel() * dtype.itemsize
            pieces.append(LandingPiece(into, dtype, nbytes, dtype in averaged, view, number, place * count))
    return pieces
