"""Runs jobs whose last rank serves a replay buffer for the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import asyncdist as ad
from protocols import ReplayBuffer, serve_replay_buffer

Main = Callable[[ad.World], Coroutine[Any, Any, Any]]
Client = Callable[[ad.World, ReplayBuffer], Coroutine[Any, Any, Any]]


def on_ranks(ranks: int, client: Client, **options: Any) -> Main:
    """Return a main in which the last rank serves, and each other rank is the client of one buffer."""

    async def main(world: ad.World) -> Any:
        if world.rank == ranks - 1:
            return await serve_replay_buffer(range(ranks - 1), **{"capacity": 1000, **options})
        async with ReplayBuffer(ranks - 1) as buffer:
            return await client(world, buffer)

    return main


def run(ranks: int, client: Client, **options: Any) -> list[Any]:
    return ad.run_local(on_ranks(ranks, client, **options), ranks=ranks, strict=True)
