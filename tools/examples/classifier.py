"""Selective averaging of a plain classifier: rank 3 has a learning rate that is too large, and is replaced.

asyncdist run -n 4 tools/examples/classifier.py
"""

# mypy: ignore-errors

import torch
from torch import nn

import asyncdist as ad
from protocols import AsyncSelectiveAveragingPolicy


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Points, and whether each is inside of a circle."""
    points = torch.rand(128, 2) * 2 - 1
    return points, (points.norm(dim=1) < 0.7).long()


async def train(world: ad.World) -> float:
    torch.manual_seed(0)  # all begin with equal weights, so that their mean is a model
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01 if world.rank < 3 else 1.0)
    ad.seed_all(1)
    async with AsyncSelectiveAveragingPolicy(model, optimizer, average_every=50, replacement_ratio=0.25) as policy:
        for _ in range(300):
            points, labels = batch()
            loss = nn.functional.cross_entropy(model(points), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            info = await policy.step(loss=loss)
            if info:
                print(f"rank {world.rank}, {info}")
    points, labels = batch()
    return float((model(points).argmax(1) == labels).float().mean())


if __name__ == "__main__":
    print(f"accuracy {ad.run(train):.2f}")
