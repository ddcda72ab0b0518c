"""Stores the latest counters of ranks, and shows them as a rich table for a terminal or a notebook."""

from __future__ import annotations

import bisect
import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from asyncdist.live.counters import PolicyCounters, RankCounters, per_second, policy_step, steps_per_second
from asyncdist.validation import printable
from asyncdist.wording import ranks_in_words

if TYPE_CHECKING:
    from rich.table import Table

#: Seconds over which rates are computed.
_WINDOW_S: Final = 5.0
#: Minimum number of steps from which a rank's step time is computed. As each end of the interval is up to one step off,
#: equally fast ranks then differ by a factor of less than 10/8.
_STEP_COUNT_MIN: Final = 9
#: Number of terminal lines without ranks: the summary, the column headers and the cursor line.
_FRAME_HEIGHT: Final = 3
_NOTE_COUNT_MAX: Final = 6
#: Number of spaces between columns.
_GAP: Final = 2
#: Maximum width, in characters, of columns whose text may be truncated.
_TEXTS: Final[Mapping[str, int]] = {"policy": 24, "role": 8, "latest": 40}


@dataclass(frozen=True, slots=True)
class Row:
    """Stores the latest counters of one rank.

    Attributes:
        now: Latest counters, or None.
        before: Counters some seconds earlier, or None.
        note: Note for the user, for example why the rank takes no steps.
        is_silent: Whether the rank has not answered the last request, so that ``now`` is old.
        step_s: Mean seconds per step over the last nine or more steps, or None if there were fewer.
    """

    rank: int
    now: RankCounters | None
    before: RankCounters | None = None
    note: str = ""
    is_silent: bool = False
    step_s: float | None = None


class Readings:
    """Stores the recent counters of ranks, to compute rates."""

    def __init__(self) -> None:
        self._said: dict[int, deque[RankCounters]] = {}
        self._stepped: dict[int, deque[tuple[int, float]]] = {}  # numbers of steps, and the times of their readings

    def add(self, counters: RankCounters) -> None:
        """Add the current counters of a rank."""
        said = self._said.setdefault(counters.rank, deque())
        if said and _begins_anew(said[-1], counters):
            said.clear()
        said.append(counters)
        while len(said) > 2 and _is_too_old(said, counters.time_s):
            said.popleft()
        self._add_steps(counters, is_first=len(said) == 1)

    def _add_steps(self, counters: RankCounters, *, is_first: bool) -> None:
        stepped = self._stepped.setdefault(counters.rank, deque())
        if is_first or counters.step < stepped[-1][0]:  # the policy with the most steps was closed
            stepped.clear()
        if not stepped or counters.step > stepped[-1][0]:
            stepped.append((counters.step, counters.time_s))
        while len(stepped) > 1 and _is_enough(stepped[1], counters):
            stepped.popleft()

    def row(self, rank: int, note: str = "") -> Row:
        """Return the latest counters of a rank."""
        said = self._said.get(rank)
        if not said:
            return Row(rank, None, None, note)
        now, (step, time_s) = said[-1], self._stepped[rank][0]
        step_s = (now.time_s - time_s) / (now.step - step) if now.step - step >= _STEP_COUNT_MIN else None
        return Row(rank, now, said[0] if len(said) > 1 else None, note, step_s=step_s)

    def rows(self) -> list[Row]:
        """Return the latest counters of all ranks that have answered."""
        return [self.row(rank) for rank in sorted(self._said)]


def _begins_anew(before: RankCounters, now: RankCounters) -> bool:
    """Return whether a new process, or the policy with the most steps, has begun since ``before``, at any step."""
    policy = now.first_policy
    has_begun = policy is not None and policy.step > 0 and not policy_step(before, policy.policy)
    return has_begun or (before.job, before.incarnation) != (now.job, now.incarnation)


def _is_too_old(said: Sequence[RankCounters], now_s: float) -> bool:
    """Return whether the first reading is not needed for rates, or was made before a pause."""
    return now_s - said[1].time_s >= _WINDOW_S or now_s - said[0].time_s >= 2 * _WINDOW_S


def _is_enough(since: tuple[int, float], now: RankCounters) -> bool:
    return now.step - since[0] >= _STEP_COUNT_MIN and now.time_s - since[1] >= _WINDOW_S


Value: TypeAlias = float | str | None


@dataclass(frozen=True, slots=True)
class Column:
    """Describes a column of the table.

    Attributes:
        meaning: Explanation for readers of the page.
        priority: Order in which columns get space in a narrow terminal; 0 is first.
        width: Minimum width in characters.
        value: Function that returns the value of a rank's policy, or None for an empty cell.
        is_of_policy: Whether each policy of a rank has a separate value.
        is_optional: Whether the column is left out if it is empty.
    """

    name: str
    meaning: str
    priority: int
    width: int
    value: Callable[[Row, PolicyCounters | None], Value]
    formatted: Callable[[Any], str] = str
    is_of_policy: bool = False
    is_optional: bool = False

    def text(self, row: Row, policy: PolicyCounters | None) -> str:
        """Return the text of a cell."""
        value = self.value(row, policy)
        return "" if value is None else printable(self.formatted(value))


