"""Compares outer rules of asynchronous DiLoCo that a user could take without tuning.

    python tools/benchmarks/worth/defaults.py

prints the losses of each rule in settings of the benchmarks ``value`` and ``staleness``, as medians of three seeds, and
each rule's regret: its loss divided by the loss of the setting's best rule. ``--sizes`` varies the number of ranks and
of steps between contributions instead, with two seeds.
"""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import simulations
import staleness
import torch

from protocols import AsyncDiLoCoPolicy, DelayedNesterov, StalenessWeight
from worth import runs
from worth.methods import METHODS, NESTEROV, Method, Policy


@dataclass(frozen=True, slots=True)
class Candidate:
    """A rule: its outer optimizer, its learning rate (None for 1 / k), and further options of the policy."""

    outer: Any
    lr: float | None
    options: dict[str, Any]

    def policy(self, learner: Any, every: int, value: float) -> Policy:
        """Make the policy of one rank."""
        outer = functools.partial(self.outer, lr=value)
        return AsyncDiLoCoPolicy(
            learner.model, learner.optimizer, average_every=every, outer_optimizer=outer, **self.options
        )


SGD: Final = torch.optim.SGD
CANDIDATES: Final = {
    "Nesterov 0.07 (former default)": Candidate(NESTEROV, 0.07, {}),
    "delayed Nesterov 0.7, dynamic steps": Candidate(
        functools.partial(DelayedNesterov, delay=4), 0.7, {"dynamic_steps": True}
    ),
    "SGD 1/k": Candidate(SGD, None, {}),
    "SGD 0.5, weight (1 + s)^-1/2": Candidate(SGD, 0.5, {"correct": StalenessWeight()}),
    "SGD 1, weight 1/(1 + s) (default)": Candidate(SGD, 1.0, {"correct": StalenessWeight(power=1.0, first_round=True)}),
    "the default, grace_steps=H/3": Candidate(
        SGD, 1.0, {"correct": StalenessWeight(power=1.0, first_round=True), "grace_steps": 5.0}
    ),
}
#: Settings of the benchmark ``value``, and shards and speed ratios of the benchmark ``staleness``.
SETTINGS: Final = (
    *("equal", "slow 10", "speeds", "diverges", "lost", "failures", "dirichlet 0.1", "one class"),
    *(("iid", 1), ("iid", 4), ("iid", 16), ("Dirichlet 0.3", 4), ("Dirichlet 0.3", 16), ("one class", 4)),
)
#: Numbers of ranks and of steps between contributions, with equal speeds and the same kind of data.
SIZES: Final = ((2, 8), (16, 8), (4, 32))
Cell = tuple[str, Any, int]


def cells(settings: tuple[Any, ...], seed_count: int) -> Iterator[Cell]:
    """Yield the candidate, the setting and the seed of each run."""
    for setting in settings:
        for name in CANDIDATES:
            for seed in range(1, 1 + seed_count):
                yield name, setting, seed


def simulate(cell: Cell) -> float:
    """Simulate a cell, and return its loss."""
    name, setting, seed = cell
    candidate = CANDIDATES[name]
    rank_count, every = setting if setting in SIZES else (staleness.RANK_COUNT, staleness.AVERAGE_EVERY)
    lr = candidate.lr or 1 / rank_count
    if isinstance(setting, str):
        METHODS[name] = Method("anchor", "outer lr", (lr,), candidate.policy)
        return runs.final(runs.simulate(runs.Run("gaussians", setting, name, lr, seed)))
    options = {**candidate.options, **({"grace_steps": 2.0} if "grace_steps" in candidate.options else {})}
    staleness.ALL[name] = staleness.Rule(AsyncDiLoCoPolicy, candidate.outer, (lr,), options)
    shards, ratio = ("iid", 1) if setting in SIZES else setting
    full = staleness.FULL
    run = staleness.Run(name, ratio, shards, lr, seed, full.train_s, full.width, rank_count, every)
    return float(staleness.simulate(run)["loss"])


def main() -> None:
    """Simulate, and print the losses and the regrets."""
    settings, seed_count = (SIZES, 2) if "--sizes" in sys.argv else (SETTINGS, 3)
    losses: dict[Any, dict[str, list[float]]] = {setting: {name: [] for name in CANDIDATES} for setting in settings}
    for (name, setting, _), loss in simulations.simulated(simulate, list(cells(settings, seed_count))):
        losses[setting][name].append(loss)
    regrets: dict[str, list[float]] = {name: [] for name in CANDIDATES}
    for setting, by_name in losses.items():
        medians = {name: statistics.median(values) for name, values in by_name.items()}
        print(setting, ", ".join(f"{name}: {median:.2f}" for name, median in medians.items()), sep=": ")
        for name, median in medians.items():
            regrets[name].append(median / min(medians.values()))
    for name, values in regrets.items():
        print(f"{name}: regret {statistics.geometric_mean(values):.2f}, at most {max(values):.2f}")


if __name__ == "__main__":
    main()
