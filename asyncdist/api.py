"""Collectives as plain functions, on the world of the calling task and on all of its ranks unless a group is named.

:mod:`asyncdist.collectives` says how they behave; ranks in arguments are ranks of the world.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch

from asyncdist.groups import Group
from asyncdist.transports.base import ReduceOp
from asyncdist.world import World, current_world


def _place(world: World | None, group: Group | None) -> tuple[World, Group]:
    world = world or current_world()
    world.check()
    return world, group or world.group


async def new_group(ranks: Sequence[int], *, world: World | None = None) -> Group:
    """Make a group of ``ranks``. Collective among them; see :meth:`World.new_group`."""
    return await (world or current_world()).new_group(ranks)


async def barrier(*, group: Group | None = None, world: World | None = None) -> None:
    """Return once every member has entered."""
    world, group = _place(world, group)
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
    world, group = _place(world, group)
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
    world, group = _place(world, group)
    return await world.collectives.gather(tensor, group, root)


async def all_gather(
    tensor: torch.Tensor, *, group: Group | None = None, world: World | None = None
) -> list[torch.Tensor]:
    """Bring every member's tensor to every member, in the group's order. One shape and dtype on all of them."""
    world, group = _place(world, group)
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
    world, group = _place(world, group)
    return await world.collectives.all_reduce(tensor, group, op)


@overload
async def all_to_all(
    tensors: torch.Tensor, group: Group | None = None, *, world: World | None = None
) -> torch.Tensor: ...


@overload
async def all_to_all(
    tensors: Sequence[torch.Tensor], group: Group | None = None, *, world: World | None = None
) -> list[torch.Tensor]: ...


async def all_to_all(
    tensors: torch.Tensor | Sequence[torch.Tensor], group: Group | None = None, *, world: World | None = None
) -> torch.Tensor | list[torch.Tensor]:
    """Send the i-th of ``tensors`` to member i, and return what each member sent here.

    Args:
        tensors: one for each member, of one shape and dtype throughout; or a single tensor, of one shape and dtype on
            all members, whose first dimension is split evenly among them.
        group: all ranks of the world by default. Process groups of torch.distributed, with gradients, are for
            :func:`asyncdist.process_groups.all_to_all`.

    Returns:
        A list, or a tensor like the one that was given, in the group's order.

    Raises:
        ValueError: the first dimension cannot be split evenly.
    """
    if group is not None and not isinstance(group, Group):
        raise TypeError(
            f"group is {group!r}; it must be a group of a world. asyncdist.process_groups.all_to_all takes process "
            "groups of torch.distributed"
        )
    world, group = _place(world, group)
    if not isinstance(tensors, torch.Tensor):
        return await world.collectives.all_to_all(tensors, group)
    if not tensors.dim() or tensors.shape[0] % group.size:
        raise ValueError(
            f"the tensor has shape {tuple(tensors.shape)}; its first dimension must be a multiple of {group.size} ranks"
        )
    if not tensors.shape[0]:
        return tensors.detach().clone()
    return torch.cat(await world.collectives.all_to_all(tensors.chunk(group.size), group))
