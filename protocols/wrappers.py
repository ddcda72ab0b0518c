"""Finds wrappers that keep a model equal to its replicas on other ranks, and so work against a policy.

DDP averages gradients on the assumption that all replicas hold equal weights, and FSDP keeps a part of each weight per
rank. A policy that gives one rank other weights breaks both without an error: the replicas diverge. A policy whose
members are replicas of several ranks may change a model that `fully_shard` has divided among these.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Final

import torch
from torch import nn

from asyncdist import LocalProtocolError

#: Modules of torch that define such wrappers; those of FSDP also stand among the bases of what `fully_shard` is given.
_WRAPPERS: Final = ("torch.nn.parallel.distributed", "torch.distributed.fsdp", "torch.distributed._composable")
#: What `fully_shard` makes of a module: its parameters are DTensors between two steps.
_SHARDED: Final = "torch.distributed.fsdp._fully_shard"
_WHY: Final = (
    "it keeps its replicas equal, which a policy that gives ranks weights of their own breaks; "
    "allowed: a model that no such wrapper synchronises"
)


def check_not_wrapped(model: nn.Module, *, takes_shards: bool = False) -> None:
    """Refuse a model that is, or contains, DDP or FSDP.

    Args:
        model: it.
        takes_shards: whether what `fully_shard` has divided is allowed.

    Raises:
        ValueError: it does.
    """
    kinds = [type(each) for each in model.modules() if not (takes_shards and _is_divided(type(each)))]
    found = next((name for kind in kinds if (name := _wrapper_name(kind))), None)
    if found is not None:
        raise ValueError(f"model is wrapped in {found}: {_WHY}")


def reshard(model: nn.Module) -> None:
    """Let each rank hold its own part of the parameters alone again, as after a backward pass.

    After a forward pass without one the outermost parameters are whole, and would stay so, and as they are, until the
    next one. Nothing is sent.
    """
    for module in model.modules():
        if _is_divided(type(module)):
            module.reshard()  # type: ignore[operator]


def check_not_inside(model: nn.Module) -> None:
    """Refuse a model that other code has wrapped, as transformers' Trainer does: the model does not show it.

    The whole process is searched, but only where torch.distributed has been started, which both wrappers need. A
    wrapper in an unreachable reference cycle, such as that of a deleted trainer, is no obstacle.

    Raises:
        LocalProtocolError: such a wrapper exists.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    own = set(map(id, model.modules()))
    if not _wrapper_around(own):
        return
    gc.collect()
    if found := _wrapper_around(own):
        raise LocalProtocolError(f"model is inside {found}: {_WHY}")


def _wrapper_around(own: set[int]) -> str:
    """Return the name of a wrapper in this process that holds one of the modules with these ids, or ""."""
    # Instances refer to their class. With five million objects the collector finds them in 0.10 s, where a look at each
    # object took 0.69 s and a list of 40 MB.
    kinds = [kind for kind in _subclasses(nn.Module) if _wrapper_name(kind)]
    for thing in gc.get_referrers(*kinds):
        found = _wrapper_name(type(thing))
        if found and any(id(module) in own for module in _modules_of(thing)):
            return found
    return ""


def _subclasses(kind: type) -> Iterator[type]:
    known: list[type] = type.__subclasses__(kind)
    for found in known:
        yield found
        yield from _subclasses(found)


def _modules_of(outer: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and those below it, as ``outer.modules()`` does; one whose constructor has not run has none."""
    seen: set[int] = set()
    waiting = [outer]
    while waiting:
        module = waiting.pop()
        if id(module) not in seen:
            seen.add(id(module))
            yield module
            waiting += [child for child in getattr(module, "_modules", {}).values() if child is not None]


def _is_divided(kind: type) -> bool:
    return any(base.__module__.startswith(_SHARDED) for base in kind.__mro__)


def _wrapper_name(kind: type) -> str:
    """Return the name of the wrapper that a class is, or ""."""
    if not issubclass(kind, nn.Module):
        return ""
    return next((base.__name__ for base in kind.__mro__ if base.__module__.startswith(_WRAPPERS)), "")
