"""Measures the one-way latency of a small typed message on a channel, against a raw message of the same size.

Both play ping-pong in alternating blocks in the same two processes. The latency is half a round trip, timed on rank 0.

- asyncdist: ``await channel.send`` of a frozen dataclass, and ``await channel.receive``, which decodes a new instance.
- Raw: the library under the transport sends and receives a buffer of the frame's length; see ``rivals.py``.

The message and the buffer are made before the clock starts.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Final

import torch
from harness import Results, Row, elapsed_us, main
from rivals import Rival, rival_of

import asyncdist as ad
from asyncdist.bench.latency import our_trips
from asyncdist.messaging import wire

RANKS: Final = (2,)
TARGET_RATIO: Final = {"mpi": 3.0, "torch": 2.5}


@dataclass(frozen=True, slots=True)
class Ping:
    """The message that is sent, typical of a protocol's small messages."""

    number: int
    value: float


@dataclass(frozen=True, slots=True)
class Settings:
    """``block_count`` blocks of ``trip_count`` round trips each, ours and raw; one more block before warms up."""

    block_count: int
    trip_count: int


FULL: Final = Settings(block_count=250, trip_count=200)
QUICK: Final = Settings(block_count=2, trip_count=50)


async def measure(world: ad.World, settings: Settings) -> Results | None:
    """Alternate blocks of both."""
    rival = rival_of(world)
    channel = world.channel(Ping, tag=100)
    frame_nbytes = wire.HEADER_NBYTES + len(wire.Codec(Ping).encode(Ping(1000, 0.5))[1])
    ours_us: list[float] = []
    raw_us: list[float] = []
    for _ in range(1 + settings.block_count):
        await rival.align()
        ours_us.append(await our_trips(world, channel, Ping(1000, 0.5), settings.trip_count))
        await rival.align()
        raw_us.append(_raw_trips(rival, settings.trip_count, frame_nbytes))
    if world.rank != 0:
        return None
    ours, raw = statistics.median(ours_us[1:]), statistics.median(raw_us[1:])
    figures = {"ours_us": ours, "raw_us": raw, "ratio": ours / raw, "frame_nbytes": frame_nbytes}
    return {"transport": world.transport_name, **figures}


def _raw_trips(rival: Rival, count: int, nbytes: int) -> float:
    """Make ``count`` raw round trips, and return the microseconds one way."""
    outgoing, incoming = (torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2))
    began_at = time.perf_counter_ns()
    rival.round_trips(outgoing, incoming, count)
    return elapsed_us(began_at) / (2 * count)


def rows(results: Results) -> list[Row]:
    """Return the rows of the table."""
    target = TARGET_RATIO[results["transport"]]
    return [
        Row(
            f"small message, one way ({results['frame_nbytes']} bytes)",
            f"{results['ours_us']:.2f} us, x{results['ratio']:.2f}",
            f"{results['raw_us']:.2f} us",
            f"<= x{target:g}",
            results["ratio"] <= target,
        )
    ]


if __name__ == "__main__":
    main(measure, full=FULL, quick=QUICK)
