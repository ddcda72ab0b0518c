"""Declares the options that several policies share, and lists the options of each policy for type checkers.

A subclass of :class:`Options` declares options (see :mod:`protocols.declared`). A ``TypedDict`` repeats their names and
types for functions with ``**options``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, TypedDict

import torch
from torch import nn

from asyncdist import Group, World, validation
from asyncdist.protocols.declared import Options, function, instance, integer, like, one_of, option, or_none
from asyncdist.protocols.metrics import Metric
from asyncdist.protocols.one_sided.selection import ReplacementMode
from asyncdist.protocols.ranking import AveragingStrategy as AveragingStrategy, JudgingRules, MetricMode as MetricMode
from asyncdist.protocols.selective.islands.layout import MigrationRoute as MigrationRoute
from asyncdist.protocols.selective.selection import Route as Route
from asyncdist.protocols.step_info import PolicyEvent

#: Parameters to average: all, or only those that require a gradient when the policy is created.
Parameters: TypeAlias = Literal["all", "trainable"]
#: Function for ``"reset_weights"`` that returns a model of the same layout, or a pair (model, optimizer).
ModelBuilder: TypeAlias = Callable[[], nn.Module | tuple[nn.Module, torch.optim.Optimizer]]
#: Whether the optimizer's state is kept or cleared when weights are replaced.
OptimizerState: TypeAlias = Literal["keep", "reset"]
#: Maximum length of a policy's name, because one message contains all values on which the members agree.
_NAME_LENGTH_MAX: Final = 200

_MEMBERS: Final = "members and timeouts"


class StartOptions(TypedDict, total=False):
    """The options of all policies, except ``group``."""

    name: str
    world: World | None
    start_timeout_s: float
    parameters: Parameters


class MemberOptions(StartOptions, total=False):
    """Options that every policy accepts."""

    group: Group | None


class MeasuredOptions(MemberOptions, total=False):
    """The options of :class:`protocols.SpawnPolicy`, except ``average_every``."""

    metric: Callable[[], Metric] | None
    metric_mode: MetricMode


class AverageAllOptions(MemberOptions, total=False):
    """The options of :class:`protocols.AverageAllPolicy`, except ``average_every``."""

    optimizer_state: OptimizerState
    on_event: Callable[[PolicyEvent], None] | None


class ReplacementOptions(TypedDict, total=False):
    """Options for choosing the replaced ranks and their new weights. torchgfn's policy has them too."""

    replacement_ratio: float
    averaging_strategy: AveragingStrategy
    momentum: float
    threshold: float | None
    cooldown: int
    model_builder: ModelBuilder | None
    timing: dict[str, list[float]] | None


class RoundOptions(TypedDict, total=False):
    """Options of selective averaging for metrics, timeouts and other details of a round."""

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
    """Options of selective averaging for members, islands and the coordinator."""

    islands: int | None
    island_size: int | None
    migrate_every: int | None
    migration: MigrationRoute | None
    coordinator: int | None
    successors: Sequence[int]


class ReplicaOptions(ReplacementOptions, RoundOptions, total=False):
    """Options of selective averaging that also apply to replicas of several ranks."""


class SelectiveOptions(ReplicaOptions, PopulationOptions, total=False):
    """The options of :class:`protocols.AsyncSelectiveAveragingPolicy`, except ``average_every`` and ``metric``."""


class ReadingOptions(TypedDict, total=False):
    """Options of one-sided selective averaging that torchgfn's policies do not have."""

    replacement_mode: ReplacementMode
    donor_count: int | None
    donor_ratio: float | None
    metric: Callable[[], Metric] | None
    metric_mode: MetricMode
    optimizer_state: OptimizerState
    read_timeout_s: float
    drain_timeout_s: float
    on_event: Callable[[PolicyEvent], None] | None
    timing: dict[str, list[float]] | None


class OneSidedOptions(ReadingOptions, MemberOptions, total=False):
    """The options of :class:`protocols.OneSidedSelectiveAveragingPolicy`, except ``average_every``."""

    age_range: tuple[int, int]
    threshold_metric: float
    replacement_ratio: float
    averaging_strategy: AveragingStrategy
    momentum: float
    model_builder: ModelBuilder | None


