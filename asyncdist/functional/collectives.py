"""Offers collectives as plain functions, on the world of the calling task and all its ranks unless a group is named.

:mod:`asyncdist.collectives.collectives` says how they behave; ranks in arguments are ranks of the world.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any, Final, TypeVar, overload

import torch

from asyncdist import validation
from asyncdist.collectives.collectives import Collectives
from asyncdist.collectives.error_exchange import Call, LocalResult, exchange_headers, run_and_raise
from asyncdist.collectives.groups import Group, check_group, check_member
from asyncdist.runtime.world import World, current_world
from asyncdist.spmd import tree_collectives
from asyncdist.spmd.mesh import Mesh
from asyncdist.transports.base import ReduceOp

T = TypeVar("T")

_NO_AXIS: Final[Any] = object()
#: Frames of all members go to all of them: a square.
_COMPARED_SIZE_MAX: Final = 64


def place(world: World | None, group: Group | None) -> tuple[World, Group]:
    """Return the world and group of a collective call, with their defaults.

    Raises:
        RuntimeError: there is no world here.
        TypeError: ``group`` is no :class:`Group`.
        LocalProtocolError: this rank is not in ``group``.
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


async def surviving_group(group: Group | None = None, *, timeout_s: float = 60.0, world: World | None = None) -> Group:
    """Make a group of those members of ``group`` that live: without the ranks that are lost or have left the world.

    Collective among them, where losing a rank does not end the job. It returns the same group on all, also where a
    member is lost, or heard of, meanwhile. A collective of a group that has lost a member raises RankLostError on the
    others; this gives them one to go on with. Tasks may call it at once, each of them for a group of its own.

    Args:
        group: all ranks by default; it may have been freed.
        timeout_s: how long to wait for the last member.
        world: the current one by default.

    Raises:
        TypeError: ``group`` is not a group.
        StartTimeoutError: some members did not come in time.
        RankLostError, ClosedError, DisagreementError: the members have not come to the same list in time.
    """
    world = world or current_world()
    group = world.group if group is None else group
    check_group(group)
    return await world.peers.groups.surviving_group(group, validation.seconds("timeout_s", timeout_s))


async def barrier(*, group: Group | None = None, world: World | None = None) -> None:
    """Return once every member has entered.

    Raises:
        DisagreementError: another member calls a helper in its place; both are named, on every member (in groups of up
            to 64 ranks; in larger ones the exchange that finds it out would cost too much).
        ClosedError: a member has left.
    """
    world, group = place(world, group)
    if not 1 < group.size <= _COMPARED_SIZE_MAX:
        await world.collectives.barrier(group)
        return

    async def work(collectives: Collectives) -> None:
        await exchange_headers(collectives, group, LocalResult(), Call("barrier"))

    await run_and_raise(world.collectives, group, LocalResult(), work)


async def broadcast(
    tensor: torch.Tensor, root: int = 0, *, group: Group | None = None, world: World | None = None
) -> torch.Tensor:
    """Put ``root``'s values into every member's ``tensor``, in place.

    Args:
        tensor: of one shape and dtype on all members; any device. Only read on ``root``.
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


@overload
def all_gather(
    tensor: torch.Tensor, *, group: Group | None = None, world: World | None = None
) -> Coroutine[Any, Any, list[torch.Tensor]]: ...


@overload
def all_gather(
    tensor: T, axis_name: str | None, *, axis: int = 0, tiled: bool = False, mesh: Mesh | None = None
) -> Coroutine[Any, Any, T]: ...


def all_gather(
    tensor: Any,
    axis_name: str | None = _NO_AXIS,
    *,
    axis: int = 0,
    tiled: bool = False,
    mesh: Mesh | None = None,
    group: Group | None = None,
    world: World | None = None,
) -> Coroutine[Any, Any, Any]:
    """Bring every member's tensor to every member: those of a group as a list, those along an axis in one; awaitable.

    Without an axis name the members are those of the group, and the list is in its order. With one, None included, it
    is :func:`asyncdist.spmd.tree_collectives.all_gather`: leaf by leaf, stacked or joined.

    Args:
        tensor: of one shape and dtype on all members; any device. With an axis name a tree of tensors.
        axis_name: the name of an axis of a mesh; None returns the tree unchanged.
        axis: the dimension of the results along which the ranks' leaves lie; only with an axis name.
        tiled: join the leaves along it in place of stacking them; only with an axis name.
        mesh: the newest open one by default; only with an axis name.
        group: the whole world by default; only without an axis name.
        world: the calling task's by default; only without an axis name.

    Raises:
        TypeError: options of both kinds.
        Exception: with an axis name what :func:`asyncdist.psum` raises.
    """
    if axis_name is _NO_AXIS:
        if axis != 0 or tiled or mesh is not None:
            raise TypeError("axis, tiled and mesh belong to all_gather(tree, axis_name); no axis name is given")
        return _all_gather(tensor, group, world)
    if group is not None or world is not None:
        raise TypeError(f"group and world belong to all_gather(tensor); the axis {axis_name!r} has ranks of its own")
    return tree_collectives.all_gather(tensor, axis_name, axis=axis, tiled=tiled, mesh=mesh)


async def _all_gather(tensor: object, group: Group | None, world: World | None) -> list[torch.Tensor]:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"tensor is a {type(tensor).__name__}; allowed: a tensor, or a tree of them and an axis name")
    world, group = place(world, group)
    return await world.collectives.all_gather(tensor, group)


async def all_reduce(
    tensor: torch.Tensor, op: ReduceOp = "sum", *, group: Group | None = None, world: World | None = None
) -> torch.Tensor:
    """Reduce elementwise over all members, in place.

    Args:
        tensor: of one shape and dtype on all members; any device. Integers wrap; of booleans "sum" and "max" are "or",
            "prod" and "min" are "and"; the minimum and maximum is NaN where any member has NaN; what is narrower than
            float32 is reduced in float32 and rounded once.
        op: ``"sum"``, ``"min"``, ``"max"`` or ``"prod"``; complex numbers have only ``"sum"`` and ``"prod"``.

    Returns:
        ``tensor``.
    """
    world, group = place(world, group)
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
            :func:`asyncdist.launch.process_groups.all_to_all`.

    Returns:
        A list, or a tensor like the one that was given, in the group's order.

    Raises:
        ValueError: the first dimension cannot be split evenly.
    """
    if group is not None and not isinstance(group, Group):
        raise TypeError(
            f"group is {group!r}; it must be a group of a world. "
            "asyncdist.launch.process_groups.all_to_all takes process groups of torch.distributed"
        )
    world, group = place(world, group)
    if not isinstance(tensors, torch.Tensor):
        return await world.collectives.all_to_all(tensors, group)
    if not tensors.dim() or tensors.shape[0] % group.size:
        raise ValueError(
            f"the tensor has shape {tuple(tensors.shape)}; its first dimension must be a multiple of {group.size} ranks"
        )
    if not tensors.shape[0]:
        return tensors.detach().clone()
    return torch.cat(await world.collectives.all_to_all(tensors.chunk(group.size), group))
