"""Sorts ranks by their metrics, and computes the number of ranks to replace, for selective policies."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from typing import Final, Literal, TypeAlias, get_args

from asyncdist import validation
from asyncdist.protocols.declared import Options, one_of, option

#: Source of new weights: an average of the donors, the best donor, or a newly built model.
AveragingStrategy: TypeAlias = Literal["mean", "weighted_mean", "best_only", "reset_weights"]
STRATEGIES: Final[tuple[AveragingStrategy, ...]] = get_args(AveragingStrategy)
#: Whether larger or smaller metrics are better.
MetricMode: TypeAlias = Literal["max", "min"]

#: Donors' weights outside 2^-20 to 2^20 are rescaled, so that weight * value does not overflow float32.
WEIGHT_EXPONENT_LIMIT: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgingRules(Options):
    """Options of selective averaging policies for judging ranks by their metrics."""

    replacement_ratio: float = option(
        "Share of the n participants to replace, 0 to 1. The number of replaced ranks is ratio * n, rounded half up, "
        "from 1 to n - 1; 0 if the ratio is 0.",
        validation.fraction,
        default=0.2,
    )
    averaging_strategy: AveragingStrategy = option(
        'How new weights are made: `"mean"`: the mean of the donors. `"weighted_mean"`: a mean with weights '
        'proportional to the difference from the worst metric. `"best_only"`: the weights of the best donor. '
        '`"reset_weights"`: fresh weights from `model_builder`.',
        one_of(AveragingStrategy),
        default="mean",
    )
    metric_mode: MetricMode = option(
        'Direction of metrics that are passed without `loss=` or `score=`: `"max"` if a larger metric is better, '
        '`"min"` if a smaller metric is better. A rank whose metric is NaN or infinite is never a donor.',
        one_of(MetricMode),
        default="max",
    )


def replacer_count(participant_count: int, replacement_ratio: float) -> int:
    """Return the number of participants to replace: count times ratio, rounded half up, at least 1 and below the count.

    The result is 0 if the ratio is 0 or there are fewer than two participants. The ratio is treated as the decimal
    number that the user wrote: 0.29 * 50 is exactly 14.5 and gives 15, whereas the float product is below 14.5.
    """
    if participant_count < 2 or replacement_ratio == 0:
        return 0
    exact = Decimal(repr(float(replacement_ratio))) * participant_count
    return min(max(int(exact.to_integral_value(ROUND_HALF_UP)), 1), participant_count - 1)


def order_worst_first(metrics: Mapping[int, float], metric_mode: str = "max") -> tuple[int, ...]:
    """Return the ranks, sorted from the worst metric to the best.

    NaN and both infinities are equally bad, and worse than any finite number. If metrics are equal, the lower rank
    counts as worse, so that all ranks compute the same order.
    """
    finite = sorted([rank for rank, metric in metrics.items() if math.isfinite(metric)])
    finite.sort(key=metrics.__getitem__, reverse=metric_mode != "max")  # equal metrics remain in rank order
    if len(finite) == len(metrics):
        return tuple(finite)
    return (*sorted(metrics.keys() - finite), *finite)


def is_worse(metric: float, threshold: float, metric_mode: str) -> bool:
    """Return whether a metric is strictly worse than the threshold. NaN and infinite metrics always are."""
    if not math.isfinite(metric):
        return True
    return metric < threshold if metric_mode == "max" else metric > threshold
