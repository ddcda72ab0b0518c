"""Checks that a loaded optimizer's state fits this rank's optimizer, before it is loaded.

``Optimizer.load_state_dict`` compares only the numbers of parameters. It would replace the current state with a state
of other shapes or types, and the next step would fail.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from asyncdist.tensors.optimizers.loading import torch_part

#: torch optimizers whose state tensors may have different shapes than the parameters.
_OTHER_SHAPES: Final = (torch.optim.Adafactor, torch.optim.LBFGS)


def check(optimizer: torch.optim.Optimizer, loaded: Mapping[str, Any]) -> None:
    """Raise a ValueError that names the first entry of a loaded state that does not fit the optimizer, if any.

    For torch's optimizers except Adafactor and LBFGS, a tensor must have the shape of its parameter, or one element.
    Only the part of the state with torch's keys is checked, if there is one.
    """
    loaded = torch_part(loaded)
    if not loaded:
        if torch_part(optimizer.state_dict()):
            raise ValueError("the checkpoint's state of the optimizer has no 'state' and 'param_groups'")
        return
    for number, (own, saved) in enumerate(zip(optimizer.param_groups, loaded["param_groups"], strict=True)):
        if "lr" in own and "lr" not in saved:
            raise ValueError(f"the checkpoint's parameter group {number} of the optimizer has no 'lr'")
        for name, value in own.items():
            if name != "params" and name in saved and not _can_replace(value, saved[name]):
                raise ValueError(
                    f"the optimizer's {name!r} must be like {value!r:.40} of this optimizer, got {saved[name]!r:.40} "
                    "in the checkpoint"
                )
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    is_of_torch = type(optimizer).__module__.startswith("torch.optim.") and not isinstance(optimizer, _OTHER_SHAPES)
    for place, entries in loaded["state"].items():
        if not isinstance(place, int):
            continue  # some optimizers have entries that belong to no parameter
        if not 0 <= place < len(parameters):
            raise ValueError(
                f"the optimizer has {len(parameters)} parameters, but the checkpoint has a state of {place}"
            )
        if not isinstance(entries, Mapping):
            raise ValueError(f"the optimizer's state of parameter {place} must be a dictionary, got {entries!r:.40}")
        for name, value in entries.items():
            if problem := _problem(value, parameters[place], is_of_torch=is_of_torch):
                raise ValueError(f"the optimizer's state {name!r:.40} of parameter {place} {problem} in the checkpoint")


def _problem(value: Any, parameter: torch.Tensor, *, is_of_torch: bool) -> str:
    """Return the reason why ``value`` cannot be part of a parameter's state, or an empty string."""
    if not isinstance(value, torch.Tensor):
        return f"must be a tensor or a number, got {value!r:.40}" if is_of_torch and isinstance(value, str) else ""
    if value.is_meta and not parameter.is_meta:
        return "has no values (device meta)"
    if value.shape == parameter.shape:
        is_number = value.is_floating_point() or value.is_complex() or value.numel() == 1
        return f"must have floating-point numbers, got {value.dtype}" if is_of_torch and not is_number else ""
    if is_of_torch and value.numel() != 1:
        return f"must have the shape {tuple(parameter.shape)}, got {tuple(value.shape)}"
    is_dense = type(value) is torch.Tensor and value.layout is torch.strided and not value.is_quantized
    if is_dense and value.numel() * value.element_size() > value.untyped_storage().nbytes():
        return f"has the shape {tuple(value.shape)}, but fewer values"
    return ""


def _can_replace(own: Any, saved: Any) -> bool:
    """Return whether a saved option of an optimizer can replace the optimizer's current value ``own``."""
    if own is None or saved is None or isinstance(own, bool):
        return own is None or saved is None or isinstance(saved, bool)
    if _is_number(own):
        return _is_number(saved)
    if isinstance(own, Sequence) and not isinstance(own, str):
        if not isinstance(own, tuple):
            return isinstance(saved, Sequence) and not isinstance(saved, str)
        return isinstance(saved, (tuple, list)) and len(own) == len(saved) and all(map(_can_replace, own, saved))
    return isinstance(saved, str) if isinstance(own, str) else True


def _is_number(value: Any) -> bool:
    is_tensor = isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta
    return is_tensor or (isinstance(value, (int, float)) and not isinstance(value, bool))
