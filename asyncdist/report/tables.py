"""Converts a recording to tables: one for each kind of event, and one of the ranks.

The row of an event has the rank, its incarnation, the time in seconds since the job began, and the fields listed in
:data:`asyncdist.recording.events.KINDS`. A field with the name of one of the first three columns gets the table's name
as a prefix, for example ``lost_rank``. Lists are JSON strings, for example ``[0, 2]``.
"""

from __future__ import annotations

import contextlib
import csv
import json
import re
import sqlite3
from collections.abc import Collection, Iterator, Sequence
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
#: String columns. Types are declared because the first rows of a column may have no values. The default is integer.
_TEXTS: Final = frozenset(
    {
        *("class_name", "name", "state", "reason", "route", "what", "error", "why", "result"),
        *("donors", "replacers", "weights", "left_out", "gains", "inherited", "chosen"),
    }
)
_REALS: Final = frozenset({"seconds", "value", "weight", "norm", "outer_norm", "cosine", "waited_s"})
#: Actions that a query may take. :func:`_authorize` refuses all others, because ATTACH and VACUUM INTO create files.
_ALLOWED: Final = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE})
#: Number of instructions of SQLite's virtual machine between points at which Python can handle signals.
_INSTRUCTIONS_BETWEEN: Final = 100_000


class QueryError(Exception):
    """A query cannot be answered. The message is one line for the user."""


def columns_of(table: str) -> tuple[str, ...]:
    """Return the names of a table's columns."""
    if table == "ranks":
        return RANKS
    return (*_FIRST, *(f"{table}_{name}" if name in _FIRST else name for name in KINDS[table]))


def rows(recording: Recording, wanted: Collection[str] = tuple(KINDS)) -> Iterator[tuple[str, tuple[Value, ...]]]:
    """Yield the rows of the wanted tables, each with the name of its table."""
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
    """Write each table that is not empty as ``KIND.csv``, and return the files."""
    writers: dict[str, Any] = {}
    with whole_folder(folder) as written, contextlib.ExitStack() as files:
        for table, row in rows(recording, (*KINDS, "ranks")):
            if table not in writers:
                file = files.enter_context((written / f"{table}.csv").open("w", newline="", encoding="utf-8"))
                writers[table] = csv.writer(file)
                writers[table].writerow(columns_of(table))
            writers[table].writerow(row)
    return [folder / f"{table}.csv" for table in writers]


def export_parquet(recording: Recording, folder: Path) -> list[Path]:
    """Write each table that is not empty as ``KIND.parquet``, with pyarrow, and return the files."""
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
    return [folder / f"{table}.parquet" for table in writers]


def query(recording: Recording, statement: str) -> tuple[list[str], Iterator[Sequence[Value]]]:
    """Run an SQL statement, in SQLite's dialect, on the tables. Return the column names and the rows.

    Raise QueryError if the statement is not a query, or if SQLite rejects it, possibly while the rows are read.
    """
    words = set(re.findall(r"\w+", statement.lower()))
    wanted = [table for table in (*KINDS, "ranks") if table in words]
    connection = sqlite3.connect(":memory:")
    connection.text_factory = lambda data: data.decode("utf-8", "backslashreplace")
    for table in (*KINDS, "ranks"):
        names = ", ".join(f'"{name}"' for name in columns_of(table))
        connection.execute(f'CREATE TABLE "{table}" ({names})')
    inserts = {table: f'INSERT INTO "{table}" VALUES ({", ".join("?" * len(columns_of(table)))})' for table in wanted}
    for table, row in rows(recording, wanted):
        connection.execute(inserts[table], row)
    connection.commit()
    connection.execute("PRAGMA query_only = ON")
    connection.execute("PRAGMA temp_store = MEMORY")
    connection.set_authorizer(_authorize)
    connection.set_progress_handler(lambda: 0, _INSTRUCTIONS_BETWEEN)
    try:
        cursor = connection.execute(statement)
    except (sqlite3.Error, ValueError) as error:  # ValueError for invalid UTF-8 or a NUL character
        raise _refusal(error, wanted) from error
    if cursor.description is None:
        raise QueryError("the query must be one SELECT, got a statement that returns no rows")
    return [each[0] for each in cursor.description], _fetched(cursor, wanted)


def _authorize(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    """Return SQLITE_OK for actions that only read, and otherwise SQLITE_DENY (sqlite.org/c3ref/set_authorizer.html)."""
    if action == sqlite3.SQLITE_FUNCTION:
        return sqlite3.SQLITE_DENY if second == "load_extension" else sqlite3.SQLITE_OK
    if (
        action == sqlite3.SQLITE_UPDATE and first == "sqlite_master"
    ):  # json_each declares its columns, which writes nothing
        return sqlite3.SQLITE_OK
    return sqlite3.SQLITE_OK if action in _ALLOWED else sqlite3.SQLITE_DENY


def _fetched(cursor: sqlite3.Cursor, wanted: Sequence[str]) -> Iterator[Sequence[Value]]:
    try:
        yield from cursor
    except sqlite3.Error as error:
        raise _refusal(error, wanted) from error


def _refusal(error: Exception, wanted: Sequence[str]) -> QueryError:
    """Return an error with SQLite's reason and the existing tables or columns. Raise KeyboardInterrupt after Ctrl-C."""
    if str(error) == "interrupted":  # SQLite replaces the exception that a signal handler raised
        raise KeyboardInterrupt from error
    why = "the query is not UTF-8" if isinstance(error, UnicodeError) else str(error)
    if why.startswith(("not authorized", "authorization denied")):
        return QueryError(f"the query must be one SELECT that changes nothing and creates no file: {why}")
    there = [f"the tables are {', '.join((*KINDS, 'ranks'))}"]
    if why.startswith("no such column") and wanted:
        there = [f"the columns of {table} are {', '.join(columns_of(table))}" for table in wanted]
    return QueryError("; ".join([f"the query cannot be run: {why}", *there]))
