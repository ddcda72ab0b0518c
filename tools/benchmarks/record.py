"""Measures the time and the bytes that a recording adds to each training step of a millisecond.

Worlds with a recording and without one are opened in turn, in the same processes. Only calls of ``policy.step`` are
timed. Between them, torch computes for a millisecond, so that caches are as cold as in training. Every twentieth step
has a report to the coordinator, as by default. There are no rounds, because a round costs far more than its record.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from harness import Results, Row, elapsed_us, model_of, optimizer_of

import asyncdist as ad
from protocols import AsyncSelectiveAveragingPolicy

RANKS: Final = (2,)
STEP_S: Final = 1e-3
TARGET_PERCENT: Final = 1.0
TARGET_NBYTES: Final = 200.0
#: Number of first steps in each world that are not counted.
_WARM_UP_COUNT: Final = 50


@dataclass(frozen=True, slots=True)
class Settings:
    """Number of worlds with a recording (and as many without), and the steps in each world."""

    world_count: int
    step_count: int


FULL: Final = Settings(world_count=8, step_count=2000)
QUICK: Final = Settings(world_count=1, step_count=100)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Step times of one world in microseconds, and the size of its recording in bytes."""

    rank: int
    median_us: float
    mean_us: float
    nbytes: int


def _train(data: torch.Tensor) -> None:
    until = time.perf_counter() + STEP_S
    while time.perf_counter() < until:
        data = torch.tanh(data @ data)


async def _steps(folder: str | None, step_count: int) -> Stretch:
    """Make the steps of one world. Their mean excludes the slowest hundredth, which the kernel has interrupted."""
    async with ad.open_world(record=folder) as world:
        model, data = model_of(1 << 14), torch.randn(64, 64)
        took: list[float] = []
        policy = AsyncSelectiveAveragingPolicy(model, optimizer_of(model), average_every=20, threshold=-1e9)
        async with policy:
            for _ in range(step_count):
                _train(data)
                began_at_ns = time.perf_counter_ns()
                await policy.step(0.0)
                took.append(elapsed_us(began_at_ns))
        rank = world.rank
    counted = sorted(took[_WARM_UP_COUNT:])
    usual = counted[: len(counted) * 99 // 100]
    return Stretch(rank, statistics.median(counted), statistics.mean(usual), _nbytes(folder, rank))


def _nbytes(folder: str | None, rank: int) -> int:
    return 0 if folder is None else sum(path.stat().st_size for path in Path(folder).glob(f"*-rank{rank:05}.*"))


async def measure(settings: Settings) -> Results | None:
    """Alternate both kinds of worlds. Return the results on rank 0."""
    plain: list[Stretch] = []
    recorded: list[Stretch] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(settings.world_count):
            plain.append(await _steps(None, settings.step_count))
            recorded.append(await _steps(str(Path(folder, str(number))), settings.step_count))
    if plain[0].rank:
        return None
    pairs = list(zip(plain, recorded, strict=True))
    return {
        "plain_us": statistics.median(each.median_us for each in plain),
        "recorded_us": statistics.median(each.median_us for each in recorded),
        "cost_us": statistics.median(after.median_us - before.median_us for before, after in pairs),
        "cost_of_mean_us": statistics.median(after.mean_us - before.mean_us for before, after in pairs),
        "nbytes": statistics.median(each.nbytes for each in recorded) / settings.step_count,
    }


def rows(results: Results) -> list[Row]:
    """Return the rows of the table."""
    target_us = 1e6 * STEP_S * TARGET_PERCENT / 100
    return [
        Row(
            "a step of 1 ms, what its record costs",
            f"{results['cost_us']:.1f} us, mean {results['cost_of_mean_us']:.1f} us",
            f"{results['plain_us']:.1f} us without, {results['recorded_us']:.1f} us with",
            f"<= {target_us:g} us, {TARGET_PERCENT:g} %",
            max(results["cost_us"], results["cost_of_mean_us"]) <= target_us,
        ),
        Row(
            "bytes for a step and rank",
            f"{results['nbytes']:.0f}",
            "",
            f"<= {TARGET_NBYTES:g}",
            results["nbytes"] <= TARGET_NBYTES,
        ),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    found = asyncio.run(measure(QUICK if options.quick else FULL))
    if found is not None:
        options.out.write_text(json.dumps(found))
