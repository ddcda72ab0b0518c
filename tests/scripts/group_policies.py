"""Runs policies inside agent groups, one with a buffer rank; each group averages for itself. Runs in four worlds."""

from __future__ import annotations

from typing import Any

import torch
from support.mpi import report

import asyncdist as ad
from protocols import AsyncSelectiveAveragingPolicy, AverageAllPolicy, OneSidedSelectiveAveragingPolicy, SpawnPolicy

RANKS = 5


def make(rank: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(2, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float(2**rank))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def weight(model: torch.nn.Module) -> float:
    [found] = {value for parameter in model.parameters() for value in parameter.flatten().tolist()}
    return float(found)


async def until_all_have(goal: float, policy: SpawnPolicy, world: ad.World, group: ad.Group) -> None:
    """Step until the weights of all members are ``goal``; a rank that has these weights helps the others."""
    while weight(policy.model) != goal:
        await policy.step(float(world.rank))
    arrived = world.spawn(ad.barrier(group=group))
    while not arrived.done():
        await policy.step(float(world.rank))


async def main(world: ad.World) -> dict[str, float]:
    """Return this rank's weights after one average of each policy."""
    context = await ad.initialize_distributed_compute(num_remote_buffers=1, num_agent_groups=2)
    group = context.agent_group
    if group is None:
        await ad.barrier()
        return {}
    found = {}
    model, optimizer = make(world.rank)
    async with AverageAllPolicy(model, optimizer, average_every=1, group=group) as everybody:
        assert await everybody.step()
    found["all"] = weight(model)
    model, optimizer = make(world.rank)
    async with AsyncSelectiveAveragingPolicy(
        model, optimizer, average_every=1, replacement_ratio=0.5, group=group
    ) as selective:
        await until_all_have(float(2 ** group.ranks[1]), selective, world, group)
    found["selective"] = weight(model)
    model, optimizer = make(world.rank)
    async with OneSidedSelectiveAveragingPolicy(
        model, optimizer, average_every=1, replacement_mode="worst_ratio", replacement_ratio=0.5, group=group
    ) as one_sided:
        await until_all_have(float(2 ** group.ranks[1]), one_sided, world, group)
    found["one-sided"] = weight(model)
    await ad.barrier()
    return found


def check(results: Any) -> None:
    """The groups are ranks 0, 1 and ranks 2, 3, with weights 1, 2 and 4, 8; rank 4 serves a buffer."""
    for rank in range(4):
        mean, best = (1.5, 2.0) if rank < 2 else (6.0, 8.0)
        assert results[rank] == {"all": mean, "selective": best, "one-sided": best}, rank
    assert results[4] == {}


async def reporting(world: ad.World) -> None:
    report(world.rank, await main(world))


if __name__ == "__main__":
    ad.run(reporting, strict=True)
