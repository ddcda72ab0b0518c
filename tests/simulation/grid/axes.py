"""Defines the axes of the grid: named values of each exported policy's options and of features common to all policies.

A case is printed with the names of its values. The name ``-`` means that an option is not passed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

import protocols
from protocols import CGAD, BayesianExplore, DelayedNesterov, FedAdam, HeLoCo, SpawnPolicy, StalenessWeight, TopK
from simulation.grid.models import MODELS, OPTIMIZERS

DEFAULT: Final = "-"
#: Options that the grid leaves out: destinations of results, time limits, the world, and options that need other code.
LEFT_OUT: Final = frozenset(
    (
        *("world", "start_timeout_s", "drain_timeout_s", "read_timeout_s", "max_report_age_s", "timing", "name"),
        *("group", "coordinator", "lr_scheduler"),  # groups are an event; the others need a different training loop
    )
)
#: Events that can happen in a case.
EVENTS: Final = (
    "nothing",
    "resumed in memory",
    "killed last",
    "killed first",
    "restarted",
    "joined",
    "stalled",
    "parted",
    "one is slow",
    "one ends early",
    "of a group",
    "policy after policy",
    "policies side by side",
    "error between steps",
    "wrong call",
    "cancelled step",
    "settled",
    "anchors shown",
    "weights not finite",
    "moments not finite",
    "new optimizer",
)
#: How a case starts: with new weights, or from a checkpoint.
STARTS: Final = ("anew", "resumed", "resumed twice", "resumed on fewer", "resumed on more", "resumed otherwise")
#: Axes that every policy has.
COMMON: Final[dict[str, tuple[str, ...]]] = {
    "model": tuple(MODELS),
    "optimizer": tuple(OPTIMIZERS),
    "event": EVENTS,
    "start": STARTS,
    "saving": ("never", "every 3", "beside"),
    "network": ("even", "slow", "hosts", "one rank is slow"),
    "way": ("plain", "blocking", "integration"),
    "lr": ("trains", "zero", "ends"),
    "first": ("equal", "different"),
}


def _sgd(**options: Any) -> Any:
    return functools.partial(torch.optim.SGD, **options)


def _doubled(hyperparameters: dict[str, Any], _: Any) -> dict[str, Any]:
    return {name: value if isinstance(value, str) else value * 2 for name, value in hyperparameters.items()}


def clipped(difference: torch.Tensor, momentum: Any, staleness: int) -> torch.Tensor:
    """Limit the values of a difference to [-0.5, 0.5], and return the difference."""
    del momentum, staleness
    return difference.clamp_(-0.5, 0.5)


def _of(*values: Any) -> dict[str, Any]:
    return {str(value): value for value in values}


_SHARED: Final[dict[str, dict[str, Any]]] = {
    "average_every": _of(1, 2, 3),
    "optimizer_state": _of("reset"),
    "parameters": _of("trainable"),
    "on_event": {"listener": lambda event: None},
    "metric": {"callable": None},  # made for each model
    "metric_mode": _of("min"),
    "seed": _of(5),
    "momentum": _of(0.5, 1.0),
    "replacement_ratio": _of(0.0, 0.5, 1.0),
    "model_builder": {"builder": None},  # made for each model
    "threshold": _of(-0.2),
    "cooldown": _of(0, 4),
    "quorum": _of(0.0, 1.0),
    "grace_s": _of(0.0, 0.02),
    "round_timeout_s": _of(0.02),
    "route": _of("direct", "sharded"),
    "successors": {"(1,)": (1,)},
    "donor_count": _of(1, 2),
}
_DILOCO: Final[dict[str, dict[str, Any]]] = {
    "average_every": _of(2, 3, 4),
    "outer_optimizer": {
        "None": None,
        "SGD": _sgd(lr=1.0),
        "momentum": _sgd(lr=0.5, momentum=0.5),
        "Adam": functools.partial(torch.optim.Adam, lr=0.1),
        "FedAdam": functools.partial(FedAdam, lr=0.1),
    },
    "fragments": _of(2),
    "fragment_pattern": {"balanced": "balanced", "lists": [["h.0"], ["h.1"]]},
    "overlap_steps": _of(1, 2),
    "mixing": _of(0.25, 1.0),
    "wire": {**_of("bfloat16", "float16", "int8", "q4", "topk"), "TopK": TopK(share=0.5)},
    "error_feedback": _of(0.0, 0.9, 1.0),
    "weights": _of("tokens"),
    "merge": _of("radial"),
    "warmup_steps": _of(5),
    "late": _of("skip"),
    "eager": _of(True),
    "quorum": _of(1, 2),
    "grace_s": _of(0.015),
    "replica_size": _of(2),
}
#: Values of each policy's options, except the options in :data:`_SHARED`.
OPTIONS: Final[dict[str, dict[str, dict[str, Any]]]] = {
    "DiLoCoPolicy": _DILOCO,
    "SelectiveDiLoCoPolicy": {
        **_DILOCO,
        "averaging_strategy": _of("mean", "best_only"),
        "donor_ratio": _of(0.5),
        "outlier_factor": {"inf": float("inf"), "1.0": 1.0},
    },
    "AsyncDiLoCoPolicy": {
        **_DILOCO,
        "outer_optimizer": {
            "SGD": _sgd(lr=0.5),
            "nesterov": _sgd(lr=0.3, momentum=0.5, nesterov=True),
            "Adam": functools.partial(torch.optim.Adam, lr=0.1),
            "DelayedNesterov": functools.partial(DelayedNesterov, lr=0.3, momentum=0.5, delay=2),
        },
        "correct": {
            "StalenessWeight": StalenessWeight(),
            "HeLoCo": HeLoCo(),
            "CGAD": CGAD(decay=0.1, cutoff=8),
            "function": clipped,
        },
        "dynamic_steps": _of(True),
        "quorum": _of(2, 3),
        "grace_steps": _of(1.0),
        "late": _of("wait"),
        "weights": _of("tokens", "rate"),
        "mirror_every": _of(0, 1),
        "islands": _of(2),
        "island_size": _of(2),
        "global_optimizer": {"SGD": _sgd(lr=0.5)},
        "global_every": _of(2),
        "merge_weight": _of(1.0),
    },
    "AverageAllPolicy": {},
    "AsyncSelectiveAveragingPolicy": {
        "averaging_strategy": _of("weighted_mean", "best_only", "reset_weights"),
        "islands": _of(2),
        "island_size": _of(2),
        "migrate_every": _of(1),
        "migration": _of("random"),
    },
    "OneSidedSelectiveAveragingPolicy": {
        "averaging_strategy": _of("weighted_mean", "best_only", "reset_weights"),
        "replacement_mode": _of("threshold", "worst_ratio"),
        "donor_ratio": _of(0.5, 1.0),
        "age_range": {"(2, 4)": (2, 4), "(5, 5)": (5, 5)},
        "threshold_metric": _of(-0.2),
    },
    "AsyncPopulationAveragingPolicy": {"pull": _of(0.25, 1.0)},
    "PopulationTrainingPolicy": {
        "hyperparameters": {"lr": {"lr": (1e-3, 0.1)}, "choices": {"lr": [0.01, 0.02, 0.04]}},
        "custom_hyperparameters": {"beta": {"beta": (0.1, 0.9)}},
        "initial": {"lr": {"lr": 0.02}},
        "quantile": _of(0.0, 0.5),
        "perturb": {"(0.5, 2.0)": (0.5, 2.0)},
        "resample_probability": _of(0.0, 1.0),
        "explore": {"function": _doubled, "Bayesian": BayesianExplore()},
        "periods": {"(1, 2)": (1, 2)},
    },
    "ReplicaAveragingPolicy": {
        "averaging_strategy": _of("weighted_mean", "best_only", "reset_weights"),
        "replica_size": _of(2),
        "swap_every": _of(1),
    },
    "GossipPolicy": {
        "topology": {
            **_of("ring", "hypercube", "random", "rotating", "hosts"),
            "matrix": [[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.25, 0.25, 0.5]],
        },
        "push_sum": _of(True),
        "outer_lr": _of(0.5),
        "outer_momentum": _of(0.25),
        "nesterov": _of(True),
    },
    "PopulationAveragingPolicy": {
        "pull": _of(0.25, 1.0),
        "mean_of": _of("pairs"),
        "center": _of(True),
        "scale_with_lr": _of(True),
    },
    "SparseAveragingPolicy": {"fraction": _of(0.3, 1.0), "operation": _of("shuffle")},
    "EvolutionStrategyPolicy": {"sigma": _of(0.5), "pairs": _of(1), "fitness": _of("rank")},
}
#: Options that some policies require.
_REQUIRED: Final = frozenset(("average_every", "replica_size", "hyperparameters"))


def kind_of(policy: str) -> Any:
    """Return the policy class with this name."""
    return getattr(protocols, policy)


def exported() -> list[str]:
    """Return the names of all exported policies."""
    kinds = [kind for kind in vars(protocols).values() if isinstance(kind, type) and issubclass(kind, SpawnPolicy)]
    return sorted({kind.__name__ for kind in kinds} - {"SpawnPolicy"})


@functools.cache
def axes_of(policy: str) -> dict[str, tuple[str, ...]]:
    """Return the names of the values on each of a policy's axes. The axes of its options are first."""
    found: dict[str, tuple[str, ...]] = {}
    for name, parameter in inspect.signature(kind_of(policy)).parameters.items():
        if name not in ("model", "optimizer", *LEFT_OUT):
            values = OPTIONS[policy].get(name) or _SHARED[name]
            is_needed = name in _REQUIRED and parameter.default in (parameter.empty, None)
            found[name] = (*(() if is_needed else (DEFAULT,)), *values)
    return found | COMMON


