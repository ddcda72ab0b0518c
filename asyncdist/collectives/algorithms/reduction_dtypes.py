"""Defines what an elementwise reduction over ranks means for each dtype, and in which numbers it is computed.

- Booleans: "sum" and "max" are "or", "prod" and "min" are "and", as in numpy and in torch's NCCL backend. In bytes, as
  elsewhere in torch, 256 ranks that all say True would add up to 0.
- Integers keep their dtype and wrap: 128 + 128 is 0 in uint8. Sums of 8 and 16 bits are made in int32, since
  Open MPI 5.0.11 adds these with saturation where its vector instructions reach, and wraps in the elements behind.
- float16, bfloat16 and float8 are reduced in float32 and rounded once, complex32 in complex64.
- The minimum and maximum of floating numbers is NaN where any rank has NaN, and -0 is below +0. MPI says nothing about
  NaN in MPI_MIN and MPI_MAX: with it in the input of one of four ranks, Open MPI 5.0.11 gave all of them the result of
  some ranks, and MPICH 5.0.2 gave different results to different ranks. So they are computed on integers of the same
  order.
- Complex numbers have no order: they have a sum and a product.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from asyncdist.tensors.byte_views import to_host, write
from asyncdist.transports.base import ReduceOp

#: In the numbers of :func:`to_numbers`.
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
    """Refuse a dtype that has no such reduction.

    Raises:
        TypeError: it has none.
    """
    if tensor.dtype not in _WIDE:
        raise TypeError(f"all_reduce of {tensor.dtype}; allowed: bool, integers, floating and complex numbers")
    if tensor.is_complex() and op not in ("sum", "prod"):
        raise TypeError(f"all_reduce {op!r} of {tensor.dtype}; complex numbers have no order; allowed: 'sum', 'prod'")


def to_numbers(tensor: Tensor, op: ReduceOp) -> tuple[Tensor, ReduceOp]:
    """Return the numbers to reduce in place of a tensor's, and the operation to reduce them with.

    Returns:
        A contiguous tensor in CPU memory, of a dtype that numpy and MPI know. It may be the tensor's own memory.
    """
    numbers = to_host(tensor).to((_WIDE_SUM if op == "sum" else _WIDE)[tensor.dtype])
    if tensor.dtype == torch.bool:
        return numbers, _OF_BOOLEANS[op]
    if numbers.is_floating_point() and op in ("min", "max"):
        return _to_ordered(numbers, op), op
    return numbers, op


def depends_on_order(numbers: Tensor) -> bool:
    """Return whether the result of reducing these of three ranks or more depends on their order: on how it rounds."""
    return numbers.is_floating_point() or numbers.is_complex()


def store(numbers: Tensor, tensor: Tensor, op: ReduceOp) -> None:
    """Write what came of reducing :func:`to_numbers` into the tensor, unless it is there already."""
    if tensor.is_floating_point() and op in ("min", "max"):
        numbers = _from_ordered(numbers)
    if numbers.data_ptr() != tensor.data_ptr():
        write(tensor, numbers)


def _to_ordered(numbers: Tensor, op: ReduceOp) -> Tensor:
    """Return floating numbers as integers of the same order, and NaN as the one that ``op`` always chooses."""
    bits = numbers.view(torch.int32 if numbers.itemsize == 4 else torch.int64)
    limits = torch.iinfo(bits.dtype)
    return torch.where(numbers.isnan(), limits.min if op == "min" else limits.max, _flipped(bits))


def _from_ordered(ordered: Tensor) -> Tensor:
    return _flipped(ordered).view(torch.float32 if ordered.itemsize == 4 else torch.float64)


def _flipped(bits: Tensor) -> Tensor:
    """Turn the order of negative numbers round: their bits are sign and magnitude. Its own inverse."""
    return torch.where(bits < 0, bits ^ torch.iinfo(bits.dtype).max, bits)
