"""Declares the options of :class:`protocols.EvolutionStrategyPolicy`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from asyncdist import validation
from asyncdist.protocols.declared import function, integer, like, number, one_of, option
from asyncdist.protocols.exchange.options import ExchangeOptions
from asyncdist.protocols.metrics import Metric
from asyncdist.protocols.options import MemberOptions
from asyncdist.protocols.ranking import JudgingRules, MetricMode
from asyncdist.protocols.step_info import PolicyEvent

#: Whether perturbations are weighted by their scores, or by the ranks of their scores.
Fitness: TypeAlias = Literal["score", "rank"]

FOREIGN_OPTIONS: Final = {
    **dict.fromkeys(
        ("popsize", "population_size", "pop_size"),
        "here pairs is the number of mirrored pairs of each rank; a step evaluates 2 * pairs * ranks weights",
    ),
    **dict.fromkeys(("stdev", "noise_stdev", "noise_std", "std", "std_init"), "here sigma is the standard deviation"),
    **dict.fromkeys(("lr", "learning_rate", "center_learning_rate"), "here the optimizer has the learning rate"),
    **dict.fromkeys(("ranking_method", "fitness_shaping"), "here fitness='rank' uses ranks instead of scores"),
    "average_every": "here each step is a round",
    "optimizer_state": "here the optimizer makes each step, so that its state is never cleared",
}


class EvolutionStrategyOptionNames(MemberOptions, total=False):
    """The options of :class:`protocols.EvolutionStrategyPolicy`."""

    sigma: float
    pairs: int
    fitness: Fitness
    seed: int
    metric: Callable[[], Metric] | None
    metric_mode: MetricMode
    on_event: Callable[[PolicyEvent], None] | None
    drain_timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EvolutionStrategyOptions(ExchangeOptions):
    """Options of an evolution strategy."""

    sigma: float = option(
        "Standard deviation of the perturbations of each parameter's values, above 0.",
        number("a number above 0", validation.SMALLEST),
        default=0.02,
        is_agreed=True,
    )
    pairs: int = option(
        "Number of mirrored pairs of perturbations that each rank evaluates in a step, from 1.",
        integer(1),
        default=4,
        is_agreed=True,
    )
    fitness: Fitness = option(
        'Values that weight the perturbations. `"score"`: the scores themselves. `"rank"`: the ranks of all scores of '
        "the step, from -0.5 to 0.5, so that outliers and the scale of the scores do not matter.",
        one_of(Fitness),
        default="score",
        is_agreed=True,
    )
    seed: int = option(
        "Seed for drawing the perturbations, an integer >= 0; must be equal on all members.",
        integer(0),
        default=0,
        is_agreed=True,
    )
    metric: Callable[[], Metric] | None = option(
        "Callable without arguments that evaluates the model's current weights; for calls of `step` without `loss` or "
        "`score`.",
        function("a callable without arguments that evaluates the model, or None"),
        default=None,
    )
    metric_mode: MetricMode = like(JudgingRules, "metric_mode")
