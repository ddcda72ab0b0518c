"""Says which methods are tried in which settings, and which runs choose the methods' options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from worth.methods import METHODS
from worth.runs import Run
from worth.settings import SLOWDOWNS, slowdown

#: Seed with which options are chosen; it is not among the reported ones.
TUNING_SEED: Final = 1000
#: Methods that are tried in the settings that matter less.
CORE: Final = (
    "none",
    "one rank alone",
    "gradients, every step",
    "LocalSGD",
    "DiLoCo",
    "DiLoCo, quorum 3",
    "async DiLoCo",
    "Decoupled, grace",
    "selective DiLoCo",
    "PAPA",
    "selective, mean",
    "selective, best_only",
    "selective, local loss",
    "one-sided",
)
#: Methods of the chart of times.
TIMED: Final = (
    "one rank alone",
    "gradients, every step",
    "LocalSGD",
    "DiLoCo",
    "DiLoCo, quorum 3",
    "async DiLoCo",
    "Decoupled, grace",
    "PAPA",
    "selective, mean",
)
#: Methods of the chart of failures.
FAILING: Final = (
    "none",
    "one rank alone",
    "gradients, every step",
    "LocalSGD",
    "DiLoCo",
    "DiLoCo, quorum 3",
    "async DiLoCo",
    "Decoupled, grace",
    "selective DiLoCo",
    "PAPA",
    "selective, mean",
    "selective, best_only",
)
#: Methods of the tasks whose steps are costly.
COSTLY: Final = (
    "none",
    "gradients, every step",
    "LocalSGD",
    "DiLoCo",
    "async DiLoCo",
    "selective, mean",
    "selective, best_only",
)


@dataclass(frozen=True, slots=True)
class Part:
    """Some methods in one setting.

    Attributes:
        name: Key of its results.
        tuned_in: Setting in which the options are chosen.
        marks: Number of moments at which models are rated.
        patience: Factor of the training time of methods that wait for a slow rank.
    """

    name: str
    task: str
    setting: str
    tuned_in: str
    methods: tuple[str, ...]
    seeds: int
    marks: int = 1
    patience: float = 1.0

    def runs(self, method: str, value: float) -> list[Run]:
        """Return the runs of a method, one for each seed."""
        longer = self.patience if METHODS[method].waits else 1.0
        return [Run(self.task, self.setting, method, value, seed, self.marks, longer) for seed in range(self.seeds)]

    def tuning(self) -> Mapping[str, list[Run]]:
        """Return the runs that choose each method's option, one for each value."""
        return {
            method: [Run(self.task, self.tuned_in, method, value, TUNING_SEED) for value in METHODS[method].values]
            for method in self.methods
        }


def _table(task: str, setting: str, tuned_in: str, methods: tuple[str, ...], seeds: int = 5) -> Part:
    return Part(f"{task}, {setting}", task, setting, tuned_in, methods, seeds)


#: Parts of the tables, of the chart of times, and of the chart of failures.
FULL: Final = (
    *(
        Part(f"times, {factor}", "gaussians", slowdown(factor), "equal", TIMED, 5, marks=40, patience=float(factor))
        for factor in SLOWDOWNS
    ),
    *(_table("gaussians", name, name, tuple(METHODS)) for name in ("equal", "slow 10", "lost", "diverges", "links")),
    *(_table("gaussians", name, "slow 10", CORE) for name in ("speeds", "slow 100")),
    _table("gaussians", "rate 100", "diverges", CORE),
    *(_table("gaussians", name, "equal", CORE) for name in ("dirichlet 0.5", "dirichlet 0.1", "one class")),
    _table("gaussians", "failures", "lost", FAILING, 30),
    *(_table("language", name, "equal", COSTLY) for name in ("equal", "slow 10")),
    *(_table("grid", name, "equal", COSTLY) for name in ("equal", "slow 10", "diverges")),
)
#: A few methods, whose orders hold on each seed.
QUICK: Final = (
    Part("times, 1", "gaussians", "equal", "equal", ("LocalSGD", "async DiLoCo"), 2, marks=8),
    Part("times, 10", "gaussians", "slow 10", "equal", ("LocalSGD", "async DiLoCo"), 2, marks=8),
    _table("gaussians", "equal", "equal", ("gradients, every step", "LocalSGD", "SPARTA", "none"), 2),
    _table("gaussians", "slow 10", "equal", ("LocalSGD", "async DiLoCo", "none"), 2),
    _table("gaussians", "diverges", "equal", ("none", "selective, mean"), 2),
    _table("gaussians", "failures", "equal", ("LocalSGD",), 2),
)
