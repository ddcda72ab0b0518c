"""Defines the elementwise reductions of ``all_reduce`` for each dtype, and reductions in rank order.

The dtype of the input determines the dtype in which a reduction is computed:

- Booleans: "sum" and "max" are "or", "prod" and "min" are "and", as in numpy and in torch's NCCL backend.
- Integers keep their dtype and wrap: 128 + 128 is 0 in uint8. Sums of 8- and 16-bit integers are computed in int32,
  because Open MPI 5.0.11 saturates the elements that its vector instructions handle, and wraps only the others.
- float16, bfloat16 and float8 are reduced in float32 and rounded once, and complex32 in complex64.
- The minimum or maximum of floating-point numbers is NaN if any rank has NaN, and -0 is less than +0. MPI_MIN and
  MPI_MAX do not define the result for NaN, and with MPICH 5.0.2 it differed between ranks. Both reductions are
  therefore computed on integers that sort like the numbers.
- Complex numbers have no order, so only "sum" and "prod" exist.

Reductions in rank order combine the ranks' tensors all at once or step by step, with bit-equal results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch import Tensor

from asyncdist.tensors.byte_views import to_host, write
from asyncdist.tensors.means import mean_into, mean_of_sum
from asyncdist.transports.base import ReduceOp

#: numpy function of each reduction, applied to the results of :func:`to_numbers`.
OPERATIONS: Final[dict[ReduceOp, Any]] = {"sum": np.add, "min": np.minimum, "max": np.maximum, "prod": np.multiply}

_INTEGERS: Final = tuple(getattr(torch, f"{sign}int{bits}") for bits in (8, 16, 32, 64) for sign in ("", "u"))
_WIDE: Final = {
    **{dtype: dtype for dtype in (*_INTEGERS, torch.float32, torch.float64, torch.complex64, torch.complex128)},
    **{value: torch.float32 for name, value in vars(torch).items() if name.startswith("float8_")},
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
    torch.bool: torch.uint8,
}
_WIDE_SUM: Final = {**_WIDE, **dict.fromkeys((torch.int8, torch.uint8, torch.int16, torch.uint16), torch.int32)}
_OF_BOOLEANS: Final[dict[ReduceOp, ReduceOp]] = {"sum": "max", "prod": "min", "max": "max", "min": "min"}


def check(tensor: Tensor, op: ReduceOp) -> None:
    """Raise TypeError if the reduction ``op`` is not defined for the tensor's dtype."""
    if tensor.dtype not in _WIDE:
        raise TypeError(
            f"the dtype for all_reduce must be bool, an integer, floating or complex dtype, got {tensor.dtype}"
        )
    if tensor.is_complex() and op not in ("sum", "prod"):
        raise TypeError(
            f"op must be 'sum' or 'prod' for all_reduce of {tensor.dtype} (complex numbers have no order), got {op!r}"
        )


def to_numbers(tensor: Tensor, op: ReduceOp) -> tuple[Tensor, ReduceOp]:
    """Return a contiguous CPU tensor to reduce with numpy or MPI instead of ``tensor``, and the operation to use."""
    numbers = to_host(tensor).to((_WIDE_SUM if op == "sum" else _WIDE)[tensor.dtype])
    if tensor.dtype == torch.bool:
        return numbers, _OF_BOOLEANS[op]
    if numbers.is_floating_point() and op in ("min", "max"):
        return _to_ordered(numbers, op), op
    return numbers, op


def depends_on_order(numbers: Tensor) -> bool:
    """Return whether rounding makes the reduction of ``numbers`` depend on the order of three or more ranks."""
    return numbers.is_floating_point() or numbers.is_complex()


def store(numbers: Tensor, tensor: Tensor, op: ReduceOp) -> None:
    """Convert reduced numbers from :func:`to_numbers` to the tensor's dtype, and write them into ``tensor``."""
    if tensor.is_floating_point() and op in ("min", "max"):
        numbers = _from_ordered(numbers)
    if numbers.data_ptr() != tensor.data_ptr():
        write(tensor, numbers)


def _to_ordered(numbers: Tensor, op: ReduceOp) -> Tensor:
    """Map floats to integers in the same order, and NaN to the integer that ``op`` prefers over all others."""
    bits = numbers.view(torch.int32 if numbers.itemsize == 4 else torch.int64)
    limits = torch.iinfo(bits.dtype)
    return torch.where(numbers.isnan(), limits.min if op == "min" else limits.max, _flipped(bits))


def _from_ordered(ordered: Tensor) -> Tensor:
    return _flipped(ordered).view(torch.float32 if ordered.itemsize == 4 else torch.float64)


def _flipped(bits: Tensor) -> Tensor:
    """Flip all bits but the sign of negative floats, so that the bits sort as integers. A second call undoes it."""
    return torch.where(bits < 0, bits ^ torch.iinfo(bits.dtype).max, bits)


class OrderedReduction:
    """Reduces tensors in rank order with one numpy operation.

    The tensors are results of :func:`to_numbers`.
    """

    def __init__(self, op: ReduceOp) -> None:
        self._op = OPERATIONS[op]

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
#: A reduction in rank order. Computing all at once or step by step gives the same result.
LeftFold: TypeAlias = OrderedReduction | Mean
