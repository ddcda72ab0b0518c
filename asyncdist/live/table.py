"""Formats the counters of ranks as a rich table for a terminal or a notebook."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, Literal

from asyncdist.live.columns import Column, Row, columns, policies_of, together
from asyncdist.validation import printable
from asyncdist.wording import ranks_in_words

if TYPE_CHECKING:
    from rich.table import Table

#: Number of terminal lines without ranks: the summary, the column headers and the cursor line.
_FRAME_HEIGHT: Final = 3
_NOTE_COUNT_MAX: Final = 6
#: Number of spaces between columns.
_GAP: Final = 2
#: Maximum width, in characters, of columns whose text may be truncated.
_TEXTS: Final[Mapping[str, int]] = {"policy": 24, "role": 8, "latest": 40}


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
    drawn = Table.grid()  # a Group would not be shown in notebooks
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
