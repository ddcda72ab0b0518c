"""Disconnects the network of rank 2's host; the other ranks continue, are notified, and make a group.

    python unplugged.py INTERFACE

As rank 2, in its own network namespace, it takes the interface down itself.
"""

from __future__ import annotations

import subprocess
import sys
import time

import torch
from support.mpi import report
from torch import nn

import asyncdist as ad
from asyncdist.transports.torch_distributed import sockets
from protocols import AsyncSelectiveAveragingPolicy

VICTIM = 2
STEP_S = 0.01


def compute() -> None:
    """Block the loop, as training does."""
    time.sleep(STEP_S)


def unplug(interface: str) -> None:
    subprocess.run(["ip", "link", "set", interface, "down"], check=True)


async def main(world: ad.World, interface: str) -> dict[str, int]:
    """Train until the lost ranks are known."""
    torch.manual_seed(world.rank)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gone: set[int] = set()
    world.services.on_gone(gone.add)
    async with AsyncSelectiveAveragingPolicy(model, optimizer, average_every=5) as policy:
        while policy.statistics().last_round < 3:
            compute()
            await policy.step(float(world.rank))
        if world.rank == VICTIM:
            unplug(interface)
        began_at = policy.iteration
        while not gone:
            compute()
            await policy.step(float(world.rank))
        steps, lost = policy.iteration - began_at, min(gone)
    group = await ad.surviving_group(world.group)
    count = await ad.all_reduce(torch.ones(()), group=group)
    return {"lost": lost, "steps": steps, "left": int(count)}


if __name__ == "__main__":
    for name in ("IDLE_S", "INTERVAL_S", "PROBE_COUNT", "UNACKNOWLEDGED_S"):
        setattr(sockets, name, 1)

    async def told(world: ad.World) -> None:
        report(world.rank, await main(world, sys.argv[1]))

    ad.run(told)
