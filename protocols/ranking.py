"""Compares ranks by their metrics, and counts how many are replaced; both selective policies use it.

Pure functions on plain values: no asyncio, no transport, no clock, no torch, no randomness.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from typing import Final, Literal, TypeAlias, get_args

from asyncdist import validation
from asyncdist.protocols.declared import Options, one_of, option

#: What takes the place of weights that are replaced.
AveragingStrategy: TypeAlias = Literal["mean", "weighted_mean", "best_only", "reset_weights"]
STRATEGIES: Final[tuple[AveragingStrategy, ...]] = get_args(AveragingStrategy)
#: Whether a larger metric is better, or a smaller one.
MetricMode: TypeAlias = Literal["max", "min"]

#: Weights outside 2^-20..2^20 are rescaled, so that weight * value stays inside float32.
WEIGHT_EXPONENT_LIMIT: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgingRules(Options):
    """Holds the options by which both selective policies judge."""

    replacement_ratio: float = option(
        "Share of the participants to replace, 0 to 1: of n, round-half-up(ratio * n), at least 1 and at most n - 1; "
        "none if it is 0.",
        validation.fraction,
        default=0.2,
    )
    averaging_strategy: AveragingStrategy = option(
        '`"mean"`; `"weighted_mean"`: weights proportional to the metric minus the worst metric; `"best_only"`; '
        '`"reset_weights"`: fresh weights from `model_builder` instead of an average.',
        one_of(AveragingStrategy),
        default="mean",
    )
    metric_mode: MetricMode = option(
        '`"max"` if a larger metric is better, `"min"` if a smaller metric is; applies to metrics passed without '
        "`loss=` or `score=`. A rank whose metric is NaN or infinite never donates.",
        one_of(MetricMode),
        default="max",
    )


def replacer_count(participant_count: int, replacement_ratio: float) -> int:
    """Return how many of the participants are replaced.

    Half rounds up, and the ratio is taken as the decimal that the user wrote: 0.29 of 50 is 14.5, which gives 15,
    where the binary product falls just short. The result leaves at least one to replace and one to give, except that
    ratio 0 replaces no rank (it once replaced one rank) and fewer than two participants have nothing to exchange.
    """
    if participant_count < 2 or replacement_ratio == 0:
        return 0
    exact = Decimal(repr(float(replacement_ratio))) * participant_count
    return min(max(int(exact.to_integral_value(ROUND_HALF_UP)), 1), participant_count - 1)


def order_worst_first(metrics: Mapping[int, float], metric_mode: str = "max") -> tuple[int, ...]:
    """Return the ranks, worst metric first.

    NaN and both infinities are equally bad and worse than any number: a rank that diverged to +inf has not won. Of
    equal metrics the lower rank counts as worse, so the order is total and the same wherever it is computed.
    """
    finite = sorted([rank for rank, metric in metrics.items() if math.isfinite(metric)])
    finite.sort(key=metrics.__getitem__, reverse=metric_mode != "max")  # which keeps the order of equal ones
    if len(finite) == len(metrics):
        return tuple(finite)
    return (*sorted(metrics.keys() - finite), *finite)


def best_of(metrics: Mapping[int, float], metric_mode: str = "max") -> int:
    """Return the last rank of :func:`order_worst_first`; `metrics` are not empty."""
    finite = [rank for rank, metric in metrics.items() if math.isfinite(metric)]
    if not finite:
        return max(metrics)
    best = (max if metric_mode == "max" else min)(map(metrics.__getitem__, finite))
    return max(rank for rank in finite if metrics[rank] == best)


def is_worse(metric: float, threshold: float, metric_mode: str) -> bool:
    """Tell whether a metric is strictly worse than the threshold; what is not finite always is."""
    if not math.isfinite(metric):
        return True
    return metric < threshold if metric_mode == "max" else metric > threshold
