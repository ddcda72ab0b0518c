"""Saves a population in every epoch, and resumes from the last checkpoint when it is started again.

asyncdist run -n 2 tools/examples/population_checkpoints.py checkpoints
"""

import sys

import torch

import asyncdist as ad
from protocols import AsyncSelectiveAveragingPolicy


async def train(world: ad.World, folder: str) -> int:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    policy = AsyncSelectiveAveragingPolicy(model, optimizer, average_every=20, replacement_ratio=0.5)
    ad.seed_all(0)
    try:
        found = await ad.load_population(folder, model, optimizer, policy=policy)
        first = int(found.extra["epoch"])
    except FileNotFoundError:  # on all ranks
        first = 0
    async with policy:
        for epoch in range(first, first + 2):
            for _ in range(50):
                inputs = torch.randn(64, 8)
                loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                await policy.step(loss=loss)
            await ad.save_population(folder, model, optimizer, policy=policy, extra={"epoch": epoch + 1}, keep=2)
            if ad.is_main_process():
                print(f"epoch {epoch + 1} is saved")
    return first + 2


if __name__ == "__main__":
    ad.run(train, sys.argv[1])
