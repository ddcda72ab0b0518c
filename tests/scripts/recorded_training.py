"""A training whose recording is replayed: rank 2 is slow, and options delay, stop or kill ranks, among others.

The replay gets the same options, but kills, stops and delays no process for real.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import subprocess
import time
from dataclasses import dataclass

import torch

import asyncdist as ad
from protocols import AsyncSelectiveAveragingPolicy, AverageAllPolicy, SpawnPolicy

POLICIES = ("selective", "sharded", "average_all")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int)
    parser.add_argument("--policy", choices=POLICIES, default="selective")
    parser.add_argument("--coordinator", type=int, default=0)
    parser.add_argument("--kill", type=int, nargs=2, default=(-1, -1), metavar=("RANK", "STEP"))
    parser.add_argument("--stop", type=float, nargs=3, default=(-1, -1, 0), metavar=("RANK", "STEP", "SECONDS"))
    parser.add_argument("--late", type=float, nargs=2, default=(-1, 0), metavar=("RANK", "SECONDS"))
    parser.add_argument("--long", type=float, nargs=3, default=(-1, 1, 0), metavar=("RANK", "EVERY", "SECONDS"))
    parser.add_argument("--collectives", type=int, default=0, metavar="EVERY")
    parser.add_argument("--threads", type=int, default=0, metavar="EVERY")
    parser.add_argument("--talk", action="store_true", help="neighbours exchange messages, some of which come too late")
    return parser.parse_args()


def policy_of(kind: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer, coordinator: int) -> SpawnPolicy:
    if kind == "average_all":
        return AverageAllPolicy(model, optimizer, average_every=10)
    return AsyncSelectiveAveragingPolicy(
        model,
        optimizer,
        average_every=10,
        replacement_ratio=0.5,
        coordinator=coordinator,
        route="sharded" if kind == "sharded" else "auto",
    )


@dataclass(frozen=True)
class Word:
    iteration: int


def stop_here(seconds: float) -> None:
    """Stop this process; a shell continues it."""
    subprocess.Popen(["/bin/sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


async def talk(world: ad.World, channel: ad.Channel[Word], iteration: int) -> float:
    """Send to the next rank, and wait briefly for the previous rank's message."""
    await channel.send(Word(iteration), (world.rank + 1) % world.size)
    try:
        return float((await channel.receive(timeout_s=0.002)).message.iteration % 3)
    except TimeoutError:
        return 5.0


async def meet(world: ad.World, model: torch.nn.Module, iteration: int) -> float:
    """Enter collectives, and return their results."""
    total = await ad.all_reduce(torch.rand(3))  # MPI adds in its own order
    value = await ad.compute_and_broadcast(lambda: iteration % 7)
    await ad.average_gradients(model)
    await ad.barrier()
    return float(total.sum().item() + value)


async def main(world: ad.World) -> float:
    options = parse()
    torch.manual_seed(world.rank)
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    optimizer = torch.optim.Adam(model.parameters(), 0.005)
    inputs, labels = torch.randn(64, 256), torch.randint(0, 10, (64,))
    channel = world.channel(Word, tag=40) if options.talk else None
    if world.rank == options.late[0]:
        time.sleep(options.late[1])  # noqa: ASYNC251 - it computes
    met = 0.0
    async with policy_of(options.policy, model, optimizer, options.coordinator) as policy:
        for iteration in range(options.steps):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            if options.collectives and iteration % options.collectives == options.collectives - 1:
                met = await meet(world, model, iteration)
            if channel is not None and iteration % 4 == 3:
                met += await talk(world, channel, iteration)
            if options.threads and iteration % options.threads == options.threads - 1:
                await world.compute(optimizer.step)
            else:
                optimizer.step()
            if world.rank == 2:
                time.sleep(0.003)  # noqa: ASYNC251 - it computes
            if world.rank == options.long[0] and iteration % options.long[1] == options.long[1] - 1:
                time.sleep(options.long[2])  # noqa: ASYNC251 - it computes
            if not world.is_simulated and (world.rank, iteration) == tuple(options.kill):
                os.kill(os.getpid(), signal.SIGKILL)
            if not world.is_simulated and (world.rank, iteration) == tuple(map(int, options.stop[:2])):
                stop_here(options.stop[2])
            metric = -loss.item() - random.random() / 10 + met / 1000
            if options.policy == "average_all":
                await policy.step()
            else:
                await policy.step(metric)
            await asyncio.sleep(0)
    if channel is not None:
        await ad.barrier()  # the next rank may still send
    return loss.item()


if __name__ == "__main__":
    ad.run(main)
