"""Collectives as plain functions, on the world of the calling task and on all of its ranks unless a group is named.

:mod:`asyncdist.collectives` says how they behave; ranks in arguments are ranks of the world.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncdist.groups import Group, check_member
from asyncdist.transports.base import ReduceOp
from asyncdist.world import World, current_world


def place(world: World | None, group: Group | None) -> tuple[World, Group]:
    """World and group of a collective call, with their defaults.

    Raises:
        RuntimeError: there is no world here.
        TypeError: ``group`` is no :class:`Group`.
        LocalProtocolError: this rank is not in it.
        RankLostError: the job has failed.
    """
    world = world or current_world()
    world.check()
    if group is None:
        return world, world.group
    check_member(group, world.rank)
    return world, group


async def new_group(ranks: Sequence[int], *, world: World | None = None) -> Group:
    """Make a group of ``ranks``. Collective among them; see :meth:`World.new_group`."""
    return await (world or current_world()).new_group(ranks)


async def barrier(*, group: Group | None = None, world: World | None = None) -> None:
    """Return once every member has entered."""
    world, group = place(world, group)
    await world.collectives.barrier(group)


async def broadcast(
    tensor: torch.Tensor, root: int = 0, *, group: Group | None = None, world: World | None = None
) -> torch.Tensor:
    """Put ``root``'s values into every member's ``tensor``, in place.

    Args:
        tensor: of one shape and dtype on all members; any device.
        root: a member.

    Returns:
        ``tensor``.
    """
    world, group = place(world, group)
    return await world.collectives.broadcast(tensor, group, root)


async def gather(
    tensor: torch.Tensor, root: int = 0, *, group: Group | None = None, world: World | None = None
) -> list[torch.Tensor] | None:
    """Bring every member's tensor to ``root``.

    Args:
        tensor: of one shape and dtype on all members; any device.
        root: a member.

    Returns:
        On ``root`` the tensors in the group's order, elsewhere None.
    """
    world, group = place(world, group)
    return await world.collectives.gather(tensor, group, root)


async def all_gather(
    tensor: torch.Tensor, *, group: Group | None = None, world: World | None = None
) -> list[torch.Tensor]:
    """Bring every member's tensor to every member, in the group's order. One shape and dtype on all of them."""
    world, group = place(world, group)
    return await world.collectives.all_gather(tensor, group)


async def all_reduce(
    tensor: torch.Tensor, op: ReduceOp = "sum", *, group: Group | None = None, world: World | None = None
) -> torch.Tensor:
    """Reduce elementwise over all members, in place.

    Args:
        tensor: of one shape and dtype on all members; float16 and bfloat16 are reduced in float32.
        op: ``"sum"``, ``"min"``, ``"max"`` or ``"prod"``.

    Returns:
        ``tensor``.
    """
    world, group = place(world, group)
    return await world.collectives.all_reduce(tensor, group, op)


async def all_to_all(
    tensors: Sequence[torch.Tensor], *, group: Group | None = None, world: World | None = None
) -> list[torch.Tensor]:
    """Send tensor i to member i, and return what each member sent here. One shape and dtype throughout."""
    world, group = place(world, group)
    return await world.collectives.all_to_all(tensors, group)
