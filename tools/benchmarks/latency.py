"""Measures the one-way latency of a small typed message on a channel, against a raw message of the same size.

Both sides play ping-pong in alternating blocks in the same two processes. The latency is half a round trip, timed on
rank 0.

- asyncdist: ``await channel.send`` of a frozen dataclass, and ``await channel.receive``, which decodes a new instance.
- Raw: the library under the transport sends and receives a buffer of the frame's length; see ``rivals.py``.

The message and the buffer are made before the clock starts.

Four ranks then play ping-pong in two pairs on two cores, against asyncio's streams over a Unix socket, in alternating
blocks. Each round trip is timed. A rank that spins while it waits would keep the other ranks from running.
"""

from __future__ import annotations

import asyncio
import os
import socket
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from harness import Results, Row, elapsed_us, main, percentile
from rivals import Rival, rival_of

import asyncdist as ad
from asyncdist.bench.measurements import our_trips
from asyncdist.messaging import wire

RANKS: Final = (2, 4)
TARGET_RATIO: Final = {"mpi": 3.0, "torch": 2.5}
#: Maximum ratio of our median to the streams' median, with twice as many ranks as cores.
TARGET_CROWDED_RATIO: Final = {"mpi": 2.0, "torch": None}


@dataclass(frozen=True, slots=True)
class Ping:
    """The message that is sent, typical of a protocol's small messages."""

    number: int
    value: float


@dataclass(frozen=True, slots=True)
class Settings:
    """``block_count`` blocks of ``trip_count`` round trips each, ours and raw; one additional block warms up."""

    block_count: int
    trip_count: int


FULL: Final = Settings(block_count=250, trip_count=200)
QUICK: Final = Settings(block_count=2, trip_count=50)


async def measure(world: ad.World, settings: Settings) -> Results | None:
    """Alternate blocks of our messages and raw messages."""
    if world.size > 2:
        return await _measure_crowded(world, settings)
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
    """Make ``count`` raw round trips, and return the one-way time in microseconds."""
    outgoing, incoming = (torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2))
    began_at = time.perf_counter_ns()
    rival.round_trips(outgoing, incoming, count)
    return elapsed_us(began_at) / (2 * count)


async def _measure_crowded(world: ad.World, settings: Settings) -> Results | None:
    """Alternate blocks of messages and of streams, on two cores."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: world.size // 2])
    channel, peer = world.channel(Ping, tag=100), world.rank ^ 1
    name = await ad.broadcast(torch.tensor(os.getpid()))
    reader, writer = await _connect(f"\0asyncdist-bench-{int(name)}-{world.rank // 2}", listens=world.rank < peer)
    frame = bytes(wire.HEADER_NBYTES + len(wire.Codec(Ping).encode(Ping(1000, 0.5))[1]))

    async def send() -> None:
        await channel.send(Ping(1000, 0.5), peer)

    async def write() -> None:
        writer.write(frame)

    ours_us: list[float] = []
    streams_us: list[float] = []
    for block in range(1 + max(1, settings.block_count // 10)):
        await ad.barrier()
        ours = await _timed_trips(send, channel.receive, settings.trip_count, is_first=world.rank < peer)
        await ad.barrier()
        streams = await _timed_trips(
            write, lambda: reader.readexactly(len(frame)), settings.trip_count, is_first=world.rank < peer
        )
        if block:
            ours_us += ours
            streams_us += streams
    writer.close()
    if world.rank != 0:
        return None
    ours_median, streams_median = statistics.median(ours_us), statistics.median(streams_us)
    return {
        "transport": world.transport_name,
        "crowded_us": ours_median,
        "crowded_us_95": percentile(ours_us, 95),
        "crowded_streams_us": streams_median,
        "crowded_streams_us_95": percentile(streams_us, 95),
        "crowded_ratio": ours_median / streams_median,
    }


async def _connect(path: str, *, listens: bool) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect two ranks over a Unix socket."""
    end = socket.socket(socket.AF_UNIX)  # uvloop does not accept abstract socket paths
    end.setblocking(False)
    if not listens:
        await ad.barrier()
        end.connect(path)
        return await asyncio.open_unix_connection(sock=end)
    end.bind(path)
    connected: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Future()
    server = await asyncio.start_unix_server(lambda *ends: connected.set_result(ends), sock=end)
    await ad.barrier()
    ends = await connected
    server.close()
    return ends


async def _timed_trips(
    send: Callable[[], Awaitable[Any]], receive: Callable[[], Awaitable[Any]], count: int, *, is_first: bool
) -> list[float]:
    """Make round trips, and return the one-way time of each in microseconds."""
    found = []
    for _ in range(count):
        began_at = time.perf_counter_ns()
        if is_first:
            await send()
            await receive()
        else:
            await receive()
            await send()
        found.append(elapsed_us(began_at) / 2)
    return found


def rows(results: Results) -> list[Row]:
    """Return the rows of the table."""
    target, crowded_target = TARGET_RATIO[results["transport"]], TARGET_CROWDED_RATIO[results["transport"]]
    return [
        Row(
            f"small message, one way ({results['frame_nbytes']} bytes)",
            f"{results['ours_us']:.2f} us, x{results['ratio']:.2f}",
            f"{results['raw_us']:.2f} us",
            f"<= x{target:g}",
            results["ratio"] <= target,
        ),
        Row(
            "the same with 4 ranks on 2 cores",
            f"{results['crowded_us']:.1f} us, x{results['crowded_ratio']:.2f}; p95 {results['crowded_us_95']:.0f} us",
            f"{results['crowded_streams_us']:.1f} us; p95 {results['crowded_streams_us_95']:.0f} us (Unix streams)",
            "" if crowded_target is None else f"<= x{crowded_target:g}",
            None if crowded_target is None else results["crowded_ratio"] <= crowded_target,
        ),
    ]


if __name__ == "__main__":
    main(measure, full=FULL, quick=QUICK)
