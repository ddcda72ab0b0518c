"""Rank 0 is killed; what the others begin with it afterwards, or wait in, ends with RankLostError that names it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import torch
from support.mpi import report
from torch import nn

import asyncdist as ad
from protocols import AsyncSelectiveAveragingPolicy, AverageAllPolicy, OneSidedSelectiveAveragingPolicy, coordinate

VICTIM = 0


async def enter(policy: Any) -> None:
    async with policy:
        pass


def calls(world: ad.World) -> dict[str, Callable[[], Awaitable[Any]]]:
    """What needs all ranks, by name."""
    model = nn.Linear(1, 1)
    of_model: Any = (model, torch.optim.SGD(model.parameters(), lr=0.1))
    return {
        "new_group": lambda: ad.new_group(range(world.size)),
        "a group led by another": lambda: ad.new_group([*range(1, world.size), VICTIM]),
        "new_mesh": lambda: ad.new_mesh({"DP": world.size}),
        "new_parallel_groups": lambda: ad.new_parallel_groups(world.size),
        "initialize_distributed_compute": ad.initialize_distributed_compute,
        "AverageAllPolicy": lambda: enter(AverageAllPolicy(*of_model, average_every=1)),
        "AsyncSelectiveAveragingPolicy": lambda: enter(AsyncSelectiveAveragingPolicy(*of_model, average_every=1)),
        "OneSidedSelectiveAveragingPolicy": lambda: enter(OneSidedSelectiveAveragingPolicy(*of_model, average_every=1)),
        "coordinate": lambda: coordinate([VICTIM]),
        "barrier": ad.barrier,
        "compute_and_broadcast": lambda: ad.compute_and_broadcast(lambda: 1),
    }


async def told(call: Awaitable[Any]) -> str:
    try:
        await call
    except ad.AsyncdistError as error:
        return f"{type(error).__name__} {error.facts.get('rank')}"
    return "it came to an end"


async def main(world: ad.World, die: Callable[[], None]) -> dict[str, str]:
    mesh = await ad.new_mesh({"DP": world.size})
    model = nn.Linear(1, 1)
    async with AverageAllPolicy(model, torch.optim.SGD(model.parameters(), lr=0.1), average_every=1) as policy:
        waits = {
            "psum, waiting": lambda: ad.psum(torch.ones(1), "DP", mesh=mesh),
            "step, waiting": policy.step,
            "new_group, waiting": lambda: ad.new_group(range(world.size)),
        }
        if world.rank == VICTIM:
            await world.sleep(0.3)
            die()
        waiting = {name: asyncio.ensure_future(told(call())) for name, call in waits.items()}
        found = {name: await task for name, task in waiting.items()}
        found["psum"] = await told(ad.psum(torch.ones(1), "DP", mesh=mesh))
        found["step"] = await told(policy.step())
    for name, call in calls(world).items():
        found[name] = await told(call())
    survivors = await ad.surviving_group()
    assert survivors.ranks == tuple(range(1, world.size))
    await ad.barrier(group=survivors)  # the others go on among themselves
    return found


def kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def reporting(world: ad.World) -> None:
    report(world.rank, await main(world, kill_this_process))


if __name__ == "__main__":
    ad.run(reporting)