def _text(name: str, value: Any) -> Any:
    instance(str, "a string")(name, value)
    if len(value) > _NAME_LENGTH_MAX:
        validation.refuse(name, value, f"a string of up to {_NAME_LENGTH_MAX} characters")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonOptions(Options):
    """Options of all policies."""

    average_every: int = option(
        "Number of steps between due steps: step i, counted from 0, is due if (i + 1) % average_every == 0. In a due "
        "step, a rank reports its metric, publishes its snapshot, or averages.",
        integer(1),
        is_agreed=True,
    )
    metric: Callable[[], Metric] | None = option(
        "Callable without arguments that returns the metric for calls of `step` without a metric.",
        function("None or a callable without arguments (pass metric values to step())"),
        default=None,
    )
    metric_mode: MetricMode = like(JudgingRules, "metric_mode")
    name: str = option(
        "Name of the policy in reports, up to 200 characters, equal on all members. If several policies of one class "
        "are open on the same ranks, each needs its own name, so that a restarted rank finds its policy.",
        _text,
        default="",
        group=_MEMBERS,
    )
    group: Group | None = option(
        "Ranks that take part; all ranks by default.",
        or_none(instance(Group, "a Group or None")),
        default=None,
        group=_MEMBERS,
    )
    world: World | None = option(
        "World of this rank; the current world by default.",
        or_none(instance(World, "a World or None")),
        default=None,
        group=_MEMBERS,
    )
    start_timeout_s: float = option(
        "Seconds to wait for the last member at the start.", validation.seconds, default=60.0, group=_MEMBERS
    )
    parameters: Parameters = option(
        'Parameters to average: `"all"`, or `"trainable"`, the parameters that require a gradient when the policy is '
        "created (as with LoRA). The other parameters must be equal on all members, and are neither sent nor changed.",
        one_of(Parameters),
        default="all",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragingOptions(Options):
    """Options for replacing a rank's weights, and for reporting events and durations."""

    averaging_strategy: AveragingStrategy = like(JudgingRules, "averaging_strategy")
    momentum: float = option(
        "Share of the rank's own weights, 0 to 1: new weights = momentum * own + (1 - momentum) * average. Momentum "
        "is 0 if the own weights or the optimizer's state are not finite (`StepInfo.recovered`).",
        validation.fraction,
        default=0.0,
        is_agreed=True,
    )
    optimizer_state: OptimizerState = option(
        'Optimizer\'s state when weights are replaced: `"keep"`, or `"reset"` to clear it in place. It is always '
        'cleared with `averaging_strategy="reset_weights"`.',
        one_of(OptimizerState),
        default="keep",
    )
    model_builder: ModelBuilder | None = option(
        'Callable for `"reset_weights"` that returns a model of the same layout, or the pair (model, optimizer). It is '
        "also called once when the policy is created, to compare the layouts.",
        function("None or a callable that returns a model"),
        default=None,
        group="donors",
    )
    on_event: Callable[[PolicyEvent], None] | None = option(
        "Callable that receives each event of this rank (`protocols.PolicyEvent`) inside `step`. A snapshot of a model "
        "on a GPU is reported at a later safe point, when its copy is complete.",
        function("None or a callable that takes one event"),
        default=None,
    )
    timing: dict[str, list[float]] | None = option(
        "Dict that receives a list of durations in seconds for each of `snapshot` or `publish`, `read` and `apply`.",
        or_none(instance(dict, "a dict or None")),
        default=None,
        group=_MEMBERS,
    )
    drain_timeout_s: float = option(
        "Seconds to wait, when leaving, for ranks that still receive this rank's snapshot.",
        validation.seconds,
        default=10.0,
        group=_MEMBERS,
    )

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        if self.makes_fresh_weights and self.model_builder is None:
            raise ValueError(
                "with averaging_strategy='reset_weights', model_builder must be a callable that returns a model, got "
                "None"
            )

    @property
    def makes_fresh_weights(self) -> bool:
        """True if new weights are built by ``model_builder`` instead of averaged."""
        return self.averaging_strategy == "reset_weights"

    @property
    def resets_optimizer(self) -> bool:
        """True if the optimizer's state is cleared whenever weights are replaced."""
        return self.optimizer_state == "reset" or self.makes_fresh_weights

    def takes_means(self, donor_count: int) -> bool:
        """Return whether new weights can be a mean of several models, with at most ``donor_count`` donors."""
        is_mean = self.averaging_strategy in ("mean", "weighted_mean")
        return is_mean and (donor_count > 1 or (donor_count == 1 and self.momentum > 0))

    def agreed(self) -> dict[str, Any]:
        """Return the options that must be equal on all members, by name, as JSON values."""
        return {**Options.agreed(self), "resets_optimizer": self.resets_optimizer}


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorOptions(Options):
    """Options for choosing the coordinator."""

    coordinator: int | None = option(
        "Rank outside the group that coordinates with `await protocols.coordinate(members)` instead of training; by "
        "default, the group's first member coordinates.",
        or_none(integer(0, " or None")),
        default=None,
        group="coordinator",
        is_agreed=True,
    )
    successors: tuple[int, ...] = option(
        "Members that take over first, in this order, if the coordinator is lost or stops.",
        validation.ranks,
        default=(),
        group="coordinator",
        is_agreed=True,
    )
