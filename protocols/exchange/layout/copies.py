"""Copies values between a model's tensors and flat vectors, and measures them."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from typing import Final

import torch
from torch import Tensor

from asyncdist.protocols.exchange.layout.wire_layout import Vector
from asyncdist.tensors.byte_views import byte_view, flat_bytes
from asyncdist.tensors.flat_state import is_finite

_NORM_MAX: Final = 2.0**400  # replaces larger norms, so that sums of their squares are finite
_PIECE_COUNT: Final = 1 << 16  # number of elements whose norm is computed at a time if their squares overflow


def norm_of(flat: Tensor) -> float:
    """Return the L2 norm of a flat tensor. It is finite if and only if all values are finite.

    In float32, the squares of values above 1.8e19 overflow, for example in a mask that contains ``finfo.min``.
    """
    norm = float(torch.linalg.vector_norm(flat).item())
    if math.isinf(norm):
        if not is_finite(flat):
            return norm
        largest = torch.linalg.vector_norm(flat, ord=math.inf)
        scaled = (torch.linalg.vector_norm(piece / largest).item() for piece in torch.split(flat, _PIECE_COUNT))
        norm = math.hypot(*scaled) * float(largest.item())
    return min(norm, _NORM_MAX)


def gather(vector: Vector, tensors: Sequence[Tensor], flat: Tensor) -> None:
    """Copy the model's tensors into a flat tensor. bfloat16 values become float32."""
    for index, first, end in vector.places:
        flat[first:end].copy_(values_of(vector, tensors[index]))


def subtract(vector: Vector, anchor: Tensor, tensors: Sequence[Tensor], flat: Tensor) -> None:
    """Write the differences between an anchor and the model's tensors into a flat tensor.

    The model trains from the anchor rounded to the tensors' dtypes. The differences are measured from there, so that
    they do not contain the rounding, which would move the anchor to the nearest value of the dtype in each round.
    """
    for index, first, end in vector.places:
        own = values_of(vector, tensors[index])
        torch.sub(rounded(anchor[first:end], own.dtype), own.to(flat), out=flat[first:end])


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values rounded to the dtype of a model's tensor, in their own dtype. Equal dtypes need no copy."""
    return values.to(dtype).to(values.dtype)


def as_written(vector: Vector, flat: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """Return the values that the model's tensors have after :func:`scatter`, in the dtype of ``flat``.

    If no tensor of the vector has a narrower dtype, this is ``flat`` itself.
    """
    dtypes = [tensors[index].dtype.to_real() for index, *_ in vector.places]
    if all(dtype == flat.dtype for dtype in dtypes):
        return flat
    found = flat.clone()
    for (_, first, end), dtype in zip(vector.places, dtypes, strict=True):
        found[first:end] = rounded(found[first:end], dtype)
    return found


def scatter(vector: Vector, flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy a flat tensor into the model's tensors, rounding each value once to the tensor's dtype."""
    for index, first, end in vector.places:
        write(vector, flat[first:end], tensors[index])


def write(vector: Vector, values: Tensor, tensor: Tensor) -> None:
    """Copy an entry's part of a flat tensor into the model's tensor."""
    if vector.role == "copied":
        values = values.view(tensor.dtype)
    elif tensor.is_complex():
        values = torch.complex(values[0::2], values[1::2])  # view_as_complex would need an even offset
    tensor.copy_(values.view(tensor.shape))


def values_of(vector: Vector, tensor: Tensor) -> Tensor:
    """Return the values of a model's tensor in one dimension and in its own dtype.

    Copied entries are returned as bytes.
    """
    if vector.role == "copied":
        return flat_bytes(tensor.detach().cpu().contiguous())
    if tensor.is_complex():
        return torch.view_as_real(tensor.detach().resolve_conj()).reshape(-1)
    return tensor.detach().reshape(-1)


def checksum_of(vectors: Iterable[Vector], tensors: Sequence[Tensor]) -> int:
    """Return a checksum of the values of some vectors of a model. It does not depend on the tensors' device."""
    checksum = 0
    for vector in vectors:
        flat = vector.new_flat()
        gather(vector, tensors, flat)
        checksum = zlib.crc32(byte_view(flat), checksum)
    return checksum
