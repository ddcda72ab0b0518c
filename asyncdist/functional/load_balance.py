"""Prints tables of step times: how long each rank's steps took, and how long ranks waited for the slowest one.

The input is one dict per rank, which maps step names to seconds per iteration. A step is reported for the ranks that
have it. Only iterations that all these ranks have are compared. The tables mention missing ranks and ignored
iterations.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeAlias

import numpy as np
import torch

from asyncdist.wording import aligned, ranks_in_words

#: One rank's times: maps a step name to seconds, one number per iteration or a single number.
Timing: TypeAlias = Mapping[str, Sequence[float] | float]


@dataclass(frozen=True, slots=True)
class StepBalance:
    """Shows how evenly the work of one step was distributed over the ranks.

    Attributes:
        useful_s: Average working time of a rank in seconds: the mean over ranks, summed over iterations.
        waiting_s: Average seconds that a rank waited for the slowest rank: the maximum over ranks minus the mean,
            summed over iterations.
        iteration_count: Number of iterations that all ranks have. Further iterations are ignored.
        iteration_count_max: Largest number of iterations on any rank.
        ranks, missing: Ranks that have the step, and ranks that lack it.
    """

    step: str
    useful_s: float
    waiting_s: float
    iteration_count: int
    iteration_count_max: int
    ranks: tuple[int, ...]
    missing: tuple[int, ...]

    @property
    def imbalance(self) -> float:
        """Waiting time as a fraction of the step's duration, from 0 to 1."""
        duration_s = self.useful_s + self.waiting_s
        return self.waiting_s / duration_s if duration_s else 0.0

    @property
    def remark(self) -> str:
        """Note about the step's missing ranks and ignored iterations, or an empty string."""
        remarks = [f"not on {ranks_in_words(self.missing)}"] if self.missing else []
        if self.iteration_count < self.iteration_count_max:
            remarks.append(f"first {self.iteration_count} of up to {self.iteration_count_max} iterations")
        return "; ".join(remarks)


@dataclass(frozen=True, slots=True)
class LoadImbalance:
    """Numbers that :func:`report_load_imbalance` has printed. ``str()`` returns the table."""

    steps: tuple[StepBalance, ...]

    def __str__(self) -> str:
        rows = [
            (row.step, f"{row.useful_s:.4f}", f"{row.waiting_s:.4f}", f"{row.imbalance:.1%}", row.remark)
            for row in self.steps
        ]
        return _table(("step", "useful work, s", "waiting, s", "waiting", ""), rows)


@dataclass(frozen=True, slots=True)
class RankTime:
    """Times of one step on one rank.

    Attributes:
        mean_s: Mean seconds per iteration, or NaN if there are no iterations.
        total_s: Total seconds of all iterations.
        iteration_count: Number of iterations.
    """

    rank: int
    step: str
    mean_s: float
    total_s: float
    iteration_count: int


@dataclass(frozen=True, slots=True)
class StepTime:
    """Compares the times of one step over the ranks that have it.

    Attributes:
        max_s: Largest total time of a rank, in seconds.
        mean_s: Mean of the ranks' total times, in seconds.
        ranks, missing: Ranks that have the step, and ranks that lack it.
    """

    step: str
    max_s: float
    mean_s: float
    ranks: tuple[int, ...]
    missing: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TimeInfo:
    """Numbers that :func:`report_time_info` has printed. ``str()`` returns the two tables."""

    times: tuple[RankTime, ...]
    steps: tuple[StepTime, ...]

    def __str__(self) -> str:
        by_rank = [
            (str(row.rank), row.step, f"{row.mean_s:.4f}", f"{row.total_s:.4f}", str(row.iteration_count))
            for row in self.times
        ]
        by_step = [
            (
                row.step,
                f"{row.max_s:.4f}",
                f"{row.mean_s:.4f}",
                f"not on {ranks_in_words(row.missing)}" if row.missing else "",
            )
            for row in self.steps
        ]
        return "\n\n".join(
            (
                _table(("rank", "step", "mean, s", "total, s", "iterations"), by_rank),
                _table(("step", "largest total, s", "mean total, s", ""), by_step),
            )
        )


