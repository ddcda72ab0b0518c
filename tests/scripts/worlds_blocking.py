"""Does the same as ``worlds.py`` without an event loop, as a plain script for each world."""

from __future__ import annotations

import json

import torch
from scripts.worlds import EVERY, STRATEGIES, Replaced, build, train_step, weights_of

import asyncdist as ad
from protocols import AsyncSelectiveAveragingPolicy


def main(world: ad.blocking.World) -> list[list[float]] | None:
    """Train, average once with each strategy, and train again; rank 0 returns the weights of all ranks."""
    torch.set_num_threads(1)
    model, optimizer = build(world.rank)
    for number, strategy in enumerate(STRATEGIES):
        for step in range(EVERY - 1):
            train_step(model, optimizer, world.rank, EVERY * number + step)
        average_once(world, model, optimizer, strategy, EVERY * number + EVERY - 1)
    train_step(model, optimizer, world.rank, EVERY * len(STRATEGIES))
    everything = ad.blocking.gather_from_all_ranks(lambda: weights_of(model))
    if everything is not None:
        name = world.awaited.transport_name
        print(json.dumps({"world": name, "ranks": world.size, "weights": everything}), flush=True)
    return everything


def average_once(
    world: ad.blocking.World,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: str,
    last_step: int,
) -> None:
    """Make a training step and a report, and take part in the resulting round, in which rank 0 is the worst."""
    replaced = world.channel(Replaced, tag=40)
    is_missing = world.size > 1  # a single rank has nothing to average
    with ad.blocking.policy(
        AsyncSelectiveAveragingPolicy(
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
        )
    ) as policy:
        train_step(model, optimizer, world.rank, last_step)
        ad.blocking.barrier()
        while is_missing:
            info = policy.step(world.rank - world.size)
            if info:
                assert (world.rank, info.donors) == (0, tuple(range(1, world.size)))
                for dest in range(world.size):
                    replaced.send(Replaced(), dest)
            is_missing = replaced.receive_nowait() is None
            world.sleep(0.002)  # ranks share cores
        if world.size == 1:
            assert not policy.step(0.0)
        ad.blocking.barrier()
    replaced.close()


if __name__ == "__main__":
    with ad.blocking.open_world() as opened:
        main(opened)
