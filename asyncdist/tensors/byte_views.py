"""Views tensors as bytes, for all code that sends, stores or receives tensors.

There are three pitfalls: in a dimension of size 1, a contiguous tensor may have any stride; a conjugation or negation
of its values may be pending; and NumPy supports neither bfloat16 nor float8.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name, such as ``"float32"``."""
    return str(dtype).removeprefix("torch.")


def oddity_of(tensor: Tensor) -> str | None:
    """Return None for a plain dense tensor. For any other tensor, return a description, such as "a nested tensor"."""
    if tensor.is_meta:
        return "a meta tensor (it has no values)"
    if tensor.is_quantized:
        return "a quantised tensor"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout != torch.strided:
        return f"a sparse tensor ({str(tensor.layout).removeprefix('torch.')})"
    wraps_others: bool = is_traceable_wrapper_subclass(tensor)  # for example a DTensor
    return f"a {type(tensor).__name__} (it has no memory of its own)" if wraps_others else None


def check_dense(tensor: Any, name: str = "tensor") -> None:
    """Raise TypeError, with ``name`` in the message, unless ``tensor`` is a dense tensor."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a dense tensor, got a {type(tensor).__qualname__}")
    oddity = oddity_of(tensor)
    if oddity is not None:
        raise TypeError(f"{name} must be a dense tensor, got {oddity}")


def check_writable(tensor: Any, name: str = "tensor") -> None:
    """Raise TypeError if ``tensor`` is not a dense tensor, or ValueError if several of its elements share memory."""
    check_dense(tensor, name)
    shape, strides = tuple(tensor.shape), tensor.stride()
    if tensor.numel() and any(size > 1 and not stride for size, stride in zip(shape, strides, strict=True)):
        raise ValueError(
            f"{name} must not have several elements in one place in memory, as an expanded tensor does, got shape "
            f"{shape} and stride {strides}; clone it first"
        )


def to_host(tensor: Tensor) -> Tensor:
    """Return a dense tensor's values as a contiguous, detached CPU tensor, without a copy if possible."""
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def byte_view(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous dense CPU tensor without a copy. Raise ValueError for other tensors."""
    if not tensor.is_cpu:
        raise ValueError(f"a tensor to send must be in CPU memory, got a tensor on {tensor.device}")
    if not tensor.is_contiguous():
        raise ValueError(
            f"a tensor to send must be contiguous, got shape {tuple(tensor.shape)} and stride {tensor.stride()}; pass "
            "tensor.contiguous()"
        )
    if not tensor.nbytes:
        return memoryview(bytearray())
    # detach and view(torch.uint8) are avoided, because each takes microseconds right after a transfer, when the caches
    # are cold.
    if tensor.requires_grad:
        tensor = tensor.detach()
    try:
        view = tensor.numpy().data
    except (TypeError, RuntimeError):
        view = _as_bytes(tensor).numpy().data
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def flat_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a dense tensor as a 1-D uint8 CPU tensor, without a copy if possible."""
    host = to_host(tensor)
    return _as_bytes(host) if host.nbytes else torch.empty(0, dtype=torch.uint8, device="cpu")


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor's bytes as a 1-D uint8 tensor.

    Strides are ignored, because a dimension of size 1 may have any stride.
    """
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(
            "a tensor to send must not be a conjugated or negated view; pass tensor.resolve_conj().resolve_neg()"
        )
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def write(tensor: Tensor, values: Tensor) -> None:
    """Copy ``values`` into a tensor of any kind, including parameters and inference tensors."""
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        tensor.copy_(values)


@torch.inference_mode(False)  # the tensor is used after the caller's inference mode has ended
def new_memory(nbytes: int) -> Tensor:
    """Allocate uninitialised memory as a uint8 tensor."""
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def empty_stack(like: Tensor, count: int) -> Tensor:
    """Return an uninitialised CPU tensor that can stack ``count`` tensors of the shape and dtype of ``like``."""
    return torch.empty((count, *like.shape), dtype=like.dtype, device="cpu")


def split(view: memoryview, chunk_nbytes: int) -> list[memoryview]:
    """Split ``view`` into chunks of ``chunk_nbytes`` bytes. Sender and receiver must use the same size."""
    return [view[start : start + chunk_nbytes] for start in range(0, len(view), chunk_nbytes)]
