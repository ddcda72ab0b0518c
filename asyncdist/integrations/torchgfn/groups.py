"""Converts ``group=`` arguments of torchgfn's scripts to asyncdist groups."""

from __future__ import annotations

from typing import Any

import torch

from asyncdist import Group, validation
from asyncdist.blocking.callers import find_caller
from asyncdist.blocking.world import World
from asyncdist.integrations.joining import join
from asyncdist.launchers import detection

_HERE = "asyncdist.integrations.torchgfn"


def group_of(group: Any) -> Group | None:
    """Return the asyncdist group with the ranks of ``group``, or None for all ranks. All members must call this.

    If no world is open, this function opens it, so all ranks of the job must call it. ``group`` may be an asyncdist
    group, a process group of torch.distributed, an MPI communicator, or None.

    Raises:
        TypeError: ``group`` has a different type.
        ValueError: The ranks of ``group`` are unknown, or it lacks ranks of the job while no world is open.
    """
    if group is None or isinstance(group, Group):
        join()
        return group
    size = _size_of(group)
    if find_caller() is None:
        _check_is_of_all(group, size)
    world = join()
    if size == world.size:
        return None
    return world.new_group(_ranks_of(group, size, world))


def _check_is_of_all(group: Any, size: int) -> None:
    """Raise ValueError if ``group`` lacks ranks of the job. Opening the world would wait for them forever."""
    is_torchs = torch.distributed.is_available() and torch.distributed.is_initialized()
    found = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if is_torchs else None
    job_size = detection.detect(group=found).expected_size or 1
    if size < job_size:
        raise ValueError(
            f"group must have all {job_size} ranks of the job when the world is opened, got {group!r:.80} with {size} "
            f"ranks. Make the groups with initialize_distributed_compute of {_HERE} instead of torchgfn's, or first "
            "call asyncdist.blocking.process_world() on all ranks"
        )


def _size_of(group: Any) -> int:
    size = getattr(group, "Get_size", None) or getattr(group, "size", None)
    if not callable(size):
        allowed = "an asyncdist group, a torch process group, an MPI communicator or None"
        validation.refuse("group", group, allowed, TypeError)
    return int(size())


def _ranks_of(group: Any, size: int, world: World) -> list[int]:
    """Return the world ranks of the members of a process group or a communicator."""
    if not hasattr(group, "Get_group"):
        return list(torch.distributed.get_process_group_ranks(group))
    everybody = world.group.communicator
    if not hasattr(everybody, "Get_group"):
        allowed = f"a group of asyncdist or torch with the transport {world.transport_name!r}"
        validation.refuse("group", group, allowed)
    members = group.Get_group()
    ranks: list[int] = type(members).Translate_ranks(members, range(size), everybody.Get_group())
    return list(ranks)
