"""Ranks 0 and 1 are killed in turn while they coordinate; the others continue to average.

Each rank reports who coordinated when it ended, the rounds in which it took an average, and its longest step.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import torch
from support.mpi import report
from torch import nn

import asyncdist as ad
from protocols import AsyncSelectiveAveragingPolicy

#: A rank is killed when it has been assigned a role in this round; the others end after the last of these rounds.
KILLED_AFTER = {0: 8, 1: 16}
LAST_ROUND = 24


async def main(world: ad.World) -> None:
    torch.manual_seed(world.rank)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rounds: list[int] = []
    longest_s = 0.0
    async with AsyncSelectiveAveragingPolicy(model, optimizer, average_every=5, grace_s=0.2) as policy:
        while policy.statistics().last_round < LAST_ROUND:
            if policy.statistics().last_round >= KILLED_AFTER.get(world.rank, LAST_ROUND):
                os.kill(os.getpid(), signal.SIGKILL)
            await asyncio.sleep(0.001)
            began_at = time.perf_counter()
            info = await policy.step(float(world.rank))
            longest_s = max(longest_s, time.perf_counter() - began_at)
            if info:
                rounds.append(info.round)
    statistics = policy.statistics()
    found: dict[str, Any] = {
        "coordinator": statistics.coordinator_rank,
        "decided": statistics.coordinator is not None,
        "rounds": rounds,
        "longest_s": longest_s,
    }
    report(world.rank, found)


if __name__ == "__main__":
    ad.run(main)
