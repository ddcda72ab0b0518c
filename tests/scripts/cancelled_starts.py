"""Cancels rank 1 after the leader's decision to start, which rank 1's blocked loop has not received yet.

Each case is a start that begins with an agreement. Each rank reports its outcome by the case's name.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import torch
from support.mpi import report
from torch import nn

import asyncdist as ad
from protocols import AsyncSelectiveAveragingPolicy, AverageAllPolicy, OneSidedSelectiveAveragingPolicy

BLOCKED_S = 0.3


@dataclass(frozen=True, slots=True)
class Come:
    """Rank 1 to rank 0: rank 1 waits for rank 0."""

    case: str


def model_and_optimizer(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 1, bias=False)
    nn.init.constant_(model.weight, float(rank))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


async def group(world: ad.World) -> ad.Group:
    return await ad.new_group([0, 1])


async def mesh(world: ad.World) -> ad.Mesh:
    return await ad.new_mesh({"DP": 2})


async def parallel_groups(world: ad.World) -> Any:
    return await ad.new_parallel_groups(2)


async def roles(world: ad.World) -> Any:
    return await ad.initialize_distributed_compute()


async def selective(world: ad.World) -> str:
    async with AsyncSelectiveAveragingPolicy(*model_and_optimizer(world.rank), average_every=1) as policy:
        for _ in range(3):
            await policy.step(1.0)
    return "left"


async def one_sided(world: ad.World) -> str:
    async with OneSidedSelectiveAveragingPolicy(*model_and_optimizer(world.rank), average_every=1) as policy:
        for _ in range(3):
            await policy.step(1.0)
    return "left"


CASES = (group, mesh, parallel_groups, roles, selective, one_sided)


async def cancelled_unseen(
    world: ad.World, channel: ad.Channel[Come], start: Callable[[], Coroutine[Any, Any, Any]], name: str
) -> str:
    """Cancel ``start`` on rank 1 after rank 0's decision, take part on rank 0, and return the outcome."""
    if world.rank == 0:
        await channel.receive()
        return type(await start()).__name__
    task = asyncio.ensure_future(start())
    for _ in range(10):
        await world.safe_point()
    channel.send_nowait(Come(name), dest=0)
    await world.safe_point()
    time.sleep(BLOCKED_S)  # noqa: ASYNC251 rank 0 decides while the loop is blocked
    task.cancel()
    try:
        return type(await task).__name__
    except asyncio.CancelledError:
        return "cancelled"


async def average_all(world: ad.World, channel: ad.Channel[Come]) -> list[Any]:
    """The cancelled step has averaged like the step of the other rank, and so do the next steps."""
    model, optimizer = model_and_optimizer(2 * world.rank)
    async with AverageAllPolicy(model, optimizer, average_every=1) as policy:
        found: list[Any] = [await cancelled_unseen(world, channel, policy.step, "average_all")]
        found.append(model.weight.tolist())
        nn.init.constant_(model.weight, 4.0 * world.rank)
        found.append((await policy.step()).round)
        found.append(model.weight.tolist())
    return found


async def main(world: ad.World) -> dict[str, Any]:
    channel = world.channel(Come, tag=100)
    found: dict[str, Any] = {"average_all": await average_all(world, channel)}
    for case in CASES:
        found[case.__name__] = await cancelled_unseen(world, channel, lambda case=case: case(world), case.__name__)
        await ad.barrier()  # both ranks are alive, and begin the next case together
    channel.close()
    return found


async def reporting(world: ad.World) -> None:
    report(world.rank, await main(world))


if __name__ == "__main__":
    ad.run(reporting, strict=True)
