"""Reductions that add the ranks' tensors one by one in rank order, so that a sum may also pass from rank to rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
import torch
from torch import Tensor

from asyncdist.collectives.algorithms import reduction_dtypes
from asyncdist.tensors.means import mean_into, mean_of_sum
from asyncdist.transports.base import ReduceOp


class LeftFold(Protocol):
    """Reduces tensors of one dtype in rank order: all at once, or one by one with the same bits."""

    def __call__(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the reduction of all ranks' tensors."""

    def add(self, total: Tensor, values: Tensor) -> None:
        """Add the next rank's values, in place, to a total that the first rank's have begun."""

    def finish(self, total: Tensor, last: Tensor, count: int) -> bool:
        """Turn a total into the result, in place; False where that takes all ranks' tensors at once.

        Args:
            total: of all ranks.
            last: the last rank's values.
            count: the number of ranks, two or more.
        """


class OrderedReduction:
    """Reduces with one operation, in the numbers that :mod:`asyncdist.collectives.algorithms.reduction_dtypes` chooses.

    Args:
        op: the operation.
    """

    def __init__(self, op: ReduceOp) -> None:
        self._op = reduction_dtypes.OPERATIONS[op]

    def __call__(self, parts: Sequence[Tensor]) -> Tensor:
        """Reduce in the memory of the first part."""
        for part in parts[1:]:
            self.add(parts[0], part)
        return parts[0]

    def add(self, total: Tensor, values: Tensor) -> None:
        """See :class:`LeftFold`."""
        numbers = total.numpy()
        with np.errstate(all="ignore"):  # integers wrap, and infinities make NaN
            self._op(numbers, values.numpy(), out=numbers)

    def finish(self, total: Tensor, last: Tensor, count: int) -> bool:
        """Return True: the total is the result."""
        del total, last, count
        return True


class Mean:
    """Makes the mean of :mod:`asyncdist.tensors.means`, of flat tensors of float32, complex64 or wider."""

    def __call__(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the mean in fresh memory."""
        total = torch.empty_like(parts[0])
        mean_into(total, parts)
        return total

    def add(self, total: Tensor, values: Tensor) -> None:
        """See :class:`LeftFold`."""
        total += values

    def finish(self, total: Tensor, last: Tensor, count: int) -> bool:
        """Divide; False where the sum is not finite."""
        return mean_of_sum(total, last, count)


MEAN: Final = Mean()
