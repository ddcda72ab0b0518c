"""Tests tables and query results that are made from recordings, and the commands that write files."""

from __future__ import annotations

import csv
import errno
import json
import os
import resource
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from support.recorded_run import counted

from asyncdist import cli
from asyncdist.recording.events import KINDS
from asyncdist.recording.reader import Recording, read_recording
from asyncdist.recording.writer import RecordOptions, RecordWriter, header_of
from asyncdist.report import sql, tables


def test_tables_have_every_event(recording: Recording, tmp_path: Path) -> None:
    files = tables.export_csv(recording, tmp_path / "tables")
    kinds = counted(recording)
    assert {file.stem for file in files} == {*kinds, "ranks"}
    for file in files:
        with file.open(newline="") as opened:
            header, *content = csv.reader(opened)
        assert tuple(header) == tables.columns_of(file.stem)
        assert len(content) == (4 if file.stem == "ranks" else kinds[file.stem])
        if file.stem == "applied":
            donors = [json.loads(row[header.index("donors")]) for row in content]
            assert all(0 <= donor < 4 for each in donors for donor in each) and any(donors)


def test_parquet_has_the_same_rows(recording: Recording, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed", exc_type=ImportError)
    tables.export_parquet(recording, tmp_path)
    metrics = parquet.read_table(tmp_path / "metric.parquet").to_pylist()
    assert len(metrics) == counted(recording)["metric"] and metrics[0].keys() == set(tables.columns_of("metric"))


def test_tables_of_an_earlier_export_are_removed(recording: Recording, tmp_path: Path) -> None:
    """Regression: a folder had tables of two jobs if the second job had fewer kinds of events.

    A file with other columns is not such a table.
    """
    earlier = [tmp_path / name for name in ("lost.csv", "returned.csv", "failed.csv", "mine.csv", "lost.parquet")]
    for path in earlier:
        path.write_text("epoch,loss\n" if path.stem == "failed" else ",".join(tables.columns_of("lost")) + "\n")
    earlier[1].write_text(",".join(tables.columns_of("returned")) + "\n")
    files = tables.export_csv(recording, tmp_path)
    assert set(tmp_path.iterdir()) == {*files, *earlier[2:]}


def test_parquet_has_what_the_first_rows_of_a_table_have_not(tmp_path: Path) -> None:
    """Regression: export raised ArrowNotImplementedError if the first averages of a table had no coordinator."""
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed", exc_type=ImportError)
    writer = RecordWriter(RecordOptions(tmp_path / "run"), lambda: 100.0, 0)
    writer.open(header_of(job="0000abcd", rank=0, size=4, incarnation=0, transport="local", hostname="here"))
    for number in range(10_001):
        coordinator, route = (3, "direct") if number == 10_000 else (None, None)
        writer.note("applied", 0, number, number, [0], None, None, 0.5, 8, coordinator, route)
    writer.close()
    tables.export_parquet(read_recording(tmp_path / "run"), tmp_path / "tables")
    last = parquet.read_table(tmp_path / "tables" / "applied.parquet").slice(10_000).to_pylist()[0]
    assert (last["coordinator"], last["route"], last["weights"]) == (3, "direct", None)


def test_a_query_is_answered(recording: Recording) -> None:
    names, found = sql.query(recording, "SELECT rank, count(*) AS steps FROM step GROUP BY rank ORDER BY rank")
    assert (names, list(found)) == (["rank", "steps"], [(rank, 30) for rank in range(4)])
    joined = "SELECT applied.rank FROM applied JOIN ranks ON applied.rank = ranks.rank WHERE nbytes > 0"
    assert len(list(sql.query(recording, joined)[1])) == counted(recording)["applied"]
    for statement in ("SELECT * FROM nothing", "nonsense"):
        with pytest.raises(sql.QueryError, match="policy, step, "):
            sql.query(recording, statement)
    with pytest.raises(sql.QueryError, match=r"loss; .*step are rank, incarnation, "):
        sql.query(recording, "SELECT loss FROM step")
    assert {"rank", "incarnation", "time_s", *KINDS["step"]} == set(tables.columns_of("step"))


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_the_commands(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "query", str(folder), "SELECT max(iteration) FROM step")
    assert (code, out) == (0, "max(iteration)\n29\n")
    code, out, _ = run(capsys, "trace", str(folder), "-o", str(tmp_path / "t.json"))
    assert code == 0 and "open it at https://ui.perfetto.dev" in out and (tmp_path / "t.json").exists()
    code, out, _ = run(capsys, "report", str(folder), "-o", str(tmp_path / "r.html"))
    assert code == 0 and "open it in a browser" in out and "<h1>Job " in (tmp_path / "r.html").read_text()
    code, out, _ = run(capsys, "export", str(folder), "-o", str(tmp_path / "tables"))
    assert code == 0 and "step.csv" in out


A_FILE = "; -o takes a file in an existing folder"
A_FOLDER = "; -o takes a folder, which is created if necessary"


@pytest.mark.parametrize(
    ("command", "out", "said"),
    [
        ("report", "folder", "the page cannot be written: '{}/folder' is a folder" + A_FILE),
        ("report", "none/page", "the page cannot be written: there is no folder '{}/none'" + A_FILE),
        ("report", "file/more/page", "the page cannot be written: '{}/file' is a file, not a folder" + A_FILE),
        ("trace", "folder", "the trace cannot be written: '{}/folder' is a folder" + A_FILE),
        ("trace", "none/trace.gz", "the trace cannot be written: there is no folder '{}/none'" + A_FILE),
        ("export", "file", "the tables cannot be written: '{}/file' is a file, not a folder" + A_FOLDER),
        ("report", "full", "the page cannot be written: No space left on device" + A_FILE),
    ],
)
def test_what_cannot_be_written_is_told_in_words(
    command: str, out: str, said: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: the error was Python's: [Errno 21] Is a directory."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "full").symlink_to("/dev/full")
    code, _, err = run(capsys, command, str(folder), "-o", str(tmp_path / out))
    assert (code, err) == (2, f"asyncdist {command}: {said.format(tmp_path)}\n")


@pytest.mark.parametrize(
    ("command", "out"),
    [
        (["report"], "page.html"),
        (["trace"], "job.trace.json.gz"),
        (["trace"], "job.trace.json"),
        (["export"], "tables"),
        (["export", "--format", "parquet"], "tables"),
    ],
)
def test_a_full_disk_leaves_the_old_file_and_no_partial_one(
    command: list[str], out: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: half of a new page replaced the complete earlier page."""
    if "parquet" in command:
        pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed", exc_type=ImportError)

    def run_on_small_disk() -> None:
        limit, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, most))
        try:
            code, told, err = run(capsys, *command, str(folder), "-o", str(tmp_path / out))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
        assert (code, told, err.count("\n")) == (2, "", 1), err
        assert os.strerror(errno.EFBIG) in err

    run_on_small_disk()
    assert not list(tmp_path.iterdir())
    assert run(capsys, *command, str(folder), "-o", str(tmp_path / out))[0] == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    run_on_small_disk()
    assert before and {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_an_empty_name_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("report", "trace", "export"):
        code, _, err = run(capsys, command, str(folder), "-o", "")
        assert code == 2 and "must not be empty, got ''; omit -o to use the job's name" in err


#: A query that fails in its second row.
OVERFLOW = "SELECT abs(-9223372036854775807 - value) FROM json_each('[0, 1]')"


@pytest.mark.parametrize(
    ("statement", "why"),
    [
        ("SELECT lacking", "no such column: lacking"),
        (OVERFLOW, "integer overflow"),
        ("SELECT '\udcff'", "the query is not UTF-8"),
        ("SELECT 1; SELECT 2", "You can only execute one statement at a time"),
        ("", "got a statement that returns no rows"),
    ],
)
def test_a_query_that_is_refused_is_one_line(
    statement: str, why: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, "query", str(folder), statement)
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith("asyncdist query: ") and why in err


@pytest.mark.parametrize(
    "statement",
    [
        "ATTACH 'made.db' AS other",
        "VACUUM INTO 'made.db'",
        "PRAGMA query_only = OFF",
        "PRAGMA journal_mode = WAL",
        "CREATE TEMP TABLE more (x)",
        "DELETE FROM step",
        "DROP TABLE step",
        "SELECT load_extension('x')",
    ],
)
def test_a_query_only_reads_and_leaves_no_file(
    statement: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: ATTACH and VACUUM INTO were refused, and left an empty file."""
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, "query", str(folder), statement)
    assert (code, err.count("\n")) == (2, 1)
    assert "the query must be one SELECT that changes nothing and creates no file" in err
    assert not list(tmp_path.iterdir())


def test_names_in_an_answer_are_not_obeyed_by_a_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "query", str(folder), "SELECT 'a' || char(27) || '[2J', 'two' || char(10) || 'lines'")
    assert code == 0 and out.endswith('a\\x1b[2J,"two\nlines"\n')


def test_a_job_of_too_many_ranks_has_no_report_but_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: tables of all pairs of a million ranks were begun."""
    monkeypatch.chdir(tmp_path)
    to = RecordWriter(RecordOptions(tmp_path / "run"), lambda: 1.0, 0)
    to.open(header_of(job="0000abcd", rank=0, size=65536, incarnation=0, transport="local", hostname="here"))
    to.note("sent", 65535, 100, 8)
    to.close()
    code, _, err = run(capsys, "report", str(tmp_path / "run"))
    assert (code, err.count("\n")) == (2, 1) and "at most 2048 ranks, but job" in err
    assert run(capsys, "query", str(tmp_path / "run"), "SELECT dest FROM sent")[:2] == (0, "dest\n65535\n")


def test_text_that_is_not_utf8_is_shown_with_backslashes(recording: Recording) -> None:
    assert list(sql.query(recording, "SELECT CAST(x'61ff' AS TEXT)")[1]) == [("a\\xff",)]


@pytest.mark.parametrize("words", [("report",), ("trace",), ("export",), ("query", "SELECT 1")])
def test_a_folder_without_a_recording_is_one_line(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command, *rest = words
    code, out, err = run(capsys, command, str(tmp_path), *rest)
    assert (code, out) == (2, "")
    assert err.startswith(f"asyncdist {command}: {tmp_path} ") and err.count("\n") == 1


def test_ctrl_c_ends_a_long_query_with_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    timer = threading.Timer(0.3, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    read = tables.rows

    def rows(*arguments: Any) -> Any:
        timer.start()  # from now on the command is in SQLite, or about to enter it
        return read(*arguments)

    monkeypatch.setattr(sql, "rows", rows)
    numbers = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 1000000000) SELECT count(*) FROM n"
    assert run(capsys, "query", str(folder), numbers) == (130, "", "asyncdist query: interrupted\n")


@pytest.mark.parametrize("words", [("report",), ("trace",), ("export",), ("query", "SELECT 1")])
def test_ctrl_c_while_a_recording_is_read_is_one_line(
    words: tuple[str, ...], folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> Recording:
        raise KeyboardInterrupt

    monkeypatch.setattr("asyncdist.recording.reader.read_recording", interrupted)
    command, *rest = words
    assert run(capsys, command, str(folder), *rest) == (130, "", f"asyncdist {command}: interrupted\n")
