"""Provides collectives as functions, by default in the current world and with all its ranks.

:mod:`asyncdist.collectives.collectives` implements them. Ranks in arguments are ranks of the world.

**Cancellation**: a cancelled collective continues in the background, because the other members take part in it. The
passed tensors are in use until the other members have taken part. Until then, their values may be sent, and a tensor
that is changed in place may still be written.
"""

from __future__ import annotations

import functools
from collections.abc import Coroutine, Sequence
from typing import Any, Final, TypeVar, overload

import torch

from asyncdist import validation
from asyncdist.collectives.error_exchange import Call, LocalResult, exchange_headers, run_and_raise
from asyncdist.collectives.groups import Group, check_group, check_member
from asyncdist.runtime.world import World, world_to_await
from asyncdist.spmd import tree_collectives
from asyncdist.spmd.mesh import Mesh
from asyncdist.transports.base import ReduceOp

T = TypeVar("T")

_NO_AXIS: Final[Any] = object()
#: Maximum size of a group in which a barrier detects a member that calls another function. The check sends messages
#: between all pairs of members.
_COMPARED_SIZE_MAX: Final = 64


def resolve_group(world: World | None, group: Group | None) -> tuple[World, Group]:
    """Return the world and group of a collective call, with defaults.

    Raise an error if this rank may not make the call.
    """
    world = world_to_await(world)
    world.check()
    if group is None:
        return world, world.group
    check_member(group, world.rank)
    return world, group


async def new_group(ranks: Sequence[int], *, world: World | None = None) -> Group:
    """Make a group of ``ranks``. All of them must call this function. See :meth:`World.new_group`."""
    return await world_to_await(world).new_group(ranks)


async def surviving_group(group: Group | None = None, *, timeout_s: float = 60.0, world: World | None = None) -> Group:
    """Make a group of the members of ``group`` that were not lost and have not left the world.

    All these members must call this function, in a job that survives losses. All get the same group, even if a member
    is lost during the call. Collectives of the old group raise RankLostError. Several tasks may call this function at
    the same time for different groups.

    Members that were restarted since the group was made are omitted, because they may never call this function. On a
    restarted rank, the call for all ranks logs a warning and returns a group of this rank alone. To include restarted
    ranks, list all members: ``await ad.new_group(ranks)``.

    Args:
        group: Group, possibly freed, whose surviving members form the new group, by default all ranks.
        timeout_s: Seconds to wait for the last member.

    Raises:
        StartTimeoutError: Some members did not join in time.
        RankLostError, ClosedError, DisagreementError: The members did not agree on a list of survivors in time.
    """
    world = world_to_await(world)
    group = world.group if group is None else group
    check_group(group)
    return await world.peers.groups.surviving_group(group, validation.seconds("timeout_s", timeout_s))


async def barrier(*, group: Group | None = None, world: World | None = None) -> None:
    """Wait until every member of the group has called this function.

    Raises:
        DisagreementError: A member has called a different function instead. Raised on every member of a group of at
            most 64 ranks. Larger groups do not check, to save time.
        ClosedError: A member has left.
    """
    world, group = resolve_group(world, group)
    if not 1 < group.size <= _COMPARED_SIZE_MAX:
        await world.collectives.barrier(group)
        return
    work = functools.partial(exchange_headers, group=group, outcome=LocalResult(), call=Call("barrier"))
    await run_and_raise(world.collectives, group, LocalResult(), work)


async def broadcast(
    tensor: torch.Tensor, root: int = 0, *, group: Group | None = None, world: World | None = None
) -> torch.Tensor:
    """Copy the values of rank ``root`` into every member's ``tensor``, in place, and return it.

    Args:
        tensor: Tensor of equal shape and dtype on all members, on any device, only read on ``root``.
        root: Rank of a member.

    **Cancellation**: ``tensor`` is in use until the other members have taken part: it may still be sent or written.
    """
    world, group = resolve_group(world, group)
    return await world.collectives.broadcast(tensor, group, root)


