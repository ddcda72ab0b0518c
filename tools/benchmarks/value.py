"""Measures the benefit of averaging: the quality of a population's models after equal virtual time, by policy.

Four ranks train a small task, simulated. The training is real torch; the virtual time of a step follows from a stated
model: 50 ms, log-normal, the same on each rank or ten times as long on rank 3. So the figures do not depend on the
machine's speed, and equal seeds give equal figures. Each policy is tried on each task in each setting:

- equal: all ranks are alike, but for their data.
- slow: rank 3 takes ten times as long for a step.
- diverges: rank 3 has a learning rate a hundred times too high in the second quarter of its training.

All policies average every ``AVERAGE_EVERY`` steps and have their default options, with a quarter of the ranks replaced
in a round. Two qualities are recorded for each run: the quality of the model that users would take, whose rank has the
best metric at the end, and the quality of the worst rank's model.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import logging
import math
import multiprocessing
import os
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from harness import Results, Row
from rich.progress import track
from value_tasks import TASKS, Learner

import asyncdist as ad
from asyncdist.simulation import Compute, LogNormal
from protocols import AsyncSelectiveAveragingPolicy, AverageAllPolicy, OneSidedSelectiveAveragingPolicy

RANKS: Final = ()
RANK_COUNT: Final = 4
AVERAGE_EVERY: Final = 20
STEP_S: Final = 0.05
#: Training begins at this virtual time, after the collective start.
START_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Setting:
    """Describes what is wrong with rank 3.

    Attributes:
        title: The heading of its charts.
        slow_factor: How many times as long its steps take.
        learning_rate_factor: How many times as large its learning rate is in the second quarter of the time.
    """

    title: str
    slow_factor: float = 1.0
    learning_rate_factor: float = 1.0


SETTINGS: Final = {
    "equal": Setting("equal ranks"),
    "slow": Setting("rank 3 ten times slower", slow_factor=10.0),
    "diverges": Setting("rank 3 diverges for a while", learning_rate_factor=100.0),
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Says how much is simulated.

    Attributes:
        train_s: Virtual seconds of training, by task.
        seeds: How many populations of each kind.
    """

    train_s: dict[str, float]
    seeds: int


FULL: Final = Settings({"grid": 15.0, "spirals": 20.0}, seeds=5)
QUICK: Final = Settings({"spirals": 4.0}, seeds=1)


# -- the policies -----------------------------------------------------------------------------------------------------


def _none(learner: Learner) -> AbstractAsyncContextManager[None]:
    return nullcontext()


def _average_all(learner: Learner) -> AbstractAsyncContextManager[Any]:
    return AverageAllPolicy(learner.model, learner.optimizer, average_every=AVERAGE_EVERY)


def _selective(learner: Learner, strategy: Any) -> AbstractAsyncContextManager[Any]:
    return AsyncSelectiveAveragingPolicy(
        learner.model,
        learner.optimizer,
        average_every=AVERAGE_EVERY,
        replacement_ratio=0.25,
        averaging_strategy=strategy,
        model_builder=learner.fresh_model if strategy == "reset_weights" else None,
        metric=learner.metric,
    )


def _one_sided(learner: Learner) -> AbstractAsyncContextManager[Any]:
    return OneSidedSelectiveAveragingPolicy(
        learner.model,
        learner.optimizer,
        average_every=AVERAGE_EVERY,
        replacement_mode="worst_ratio",
        replacement_ratio=0.25,
        metric=learner.metric,
    )


POLICIES: Final[dict[str, Callable[[Learner], AbstractAsyncContextManager[Any]]]] = {
    "no averaging": _none,
    "average all": _average_all,
    "selective, mean": functools.partial(_selective, strategy="mean"),
    "selective, weighted_mean": functools.partial(_selective, strategy="weighted_mean"),
    "selective, best_only": functools.partial(_selective, strategy="best_only"),
    "selective, reset_weights": functools.partial(_selective, strategy="reset_weights"),
    "one-sided": _one_sided,
}


# -- one run ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Run:
    """Names one simulated training."""

    task: str
    setting: str
    policy: str
    seed: int
    train_s: float


