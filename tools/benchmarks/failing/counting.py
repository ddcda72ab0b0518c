"""Simulates ranks that fail, and counts their steps."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import asyncdist as ad
from asyncdist.simulation import Compute, Kill, Network
from failing.training import train_together
from failing.work import (
    DETECTION_S,
    RELAUNCH_S,
    RELOAD_S,
    START_S,
    STEP_S,
    Job,
    Tally,
    Work,
    best_interval,
    failures,
)

Train = Callable[[ad.World, Job], Coroutine[Any, Any, None]]


def count_lives(
    train: Train,
    rank_count: int,
    mtbf_steps: float,
    horizon_s: float,
    simulation_count: int,
    *,
    factors: Mapping[int, float] | None = None,
    learns: bool = False,
) -> Tally:
    """Simulate populations whose ranks die and are replaced individually.

    Args:
        mtbf_steps: Mean number of steps of an ordinary rank between two failures; infinite without failures.
        horizon_s: Virtual seconds of training.
        factors: Factors on the time of a step, keyed by rank; 1 by default.
        learns: Whether the ranks train a model whose loss is measured at the end.
    """
    tally, factors = Tally(), factors or {}
    for seed in range(simulation_count):
        rng = random.Random(f"failures of {rank_count} ranks, {mtbf_steps} steps, {seed}")
        drawn = [failures(rng, rank, mtbf_steps * STEP_S, horizon_s) for rank in range(rank_count)]
        lives: list[list[Work]] = [[] for _ in range(rank_count)]
        with tempfile.TemporaryDirectory() as place:
            report = ad.simulate(
                train,
                Job(
                    lives,
                    START_S + horizon_s,
                    Path(place),
                    best_interval(min(mtbf_steps * STEP_S, horizon_s)),
                    seed if learns else None,
                ),
                ranks=rank_count,
                seed=seed,
                network=Network(loss_detection_s=DETECTION_S),
                compute=Compute(step_s=STEP_S, factors=dict(factors)),
                faults=[fault for faults, _ in drawn for fault in faults],
            )
        report.value()  # raises if a rank failed that was not killed
        report.check_faults()
        for rank, (works, (faults, empty_s)) in enumerate(zip(lives, drawn, strict=True)):
            death_count = sum(isinstance(fault, Kill) for fault in faults)
            lost = works[:death_count]  # the newest process lives, unless it has died as well
            step_s = STEP_S * factors.get(rank, 1.0)
            tally.failures += death_count
            tally.died += step_s * sum(work.made - work.kept for work in lost)
            tally.useful += step_s * (sum(work.kept for work in lost) + sum(work.made for work in works[death_count:]))
            tally.empty += empty_s
        tally.possible += rank_count * horizon_s
        if learns:
            offers = [work.offered for works in lives for work in works if work.offered is not None]
            tally.losses.append(max(offers)[1])
    return tally


def count_attempts(rank_count: int, mtbf_steps: int, failure_count: int) -> Tally:
    """Simulate one job, which is started again after each failure, up to the end of the last recovery."""
    mtbf_s = mtbf_steps * STEP_S / rank_count
    rng = random.Random(f"failures of a job of {rank_count} ranks, {mtbf_steps} steps")
    passed_s, died, kept = 0.0, 0, 0
    with tempfile.TemporaryDirectory() as place:
        for seed in range(failure_count):
            works = [Work(kept, kept) for _ in range(rank_count)]
            report = ad.simulate(
                train_together,
                works,
                Path(place),
                best_interval(mtbf_s),
                ranks=rank_count,
                seed=seed,
                network=Network(loss_detection_s=DETECTION_S),
                compute=Compute(step_s=STEP_S),
                faults=[Kill(rng.randrange(rank_count), START_S + rng.expovariate(1 / mtbf_s))],
            )
            report.check_faults()
            kept = max(work.kept for work in works)  # a checkpoint is complete once any rank knows it
            died += sum(work.made - kept for work in works)
            passed_s += report.virtual_time_s - START_S + RELAUNCH_S + RELOAD_S
    return Tally(
        useful=float(rank_count * kept),
        possible=rank_count * passed_s / STEP_S,
        died=float(died),
        empty=failure_count * rank_count * (RELAUNCH_S + RELOAD_S) / STEP_S,  # until the detection, other ranks train
        failures=failure_count,
    )
