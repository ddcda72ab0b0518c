"""Defines meshes: grids of ranks with named axes, along which collectives run.

The axes ``{"POP": 2, "DP": 3}`` arrange six ranks in two rows of three. The last axis varies fastest, as in
``numpy.reshape``. An operation along ``"DP"`` involves the three ranks of a row; one along ``"POP"`` involves the two
ranks of a column. If a rank of the mesh is lost, operations along any axis raise RankLostError on all ranks.

Inside ``with mesh:``, a task and the tasks that it starts there can refer to the mesh's axes by name.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Final, TypeVar

from asyncdist import validation
from asyncdist.collectives.agreed_start import Start, start_together
from asyncdist.collectives.groups import Group, check_group, check_open, free_all, short
from asyncdist.errors import ClosedError, LocalProtocolError
from asyncdist.runtime.world import World, current_world, world_to_await

T = TypeVar("T")

POP_AXIS_NAME: Final = "POP"
DP_AXIS_NAME: Final = "DP"
_MESH_TIMEOUT_S: Final = 60.0
_SUBJECT: Final = "new mesh"

#: The meshes that the running code has opened with ``with`` blocks, the innermost last.
open_meshes: ContextVar[tuple[Mesh, ...]] = ContextVar("asyncdist.spmd.open_meshes", default=())


class Axis:
    """One rank's view of a mesh axis. Its operations run one after another in ``group``, the ranks along the axis.

    Attributes:
        begun_count: Number of operations that this rank has started along the axis.
    """

    def __init__(self, name: str, world: World, group: Group) -> None:
        self.name = name
        self.world = world
        self.group = group
        self.begun_count = 0
        self._lock = asyncio.Lock()

    @property
    def subject(self) -> str:
        """Name under which the axis's ranks agree on each operation before they exchange tensors."""
        return f"axis {self.name!r} (group {self.group.number})"

    @property
    def size(self) -> int:
        """Number of ranks along the axis."""
        return self.group.size

    @property
    def index(self) -> int:
        """This rank's index along the axis, from 0."""
        return self.group.index

    def begin(self, work: Callable[[], Awaitable[T]]) -> asyncio.Task[T]:
        """Start an operation that runs after all earlier operations along the axis, and return its task."""

        async def in_turn() -> T:
            async with self._lock:
                return await work()

        self.begun_count += 1
        return self.world.services.spawn_service(in_turn(), name=f"operation along axis {self.name!r}")


class Mesh:
    """A grid of ranks with named axes, created by :func:`new_mesh`.

    Attributes:
        axes: Size of each axis, by name; the last axis varies fastest.
        ranks: World ranks, in grid order.
    """

    def __init__(self, axes: Mapping[str, Axis], ranks: tuple[int, ...], world: World) -> None:
        self.axes: Mapping[str, int] = MappingProxyType({name: axis.size for name, axis in axes.items()})
        self.ranks = ranks
        self.world = world
        self._axes = dict(axes)

    def __repr__(self) -> str:
        return f"<Mesh {_describe(self.axes)}, ranks {list(self.ranks)}>"

    def __enter__(self) -> Mesh:
        """Open the mesh, so that collectives in the block and in tasks started there find its axes by name."""
        self.check_member()
        self._check_open()
        open_meshes.set((*open_meshes.get(), self))
        return self

    def __exit__(self, *_: object) -> None:
        meshes = open_meshes.get()
        if self in meshes:  # not if a suspended coroutine is closed in another context, as by the garbage collector
            assert meshes[-1] is self, "meshes must be left in reverse order"
            open_meshes.set(meshes[:-1])

    async def free(self) -> None:
        """Free the groups of all axes, after which the mesh cannot be used.

        Raises:
            LocalProtocolError: The calling task belongs to a different rank than the mesh.
        """
        self.check_member()
        for axis in self._axes.values():
            if not axis.group.lease.is_freed:
                self.world.agreements.withdraw(axis.group.ranks, axis.subject)
        await free_all(axis.group for axis in self._axes.values())

    def _check_open(self) -> None:
        if any(axis.group.lease.is_freed for axis in self._axes.values()):
            words = (
                f"the mesh {_describe(self.axes)} of ranks {short(self.ranks)} was freed on this rank; make a new one "
                "with await new_mesh(axes)"
            )
            raise ClosedError(words, ranks=self.ranks[:16])

    def axis(self, name: str) -> Axis:
        """Return the axis with this name.

        Raises:
            ClosedError: The mesh was freed.
            LocalProtocolError: The mesh has no such axis, or the calling task belongs to a different rank.
        """
        self.check_member()
        self._check_open()
        found = self._axes.get(name)
        if found is None:
            raise LocalProtocolError(
                f"axis_name must be an axis of the mesh, which has {_describe(self.axes)}, got {name!r}", axis_name=name
            )
        return found

    def axis_size(self, name: str) -> int:
        """Return the number of ranks along an axis."""
        return self.axis(name).size

    def axis_index(self, name: str) -> int:
        """Return this rank's index along an axis, from 0."""
        return self.axis(name).index

    def check_member(self) -> None:
        """Raise LocalProtocolError if the calling task belongs to a different rank than the mesh."""
        world = calling_world()
        if world is not None and world is not self.world:
            outside = "" if world.rank in self.ranks else f", which do not include rank {world.rank}"
            raise LocalProtocolError(
                f"rank {world.rank} must use the mesh that its own new_mesh returned, not the mesh of rank "
                f"{self.world.rank}, which has the ranks {list(self.ranks)}{outside}",
                rank=world.rank,
            )


