"""Reduces large tensors in rank order, with few peers: the total passes from each rank to the next one, piece by piece.

No rank holds more than its own tensor and a few pieces, and each sends and takes in its bytes twice or three times:
once along the ranks, and once down the tree that has the last rank at the top, which has the result. A reduction in a
tree would have fewer hops, and other bits.

The hops overlap: with n ranks and p pieces it takes n + p of them. Every member does its part to the end, whatever it
meets, as in :mod:`asyncdist.collectives.algorithms.over_tree`.
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
    """Passes the total of one reduction along the ranks.

    Args:
        engine: this rank's.
        group: of two members or more.
        values: this rank's: flat, contiguous and in CPU memory; of one length and dtype on all members.
        fold: the reduction, the same on all members.
        result: as long; filled on the last member.

    Attributes:
        is_whole: on the last member, whether ``result`` holds the reduction; where not, it takes all tensors at once.
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
        """Do this member's part; return why the total has not come to it, or not to the next one.

        Args:
            error: of this rank, which the next one gets in place of the total.
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
                await outlet.put(memoryview(bytearray(1)))  # so sizes that differ are found out
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
