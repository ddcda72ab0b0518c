"""Reductions that add the ranks' tensors in rank order, at once or step by step with the same bits."""

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
    """Reduces tensors of one dtype in rank order: all at once, or step by step with the same bits."""

    def __call__(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the reduction of all ranks' tensors."""

    def add(self, total: Tensor, values: Tensor) -> None:
        """Add the next rank's values in place to a total that begins with the first rank's values."""

    def finish(self, total: Tensor, last: Tensor, count: int) -> bool:
        """Turn the total into the result, in place; return False if that needs all ranks' tensors at once.

        Args:
            total: Total of all ranks.
            last: Values of the last rank.
            count: Number of ranks, at least two.
        """


class OrderedReduction:
    """Reduces with one operation, on numbers made by :mod:`asyncdist.collectives.algorithms.reduction_dtypes`."""

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
        """Return True, because the total is the result."""
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
        """Divide the sum; return False if it is not finite."""
        return mean_of_sum(total, last, count)


MEAN: Final = Mean()
