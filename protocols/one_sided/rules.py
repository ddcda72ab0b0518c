"""Decides who is replaced, and by whom, when each rank decides for itself.

Pure functions on plain values, as in `protocols.selective.rules`: no asyncio, no transport, no clock, no torch. Chance
is an argument. There is no coordinator: a rank knows its own metric and the newest ones that others have published,
and what two ranks know need not agree. In a group of more than `SAMPLE_COUNT` others a rank looks at so many of them,
drawn anew each time, so that a replacement costs it the same in a group of any size.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_FLOOR, Decimal
from numbers import Integral
from typing import Any, Final

from asyncdist import validation
from asyncdist.protocols.ranking import (
    METRIC_MODES,
    STRATEGIES,
    WEIGHT_EXPONENT_LIMIT,
    is_worse,
    order_worst_first,
    replacer_count,
)

REPLACEMENT_MODES: Final = ("age", "threshold", "worst_ratio")

#: Others whose newest metrics a rank looks at when it judges and chooses; more only where it draws more donors.
SAMPLE_COUNT: Final = 32
#: In a larger group one that is not judged by metrics looks at twice as many as it draws, or so many: some of them may
#: have nothing to give.
AGE_SAMPLE_COUNT: Final = 8
#: Donors that are drawn at most where neither their number nor their part was given.
DEFAULT_DONOR_COUNT_MAX: Final = 8
DEFAULT_DONOR_RATIO: Final = 0.5

#: Draws so many of the ranks, without repetition, as `random.Random.sample` does.
Sample = Callable[[Sequence[int], int], list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class OneSidedRules:
    """Holds the options that decide who is replaced and by whom.

    Args:
        replacement_mode: `"age"`, `"threshold"` or `"worst_ratio"`; see `is_dying`.
        age_range: The shortest and the longest life, in steps; each life is drawn anew.
        threshold_metric: For `"threshold"`: what a metric must not be worse than.
        replacement_ratio: For `"worst_ratio"`: part of those with a metric that is replaced, 0..1, as in
            `protocols.ranking.replacer_count`.
        averaging_strategy: One of `protocols.ranking.STRATEGIES`.
        metric_mode: `"max"` when a larger metric is better, `"min"` when a smaller one is.
        donor_count: How many are drawn; None for `donor_ratio`.
        donor_ratio: Part of the members, this rank included, that is drawn: rounded down, and at least one. None for
            `DEFAULT_DONOR_RATIO`, and no more than `DEFAULT_DONOR_COUNT_MAX`.

    Raises:
        ValueError: An option is of the wrong type or outside what is allowed; it names option, value and range.
    """

    replacement_mode: str = "age"
    age_range: tuple[int, int] = (50, 150)
    threshold_metric: float = 0.0
    replacement_ratio: float = 0.2
    averaging_strategy: str = "mean"
    metric_mode: str = "max"
    donor_count: int | None = None
    donor_ratio: float | None = None

    def __post_init__(self) -> None:
        """Refuse bad options here, before any rank is judged by them."""
        for name, allowed in (
            ("replacement_mode", REPLACEMENT_MODES),
            ("averaging_strategy", STRATEGIES),
            ("metric_mode", METRIC_MODES),
        ):
            if getattr(self, name) not in allowed:
                validation.refuse(name, getattr(self, name), ", ".join(map(repr, allowed)))
        low, least = -validation.LARGEST, validation.SMALLEST
        threshold_metric = validation.real("threshold_metric", self.threshold_metric, "a finite number", low=low)
        donor_ratio = self.donor_ratio
        if donor_ratio is not None:
            words = "None or a number above 0, up to 1"
            donor_ratio = validation.real("donor_ratio", donor_ratio, words, low=least, high=1.0)
        donor_count = self.donor_count
        if donor_count is not None:
            donor_count = validation.count("donor_count", donor_count, besides=", or None")
        # Kept as Python's own numbers, which members compare as text.
        object.__setattr__(self, "threshold_metric", threshold_metric)
        object.__setattr__(self, "replacement_ratio", validation.fraction("replacement_ratio", self.replacement_ratio))
        object.__setattr__(self, "donor_count", donor_count)
        object.__setattr__(self, "donor_ratio", donor_ratio)
        ages: Any = self.age_range
        if not _is_pair_of_ages(ages):
            validation.refuse("age_range", ages, "two whole numbers of steps, 1 <= shortest <= longest")
        object.__setattr__(self, "age_range", (int(ages[0]), int(ages[1])))


def _is_pair_of_ages(ages: Any) -> bool:
    if not isinstance(ages, (tuple, list)) or len(ages) != 2:
        return False
    return all(isinstance(age, Integral) and not isinstance(age, bool) for age in ages) and 1 <= ages[0] <= ages[1]


@dataclass(frozen=True, slots=True)
class Choice:
    """Describes what replaces a rank.

    Attributes:
        donors: Ascending; empty for `reset_weights`.
        best: The donor whose integer and bool entries are taken; -1 without donors.
        floor: What a donor's weight is counted from; None where all weigh 1.
        sign: 1.0 if larger metrics are better, -1.0 if smaller ones are.
        exponent: Of the power of two that gains are divided by, so that weights stay inside float32.
    """

    donors: tuple[int, ...]
    best: int
    floor: float | None = None
    sign: float = 1.0
    exponent: int = 0

    def weight(self, metric: float) -> float:
        """Weigh the snapshot that is really read, by the metric that was published with it.

        That may be a newer one than the choice was made by. It weighs 0 if there is nothing to gain from it any more.
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
    """Return mantissa and exponent of the gain of `metric` over `floor`, which may exceed the largest float."""
    gain = sign * (metric - floor)
    if math.isfinite(gain):
        return math.frexp(gain)
    mantissa, exponent = math.frexp(sign * (0.5 * metric - 0.5 * floor))
    return mantissa, exponent + 1


