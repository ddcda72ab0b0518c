"""Measures ``await progress.wait(request)`` for a program's own requests, against a loop that tests and yields.

Two ranks exchange 8 bytes in ping-pong, in alternating blocks in the same processes. The latency is half a round trip,
timed on rank 0. Rank 1 answers with raw calls of MPI or blocking calls of torch, so only the awaiting side differs.

- On MPI, the rival is the loop that a script would contain: ``while not request.Test(): await asyncio.sleep(0)``.
- On torch, the rival is the blocking ``Work.wait``: a work of gloo's ``irecv`` cannot be polled, so a thread waits.

Long waits follow: the CPU share of rank 0 while it awaits a message for ``wait_s``, compared with the rival's. There is
no world, because its polling would disturb the rival.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
import uvloop
from harness import Results, Row, arguments, compute, elapsed_us
from rivals import spin

import asyncdist as ad
from asyncdist.launchers import detection

RANKS: Final = (2,)
TARGET_RATIO: Final = {"mpi": 1.2, "torch": 3.0}
TARGET_CPU_PERCENT: Final = 6.0
_TAG: Final = 98

#: Coroutine function that waits for a request.
Wait: TypeAlias = Callable[[Any], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Settings:
    """Blocks of ``trip_count`` round trips; then ``wait_count`` waits of ``wait_s``."""

    block_count: int
    trip_count: int
    wait_s: float
    wait_count: int


FULL: Final = Settings(block_count=150, trip_count=100, wait_s=2.0, wait_count=3)
QUICK: Final = Settings(block_count=2, trip_count=20, wait_s=0.2, wait_count=1)


class MpiMessages:
    """Requests of mpi4py to and from the other rank."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._comm = MPI.COMM_WORLD
        self.rank = self._comm.rank
        self._peer = 1 - self.rank
        self._sent, self._received = bytearray(8), bytearray(8)

    def align(self) -> None:
        spin(self._comm.Ibarrier())

    def receive(self) -> Any:
        return self._comm.Irecv(self._received, self._peer, _TAG)

    def send(self) -> Any:
        return self._comm.Isend(self._sent, self._peer, _TAG)

    finish = staticmethod(spin)

    @staticmethod
    async def rival(request: Any) -> None:
        while not request.Test():  # noqa: ASYNC110 - the rival
            await asyncio.sleep(0)


class TorchMessages:
    """Works of gloo to and from the other rank."""

    def __init__(self) -> None:
        from torch import distributed as dist

        self._dist = dist
        dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        self._peer = 1 - self.rank
        self._sent, self._received = torch.zeros(1), torch.zeros(1)

    def align(self) -> None:
        self._dist.barrier()

    def receive(self) -> Any:
        return self._dist.irecv(self._received, self._peer)

    def send(self) -> Any:
        return self._dist.isend(self._sent, self._peer)

    @staticmethod
    def finish(work: Any) -> None:
        work.wait()

    @staticmethod
    async def rival(work: Any) -> None:
        work.wait()


def measure(transport: str, settings: Settings) -> Results | None:
    """Alternate blocks of both waits, on asyncio's loop and on uvloop, without a world."""
    messages: Any = MpiMessages() if transport == "mpi" else TorchMessages()
    figures: Results = {"transport": transport}
    for name, new_loop in {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}.items():
        with asyncio.Runner(loop_factory=new_loop) as runner:
            figures[name] = runner.run(_measure(messages, settings))
    return figures if messages.rank == 0 else None


async def _measure(messages: Any, settings: Settings) -> dict[str, float]:
    async with ad.progress() as progress:
        waits: dict[str, Wait] = {"ours": progress.wait, "rival": messages.rival}
        trips_us: dict[str, list[float]] = {name: [] for name in waits}
        cpu_percent: dict[str, list[float]] = {name: [] for name in waits}
        for _ in range(1 + settings.block_count):
            for name, wait in waits.items():
                messages.align()
                trips_us[name].append(await _trips(messages, wait, settings.trip_count))
        for _ in range(settings.wait_count):
            for name, wait in waits.items():
                messages.align()
                cpu_percent[name].append(await _long_wait(messages, wait, settings.wait_s))
    figures = {f"{name}_us": statistics.median(values[1:]) for name, values in trips_us.items()}
    figures |= {f"{name}_cpu_percent": statistics.median(values) for name, values in cpu_percent.items()}
    return figures | {"ratio": figures["ours_us"] / figures["rival_us"]}


async def _trips(messages: Any, wait: Wait, count: int) -> float:
    """Make ``count`` round trips, and return the one-way time in microseconds."""
    began_at = time.perf_counter_ns()
    for _ in range(count):
        arriving = messages.receive()
        if messages.rank == 0:
            messages.finish(messages.send())
            await wait(arriving)
        else:
            messages.finish(arriving)
            messages.finish(messages.send())
    return elapsed_us(began_at) / (2 * count)


async def _long_wait(messages: Any, wait: Wait, seconds: float) -> float:
    """Wait for a message that is sent after ``seconds``, and return the CPU share of the wait in percent."""
    if messages.rank != 0:
        compute(seconds)
        messages.finish(messages.send())
        return 0.0
    began_at, cpu_began_at = time.monotonic(), time.process_time()
    await wait(messages.receive())
    return 100 * (time.process_time() - cpu_began_at) / (time.monotonic() - began_at)


def rows(results: Results) -> list[Row]:
    """Return the rows of the table."""
    found = []
    for loop in ("asyncio", "uvloop"):
        figures = results[loop]
        target = TARGET_RATIO[results["transport"]]
        found += [
            Row(
                f"await progress.wait(receive), one way, {loop}",
                f"{figures['ours_us']:.2f} us, x{figures['ratio']:.2f}",
                f"{figures['rival_us']:.2f} us",
                f"<= x{target:g}",
                figures["ratio"] <= target,
            ),
            Row(
                f"CPU share of a long wait, {loop}",
                f"{figures['ours_cpu_percent']:.1f} %",
                f"{figures['rival_cpu_percent']:.1f} %",
                f"<= {TARGET_CPU_PERCENT:g} %",
                figures["ours_cpu_percent"] <= TARGET_CPU_PERCENT,
            ),
        ]
    return found


if __name__ == "__main__":
    out, quick = arguments()
    found = measure("torch" if detection.detect().transport == "torch" else "mpi", QUICK if quick else FULL)
    if found is not None:
        out.write_text(json.dumps(found))
