"""Implements ``asyncdist report``, ``asyncdist trace``, ``asyncdist export`` and ``asyncdist query``."""

from __future__ import annotations

import argparse
import contextlib
import csv
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from asyncdist.errors import AsyncdistError
from asyncdist.recording.command_output import print_to, refuse
from asyncdist.recording.file_errors import why_not_written
from asyncdist.validation import printable
from asyncdist.wording import plural


class _WriteError(AsyncdistError):
    """Raised if the file or folder given with -o cannot be written."""


@contextlib.contextmanager
def _writing(what: str, allowed: str) -> Iterator[None]:
    """Convert an OSError in the context to an error that says why ``what`` cannot be written and what -o accepts."""
    try:
        yield
    except OSError as error:
        raise _WriteError(f"{what} cannot be written: {why_not_written(error)}; -o takes {allowed}") from error


def _name(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("must not be empty, got ''; omit -o to use the job's name")
    return text


def add_to(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the subcommands.

    Each parser's option ``call`` is a function that runs its command and returns the exit code.
    """
    report = add_parser(
        "report",
        help="write a recording as one HTML page",
        usage="asyncdist report DIR [--job JOB] [-o FILE]",
    )
    report.add_argument("-o", "--out", type=_name, metavar="FILE", help="the page (default: JOB.html)")
    report.set_defaults(call=lambda options: run_report(options.folder, options.job, options.out))
    trace = add_parser(
        "trace",
        help="write a recording as a trace for Perfetto or chrome://tracing",
        usage="asyncdist trace DIR [--job JOB] [-o FILE] [--profile FILE ...]",
    )
    trace.add_argument("-o", "--out", type=_name, metavar="FILE", help="the trace (default: JOB.trace.json.gz)")
    trace.add_argument(
        "--profile",
        metavar="FILE",
        nargs="+",
        default=[],
        help="traces of torch's profiler to add",
    )
    trace.set_defaults(call=lambda options: run_trace(options.folder, options.job, options.out, options.profile))
    export = add_parser(
        "export",
        help="write a recording as tables",
        usage="asyncdist export DIR [--job JOB] [-o FOLDER] [--format csv|parquet]",
    )
    export.add_argument("-o", "--out", type=_name, metavar="FOLDER", help="folder for the tables (default: JOB-tables)")
    export.add_argument(
        "--format", choices=("csv", "parquet"), default="csv", help="format of the tables (default: csv)"
    )
    export.set_defaults(call=lambda options: run_export(options.folder, options.job, options.out, options.format))
    query = add_parser(
        "query",
        help="query a recording in SQL",
        usage='asyncdist query DIR [--job JOB] "SELECT rank, max(value) FROM metric GROUP BY rank"',
    )
    query.set_defaults(call=lambda options: run_query(options.folder, options.job, options.statement))
    for parser in (report, trace, export, query):
        parser.add_argument("folder", metavar="DIR", help="folder that was given to --record")
        parser.add_argument("--job", help="name of the job, if the folder has recordings of several")
    query.add_argument("statement", metavar="SQL", help="a statement for SQLite; each kind of event is a table")


def run(options: argparse.Namespace) -> int:
    """Run the chosen command, and return the exit code. Print errors about a recording or a file in one line."""
    try:
        return int(options.call(options))
    except (AsyncdistError, OSError) as error:
        return refuse(options.command, error)


def run_report(folder: str, job: str | None, out: str | None) -> int:
    """Write the HTML page of a recording, and return the exit code."""
    from asyncdist.recording.reader import read_recording

    try:
        from asyncdist.report.page import render
    except ImportError as error:
        return refuse("report", f"the report needs plotly ({error}): pip install 'asyncdist[report]'")
    recording = read_recording(folder, job)
    path = Path(out or f"{recording.job}.html")
    page = render(recording)
    from asyncdist.report.whole_files import whole_file  # imported only here, because it imports tempfile

    with _writing("the page", "a file in an existing folder"), whole_file(path) as file:
        file.write_text(page, encoding="utf-8")
    return _print_path("report", path, f"{path.stat().st_size / 1e6:.1f} MB; open it in a browser")


def run_trace(folder: str, job: str | None, out: str | None, profiles: Sequence[str]) -> int:
    """Write the trace of a recording, and return the exit code."""
    from asyncdist.recording.reader import read_recording
    from asyncdist.report.trace import write_trace

    recording = read_recording(folder, job)
    path = Path(out or f"{recording.job}.trace.json.gz")
    with _writing("the trace", "a file in an existing folder"):
        count = write_trace(recording, path, [Path(each) for each in profiles])
    what = f"{count} entries, {len(recording.ranks)} ranks; open it at https://ui.perfetto.dev"
    return _print_path("trace", path, what)


def run_export(folder: str, job: str | None, out: str | None, kind: str) -> int:
    """Write the tables of a recording, and return the exit code."""
    from asyncdist.recording.reader import read_recording
    from asyncdist.report import tables

    try:
        recording = read_recording(folder, job)
        to = Path(out or f"{recording.job}-tables")
        write = tables.export_csv if kind == "csv" else tables.export_parquet
        with _writing("the tables", "a folder, which is created if necessary"):
            files = write(recording, to)
    except ImportError as error:  # pyarrow is not installed, or refuses the installed numpy
        return refuse("export", f"--format parquet needs pyarrow ({error}): pip install 'asyncdist[parquet]'")
    return _print("export", f"wrote {plural(len(files), 'table')} to {to}: {', '.join(file.name for file in files)}")


def run_query(folder: str, job: str | None, statement: str) -> int:
    """Print the result of an SQL query, as a table on a terminal and otherwise as CSV. Return the exit code."""
    from asyncdist.recording.reader import read_recording
    from asyncdist.report import sql

    names, found = sql.query(read_recording(folder, job), statement)
    return print_to("query", lambda: _print_rows(names, found))


def _print_rows(names: Sequence[str], found: Iterable[Sequence[object]]) -> None:
    if not _print_table(names, found):
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(_printable(names))
        writer.writerows(map(_printable, found))


def _printable(row: Sequence[object]) -> list[object]:
    """Return the cells with control characters escaped, except newlines and tabs, which CSV allows."""
    return [printable(cell, keep="\n\t") if isinstance(cell, str) else cell for cell in row]


def _print(command: str, text: str) -> int:
    return print_to(command, lambda: print(printable(text)))


def _print_path(command: str, path: Path, what: str) -> int:
    """Print the path of a written file, unless it is a device or a pipe, such as ``/dev/stdout``."""
    return _print(command, f"wrote {path}, {what}") if path.is_file() else 0


def _print_table(names: Sequence[str], found: Iterable[Sequence[object]]) -> bool:
    """Print a table if the output is a terminal and rich is installed, and return whether it was printed."""
    if not sys.stdout.isatty():
        return False
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ModuleNotFoundError:
        return False
    table = Table()
    for name in names:
        table.add_column(Text(printable(name)))
    for row in found:
        table.add_row(*(Text("" if value is None else printable(str(value), keep="\n")) for value in row))
    Console().print(table)
    return True
