"""Rank 0 is killed: the others' calls and waits that need it raise RankLostError that names it.

Selective averaging on all ranks starts without the lost rank, as do groups of the living ranks.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import torch
from support.mpi import report
from torch import nn

import asyncdist as ad
from protocols import AsyncSelectiveAveragingPolicy, AverageAllPolicy, OneSidedSelectiveAveragingPolicy, coordinate

VICTIM = 0


@dataclass(frozen=True)
class Ask:
    number: int


@dataclass(frozen=True)
class Answer:
    number: int


async def enter(policy: Any) -> None:
    async with policy:
        pass


async def average(world: ad.World) -> None:
    """Start selective averaging on all ranks, of which some are lost, and continue until the others have averaged."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    async with AsyncSelectiveAveragingPolicy(model, optimizer, average_every=1, replacement_ratio=0.5) as policy:
        while policy.statistics().last_round < 3:
            await policy.step(float(world.rank))
            await world.sleep(0.001)
    assert policy.statistics().coordinator_rank == min(set(range(world.size)) - {VICTIM})


def calls(world: ad.World, copy_of_all: ad.Group) -> dict[str, Callable[[], Awaitable[Any]]]:
    """Return the calls that need all ranks, by name."""
    model = nn.Linear(1, 1)
    of_model: Any = (model, torch.optim.SGD(model.parameters(), lr=0.1))
    return {
        "new_group": lambda: ad.new_group(range(world.size)),
        "a group led by another": lambda: ad.new_group([*range(1, world.size), VICTIM]),
        "new_mesh": lambda: ad.new_mesh({"DP": world.size}),
        "new_parallel_groups": lambda: ad.new_parallel_groups(world.size),
        "initialize_distributed_compute": ad.initialize_distributed_compute,
        "AverageAllPolicy": lambda: enter(AverageAllPolicy(*of_model, average_every=1)),
        "AsyncSelectiveAveragingPolicy": lambda: enter(
            AsyncSelectiveAveragingPolicy(*of_model, average_every=1, group=copy_of_all)
        ),
        "OneSidedSelectiveAveragingPolicy": lambda: enter(
            OneSidedSelectiveAveragingPolicy(*of_model, average_every=1, group=copy_of_all)
        ),
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
    copy_of_all = await ad.new_group(range(world.size))
    mesh = await ad.new_mesh({"DP": world.size})
    model = nn.Linear(1, 1)
    async with (
        ad.Calls(Ask, Answer, tag=5, answer=lambda ask, _: Answer(ask.number)) as questions,
        AverageAllPolicy(model, torch.optim.SGD(model.parameters(), lr=0.1), average_every=1) as policy,
    ):
        await questions.ask(Ask(1), VICTIM)
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
        found["ask"] = await told(asyncio.wait_for(questions.ask(Ask(1), VICTIM), 10))
        found["ask, of another size"] = await told(asyncio.wait_for(questions.ask(Ask(2**40), VICTIM), 10))
    for name, call in calls(world, copy_of_all).items():
        found[name] = await told(call())
    survivors = await ad.surviving_group()
    assert survivors.ranks == tuple(range(1, world.size))
    await ad.barrier(group=survivors)  # the survivors continue without the lost rank
    await average(world)
    return found


def kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def reporting(world: ad.World) -> None:
    report(world.rank, await main(world, kill_this_process))


if __name__ == "__main__":
    ad.run(reporting)
