"""Reductions that combine the ranks' tensors in rank order, all at once or step by step, with bit-equal results."""

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
    """Interface of reductions in rank order. Computing all at once or step by step gives the same result."""

    def __call__(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the reduction of all ranks' tensors."""

    def add(self, total: Tensor, values: Tensor) -> None:
        """Combine ``total``, the partial result of the preceding ranks, with the next rank's values, in place."""

    def finish(self, total: Tensor, last: Tensor, count: int) -> bool:
        """Convert ``total`` to the result in place.

        Return False if the result must be computed from all tensors at once.
        """


class OrderedReduction:
    """Reduces tensors in rank order with one numpy operation.

    The tensors are results of :func:`~asyncdist.collectives.algorithms.reduction_dtypes.to_numbers`.
    """

    def __init__(self, op: ReduceOp) -> None:
        self._op = reduction_dtypes.OPERATIONS[op]

    def __call__(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the reduction of all ranks' tensors, computed in the memory of the first tensor."""
        for part in parts[1:]:
            self.add(parts[0], part)
        return parts[0]

    def add(self, total: Tensor, values: Tensor) -> None:
        """Combine ``total``, the partial result of the preceding ranks, with the next rank's values, in place."""
        numbers = total.numpy()
        with np.errstate(all="ignore"):  # Overflow and NaN are valid results.
            self._op(numbers, values.numpy(), out=numbers)

    def finish(self, total: Tensor, last: Tensor, count: int) -> bool:
        """Return True, because the total of all ranks is the result."""
        del total, last, count
        return True


class Mean:
    """Computes the mean of flat tensors of float32, complex64 or wider, as :mod:`asyncdist.tensors.means` does."""

    def __call__(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the mean of all ranks' tensors in new memory."""
        total = torch.empty_like(parts[0])
        mean_into(total, parts)
        return total

    def add(self, total: Tensor, values: Tensor) -> None:
        """Add the next rank's values to the total of the preceding ranks, in place."""
        total += values

    def finish(self, total: Tensor, last: Tensor, count: int) -> bool:
        """Divide ``total`` by the number of ranks. Return False if the sum is not finite."""
        return mean_of_sum(total, last, count)


MEAN: Final = Mean()
