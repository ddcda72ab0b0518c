"""Finds DDP and FSDP wrappers around a model. They conflict with most policies.

DDP assumes equal weights on all ranks, and FSDP stores a part of each weight on each rank. A policy that changed one
rank's weights would break both without an error. A wrapper is allowed only if its ranks are exactly those of one
replica.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import nn

from asyncdist import LocalProtocolError, World
from asyncdist.runtime.process import may_hide_wrappers

#: Modules of torch that define DDP and FSDP wrappers, and the base classes of sharded modules.
_WRAPPERS: Final = ("torch.nn.parallel.distributed", "torch.distributed.fsdp", "torch.distributed._composable")
#: Module of torch that defines the base class of modules sharded by `fully_shard`.
_SHARDED: Final = "torch.distributed.fsdp._fully_shard"
_WHY: Final = (
    "whose ranks always have equal weights, while a policy gives each rank its own. Pass a model without it, or, if "
    "only the ranks of one replica are wrapped together, pass replica_size= to a policy that has this option"
)


def check_not_wrapped(model: nn.Module, *, keeps_replicas: bool = False) -> None:
    """Raise ValueError if the model is or contains a DDP or FSDP wrapper.

    Args:
        keeps_replicas: Whether to allow `fully_shard` and DDP, whose ranks :func:`check_replica_group` checks. DDP may
            be inside the model, as in ``torch.compile(DDP(model))`` or a ``ModuleDict`` of wrapped networks.
    """
    kinds = [type(each) for each in model.modules() if not (keeps_replicas and _may_span_replica(type(each)))]
    found = next((name for kind in kinds if (name := _wrapper_name(kind))), None)
    if found is None:
        return
    if keeps_replicas:
        raise ValueError(_refusal(found))
    raise ValueError(f"model must not be wrapped in {found}, {_WHY}")


def _refusal(found: str) -> str:
    return (
        f"the model of a replica must not be wrapped in {found}: wrap it in DistributedDataParallel, or shard it with "
        "fully_shard"
    )


def reshard(model: nn.Module) -> None:
    """Free the parameters that `fully_shard` has gathered, so that each rank has only its own shards again.

    After a forward pass without a backward pass, the root module's parameters remain gathered, and would not follow
    changes of the shards. The call needs no communication.
    """
    for module in model.modules():
        if _is_divided(type(module)):
            divided: Any = module  # its class was created by `fully_shard`
            divided.reshard()


def check_not_inside(model: nn.Module) -> None:
    """Raise LocalProtocolError if other code, such as transformers' Trainer, has wrapped the model in DDP or FSDP.

    The model has no reference to its wrapper, so this process's objects are searched. Without an initialized
    torch.distributed, which both wrappers require, there is no search. Unreachable wrappers, such as a deleted
    trainer's, are ignored.
    """

    def refuse(wrapper: nn.Module) -> None:
        raise LocalProtocolError(f"model must not be inside {_wrapper_name(type(wrapper))}, {_WHY}")

    _check_wrappers_around(model, refuse)


def check_replica_group(model: nn.Module, ranks: Sequence[int], world: World) -> None:
    """Raise ValueError unless DDP around the model synchronises exactly ``ranks``, this rank's replica.

    Other wrappers around the model, such as a trainer's FullyShardedDataParallel, are refused.

    If torch.distributed numbers the ranks differently, as with one process group per replica, only the number of ranks
    is compared.
    """

    def check(wrapper: nn.Module) -> None:
        if isinstance(wrapper, nn.parallel.DistributedDataParallel):
            _check_group(getattr(wrapper, "process_group", None), sorted(ranks), world)
        elif not _is_divided(type(wrapper)):
            raise ValueError(_refusal(_wrapper_name(type(wrapper))))

    _check_wrappers_around(model, check)


def _check_group(group: Any, ranks: list[int], world: World) -> None:
    if group is None:  # the wrapper's constructor has not run
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


def _check_wrappers_around(model: nn.Module, check: Callable[[nn.Module], None]) -> None:
    """Call ``check`` with the DDP and FSDP wrappers in this process that contain a module of the model."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    if may_hide_wrappers():
        gc.unfreeze()
    own = set(map(id, model.modules()))
    if _are_accepted(own, check):
        return
    gc.collect()  # the refused wrapper may be an unreachable object
    for wrapper in _search(own):
        check(wrapper)


def _are_accepted(own: set[int], check: Callable[[nn.Module], None]) -> bool:
    try:
        for wrapper in _search(own):
            check(wrapper)
    except Exception:
        return False
    return True


def _search(own: set[int]) -> Iterator[nn.Module]:
    """Yield the DDP and FSDP wrappers that contain a module with one of these ids."""
    # With five million objects, searching the references to the classes takes 0.10 s, and checking each object 0.69 s.
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
    """Yield a module and its submodules. Unlike ``outer.modules()``, accept modules whose constructor has not run."""
    seen: set[int] = set()
    waiting = [outer]
    while waiting:
        module = waiting.pop()
        if id(module) not in seen:
            seen.add(id(module))
            yield module
            waiting += [child for child in getattr(module, "_modules", {}).values() if child is not None]


def _may_span_replica(kind: type) -> bool:
    return issubclass(kind, nn.parallel.DistributedDataParallel) or _is_divided(kind)


def _is_divided(kind: type) -> bool:
    return any(base.__module__.startswith(_SHARDED) for base in kind.__mro__)


def _wrapper_name(kind: type) -> str:
    """Return the name of the DDP or FSDP class from which ``kind`` is derived, or ""."""
    if not issubclass(kind, nn.Module):
        return ""
    return next((base.__name__ for base in kind.__mro__ if base.__module__.startswith(_WRAPPERS)), "")
