"""Finds wrappers that keep a model equal to its replicas on other ranks, and so work against a policy.

DDP averages gradients on the assumption that all replicas hold equal weights, and FSDP keeps a part of each weight per
rank. A policy that gives one rank other weights breaks both without an error: the replicas diverge. A policy whose
members are replicas of several ranks may change a model that `fully_shard` has divided among these, or that DDP keeps
equal on these, and on no others: over more ranks DDP averages the gradients of replicas whose weights differ.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import nn

from asyncdist import LocalProtocolError, World

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
            divided: Any = module  # of a class that `fully_shard` has made
            divided.reshard()


def check_not_inside(model: nn.Module) -> None:
    """Refuse a model that other code has wrapped, as transformers' Trainer does: the model does not show it.

    The whole process is searched, but only where torch.distributed has been started, which both wrappers need. A
    wrapper in an unreachable reference cycle, such as that of a deleted trainer, is no obstacle.

    Raises:
        LocalProtocolError: such a wrapper exists.
    """
    for wrapper in _wrappers_around(model):
        raise LocalProtocolError(f"model is inside {_wrapper_name(type(wrapper))}: {_WHY}")


def check_replica_group(model: nn.Module, ranks: Sequence[int], world: World) -> None:
    """Refuse DDP around the model that synchronises other ranks than these, which hold this rank's replica.

    Where torch.distributed counts other ranks than the world, as in a job that has one process group for each replica,
    only the number of ranks is compared.

    Raises:
        ValueError: it does; both lists are named, or both numbers.
    """
    for wrapper in _wrappers_around(model):
        if isinstance(wrapper, nn.parallel.DistributedDataParallel):
            _check_group(getattr(wrapper, "process_group", None), list(ranks), world)


def _check_group(group: Any, ranks: list[int], world: World) -> None:
    if group is None:  # its constructor has not run
        return
    found = sorted(torch.distributed.get_process_group_ranks(group))
    if (torch.distributed.get_rank(), torch.distributed.get_world_size()) == (world.rank, world.size):
        if found != ranks:
            raise ValueError(
                f"DDP synchronises the ranks {found}, and this rank's replica is {ranks}: replica_size is "
                f"{len(ranks)}; allowed: DDP(..., process_group=) of the replica's ranks, as "
                "asyncdist.integrations.pytorch.new_replica_group returns it"
            )
    elif len(found) != len(ranks):
        raise ValueError(
            f"DDP synchronises {len(found)} ranks, {found} as torch.distributed counts them, and this rank's replica "
            f"is {ranks}; allowed: DDP over a process group of {len(ranks)} ranks"
        )


def _wrappers_around(model: nn.Module) -> list[nn.Module]:
    """Return the wrappers in this process that hold the model, or a part of it."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return []
    # A launched rank has frozen what is older than its world, a wrapper too, and there the collector does not look.
    # Frozen anew, what is dropped later would be kept for ever.
    gc.unfreeze()
    own = set(map(id, model.modules()))
    if not any(True for _ in _search(own)):
        return []
    gc.collect()
    return list(_search(own))


def _search(own: set[int]) -> Iterator[nn.Module]:
    """Yield the wrappers that hold one of the modules with these ids."""
    # Instances refer to their class. With five million objects the collector finds them in 0.10 s, where a look at each
    # object took 0.69 s and a list of 40 MB.
    kinds = [kind for kind in _subclasses(nn.Module) if _wrapper_name(kind)]
    for thing in gc.get_referrers(*kinds):
        if _wrapper_name(type(thing)) and any(id(module) in own for module in _modules_of(thing)):
            yield thing


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
