"""Writes and reads the state of a model as a file of safetensors, which ``safetensors.torch.load_file`` opens too.

The format holds dense tensors by name, and shares none. Of tied weights the first name is written; the other names are
in the file's metadata, as ``safetensors.torch.save_model`` writes them, so ``load_model`` of the same package takes the
file as well. What the format does not hold (``get_extra_state``, sparse or quantized tensors, complex128) is left over.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from asyncdist import validation

_DTYPES: Final = frozenset(
    (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
)


def check_installed() -> None:
    """Raise ModuleNotFoundError, saying what to install, where the package is missing."""
    with validation.optional_imports("the format 'safetensors'", ["safetensors"], "safetensors"):
        import safetensors.torch  # noqa: F401


def write_model(path: Path, state: Mapping[str, Any]) -> tuple[OrderedDict[str, Any], dict[str, str]]:
    """Write what the format holds.

    Args:
        path: of the file.
        state: of a model.

    Returns:
        What is left over; and by the names that were not written the names of the tensors that they share.
    """
    from safetensors.torch import save_file

    rest: OrderedDict[str, Any] = OrderedDict()
    vars(rest).update(getattr(state, "__dict__", {}))  # a module's versions, which load_state_dict reads
    tied: dict[str, str] = {}
    names: dict[tuple[Any, ...], str] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        if type(value) is not torch.Tensor or value.layout is not torch.strided or value.dtype not in _DTYPES:
            rest[name] = value
            continue
        same = (value.untyped_storage()._cdata, value.storage_offset(), value.shape, value.stride(), value.dtype)
        first = names.setdefault(same, name)
        if first == name or not value.numel():
            tensors[name] = value.resolve_neg().contiguous()
        else:
            tied[name] = first
    save_file(_apart(tensors), path, metadata={"format": "pt", **tied})
    return rest, tied


def read_model(path: Path, rest: OrderedDict[str, Any], tied: Mapping[str, str]) -> OrderedDict[str, Any]:
    """Return the state that :func:`write_model` has written, with what was left over. It may be mapped memory."""
    check_installed()
    from safetensors.torch import load_file

    tensors = load_file(path, device="cpu")
    state = OrderedDict({**tensors, **{name: tensors[first] for name, first in tied.items()}, **rest})
    vars(state).update(vars(rest))
    return state


def _apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors, contiguous ones, with copies of those that begin inside another one: none may overlap."""
    apart: dict[str, torch.Tensor] = {}
    ends: dict[torch.device, int] = {}
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_ptr()):
        if tensor.data_ptr() < ends.get(tensor.device, 0):
            apart[name] = tensor.clone()
        else:
            apart[name] = tensor
            ends[tensor.device] = tensor.data_ptr() + tensor.nbytes
    return apart
