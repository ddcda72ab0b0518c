"""Names, holds and checks the options that policies share.

The ``TypedDict`` classes name a constructor's options for callables that pass them on as ``**options``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypedDict

import torch
from torch import nn

from asyncdist import Group, World, validation
from asyncdist.protocols.step_info import PolicyEvent

#: What takes the place of weights that are replaced.
AveragingStrategy: TypeAlias = Literal["mean", "weighted_mean", "best_only", "reset_weights"]
#: Which parameters are averaged: all, or those that require a gradient when the policy is made.
Parameters: TypeAlias = Literal["all", "trainable"]
#: For ``"reset_weights"``: makes a model of the same layout, or the pair (model, optimizer).
ModelBuilder: TypeAlias = Callable[[], nn.Module | tuple[nn.Module, torch.optim.Optimizer]]
#: Whether a larger metric is better, or a smaller one.
MetricMode: TypeAlias = Literal["max", "min"]
#: What becomes of an optimizer's state where weights are replaced.
OptimizerState: TypeAlias = Literal["keep", "reset"]
#: How the donors' snapshots travel to the replacers.
Route: TypeAlias = Literal["auto", "direct", "sharded"]
#: To which island the best rank of another one gives its weights.
MigrationRoute: TypeAlias = Literal["ring", "random"]


class MemberOptions(TypedDict, total=False):
    """Names the options of all policies that say who takes part; :class:`protocols.SpawnPolicy` documents them."""

    name: str
    group: Group | None
    world: World | None
    start_timeout_s: float
    parameters: Parameters


class ReplacementOptions(TypedDict, total=False):
    """Names the options that say who is replaced, and by which weights: those that torchgfn's policy has, too."""

    replacement_ratio: float
    averaging_strategy: AveragingStrategy
    momentum: float
    threshold: float | None
    cooldown: int
    model_builder: ModelBuilder | None
    timing: dict[str, list[float]] | None


class RoundOptions(TypedDict, total=False):
    """Names the options that say how metrics are read, and how a round is carried out."""

    metric_mode: MetricMode
    optimizer_state: OptimizerState
    quorum: float
    grace_s: float | None
    max_report_age_s: float
    round_timeout_s: float
    route: Route
    drain_timeout_s: float
    on_event: Callable[[PolicyEvent], None] | None


class PopulationOptions(MemberOptions, total=False):
    """Names the options that say who takes part, how the population is divided, and who coordinates it."""

    islands: int | None
    island_size: int | None
    migrate_every: int | None
    migration: MigrationRoute | None
    coordinator: int | None
    successors: Sequence[int]


class ReplicaOptions(ReplacementOptions, RoundOptions, total=False):
    """Names the options of selective averaging that replicas of several ranks have, too."""


class SelectiveOptions(ReplicaOptions, PopulationOptions, total=False):
    """Names all options of :class:`protocols.AsyncSelectiveAveragingPolicy` but ``average_every`` and ``metric``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragingOptions:
    """Says how an average takes the place of a rank's weights, and who is told of it.

    The constructors of the policies document them. The rules of each policy check ``averaging_strategy``.

    Raises:
        TypeError, ValueError: an option is of the wrong type or out of range; it and what is allowed are named.
    """

    averaging_strategy: AveragingStrategy = "mean"
    momentum: float = 0.0
    optimizer_state: OptimizerState = "keep"
    model_builder: ModelBuilder | None = None
    on_event: Callable[[PolicyEvent], None] | None = None
    timing: dict[str, list[float]] | None = None
    drain_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        """Refuse bad options when the policy is made, before any member has been met."""
        validation.fraction("momentum", self.momentum)
        if self.optimizer_state not in ("keep", "reset"):
            raise ValueError(f"optimizer_state is {self.optimizer_state!r}; allowed: 'keep', 'reset'")
        if self.makes_fresh_weights and self.model_builder is None:
            raise ValueError("averaging_strategy 'reset_weights' needs model_builder, which makes the fresh weights")
        check_callable("model_builder", self.model_builder, "a callable that returns a model")
        check_callable("on_event", self.on_event, "a callable that takes one event")
        validation.seconds("drain_timeout_s", self.drain_timeout_s)

    @property
    def makes_fresh_weights(self) -> bool:
        """Whether ``model_builder`` makes the new weights, in place of an average."""
        return self.averaging_strategy == "reset_weights"

    @property
    def resets_optimizer(self) -> bool:
        """Whether the optimizer's state is cleared whenever weights are replaced."""
        return self.optimizer_state == "reset" or self.makes_fresh_weights

    def takes_means(self, donor_count: int) -> bool:
        """Whether new weights are made from several models, where up to so many donate."""
        is_mean = self.averaging_strategy in ("mean", "weighted_mean")
        return is_mean and (donor_count > 1 or (donor_count == 1 and self.momentum > 0))

    def agreed(self) -> Mapping[str, Any]:
        """Return those that must be equal on all members, as JSON values."""
        return {"momentum": float(self.momentum), "resets_optimizer": self.resets_optimizer}


def check_callable(name: str, value: Any, allowed: str) -> None:
    """Raise TypeError for a value that is neither callable nor None."""
    if value is not None and not callable(value):
        raise TypeError(f"{name} is {value!r}; allowed: {allowed}")


@dataclass(slots=True)
class Timing:
    """Collects durations by name, in the form of torchgfn's ``timing`` option: name to a list of seconds."""

    seconds: dict[str, list[float]] | None = field(default=None)

    def __post_init__(self) -> None:
        if not isinstance(self.seconds, dict | None):
            raise TypeError(f"timing is {self.seconds!r:.80}; allowed: a dict, or None")

    def add(self, name: str, duration_s: float) -> None:
        """Append one duration, if the user asked for them."""
        if self.seconds is not None:
            self.seconds.setdefault(name, []).append(duration_s)
