"""Stores the metric and the step rate of a job's policies over time, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final, Literal, TypeAlias, TypedDict

import numpy as np

from asyncdist.live.columns import Row, steps_per_s
from asyncdist.live.counters import PolicyCounters
from asyncdist.report.series import Thinned
from asyncdist.validation import printable

#: Maximum number of ranks for which each rank has its own line. For more ranks, three quantiles are drawn.
LINE_COUNT_MAX: Final = 8
#: Maximum number of points of a line. Longer series are thinned.
POINT_COUNT_MAX: Final = 240
#: Maximum number of policies with different names that are drawn.
POLICY_COUNT_MAX: Final = 4
_QUANTILES: Final = ("minimum", "median", "maximum")

Quantity: TypeAlias = Literal["metric", "step/s"]
_QUANTITIES: Final[tuple[Quantity, ...]] = ("metric", "step/s")


class PolicyHistory(TypedDict):
    """The plotted lines of a policy, one per rank or quantile. A row of a quantity has a time and a value per line."""

    policy: str
    lines: list[str]
    quantities: dict[Quantity, list[tuple[float, ...]]]


class History:
    """Stores a job's metrics and step rates over time. Long series keep only every n-th row."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._ranks: range | None = None
        self._series: dict[str, dict[Quantity, Thinned]] = {}

    def add(self, time_s: float, rows: Sequence[Row]) -> None:
        """Add the latest counters of all ranks, read at ``time_s`` in seconds."""
        if self._ranks is None:
            sizes = [row.now.size for row in rows if row.now is not None]
            if not sizes:
                return
            self._ranks = range(sizes[0])
            are_few = sizes[0] <= LINE_COUNT_MAX
            self._lines = [f"rank {rank}" for rank in self._ranks] if are_few else list(_QUANTILES)
        for name in _names(rows):
            if name not in self._series and len(self._series) < POLICY_COUNT_MAX:
                self._series[name] = {quantity: Thinned(POINT_COUNT_MAX) for quantity in _QUANTITIES}
        for name, of_policy in self._series.items():
            for quantity, series in of_policy.items():
                series.add(time_s, *self._values(dict(_values(rows, name, quantity)), self._ranks))

    def _values(self, known: dict[int, float], ranks: range) -> list[float]:
        """Return the current value of each line, or NaN if it is unknown."""
        if len(ranks) <= LINE_COUNT_MAX:
            return [known.get(rank, math.nan) for rank in ranks]
        finite = [value for value in known.values() if math.isfinite(value)]
        return [float(each) for each in np.quantile(finite, (0.0, 0.5, 1.0))] if finite else [math.nan] * 3

    def policies(self) -> list[PolicyHistory]:
        """Return the lines to plot for each policy."""
        return [
            {
                "policy": printable(name),
                "lines": self._lines,
                "quantities": {quantity: series.rows() for quantity, series in of_policy.items()},
            }
            for name, of_policy in self._series.items()
        ]


def _policies(rows: Sequence[Row]) -> Iterator[tuple[Row, PolicyCounters]]:
    """Yield each rank's policies, except for ranks that did not answer the last request."""
    return ((row, policy) for row in rows if row.now is not None and not row.is_silent for policy in row.now.policies)


def _names(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(policy.policy for _, policy in _policies(rows)))


def _values(rows: Sequence[Row], name: str, quantity: Quantity) -> Iterator[tuple[int, float]]:
    for row, policy in _policies(rows):
        if policy.policy == name:
            value = policy.metric if quantity == "metric" else steps_per_s(row, policy)
            if value is not None:
                yield row.rank, value
