"""Converts a recording to tables: one for each kind of event, and one of the ranks.

The row of an event has the rank, its incarnation, the time in seconds since the job began, and the fields listed in
:data:`asyncdist.recording.events.KINDS`. A field named like one of the first three columns gets the table's name as a
prefix, for example ``lost_rank``. Lists are JSON strings, for example ``[0, 2]``.
"""

from __future__ import annotations

import contextlib
import csv
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from asyncdist.recording.events import KINDS
from asyncdist.recording.reader import Recording
from asyncdist.report.clock_alignment import Clocks
from asyncdist.report.whole_files import whole_folder

Value: TypeAlias = int | float | str | None

#: First columns of each event table.
_FIRST: Final = ("rank", "incarnation", "time_s")
#: Columns of the rank table.
RANKS: Final = ("rank", "incarnation", "hostname", "pid", "transport", "began_at_s", "damage")
_BATCH: Final = 10_000
#: Columns with strings. Types are declared because the first rows of a column may be empty. The default is integer.
_TEXTS: Final = frozenset(
    {
        *("class_name", "name", "state", "reason", "route", "what", "error", "why", "result"),
        *("donors", "replacers", "weights", "left_out", "gains", "inherited", "chosen"),
    }
)
_REALS: Final = frozenset({"seconds", "value", "weight", "norm", "outer_norm", "cosine", "waited_s"})


def columns_of(table: str) -> tuple[str, ...]:
    """Return the names of a table's columns."""
    if table == "ranks":
        return RANKS
    return (*_FIRST, *(f"{table}_{name}" if name in _FIRST else name for name in KINDS[table]))


def rows(recording: Recording, wanted: Collection[str] = tuple(KINDS)) -> Iterator[tuple[str, tuple[Value, ...]]]:
    """Yield each row of the wanted tables, with the name of its table."""
    clocks = Clocks(recording)
    if "ranks" in wanted:
        for each in recording.ranks:
            header = each.header
            began_at_s = header.clock_s + clocks.offset(each)
            yield (
                "ranks",
                (
                    each.rank,
                    each.incarnation,
                    header.hostname,
                    header.pid,
                    header.transport,
                    began_at_s,
                    each.damage,
                ),
            )
    for each in recording.ranks:
        offset = clocks.offset(each)
        for event in each.events():
            if event.kind in wanted:
                named = zip(KINDS[event.kind], event.fields, strict=False)
                fields = [_plain(field) if name != "what" else str(event.wait) for name, field in named]
                fields += [None] * (len(KINDS[event.kind]) - len(fields))
                yield event.kind, (each.rank, each.incarnation, event.time_s + offset, *fields)


def _plain(field: Any) -> Value:
    if isinstance(field, (list, tuple)):
        return json.dumps(list(field))
    return int(field) if isinstance(field, bool) else field


def export_csv(recording: Recording, folder: Path) -> list[Path]:
    """Write each non-empty table of a recording as ``KIND.csv``, and return the files.

    Remove tables that an earlier export has written.
    """
    writers: dict[str, Any] = {}
    with whole_folder(folder) as written, contextlib.ExitStack() as files:
        for table, row in rows(recording, (*KINDS, "ranks")):
            if table not in writers:
                file = files.enter_context((written / f"{table}.csv").open("w", newline="", encoding="utf-8"))
                writers[table] = csv.writer(file)
                writers[table].writerow(columns_of(table))
            writers[table].writerow(row)
    return _only_written(folder, "csv", writers, _csv_columns)


def export_parquet(recording: Recording, folder: Path) -> list[Path]:
    """Write each non-empty table of a recording as ``KIND.parquet``, and return the files.

    Remove tables that an earlier export has written. Requires pyarrow.
    """
    import pyarrow
    import pyarrow.parquet

    writers: dict[str, Any] = {}
    waiting: dict[str, list[tuple[Value, ...]]] = {}

    def write(table: str) -> None:
        batch, waiting[table] = waiting[table], []
        names = columns_of(table)
        columns = [
            pyarrow.array(column, "double" if name in _REALS and table != "measured" else None)
            for name, column in zip(names, zip(*batch, strict=True), strict=True)
        ]
        content = pyarrow.table(columns, names=names)
        if table not in writers:
            place, types = written / f"{table}.parquet", content.schema
            for number, column in enumerate(types):
                if pyarrow.types.is_null(column.type):
                    kind = "string" if column.name in _TEXTS else "double" if column.name in _REALS else "int64"
                    types = types.set(number, pyarrow.field(column.name, kind))
            writers[table] = files.enter_context(pyarrow.parquet.ParquetWriter(place, types))
        writers[table].write_table(content.cast(writers[table].schema))

    with whole_folder(folder) as written, contextlib.ExitStack() as files:
        for table, row in rows(recording, (*KINDS, "ranks")):
            waiting.setdefault(table, []).append(row)
            if len(waiting[table]) >= _BATCH:
                write(table)
        for table, batch in waiting.items():
            if batch:
                write(table)
    return _only_written(folder, "parquet", writers, lambda path: pyarrow.parquet.read_schema(path).names)


def _csv_columns(path: Path) -> list[str]:
    with path.open(newline="", encoding="utf-8") as file:
        return next(csv.reader(file), [])


def _only_written(
    folder: Path, suffix: str, written: Collection[str], columns_in: Callable[[Path], Sequence[str]]
) -> list[Path]:
    """Return the files of the written tables. Remove the other tables, which an earlier export has written.

    A file of the same name with other columns is not an exported table, and is kept.
    """
    for table in (*KINDS, "ranks"):
        path = folder / f"{table}.{suffix}"
        if table not in written and path.is_file():
            with contextlib.suppress(OSError, ValueError, csv.Error):  # not a table
                if tuple(columns_in(path)) == columns_of(table):
                    path.unlink()
    return [folder / f"{table}.{suffix}" for table in written]
