"""Detects metrics that have the wrong direction or no finite values, so that the user can be warned.

Training should improve the best metric. If it becomes worse, the direction is probably wrong. For example, a loss is
passed although larger metrics count as better.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable
from typing import Final

#: Number of consecutive decisions without a finite metric after which the user is warned.
_BLANK_COUNT: Final = 3
#: Number of blocks of equal length whose medians are compared. Medians limit the effect of noise and outliers.
_BLOCK_COUNT: Final = 16
#: Numbers of values at the first and last comparison of the blocks. Between comparisons, the number doubles.
_COUNT_MIN: Final = _BLOCK_COUNT
_COUNT_MAX: Final = 128 * _BLOCK_COUNT
#: A warning is due if the decline exceeds this multiple of the spread of later values, as in 10 of 2,000 random walks.
_GAP_FACTOR: Final = 6.0


class MetricTrend:
    """Detects that the best rank's metric becomes worse during training.

    The trend is wrong if each block of values is worse than the previous block, or if the metric has settled at a value
    much worse than the first values. Noise, random walks that return, and an improvement followed by a smaller decline,
    as with overfitting, do not count as wrong trends.
    """

    def __init__(self, metric_mode: str) -> None:
        self._sign = 1.0 if metric_mode == "max" else -1.0
        self._values: list[float] | None = []  # negated if smaller is better; None after the last comparison
        self._wrong: tuple[float, float] | None = None

    def take_wrong(self) -> tuple[float, float] | None:
        """If the trend has become wrong, return the first and newest best metric, only once; otherwise return None."""
        wrong, self._wrong = self._wrong, None
        return wrong

    def add(self, metrics: Iterable[float]) -> None:
        """Add the ranks' metrics from one decision of the policy."""
        if self._values is None:
            return
        best = max((self._sign * metric for metric in metrics if math.isfinite(metric)), default=None)
        if best is None:
            return
        self._values.append(best)
        count = len(self._values)
        if count < _COUNT_MIN or count & (count - 1):
            return
        blocks = block_medians(self._values)
        if is_falling(blocks):
            self._wrong = self._sign * blocks[0], self._sign * blocks[-1]
        if self._wrong is not None or count >= _COUNT_MAX:
            self._values = None


class BlankMetrics:
    """Detects several consecutive decisions in which no rank has a finite metric."""

    def __init__(self) -> None:
        self._count: int | None = 0  # consecutive decisions without a finite metric; None after the warning
        self._is_found = False

    def add(self, metrics: Iterable[float]) -> None:
        """Add the ranks' metrics from one decision of the policy."""
        values = tuple(metrics)
        if self._count is not None and values:
            self._count = 0 if any(map(math.isfinite, values)) else self._count + 1
            if self._count == _BLANK_COUNT:
                self._count, self._is_found = None, True

    def take_found(self) -> bool:
        """Return True once if several consecutive decisions had no finite metric, otherwise False."""
        is_found, self._is_found = self._is_found, False
        return is_found


def blank_warning(policy: str, whose: str) -> str:
    """Return the warning that no metric is finite. ``whose`` is its subject, such as "this rank's metric"."""
    return (
        f"{policy}: {whose} has been NaN or infinite {_BLANK_COUNT} times in a row. A rank with such a metric ranks "
        "worst and never donates, so nothing is averaged while all ranks have one. Check the value that is passed to "
        "step()"
    )


def trend_warning(policy: str, metric_mode: str, wrong: tuple[float, float]) -> str:
    """Return the warning that the best metric has become worse, from a result of :meth:`MetricTrend.take_wrong`."""
    first, last = wrong
    meaning, word = ("larger", "loss") if metric_mode == "max" else ("smaller", "score")
    return (
        f"{policy}: metric_mode={metric_mode!r} means that a {meaning} metric is better, but the best rank's metric "
        f"has become worse since the start, from {first:g} to {last:g}. If the metric is a {word}, pass it as "
        f"step({word}=...), because the worst ranks are used as donors. Otherwise all ranks have become worse"
    )


def block_medians(values: list[float]) -> list[float]:
    """Return the medians of 16 blocks of equal length. The number of values must be a multiple of 16."""
    size = len(values) // _BLOCK_COUNT
    return [statistics.median(values[start : start + size]) for start in range(0, len(values), size)]


def is_falling(blocks: list[float]) -> bool:
    """Return whether the medians fall from block to block, or have settled far below the first median."""
    if all(later < earlier for earlier, later in itertools.pairwise(blocks)):
        return True
    late = blocks[len(blocks) // 2 :]
    spread = max(late) - min(late)
    return blocks[0] == max(blocks) and blocks[0] - max(late) > _GAP_FACTOR * spread > 0.0
