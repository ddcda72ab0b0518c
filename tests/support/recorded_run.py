"""Makes a short recording of selective averaging, and counts its events."""

from __future__ import annotations

from collections import Counter

import torch

import asyncdist as ad
from asyncdist.recording.reader import Recording
from protocols import AsyncSelectiveAveragingPolicy


async def train(world: ad.World) -> int:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    async with AsyncSelectiveAveragingPolicy(model, optimizer, average_every=5, replacement_ratio=0.5) as policy:
        for _ in range(30):
            await policy.step(float(world.rank))
        return policy.statistics().replacement_count


def counted(recording: Recording) -> Counter[str]:
    return Counter(event.kind for each in recording.ranks for event in each.events())
