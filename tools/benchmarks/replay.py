"""Measures the items per second that one replay-buffer rank accepts.

asyncdist and the rival alternate in the same four processes. Three clients add items of 64 float32 values, one per
call, with 64 calls in progress each. The rate is the number of all items divided by the slowest client's time until
every call is answered.

- Ours: 64 tasks per client, each awaiting one ``buffer.add`` at a time.
- Raw: 64 calls of ``Isend`` with as many bytes as a frame, then 64 answers of four bytes. The server is a loop of
  ``Recv`` and ``Send``. Nothing is packed, checked or stored.

A further, untimed run checks that no item is lost: its scoring hook records which rank sent which item.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass
from typing import Any, Final

import torch
from harness import Results, Row, main
from rivals import align

import asyncdist as ad
from protocols import ReplayBuffer, serve_replay_buffer
from protocols.replay_buffer.server import Score

RANKS: Final = (4,)
TARGET_PER_S: Final = 20_000
IN_FLIGHT: Final = 64
ITEM_SIZE: Final = 64
_FRAME_NBYTES: Final = 4 * ITEM_SIZE + 80
_RAW_TAG: Final = 99


@dataclass(frozen=True, slots=True)
class Settings:
    """``run_count`` runs of ``add_count`` adds per client, ours and raw; one additional run warms up."""

    run_count: int
    add_count: int


FULL: Final = Settings(run_count=5, add_count=20_480)
QUICK: Final = Settings(run_count=1, add_count=640)


async def measure(world: ad.World, settings: Settings) -> Results | None:
    """Alternate runs of both. The last rank is the server."""
    from mpi4py import MPI

    server, count = world.size - 1, settings.add_count
    ours_s: list[float] = []
    raw_s: list[float] = []
    for _ in range(1 + settings.run_count):
        await align(MPI.COMM_WORLD)
        ours_s.append(await _slowest(await _our_adds(world, count)))
        await align(MPI.COMM_WORLD)
        raw_s.append(await _slowest(_raw_adds(MPI.COMM_WORLD, count)))
    missing = await _unaccounted(world, count)
    if world.rank != 0:
        return None
    return {
        "adds_per_s": server * count / statistics.median(ours_s[1:]),
        "raw_adds_per_s": server * count / statistics.median(raw_s[1:]),
        "items": server * count,
        "unaccounted_items": missing,
    }


async def _our_adds(world: ad.World, count: int, score: Score | None = None) -> float:
    """Return the seconds that this rank's adds took, or 0 on the server."""
    server = world.size - 1
    if world.rank == server:
        done = await serve_replay_buffer(range(server), capacity=server * count, score=score)
        assert done.added == dict.fromkeys(range(server), count), done
        assert done.size == server * count
        return 0.0
    async with ReplayBuffer(server) as buffer:
        numbers = iter(range(count))

        async def produce() -> None:
            item = torch.zeros(1, ITEM_SIZE)
            item[0, 0] = world.rank
            for number in numbers:
                item[0, 1] = number
                await buffer.add(item)

        began_at = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(IN_FLIGHT):
                tasks.create_task(produce())
        return time.perf_counter() - began_at


async def _unaccounted(world: ad.World, count: int) -> int:
    """Return the number of items that the server did not receive exactly once."""
    seen: dict[tuple[int, int], int] = {}

    def note(batch: Any) -> None:
        key = (int(batch[0, 0]), int(batch[0, 1]))
        seen[key] = seen.get(key, 0) + 1

    await _our_adds(world, count, note)
    server = world.size - 1
    expected = {(rank, number) for rank in range(server) for number in range(count)}
    wrong = len(expected ^ seen.keys()) + sum(times != 1 for times in seen.values()) if world.rank == server else 0
    return int(await ad.all_reduce(torch.tensor(wrong), op="max"))


def _raw_adds(comm: Any, count: int) -> float:
    """Add ``count`` items with raw MPI calls. Return the seconds that this took, or 0 on the server."""
    server = comm.size - 1
    item, answer = bytearray(_FRAME_NBYTES), bytearray(4)
    if comm.rank == server:
        from mpi4py import MPI

        status = MPI.Status()
        for _ in range(server * count):
            comm.Recv(item, MPI.ANY_SOURCE, _RAW_TAG, status)
            comm.Send(answer, status.source, _RAW_TAG)
        return 0.0
    began_at = time.perf_counter()
    for _ in range(count // IN_FLIGHT):
        sends = [comm.Isend(item, server, _RAW_TAG) for _ in range(IN_FLIGHT)]
        for _ in range(IN_FLIGHT):
            comm.Recv(answer, server, _RAW_TAG)
        for send in sends:
            send.Wait()
    return time.perf_counter() - began_at


async def _slowest(seconds: float) -> float:
    return float(await ad.all_reduce(torch.tensor(seconds, dtype=torch.float64), op="max"))


def rows(results: Results) -> list[Row]:
    """Return the rows of the table."""
    met = results["adds_per_s"] >= TARGET_PER_S and results["unaccounted_items"] == 0
    return [
        Row(
            f"items added, 3 clients, {IN_FLIGHT} under way each",
            f"{results['adds_per_s']:,.0f}/s, {results['unaccounted_items']} of {results['items']:,} unaccounted for",
            f"{results['raw_adds_per_s']:,.0f}/s",
            f">= {TARGET_PER_S:,}/s, 0",
            met,
        )
    ]


if __name__ == "__main__":
    main(measure, full=FULL, quick=QUICK)
