"""Summarises long series in bounded memory, one value at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

#: Histogram bins are logarithmic, from 100 ns to 10^6 s. Each bin is 5.9 % wider than the previous one.
_PER_DECADE: Final = 40
_LOWEST_DECADE: Final = -7
_BIN_COUNT: Final = 13 * _PER_DECADE


class Interned:
    """Returns the same tuple for all equal sequences, so that each is stored once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def __call__(self, values: Iterable[Any] | None) -> tuple[Any, ...]:
        """Return the values as a tuple, which is empty for None."""
        found = tuple(values or ())
        return self._known.setdefault(found, found)


class LogHistogram:
    """Counts positive values in logarithmic bins. Quantiles are accurate to 6 %, and mostly to 1 %."""

    __slots__ = ("_counts", "_largest", "_sums", "count")

    def __init__(self) -> None:
        self._counts = [0] * _BIN_COUNT
        self._sums = [0.0] * _BIN_COUNT
        self._largest = 0.0
        self.count = 0

    def add(self, value: float) -> None:
        """Count a value."""
        self.count += 1
        self._largest = max(self._largest, value)
        place = int((math.log10(value) - _LOWEST_DECADE) * _PER_DECADE) if value > 0 else 0
        place = min(max(place, 0), _BIN_COUNT - 1)
        self._counts[place] += 1
        self._sums[place] += value

    def middle(self) -> float:
        """Return the mean of the values in the median's bin, or NaN if there are no values."""
        if not self.count:
            return math.nan
        place = int(np.searchsorted(np.cumsum(self._counts), max(self.count / 2, 1)))
        return self._sums[place] / self._counts[place]

    def quantile(self, fraction: float) -> float:
        """Return the value below which ``fraction`` of the values lie, or NaN if there are no values."""
        if not self.count:
            return math.nan
        wanted, up_to = max(fraction * self.count, 1), np.cumsum(self._counts)
        place = int(np.searchsorted(up_to, wanted))
        # The values in a bin are assumed to be evenly distributed.
        within = 1 - (up_to[place] - wanted) / self._counts[place]
        return min(float(10 ** (_LOWEST_DECADE + (place + within) / _PER_DECADE)), self._largest)


class TimeBins:
    """Averages values over time in at most ``capacity`` bins.

    The bins' width doubles when a value lies beyond the last bin.
    """

    __slots__ = ("_begin_s", "_capacity", "_counts", "_sums", "_width_s")

    def __init__(self, capacity: int = 512) -> None:
        self._capacity = capacity
        self._counts: list[int] = []
        self._sums: list[float] = []
        self._width_s = 2.0**-13
        self._begin_s: float | None = None

    def add(self, time_s: float, value: float) -> None:
        """Add a value at ``time_s``. A time before the first value counts as the time of the first value."""
        if self._begin_s is None:
            self._begin_s = time_s
        since_s = time_s - self._begin_s
        place = max(int(since_s / self._width_s), 0)
        while place >= self._capacity:
            self._widen()
            place = int(since_s / self._width_s)
        missing = place + 1 - len(self._sums)
        if missing > 0:
            self._counts += [0] * missing
            self._sums += [0.0] * missing
        self._counts[place] += 1
        self._sums[place] += value

    def _widen(self) -> None:
        self._width_s *= 2
        if len(self._sums) % 2:
            self._counts.append(0)
            self._sums.append(0.0)
        self._counts = [a + b for a, b in zip(self._counts[::2], self._counts[1::2], strict=True)]
        self._sums = [a + b for a, b in zip(self._sums[::2], self._sums[1::2], strict=True)]

    @property
    def first_s(self) -> float:
        """Time of the first value in seconds, or infinity if there are no values."""
        return math.inf if self._begin_s is None else self._begin_s

    def means(self, begin_s: float, end_s: float, columns: int) -> NDArray[np.float64]:
        """Return the mean of the values in each of ``columns`` equal intervals from ``begin_s`` to ``end_s``.

        The mean of an empty interval is NaN.
        """
        counts, sums = np.zeros(columns), np.zeros(columns)
        middles = (np.arange(len(self._sums)) + 0.5) * self._width_s + (self._begin_s or 0.0) - begin_s
        places = np.clip((middles / max(end_s - begin_s, 1e-12) * columns).astype(int), 0, columns - 1)
        np.add.at(counts, places, self._counts)
        np.add.at(sums, places, self._sums)
        return np.divide(sums, counts, out=np.full(columns, np.nan), where=counts > 0)


class Thinned:
    """Stores every n-th row of a series, at most ``capacity`` rows, and the last row. ``count`` counts all rows."""

    __slots__ = ("_capacity", "_every", "_last", "_rows", "count")

    def __init__(self, capacity: int = 600) -> None:
        self._capacity = capacity
        self._every = 1
        self._rows: list[tuple[float, ...]] = []
        self._last: tuple[float, ...] | None = None
        self.count = 0

    def add(self, *row: float) -> None:
        """Add a row of values."""
        if self.count % self._every == 0:
            self._rows.append(row)
            if len(self._rows) > self._capacity:
                del self._rows[1::2]
                self._every *= 2
        self._last = row
        self.count += 1

    @property
    def last(self) -> tuple[float, ...] | None:
        """Last row of the series, or None if there are no rows."""
        return self._last

    def rows(self) -> list[tuple[float, ...]]:
        """Return the stored rows, oldest first."""
        if self._last is None or self._rows[-1] == self._last:
            return list(self._rows)
        return [*self._rows, self._last]