@dataclass(frozen=True)
class Case:
    """One combination of values: the name of a value for each axis of the policy."""

    policy: str
    values: tuple[tuple[str, str], ...]
    seed: int = 0

    @staticmethod
    def of(policy: str, case_seed: int = 0, **values: str) -> Case:
        """Return a case with the first value of each axis that is not given."""
        axes = axes_of(policy)
        assert values.keys() <= axes.keys(), values.keys() - axes.keys()
        return Case(policy, tuple((axis, values.get(axis, names[0])) for axis, names in axes.items()), case_seed)

    def __getitem__(self, axis: str) -> str:
        return dict(self.values).get(axis, DEFAULT)

    def __str__(self) -> str:
        axes = axes_of(self.policy)
        shown = [f"{axis!r}: {value!r}" for axis, value in self.values if value != axes[axis][0]]
        return f"Case.of({self.policy!r}, case_seed={self.seed}, **{{{', '.join(shown)}}})"

    @property
    def replica_size(self) -> int:
        """Number of ranks that train one model."""
        return 2 if self["replica_size"] == "2" else 1

    @property
    def has_anchor(self) -> bool:
        """Whether the policy has an anchor that it can show."""
        if self.policy == "PopulationAveragingPolicy":
            return self["center"] == "True"
        return "DiLoCo" in self.policy and self["outer_optimizer"] != "None"

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        in_islands = "2" in (self["islands"], self["island_size"])
        return 4 if self.replica_size > 1 or in_islands or self["periods"] != DEFAULT else 3

    def options(self, metric: Callable[[], float], builder: Callable[[], nn.Module]) -> dict[str, Any]:
        """Return the policy's options."""
        made = {"metric": metric, "model_builder": builder}
        return {
            axis: made.get(axis) or (OPTIONS[self.policy].get(axis) or _SHARED[axis])[name]
            for axis, name in self.values
            if axis not in COMMON and name != DEFAULT
        }