def report_load_imbalance(all_timing_dict: Sequence[Timing], world_size: int | None = None) -> LoadImbalance:
    """Print a table of working and waiting time in each step, and return its numbers.

    Args:
        all_timing_dict: One dict per rank, in rank order, that maps step names to seconds. A value is a number, or a
            list, array or tensor with one number per iteration. ``gather_from_all_ranks(lambda: timing)`` returns such
            a list.
        world_size: Number of dicts to use, by default all.

    Raises:
        TypeError, ValueError: An entry is not a dict, or a value is not a number of seconds.
    """
    timings = _checked(all_timing_dict, world_size)
    report = LoadImbalance(tuple(_balance(step, timings) for step in _steps(timings)))
    print(report)
    return report


def report_time_info(all_timing_dict: Sequence[Timing], world_size: int | None = None) -> TimeInfo:
    """Print and return each step's mean and total time on each rank, and the largest and mean total of all ranks.

    The arguments are the same as for :func:`report_load_imbalance`.
    """
    timings = _checked(all_timing_dict, world_size)
    times = tuple(
        RankTime(rank, step, sum(values) / len(values) if values else math.nan, sum(values), len(values))
        for rank, timing in enumerate(timings)
        for step, values in timing.items()
    )
    steps = []
    for step in _steps(timings):
        totals = [row.total_s for row in times if row.step == step]
        ranks, missing = _present(step, timings)
        steps.append(StepTime(step, max(totals), statistics.fmean(totals), ranks, missing))
    report = TimeInfo(times, tuple(steps))
    print(report)
    return report


def _balance(step: str, timings: Sequence[Mapping[str, Sequence[float]]]) -> StepBalance:
    ranks, missing = _present(step, timings)
    rows = [timings[rank][step] for rank in ranks]
    useful_s = waiting_s = 0.0
    for seconds in zip(*rows, strict=False):  # stops at the last iteration that all ranks have
        mean = sum(seconds) / len(seconds)
        useful_s += mean
        waiting_s += max(0.0, max(seconds) - mean)  # the rounded mean of equal numbers may exceed them
    lengths = [len(row) for row in rows]
    return StepBalance(step, useful_s, waiting_s, min(lengths), max(lengths), ranks, missing)


def _steps(timings: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(step for timing in timings for step in timing))


def _present(step: str, timings: Sequence[Mapping[str, Any]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    ranks = tuple(rank for rank, timing in enumerate(timings) if step in timing)
    return ranks, tuple(rank for rank in range(len(timings)) if rank not in ranks)


def _checked(all_timing: Sequence[Timing], world_size: int | None) -> list[dict[str, list[float]]]:
    if isinstance(all_timing, (str, Mapping)) or not isinstance(all_timing, Sequence):
        raise TypeError(f"all_timing_dict must be a list with one dict per rank, got a {type(all_timing).__name__}")
    count = len(all_timing) if world_size is None else world_size
    if type(count) is not int or not 1 <= count <= len(all_timing):
        raise ValueError(
            f"world_size must be from 1 to {len(all_timing)}, the number of ranks with timings, got {count!r}"
        )
    checked = []
    for rank, timing in enumerate(all_timing[:count]):
        if not isinstance(timing, Mapping):
            raise TypeError(f"the timing of rank {rank} must be a dict, got a {type(timing).__name__}")
        for step in timing:
            if not isinstance(step, str):
                raise TypeError(f"the step names of rank {rank} must be strings, got {step!r:.80}")
        checked.append({step: _seconds(rank, step, value) for step, value in timing.items()})
    return checked


def _seconds(rank: int, step: str, value: Any) -> list[float]:
    if isinstance(value, np.ndarray | torch.Tensor):
        value = value.tolist()
    values = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    for number in values:
        if not isinstance(number, Real):
            raise TypeError(
                f"the durations of step {step!r} of rank {rank} must be numbers of seconds, got {number!r:.80}"
            )
    return [float(number) for number in values]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    right = [number for number, head in enumerate(heads) if head.endswith((", s", "iterations", "rank", "waiting"))]
    return aligned([heads, *rows], right=right)