def is_among_worst(rank: int, metrics: Mapping[int, float], rules: OneSidedRules) -> bool:
    """Tell whether `rank` is one of those that `worst_ratio` replaces.

    Args:
        rank: Any of them.
        metrics: Rank to metric, of every rank that has one.
        rules: The options.
    """
    return rank in _worst(metrics, rules)


def is_dying(rank: int, metrics: Mapping[int, float], rules: OneSidedRules) -> bool:
    """Judge a rank by its metric.

    Args:
        rank: Who is judged.
        metrics: Rank to metric: its own, and the newest that each of the others has published.
        rules: The options. `age` does not judge metrics: the answer is False.
    """
    if rules.replacement_mode == "threshold":
        return is_worse(metrics[rank], rules.threshold_metric, rules.metric_mode)
    return rules.replacement_mode == "worst_ratio" and is_among_worst(rank, metrics, rules)


def donor_limit(member_count: int, rules: OneSidedRules) -> int:
    """Return how many donors are drawn at most; the ratio is taken as the decimal that the user wrote."""
    if rules.donor_count is not None:
        return int(rules.donor_count)
    ratio = DEFAULT_DONOR_RATIO if rules.donor_ratio is None else rules.donor_ratio
    exact = Decimal(repr(float(ratio))) * member_count
    count = max(1, int(exact.to_integral_value(ROUND_FLOOR)))
    return min(count, DEFAULT_DONOR_COUNT_MAX) if rules.donor_ratio is None else count


def sample_count(member_count: int, rules: OneSidedRules) -> int:
    """Return how many others a rank looks at, at most, when it judges itself and chooses its donors."""
    limit = donor_limit(member_count, rules)
    if rules.replacement_mode == "age" and member_count - 1 > SAMPLE_COUNT:
        return max(AGE_SAMPLE_COUNT, 2 * limit)
    return max(SAMPLE_COUNT, limit)


def choose(
    rank: int, metrics: Mapping[int, float], member_count: int, rules: OneSidedRules, sample: Sample
) -> Choice | None:
    """Choose what replaces `rank`.

    Donors are drawn among those with a finite metric whom the same rules would not replace: an average of the dying
    is no help. `best_only` takes the best of the drawn. For `weighted_mean` a donor weighs what it gains over the
    worst of the drawn and the replaced; those that gain nothing are left out, unless none gains anything.

    Args:
        rank: Who is replaced.
        metrics: As for `is_dying`; the own one may be missing, in a rank that has lived for less than a cadence.
        member_count: Of the group, this rank included.
        rules: The options.
        sample: Draws donors.

    Returns:
        None where no other rank has anything to give.
    """
    if rules.averaging_strategy == "reset_weights":
        return Choice((), -1)
    dying = _worst(metrics, rules)
    candidates = [
        other
        for other in sorted(metrics)
        if other != rank
        and math.isfinite(metrics[other])
        and other not in dying
        and not (rules.replacement_mode == "threshold" and is_dying(other, metrics, rules))
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
    """Fix what weights are counted from: the snapshots that are read may come with newer metrics."""
    finite = {other: metrics[other] for other in metrics if other != rank or math.isfinite(metrics[other])}
    floor = metrics[order_worst_first(finite, rules.metric_mode)[0]]
    donors = tuple(other for other in drawn if metrics[other] != floor)
    if not donors:
        return Choice(tuple(drawn), best)
    sign = 1.0 if rules.metric_mode == "max" else -1.0
    exponent = _gain(metrics[best], floor, sign)[1]
    return Choice(donors, best, floor, sign, exponent if abs(exponent) > WEIGHT_EXPONENT_LIMIT else 0)


def _worst(metrics: Mapping[int, float], rules: OneSidedRules) -> tuple[int, ...]:
    """Return the ranks that `worst_ratio` replaces; none in the other modes."""
    if rules.replacement_mode != "worst_ratio":
        return ()
    count = replacer_count(len(metrics), rules.replacement_ratio)
    return order_worst_first(metrics, rules.metric_mode)[:count]