def columns(rows: Sequence[Row]) -> list[Column]:
    """Return all columns, except optional columns that are empty."""
    return [
        column
        for column in COLUMNS
        if not column.is_optional or any(column.text(row, each) for row in rows for each in policies_of(row))
    ]


def policies_of(row: Row) -> Sequence[PolicyCounters | None]:
    """Return the policies of a rank, or a tuple with None if it has no policy."""
    return (None,) if row.now is None else row.now.policies or (None,)


def steps_per_s(row: Row, policy: PolicyCounters | None) -> float | None:
    """Return a policy's recent steps per second, or None if they are unknown."""
    if policy is None or row.now is None or row.before is None:
        return None
    return steps_per_second(policy, row.before, row.now.time_s - row.before.time_s)


def _waiting(row: Row, _: PolicyCounters | None) -> float | None:
    if row.now is None or row.before is None:
        return None
    now_s, before_s = (each.waited_s + each.waiting_s for each in (row.now, row.before))
    share = per_second(now_s, before_s, row.now.time_s - row.before.time_s)
    return None if share is None else min(share, 1.0)  # several tasks may have waited at the same time


def _of_policy(
    name: str,
    attribute: str,
    meaning: str,
    size: tuple[int, int],
    formatted: Callable[[Any], str] = str,
    *,
    is_optional: bool = False,
) -> Column:
    """Return a column of one attribute of the policies' counters. ``size`` is the column's priority and width."""

    def value(_: Row, policy: PolicyCounters | None) -> Value:
        found: Value = None if policy is None else getattr(policy, attribute)
        return found

    return Column(name, meaning, *size, value, formatted, is_of_policy=True, is_optional=is_optional)


def _of_rank(name: str, meaning: str, size: tuple[int, int], value: Callable[[RankCounters], float]) -> Column:
    return Column(name, meaning, *size, lambda row, _: None if row.now is None else value(row.now), amount)


def number(value: float) -> str:
    """Return a number with five significant digits."""
    return f"{value:.5g}" if math.isfinite(value) else str(value)


def rate(value: float) -> str:
    """Return a rate with one decimal, or without decimals from 100 on."""
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def amount(nbytes: float) -> str:
    """Return a number of bytes as text of at most five characters."""
    for unit in ("", "k", "M", "G", "T"):
        if nbytes < 999.5 or unit == "T":
            return f"{nbytes:.0f}{unit}" if not unit or nbytes >= 99.95 else f"{nbytes:.1f}{unit}"
        nbytes /= 1000
    raise AssertionError("unreachable")


COLUMNS: Final = (
    Column("rank", "rank of the process", 0, 4, lambda row, _: row.rank),
    _of_policy("policy", "policy", "name of the policy", (2, 8), is_optional=True),
    _of_policy("step", "step", "number of steps", (0, 6)),
    Column(
        "step/s",
        "mean number of steps per second in the last five seconds, or since the previous reading",
        1,
        6,
        steps_per_s,
        rate,
        is_of_policy=True,
    ),
    _of_policy("metric", "metric", "the last metric given to the policy", (1, 8), number),
    _of_policy("round", "round", "the newest round (exchange of weights) in which the rank had a role", (3, 5)),
    _of_policy("role", "role", "current role of the rank", (2, 8)),
    _of_policy("replaced", "replacement_count", "number of times that the rank has taken an average", (1, 8)),
    _of_policy(
        "stale", "staleness_steps", "this rank's step minus the step of the oldest snapshot in the last average", (4, 5)
    ),
    _of_policy("part", "fragment", "the part of the model (fragment) in the last average", (5, 4), is_optional=True),
    _of_policy(
        *("behind", "staleness_versions", "age of the oldest contribution to the last average, in averages", (4, 6)),
        is_optional=True,
    ),
    _of_policy("norm", "outer_norm", "norm of the mean change in the last average", (3, 8), number, is_optional=True),
    _of_policy(
        *("cosine", "cosine", "mean cosine between the changes of two ranks in the last average", (3, 6)),
        "{:.2f}".format,
        is_optional=True,
    ),
    _of_policy(
        *("waited", "waited_for_averages_s", "seconds that steps have spent waiting for averages", (2, 6)),
        "{:.1f}s".format,
        is_optional=True,
    ),
    _of_policy("wire", "wire_nbytes", "bytes of the rank's contributions, encoded", (4, 5), amount, is_optional=True),
    _of_policy(
        *("raw", "unencoded_nbytes", "bytes of the rank's contributions as float32", (5, 5), amount), is_optional=True
    ),
    _of_rank("in", "bytes of tensors received", (5, 5), lambda now: now.received_nbytes),
    _of_rank("out", "bytes of tensors sent", (6, 5), lambda now: now.sent_nbytes),
    Column("waits", "percentage of the last five seconds that the rank spent waiting", 4, 5, _waiting, "{:.0%}".format),
    _of_rank("lost", "number of ranks that the rank has lost", (7, 4), lambda now: len(now.lost)),
    _of_policy(
        "coordinator", "coordinator", "rank that took over from the first coordinator", (7, 11), is_optional=True
    ),
    _of_policy("latest", "latest", "description of the last average", (8, 40)),
)