async def gather(
    tensor: torch.Tensor, root: int = 0, *, group: Group | None = None, world: World | None = None
) -> list[torch.Tensor] | None:
    """Return all members' tensors, in the group's order, on rank ``root``, and None on other ranks.

    Args:
        tensor: Tensor of equal shape and dtype on all members, on any device.
        root: Rank of a member.

    **Cancellation**: ``tensor`` is in use until the other members have taken part. Do not change it until then.
    """
    world, group = resolve_group(world, group)
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
    """Gather every member's tensor, as a list for a group, or as one tensor along a mesh axis. Awaitable.

    Without an axis name, the list is in the order of ``group``. With an axis name, each leaf of the tree is stacked or
    concatenated over the ranks along that mesh axis (:func:`asyncdist.spmd.tree_collectives.all_gather`).

    Args:
        tensor: Tensor of equal shape and dtype on all members, on any device. With an axis name, a tree of tensors.
        axis_name: Name of a mesh axis. With None, the tree is returned unchanged.
        axis: Dimension of the results along which the ranks' leaves are placed. Only with an axis name.
        tiled: Whether to concatenate the leaves instead of stacking them. Only with an axis name.
        mesh: Mesh with the axis, by default the newest open mesh. Only with an axis name.
        group: Ranks that take part, by default all. Only without an axis name.
        world: World of the call, by default the current one. Only without an axis name.

    **Cancellation**: ``tensor`` is in use until the other members have taken part. Do not change it until then.

    Raises:
        TypeError: Arguments for a group and for a mesh axis were both passed.
        Exception: With an axis name, any error that :func:`asyncdist.psum` raises.
    """
    if axis_name is _NO_AXIS:
        if axis != 0 or tiled or mesh is not None:
            raise TypeError("axis, tiled and mesh need an axis name: all_gather(tree, axis_name)")
        return _all_gather(tensor, group, world)
    if group is not None or world is not None:
        raise TypeError(
            f"group and world cannot be used with an axis name, because the axis {axis_name!r} has its own ranks; pass "
            "group and world only to all_gather(tensor), without an axis name"
        )
    return tree_collectives.all_gather(tensor, axis_name, axis=axis, tiled=tiled, mesh=mesh)


async def _all_gather(tensor: object, group: Group | None, world: World | None) -> list[torch.Tensor]:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"tensor must be a tensor, or a tree together with an axis name, got a {type(tensor).__name__}")
    world, group = resolve_group(world, group)
    return await world.collectives.all_gather(tensor, group)


async def all_reduce(
    tensor: torch.Tensor, op: ReduceOp = "sum", *, group: Group | None = None, world: World | None = None
) -> torch.Tensor:
    """Reduce ``tensor`` elementwise over all members, in place, and return it.

    Args:
        tensor: Tensor of equal shape and dtype on all members, on any device. Integer overflow wraps around. For
            booleans, "sum" and "max" mean "or", and "prod" and "min" mean "and". A minimum or maximum is NaN if any
            member has NaN. Dtypes narrower than float32 are reduced in float32 and rounded once.
        op: ``"sum"``, ``"min"``, ``"max"`` or ``"prod"``. For complex tensors, only ``"sum"`` or ``"prod"``.

    **Cancellation**: ``tensor`` is in use until the other members have taken part: it may still be sent or written.
    """
    world, group = resolve_group(world, group)
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
    """Send the i-th of ``tensors`` to member i, and return the tensors received from the members, in their order.

    Args:
        tensors: One tensor per member, all of equal shape and dtype. A single tensor, of equal shape and dtype on all
            members, is split evenly along its first dimension. The result has the same form.
        group: Ranks that take part, by default all. For torch.distributed process groups, and for gradients, use
            :func:`asyncdist.launch.process_groups.all_to_all`.

    **Cancellation**: ``tensors`` are in use until the other members have taken part. Do not change them until then.

    Raises:
        ValueError: The first dimension cannot be split evenly.
    """
    if group is not None and not isinstance(group, Group):
        raise TypeError(
            f"group must be a Group from await new_group(ranks), or None, got {group!r:.200}. For process groups of "
            "torch.distributed use asyncdist.launch.process_groups.all_to_all"
        )
    world, group = resolve_group(world, group)
    if not isinstance(tensors, torch.Tensor):
        return await world.collectives.all_to_all(tensors, group)
    if not tensors.dim() or tensors.shape[0] % group.size:
        raise ValueError(
            f"the first dimension of the tensor must be a multiple of the {group.size} ranks, got shape "
            f"{tuple(tensors.shape)}"
        )
    return torch.cat(await world.collectives.all_to_all(tensors.chunk(group.size), group))
