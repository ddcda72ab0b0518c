"""Finds the named tensors of a model, and checks that each tensor has its own memory."""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from asyncdist.tensors.byte_views import byte_view, dtype_name, to_host

_ALLOWED: Final = (
    "a model's tensors must be dense and must not overlap in memory, except for tensors that share one view"
)


def gather(module: nn.Module, keys: list[str | None], tensors: list[Tensor]) -> None:
    """Append the parameters and persistent buffers of a module and its submodules, each of them once per name.

    This takes a third of the time that `named_modules` takes, which was most of the time of a small model's averaging
    round.

    Args:
        keys: Output list, from which `names_of` computes the names. It receives the keys of the module's tensors, then
            None. For each submodule, its key and the keys inside it follow, recursively. The last item is None.
        tensors: Output list, which receives the tensors in the order of their keys.
    """
    for key, tensor in module._parameters.items():
        if tensor is not None:
            keys.append(key)
            tensors.append(tensor)
    if module._buffers:  # most modules have no buffers, and this test is faster than entering the loop
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                keys.append(key)
                tensors.append(buffer)
    keys.append(None)
    if module._modules:
        for key, child in module._modules.items():
            if child is not None:
                keys.append(key)
                gather(child, keys, tensors)
    keys.append(None)


def names_of(keys: Sequence[str | None]) -> list[str]:
    """Return the tensors' names, in order, derived from the keys that `gather` has collected."""
    names, path = [], [""]
    among_tensors = True
    for key in keys:
        if key is None:
            if not among_tensors:
                path.pop()
            among_tensors = False
        elif among_tensors:
            names.append(path[-1] + key)
        else:
            path.append(f"{path[-1]}{key}.")
            among_tensors = True
    return names


def is_sharded(tensor: Any) -> bool:
    """Return whether a tensor is a DTensor, without importing DTensor (which takes most of a second)."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Any) -> Any:
    """Return this rank's shard of a DTensor (always the same object), or any other value unchanged."""
    return tensor._local_tensor if is_sharded(tensor) else tensor


def take_local_parts(names: Sequence[str], tensors: list[Tensor]) -> tuple[dict[str, str], set[int]]:
    """Replace each DTensor in ``tensors`` with this rank's shard. Raise ValueError for a partial placement.

    Returns:
        A description of each DTensor's sharding by name, and the global torch.distributed ranks over which any tensor
        is sharded.
    """
    shardings: dict[str, str] = {}
    meshes: set[int] = set()
    for place, (name, tensor) in enumerate(zip(names, tensors, strict=True)):
        if is_sharded(tensor):
            shardings[name] = f" as {_sharding_of(name, tensor)}"
            meshes.update(tensor.device_mesh.mesh.flatten().tolist())  # type: ignore[attr-defined]
            tensors[place] = local_part(tensor)
    return shardings, meshes


def trained_names(module: nn.Module) -> set[str]:
    """Return all names of the parameters that currently require a gradient."""
    return {name for name, each in module.named_parameters(remove_duplicate=False) if each.requires_grad}


def frozen_places(tensors: Sequence[Tensor]) -> list[int]:
    """Return the indices of the frozen parameters that share no memory with a trained parameter or a buffer."""
    frozen = [isinstance(tensor, nn.Parameter) and not tensor.requires_grad for tensor in tensors]
    plain = (nn.Parameter, Tensor)  # an instance of a subclass may have no memory
    trained = {
        identity_of(each)
        for each, is_frozen in zip(tensors, frozen, strict=True)
        if not is_frozen and type(each) in plain
    }
    return [
        place
        for place, tensor in enumerate(tensors)
        if frozen[place] and not (type(tensor) in plain and identity_of(tensor) in trained)
    ]


def digest_of(named: Iterable[tuple[str, Tensor]]) -> str:
    """Return a hash of names, shapes, dtypes and values. For a wrapper, the values of its inner tensors are hashed."""
    found = hashlib.sha256()
    for name, tensor in named:
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        for part in _dense_parts(tensor):
            found.update(byte_view(to_host(part)))
    return found.hexdigest()


def _dense_parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the dense tensors inside a tensor: this rank's shard of a DTensor, or the tensors inside a wrapper."""
    own = local_part(tensor)
    if is_traceable_wrapper_subclass(own):
        for name in own.__tensor_flatten__()[0]:
            yield from _dense_parts(getattr(own, name))
    else:
        yield own.data


def _sharding_of(name: str, tensor: Any) -> str:
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(f"the placements of {name!r} must be Shard or Replicate, got {tensor.placements}")
    return f"{tuple(tensor.placements)} of {tuple(tensor.shape)} over {tuple(tensor.device_mesh.shape)}"


