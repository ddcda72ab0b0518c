"""Runs in every world: ranks train, and twice the worst rank takes the others' average; rank 0 prints all weights.

The decisions depend only on ranks, and weights do not change until a round has ended. So timing has no influence, and
every printed bit can be compared. ``test_worlds.py`` starts this file in each world, and repeats the arithmetic by
hand.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch
from torch import nn

import asyncdist as ad
from protocols import AsyncSelectiveAveragingPolicy

STRATEGIES = ("mean", "weighted_mean")
EVERY = 4
"""Steps until a report."""


@dataclass(frozen=True, slots=True)
class Replaced:
    """Message to all ranks: the sender, the worst rank, has its new weights."""


def build(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model that differs between ranks."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    """Train on a batch that rank and step determine."""
    batch = torch.randn(8, 3, generator=torch.Generator().manual_seed(1000 * rank + step))
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()


def weights_of(model: nn.Module) -> list[float]:
    """Return all weights in turn; JSON keeps every bit."""
    return [float(value) for parameter in model.parameters() for value in parameter.detach().flatten()]


async def main(world: ad.World) -> list[list[float]] | None:
    """Train, average once with each strategy, and train again; rank 0 returns the weights of all ranks."""
    torch.set_num_threads(1)
    model, optimizer = build(world.rank)
    for number, strategy in enumerate(STRATEGIES):
        for step in range(EVERY - 1):
            train_step(model, optimizer, world.rank, EVERY * number + step)
        await average_once(world, model, optimizer, strategy, EVERY * number + EVERY - 1)
    train_step(model, optimizer, world.rank, EVERY * len(STRATEGIES))
    everything = await ad.gather_from_all_ranks(lambda: weights_of(model))
    if everything is not None:
        print(json.dumps({"world": world.transport_name, "ranks": world.size, "weights": everything}), flush=True)
    return everything


async def average_once(
    world: ad.World, model: nn.Module, optimizer: torch.optim.Optimizer, strategy: str, last_step: int
) -> None:
    """Make a training step and a report, and take part in the resulting round, in which rank 0 is the worst."""
    replaced = world.channel(Replaced, tag=40)
    is_missing = world.size > 1  # a single rank has nothing to average
    async with AsyncSelectiveAveragingPolicy(
        model,
        optimizer,
        average_every=1,
        replacement_ratio=1 / world.size,
        averaging_strategy=strategy,
        grace_s=1.0,
        threshold=0.0,  # one round
        cooldown=10**9,  # and no second round
        quorum=1.0,
        name=strategy,
    ) as policy:
        train_step(model, optimizer, world.rank, last_step)
        await ad.barrier()
        while is_missing:
            info = await policy.step(world.rank - world.size)
            if info:
                assert (world.rank, info.donors) == (0, tuple(range(1, world.size)))
                for dest in range(world.size):
                    await replaced.send(Replaced(), dest)
            is_missing = replaced.receive_nowait() is None
            await world.sleep(0.002)  # ranks share cores
        if world.size == 1:
            assert not await policy.step(0.0)
        await ad.barrier()
    replaced.close()


if __name__ == "__main__":
    ad.run(main)
