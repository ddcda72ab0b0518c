"""Finds the optimizers inside wrappers such as those of Accelerate, Lookahead and mixed precision."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

#: Attributes that :func:`attributes_of` leaves out.
_OWN_ATTRIBUTES: Final = frozenset(("state", "param_groups", "defaults"))
#: Packages whose wrappers of optimizers keep no weights.
_PREPARING: Final = frozenset(("accelerate", "lightning", "lightning_fabric", "pytorch_lightning"))


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside a wrapper of Accelerate or Lightning; for any other optimizer, ``optimizer``.

    Other wrappers, such as Lookahead, may keep copies of the weights, which must be averaged too.
    """
    is_wrapper = type(optimizer).__module__.partition(".")[0] in _PREPARING
    return getattr(optimizer, "optimizer", optimizer) if is_wrapper else optimizer


def class_name(optimizer: Any) -> str:
    """Return the name of an optimizer's class, without a wrapper of Accelerate or Lightning."""
    return type(unwrapped(optimizer)).__qualname__


def wrapped_optimizers(optimizer: Any) -> tuple[Any, ...]:
    """Return an optimizer and all optimizers reachable through its attributes, each once."""
    found: list[Any] = []
    waiting = [optimizer]
    while waiting:
        each = waiting.pop()
        if not any(each is other for other in found):
            found.append(each)
            for value in attributes_of(each).values():
                waiting += filter(_is_optimizer, items_of(value))
    return tuple(found)


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, torch.optim.Optimizer) or (
        not isinstance(value, (Tensor, type))
        and all(hasattr(value, name) for name in ("param_groups", "state", "step"))
    )


def attributes_of(optimizer: Any) -> dict[str, Any]:
    """Return an optimizer's attributes except state, parameter groups, defaults and hooks."""
    own: dict[str, Any] = getattr(optimizer, "__dict__", {})
    return {name: value for name, value in own.items() if name not in _OWN_ATTRIBUTES and "hooks" not in name}


def items_of(value: Any) -> Iterable[Any]:
    """Return the values of a list, tuple or mapping; for any other value, a tuple that contains only this value."""
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, (list, tuple)) else (value,)
