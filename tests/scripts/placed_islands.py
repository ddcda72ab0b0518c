"""Divides ranks of two hosts into islands of two: each reports its host and the ranks of its island."""

from __future__ import annotations

import torch
from support.mpi import report

import asyncdist as ad
from protocols import AsyncSelectiveAveragingPolicy


async def main(world: ad.World) -> None:
    model = torch.nn.Linear(2, 1)
    policy = AsyncSelectiveAveragingPolicy(
        model, torch.optim.SGD(model.parameters(), lr=0.1), average_every=2, island_size=2
    )
    async with policy:
        for _ in range(20):
            await policy.step(float(world.rank))
    report(world.rank, {"host": world.hostname, "island": sorted(policy._members)})


if __name__ == "__main__":
    ad.run(main)
