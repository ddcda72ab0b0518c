"""Makes and frees groups and policies in turn, more than can exist at a time, on any transport.

python many_groups.py COUNT
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import Any

import torch
from support.mpi import report
from torch import nn

import asyncdist as ad
from protocols import AverageAllPolicy

MODEL_COUNT = 20
BLOCKED_S = 0.5


def descriptor_count() -> int:
    return len(os.listdir("/proc/self/fd"))


async def main(world: ad.World) -> dict[str, Any]:
    everybody = range(world.size)
    found: dict[str, Any] = {"tags": set(), "sums": set()}
    for i in range(int(sys.argv[1])):
        async with await ad.new_group(everybody) as group:
            if i % 50 == 0:
                found["sums"].add(int(await ad.all_reduce(torch.ones(1), group=group)))
            found["tags"].add(group.tag)
    found["sums"] = sorted(found["sums"])
    found["tag count"] = len(found.pop("tags"))
    # A rank that frees a group does not wait for the others.
    group = await ad.new_group(everybody)
    await ad.barrier(group=group)
    began_at = time.perf_counter()
    if world.rank == 1:
        time.sleep(BLOCKED_S)  # noqa: ASYNC251 the loop is blocked, too
    await group.free()
    found["waited"] = world.rank != 1 and time.perf_counter() - began_at >= BLOCKED_S
    try:
        await ad.barrier(group=group)
    except ad.ClosedError as error:
        found["after it"] = str(error.message)
    # A policy's buffers for a model are freed with the policy, even if the model lives on.
    models = [nn.Linear(256, 256) for _ in range(MODEL_COUNT)]
    counts = []
    for model in models:
        async with AverageAllPolicy(model, torch.optim.SGD(model.parameters(), lr=0.1), average_every=1) as policy:
            assert await policy.step()
        await ad.barrier()
        counts.append(descriptor_count())
    found["descriptors"] = counts[-1] - counts[0]
    await asyncio.sleep(0)
    return found


async def reporting(world: ad.World) -> None:
    report(world.rank, await main(world))


if __name__ == "__main__":
    ad.run(reporting, strict=True)
