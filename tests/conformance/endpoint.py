"""Provides each conformance case with one rank: raw messages on private tags, and a world."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

import asyncdist as ad
from asyncdist.messaging.engine import Engine, yield_to_loop
from asyncdist.transports.base import ANY_SOURCE, Transport

MODULES: Final = (
    "cases_transport",
    "cases_channels",
    "cases_streams",
    "cases_collectives",
    "cases_population",
    "cases_failures",
    "cases_exposure",
)
TAGS_PER_CASE: Final = 20
_BARRIER_TAG: Final = 6999
#: Long enough for a slow machine; a hang ends at this limit.
CASE_TIMEOUT_S: Final = 60.0

Case = Callable[["Endpoint"], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One rank in a case. ``tag`` is the first of the ``TAGS_PER_CASE`` tags that only this case uses."""

    world: ad.World
    tag: int

    @property
    def engine(self) -> Engine:
        return self.world.services.engine

    @property
    def transport(self) -> Transport:
        return self.world.services.engine.transport

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def size(self) -> int:
        return self.world.size

    @property
    def right(self) -> int:
        return (self.rank + 1) % self.size

    @property
    def left(self) -> int:
        return (self.rank - 1) % self.size

    async def send(self, data: Any, dest: int, tag: int = 0) -> None:
        await self.engine.send(data, dest, self.tag + tag)

    async def receive(self, nbytes: int, source: int = ANY_SOURCE, tag: int = 0) -> tuple[bytes, int]:
        """Return the bytes and the source of one message of at most ``nbytes``."""
        buffer = bytearray(nbytes)
        source, got = await self.engine.receive(buffer, source, self.tag + tag)
        return bytes(buffer[:got]), source

    async def yields(self, count: int) -> None:
        """Let ``count`` iterations of the loop pass."""
        for _ in range(count):
            await yield_to_loop()

    async def barrier(self) -> None:
        """Wait for all ranks with plain messages, so that the barrier does not depend on the code under test."""
        if self.rank == 0:
            for rank in range(1, self.size):
                await self.engine.receive(bytearray(1), rank, _BARRIER_TAG)
            for rank in range(1, self.size):
                await self.engine.send(b"!", rank, _BARRIER_TAG)
        else:
            await self.engine.send(b"!", 0, _BARRIER_TAG)
            await self.engine.receive(bytearray(1), 0, _BARRIER_TAG)


def all_cases() -> dict[str, Case]:
    """Every case by ``module.name``, in order."""
    found = {}
    for name in MODULES:
        module = importlib.import_module(f"conformance.{name}")
        for key, value in vars(module).items():
            if key.startswith("case_") and value.__module__ == module.__name__:
                found[f"{name.removeprefix('cases_')}.{key.removeprefix('case_')}"] = value
    return found


async def run_case(world: ad.World, name: str) -> None:
    """Run one case on this rank, and check that it leaves nothing behind."""
    cases = all_cases()
    end = Endpoint(world, 200 + TAGS_PER_CASE * list(cases).index(name))
    async with asyncio.timeout(CASE_TIMEOUT_S):
        await end.barrier()
        await cases[name](end)
        await end.barrier()
        await world.services.engine.until(
            lambda: not world.services.engine.outstanding(), deadline=asyncio.get_running_loop().time() + 30
        )
        until = asyncio.get_running_loop().time() + 30
        while (leftovers := world.services.leftovers()) and asyncio.get_running_loop().time() < until:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.001)  # a task whose last message has been sent ends in a later turn of the loop
        assert leftovers == [], leftovers  # pytest is not available on these ranks to show them
        await end.barrier()
