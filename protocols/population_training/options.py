"""Declares the options of :class:`protocols.PopulationTrainingPolicy`."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from asyncdist import validation
from asyncdist.protocols.declared import Options, function, number, option
from asyncdist.protocols.options import MemberOptions
from asyncdist.protocols.population_training.hyperparameters import (
    Choice,
    Given,
    Range,
    Space,
    Value,
    is_number,
    spaces_of,
)
from asyncdist.protocols.ranking import MetricMode
from asyncdist.protocols.step_info import PolicyEvent

#: Function that makes new hyperparameters from a donor's, with a random generator.
ExploreFunction: TypeAlias = Callable[[dict[str, Any], random.Random], Mapping[str, Any]]

#: Names of options in other libraries and policies, each with a hint for the error that is raised if it is passed here.
FOREIGN_OPTIONS: Final = {
    "perturbation_interval": "here average_every is the number of steps between reports",
    "time_attr": "here average_every counts steps",
    "mode": "here metric_mode is 'max' or 'min', and step(loss=...) or step(score=...) sets the direction regardless "
    "of it",
    "hyperparam_mutations": "here hyperparameters={'lr': (1e-4, 1e-1)} sets the optimizer's hyperparameters, and "
    "custom_hyperparameters the ones that the training loop reads from policy.hyperparameters",
    "hyperparam_bounds": "here hyperparameters={'lr': (low, high)} has the bounds",
    "quantile_fraction": "here quantile is the share of ranks that are replaced, and of ranks that are copied",
    "perturbation_factors": "here perturb=(0.8, 1.25) has the factors",
    "custom_explore_fn": "here explore is a function (hyperparameters, generator) -> hyperparameters",
    "synch": "here no rank waits for another; use AverageAllPolicy or DiLoCoPolicy for rounds in step",
    "require_attrs": "here step() raises an error if a metric is missing",
    "log_config": "here recordings have all hyperparameters: asyncdist query",
    **dict.fromkeys(("frequencies", "num_populations"), "here periods are the numbers of rounds of sub-populations"),
    "burn_in_period": "here open the policy after the burn-in",
    "replacement_ratio": "here quantile is the share of ranks that are replaced",
    "averaging_strategy": "here each replaced rank copies one of the best ranks",
    "momentum": "here a replaced rank copies all weights; the optimizer's momentum is a hyperparameter",
    "optimizer_state": "here a replaced rank copies the optimizer's state",
    "model_builder": "here a replaced rank copies one of the best ranks",
    "route": "here each replaced rank gets the state of one rank from that rank",
    "threshold": "here ranks are replaced whatever the worst metric is",
    "cooldown": "here average_every is the time between rounds",
    **dict.fromkeys(
        ("islands", "island_size", "migrate_every", "migration"),
        "here periods=(1, 10) divides the ranks into sub-populations; pass group= to train several populations",
    ),
}


class PopulationTrainingOptions(MemberOptions, total=False):
    """The options of :class:`protocols.PopulationTrainingPolicy`, except ``average_every`` and ``metric``."""

    hyperparameters: Mapping[str, Given] | None
    custom_hyperparameters: Mapping[str, Given] | None
    initial: Mapping[str, Value] | None
    quantile: float
    perturb: tuple[float, ...]
    resample_probability: float
    explore: ExploreFunction | None
    periods: tuple[int, ...]
    seed: int
    lr_scheduler: Any
    metric_mode: MetricMode
    quorum: float
    grace_s: float | None
    max_report_age_s: float
    round_timeout_s: float
    drain_timeout_s: float
    on_event: Callable[[PolicyEvent], None] | None
    coordinator: int | None
    successors: Sequence[int]


def _spaces(name: str, value: Any) -> Any:
    return spaces_of(name, {} if value is None else value)


def _factors(name: str, value: Any) -> tuple[float, ...]:
    allowed = "a tuple of factors above 0, such as (0.8, 1.25)"
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        validation.refuse(name, value, allowed, TypeError)
    return tuple(validation.real(name, each, allowed, low=validation.SMALLEST) for each in value)


def _periods(name: str, value: Any) -> tuple[int, ...]:
    allowed = "numbers of rounds >= 1, such as (1, 10, 25, 50), or ()"
    if isinstance(value, str) or not isinstance(value, Sequence):
        validation.refuse(name, value, allowed, TypeError)
    for each in value:
        if isinstance(each, bool) or not isinstance(each, int) or each < 1:
            validation.refuse(name, value, allowed)
    return tuple(value)


def _initial(name: str, value: Any) -> Any:
    if not isinstance(value, Mapping | None):
        validation.refuse(name, value, 'a dict such as {"lr": 1e-3}, or None', TypeError)
    return dict(value or {})


@dataclass(frozen=True, slots=True, kw_only=True)
class ExploringOptions(Options):
    """Options for the hyperparameters and for copying and changing them."""

    hyperparameters: Mapping[str, Space] = option(
        "Hyperparameters of the optimizer, by name, each with its values: `(low, high)`, a list of choices, "
        '`protocols.Range`, `protocols.Choice`, or a callable that gets a `random.Random`. Names: `"lr"`, '
        '`"weight_decay"`, `"betas[0]"`, and all other numbers in the optimizer\'s parameter groups.',
        _spaces,
        default=None,
    )
    custom_hyperparameters: Mapping[str, Space] = option(
        "Hyperparameters of the training loop, written in the same way, which the loop reads from "
        "`policy.hyperparameters`.",
        _spaces,
        default=None,
    )
    initial: Mapping[str, Value] = option(
        "First values on this rank, by name. The other values are drawn, depending on `seed` and the rank.",
        _initial,
        default=None,
        group="exploration",
    )
    quantile: float = option(
        "Share of the n participants that are replaced, 0 to 0.5; as many are copied. The number is n * quantile, "
        "rounded half up, from 1 to n / 2. With 0, no rank is replaced: all train with their first hyperparameters.",
        number("a number from 0 to 0.5", 0.0, 0.5),
        default=0.25,
        is_agreed=True,
    )
    periods: tuple[int, ...] = option(
        "Time scales (MF-PBT): the ranks are divided into as many sub-populations of consecutive ranks, and each of "
        "them copies and explores only after its number of rounds, such as `(1, 10, 25, 50)`. Empty: one population "
        "that evolves in each round.",
        _periods,
        default=(),
        is_agreed=True,
        group="exploration",
    )
    perturb: tuple[float, ...] = option(
        "Factors by one of which a copied hyperparameter is multiplied; the product is clipped to the range. In a list "
        "of choices, a factor above 1 moves to the next value, one below 1 to the previous value.",
        _factors,
        default=(0.8, 1.25),
        is_agreed=True,
        group="exploration",
    )
    resample_probability: float = option(
        "Probability that a copied hyperparameter is drawn again instead of being perturbed. The value 0, which no "
        "factor changes, is always drawn again.",
        validation.fraction,
        default=0.25,
        is_agreed=True,
        group="exploration",
    )
    explore: ExploreFunction | None = option(
        "Function that gets the donor's hyperparameters as a dict and a `random.Random`, and returns a dict of new "
        "hyperparameters, which are clipped to their ranges; replaces `perturb` and `resample_probability`. Or "
        "`protocols.BayesianExplore()`.",
        function("None or a function (hyperparameters, generator) -> hyperparameters"),
        default=None,
        group="exploration",
    )
    seed: int = option(
        "Seed of all random choices, which depend on nothing else but the rank, its iteration and the round.",
        validation.whole,
        default=0,
        is_agreed=True,
        group="exploration",
    )
    lr_scheduler: Any = option(
        'Scheduler of the learning rate, if there is one and `"lr"` is a hyperparameter. The hyperparameter is then '
        "the scheduler's base learning rate.",
        lambda name, value: value,
        default=None,
        group="exploration",
    )

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        spaces = self.spaces
        if not spaces:
            raise ValueError(
                "hyperparameters must name at least one hyperparameter, got none; pass "
                "hyperparameters={'lr': (1e-4, 1e-1)}, or train with AsyncSelectiveAveragingPolicy"
            )
        if len(spaces) < len(self.hyperparameters) + len(self.custom_hyperparameters):
            both = min(self.hyperparameters.keys() & self.custom_hyperparameters.keys())
            raise ValueError(
                f"custom_hyperparameters must not contain names from hyperparameters, got {both!r}; rename one"
            )
        unknown = self.initial.keys() - spaces.keys()
        if unknown:
            meant = validation.meant(min(unknown), spaces.keys())
            raise ValueError(f"initial must name hyperparameters, got {min(unknown)!r}; {meant}")
        initial = {name: spaces[name].check(f"initial[{name!r}]", value) for name, value in self.initial.items()}
        object.__setattr__(self, "initial", initial)
        for name, space in self.hyperparameters.items():
            wrong = [each for each in space.values if not is_number(each)] if isinstance(space, Choice) else []
            if wrong:
                raise TypeError(
                    f"the choices of hyperparameter {name!r} must be numbers, which the policy writes into the "
                    f"optimizer, got {wrong[0]!r}"
                )

    def check_factors(self) -> None:
        """Raise ValueError if a factor in ``perturb`` takes every value of a hyperparameter out of its range."""
        ranges = {name: space for name, space in self.spaces.items() if isinstance(space, Range)}
        for name, space in ranges.items() if self.explore is None else ():
            leaving = [factor for factor in self.perturb if space.leaves(factor)]
            if leaving:
                raise ValueError(
                    f"each factor in perturb must keep some value of {name!r} within its range ({space.low!r}, "
                    f"{space.high!r}), got {leaving[0]!r}; use a factor nearer to 1"
                )

    @property
    def spaces(self) -> dict[str, Space]:
        """Possible values of all hyperparameters, by name: the optimizer's, then the training loop's."""
        return {**self.hyperparameters, **self.custom_hyperparameters}
