"""Reduces large tensors in rank order with few peers: the partial result passes from rank to rank, piece by piece.

No rank holds more than its own tensor and a few pieces. Each sends and receives its bytes two or three times: once
along the ranks, and then down a tree whose root is the last rank, which has the result. A reduction in a tree would
have fewer hops, but other bits.

The hops overlap: n ranks and p pieces take n + p hops. Every member does its part to the end in spite of errors, as in
:mod:`asyncdist.collectives.algorithms.over_tree`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncdist.collectives.algorithms.left_folds import LeftFold
from asyncdist.collectives.algorithms.pieces import AHEAD_COUNT, PIECE_NBYTES, Outlet, attempt, take
from asyncdist.collectives.groups import Group
from asyncdist.errors import AsyncdistError
from asyncdist.messaging.engine import Engine
from asyncdist.tensors.byte_views import byte_view


class Passing:
    """Passes the partial result of one reduction along the ranks.

    Args:
        engine: Engine of this rank.
        group: A group of two or more members.
        values: Tensor of this rank: flat, contiguous, on the CPU, with equal length and dtype on all members.
        fold: The reduction, equal on all members.
        result: Tensor of the same length; filled on the last member.

    Attributes:
        is_whole: On the last member, whether ``result`` holds the reduction. If not, the reduction needs all tensors at
            once.
    """

    def __init__(self, engine: Engine, group: Group, values: Tensor, fold: LeftFold, result: Tensor) -> None:
        self.is_whole = True
        self._engine = engine
        self._group = group
        self._values = values
        self._fold = fold
        self._result = result
        self._source = group.ranks[group.index - 1] if group.index else None
        self._dest = group.ranks[group.index + 1] if group.index + 1 < group.size else None

    async def run(self, error: AsyncdistError | None) -> AsyncdistError | None:
        """Do this member's part; return the error that kept the total from this rank or the next one; or None.

        Args:
            error: Error of this rank, which the next rank receives instead of the total; or None.
        """
        if self._dest is None:
            return await self._take_all(None) or error
        with Outlet(self._engine, self._dest, self._group.tag) as outlet:
            if error is not None:
                await outlet.tell(error)
            error = await self._take_all(outlet) or error
            if error is not None:
                await outlet.tell(error)
            else:
                await outlet.put(memoryview(bytearray(1)))  # so that different sizes are detected
            return await outlet.flush() or error

    async def _take_all(self, outlet: Outlet | None) -> AsyncdistError | None:
        count = PIECE_NBYTES // self._values.itemsize
        totals = torch.empty(AHEAD_COUNT + 1, count, dtype=self._values.dtype, device="cpu")
        results = torch.split(self._result, count)
        for turn, values in enumerate(torch.split(self._values, count)):
            total = results[turn] if outlet is None else totals[turn % len(totals), : len(values)]
            if self._source is None:
                total.copy_(values)
            else:
                error = await attempt(take(self._engine, byte_view(total), self._source, self._group.tag))
                if error is not None:
                    return error
                self._fold.add(total, values)
            if outlet is not None:
                await outlet.put(byte_view(total))
            elif not self._fold.finish(total, values, self._group.size):
                self.is_whole = False
        if self._source is None:
            return None
        return await attempt(take(self._engine, memoryview(bytearray(1)), self._source, self._group.tag))
