"""Reduces a large tensor in rank order: the partial result is passed from rank to rank, in pieces.

The last rank gets the result. No rank needs more memory than its own tensor and a few pieces. The pieces are pipelined,
so n ranks and p pieces take n + p hops. A reduction along a tree would need fewer hops, but would round differently.

If a rank fails, it sends the next rank a notice instead of the partial result, so that no rank waits forever.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncdist.collectives.algorithms.left_folds import LeftFold
from asyncdist.collectives.algorithms.pieces import AHEAD_COUNT, PIECE_NBYTES, Outlet, attempt, receive_exactly
from asyncdist.collectives.groups import Group
from asyncdist.errors import AsyncdistError
from asyncdist.messaging.engine import Engine
from asyncdist.tensors.byte_views import byte_view


class Passing:
    """Performs this rank's part of one reduction along the ranks of a group.

    Args:
        values: This rank's tensor: flat, contiguous, on the CPU, with equal length and dtype on all members.
        result: Tensor of the same length, which receives the result on the last member.

    Attributes:
        is_whole: Whether ``result`` is complete on the last member. False if the reduction needs all tensors at once.
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
        """Receive the partial result from the previous rank, add this rank's values, and send the sum to the next rank.

        Returns:
            Error that prevented this rank or the next rank from receiving the partial result, or None.
        """
        if self._dest is None:
            return await self._receive_all(None) or error
        with Outlet(self._engine, self._dest, self._group.tag) as outlet:
            if error is not None:
                await outlet.send_error(error)
            error = await self._receive_all(outlet) or error
            if error is not None:
                await outlet.send_error(error)
            else:
                # An end mark of one byte lets the receiver detect a different size.
                await outlet.put(memoryview(bytearray(1)))
            return await outlet.flush() or error

    async def _receive_all(self, outlet: Outlet | None) -> AsyncdistError | None:
        count = PIECE_NBYTES // self._values.itemsize
        totals = torch.empty(AHEAD_COUNT + 1, count, dtype=self._values.dtype, device="cpu")
        results = torch.split(self._result, count)
        for turn, values in enumerate(torch.split(self._values, count)):
            total = results[turn] if outlet is None else totals[turn % len(totals), : len(values)]
            if self._source is None:
                total.copy_(values)
            else:
                error = await attempt(receive_exactly(self._engine, byte_view(total), self._source, self._group.tag))
                if error is not None:
                    return error
                self._fold.add(total, values)
            if outlet is not None:
                await outlet.put(byte_view(total))
            elif not self._fold.finish(total, values, self._group.size):
                self.is_whole = False
        if self._source is None:
            return None
        return await attempt(receive_exactly(self._engine, memoryview(bytearray(1)), self._source, self._group.tag))
