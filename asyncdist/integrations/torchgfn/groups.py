"""Finds the ranks that a script means by ``group=``: a group of asyncdist, a process group or a communicator."""

from __future__ import annotations

from typing import Any

import torch

from asyncdist import Group, environment, validation
from asyncdist.blocking.callers import find_caller
from asyncdist.blocking.world import World
from asyncdist.integrations.joining import join

_HERE = "asyncdist.integrations.torchgfn"


def group_of(group: Any) -> Group | None:
    """Return the group of asyncdist with the ranks of ``group``; None for all ranks.

    All ranks of the job open their world, the members make the group together. Nothing of that begins where it could
    not be completed.

    Args:
        group: None, a group of asyncdist, a process group of torch.distributed, or a communicator of MPI.

    Raises:
        ValueError: Other ranks of the job are not in ``group``, and no world is open; or its ranks are not known.
        TypeError: ``group`` is something else.
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
    """Refuse a group of some ranks before a world is opened: the opening would wait for the other ranks forever."""
    is_torchs = torch.distributed.is_available() and torch.distributed.is_initialized()
    found = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if is_torchs else None
    job_size = environment.detect(group=found).expected_size or 1
    if size < job_size:
        raise ValueError(
            f"group is {group!r:.80} of {size} ranks, and this job has {job_size}; a world is opened by all ranks of a "
            "job, and the others may never do so. Make the groups with initialize_distributed_compute of "
            f"{_HERE} instead of torchgfn's, or call asyncdist.blocking.process_world() on all ranks before"
        )


def _size_of(group: Any) -> int:
    size = getattr(group, "Get_size", None) or getattr(group, "size", None)
    if not callable(size):
        validation.refuse("group", group, "a group of asyncdist, a process group, a communicator, or None", TypeError)
    return int(size())


def _ranks_of(group: Any, size: int, world: World) -> list[int]:
    """Return the ranks of a process group, or of a communicator, as this world numbers them."""
    if not hasattr(group, "Get_group"):
        return list(torch.distributed.get_process_group_ranks(group))
    everybody = world.group.communicator
    if not hasattr(everybody, "Get_group"):
        validation.refuse("group", group, f"a communicator where MPI carries the messages, not {world.transport_name}")
    members = group.Get_group()
    ranks: list[int] = type(members).Translate_ranks(members, range(size), everybody.Get_group())
    return list(ranks)