def together(rows: Sequence[Row]) -> str:
    """Return a line that summarises all ranks."""
    there = [row for row in rows if row.now is not None]
    if not there or there[0].now is None:
        return "no rank has answered yet"
    rates = [0.0, 0.0]
    for row in there:
        if row.now is not None and row.before is not None:
            seconds = row.now.time_s - row.before.time_s
            rates[0] += steps_per_s(row, row.now.first_policy) or 0.0
            rates[1] += per_second(row.now.received_nbytes, row.before.received_nbytes, seconds) or 0.0
    lost = {rank for row in there if row.now is not None for rank in row.now.lost}
    first = there[0].now
    count = sum(not row.is_silent for row in there)
    said = f"job {first.job}: {count} of {first.size} ranks, {rate(rates[0])} steps/s, {amount(rates[1])}B/s in"
    return said + (f", lost: {', '.join(map(str, sorted(lost)))}" if lost else "")


def screen(
    rows: Sequence[Row], width: int, height: int | None = None, *, before_end_s: Mapping[int, float] | None = None
) -> Table:
    """Return a summary line, the table of the ranks, and notes on some ranks, from top to bottom.

    Columns that do not fit are omitted, the least important first. If not all ranks fit into ``height`` lines, the
    ranks with the fewest steps are shown. For a job that has ended, ``before_end_s`` maps each rank without final
    counters to the seconds between its last answer and the end.
    """
    from rich.table import Table
    from rich.text import Text

    shown = list(rows)
    head = together(rows)
    if before_end_s:
        some = len(before_end_s) < len(rows)
        who = f"{ranks_in_words(sorted(before_end_s))} as of " if some else ""
        head = f"{who}{max(before_end_s.values()):.1f} s before the end: {head}"
    notes = [f"rank {row.rank} {row.note}" for row in rows if row.note]
    if len(notes) > _NOTE_COUNT_MAX:
        notes[_NOTE_COUNT_MAX - 1 :] = [f"and {len(notes) - _NOTE_COUNT_MAX + 1} more; asyncdist story shows all"]
    if height is not None:
        by_steps = sorted(shown, key=lambda row: (0 if row.now is None else row.now.step, row.rank))
        ends = list(itertools.accumulate(len(policies_of(row)) for row in by_steps))  # numbers of lines
        count = max(1, bisect.bisect(ends, height - _FRAME_HEIGHT - len(notes)))
        if count < len(shown):
            shown = sorted(by_steps[:count], key=lambda row: row.rank)
            head += f"; showing the {count} with the fewest steps"
    drawn = Table.grid()  # rich's Group would not be shown in notebooks
    drawn.add_row(Text(printable(head), no_wrap=True, overflow="ellipsis"))
    drawn.add_row(table(shown, width))
    if notes:
        drawn.add_row(Text("\n".join(notes), no_wrap=True, overflow="ellipsis"))
    return drawn


def table(rows: Sequence[Row], width: int) -> Table:
    """Return the table, with a line for each policy of each rank."""
    from rich.table import Table
    from rich.text import Text

    widths = _widths(rows, width)
    drawn = Table(box=None, padding=(0, 1), pad_edge=False)
    for column, width_max in widths.items():
        side: Literal["left", "right"] = "left" if column.name in _TEXTS else "right"
        drawn.add_column(column.name, justify=side, no_wrap=True, overflow="ellipsis", max_width=width_max)
    for row in rows:
        for number, policy in enumerate(policies_of(row)):
            # Text is used because rich would interpret markup in plain strings.
            cells = [Text(column.text(row, policy)) for column in widths]
            is_first = number == 0
            drawn.add_row(*(c if is_first or k.is_of_policy else "" for c, k in zip(cells, widths, strict=True)))
    return drawn


def _widths(rows: Sequence[Row], width: int) -> dict[Column, int]:
    """Return the width of each column that is not empty and fits into ``width``."""
    shown = columns(rows)
    left = width + _GAP
    widths: dict[str, int] = {}
    for column in sorted(shown, key=lambda each: each.priority):
        needed = _width_of(column, rows)
        if left >= needed + _GAP:
            widths[column.name] = left - _GAP if column.name == "latest" else needed
            left -= needed + _GAP
    return {column: widths[column.name] for column in shown if column.name in widths}


def _width_of(column: Column, rows: Sequence[Row]) -> int:
    """Return a column's width in characters. Text may be truncated, but numbers are shown in full."""
    cells = [column.text(row, policy) for row in rows for policy in policies_of(row)]
    needed = max([column.width, len(column.name), *map(len, cells)])
    return min(needed, _TEXTS.get(column.name, needed))
