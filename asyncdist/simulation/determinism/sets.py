"""Gives the sets of asyncio an order that follows from the program.

A set finds its members by their hashes, and an object without a hash of its own by its address, which differs in each
run. Tasks and futures of a simulated rank have numbers in place of addresses. That does not help coroutines:
``asyncio.as_completed`` puts them into a set before it makes tasks of them. Nor does it help futures made by
``asyncio.Future()``, which ``asyncio.wait`` returns in sets. So while a simulation runs, asyncio's functions make sets
that keep the order in which their members came. Sets that a program makes itself, of coroutines or of other objects
without a hash, have no such order.
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
    """Is a set that is iterated in the order in which its members came."""

    def __init__(self, members: Iterable[Any] = ()) -> None:
        self._came = dict.fromkeys(members)
        super().__init__(self._came)

    def add(self, member: Any) -> None:
        super().add(member)
        self._came[member] = None

    def pop(self) -> Any:
        for member in self:
            self.remove(member)
            return member
        raise KeyError("pop from an empty set")

    def __iter__(self) -> Iterator[Any]:
        came = self._came
        added_otherwise = [member for member in super().__iter__() if member not in came]
        return iter([*(member for member in came if member in self), *added_otherwise])


@contextlib.contextmanager
def ordered_sets() -> Iterator[None]:
    """Keep asyncio's own sets in order until the context ends; also those of other threads, which does no harm."""
    all_tasks = asyncio.all_tasks

    def all_tasks_in_order(loop: asyncio.AbstractEventLoop | None = None) -> set[asyncio.Task[Any]]:
        """Return the tasks, as asyncio's function does, but without those of earlier simulations."""
        found = asyncio.get_running_loop() if loop is None else loop
        return _InOrder(found.unfinished_tasks()) if isinstance(found, RankLoop) else all_tasks(loop)

    names: Any = tasks.__dict__
    names["set"] = _InOrder  # before the builtin one
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
    """Return the hash of ``asyncio.gather``'s future: a number on a rank's loop, as its other futures have."""
    loop = future.get_loop()
    return loop.number_of(future) if isinstance(loop, RankLoop) else object.__hash__(future)
