"""Makes asyncio's task sets and asynchronous generators deterministic, so that runs are reproducible.

The order of a set depends on the hashes of its members. By default, an object is hashed by its address, which differs
in each run. Tasks and futures of a simulated rank are therefore hashed by a number. asyncio's functions also put other
objects into sets. Sets that these functions create therefore iterate in insertion order. A program's own sets of
objects without ``__hash__`` have no deterministic order.

When Python finalises an abandoned asynchronous generator, asyncio closes it in a task on the loop that started it. In a
simulation, the garbage collector may run during a different rank's turn, so :class:`Generators` records which rank
started each generator.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import weakref
from asyncio import tasks
from collections.abc import AsyncGenerator, Iterable, Iterator
from typing import Any, Final

from asyncdist.simulation.processes.event_loop import RankLoop

_GATHERED: Final[Any] = tasks._GatheringFuture  # type: ignore[attr-defined]


class _InOrder(set[Any]):
    """Iterates over its members in insertion order, unlike a plain set."""

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


class Generators:
    """Maps each asynchronous generator to the event loop of its rank."""

    def __init__(self) -> None:
        # The key is the generator's address, because weak references to a generator are dead when it is finalised.
        self._owners: dict[int, RankLoop] = {}
        self._begun: dict[RankLoop, dict[int, weakref.ref[AsyncGenerator[Any, Any]]]] = {}
        self._swept_count = 0

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Record the generators that this thread starts until the context ends, and close abandoned ones."""
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(firstiter=self._on_first, finalizer=self._on_last)
        try:
            yield
        finally:
            sys.set_asyncgen_hooks(*hooks)
            self._owners.clear()
            self._begun.clear()

    def of(self, loop: RankLoop) -> list[AsyncGenerator[Any, Any]]:
        """Return the existing generators that ``loop`` has started, oldest first."""
        begun = [reference() for reference in self._begun.get(loop, {}).values()]
        return [generator for generator in begun if generator is not None]

    def _on_first(self, generator: AsyncGenerator[Any, Any]) -> None:
        loop = asyncio._get_running_loop()
        if not isinstance(loop, RankLoop):
            return
        self._forget(id(generator))  # a finished generator may have had the same address
        self._owners[id(generator)] = loop
        self._begun.setdefault(loop, {})[id(generator)] = weakref.ref(generator)
        if len(self._owners) > 2 * self._swept_count + 100:
            self._sweep()

    def _on_last(self, generator: AsyncGenerator[Any, Any]) -> None:
        loop = self._forget(id(generator))
        if loop is not None and not loop.dead:
            loop.create_task(generator.aclose(), context=loop.context.copy())

    def _forget(self, address: int) -> RankLoop | None:
        loop = self._owners.pop(address, None)
        if loop is not None:
            del self._begun[loop][address]
        return loop

    def _sweep(self) -> None:
        for begun in self._begun.values():
            for address in [address for address, reference in begun.items() if reference() is None]:
                self._forget(address)
        self._swept_count = len(self._owners)
