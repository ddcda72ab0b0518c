"""Writes and reads a model's state as a safetensors file, which ``safetensors.torch.load_file`` also opens.

The format stores dense tensors by name. Tensors cannot share memory. Tied weights are written under their first name,
and the file's metadata lists their other names, so that ``safetensors.torch.load_model`` also works. Unsupported
entries (``get_extra_state``, sparse or quantized tensors, complex128) are returned separately.
"""

from __future__ import annotations

import os
import re
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
    """Raise ModuleNotFoundError, which names the package to install, if safetensors is not installed."""
    with validation.optional_imports("the format 'safetensors'", ["safetensors"], "safetensors"):
        import safetensors.torch  # noqa: F401


def write_model(path: Path, state: Mapping[str, Any]) -> tuple[OrderedDict[str, Any], dict[str, str]]:
    """Write the entries that the format supports.

    Return the other entries, and a map of names to the names of shared tensors. A system error is raised as an OSError,
    without the file's name, because SafetensorError does not contain it.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    rest: OrderedDict[str, Any] = OrderedDict()
    vars(rest).update(getattr(state, "__dict__", {}))  # copies a module's version numbers, which load_state_dict reads
    tied: dict[str, str] = {}
    names: dict[tuple[Any, ...], str] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        if type(value) is not torch.Tensor or value.layout is not torch.strided or value.dtype not in _DTYPES:
            rest[name] = value
            continue
        place = value.untyped_storage()._cdata, value.storage_offset(), value.shape, value.stride()
        same = (*place, value.dtype, value.is_neg())
        first = names.setdefault(same, name)
        if first == name or not value.numel():
            tensors[name] = value.resolve_neg().contiguous()
        else:
            tied[name] = first
    try:
        save_file(_unshared(tensors), path, metadata={**tied, "format": "pt"})
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
    return rest, tied


def read_model(path: Path, rest: OrderedDict[str, Any], tied: Mapping[str, str]) -> OrderedDict[str, Any]:
    """Return the state written by :func:`write_model`, merged with ``rest``. Its tensors may be memory-mapped."""
    check_installed()
    from safetensors.torch import load_file

    tensors = load_file(path, device="cpu")
    state = OrderedDict({**tensors, **{name: tensors[first] for name, first in tied.items()}, **rest})
    vars(state).update(vars(rest))
    return state


def read_foreign(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of any safetensors file, memory-mapped, under all names that the file's metadata lists."""
    check_installed()
    from safetensors import safe_open

    with safe_open(path, framework="pt", device="cpu") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        tied = file.metadata() or {}
    # The entry "format" has the name of a library, such as "pt", instead of a tensor's name.
    known = {name: tensors[first] for name, first in tied.items() if name != "format" and first in tensors}
    return {**tensors, **known}


def _unshared(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return contiguous tensors without shared memory. A tensor that begins inside another one is copied."""
    apart: dict[str, torch.Tensor] = {}
    ends: dict[torch.device, int] = {}
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_ptr()):
        if tensor.data_ptr() < ends.get(tensor.device, 0):
            apart[name] = tensor.clone()
        else:
            apart[name] = tensor
            ends[tensor.device] = tensor.data_ptr() + tensor.nbytes
    return apart
