"""Runs ranks in one process: strictly with ``run``, or on the test's own loop for tests of internals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from asyncdist import World, run_local, tags
from asyncdist.collectives.groups import Group
from asyncdist.messaging.engine import Engine, yield_to_loop
from asyncdist.messaging.services import Services
from asyncdist.transports.local import LocalHub

NONCE = 0xC0FFEE


def run(main: Callable[..., Coroutine[Any, Any, Any]], ranks: int) -> list[Any]:
    """Run ``main`` on local ranks and return the result of each; anything left over is an error."""
    return run_local(main, ranks=ranks, strict=True)


@asynccontextmanager
async def engines(size: int) -> AsyncIterator[tuple[LocalHub, list[Engine]]]:
    """Open ``size`` ranks with nothing above their engines."""
    hub = LocalHub(size)
    loop = asyncio.get_running_loop()
    made = [Engine(hub.transport(rank), loop) for rank in range(size)]
    for engine in made:
        engine.start()
    try:
        yield hub, made
    finally:
        for engine in made:
            engine.stop()


@asynccontextmanager
async def worlds(size: int) -> AsyncIterator[list[World]]:
    """Open ``size`` worlds without an agreement; the test closes them."""
    async with engines(size) as (_, made):
        ranks, loop = tuple(range(size)), asyncio.get_running_loop()
        yield [
            World(
                Services(engine, loop, NONCE), loop, nonce=NONCE, group=Group(ranks, rank, tags.COLLECTIVE_FIRST, None)
            )
            for rank, engine in enumerate(made)
        ]


async def yields(count: int) -> None:
    """Let ``count`` iterations of the loop pass."""
    for _ in range(count):
        await yield_to_loop()


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait for a condition that needs only a few iterations of the loop and a millisecond timer."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 conditions of all kinds, and most ring no bell
            await asyncio.sleep(0.001)
