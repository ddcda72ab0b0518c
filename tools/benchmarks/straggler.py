"""Measures how one slow rank affects the others: four ranks train by sleeping, and one sleeps five times as long.

Each rank counts its steps per second on its own clock, in alternating blocks of three kinds: without any call of
asyncdist, with ``AverageAllPolicy`` (the rival, which waits), and with ``AsyncSelectiveAveragingPolicy``. Model and
cadence are the same. A block has the same duration on every rank, so the straggler is always present; with
``AverageAllPolicy`` all ranks make as many steps as the slow rank, because each average needs all ranks. The fast
ranks' rate is the median over fast ranks and blocks, and ``retained`` is this rate divided by the rate without a
policy. Starting and leaving the policy are not timed.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

from harness import Results, Row, collect, compute, main, model_of, optimizer_of

import asyncdist as ad
from protocols import AsyncSelectiveAveragingPolicy, AverageAllPolicy

RANKS: Final = (4,)
TARGET_RETAINED: Final = 0.98
TARGET_ROUNDS: Final = 10
_SLOW_RANK: Final = 3
_SLOW_FACTOR: Final = 5
_AVERAGE_EVERY: Final = 5


@dataclass(frozen=True, slots=True)
class Settings:
    """``block_count`` blocks of ``block_s`` seconds of each kind."""

    step_s: float
    parameter_count: int
    block_count: int
    block_s: float


FULL: Final = Settings(step_s=0.02, parameter_count=1_100_000, block_count=3, block_s=4.0)
QUICK: Final = Settings(step_s=0.002, parameter_count=10_000, block_count=1, block_s=1.0)


async def measure(world: ad.World, settings: Settings) -> Results | None:
    """Alternate blocks of the three kinds."""
    step_s = settings.step_s * (_SLOW_FACTOR if world.rank == _SLOW_RANK else 1)
    rates: dict[str, list[float]] = {"none": [], "average_all": [], "selective": []}
    counts: Counter[str] = Counter()
    for _ in range(settings.block_count):
        await ad.barrier()
        rates["none"].append(_alone(step_s, settings))
        await ad.barrier()
        rates["average_all"].append(await _with_average_all(step_s, settings))
        await ad.barrier()
        rates["selective"].append(await _with_selective(step_s, settings, counts))
    ranks = await collect({"rates": rates, "counts": counts})
    return None if ranks is None else _results(ranks)


def _alone(step_s: float, settings: Settings) -> float:
    """Return the steps per second without a policy."""
    step_count = 0
    began_at = time.perf_counter()
    while time.perf_counter() < began_at + settings.block_s:
        compute(step_s)
        step_count += 1
    return step_count / (time.perf_counter() - began_at)


async def _with_average_all(step_s: float, settings: Settings) -> float:
    model = model_of(settings.parameter_count)
    step_count = round(settings.block_s / (settings.step_s * _SLOW_FACTOR))
    async with AverageAllPolicy(model, optimizer_of(model), average_every=_AVERAGE_EVERY) as policy:
        began_at = time.perf_counter()
        for _ in range(step_count):
            compute(step_s)
            await policy.step()
        return step_count / (time.perf_counter() - began_at)


async def _with_selective(step_s: float, settings: Settings, counts: Counter[str]) -> float:
    """Train with the slow rank as the worst rank, so that it is replaced."""
    metric = -float(ad.current_world().rank)
    model = model_of(settings.parameter_count)
    policy = AsyncSelectiveAveragingPolicy(
        model, optimizer_of(model), average_every=_AVERAGE_EVERY, replacement_ratio=0.25
    )
    async with policy:
        step_count = 0
        began_at = time.perf_counter()
        while time.perf_counter() < began_at + settings.block_s:
            compute(step_s)
            await policy.step(metric)
            step_count += 1
        rate = step_count / (time.perf_counter() - began_at)
        decided = policy.statistics().coordinator
        if decided is not None:
            counts["rounds"] += decided.rounds_ended
            counts["slow_reports"] += decided.reports[_SLOW_RANK]
            counts["slow_replacements"] += decided.applied[_SLOW_RANK]
    return rate


def _results(ranks: list[dict[str, Any]]) -> Results:
    fast = {
        kind: statistics.median(
            rate for rank, found in enumerate(ranks) if rank != _SLOW_RANK for rate in found["rates"][kind]
        )
        for kind in ranks[0]["rates"]
    }
    slow = {kind: statistics.median(values) for kind, values in ranks[_SLOW_RANK]["rates"].items()}
    return {
        "retained": fast["selective"] / fast["none"],
        "retained_average_all": fast["average_all"] / fast["none"],
        "fast_steps_per_s": fast,
        "slow_steps_per_s": slow,
        **ranks[0]["counts"],
    }


def rows(results: Results) -> list[Row]:
    """Return the rows of the table."""
    fast = results["fast_steps_per_s"]
    return [
        Row(
            "fast ranks' steps beside a rank 5x slower",
            f"{fast['selective']:.1f}/s, retained {results['retained']:.3f}",
            f"{fast['average_all']:.1f}/s, {results['retained_average_all']:.3f} (average-all); "
            f"{fast['none']:.1f}/s (no policy)",
            f">= {TARGET_RETAINED:g}",
            results["retained"] >= TARGET_RETAINED,
        ),
        Row(
            "rounds closed meanwhile",
            f"{results['rounds']}",
            target=f">= {TARGET_ROUNDS}",
            met=results["rounds"] >= TARGET_ROUNDS,
        ),
        Row(
            "reports and replacements of the slow rank",
            f"{results['slow_reports']}, {results['slow_replacements']}",
            target=">= 1",
            met=results["slow_replacements"] >= 1,
        ),
    ]


if __name__ == "__main__":
    main(measure, full=FULL, quick=QUICK)