def find_axis(name: str, mesh: Mesh | None) -> Axis:
    """Return the axis ``name`` of ``mesh``, or of the newest open mesh if ``mesh`` is None.

    Raises:
        TypeError: ``name`` is not a string, or ``mesh`` is not a Mesh.
        LocalProtocolError: No mesh is open on this rank, or the mesh has no such axis.
    """
    if not isinstance(name, str):
        raise TypeError(f"axis_name must be the name of an axis or None, got {name!r:.80}")
    if mesh is not None:
        if not isinstance(mesh, Mesh):
            raise TypeError(f"mesh must be a Mesh from await new_mesh(axes), or None, got {mesh!r:.80}")
        return mesh.axis(name)
    meshes = open_meshes.get()
    if not meshes:
        world = calling_world()
        where = "here" if world is None else f"on rank {world.rank}"
        raise LocalProtocolError(
            f"the axis {name!r} is unknown {where}, because no mesh is open: pass mesh=, or enter a mesh (with mesh:)",
            axis_name=name,
        )
    return meshes[-1].axis(name)


async def new_mesh(
    axes: Mapping[str, int],
    *,
    group: Group | None = None,
    world: World | None = None,
    timeout_s: float = _MESH_TIMEOUT_S,
) -> Mesh:
    """Arrange ranks in a grid with named axes. All ranks of the group must call this function with the same axes.

    Args:
        axes: Size of each axis by name; the last axis varies fastest. The sizes' product must be the number of ranks.
        group: Group whose ranks fill the grid in group order; by default all ranks of the world.
        world: World of the rank; by default the calling task's world.
        timeout_s: Seconds to wait for the last rank.

    Raises:
        TypeError: A name is not a string, or a size is not an int. The other ranks get a RemoteError.
        ValueError: There are no axes, a name is empty, a size is below 1, the sizes' product is not the number of
            ranks, or the timeout is not a finite number above 0. The other ranks get a RemoteError.
        LocalProtocolError: This rank is not in the group.
        DisagreementError: Ranks pass different axes.
        StartTimeoutError: Some ranks did not join in time.

    **Cancellation**: if a rank has not called this function yet, the other ranks get a RemoteError. Otherwise the mesh
    is made and freed before CancelledError is raised.
    """
    world = world_to_await(world)
    world.check()
    group = world.group if group is None else group
    check_group(group)
    check_open(group)
    if group.ranks[group.index] != world.rank:
        raise LocalProtocolError(
            f"group must include this rank, {world.rank}, got the ranks {list(group.ranks)}", rank=world.rank
        )
    with world.agreements.objecting(group.ranks, _SUBJECT):
        sizes = _checked(axes, group)
        validation.seconds("timeout_s", timeout_s)

    async def make(start: Start[Mesh]) -> Mesh:
        await start.agree({"axes": _describe(sizes)}, timeout_s=timeout_s)
        strides = _strides(tuple(sizes.values()))
        lines = []
        for size, stride in zip(sizes.values(), strides, strict=True):
            first = group.index - group.index // stride % size * stride
            lines.append([group.ranks[first + place * stride] for place in range(size)])
        groups = await world.peers.groups.new_groups(lines, start.left_s(timeout_s), part_of=start)
        made = {name: Axis(name, world, line) for name, line in zip(sizes, groups, strict=True)}
        for axis in made.values():
            axis.group.lease.subjects.append(axis.subject)
            axis.group.lease.bound_to = tuple(rank for rank in group.ranks if rank not in axis.group.ranks)
        return Mesh(made, group.ranks, world)

    return await start_together(world.services, world.agreements, group.ranks, _SUBJECT, make, Mesh.free, name=_SUBJECT)


def calling_world() -> World | None:
    """Return the world in which the calling task runs, or None."""
    try:
        return current_world()
    except RuntimeError:
        return None


def _checked(axes: Mapping[str, int], group: Group) -> dict[str, int]:
    if not isinstance(axes, Mapping):
        raise TypeError(f"axes must be a mapping of names to sizes, like {{'POP': 4}}, got a {type(axes).__name__}")
    for name, size in axes.items():
        if type(name) is not str or type(size) is not int:
            raise TypeError(
                f"each axis must have a string as its name and an integer >= 1 as its size, got {name!r}: {size!r}"
            )
        if not name or size < 1:
            raise ValueError(f"each axis must have a non-empty name and a size >= 1, got {name!r}: {size}")
    if not axes:
        raise ValueError("axes must have at least one name with its size, like {'POP': 4}, got no name")
    if math.prod(axes.values()) != group.size:
        raise ValueError(
            f"the sizes of the axes {_describe(axes)} must multiply to {group.size}, the number of ranks in the group, "
            f"got {math.prod(axes.values())}"
        )
    return dict(axes)


def _describe(axes: Mapping[str, int]) -> str:
    return ", ".join(f"{name!r}: {size}" for name, size in axes.items())


def _strides(sizes: tuple[int, ...]) -> list[int]:
    """Return the stride of each axis: the difference between the group indices of neighbours along the axis."""
    return list(itertools.accumulate(reversed(sizes[1:]), lambda one, two: one * two, initial=1))[::-1]
