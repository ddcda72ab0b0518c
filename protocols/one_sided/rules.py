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
from typing import Any, Final, Literal, TypeAlias, get_args

from asyncdist import validation
from asyncdist.protocols.declared import Options, number, one_of, option, or_none, whole
from asyncdist.protocols.ranking import (
    WEIGHT_EXPONENT_LIMIT,
    JudgingRules,
    is_worse,
    order_worst_first,
    replacer_count,
)

#: When a rank is replaced.
ReplacementMode: TypeAlias = Literal["age", "threshold", "worst_ratio"]
REPLACEMENT_MODES: Final[tuple[ReplacementMode, ...]] = get_args(ReplacementMode)

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


def _ages(name: str, value: Any) -> tuple[int, int]:
    if not _is_pair_of_ages(value):
        validation.refuse(name, value, "two whole numbers of steps, 1 <= shortest <= longest")
    return int(value[0]), int(value[1])


def _is_pair_of_ages(ages: Any) -> bool:
    if not isinstance(ages, (tuple, list)) or len(ages) != 2:
        return False
    return all(isinstance(age, Integral) and not isinstance(age, bool) for age in ages) and 1 <= ages[0] <= ages[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class OneSidedRules(JudgingRules):
    """Holds the options that decide who is replaced and by whom.

    Raises:
        ValueError: An option is of the wrong type or outside the allowed range; it names option, value and range.
    """

    replacement_mode: ReplacementMode = option(
        'When a rank is replaced. `"age"`: at the end of a life that was drawn from `age_range`. `"threshold"`: if its '
        'metric is worse than `threshold_metric`. `"worst_ratio"`: if its metric is among the worst '
        "`replacement_ratio` of the metrics that it knows.",
        one_of(ReplacementMode),
        default="age",
    )
    age_range: tuple[int, int] = option(
        'For `"age"`: the shortest and the longest life in steps, both included; drawn anew for each life.',
        _ages,
        default=(50, 150),
    )
    threshold_metric: float = option(
        'For `"threshold"`: a finite number in the metric\'s units. Worse is below it, or above it with '
        '`metric_mode="min"`.',
        number("a finite number", -validation.LARGEST),
        default=0.0,
    )
    donor_count: int | None = option(
        "The largest number of donors that are drawn; None: by `donor_ratio`.",
        or_none(whole(1, ", or None")),
        default=None,
        group="donors",
    )
    donor_ratio: float | None = option(
        "The same as a part of the group, this rank included: above 0, up to 1, rounded down, at least one donor. "
        "None: half of the group, at most 8.",
        or_none(number("None or a number above 0, up to 1", validation.SMALLEST, 1.0)),
        default=None,
        group="donors",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions(Options):
    """Holds the options for reading donors."""

    read_timeout_s: float = option(
        "Seconds in which all donors must be read, if they have to answer.",
        validation.seconds,
        default=30.0,
        group="members and timeouts",
    )


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
