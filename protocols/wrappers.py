"""Finds wrappers that keep a model equal to its replicas on other ranks, which conflicts with a policy.

DDP averages gradients on the assumption that all replicas hold equal weights, and FSDP keeps a part of each weight on
each rank. A policy that gives one rank other weights breaks both without an error: the replicas diverge. A policy whose
members are replicas of several ranks may change a model that `fully_shard` or DDP keeps on exactly the ranks of a
replica. Over more ranks, DDP would average the gradients of replicas with different weights.
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
_WHY: Final = "whose ranks always have equal weights, while a policy gives each rank its own. Pass a model without it"


def check_not_wrapped(model: nn.Module, *, takes_shards: bool = False) -> None:
    """Refuse a model that is, or contains, DDP or FSDP.

    Args:
        model: Model to check.
        takes_shards: Whether a model sharded by `fully_shard` is allowed.

    Raises:
        ValueError: The model is, or contains, such a wrapper.
    """
    kinds = [type(each) for each in model.modules() if not (takes_shards and _is_divided(type(each)))]
    found = next((name for kind in kinds if (name := _wrapper_name(kind))), None)
    if found is not None:
        raise ValueError(f"model must not be wrapped in {found}, {_WHY}")


def reshard(model: nn.Module) -> None:
    """Make each rank hold only its own part of the parameters, as after a backward pass, without communication.

    After a forward pass without a backward pass, the outermost parameters are whole. They would stay so, with their old
    values, until the next backward pass.
    """
    for module in model.modules():
        if _is_divided(type(module)):
            divided: Any = module  # of a class that `fully_shard` has made
            divided.reshard()


def check_not_inside(model: nn.Module) -> None:
    """Refuse a model that other code has wrapped, such as transformers' Trainer. The model itself does not show it.

    The whole process is searched, but only if torch.distributed was started, which both wrappers need. A wrapper in an
    unreachable reference cycle, such as that of a deleted trainer, is ignored.

    Raises:
        LocalProtocolError: Such a wrapper exists.
    """
    for wrapper in _wrappers_around(model):
        raise LocalProtocolError(f"model must not be inside {_wrapper_name(type(wrapper))}, {_WHY}")


def check_replica_group(model: nn.Module, ranks: Sequence[int], world: World) -> None:
    """Refuse DDP around the model that synchronises other ranks than ``ranks``, those of this rank's replica.

    If torch.distributed numbers ranks differently than the world, as in a job with one process group for each replica,
    only the number of ranks is compared.

    Raises:
        ValueError: DDP synchronises other ranks. The message names both lists or both numbers.
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
                f"DDP must synchronise the ranks {ranks} of this rank's replica, got {found}. Pass DDP "
                "process_group=asyncdist.integrations.pytorch.new_replica_group(...)"
            )
    elif len(found) != len(ranks):
        raise ValueError(
            f"DDP must synchronise a process group of {len(ranks)} ranks, the size of this rank's replica {ranks}, got "
            f"{len(found)} ranks: {found} as torch.distributed numbers them"
        )


def _wrappers_around(model: nn.Module) -> list[nn.Module]:
    """Return the wrappers in this process that hold the model, or a part of it."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return []
    # A launched rank has frozen what is older than its world, a wrapper too, and there the collector does not look.
    # Frozen again, objects that are dropped later would be kept forever.
    gc.unfreeze()
    own = set(map(id, model.modules()))
    if not any(True for _ in _search(own)):
        return []
    gc.collect()
    return list(_search(own))


def _search(own: set[int]) -> Iterator[nn.Module]:
    """Yield the wrappers that hold one of the modules with these ids."""
    # Instances refer to their class. With five million objects, the collector finds them in 0.10 s. Checking each
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
    """Return the name of the wrapper if the class is one, else ""."""
    if not issubclass(kind, nn.Module):
        return ""
    return next((base.__name__ for base in kind.__mro__ if base.__module__.startswith(_WRAPPERS)), "")