def check_supported(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless the tensor has ordinary, readable and writable memory."""
    trouble = None
    if _is_lazy(tensor):
        trouble = "is not initialised; run one forward pass first"
    elif tensor.is_meta:
        trouble = "is on the meta device and has no values"
    elif tensor.is_inference() and not torch.is_inference_mode_enabled():
        trouble = "was made in inference mode and cannot be written outside it; clone it"
    elif tensor.is_quantized:
        trouble = "is quantised"
    elif not _has_arithmetic(tensor.dtype):
        trouble = f"is {dtype_name(tensor.dtype)}, a dtype that torch can neither copy nor add"
    elif tensor.layout != torch.strided or tensor.is_nested:
        trouble = f"is sparse or nested (layout {tensor.layout})"
    elif is_sharded(tensor):
        trouble = "is a DTensor, which may be sharded; only a policy with replica_size averages sharded models"
    elif tensor.numel() and _address(tensor) == 0:
        trouble = f"is a {type(tensor).__name__} without memory of its own"
    elif tensor.numel() and not _is_simple(tensor) and _overlaps_itself(tensor):
        trouble = f"overlaps itself (shape {tuple(tensor.shape)}, strides {tensor.stride()}), as expanded tensors do"
    if trouble is not None:
        raise ValueError(f"the tensor {name!r} {trouble}; {_ALLOWED}")


def check_gradient(name: str, parameter: Tensor) -> None:
    """Raise ValueError if the parameter's gradient is sharded or sparse, or has no values."""
    if _is_lazy(parameter):
        raise ValueError(f"the parameter {name!r} is not initialised; run one forward pass first")
    gradient, trouble = parameter.grad, None
    if is_sharded(parameter):
        trouble = "is a DTensor, which may be sharded"
    elif gradient is not None and gradient.layout != torch.strided:
        trouble = f"is sparse ({gradient.layout})"
    elif gradient is not None and gradient.is_meta:
        trouble = "is on the meta device and has no values"
    if trouble is not None:
        raise ValueError(f"the gradient of {name!r} must be dense, but it {trouble}")


@functools.cache
def _has_arithmetic(dtype: torch.dtype) -> bool:
    """Return whether torch can copy values of a dtype and, if it is a floating dtype, convert them to float32."""
    value = torch.zeros(1, dtype=dtype, device="cpu")
    try:
        value.to(torch.float32) if dtype.is_floating_point else torch.zeros_like(value).copy_(value)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _is_lazy(tensor: Tensor) -> bool:
    return isinstance(tensor, (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer))


def _address(tensor: Tensor) -> int:
    """Return the tensor's data pointer, or 0 for wrapper tensors, which have no data pointer."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


def identity_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for equal views of the same memory.

    All empty tensors are at address 0, so the key of an empty tensor identifies the object.
    """
    if tensor.numel() == 0:
        return ("empty", id(tensor))
    flags = (tensor.is_conj(), tensor.is_neg())
    return (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, flags)


def _is_simple(tensor: Tensor) -> bool:
    """Return whether each stride exceeds the extent of the inner dimensions, which means that no elements overlap."""
    if tensor.is_contiguous():
        return True
    span = 0
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= span:
                return False
            span += stride * (size - 1)
    return True


def _extent_nbytes(tensor: Tensor) -> int:
    """Return the number of bytes from the start of a tensor's first element to the end of its last element."""
    if tensor.is_contiguous():
        return tensor.nbytes
    steps = (stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return (sum(steps) + 1) * tensor.itemsize


def _mark(mask: np.ndarray[Any, np.dtype[np.bool_]], tensor: Tensor, start: int) -> np.ndarray[Any, Any]:
    """Return the part of ``mask`` that corresponds to a tensor's bytes.

    The mask has one value per byte from ``start``.
    """
    strides = (*(stride * tensor.itemsize for stride in tensor.stride()), 1)
    where = tensor.data_ptr() - start
    return np.lib.stride_tricks.as_strided(mask[where:], (*tensor.shape, tensor.itemsize), strides)


def _overlaps_itself(tensor: Tensor) -> bool:
    mask = np.zeros(_extent_nbytes(tensor), dtype=np.bool_)
    _mark(mask, tensor, tensor.data_ptr())[...] = True
    return int(mask.sum()) < tensor.nbytes


def check_overlap(entries: Sequence[tuple[str, Tensor]]) -> None:
    """Raise ValueError if entries share bytes without being the same view.

    Only overlapping address ranges are compared byte by byte, so that interleaved columns of one matrix are accepted.
    """
    spans = sorted(
        ((str(t.device), t.data_ptr(), t.data_ptr() + _extent_nbytes(t), name, t) for name, t in entries if t.numel()),
        key=lambda span: span[:3],
    )
    cluster: list[tuple[str, Tensor]] = []
    device, start, end = "", 0, 0
    for span_device, first, last, name, tensor in spans:
        if span_device != device or first >= end:
            _check_cluster(cluster, start, end)
            cluster, device, start, end = [], span_device, first, last
        cluster.append((name, tensor))
        end = max(end, last)
    _check_cluster(cluster, start, end)


def _check_cluster(cluster: Sequence[tuple[str, Tensor]], start: int, end: int) -> None:
    if len(cluster) < 2:
        return
    mask = np.zeros(end - start, dtype=np.bool_)
    for name, tensor in cluster:
        view = _mark(mask, tensor, start)
        if view.any():
            own = np.zeros_like(mask)
            _mark(own, tensor, start)[...] = True
            other = next(other for other, its in cluster if _mark(own, its, start).any())
            raise ValueError(f"the tensors {name!r} and {other!r} overlap in memory; {_ALLOWED}")
        view[...] = True
