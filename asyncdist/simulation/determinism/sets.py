"""Makes the iteration order of asyncio's task sets deterministic, so that runs are reproducible.

The order of a set depends on the hashes of its members. By default, an object is hashed by its address, which differs
in each run. Tasks and futures of a simulated rank are therefore hashed by a number. asyncio's functions also put other
objects into sets. Sets in these functions therefore iterate in insertion order. A program's own sets of objects without
``__hash__`` have no deterministic order.
"""

from __future__ import annotations

import asyncio
import contextlib
from asyncio import tasks
from collections.abc import Iterable, Iterator
from typing import Any, Final

from asyncdist.simulation.processes.event_loop import RankLoop

_GATHERED: Final[Any] = tasks._GatheringFuture  # type: ignore[attr-defined]


class _InOrder(set[Any]):
    """A set that iterates over its members in insertion order."""

    def __init__(self, members: Iterable[Any] = ()) -> None:
        self._order = dict.fromkeys(members)
        super().__init__(self._order)

    def add(self, member: Any) -> None:
        super().add(member)
        self._order[member] = None

    def pop(self) -> Any:
        for member in self:
            self.remove(member)
            return member
        raise KeyError("pop from an empty set")

    def __iter__(self) -> Iterator[Any]:
        order = self._order
        added_otherwise = [member for member in super().__iter__() if member not in order]
        return iter([*(member for member in order if member in self), *added_otherwise])


@contextlib.contextmanager
def ordered_sets() -> Iterator[None]:
    """Make asyncio use ordered sets in all threads until the context ends."""
    all_tasks = asyncio.all_tasks

    def all_tasks_in_order(loop: asyncio.AbstractEventLoop | None = None) -> set[asyncio.Task[Any]]:
        """Return the unfinished tasks, like ``asyncio.all_tasks``, but without tasks of earlier simulations."""
        found = asyncio.get_running_loop() if loop is None else loop
        return _InOrder(found.unfinished_tasks()) if isinstance(found, RankLoop) else all_tasks(loop)

    names: Any = tasks.__dict__
    names["set"] = _InOrder  # shadows the builtin ``set`` in asyncio.tasks
    modules: tuple[Any, Any] = (asyncio, tasks)
    for module in modules:
        module.all_tasks = all_tasks_in_order
    _GATHERED.__hash__ = _hash_of_gathered
    try:
        yield
    finally:
        del names["set"], _GATHERED.__hash__
        for module in modules:
            module.all_tasks = all_tasks


def _hash_of_gathered(future: Any) -> int:
    """Return the hash of an ``asyncio.gather`` future: a number on a rank's loop, and otherwise its default hash."""
    loop = future.get_loop()
    return loop.number_of(future) if isinstance(loop, RankLoop) else object.__hash__(future)
