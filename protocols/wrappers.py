"""What makes a model a replica of others: wrappers that synchronise it behind the policy's back.

DDP averages gradients on the assumption that all replicas hold equal weights, and FSDP keeps a part of each weight per
rank. A policy that gives one rank other weights breaks both without an error: the replicas diverge.
"""

from __future__ import annotations

import gc
from typing import Final

import torch
from torch import nn

from asyncdist import LocalProtocolError

#: Modules of torch that define such wrappers; those of FSDP also stand among the bases of what `fully_shard` is given.
_WRAPPERS: Final = ("torch.nn.parallel.distributed", "torch.distributed.fsdp", "torch.distributed._composable")
_WHY: Final = (
    "it keeps its replicas equal, which a policy that gives ranks weights of their own breaks; "
    "allowed: a model that no such wrapper synchronises"
)


def check_not_wrapped(model: nn.Module) -> None:
    """Refuse a model that is, or contains, DDP or FSDP.

    Raises:
        ValueError: it does.
    """
    found = next((name for module in model.modules() if (name := _wrapper_of(type(module)))), None)
    if found is not None:
        raise ValueError(f"model is wrapped in {found}: {_WHY}")


def check_not_inside(model: nn.Module) -> None:
    """Refuse a model that somebody else has wrapped, as transformers' Trainer does: the model does not show it.

    All objects of the process are looked at, but only where torch.distributed has been started, which both wrappers
    need.

    Raises:
        LocalProtocolError: such a wrapper exists.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    own = set(map(id, model.modules()))
    for thing in gc.get_objects():
        found = _wrapper_of(type(thing))
        if found and any(id(module) in own for module in thing.modules()):
            raise LocalProtocolError(f"model is inside {found}: {_WHY}")


def _wrapper_of(kind: type) -> str:
    """Return the name of the wrapper that a class is, or ""."""
    if not issubclass(kind, nn.Module):
        return ""
    return next((base.__name__ for base in kind.__mro__ if base.__module__.startswith(_WRAPPERS)), "")
