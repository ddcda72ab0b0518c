"""Measures the CPU share of a rank that awaits a message for seconds, and how fast the message wakes the rank.

Rank 1 is timed, in alternation with the rival. Meanwhile, rank 0 sleeps in ``time.sleep``, so its core is free.

- CPU: ``time.process_time`` (all threads of the process) over the wall clock, from the call to the message.
- Wake: the time from right before the send to right after the receive. Both clocks are CLOCK_MONOTONIC of one host, and
  therefore comparable. The pauses before sends have random lengths, so that they do not beat with a polling period.

asyncdist awaits ``channel.receive()``. On MPI, the rival is a raw ``Irecv``, tested every millisecond with
``time.sleep`` in between, as in a script that neither blocks nor spins. (A blocking ``Recv`` spins: it wakes in a
microsecond, but occupies its core.) On torch, the rival is the blocking ``recv``, which sleeps.

If pyzmq is installed, a message over ``ipc://`` that ``zmq.asyncio`` awaits is timed in the same way.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
import zmq_messages
from harness import Results, Row, collect, compute, main
from rivals import Rival, rival_of

import asyncdist as ad

RANKS: Final = (2,)
TARGET_CPU_PERCENT: Final = {"mpi": 0.5, "torch": 1.0}
TARGET_WAKE_US: Final = 1200.0
#: Maximum ratio of the median wake-up time to pyzmq's.
TARGET_ZMQ_RATIO: Final = 1.2
_RIVALS: Final = {"mpi": "a test every ms", "torch": "a blocking recv"}


@dataclass(frozen=True, slots=True)
class Settings:
    """``wait_count`` waits of ``wait_s`` for the CPU share, then ``wake_count`` wakes after short pauses."""

    wait_s: float
    wait_count: int
    wake_count: int


FULL: Final = Settings(wait_s=5.0, wait_count=3, wake_count=100)
QUICK: Final = Settings(wait_s=0.3, wait_count=1, wake_count=5)


@dataclass(frozen=True, slots=True)
class Knock:
    """The message that the waiting rank receives."""

    sent_at: float


@dataclass(frozen=True, slots=True)
class Wait:
    """The CPU share and the wake-up time of one wait."""

    cpu_percent: float
    wake_us: float


async def measure(world: ad.World, settings: Settings) -> Results | None:
    """Alternate long waits of both sides, and then short waits."""
    rival = rival_of(world)
    channel = world.channel(Knock, tag=100)
    random_pauses = random.Random(7)
    pauses_s = [settings.wait_s] * settings.wait_count
    pauses_s += [random_pauses.uniform(0.02, 0.03) for _ in range(settings.wake_count)]
    ours: list[Wait] = []
    raw: list[Wait] = []
    zmq: list[Wait] = []
    name = int(await ad.broadcast(torch.tensor(os.getpid())))
    zmq_end = zmq_messages.connect(f"ipc://@asyncdist-bench-{name}", listens=world.rank == 1)
    for pause_s in pauses_s:
        await ad.barrier()
        if world.rank == 1:
            ours.append(await _our_wait(channel))
        else:
            compute(pause_s)
            await channel.send(Knock(time.monotonic()), 1)
        await ad.barrier()
        if world.rank == 1:
            raw.append(_raw_wait(rival))
        else:
            compute(pause_s)
            rival.send(torch.tensor([time.monotonic()], dtype=torch.float64))
        if zmq_end is None:
            continue
        await ad.barrier()
        if world.rank == 1:
            zmq.append(await _zmq_wait(zmq_end))
        else:
            compute(pause_s)
            await zmq_end.send(time.monotonic())
    if zmq_end is not None:
        zmq_end.close()
    figures = {
        prefix: _figures(prefix, waits, settings)
        for prefix, waits in zip(("", "raw_", "zmq_"), (ours, raw, zmq), strict=True)
        if waits
    }
    found = await collect({name: value for each in figures.values() for name, value in each.items()})
    return None if found is None else {"transport": world.transport_name, **found[1]}


async def _our_wait(channel: ad.Channel[Knock]) -> Wait:
    began_at, cpu_began_at = time.monotonic(), time.process_time()
    envelope = await channel.receive()
    return _wait(began_at, cpu_began_at, envelope.message.sent_at)


def _raw_wait(rival: Rival) -> Wait:
    sent_at = torch.zeros(1, dtype=torch.float64)
    began_at, cpu_began_at = time.monotonic(), time.process_time()
    rival.await_message(sent_at)
    return _wait(began_at, cpu_began_at, float(sent_at))


async def _zmq_wait(end: zmq_messages.End) -> Wait:
    began_at, cpu_began_at = time.monotonic(), time.process_time()
    return _wait(began_at, cpu_began_at, await end.receive())


def _wait(began_at: float, cpu_began_at: float, sent_at: float) -> Wait:
    now, cpu_s = time.monotonic(), time.process_time() - cpu_began_at
    return Wait(cpu_percent=100 * cpu_s / (now - began_at), wake_us=1e6 * (now - sent_at))


def _figures(prefix: str, waits: Sequence[Wait], settings: Settings) -> dict[str, float]:
    long, short = waits[: settings.wait_count], waits[settings.wait_count :]
    return {
        f"{prefix}cpu_percent": statistics.median(wait.cpu_percent for wait in long),
        f"{prefix}wake_us_median": statistics.median(wait.wake_us for wait in short),
    }


def rows(results: Results) -> list[Row]:
    """Return the rows of the table."""
    target, rival = TARGET_CPU_PERCENT[results["transport"]], _RIVALS[results["transport"]]
    return [
        Row(
            "CPU share of a rank that awaits a message",
            f"{results['cpu_percent']:.1f} %",
            f"{results['raw_cpu_percent']:.1f} % ({rival})",
            f"<= {target:g} %",
            results["cpu_percent"] <= target,
        ),
        Row(
            "time to wake when it comes",
            f"{results['wake_us_median']:.0f} us",
            f"{results['raw_wake_us_median']:.0f} us ({rival})",
            f"<= {TARGET_WAKE_US:g} us",
            results["wake_us_median"] <= TARGET_WAKE_US,
        ),
        *_zmq_rows(results),
    ]


def _zmq_rows(results: Results) -> list[Row]:
    if "zmq_cpu_percent" not in results:
        return [Row("the same against pyzmq", "skipped: pyzmq is not installed (pip install pyzmq)")]
    ratio = results["wake_us_median"] / results["zmq_wake_us_median"]
    return [
        Row(
            "the same against pyzmq with asyncio",
            f"{results['cpu_percent']:.1f} %; {results['wake_us_median']:.0f} us, x{ratio:.2f}",
            f"{results['zmq_cpu_percent']:.1f} %; {results['zmq_wake_us_median']:.0f} us (pyzmq)",
            f"<= x{TARGET_ZMQ_RATIO:g}" if results["transport"] == "mpi" else "",
            ratio <= TARGET_ZMQ_RATIO if results["transport"] == "mpi" else None,
        )
    ]


if __name__ == "__main__":
    main(measure, full=FULL, quick=QUICK)
