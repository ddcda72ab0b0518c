"""Decides, in one-sided selective averaging, whether a rank replaces its weights, and which ranks are its donors.

Each rank decides on its own, based on its metric and the newest published metrics of other ranks. In a large group, it
compares itself with a random sample of `SAMPLE_COUNT` ranks.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_FLOOR, Decimal
from numbers import Integral
from typing import Any, Final, Literal, TypeAlias, get_args

from asyncdist import validation
from asyncdist.protocols.declared import Options, integer, number, one_of, option, or_none
from asyncdist.protocols.ranking import (
    WEIGHT_EXPONENT_LIMIT,
    JudgingRules,
    is_worse,
    order_worst_first,
    replacer_count,
)

#: Criterion by which a rank decides to replace its weights.
ReplacementMode: TypeAlias = Literal["age", "threshold", "worst_ratio"]
REPLACEMENT_MODES: Final[tuple[ReplacementMode, ...]] = get_args(ReplacementMode)

#: Maximum number of other ranks whose metrics a rank reads, unless it needs more donors.
SAMPLE_COUNT: Final = 32
#: Minimum number of ranks whose metrics a rank reads to choose donors in a large group, with the mode `"age"`.
AGE_SAMPLE_COUNT: Final = 8
#: Maximum number of donors if neither `donor_count` nor `donor_ratio` is given.
DEFAULT_DONOR_COUNT_MAX: Final = 8
DEFAULT_DONOR_RATIO: Final = 0.5

#: Function that samples a number of ranks without replacement, such as `random.Random.sample`.
Sample = Callable[[Sequence[int], int], list[int]]


def _ages(name: str, value: Any) -> tuple[int, int]:
    ages = value if isinstance(value, (tuple, list)) else ()
    are_integers = all(isinstance(age, Integral) and not isinstance(age, bool) for age in ages)
    if len(ages) != 2 or not are_integers or not 1 <= ages[0] <= ages[1]:
        validation.refuse(name, value, "two integers (shortest, longest) with 1 <= shortest <= longest")
    return int(ages[0]), int(ages[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class OneSidedRules(JudgingRules):
    """Options of one-sided selective averaging that determine when a rank replaces its weights, and its donors.

    Raises:
        ValueError: An option has the wrong type or is out of range.
    """

    replacement_mode: ReplacementMode = option(
        'When a rank is replaced. `"age"`: at the end of a lifetime drawn from `age_range`. `"threshold"`: if its '
        'metric is worse than `threshold_metric`. `"worst_ratio"`: if its metric is among the worst '
        "`replacement_ratio` of the metrics that it has read.",
        one_of(ReplacementMode),
        default="age",
    )
    age_range: tuple[int, int] = option(
        'For `"age"`: shortest and longest lifetime in steps. Each lifetime is drawn at random from this range.',
        _ages,
        default=(50, 150),
    )
    threshold_metric: float = option(
        'For `"threshold"`: limit in the metric\'s units. A rank is replaced if its metric is below the limit, or '
        'above it with `metric_mode="min"`.',
        number("a finite number", -validation.LARGEST),
        default=0.0,
    )
    donor_count: int | None = option(
        "Largest number of donors to draw. None: determined by `donor_ratio`.",
        or_none(integer(1, " or None")),
        default=None,
        group="donors",
    )
    donor_ratio: float | None = option(
        "Largest number of donors as a share of the group, above 0 and up to 1; rounded down to at least one donor. "
        "None: half of the group, at most 8 donors.",
        or_none(number("> 0 and <= 1, or None", validation.SMALLEST, 1.0)),
        default=None,
        group="donors",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions(Options):
    """Options of one-sided selective averaging for reading snapshots."""

    read_timeout_s: float = option(
        "Seconds for reading all donors, if their memory is not shared and they must answer.",
        validation.seconds,
        default=30.0,
        group="members and timeouts",
    )


@dataclass(frozen=True, slots=True)
class Choice:
    """Donors chosen for a replaced rank, and the parameters that determine their weights.

    Attributes:
        donors: Ranks of the donors, in ascending order. Empty for `reset_weights`.
        best: Donor whose integer and bool entries are copied, or -1 without donors.
        floor: Metric for which a donor's weight is 0, or None if all weights are 1.
        sign: 1.0 if larger metrics are better, -1.0 if smaller metrics are better.
        exponent: Weights are divided by two to this power, so that they fit into float32.
    """

    donors: tuple[int, ...]
    best: int
    floor: float | None = None
    sign: float = 1.0
    exponent: int = 0

    def weight(self, metric: float) -> float:
        """Return the weight of a donor's snapshot that was published with ``metric``.

        The snapshot may be newer than the decision to use this donor. The weight is 0 if ``metric`` is not finite or
        not better than `floor`.
        """
        if not math.isfinite(metric):
            return 0.0
        if self.floor is None:
            return 1.0
        mantissa, exponent = _gain(metric, self.floor, self.sign)
        if mantissa <= 0.0:
            return 0.0
        return math.ldexp(mantissa, min(exponent - self.exponent, WEIGHT_EXPONENT_LIMIT))


def _gain(metric: float, floor: float, sign: float) -> tuple[float, int]:
    """Return the mantissa and exponent of the gain of `metric` over `floor`, positive if `metric` is better."""
    gain = sign * (metric - floor)
    if math.isfinite(gain):
        return math.frexp(gain)
    mantissa, exponent = math.frexp(sign * (0.5 * metric - 0.5 * floor))
    return mantissa, exponent + 1


def must_replace(rank: int, metrics: Mapping[int, float], rules: OneSidedRules) -> bool:
    """Return whether `rank` must replace its weights because of its metric. Always False with the mode `age`.

    Args:
        metrics: Known metrics by rank, including the metric of `rank`.
    """
    if rules.replacement_mode == "threshold":
        return is_worse(metrics[rank], rules.threshold_metric, rules.metric_mode)
    return rules.replacement_mode == "worst_ratio" and rank in _worst(metrics, rules)


def donor_limit(member_count: int, rules: OneSidedRules) -> int:
    """Return the maximum number of donors, computed exactly from the decimal `donor_ratio` that the user wrote."""
    if rules.donor_count is not None:
        return int(rules.donor_count)
    ratio = DEFAULT_DONOR_RATIO if rules.donor_ratio is None else rules.donor_ratio
    exact = Decimal(repr(float(ratio))) * member_count
    count = max(1, int(exact.to_integral_value(ROUND_FLOOR)))
    return min(count, DEFAULT_DONOR_COUNT_MAX) if rules.donor_ratio is None else count


def sample_count(member_count: int, rules: OneSidedRules) -> int:
    """Return the maximum number of other ranks whose metrics a rank reads to judge itself and to choose donors."""
    limit = donor_limit(member_count, rules)
    if rules.replacement_mode == "age" and member_count - 1 > SAMPLE_COUNT:
        return max(AGE_SAMPLE_COUNT, 2 * limit)
    return max(SAMPLE_COUNT, limit)


def choose(
    rank: int, metrics: Mapping[int, float], member_count: int, rules: OneSidedRules, sample: Sample
) -> Choice | None:
    """Choose the ranks whose snapshots replace the weights of `rank`, and how to weight them.

    Donors are sampled from the ranks that have a finite metric and would not themselves be replaced. With `best_only`,
    the best of the sampled ranks is the only donor. With `weighted_mean`, a donor's weight is the difference between
    its metric and the worst metric among the sampled ranks and `rank`. Donors with weight 0 are omitted. If all weights
    are 0, all donors get weight 1 instead.

    Returns:
        The choice, or None if no other rank can be a donor.
    """
    if rules.averaging_strategy == "reset_weights":
        return Choice((), -1)
    replaced = _worst(metrics, rules)
    candidates = [
        other
        for other in sorted(metrics)
        if other != rank
        and math.isfinite(metrics[other])
        and other not in replaced
        and not (rules.replacement_mode == "threshold" and must_replace(other, metrics, rules))
    ]
    if not candidates:
        return None
    drawn = sorted(sample(candidates, min(donor_limit(member_count, rules), len(candidates))))
    judged = {other: metrics[other] for other in (*drawn, rank) if other in metrics}
    best = [other for other in order_worst_first(judged, rules.metric_mode) if other != rank][-1]
    if rules.averaging_strategy == "best_only":
        return Choice((best,), best)
    if rules.averaging_strategy == "mean":
        return Choice(tuple(drawn), best)
    return _weighted(rank, drawn, best, judged, rules)


def _weighted(rank: int, drawn: Sequence[int], best: int, metrics: Mapping[int, float], rules: OneSidedRules) -> Choice:
    """Return the donors for `weighted_mean`. Their weights are computed later, from their snapshots' metrics."""
    finite = {other: metrics[other] for other in metrics if other != rank or math.isfinite(metrics[other])}
    floor = metrics[order_worst_first(finite, rules.metric_mode)[0]]
    donors = tuple(other for other in drawn if metrics[other] != floor)
    if not donors:
        return Choice(tuple(drawn), best)
    sign = 1.0 if rules.metric_mode == "max" else -1.0
    exponent = _gain(metrics[best], floor, sign)[1]
    return Choice(donors, best, floor, sign, exponent if abs(exponent) > WEIGHT_EXPONENT_LIMIT else 0)


def _worst(metrics: Mapping[int, float], rules: OneSidedRules) -> tuple[int, ...]:
    if rules.replacement_mode != "worst_ratio":
        return ()
    count = replacer_count(len(metrics), rules.replacement_ratio)
    return order_worst_first(metrics, rules.metric_mode)[:count]
