"""Lays the ranks of a group out as a grid with named axes, and makes the groups along its lines.

With the axes ``{"POP": 2, "DP": 3}`` the six ranks of a group stand in two rows of three, the last axis running
fastest, as in ``numpy.reshape``. An operation along ``"DP"`` is between the three ranks of a row, one along ``"POP"``
between the two of a column. The groups are made once, with the mesh. A mesh is one program: where one of its ranks is
lost, the operations along all its axes end with RankLostError, on all its ranks.

``with mesh:`` makes its axes known by name to everything that the calling task awaits and starts inside.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Coroutine, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, ParamSpec, TypeVar

from asyncdist import validation
from asyncdist.collectives.agreed_start import Start, start_together
from asyncdist.collectives.groups import Group, check_group, check_open, free_all, short
from asyncdist.errors import ClosedError, LocalProtocolError
from asyncdist.runtime.world import World, current_world

P = ParamSpec("P")
T = TypeVar("T")

POP_AXIS_NAME: Final = "POP"
DP_AXIS_NAME: Final = "DP"
_MESH_TIMEOUT_S: Final = 60.0
_SUBJECT: Final = "new mesh"

_open_meshes: ContextVar[tuple[Mesh, ...]] = ContextVar("asyncdist_open_meshes", default=())


@dataclass(slots=True, eq=False)
class _Turn:
    """Counts the operations of one rank along one axis, and lets one run at a time."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    begun_count: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Axis:
    """Describes one axis of a mesh, as one of its ranks sees it.

    Attributes:
        name: the name in the mesh.
        world: this rank's world.
        group: the ranks along the axis that share this rank's place on all other axes.
    """

    name: str
    world: World
    group: Group
    _turn: _Turn

    @property
    def begun_count(self) -> int:
        """Return the number of operations that this rank has begun along the axis."""
        return self._turn.begun_count

    @property
    def subject(self) -> str:
        """Return the subject on which the axis's ranks agree before each operation."""
        return f"axis {self.name!r} (group {self.group.number})"

    @property
    def size(self) -> int:
        """Return the number of ranks along the axis."""
        return self.group.size

    @property
    def index(self) -> int:
        """Return this rank's place along the axis."""
        return self.group.index

    async def perform(self, work: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run an operation of several messages to its end, one after the other, even if the caller is cancelled.

        The other members count on this rank's part, and tasks that share an axis must not mix their messages.
        """
        return await self.world.services.engine.shielded(self.begin(work, *args, **kwargs), self.group.tag)

    def begin(self, work: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs) -> asyncio.Task[T]:
        """Start the task that :meth:`perform` awaits."""
        name = f"operation along axis {self.name!r}"
        self._turn.begun_count += 1
        return self.world.services.spawn_service(self._in_turn(work, *args, **kwargs), name=name)

    async def _in_turn(self, work: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs) -> T:
        async with self._turn.lock:
            return await work(*args, **kwargs)


class Mesh:
    """Arranges the ranks of a group as a grid with named axes; made by :func:`new_mesh`.

    Attributes:
        axes: sizes by name, slowest first.
        ranks: ranks of the world, in the order of the grid.
        world: this rank's world.
    """

    def __init__(self, axes: Mapping[str, Axis], ranks: tuple[int, ...], world: World) -> None:
        self.axes: Mapping[str, int] = MappingProxyType({name: axis.size for name, axis in axes.items()})
        self.ranks = ranks
        self.world = world
        self._axes = dict(axes)

    def __repr__(self) -> str:
        return f"<Mesh {_in_words(self.axes)}, ranks {list(self.ranks)}>"

    def __enter__(self) -> Mesh:
        """Make the axes known by name here, and in tasks that are started here."""
        self.check_member()
        self._check_open()
        _open_meshes.set((*_open_meshes.get(), self))
        return self

    def __exit__(self, *_: object) -> None:
        *outer, newest = _open_meshes.get()
        assert newest is self, "meshes are left in the reverse order"
        _open_meshes.set(tuple(outer))

    async def free(self) -> None:
        """Give the groups of the axes back, as :meth:`Group.free` does; the mesh cannot be used any more.

        Raises:
            LocalProtocolError: the calling task runs on a rank for which this mesh was not made.
        """
        self.check_member()
        for axis in self._axes.values():
            if not axis.group.lease.is_freed:
                self.world.agreements.withdraw(axis.group.ranks, axis.subject)
        await free_all(axis.group for axis in self._axes.values())

    def _check_open(self) -> None:
        if any(axis.group.lease.is_freed for axis in self._axes.values()):
            words = f"the mesh {_in_words(self.axes)} of ranks {short(self.ranks)} was freed on this rank"
            raise ClosedError(words, ranks=self.ranks[:16])

    def axis(self, name: str) -> Axis:
        """Return the axis of that name.

        Raises:
            ClosedError: the mesh was freed.
            LocalProtocolError: the mesh has no such axis, or was not made for the rank on which the calling task runs.
        """
        self.check_member()
        self._check_open()
        found = self._axes.get(name)
        if found is None:
            raise LocalProtocolError(f"the mesh has no axis {name!r}; it has {_in_words(self.axes)}", axis_name=name)
        return found

    def axis_size(self, name: str) -> int:
        """Return the number of ranks along an axis."""
        return self.axis(name).size

    def axis_index(self, name: str) -> int:
        """Return this rank's place along an axis, from 0."""
        return self.axis(name).index

    def check_member(self) -> None:
        """Refuse callers on other ranks, which may hold this object where ranks share a process.

        Raises:
            LocalProtocolError: naming both ranks.
        """
        world = _calling_world()
        if world is not None and world is not self.world:
            outside = "" if world.rank in self.ranks else f", in which rank {world.rank} has no place"
            raise LocalProtocolError(
                f"rank {world.rank} uses the mesh that rank {self.world.rank} made of ranks "
                f"{list(self.ranks)}{outside}",
                rank=world.rank,
            )


def find_axis(name: str, mesh: Mesh | None) -> Axis:
    """Return the axis ``name`` of ``mesh``, or else of the newest open mesh.

    Raises:
        TypeError: ``name`` is no text, or ``mesh`` is no Mesh.
        LocalProtocolError: no mesh is open on this rank, or it has no such axis.
    """
    if not isinstance(name, str):
        raise TypeError(f"axis_name is {name!r:.80}; allowed: the name of an axis, or None")
    if mesh is not None:
        if not isinstance(mesh, Mesh):
            raise TypeError(f"mesh is {mesh!r:.80}; allowed: a Mesh, as await new_mesh(axes) makes it, or None")
        return mesh.axis(name)
    meshes = _open_meshes.get()
    if not meshes:
        world = _calling_world()
        where = "here" if world is None else f"on rank {world.rank}"
        raise LocalProtocolError(
            f"axis {name!r} is unknown {where}: no mesh is open; pass mesh=, or enter one: with await new_mesh(...):",
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
    """Lay ranks out as a grid with named axes. Collective among them; they must pass the same axes.

    Args:
        axes: sizes by name, slowest first; their product is the number of ranks.
        group: the group of the ranks, in its order; all of the world by default.
        world: the calling task's by default.
        timeout_s: how long to wait for the last rank, in seconds.

    Raises:
        TypeError: a name is no text, or a size is no int; a RemoteError on the others.
        ValueError: no axes, an empty name, a size below 1, sizes that do not multiply to the number of ranks, or a
            timeout that is no finite number of seconds above 0; a RemoteError on the others.
        LocalProtocolError: this rank is not in the group.
        DisagreementError: ranks pass different axes; the first difference is named.
        StartTimeoutError: naming the ranks that did not come in time.

    **Cancellation**: while ranks are missing, the others get RemoteError. Once all have come the mesh is made, and
    given back, before the cancellation is raised.
    """
    world = world or current_world()
    world.check()
    group = world.group if group is None else group
    check_group(group)
    check_open(group)
    if group.ranks[group.index] != world.rank:
        raise LocalProtocolError(f"rank {world.rank} is not in the mesh's group {list(group.ranks)}", rank=world.rank)
    with world.agreements.objecting(group.ranks, _SUBJECT):
        sizes = _checked(axes, group)
        validation.seconds("timeout_s", timeout_s)

    async def make(start: Start[Mesh]) -> Mesh:
        await start.agree({"axes": _in_words(sizes)}, timeout_s=timeout_s)
        strides = _strides(tuple(sizes.values()))
        lines = []
        for size, stride in zip(sizes.values(), strides, strict=True):
            first = group.index - group.index // stride % size * stride
            lines.append([group.ranks[first + place * stride] for place in range(size)])
        groups = await world.peers.groups.new_groups(lines, start.left_s(timeout_s), part_of=start)
        made = {name: Axis(name, world, line, _Turn()) for name, line in zip(sizes, groups, strict=True)}
        for axis in made.values():
            axis.group.lease.subjects.append(axis.subject)
            axis.group.lease.bound_to = tuple(rank for rank in group.ranks if rank not in axis.group.ranks)
        return Mesh(made, group.ranks, world)

    return await start_together(world.services, world.agreements, group.ranks, _SUBJECT, make, Mesh.free, name=_SUBJECT)


def _calling_world() -> World | None:
    try:
        return current_world()
    except RuntimeError:
        return None


def _checked(axes: Mapping[str, int], group: Group) -> dict[str, int]:
    if not isinstance(axes, Mapping):
        raise TypeError(f"axes is a {type(axes).__name__}; allowed: a mapping of names to sizes, like {{'POP': 4}}")
    for name, size in axes.items():
        if type(name) is not str or type(size) is not int:
            raise TypeError(f"axis {name!r} has size {size!r}; allowed: a name and an int of at least 1")
        if not name or size < 1:
            raise ValueError(f"axis {name!r} has size {size}; allowed: a name and an int of at least 1")
    if not axes:
        raise ValueError("axes is empty; allowed: at least one name with its size, like {'POP': 4}")
    if math.prod(axes.values()) != group.size:
        raise ValueError(
            f"the axes {_in_words(axes)} make {math.prod(axes.values())} places; the group has {group.size} ranks"
        )
    return dict(axes)


def _in_words(axes: Mapping[str, int]) -> str:
    return ", ".join(f"{name!r}: {size}" for name, size in axes.items())


def _strides(sizes: tuple[int, ...]) -> list[int]:
    """Return how far apart neighbours along each axis are, in ranks of the group."""
    return list(itertools.accumulate(reversed(sizes[1:]), lambda one, two: one * two, initial=1))[::-1]
