"""Measures the bandwidth of streams of large tensors, against one raw message with the same buffers.

asyncdist and the rival alternate in the same two processes, with the same two tensors. Rank 0 sends one tensor, and
rank 1 sends the other back. The rate is twice the bytes divided by the time measured on rank 0.

- asyncdist: ``await world.send_stream`` and ``await world.receive_stream``, with their grants and chunks.
- Raw: one message each way by the library under the transport; see ``rivals.py``.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Final

import torch
from harness import MIB, Results, Row, main, ratio_of_medians
from rivals import Rival, rival_of

import asyncdist as ad
from asyncdist.bench.measurements import our_trip

RANKS: Final = (2,)
TARGET_RATIO: Final = {"mpi": 0.95, "torch": 0.9}
_TARGET_FROM_MIB: Final = 4


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes of the tensors, and the approximate total of bytes sent one way for each size, without the warm-up."""

    sizes_mib: tuple[int, ...]
    moved_mib: int
    trip_count_max: int


FULL: Final = Settings(sizes_mib=(1, 4, 16, 64, 256), moved_mib=4096, trip_count_max=101)
QUICK: Final = Settings(sizes_mib=(1, 4), moved_mib=8, trip_count_max=3)


async def measure(world: ad.World, settings: Settings) -> Results | None:
    """Time alternating round trips of asyncdist and the rival, for each size in turn."""
    rival = rival_of(world)
    results: Results = {"transport": world.transport_name, "sizes": {}}
    for size_mib in settings.sizes_mib:
        outgoing = torch.full((size_mib * MIB,), world.rank, dtype=torch.uint8)
        incoming = torch.zeros_like(outgoing)
        ours_s: list[float] = []
        raw_s: list[float] = []
        trip_count = max(3, min(settings.trip_count_max, settings.moved_mib // size_mib))
        for _ in range(1 + trip_count):
            await rival.align()
            ours_s.append(await our_trip(world, outgoing, incoming))
            await rival.align()
            raw_s.append(_raw_trip(rival, outgoing, incoming))
        assert bool((incoming == 1 - world.rank).all()), f"{size_mib} MiB did not arrive unchanged"
        results["sizes"][f"{size_mib} MiB"] = {
            "ours_gb_s": _rate_gb_s(size_mib, ours_s[1:]),
            "raw_gb_s": _rate_gb_s(size_mib, raw_s[1:]),
            "ratio": 1 / ratio_of_medians(ours_s[1:], raw_s[1:]),
        }
    return results if world.rank == 0 else None


def _rate_gb_s(size_mib: int, trips_s: list[float]) -> float:
    return 2 * size_mib * MIB / statistics.median(trips_s) / 1e9


def _raw_trip(rival: Rival, outgoing: torch.Tensor, incoming: torch.Tensor) -> float:
    began_at = time.perf_counter()
    rival.round_trip(outgoing, incoming)
    return time.perf_counter() - began_at


def rows(results: Results) -> list[Row]:
    """Return the rows of the table."""
    table = []
    target = TARGET_RATIO[results["transport"]]
    for size, figures in results["sizes"].items():
        judged = int(size.split()[0]) >= _TARGET_FROM_MIB
        table.append(
            Row(
                f"stream of {size}",
                f"{figures['ours_gb_s']:.2f} GB/s, x{figures['ratio']:.2f}",
                f"{figures['raw_gb_s']:.2f} GB/s",
                f">= x{target:g}" if judged else "",
                figures["ratio"] >= target if judged else None,
            )
        )
    return table


if __name__ == "__main__":
    main(measure, full=FULL, quick=QUICK)
