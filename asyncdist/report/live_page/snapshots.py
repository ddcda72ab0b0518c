"""Reads a running job's counters when a viewer requests them, at most once per second for all viewers.

The metric and the step rate of the job's policies are stored over time, in bounded memory.
"""

from __future__ import annotations

import gzip
import math
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np

from asyncdist.live.columns import Column, Row, columns, policies_of, steps_per_s, together
from asyncdist.live.counters import PolicyCounters
from asyncdist.live.top import PERIOD_S, JobView
from asyncdist.report.series import Thinned
from asyncdist.report.slow_ranks import slow_ranks_in_words
from asyncdist.story import sockets
from asyncdist.validation import printable

#: Seconds without sockets after which a job counts as ended. If their folder is removed, ranks create new sockets.
_GONE_S: Final = 3.0

_encoder: Final = msgspec.json.Encoder()
#: Maximum number of ranks for which each rank has its own line. For more ranks, three quantiles are drawn.
LINE_COUNT_MAX: Final = 8
#: Maximum number of points of a line. Longer series are thinned.
POINT_COUNT_MAX: Final = 240
#: Maximum number of policies with different names that are drawn.
POLICY_COUNT_MAX: Final = 4
_QUANTILES: Final = ("minimum", "median", "maximum")

_QUANTITIES: Final = ("metric", "step/s")


class History:
    """Stores a job's metrics and step rates over time. Long series keep only every n-th row."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._ranks: range | None = None
        self._series: dict[str, dict[str, Thinned]] = {}

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

    def policies(self) -> list[dict[str, Any]]:
        """Return each policy's plotted lines, one per rank or quantile.

        A row of a quantity has a time and a value per line.
        """
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


def _values(rows: Sequence[Row], name: str, quantity: str) -> Iterator[tuple[int, float]]:
    for row, policy in _policies(rows):
        if policy.policy == name:
            value = policy.metric if quantity == "metric" else steps_per_s(row, policy)
            if value is not None:
                yield row.rank, value


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Stores the counters of a job at one time, encoded once for all viewers.

    Attributes:
        packed: ``body``, which is JSON, compressed with gzip.
        read_at_s: Time at which the counters were read, on the monotonic clock.
        is_last: Whether the job has ended.
    """

    body: bytes
    packed: bytes
    read_at_s: float
    is_last: bool


class Snapshots:
    """Provides the newest counters of a job to any thread.

    Counters are read on request if the previous ones are older than ``PERIOD_S``. Requests that arrive meanwhile wait
    for the result.
    """

    def __init__(self, job: str) -> None:
        self.read_count = 0
        self._job = job
        self._find = sockets.jobs
        self._view = JobView()
        self._history = History()
        self._lock = threading.Lock()
        self._answered_at: float | None = None  # time of the last answer, in seconds since 1970
        self._gone_since: float | None = None  # time at which the job's sockets were first missing
        self._newest: Snapshot | None = None

    def newest(self) -> tuple[Snapshot, float]:
        """Return the newest counters, and the seconds after which newer counters are available."""
        with self._lock:
            newest = self._newest
            if newest is None or not (newest.is_last or time.monotonic() - newest.read_at_s < PERIOD_S):
                newest = self._newest = self._read()
        return newest, max(0.0, newest.read_at_s + PERIOD_S - time.monotonic())

    def _read(self) -> Snapshot:
        began_s = time.monotonic()
        rank_sockets = self._find().get(self._job, ())
        if rank_sockets:
            self.read_count += 1
            self._view.ask(rank_sockets)
            self._answered_at = time.time()
            self._history.add(self._answered_at, self._view.rows)
            self._gone_since = None
        elif self._gone_since is None:
            self._gone_since = began_s
        has_ended = self._gone_since is not None and began_s - self._gone_since >= _GONE_S
        rows = self._view.rows_at_end()[0] if has_ended else self._view.rows
        body = _encoder.encode(self._content(rows, is_running=not has_ended))
        return Snapshot(body, gzip.compress(body, 1), began_s, has_ended)

    def _content(self, rows: Sequence[Row], *, is_running: bool) -> dict[str, Any]:
        shown = columns(rows)
        there = [row.now for row in rows if row.now is not None]
        return {
            "job": self._job,
            "is_running": is_running,
            "answered_at": self._answered_at,
            "summary": together(rows),
            "slow": slow_ranks_in_words(_step_s(rows)) if is_running else None,
            "size": there[0].size if there else 0,
            "lost": sorted({rank for now in there for rank in now.lost}),
            "notes": _notes(rows) if is_running else [],
            "columns": [{"name": each.name, "meaning": each.meaning} for each in shown],
            "lines": [_line(shown, row, number) for row in rows for number in range(len(policies_of(row)))],
            "history": self._history.policies(),
        }


def _notes(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the notes on ranks. Ranks that are waiting for others are last, because they are seldom the cause."""
    noted = sorted((row for row in rows if row.note), key=lambda row: (row.note.startswith("waits"), row.rank))
    return [{"rank": row.rank, "text": row.note} for row in noted]


def _step_s(rows: Sequence[Row]) -> dict[int, float]:
    """Return the recent seconds per step of each answering rank that has taken several steps."""
    return {row.rank: row.step_s for row in rows if row.step_s is not None and not row.is_silent}


def _line(shown: Sequence[Column], row: Row, number: int) -> dict[str, Any]:
    """Return the cells of one row of the table, as strings, and as numbers or None."""
    policy = policies_of(row)[number]
    texts, values = [], list[float | None]()
    for column in shown:
        is_shown = column.is_of_policy or number == 0 or column.name == "rank"
        value = column.value(row, policy) if is_shown else None
        texts.append(column.text(row, policy) if is_shown else "")
        values.append(value if isinstance(value, (int, float)) and math.isfinite(value) else None)
    return {"rank": row.rank, "texts": texts, "values": values}
