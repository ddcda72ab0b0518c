"""Distinguishes an optimizer's state from its settings in parameter groups.

Some optimizers store a part of their state in the groups, such as step counts (schedule-free optimizers, and those of
pytorch_optimizer) or an estimated learning rate (Prodigy). ``defaults`` does not tell them apart, because such
optimizers put initial values of their state there, too. Settings are arguments of a constructor.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

import torch

from asyncdist.tensors.optimizers.wrapped import unwrapped, wrapped_optimizers

#: Settings, even of optimizers whose constructors do not name them.
_SETTINGS: Final = frozenset(("params", "param_names", "lr", "betas", "momentum", "eps", "weight_decay", "train_mode"))
#: Estimates of the learning rate by Prodigy and D-Adaptation.
_ESTIMATES: Final = frozenset(("d", "d_max"))
_STEP_COUNTS: Final = frozenset(("step", "k"))
#: Entries that torch's learning rate schedulers write.
_SCHEDULED: Final = frozenset(("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"))


def setting_names(optimizer: Any) -> frozenset[str]:
    """Return the names of entries of parameter groups that are settings, of an optimizer and those that it wraps."""
    found = {*_SETTINGS, *_SCHEDULED}
    for each in wrapped_optimizers(unwrapped(optimizer)):
        kind: Any = type(each)
        found |= _arguments_of(kind)
    return frozenset(found)


@functools.cache
def _arguments_of(kind: Any) -> frozenset[str]:
    """Return the names of the arguments of a class's constructor, and of those of its base classes."""
    found = set[str]()
    for constructor in (vars(each)["__init__"] for each in kind.__mro__ if "__init__" in vars(each)):
        with contextlib.suppress(TypeError, ValueError):  # a compiled constructor may have no signature
            found.update(inspect.signature(constructor).parameters)
    return frozenset(found)


def reset_group_state(optimizer: Any) -> None:
    """Reset the state in an optimizer's parameter groups, in place where it is a tensor that ``defaults`` has.

    Settings, the user's own entries that are not tensors, and finite estimates of the learning rate are kept.
    """
    defaults, kept = getattr(optimizer, "defaults", {}), setting_names(optimizer)
    for group in optimizer.param_groups:
        for name in group.keys() - kept:
            value, first = group[name], defaults.get(name)
            if name in _ESTIMATES and torch.isfinite(torch.as_tensor(value, device="cpu")).all():
                continue
            if isinstance(first, int | float):
                if isinstance(value, torch.Tensor):
                    value.fill_(first)
                else:
                    group[name] = first
            elif name not in defaults and (isinstance(value, torch.Tensor) or name in _STEP_COUNTS):
                del group[name]  # the next step creates it


def load_group_state(optimizer: Any, groups: Iterable[Mapping[str, Any]], settings: Collection[str] = ()) -> None:
    """Copy another optimizer's state into the parameter groups, in place where it is a tensor. Settings are kept.

    Args:
        groups: Parameter groups in the state of an optimizer of the same class.
        settings: Names of further entries to keep.
    """
    kept = setting_names(optimizer).union(settings)
    for own, theirs in zip(optimizer.param_groups, groups, strict=True):
        for name in theirs.keys() - kept:
            _put(own, name, theirs[name])


def _put(group: dict[str, Any], name: str, new: Any) -> None:
    old = group.get(name)
    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor) and old.shape == new.shape:
        old.copy_(new)  # a CUDA graph may read its memory
    elif isinstance(new, torch.Tensor):
        group[name] = new.to((old if isinstance(old, torch.Tensor) else group["params"][0]).device)
    else:
        group[name] = new
