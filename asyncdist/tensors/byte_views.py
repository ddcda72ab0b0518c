"""Views tensors as bytes: the only way here, for all code that sends, stores or receives them.

A tensor that torch calls contiguous may still have an odd stride where a dimension has one element (one row of a
column has stride 2, say), its values may be conjugated or negated only when they are read, and numpy knows neither
bfloat16 nor float8. All that is dealt with here, so no other module views a tensor as bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def oddity_of(tensor: Tensor) -> str | None:
    """Say why a tensor has no plain values in memory, as in "a nested tensor"; None for a dense one."""
    if tensor.is_meta:
        return "a meta tensor (it has no values)"
    if tensor.is_quantized:
        return "a quantised tensor"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout != torch.strided:
        return f"a sparse tensor ({str(tensor.layout).removeprefix('torch.')})"
    wraps_others: bool = is_traceable_wrapper_subclass(tensor)  # as a DTensor does
    return f"a {type(tensor).__name__} (it has no memory of its own)" if wraps_others else None


def check_dense(tensor: Any, name: str = "tensor") -> None:
    """Refuse anything but a dense tensor.

    Args:
        tensor: anything.
        name: how it is called in the message.

    Raises:
        TypeError: it is not a dense tensor.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is a {type(tensor).__qualname__}; allowed: a dense tensor")
    oddity = oddity_of(tensor)
    if oddity is not None:
        raise TypeError(f"{name} is {oddity}; allowed: a dense tensor")


def check_writable(tensor: Any, name: str = "tensor") -> None:
    """Refuse a tensor into which values cannot be written.

    Args:
        tensor: anything.
        name: how it is called in the message.

    Raises:
        TypeError: it is no dense tensor.
        ValueError: some of its elements are one in memory, as those of an expanded tensor are.
    """
    check_dense(tensor, name)
    shape, strides = tuple(tensor.shape), tensor.stride()
    if tensor.numel() and any(size > 1 and not stride for size, stride in zip(shape, strides, strict=True)):
        raise ValueError(
            f"{name} has shape {shape} and stride {strides}, as an expanded tensor: several elements are one in "
            "memory, and each gets a value of its own; clone it first"
        )


def to_host(tensor: Tensor) -> Tensor:
    """Return the values of a dense tensor in CPU memory, contiguous, outside any graph.

    It is the tensor's own memory where that is so already.
    """
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def byte_view(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous dense CPU tensor, of any dtype, without a copy.

    Raises:
        ValueError: it is not contiguous, not in CPU memory, or a conjugated or negated view.
    """
    if not tensor.is_cpu:
        raise ValueError(f"a stream takes tensors in CPU memory; this one is on {tensor.device}")
    if not tensor.is_contiguous():
        raise ValueError(
            f"a stream takes contiguous tensors; this one has shape {tuple(tensor.shape)} and stride {tensor.stride()}"
        )
    if not tensor.nbytes:
        return memoryview(bytearray())
    # With the cold caches that a transfer leaves, detach and view(torch.uint8) take several microseconds each.
    if tensor.requires_grad:
        tensor = tensor.detach()
    try:
        view = tensor.numpy().data
    except (TypeError, RuntimeError):
        view = _as_bytes(tensor).numpy().data
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def flat_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a dense tensor as a 1-D uint8 tensor in CPU memory; the tensor's own memory where it can."""
    host = to_host(tensor)
    return _as_bytes(host) if host.nbytes else torch.empty(0, dtype=torch.uint8, device="cpu")


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor: its strides are ignored, since those of one element may be anything."""
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(
            "a stream takes tensors as they lie in memory; this one is a conjugated or negated view: "
            "pass tensor.resolve_conj().resolve_neg()"
        )
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def write(tensor: Tensor, values: Tensor) -> None:
    """Copy ``values`` into a tensor that may be a parameter, or may have been made in inference mode."""
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        tensor.copy_(values)


def empty_stack(like: Tensor, count: int) -> Tensor:
    """Return uninitialised CPU memory for so many tensors of one shape and dtype, stacked."""
    return torch.empty((count, *like.shape), dtype=like.dtype, device="cpu")


def split(view: memoryview, chunk_nbytes: int) -> list[memoryview]:
    """Cut ``view`` into chunks; both ends must use the same sizes."""
    return [view[start : start + chunk_nbytes] for start in range(0, len(view), chunk_nbytes)]
