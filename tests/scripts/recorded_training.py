"""A population whose recordings are replayed: rank 2 is slow, and rank 3 kills itself where that is asked for."""

from __future__ import annotations

import os
import random
import signal
import sys
import time

import torch

import asyncdist as ad
from protocols import AsyncSelectiveAveragingPolicy

STEPS = int(sys.argv[1])
KILLED_AT = int(sys.argv[2]) if len(sys.argv) > 2 else -1


async def main(world: ad.World) -> float:
    torch.manual_seed(world.rank)
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    optimizer = torch.optim.Adam(model.parameters(), 0.005)
    inputs, labels = torch.randn(64, 256), torch.randint(0, 10, (64,))
    policy = AsyncSelectiveAveragingPolicy(model, optimizer, average_every=10, replacement_ratio=0.5)
    async with policy:
        for iteration in range(STEPS):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            if world.rank == 2:
                time.sleep(0.003)  # noqa: ASYNC251 - it computes
            if world.rank == 3 and iteration == KILLED_AT and not world.is_simulated:
                os.kill(os.getpid(), signal.SIGKILL)
            await policy.step(-loss.item() - random.random() / 10)
    return loss.item()


if __name__ == "__main__":
    ad.run(main)
