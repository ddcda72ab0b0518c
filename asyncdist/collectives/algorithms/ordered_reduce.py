"""Reduces large tensors in rank order. Each rank reduces its part of every piece, and sends the result to all ranks.

The algorithm sends as many bytes as a ring reduction. Several pieces are in progress at a time, so that ranks that
share cores rarely wait for each other.

Invariants: All members send and receive the same messages in the same order, so one tag is enough. No message is
received into memory that is still being sent. A request is kept until it has completed or can never complete.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
from torch import Tensor

from asyncdist.collectives.groups import Group
from asyncdist.messaging.engine import Engine
from asyncdist.tensors.bucket import Bucket
from asyncdist.tensors.byte_views import byte_view, new_memory
from asyncdist.transports.base import Request
from asyncdist.waits import WaitId, WaitKind

#: Function that returns the elementwise reduction of the ranks' tensors, given in rank order, without changing them.
#: The result may have a different dtype.
Reduction: TypeAlias = Callable[[Sequence[Tensor]], Tensor]

#: Size of a piece in bytes. Reducing 64 MiB between two ranks in pieces of 1, 2, 4 and 16 MiB took 36, 26, 22 and 33 ms
#: of CPU time on busy cores.
PIECE_NBYTES: Final = 4 << 20
#: Number of pieces that are begun ahead of the piece being reduced, and reduced ahead of the piece being finished.
_AHEAD_COUNT: Final = 4
#: Number of bytes reduced at once. With temporaries, they fit into a core's private cache.
_BLOCK_NBYTES: Final = 256 << 10
#: Alignment in bytes: a cache line, and a multiple of every element's size.
_ALIGNMENT_NBYTES: Final = 64
_WHAT: Final = WaitId(WaitKind.ORDERED_REDUCTION)


@dataclass(frozen=True, slots=True)
class ReductionPiece:
    """A range of elements that the ranks reduce together.

    Each rank reduces ``share_count`` of the elements. The last ranks may reduce fewer.
    """

    start: int
    count: int
    share_count: int

    @property
    def end(self) -> int:
        """Index after the piece's last element."""
        return self.start + self.count

    def share(self, index: int) -> slice:
        """Return the part of the piece that the member at ``index`` reduces, relative to the piece's start."""
        return slice(min(index * self.share_count, self.count), min((index + 1) * self.share_count, self.count))


