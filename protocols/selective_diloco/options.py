"""Declares the options of :class:`protocols.SelectiveDiLoCoPolicy`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from asyncdist import validation
from asyncdist.protocols.declared import Options, function, like, option
from asyncdist.protocols.diloco.options import DiLoCoOptionNames, DiLoCoOptions
from asyncdist.protocols.metrics import Metric
from asyncdist.protocols.ranking import JudgingRules, MetricMode
from asyncdist.protocols.selective_diloco.donors import DifferenceStrategy, DonorRules

_CALLABLE = "a callable without arguments that evaluates the model on held-out data, or None"


class SelectiveDiLoCoOptionNames(DiLoCoOptionNames, total=False):
    """The options of :class:`protocols.SelectiveDiLoCoPolicy`, except ``average_every``."""

    metric: Callable[[], Metric] | None
    metric_mode: MetricMode
    averaging_strategy: DifferenceStrategy
    donor_ratio: float
    outlier_factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOptions(Options):
    """Options for measuring how much a rank's difference improves a held-out metric."""

    metric: Callable[[], Metric] | None = option(
        "Callable without arguments that evaluates the model's current weights on held-out data, the same on all "
        "ranks; for calls of `step` without `loss` or `score`.",
        function(_CALLABLE),
        default=None,
    )
    metric_mode: MetricMode = like(JudgingRules, "metric_mode")


def check_combination(own: DiLoCoOptions, average_every: int) -> None:
    """Raise ValueError if an option of DiLoCo makes it impossible to measure gains."""
    if own.outer_optimizer is None:
        raise ValueError(
            "outer_optimizer must be a factory, got None: a gain is measured from the anchor, which only an outer "
            "optimizer has. To average the weights, pass functools.partial(torch.optim.SGD, lr=1.0)"
        )
    if own.eager:
        validation.refuse(
            "eager", own.eager, "False, since eager ranks have no common anchor whose metric they could judge"
        )
    longest = average_every // own.fragments
    if own.overlap_steps > longest:
        allowed = (
            f"at most average_every // fragments ({longest}), since no other fragment may be in flight while the gain "
            "of a difference is measured"
        )
        validation.refuse("overlap_steps", own.overlap_steps, allowed)


__all__ = ["DonorRules", "SelectiveDiLoCoOptionNames", "TrialOptions", "check_combination"]
