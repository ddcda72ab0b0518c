"""Measures the latency of small messages while a stream of 64 MiB runs between the same two ranks.

Rank 0 sends a small message about every millisecond, and rank 1 awaits the messages. Each message is timed from right
before the send to right after the receive. Both clocks are CLOCK_MONOTONIC of one host and therefore comparable. Two
kinds of series alternate in the same processes:

- Beside: messages sent while rank 0 is in ``await world.send_stream`` and rank 1 is in ``receive_stream``.
- Alone: the same number of messages without a stream. They show the machine's own delays.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass
from typing import Any, Final

import torch
from harness import MIB, Results, Row, collect, main, percentile

import asyncdist as ad

RANKS: Final = (2,)
#: Targets for each transport: the median, and the 95th percentile.
TARGET_MS: Final = {"mpi": {"median": 0.4, "p95": 1.5}, "torch": {"median": 5.0, "p95": 5.0}}
_PAUSE_S: Final = 0.001


@dataclass(frozen=True, slots=True)
class Settings:
    """Number and size of the streams; one additional stream warms up."""

    stream_mib: int
    stream_count: int


FULL: Final = Settings(stream_mib=64, stream_count=40)
QUICK: Final = Settings(stream_mib=4, stream_count=2)


@dataclass(frozen=True, slots=True)
class Knock:
    """The small message, with a flag that marks the last message of a series."""

    sent_at: float
    is_last: bool


async def measure(world: ad.World, settings: Settings) -> Results | None:
    """Send series of messages, alternately during a stream and without one."""
    channel = world.channel(Knock, tag=100)
    tensor = torch.zeros(settings.stream_mib * MIB, dtype=torch.uint8)
    beside_s: list[float] = []
    alone_s: list[float] = []
    for number in range(1 + settings.stream_count):
        await ad.barrier()
        stream = world.send_stream(tensor, 1) if world.rank == 0 else world.receive_stream(tensor, 0)
        streaming = world.spawn(stream)
        await asyncio.sleep(0)  # lets the stream begin
        beside = await (_knock_beside(channel, streaming) if world.rank == 0 else _answer(channel))
        await streaming
        await ad.barrier()
        alone = await (_knock_alone(channel, len(beside)) if world.rank == 0 else _answer(channel))
        if number:
            beside_s += beside
            alone_s += alone
    found = await collect([beside_s, alone_s])
    if found is None:
        return None
    beside_s, alone_s = found[1]
    figures = {"beside": _figures_ms(beside_s), "alone": _figures_ms(alone_s)}
    return {"transport": world.transport_name, "stream_mib": settings.stream_mib, **figures}


async def _knock_beside(channel: ad.Channel[Knock], streaming: asyncio.Task[Any]) -> list[float]:
    """Send at least one message, and more until the stream has ended. Return the times of the sends."""
    sent_at: list[float] = []
    while not sent_at or not streaming.done():
        sent_at.append(time.monotonic())
        await channel.send(Knock(sent_at[-1], is_last=False), 1)
        await asyncio.sleep(_PAUSE_S)
    await channel.send(Knock(0.0, is_last=True), 1)
    return sent_at


async def _knock_alone(channel: ad.Channel[Knock], count: int) -> list[float]:
    for _ in range(count):
        await asyncio.sleep(_PAUSE_S)
        await channel.send(Knock(time.monotonic(), is_last=False), 1)
    await channel.send(Knock(0.0, is_last=True), 1)
    return []


async def _answer(channel: ad.Channel[Knock]) -> list[float]:
    """Receive a series of messages, and return the latency of each."""
    took_s = []
    while not (knock := (await channel.receive()).message).is_last:
        took_s.append(time.monotonic() - knock.sent_at)
    return took_s


def _figures_ms(took_s: list[float]) -> dict[str, float]:
    took_ms = [value * 1e3 for value in took_s]
    return {
        "count": len(took_ms),
        "median_ms": statistics.median(took_ms),
        "p95_ms": percentile(took_ms, 95),
        "max_ms": max(took_ms),
    }


def rows(results: Results) -> list[Row]:
    """Return the rows of the table."""
    beside, alone = results["beside"], results["alone"]
    targets_ms = TARGET_MS.get(results["transport"], {})
    return [
        Row(
            f"small message beside a stream of {results['stream_mib']} MiB, {name}",
            f"{beside[f'{key}_ms']:.2f} ms",
            f"{alone[f'{key}_ms']:.2f} ms alone",
            f"<= {targets_ms[key]:g} ms" if key in targets_ms else "",
            beside[f"{key}_ms"] <= targets_ms[key] if key in targets_ms else None,
        )
        for key, name in (("median", "median"), ("p95", "95 of 100"), ("max", f"worst of {beside['count']}"))
    ]


if __name__ == "__main__":
    main(measure, full=FULL, quick=QUICK)
