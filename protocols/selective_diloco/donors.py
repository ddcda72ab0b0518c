"""Chooses the donors of selective DiLoCo and their weights, from all ranks' reports on their differences.

A report contains the held-out score of the anchor before and after a step along the rank's difference. Larger scores
are better. The *gain* of a rank is the second score minus the first. A rank is left out of a round if:

- its difference or its gain is not finite, or its gain is not positive;
- the norm of its difference is above ``outlier_factor`` times the median norm of all ranks; or
- enough other ranks have larger gains (``donor_ratio``, and ``averaging_strategy="best_only"``).

The choice depends only on the reports and options, so a new leader repeats the choice of a lost leader.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import ROUND_FLOOR, Decimal
from typing import Final, Literal, NamedTuple, TypeAlias

from asyncdist import validation
from asyncdist.protocols.declared import Options, number, one_of, option
from asyncdist.protocols.exchange.ledger import Report
from asyncdist.protocols.ranking import order_worst_first

#: Weights of the donors' differences: proportional to their gains, all equal, or all weight on the best difference.
DifferenceStrategy: TypeAlias = Literal["weighted_mean", "mean", "best_only"]

#: Largest ignored difference between the ranks' scores of identical weights, as a share of the largest score.
_SCORE_TOLERANCE: Final = 1e-3
#: Number of consecutive rounds in which ranks score identical weights differently before a warning is logged.
_UNEQUAL_COUNT: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class DonorRules(Options):
    """Options for choosing the donors of selective DiLoCo."""

    averaging_strategy: DifferenceStrategy = option(
        'Weights of the donors: `"weighted_mean"` (proportional to their gains), `"mean"` (equal), or `"best_only"` '
        "(only the difference with the largest gain is used).",
        one_of(DifferenceStrategy),
        default="weighted_mean",
        is_agreed=True,
    )
    donor_ratio: float = option(
        "Largest number of donors as a share of the ranks, above 0 and up to 1; rounded down to at least one donor. "
        "Ranks without a gain are never donors.",
        number("> 0 and <= 1", validation.SMALLEST, 1.0),
        default=1.0,
        group="donors",
        is_agreed=True,
    )
    outlier_factor: float = option(
        "Limit as a multiple, at least 1, of a median. A rank is left out if the norm of its difference is above this "
        "multiple of the median norm. In a weighted mean, gains are limited to this multiple of the donors' median "
        "gain. Infinity sets no limit.",
        number(">= 1, possibly infinite", 1.0, math.inf),
        default=3.0,
        group="donors",
        is_agreed=True,
    )


class Choice(NamedTuple):
    """Names the donors of a round, and why other ranks are left out.

    Attributes:
        weights: Weight of each donor, above 0, by rank.
        left_out: Reason for leaving out each other rank, by rank.
    """

    weights: dict[int, float]
    left_out: dict[int, str]


def gain_of(report: Report) -> float:
    """Return how much a rank's difference improves its score, or NaN if this is unknown or not finite."""
    if len(report.scores) != 2:
        return math.nan
    anchor, moved = report.scores
    gain = moved - anchor
    return gain if math.isfinite(gain) else math.nan


def donor_limit(rank_count: int, rules: DonorRules) -> int:
    """Return the largest number of donors. ``donor_ratio`` is multiplied exactly, as a decimal number."""
    if rules.averaging_strategy == "best_only":
        return 1
    exact = Decimal(repr(float(rules.donor_ratio))) * rank_count
    return max(1, int(exact.to_integral_value(ROUND_FLOOR)))


def choose_donors(reports: Mapping[int, Report], rules: DonorRules) -> Choice:
    """Return the donors of a round and their weights.

    With ``"weighted_mean"``, each reported weight is multiplied by the donor's gain over the largest gain. Equal gains
    therefore give exactly the reported weights. If no rank has scores, because the fragment consists of buffers, all
    ranks are donors.
    """
    norms = {rank: report.norm for rank, report in reports.items() if math.isfinite(report.norm)}
    if norms and not any(report.scores for report in reports.values()):
        others = reports.keys() - norms.keys()
        return Choice(
            {rank: reports[rank].weight for rank in norms}, dict.fromkeys(others, "its values are not finite")
        )
    moved = [norm for norm in norms.values() if norm > 0]
    limit = rules.outlier_factor * statistics.median(moved) if moved else math.inf
    left_out: dict[int, str] = {}
    gains: dict[int, float] = {}
    for rank, report in reports.items():
        gain = gain_of(report)
        if rank not in norms:
            left_out[rank] = "its difference is not finite"
        elif math.isnan(gain):
            left_out[rank] = "its gain is not finite"
        elif gain <= 0:
            left_out[rank] = f"its gain is {gain:.3g}"
        elif report.norm > limit:
            left_out[rank] = f"the norm of its difference is {report.norm:.3g}, and the limit is {limit:.3g}"
        else:
            gains[rank] = gain
    for rank in order_worst_first(gains)[: -donor_limit(len(reports), rules)]:
        left_out[rank] = f"enough ranks have a larger gain than {gains.pop(rank):.3g}"
    weights = {rank: reports[rank].weight * share for rank, share in _shares(gains, rules).items()}
    for rank in [rank for rank, weight in weights.items() if not weight > 0]:
        del weights[rank]
        left_out[rank] = f"its gain, {gains[rank]:.3g}, is too small compared with the other gains"
    return Choice(weights, left_out)


def _shares(gains: Mapping[int, float], rules: DonorRules) -> dict[int, float]:
    """Return the factor, at most 1, of each donor's reported weight."""
    if rules.averaging_strategy != "weighted_mean" or not gains:
        return dict.fromkeys(gains, 1.0)
    limit = rules.outlier_factor * statistics.median_low(gains.values())
    bounded = {rank: min(gain, limit) for rank, gain in gains.items()}
    largest = max(bounded.values())
    return {rank: gain / largest for rank, gain in bounded.items()}


class AnchorScores:
    """Detects whether ranks have different held-out data, and therefore score the same anchor differently."""

    def __init__(self) -> None:
        self._count: int | None = 0  # consecutive rounds with unequal scores; None after the warning

    def add(self, reports: Iterable[Report]) -> tuple[float, float] | None:
        """Add the reports of a round, and return its smallest and largest score if a warning is due."""
        scores = [report.scores[0] for report in reports if len(report.scores) == 2 and math.isfinite(report.scores[0])]
        if self._count is None or len(scores) < 2:
            return None
        low, high = min(scores), max(scores)
        self._count = self._count + 1 if high - low > _SCORE_TOLERANCE * max(abs(low), abs(high)) else 0
        if self._count < _UNEQUAL_COUNT:
            return None
        self._count = None
        return low, high
