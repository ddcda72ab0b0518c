"""Two tasks of each rank train one model each, in two groups with different leaders."""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from support.mpi import report
from torch import nn

import asyncdist as ad
from protocols import AverageAllPolicy, OneSidedSelectiveAveragingPolicy

TIMES = 2


async def train(group: ad.Group, kind: Any, value: float) -> float:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, value)
    async with kind(model, torch.optim.SGD(model.parameters()), average_every=1, group=group) as policy:
        await policy.step(1.0)
    return float(model.weight.detach())


async def main(world: ad.World) -> list[list[float]]:
    groups = [await ad.new_group(ranks) for ranks in ([0, 1], [1, 0])]
    found = []
    for kind in (OneSidedSelectiveAveragingPolicy, AverageAllPolicy):
        for _ in range(TIMES):
            found.append(await asyncio.gather(*(train(group, kind, float(world.rank)) for group in groups)))
            await ad.barrier()
    return found


async def reporting(world: ad.World) -> None:
    report(world.rank, await main(world))


if __name__ == "__main__":
    ad.run(reporting, strict=True)
