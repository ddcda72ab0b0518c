"""Resets an optimizer's state after the weights to which the state belongs were replaced."""

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, optim

from asyncdist.tensors.optimizers.loading import setting_names
from asyncdist.tensors.optimizers.recognition import SLOW
from asyncdist.tensors.optimizers.wrapped import wrapped_optimizers

#: torch's optimizers that have the option ``capturable`` and whose first step starts from a state of zeros.
_FROM_ZEROS: Final = (optim.Adadelta, optim.Adam, optim.AdamW, optim.Adamax, optim.RAdam, optim.RMSprop)
#: Names of the learning rates that Prodigy and D-Adaptation have estimated.
_ESTIMATES: Final = frozenset(("d", "d_max"))
_STEP_COUNTS: Final = frozenset(("step", "k"))


def reset_optimizer_state(optimizer: Any) -> None:
    """Clear the moments and step counts of an optimizer, and of the optimizers that it wraps, in place.

    Hyperparameters and learning rates that an optimizer has estimated are kept. A wrapper's slow weights are also kept,
    because only the wrapper's constructor creates them.
    """
    states: list[Any] = []
    for each in reversed(wrapped_optimizers(optimizer)):  # inner optimizers are reset before their wrappers
        if any(each.state is state for state in states):
            continue
        if isinstance(each, torch.optim.Adagrad):
            _reset_adagrad(each)
        elif states and any(isinstance(state, Mapping) and SLOW.intersection(state) for state in each.state.values()):
            for state in each.state.values():
                for key, value in state.items():
                    if key not in SLOW and isinstance(value, Tensor):
                        value.zero_()
        else:  # some optimizers also store numbers under string keys; only MADGRAD's step count is reset
            captured = _captured(each)
            for parameter in [key for key in each.state if isinstance(key, Tensor)]:
                if id(parameter) in captured:
                    for value in each.state[parameter].values():
                        value.zero_()
                else:
                    _reset_entry(each.state, parameter)
            _reset_step_count(each.state)
            _reset_group_state(each)
        states.append(each.state)


def _captured(optimizer: Any) -> set[int]:
    """Return the IDs of the parameters whose state a CUDA graph may read and write at its current addresses."""
    groups = optimizer.param_groups if type(optimizer) in _FROM_ZEROS else ()
    return {id(parameter) for group in groups if group.get("capturable") for parameter in group["params"]}


def _reset_entry(states: Any, parameter: Tensor) -> None:
    """Delete a parameter's state, except the boolean mask of the weights that SaRA's constructor has selected."""
    state = states[parameter]
    mask = state.get("mask") if isinstance(state, Mapping) else None
    del states[parameter]
    if isinstance(mask, Tensor) and mask.dtype == torch.bool:
        states[parameter] = {"mask": mask}


def _reset_step_count(states: Any) -> None:
    """Set MADGRAD's step count, with which its learning rate grows, to 0. If it is a tensor, it is changed in place."""
    count = states.get("k")
    if isinstance(count, Tensor):
        count.zero_()
    elif isinstance(count, int):
        states["k"] = 0


@torch.inference_mode(False)  # the state is used after the caller's inference mode has ended
def _reset_adagrad(optimizer: torch.optim.Adagrad) -> None:
    """Restore the state that the constructor created. Up to torch 2.12, Adagrad's step needs it."""
    for group in optimizer.param_groups:
        start = group["initial_accumulator_value"]
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            state["step"] = torch.zeros_like(state["step"])
            state["sum"] = torch.full_like(state["sum"], complex(start, start) if parameter.is_complex() else start)


def _reset_group_state(optimizer: Any) -> None:
    """Reset the state in an optimizer's parameter groups. Tensors that ``defaults`` also has are changed in place.

    Settings, the user's own entries that are not tensors, and finite estimates of the learning rate are kept.
    """
    defaults, kept = getattr(optimizer, "defaults", {}), setting_names(optimizer)
    for group in optimizer.param_groups:
        for name in group.keys() - kept:
            value, first = group[name], defaults.get(name)
            if name in _ESTIMATES and torch.isfinite(torch.as_tensor(value, device="cpu")).all():
                continue
            if isinstance(first, int | float):
                if isinstance(value, Tensor):
                    value.fill_(first)
                else:
                    group[name] = first
            elif name not in defaults and (isinstance(value, Tensor) or name in _STEP_COUNTS):
                del group[name]  # the next step creates the entry
