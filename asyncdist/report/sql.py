"""Answers SQL queries on the tables of a recording, with SQLite in memory."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator, Sequence
from typing import Final

from asyncdist.errors import AsyncdistError
from asyncdist.recording.events import KINDS
from asyncdist.recording.reader import Recording
from asyncdist.report.tables import Value, columns_of, rows

#: Actions that a query may take. :func:`_authorize` refuses all others, because ATTACH and VACUUM INTO create files.
_ALLOWED: Final = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE})
#: Number of SQLite virtual machine instructions between points at which Python can handle signals.
_INSTRUCTIONS_BETWEEN: Final = 100_000


class QueryError(AsyncdistError):
    """Raised if a query cannot be answered. The message is one line for the user."""


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
    # json_each declares its columns with this action, and writes nothing.
    if action == sqlite3.SQLITE_UPDATE and first == "sqlite_master":
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
