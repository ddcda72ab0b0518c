"""Four ranks are killed at different moments, and the launcher restarts them.

    python restarts.py FILE

- Rank 1 is killed before the ranks are connected. All ranks connect again, with rank 1's next process.
- Rank 3 is killed before it enters the policy. The others start without it, and its next process joins them.
- Rank 0, which coordinates, and rank 2 are killed after some rounds, and their next processes join the others.
- All ranks train until each of these three has taken part in some further rounds, which they announce on a channel.
  Each rank reports.
- Rank 1 is killed once more after it has left. Its third process creates FILE, at which the others end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from support.mpi import report
from torch import nn

import asyncdist as ad
from asyncdist.transports.torch_distributed import gloo_groups
from asyncdist.transports.torch_distributed.meeting import newcomers
from protocols import AsyncSelectiveAveragingPolicy, PolicyEvent, SnapshotTaken

#: Rank and incarnation (number of restarts) of this process.
PROCESS = f"{os.environ.get('RANK')}.{os.environ.get('ASYNCDIST_INCARNATION')}"
#: Ranks whose new processes join the policy.
NEWCOMERS = (0, 2, 3)
#: The coordinator and another member are killed when they know of this round.
KILLED_AFTER = 6
#: Number of rounds after its admission in which a newcomer must take part.
ROUNDS_AFTER = 6
_TAG = 11


def die(*_: object, **__: object) -> NoReturn:
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("killed")


@dataclass(frozen=True, slots=True)
class Enough:
    """Message: a restarted rank has seen enough."""

    rank: int


async def tell(channel: ad.Channel[Enough], rank: int) -> bool:
    """Send the message to a rank, unless the rank is not connected yet."""
    try:
        await channel.send(Enough(ad.current_world().rank), rank)
    except ad.RankLostError:
        return False
    return True


async def main(world: ad.World) -> None:
    if PROCESS == "3.0":
        die()
    torch.manual_seed(world.rank)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    gave: list[int] = []
    took: list[int] = []
    heard: set[int] = set()
    told = {world.rank}
    longest_s = 0.0

    def note(event: PolicyEvent) -> None:
        if isinstance(event, SnapshotTaken):
            gave.append(event.round)

    entered_at = time.monotonic()
    channel = world.channel(Enough, tag=_TAG)
    policy = AsyncSelectiveAveragingPolicy(
        model, optimizer, average_every=5, grace_s=0.2, start_timeout_s=100.0, on_event=note
    )
    async with policy:
        admitted_at = policy.iteration
        first_round = policy.statistics().last_round
        wait_s = time.monotonic() - entered_at
        while len(heard) < len(NEWCOMERS):
            await asyncio.sleep(0.001)
            nn.functional.mse_loss(model(torch.ones(1, 64)), torch.zeros(1, 64)).backward()
            optimizer.step()
            optimizer.zero_grad()
            began_at = time.perf_counter()
            info = await policy.step(float(world.rank - 100 * world.incarnation))
            longest_s = max(longest_s, time.perf_counter() - began_at)
            if info:
                took.append(info.round)
            last = policy.statistics().last_round
            if PROCESS in ("0.0", "2.0") and last >= KILLED_AFTER:
                die()
            if world.incarnation and world.rank not in heard and (took or gave) and last >= first_round + ROUNDS_AFTER:
                told |= {rank for rank in range(world.size) if rank not in told and await tell(channel, rank)}
                if len(told) == world.size:
                    heard.add(world.rank)
            while (envelope := channel.receive_nowait()) is not None:
                heard.add(envelope.message.rank)
    report(
        world.rank,
        {
            "incarnation": world.incarnation,
            "admitted_at": admitted_at,
            "iteration": policy.iteration,
            "gave": gave,
            "took": took,
            "longest_s": longest_s,
            "wait_s": wait_s,
            "first_round": first_round,
            "coordinator": policy.statistics().coordinator_rank,
            "epoch": policy.statistics().epoch,
        },
    )


if __name__ == "__main__":
    logging.basicConfig(level=os.environ.get("LEVEL", "WARNING"))
    newcomers._CONNECT_S, newcomers._CONNECT_PER_RANK_S = 1.0, 0.0  # otherwise the others would wait for minutes
    if PROCESS == "1.0":
        gloo_groups.make_gloo_groups = die
    if PROCESS == "1.2":
        Path(sys.argv[1]).touch()
    ad.run(main)
    if PROCESS == "1.1":
        die()
    while not Path(sys.argv[1]).exists():
        time.sleep(0.01)
