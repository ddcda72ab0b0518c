"""Finds the optimizers inside wrappers, such as Lookahead and those of Accelerate and of mixed precision."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

#: Attributes that :func:`attributes_of` omits.
_OWN_ATTRIBUTES: Final = frozenset(("state", "param_groups", "defaults"))
#: Packages whose optimizer wrappers store no weights.
_PREPARING: Final = frozenset(("accelerate", "lightning", "lightning_fabric", "pytorch_lightning"))


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside a wrapper of Accelerate or Lightning, or ``optimizer`` itself if there is no wrapper.

    Other wrappers, such as Lookahead, may store copies of the weights, which must also be averaged.
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


def needs_closure(optimizer: Any) -> bool:
    """Return whether the optimizer's ``step`` requires a closure that computes the loss, like the ``step`` of LBFGS."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def items_of(value: Any) -> Iterable[Any]:
    """Return the values of a list, tuple or mapping, or a tuple with only ``value`` if it is something else."""
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, (list, tuple)) else (value,)
