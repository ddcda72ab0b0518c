"""Records which rank started each asynchronous generator, so that an abandoned generator is closed on that rank.

When Python finalises an abandoned generator, asyncio closes it in a task on the loop that started it. In a simulation,
the garbage collector may do so during a different rank's turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import weakref
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from asyncdist.simulation.processes.event_loop import RankLoop


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
