"""The tasks of the benchmark ``value``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from worth import grid, language
from worth.gaussians import gaussians
from worth.learning import Judge, Learner


@dataclass(frozen=True, slots=True)
class Task:
    """Describes a task.

    Attributes:
        title: Heading of the task's charts.
        quality: Name of the measured quality; less is better.
        target: Quality that a training must reach; the time to it is measured.
        train_s: Virtual seconds of training.
        average_every: Number of steps between two averages, by default.
        make: Function that makes a learner from the run's seed, the rank, the shards' name and a factor of the learning
            rate.
        judge: Function that makes the judge from the run's seed.
    """

    title: str
    quality: str
    target: float
    train_s: float
    average_every: int
    make: Callable[[int, int, str, float], Learner]
    judge: Callable[[int], Judge]


TASKS: Final = {
    "gaussians": Task(
        "classifier of 32 Gaussians",
        "test loss",
        0.5,
        160.0,
        16,
        lambda seed, rank, shards, factor: gaussians(seed).learner(rank, shards, factor),
        lambda seed: gaussians(seed).judge(),
    ),
    "language": Task(
        "transformer of characters", "test bits per character", 4.0, 100.0, 10, language.learner, language.judge
    ),
    "grid": Task(
        "GFlowNet on HyperGrid", "L1 distance to the target distribution", 1.0, 100.0, 10, grid.learner, grid.judge
    ),
}
