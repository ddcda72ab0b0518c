"""Defines the methods of the benchmark ``value``: one entry of ``METHODS`` each.

Each method has one option that is tuned, with three values, so that all methods have the same tuning budget. All other
options are the defaults, or the values of the paper.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

import asyncdist as ad
from protocols import (
    AsyncDiLoCoPolicy,
    AsyncSelectiveAveragingPolicy,
    DelayedNesterov,
    DiLoCoPolicy,
    GossipPolicy,
    OneSidedSelectiveAveragingPolicy,
    PopulationAveragingPolicy,
    PopulationTrainingPolicy,
    SelectiveDiLoCoPolicy,
    SparseAveragingPolicy,
    StalenessWeight,
)
from worth.learning import Learner
from worth.settings import RANK_COUNT

Policy = AbstractAsyncContextManager[Any]
#: The model that a user takes: the anchor, the ranks' mean, or the rank that is best by held-out data.
Deployed = Literal["anchor", "mean", "best"]
NESTEROV: Final = functools.partial(torch.optim.SGD, momentum=0.9, nesterov=True)
#: Factors of the learning rate for methods without an option to tune.
RATES: Final = (0.5, 1.0, 2.0)
GAMMAS: Final = (0.35, 0.7, 1.4)
#: Outer learning rates for methods in which each single contribution moves the anchor.
ASYNC_GAMMAS: Final = (0.175, 0.35, 0.7)
#: Steps of grace: a third of the usual number of steps between contributions.
GRACE_STEPS: Final = 5.0


@dataclass(frozen=True, slots=True)
class Method:
    """A way to train.

    Attributes:
        deploys: The model that a user takes at the end.
        option: Name of the tuned option.
        values: Values that are tried.
        make: Function that makes the policy from the learner, the number of steps between averages, and the value.
        averages_gradients: Whether the gradients of all ranks are averaged in each step.
        ranks: Number of ranks; with fewer than all, the odd rank is left out.
        survives: Whether the training continues if a rank is lost; otherwise it stands still until the rank is back.
        waits: Whether a rank may wait for a slow rank.
        rejoins: Whether a restarted rank joins the running policy; otherwise it stays away.
    """

    deploys: Deployed
    option: str
    values: tuple[float, ...]
    make: Callable[[Learner, int, float], Policy]
    averages_gradients: bool = False
    ranks: int = RANK_COUNT
    survives: bool = True
    waits: bool = False
    rejoins: bool = True


def _alone(learner: Learner, every: int, value: float) -> Policy:
    """Multiply the learning rate by the value, and make no policy."""
    for group in learner.optimizer.param_groups:
        group["lr"] *= value
    return nullcontext()


def _local_sgd(learner: Learner, every: int, value: float) -> Policy:
    return DiLoCoPolicy(learner.model, learner.optimizer, average_every=round(every * value), outer_optimizer=None)


def _diloco(learner: Learner, every: int, value: float, **options: Any) -> Policy:
    outer = functools.partial(NESTEROV, lr=value)
    return DiLoCoPolicy(learner.model, learner.optimizer, average_every=every, outer_optimizer=outer, **options)


def _selective_diloco(learner: Learner, every: int, value: float) -> Policy:
    outer = functools.partial(NESTEROV, lr=value)
    return SelectiveDiLoCoPolicy(
        learner.model,
        learner.optimizer,
        average_every=every,
        outer_optimizer=outer,
        metric=learner.held_out_loss,
        metric_mode="min",
    )


def _delayed_nesterov(learner: Learner, every: int, value: float) -> Policy:
    outer = functools.partial(DelayedNesterov, lr=value, momentum=0.9, delay=RANK_COUNT)
    return AsyncDiLoCoPolicy(
        learner.model, learner.optimizer, average_every=every, outer_optimizer=outer, dynamic_steps=True
    )


def _async_diloco(learner: Learner, every: int, value: float, **options: Any) -> Policy:
    """Make the default rule, if the value is 1."""
    return AsyncDiLoCoPolicy(
        learner.model,
        learner.optimizer,
        average_every=every,
        outer_optimizer=functools.partial(torch.optim.SGD, lr=value),
        correct=StalenessWeight(power=1.0, first_round=True),
        **options,
    )


def _decoupled(learner: Learner, every: int, value: float, *, grace_steps: float = 0.0) -> Policy:
    return AsyncDiLoCoPolicy(
        learner.model,
        learner.optimizer,
        average_every=every,
        outer_optimizer=functools.partial(NESTEROV, lr=value),
        quorum=1,
        grace_steps=grace_steps,
        weights="rate",
        merge="radial",
    )


def _sparta(learner: Learner, every: int, value: float) -> Policy:
    return SparseAveragingPolicy(learner.model, learner.optimizer, fraction=value)


def _wash(learner: Learner, every: int, value: float) -> Policy:
    return SparseAveragingPolicy(learner.model, learner.optimizer, fraction=value, operation="shuffle")


def _papa(learner: Learner, every: int, value: float, **options: Any) -> Policy:
    return PopulationAveragingPolicy(learner.model, learner.optimizer, average_every=10, pull=value, **options)


def _gossip(learner: Learner, every: int, value: float) -> Policy:
    return GossipPolicy(learner.model, learner.optimizer, average_every=round(every * value))


def _noloco(learner: Learner, every: int, value: float) -> Policy:
    return GossipPolicy(
        learner.model,
        learner.optimizer,
        average_every=every,
        topology="random",
        outer_lr=value,
        outer_momentum=0.5,
    )


def _pbt(learner: Learner, every: int, value: float) -> Policy:
    """Begin with the learning rates that are tried for other methods, one on each rank."""
    rate, usual = learner.optimizer.param_groups[-1]["lr"], learner.usual_rate
    first = rate * (*RATES, 1.0)[ad.current_world().rank]
    return PopulationTrainingPolicy(
        learner.model,
        learner.optimizer,
        average_every=round(every * value),
        hyperparameters={"lr": (usual / 10, usual * 200)},
        initial={"lr": first},
        metric=learner.held_out_loss,
        metric_mode="min",
    )


def _selective(learner: Learner, every: int, value: float, *, strategy: Any, is_local: bool = False) -> Policy:
    return AsyncSelectiveAveragingPolicy(
        learner.model,
        learner.optimizer,
        average_every=every,
        replacement_ratio=value,
        averaging_strategy=strategy,
        metric=learner.own_loss if is_local else learner.held_out_loss,
        metric_mode="min",
    )


def _one_sided(learner: Learner, every: int, value: float) -> Policy:
    return OneSidedSelectiveAveragingPolicy(
        learner.model,
        learner.optimizer,
        average_every=every,
        replacement_mode="worst_ratio",
        replacement_ratio=value,
        metric=learner.held_out_loss,
        metric_mode="min",
    )


_RATIO: Final = ("replacement_ratio", (0.25, 0.5, 0.75))
_GAMMA: Final = ("outer lr", GAMMAS)
_ASYNC_GAMMA: Final = ("outer lr", ASYNC_GAMMAS)
_STREAMING: Final[dict[str, Any]] = {"fragments": 2, "overlap_steps": 2, "wire": "int8"}

METHODS: Final[dict[str, Method]] = {
    "none": Method("best", "lr factor", RATES, _alone),
    "one rank alone": Method("best", "lr factor", RATES, _alone, ranks=1),
    "gradients, every step": Method(
        "best", "lr factor", RATES, _alone, averages_gradients=True, survives=False, waits=True
    ),
    "LocalSGD": Method("anchor", "average_every factor", (0.25, 0.5, 1.0), _local_sgd, waits=True),
    "LocalSGD, three ranks": Method("anchor", "average_every factor", (0.25, 0.5, 1.0), _local_sgd, ranks=3),
    "DiLoCo": Method("anchor", *_GAMMA, _diloco, waits=True),
    "Streaming DiLoCo": Method("anchor", *_GAMMA, functools.partial(_diloco, **_STREAMING), waits=True),
    "DiLoCo, quorum 3": Method("anchor", *_ASYNC_GAMMA, functools.partial(_diloco, quorum=3, late="skip")),
    "async DiLoCo": Method("anchor", "outer lr", (0.5, 1.0, 2.0), _async_diloco),
    "async DiLoCo, grace": Method(
        "anchor", "outer lr", (0.5, 1.0, 2.0), functools.partial(_async_diloco, grace_steps=GRACE_STEPS)
    ),
    "async DiLoCo, Nesterov": Method("anchor", *_ASYNC_GAMMA, _delayed_nesterov),
    "Decoupled": Method("anchor", "outer lr", (0.0175, 0.035, 0.07), _decoupled),
    "Decoupled, grace": Method(
        "anchor", "outer lr", (0.14, 0.28, 0.56), functools.partial(_decoupled, grace_steps=GRACE_STEPS)
    ),
    "selective DiLoCo": Method("anchor", *_GAMMA, _selective_diloco, waits=True),
    "SPARTA": Method("mean", "fraction", (0.005, 0.02, 0.08), _sparta, waits=True),
    "WASH": Method("mean", "fraction", (0.001, 0.005, 0.02), _wash, waits=True),
    "PAPA": Method("mean", "pull", (0.01, 0.1, 0.5), _papa, waits=True),
    "PAPA-2": Method("mean", "pull", (0.1, 0.5, 1.0), functools.partial(_papa, mean_of="pairs"), waits=True),
    "EASGD": Method("anchor", "pull", (0.05, 0.1, 0.225), functools.partial(_papa, center=True), waits=True),
    "gossip": Method("mean", "average_every factor", (0.25, 0.5, 1.0), _gossip, waits=True),
    "NoLoCo": Method("mean", *_GAMMA, _noloco, waits=True),
    "PBT": Method("best", "average_every factor", (0.5, 1.0, 2.0), _pbt),
    "selective, mean": Method("best", *_RATIO, functools.partial(_selective, strategy="mean")),
    "selective, weighted_mean": Method("best", *_RATIO, functools.partial(_selective, strategy="weighted_mean")),
    "selective, best_only": Method("best", *_RATIO, functools.partial(_selective, strategy="best_only")),
    "selective, local loss": Method("best", *_RATIO, functools.partial(_selective, strategy="mean", is_local=True)),
    "one-sided": Method("best", *_RATIO, _one_sided, rejoins=False),
}
