"""Weighs contributions to a round as a selective policy does."""

from __future__ import annotations

import math
from collections.abc import Mapping

from asyncdist.protocols.exchange.ledger import Report


def better_half(reports: Mapping[int, Report]) -> dict[int, float]:
    """Leave out the worse half of the scores; a donor's weight is its score."""
    finite = [rank for rank, report in reports.items() if math.isfinite(report.norm)]
    best = sorted(finite, key=lambda rank: reports[rank].scores, reverse=True)[: (len(reports) + 1) // 2]
    return {rank: reports[rank].scores[0] for rank in best if reports[rank].scores[0] > 0}
