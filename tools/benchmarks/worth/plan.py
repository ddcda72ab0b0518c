"""Says which methods are tried in which settings, and which runs choose the methods' options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from worth.methods import METHODS
from worth.runs import Run
from worth.settings import ODD_RANK, SLOWDOWNS, slowdown

#: Seed with which options are chosen; it is not among the reported seeds.
TUNING_SEED: Final = 1000
#: Number of marks in the chart of times.
MARKS: Final = 32
#: Methods of the chart of times.
TIMED: Final = (
    "one rank alone",
    "LocalSGD, three ranks",
    "gradients, every step",
    "LocalSGD",
    "DiLoCo",
    "DiLoCo, quorum 3",
    "async DiLoCo",
    "async DiLoCo, grace",
    "selective, mean",
)
#: Methods of the chart of failures.
FAILING: Final = (
    "none",
    "gradients, every step",
    "LocalSGD",
    "DiLoCo",
    "async DiLoCo",
    "selective, mean",
)
#: Methods that are tried in all settings.
CORE: Final = (
    "none",
    "gradients, every step",
    "LocalSGD",
    "DiLoCo",
    "Streaming DiLoCo",
    "DiLoCo, quorum 3",
    "async DiLoCo",
    "async DiLoCo, grace",
    "async DiLoCo, Nesterov",
    "Decoupled",
    "Decoupled, grace",
    "selective DiLoCo",
    "PAPA",
    "NoLoCo",
    "PBT",
    "selective, mean",
    "selective, best_only",
    "one-sided",
)
#: Methods for data that differ among the ranks.
SHARDED: Final = (
    "none",
    "gradients, every step",
    "LocalSGD",
    "DiLoCo",
    "async DiLoCo",
    "async DiLoCo, grace",
    "async DiLoCo, Nesterov",
    "Decoupled, grace",
    "selective DiLoCo",
    "PAPA",
    "selective, mean",
    "selective, local loss",
)
#: Methods for tasks with costly steps. Their options have the middle values.
COSTLY: Final = ("none", "LocalSGD", "async DiLoCo", "selective, mean")


@dataclass(frozen=True, slots=True)
class Part:
    """Some methods in one setting.

    Attributes:
        name: Key of its results.
        tuned_in: Setting in which the options are chosen.
        marks: Number of moments at which models are rated.
        patience: Factor of the training time of methods that wait for a slow rank; None in equal time.
        length: Factor of the training time of all methods.
        tuning_count: Number of values that are tried for each option: 3, or 1 for the middle one.
    """

    name: str
    task: str
    setting: str
    tuned_in: str
    methods: tuple[str, ...]
    seeds: int
    marks: int = 1
    patience: float | None = None
    length: float = 1.0
    tuning_count: int = 3

    def runs(self, method: str, value: float) -> list[Run]:
        """Return the runs of a method, one for each seed."""
        marks, longer, setting = self.marks, self.length, self.setting
        if self.patience is not None and METHODS[method].waits:
            longer *= self.patience
        elif self.patience is not None:
            marks, longer = 3 * marks // 2, 1.5 * longer  # some methods need a little more than the usual time
            setting = "equal" if METHODS[method].ranks <= ODD_RANK else setting
        return [Run(self.task, setting, method, value, seed, marks, longer) for seed in range(self.seeds)]

    def tuning(self) -> Mapping[str, list[Run]]:
        """Return the runs that choose each method's option, one for each value."""
        return {method: [self._tuning_run(method, value) for value in self._tried(method)] for method in self.methods}

    def _tried(self, method: str) -> tuple[float, ...]:
        values = METHODS[method].values
        return values if self.tuning_count == len(values) else values[1:2]

    def _tuning_run(self, method: str, value: float) -> Run:
        return Run(self.task, self.tuned_in, method, value, TUNING_SEED, longer=self.length)


def _table(task: str, setting: str, tuned_in: str, methods: tuple[str, ...], seeds: int = 5) -> Part:
    marks = MARKS if setting in ("equal", *map(slowdown, SLOWDOWNS)) and task == "gaussians" else 1  # as for the chart
    return Part(f"{task}, {setting}", task, setting, tuned_in, methods, seeds, marks)


def _costly(task: str, setting: str) -> Part:
    return replace(_table(task, setting, "equal", COSTLY, seeds=3), tuning_count=1)


#: Parts of the tables, of the chart of times, and of the chart of failures. Options are chosen with equal ranks, before
#: anything goes wrong, and with slow links.
FULL: Final = (
    *(
        Part(f"times, {factor}", "gaussians", slowdown(factor), "equal", TIMED, 5, marks=MARKS, patience=float(factor))
        for factor in SLOWDOWNS
    ),
    *(_table("gaussians", name, "equal", tuple(METHODS)) for name in ("equal", "slow 10")),
    *(_table("gaussians", name, "equal", CORE) for name in ("diverges", "slow and diverging", "lost")),
    _table("gaussians", "speeds", "equal", (*TIMED, "Decoupled, grace")),
    _table("gaussians", "links", "links", CORE),
    _table("gaussians", "failures", "equal", FAILING, 30),
    *(_table("gaussians", name, "equal", SHARDED) for name in ("one class", "dirichlet 0.1")),
    *(_costly("grid", name) for name in ("equal", "slow 10")),
    *(_costly("language", name) for name in ("equal", "slow 10")),
)


def _part(name: str, setting: str, *methods: str) -> Part:
    return Part(name, "gaussians", setting, "equal", methods, seeds=1, marks=4)


#: A few methods, whose order is the same on each seed; one seed is enough.
QUICK: Final = tuple(
    replace(part, tuning_count=1, length=0.5)
    for part in (
        _part("times, 1", "equal", "LocalSGD", "async DiLoCo"),
        _part("times, 10", "slow 10", "LocalSGD", "async DiLoCo", "selective, mean"),
        _part("gaussians, equal", "equal", "gradients, every step", "LocalSGD", "WASH"),
        _part("gaussians, diverges", "diverges", "none", "selective, mean"),
        _part("gaussians, failures", "failures", "DiLoCo", "selective, mean"),
    )
)
