"""Formats the counters of ranks as a rich table for a terminal or a notebook."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from asyncdist.live.counters import PolicyCounters, RankCounters, per_second
from asyncdist.validation import printable
from asyncdist.wording import ranks_in_words

if TYPE_CHECKING:
    from rich.table import Table

#: Seconds over which rates are computed.
_WINDOW_S: Final = 5.0
#: Number of terminal lines that do not show ranks: the summary, the column headers and the cursor line.
_FRAME_HEIGHT: Final = 3
_NOTE_COUNT_MAX: Final = 6
#: Number of spaces between columns.
_GAP: Final = 2
#: Columns that are left out if all of their cells are empty.
_OPTIONAL: Final = frozenset({"policy", "part", "behind", "norm", "cosine", "waited", "wire", "raw"})
#: Maximum width, in characters, of columns whose text may be truncated.
_TEXTS: Final[Mapping[str, int]] = {"policy": 24, "role": 8, "latest": 40}


@dataclass(frozen=True, slots=True)
class Row:
    """Latest counters of one rank.

    Attributes:
        now: Latest counters; None before the first answer.
        before: Counters some seconds earlier; None if there are none.
        note: Note for the user, such as the reason why the rank makes no steps.
    """

    rank: int
    now: RankCounters | None
    before: RankCounters | None = None
    note: str = ""


class Readings:
    """Stores the counters of ranks during the last seconds, to compute rates."""

    def __init__(self) -> None:
        self._said: dict[int, deque[RankCounters]] = {}

    def add(self, counters: RankCounters) -> None:
        """Add the current counters of a rank."""
        said = self._said.setdefault(counters.rank, deque())
        if said and (said[-1].job, said[-1].incarnation) != (counters.job, counters.incarnation):
            said.clear()  # a new process, whose counters start at 0
        said.append(counters)
        while len(said) > 2 and counters.time_s - said[1].time_s >= _WINDOW_S:
            said.popleft()

    def row(self, rank: int, note: str = "") -> Row:
        """Return the latest counters of a rank."""
        said = self._said.get(rank)
        if not said:
            return Row(rank, None, None, note)
        return Row(rank, said[-1], said[0] if len(said) > 1 else None, note)

    def rows(self) -> list[Row]:
        """Return the latest counters of all ranks that have answered."""
        return [self.row(rank) for rank in sorted(self._said)]


def screen(
    rows: Sequence[Row], width: int, height: int | None = None, *, before_end_s: Mapping[int, float] | None = None
) -> Table:
    """Return a summary line, the table of the ranks, and notes on some ranks, from top to bottom.

    Less important columns are omitted if the terminal is too narrow. If not all ranks fit into ``height`` lines, the
    ranks with the fewest steps are shown. ``before_end_s`` is given for a job that has ended. It contains, for each
    rank without final counters, the number of seconds between its last answer and the end of the job.
    """
    from rich.table import Table
    from rich.text import Text

    shown = list(rows)
    head = _together(rows)
    if before_end_s:
        some = len(before_end_s) < len(rows)
        who = f"{ranks_in_words(sorted(before_end_s))} as of " if some else ""
        head = f"{who}{max(before_end_s.values()):.1f} s before the end: {head}"
    notes = [f"rank {row.rank} {row.note}" for row in rows if row.note]
    if len(notes) > _NOTE_COUNT_MAX:
        notes[_NOTE_COUNT_MAX - 1 :] = [f"and {len(notes) - _NOTE_COUNT_MAX + 1} more; asyncdist story shows all"]
    if height is not None and len(shown) > (place := max(1, height - _FRAME_HEIGHT - len(notes))):
        by_steps = sorted(shown, key=lambda row: (0 if row.now is None else row.now.step, row.rank))
        shown = sorted(by_steps[:place], key=lambda row: row.rank)
        head += f"; showing the {place} with the fewest steps"
    drawn = Table.grid()  # notebooks do not show a Group
    drawn.add_row(Text(printable(head), no_wrap=True, overflow="ellipsis"))
    drawn.add_row(table(shown, width))
    if notes:
        drawn.add_row(Text("\n".join(notes), no_wrap=True, overflow="ellipsis"))
    return drawn


def table(rows: Sequence[Row], width: int) -> Table:
    """Return the table, with a line for each policy of each rank."""
    from rich.table import Table
    from rich.text import Text

    columns = _columns(rows, width)
    drawn = Table(box=None, padding=(0, 1), pad_edge=False)
    for column, width_max in columns.items():
        side: Literal["left", "right"] = "left" if column.name in _TEXTS else "right"
        drawn.add_column(column.name, justify=side, no_wrap=True, overflow="ellipsis", max_width=width_max)
    for row in rows:
        for number, policy in enumerate(_policies_of(row)):
            # Text is used because rich would interpret markup in plain strings.
            cells = [Text(_cell(column, row, policy)) for column in columns]
            is_first = number == 0
            drawn.add_row(*(c if is_first or k.is_of_policy else "" for c, k in zip(cells, columns, strict=True)))
    return drawn


# -- columns ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Column:
    """Column with its name, its minimum width and a function for its cells; ``is_of_policy`` if policies differ."""

    name: str
    width: int
    text: Callable[[Row, PolicyCounters | None], str]
    is_of_policy: bool = False


def _of_policy(name: str, width: int, text: Callable[[PolicyCounters], str]) -> _Column:
    return _Column(name, width, lambda _, policy: "" if policy is None else text(policy), is_of_policy=True)


def _of_rank(name: str, width: int, text: Callable[[RankCounters], str]) -> _Column:
    return _Column(name, width, lambda row, _: "" if row.now is None else text(row.now))


def _steps_per_s(row: Row, policy: PolicyCounters | None) -> str:
    if policy is None or row.now is None or row.before is None:
        return ""
    before = next((each.step for each in row.before.policies if each.policy == policy.policy), 0)
    return _rate(per_second(policy.step, before, row.now.time_s - row.before.time_s))


def _waiting(row: Row, _: PolicyCounters | None) -> str:
    if row.now is None or row.before is None:
        return ""
    share = per_second(row.now.waited_s, row.before.waited_s, row.now.time_s - row.before.time_s)
    return "" if share is None else f"{share:.0%}"


def _columns(rows: Sequence[Row], width: int) -> dict[_Column, int]:
    """Return the widths, by column, of the columns that fit and are not empty."""
    candidates: list[tuple[int, _Column]] = [
        (0, _of_rank_number()),
        (2, _of_policy("policy", 8, lambda policy: policy.policy)),
        (0, _of_policy("step", 6, lambda policy: str(policy.step))),
        (1, _Column("step/s", 6, _steps_per_s, is_of_policy=True)),
        (1, _of_policy("metric", 8, lambda policy: _number(policy.metric))),
        (3, _of_policy("round", 5, lambda policy: _number(policy.round))),
        (2, _of_policy("role", 8, lambda policy: policy.role)),
        (1, _of_policy("replaced", 8, lambda policy: str(policy.replacement_count))),
        (4, _of_policy("stale", 5, lambda policy: _number(policy.staleness_steps))),
        (5, _of_policy("part", 4, lambda policy: _number(policy.fragment))),
        (4, _of_policy("behind", 6, lambda policy: _number(policy.staleness_versions))),
        (3, _of_policy("norm", 8, lambda policy: _number(policy.outer_norm))),
        (3, _of_policy("cosine", 6, lambda policy: "" if policy.cosine is None else f"{policy.cosine:.2f}")),
        (2, _of_policy("waited", 6, lambda policy: _seconds(policy.waited_for_averages_s))),
        (4, _of_policy("wire", 5, lambda policy: _amount_or_none(policy.wire_nbytes))),
        (5, _of_policy("raw", 5, lambda policy: _amount_or_none(policy.unencoded_nbytes))),
        (5, _of_rank("in", 5, lambda now: _amount(now.received_nbytes))),
        (6, _of_rank("out", 5, lambda now: _amount(now.sent_nbytes))),
        (4, _Column("waits", 5, _waiting)),
        (7, _of_rank("lost", 4, lambda now: str(len(now.lost)))),
        (8, _of_policy("latest", 40, lambda policy: policy.latest)),
    ]
    left = width + _GAP
    widths: dict[str, int] = {}
    for _, column in sorted(candidates, key=lambda each: each[0]):
        if column.name in _OPTIONAL and not any(column.text(row, each) for row in rows for each in _policies_of(row)):
            continue
        needed = _width_of(column, rows)
        if left >= needed + _GAP:
            widths[column.name] = left - _GAP if column.name == "latest" else needed
            left -= needed + _GAP
    return {column: widths[column.name] for _, column in candidates if column.name in widths}


def _width_of(column: _Column, rows: Sequence[Row]) -> int:
    """Return the width of a column in characters. Text may be truncated, but numbers are always shown in full."""
    cells = [_cell(column, row, policy) for row in rows for policy in _policies_of(row)]
    needed = max([column.width, len(column.name), *map(len, cells)])
    return min(needed, _TEXTS.get(column.name, needed))


def _cell(column: _Column, row: Row, policy: PolicyCounters | None) -> str:
    return printable(column.text(row, policy))


def _policies_of(row: Row) -> Sequence[PolicyCounters | None]:
    """Return the policies of a rank, or a tuple with None if it has no policy."""
    return (None,) if row.now is None else row.now.policies or (None,)


def _of_rank_number() -> _Column:
    return _Column("rank", 4, lambda row, _: str(row.rank))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.5g}" if math.isfinite(value) else str(value)


def _rate(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.1f}s"


def _amount_or_none(nbytes: int | None) -> str:
    return "" if nbytes is None else _amount(nbytes)


def _amount(nbytes: float) -> str:
    """Return a number of bytes as text of at most five characters."""
    for unit in ("", "k", "M", "G", "T"):
        if nbytes < 999.5 or unit == "T":
            return f"{nbytes:.0f}{unit}" if not unit or nbytes >= 99.95 else f"{nbytes:.1f}{unit}"
        nbytes /= 1000
    raise AssertionError("unreachable")


def _together(rows: Sequence[Row]) -> str:
    """Return the line that summarises all ranks."""
    there = [row for row in rows if row.now is not None]
    if not there or there[0].now is None:
        return "no rank has answered yet"
    rates = [0.0, 0.0]
    for row in there:
        if row.now is not None and row.before is not None:
            seconds = row.now.time_s - row.before.time_s
            rates[0] += per_second(row.now.step, row.before.step, seconds) or 0.0
            rates[1] += per_second(row.now.received_nbytes, row.before.received_nbytes, seconds) or 0.0
    lost = {rank for row in there if row.now is not None for rank in row.now.lost}
    first = there[0].now
    said = f"job {first.job}: {len(there)} of {first.size} ranks, {_rate(rates[0])} steps/s, {_amount(rates[1])}B/s in"
    return said + (f", lost: {', '.join(map(str, sorted(lost)))}" if lost else "")
