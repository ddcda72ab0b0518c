"""A consumer returns while its producers send: none hangs, and each gets an error. Runs in four worlds.

Rank 0 receives a single message and returns with a full mailbox. Rank 1 sends to it in every way, even on a tag that
rank 0 has never opened. Rank 2 returns first, with messages in transit. ``test_left_members.py`` starts this program.
"""

from __future__ import annotations

import contextlib
import re
import sys
from dataclasses import dataclass
from typing import Any

from support.mpi import report

import asyncdist as ad

CONSUMER = 0
CAPACITY = 16
AWAITED, NOT_AWAITED, NEVER_OPENED = 100, 101, 102


@dataclass(frozen=True, slots=True)
class Blob:
    data: bytes


async def produce(world: ad.World, tag: int) -> str:
    """Send until the consumer has left, and return the sender's error."""
    channel = world.channel(Blob, tag=tag, capacity=CAPACITY)
    blob = Blob(bytes(60_000 if tag == NEVER_OPENED else 8_000))
    try:
        while True:
            if tag == NOT_AWAITED:
                with contextlib.suppress(ad.BusyError):
                    channel.send_nowait(blob, CONSUMER)
                await world.safe_point()
            else:
                await channel.send(blob, CONSUMER)
    except ad.ClosedError as error:
        assert (error.dest, error.tag) == (CONSUMER, tag)
        return type(error).__name__


async def consume(world: ad.World) -> None:
    """Receive a single message from each producer."""
    channels = [world.channel(Blob, tag=tag, capacity=CAPACITY) for tag in (AWAITED, NOT_AWAITED)]
    for channel in channels:
        await channel.receive()
    while not all(channel.inbox.is_full for channel in channels):
        await world.sleep(0.001)


async def main(world: ad.World) -> list[str]:
    """Return the errors that this rank's producers got."""
    if world.rank == CONSUMER:
        await consume(world)
    elif world.rank == 1:
        tasks = [world.spawn(produce(world, tag)) for tag in (AWAITED, NOT_AWAITED, NEVER_OPENED)]
        return [await task for task in tasks]
    else:
        channel = world.channel(Blob, tag=NOT_AWAITED, capacity=CAPACITY)
        for _ in range(CAPACITY):
            channel.send_nowait(Blob(bytes(60_000)), CONSUMER)
    return []


TOLD = ["ClosedError"] * 3


def check(results: Any, ends: str) -> None:
    """Check that producers get errors, that no message is left in progress, and that unread ones are reported."""
    assert list(results) == [[], TOLD, []]
    assert "request" not in ends
    unread = r"rank 0 .*\b\d+ .*Blob, tag 100; \d+ .*Blob, tag 101"
    assert re.search(unread, ends), ends


async def reporting(world: ad.World) -> None:
    report(world.rank, await main(world))


if __name__ == "__main__":
    ad.run(reporting, **({"transport": sys.argv[1]} if len(sys.argv) > 1 else {}))
