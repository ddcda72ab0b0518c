"""Reduces in rank order, with as many bytes as a ring: each rank folds its share of every piece, and sends that around.

A piece goes out as shares to the ranks that fold them ((n - 1) / n of it, with n ranks), and each result comes back to
everybody (as much again). The next pieces are on their way meanwhile, so ranks that do not get a core at the same time
seldom wait for each other.

Invariants: all members send and receive the same messages in the same order, so one tag is enough; nothing is received
into memory that is still being sent; no request is dropped before it has completed, or can never do so.
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
from asyncdist.tensors.byte_views import byte_view
from asyncdist.transports.base import Request
from asyncdist.waits import WaitId, WaitKind

#: Turns the ranks' tensors, in rank order, into their reduction: elementwise, of any dtype, which follows from theirs.
#: It leaves them as they are.
Reduction: TypeAlias = Callable[[Sequence[Tensor]], Tensor]

#: 64 MiB between two ranks, beside other work: 36 ms of CPU time in pieces of 1 MiB, 26 of 2, 22 of 4 and 33 of 16.
PIECE_NBYTES: Final = 4 << 20
#: How many pieces begin before one is folded, and again before its result is waited for.
_AHEAD_COUNT: Final = 4
#: What is folded at once: with the fold's temporaries it stays in a core's own cache.
_BLOCK_NBYTES: Final = 256 << 10
#: A cache line, and a multiple of every element's size.
_ALIGNMENT_NBYTES: Final = 64
_WHAT: Final = WaitId(WaitKind.ORDERED_REDUCTION)


@dataclass(frozen=True, slots=True)
class ReductionPiece:
    """A range of elements, cut into equal shares; those of the last ranks may be shorter or empty.

    Attributes:
        start: index of the first one.
        count: how many.
        share_count: how many each rank folds.
    """

    start: int
    count: int
    share_count: int

    @property
    def end(self) -> int:
        """Index after the last element."""
        return self.start + self.count

    def share(self, index: int) -> slice:
        """Return the share of a rank, counted from the piece's start."""
        return slice(min(index * self.share_count, self.count), min((index + 1) * self.share_count, self.count))


def pieces(count: int, size: int, share_count: int) -> Iterator[ReductionPiece]:
    """Cut ``count`` elements into pieces for ``size`` ranks."""
    for start in range(0, count, size * share_count):
        length = min(size * share_count, count - start)
        yield ReductionPiece(start, length, -(-length // size))


class BufferPool:
    """Keeps memory for pieces under way from one reduction to the next.

    The kernel hands fresh memory out page by page: the 8,000 pages of one reduction took as long as all copying in it.
    """

    def __init__(self) -> None:
        self._kept: Tensor | None = None

    @torch.inference_mode(False)  # it outlives the caller's mode
    def take(self, nbytes: int) -> Tensor:
        """Return so many bytes or more; they are the caller's until :meth:`give_back`, or for good."""
        kept, self._kept = self._kept, None
        return (
            kept if kept is not None and len(kept) >= nbytes else torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        )

    def give_back(self, memory: Tensor) -> None:
        """Keep memory for the next :meth:`take`; nothing is under way in it."""
        if self._kept is None or len(self._kept) < len(memory):
            self._kept = memory


class Into:
    """Says that results go into one tensor.

    Args:
        tensor: 1-D, as long as what is reduced, which it may be itself; of the fold's dtype.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


async def fold_in_shares(
    engine: Engine, pool: BufferPool, group: Group, flat: Tensor, fold: Reduction, target: Into | Bucket
) -> None:
    """Reduce every member's ``flat``; all members await this at the same time.

    Args:
        engine: this rank's.
        pool: memory to use.
        group: of two members or more; nothing else is under way on its tag.
        flat: 1-D, on the CPU, contiguous, of the same length and dtype on all members.
        fold: the reduction, the same on all members.
        target: where results go. The flat tensor of a bucket is filled as well, piece by piece.
    """
    await _Folding(engine, pool, group, flat, fold, target).run()


class _Folding:
    def __init__(
        self, engine: Engine, pool: BufferPool, group: Group, flat: Tensor, fold: Reduction, target: Into | Bucket
    ) -> None:
        self._engine = engine
        self._group = group
        self._flat = flat
        self._fold = fold
        self._result = target.tensor if isinstance(target, Into) else None
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
        """Reduce in turns, equal on all members: begin a piece, fold an earlier one, finish one that is earlier still.

        What is waited for is always the oldest: requests begin in the order in which they are needed.
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
            for requests in self._under_way:  # the job has failed, or a member has left: they may never complete
                for request in requests:
                    self._engine.disown(request)

    def _begin(self, turn: int) -> None:
        """Send each member its share of a piece, and receive what they have of this rank's."""
        piece = self._pieces[turn]
        if self._bucket is not None:
            self._bucket.copy_in(piece.start, piece.end)
        values, parts = self._flat[piece.start : piece.end], self._buffers[turn % len(self._buffers)]
        own = piece.share(self._group.index)
        self._exchange(
            [(values[piece.share(index)], parts[index, : own.stop - own.start], rank) for index, rank in self._peers]
        )

    def _fold_share(self, turn: int) -> None:
        """Reduce this rank's share of a piece; send that to the members, and receive their results."""
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
        """Start to send and to receive, with each of some ranks; what is empty is not sent."""
        transport, tag = self._engine.transport, self._group.tag
        requests: list[Request] = []
        self._under_way.append(requests)  # also those that were started before one could not be
        requests.extend(transport.irecv(byte_view(into), rank, tag) for _, into, rank in sides if len(into))
        requests.extend(transport.isend(byte_view(values), rank, tag) for values, _, rank in sides if len(values))

    async def _wait_for_oldest(self) -> None:
        for request in self._under_way[0]:
            await self._engine.wait(request, _WHAT)
        self._under_way.popleft()