def pieces(count: int, size: int, share_count: int) -> Iterator[ReductionPiece]:
    """Divide ``count`` elements into pieces.

    Each of ``size`` ranks reduces at most ``share_count`` elements of a piece.
    """
    for start in range(0, count, size * share_count):
        length = min(size * share_count, count - start)
        yield ReductionPiece(start, length, -(-length // size))


class BufferPool:
    """Reuses buffers between reductions, because page faults in new memory take as long as all the copying."""

    def __init__(self) -> None:
        self._kept: Tensor | None = None

    @torch.inference_mode(False)  # The memory outlives the caller's inference mode.
    def take(self, nbytes: int) -> Tensor:
        """Return memory of at least ``nbytes`` bytes for the caller's exclusive use until :meth:`give_back`."""
        kept, self._kept = self._kept, None
        return kept if kept is not None and len(kept) >= nbytes else new_memory(nbytes)

    def give_back(self, memory: Tensor) -> None:
        """Keep ``memory`` for the next :meth:`take`. No request may still use it."""
        if self._kept is None or len(self._kept) < len(memory):
            self._kept = memory


async def fold_in_shares(
    engine: Engine, pool: BufferPool, group: Group, flat: Tensor, fold: Reduction, target: Tensor | Bucket
) -> None:
    """Reduce every member's tensor ``flat`` in rank order, and write the result to ``target``. All members await this.

    Args:
        group: Group of two or more members. No other messages may be in progress on its tag.
        flat: 1-D contiguous CPU tensor of equal length and dtype on all members.
        target: Destination of the result: a 1-D tensor of the length of ``flat``, which may be ``flat``, or a bucket. A
            bucket's tensors are first copied piece by piece to ``flat``, the bucket's flat tensor.
    """
    await _Folding(engine, pool, group, flat, fold, target).run()


class _Folding:
    def __init__(
        self, engine: Engine, pool: BufferPool, group: Group, flat: Tensor, fold: Reduction, target: Tensor | Bucket
    ) -> None:
        self._engine = engine
        self._group = group
        self._flat = flat
        self._fold = fold
        self._result = None if isinstance(target, Bucket) else target
        self._bucket = target if isinstance(target, Bucket) else None
        share_count = -(-min(PIECE_NBYTES // flat.itemsize, len(flat)) // group.size)
        self._pieces = list(pieces(len(flat), group.size, share_count))
        buffer_count = min(len(self._pieces), _AHEAD_COUNT + 1)
        dtype = fold([flat[:0]] * group.size).dtype
        count = buffer_count * group.size * share_count
        parts_nbytes = -(-count * flat.itemsize // _ALIGNMENT_NBYTES) * _ALIGNMENT_NBYTES
        results_nbytes = 0 if self._bucket is None else count * dtype.itemsize
        self._pool, self._memory = pool, pool.take(parts_nbytes + results_nbytes)
        parts = self._memory[: count * flat.itemsize].view(flat.dtype)
        self._buffers = parts.view(buffer_count, group.size, share_count)
        results = self._memory[parts_nbytes : parts_nbytes + results_nbytes].view(dtype)
        self._results = results.view(buffer_count, -1)
        self._block_count = max(1, _BLOCK_NBYTES // flat.itemsize)
        self._peers = [(index, rank) for index, rank in enumerate(group.ranks) if index != group.index]
        self._under_way: deque[list[Request]] = deque()

    async def run(self) -> None:
        """Reduce all pieces.

        Each turn begins one piece, reduces an earlier piece, and finishes an even earlier piece.
        """
        count = len(self._pieces)
        try:
            for turn in range(count + 2 * _AHEAD_COUNT):
                if turn < count:
                    self._begin(turn)
                if 0 <= turn - _AHEAD_COUNT < count:
                    await self._wait_for_oldest()
                    self._fold_share(turn - _AHEAD_COUNT)
                if 0 <= turn - 2 * _AHEAD_COUNT < count:
                    await self._wait_for_oldest()
                    self._finish(turn - 2 * _AHEAD_COUNT)
            self._pool.give_back(self._memory)
        finally:
            for requests in self._under_way:  # A request may never complete after a failure, or after a rank has left.
                for request in requests:
                    self._engine.disown(request)

    def _begin(self, turn: int) -> None:
        piece = self._pieces[turn]
        if self._bucket is not None:
            self._bucket.copy_in(piece.start, piece.end)
        values, parts = self._flat[piece.start : piece.end], self._buffers[turn % len(self._buffers)]
        own = piece.share(self._group.index)
        self._exchange(
            [(values[piece.share(index)], parts[index, : own.stop - own.start], rank) for index, rank in self._peers]
        )

    def _fold_share(self, turn: int) -> None:
        """Reduce this rank's part of a piece, and start exchanging results with all other members."""
        piece, buffer = self._pieces[turn], self._buffers[turn % len(self._buffers)]
        own = piece.share(self._group.index)
        parts = [*buffer[:, : own.stop - own.start]]
        parts[self._group.index] = self._flat[piece.start : piece.end][own]
        values = self._result_of(turn)
        for block in zip(*(torch.split(part, self._block_count) for part in (values[own], *parts)), strict=True):
            block[0].copy_(self._fold(block[1:]))
        self._exchange([(values[own], values[piece.share(index)], rank) for index, rank in self._peers])

    def _finish(self, turn: int) -> None:
        if self._bucket is not None:
            self._bucket.copy_out(self._pieces[turn].start, self._result_of(turn))

    def _result_of(self, turn: int) -> Tensor:
        piece = self._pieces[turn]
        if self._result is not None:
            return self._result[piece.start : piece.end]
        return self._results[turn % len(self._results), : piece.count]

    def _exchange(self, sides: Sequence[tuple[Tensor, Tensor, int]]) -> None:
        transport, tag = self._engine.transport, self._group.tag
        requests: list[Request] = []
        # Append the list first, so that ``run`` disowns its requests if a later request cannot be started.
        self._under_way.append(requests)
        requests.extend(transport.irecv(byte_view(into), rank, tag) for _, into, rank in sides if len(into))
        requests.extend(transport.isend(byte_view(values), rank, tag) for values, _, rank in sides if len(values))

    async def _wait_for_oldest(self) -> None:
        for request in self._under_way[0]:
            await self._engine.wait(request, _WHAT)
        self._under_way.popleft()