async def _train(world: ad.World, run: Run) -> tuple[float, float, int]:
    """Train one rank until the virtual time is over; return its metric, its quality and its steps."""
    factor = SETTINGS[run.setting].learning_rate_factor if world.rank == RANK_COUNT - 1 else 1.0
    learner = TASKS[run.task].make(run.seed, world.rank)
    rates = [group["lr"] for group in learner.optimizer.param_groups]
    step_count = 0
    async with POLICIES[run.policy](learner) as policy:
        await asyncio.sleep(START_S - world.time())  # until all have started
        while (trained_s := world.time() - START_S) < run.train_s:
            diverges = run.train_s / 4 <= trained_s < run.train_s / 2
            for group, rate in zip(learner.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * (factor if diverges else 1.0)
            learner.step()
            try:
                info = await (policy.step() if policy else world.safe_point())
            except ad.ClosedError:  # another rank's time is over, so an average of all ranks is no longer possible
                break
            step_count += 1
            if info:
                learner.take_new_weights()
    return learner.metric(), learner.quality(), step_count


def simulate(run: Run) -> Results:
    """Simulate a run; return the quality of the model to be taken, of the worst rank, and steps by rank."""
    slow = SETTINGS[run.setting].slow_factor
    report = ad.simulate(
        _train,
        run,
        ranks=RANK_COUNT,
        seed=run.seed,
        compute=Compute(step_s=LogNormal(STEP_S, 0.1), factors={RANK_COUNT - 1: slow}, overrun_probability=0.0),
    )
    ended: Sequence[tuple[float, float, int]] = report.results
    _, taken, _ = max(ended, key=lambda rank: -math.inf if math.isnan(rank[0]) else rank[0])
    return {"taken": taken, "worst": max(quality for _, quality, _ in ended), "steps": [count for *_, count in ended]}


# -- all of them ------------------------------------------------------------------------------------------------------


def measure(settings: Settings) -> Results:
    """Return, by task, setting and policy, the figures of each seed's run."""
    runs = [
        Run(task, setting, policy, seed, train_s)
        for task, train_s in settings.train_s.items()
        for setting in SETTINGS
        for policy in POLICIES
        for seed in range(settings.seeds)
    ]
    results: Results = {
        task: {setting: {policy: [] for policy in POLICIES} for setting in SETTINGS} for task in settings.train_s
    }
    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=spawning, initializer=_begin_worker) as pool:
        for run, figures in zip(runs, track(pool.map(simulate, runs), "simulating", len(runs)), strict=True):
            results[run.task][run.setting][run.policy].append(figures)
    return results


def _begin_worker() -> None:
    """Use one core, and keep back the warnings of ranks: that some end before others is a part of each run."""
    torch.set_num_threads(1)
    for name in ("asyncdist", "protocols"):
        logging.getLogger(name).setLevel(logging.ERROR)


def rows(results: Results) -> list[Row]:
    """The table: medians over the seeds, with the best and the worst seed."""
    return [
        Row(
            f"{TASKS[task].title}; {SETTINGS[setting].title}; {policy}",
            f"{_spread(runs, 'taken')}; worst rank {_spread(runs, 'worst')}",
            f"{_spread(of_policy['no averaging'], 'taken')}; {_spread(of_policy['no averaging'], 'worst')}",
        )
        for task, of_setting in results.items()
        for setting, of_policy in of_setting.items()
        for policy, runs in of_policy.items()
        if policy != "no averaging"
    ]


def _spread(runs: list[Results], figure: str) -> str:
    values = sorted(run[figure] for run in runs)
    return f"{statistics.median(values):.3f} ({values[0]:.3f} to {values[-1]:.3f})"


def draw(results: Results, path: Path) -> None:
    """Write the chart, in the format that the path's ending names."""
    import matplotlib  # an extra, and only for this

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.lines import Line2D

    figure, panels = plt.subplots(
        len(results), len(SETTINGS), figsize=(12, 0.6 + 2.9 * len(results)), dpi=150, sharex="row", squeeze=False
    )
    names = list(reversed(POLICIES))
    for line, (task, of_setting) in zip(panels, results.items(), strict=True):
        for axes, (setting, of_policy) in zip(line, of_setting.items(), strict=True):
            for height, policy in enumerate(names):
                _draw_policy(axes, height, of_policy[policy], is_reference=policy == "no averaging")
            axes.set_yticks(range(len(names)), names if axes is line[0] else [""] * len(names), fontsize=9)
            axes.set_ylim(-0.6, len(names) - 0.4)
            axes.set_xlim(0, TASKS[task].worst * 1.02)
            axes.set_title(SETTINGS[setting].title, loc="left", fontsize=10)
            axes.set_xlabel(TASKS[task].quality, fontsize=8)
            axes.grid(True, axis="x", color="#dddddd", linewidth=0.5)
            axes.set_axisbelow(True)
            for side in ("top", "right"):
                axes.spines[side].set_visible(False)
        line[0].set_ylabel(TASKS[task].title, fontsize=10)
    marks = [
        Line2D([], [], color="#0072B2", marker="o", label="the model that its users take: best by its own metric"),
        Line2D([], [], color="#D55E00", marker="D", fillstyle="none", label="the worst rank's model"),
    ]
    figure.legend(handles=marks, loc="lower center", ncols=2, fontsize=9, frameon=False)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(path)
    plt.close(figure)


def _draw_policy(axes: Any, height: int, runs: list[Results], *, is_reference: bool) -> None:
    """Draw the median over the seeds of both qualities, and the range."""
    for figure, colour, marker, offset in (("worst", "#D55E00", "D", -0.16), ("taken", "#0072B2", "o", 0.16)):
        values = [run[figure] for run in runs]
        at = height + offset
        axes.plot([min(values), max(values)], [at, at], color=colour, linewidth=1.2, alpha=0.6)
        axes.plot(
            statistics.median(values), at, marker, color=colour, markersize=6,
            fillstyle="none" if figure == "worst" else "full",
        )  # fmt: skip
        if is_reference and figure == "taken":
            axes.axvline(statistics.median(values), color=colour, linewidth=0.8, linestyle=":")


def main() -> None:
    """Measure, and write the results to the file named on the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    given.out.write_text(json.dumps(measure(QUICK if given.quick else FULL)))


if __name__ == "__main__":
    main()
