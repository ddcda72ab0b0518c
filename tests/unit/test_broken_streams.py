"""Tests that a failed rank reports its error and ends, whatever the user has put in place of its output and hooks."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import pytest

from asyncdist import local_host, rank_program
from asyncdist.errors import is_consequence
from asyncdist.runtime.failing import failure, failure_report, process_ends, replica_mates
from asyncdist.transports import matching


class WriteOnly:
    """A stream without ``flush``, such as a simple copy to a file."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)


class Raising:
    """A stream whose functions raise an exception that no file raises."""

    def write(self, text: str) -> int:
        raise KeyError(text)

    def flush(self) -> None:
        raise KeyError("flush")


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


class EndError(Exception):
    """Raised instead of the end of the process."""


BROKEN: list[Callable[[], Any]] = [lambda: None, WriteOnly, Raising, closed]


@pytest.fixture
def original(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Return what is written to the original standard error."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "__stderr__", stream)
    return stream


@pytest.mark.parametrize(
    "make, is_original", [(lambda: None, False), (WriteOnly, False), (Raising, True), (closed, True)]
)
def test_a_line_is_printed_without_a_usable_stream(
    make: Callable[[], Any], is_original: bool, original: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: AttributeError was raised before the other ranks were notified of a failure."""
    stream = make()
    monkeypatch.setattr(sys, "stderr", stream)
    local_host.print_line("asyncdist: line")
    assert original.getvalue() == "asyncdist: line\n" * is_original
    assert getattr(stream, "text", "asyncdist: line\n") == "asyncdist: line\n"


@pytest.mark.parametrize("make", BROKEN)
def test_a_process_ends_without_usable_streams(
    make: Callable[[], Any], original: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(*arguments: int) -> None:
        raise EndError(arguments[-1])

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(os, "kill", end)
    monkeypatch.setattr(sys, "stdout", make())
    monkeypatch.setattr(sys, "stderr", make())
    ends: list[tuple[int, Callable[[], object]]] = [
        (3, lambda: process_ends.exit_immediately(3)),
        (1, lambda: process_ends.end_forked_child(0, ValueError("boom"))),
        (1, lambda: process_ends.end_forked_child(0, SystemExit("message"))),
        (0, lambda: rank_program._exit_without_finalize([0])),
        (5, lambda: matching.end_process(1, 5)),
        (signal.SIGKILL, replica_mates.end_as_lost),
    ]
    for code, call in ends:
        with pytest.raises(EndError) as ended:
            call()
        assert ended.value.args == (code,)
    rank_program._await_readers()


@pytest.mark.parametrize("make", BROKEN)
def test_equal_tracebacks_need_no_usable_stream(
    make: Callable[[], Any], original: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_program, "ancestors", lambda: [os.getpid()])
    with local_host.shared_file_variables() as variables:
        hook = rank_program._PrintOnce(variables.get(rank_program.PRINTED_ERRORS_VARIABLE, ""))
        monkeypatch.setattr(sys, "stderr", make())
        for rank in (0, 1):
            monkeypatch.setenv("RANK", str(rank))
            hook(ValueError, ValueError("boom"), None)


def test_a_hook_of_the_user_cannot_keep_a_failed_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: the rank's exit did not end the job, so that other ranks waited for it in MPI_Finalize."""

    def exits(*_: object) -> None:
        sys.exit(7)

    def raises(*_: object) -> None:
        raise KeyError("in the hook")

    for hook, code in ((exits, 7), (raises, 0)):
        monkeypatch.setattr(sys, "excepthook", hook)
        assert rank_program.call_excepthook(ValueError("boom")) == code
    shown = capsys.readouterr().err
    assert shown.index("ValueError: boom") < shown.index("KeyError: 'in the hook'")


def test_a_failure_of_printing_is_told_instead(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with failure._notified_anyway(3, ValueError("boom")):
        raise SystemExit(5)
    assert capsys.readouterr().err == "asyncdist: rank 3 failed: ValueError: boom; printing it failed: SystemExit: 5\n"
    error = KeyboardInterrupt()
    error.__notes__ = [5]
    assert failure._with_notes("line", error) == "line; 5"


def nested_group(depth: int) -> BaseException:
    error: BaseException = ValueError("boom")
    for _ in range(depth):
        error = BaseExceptionGroup("outer", [error])
    return error


@pytest.mark.parametrize(
    ("error", "part"),
    [(SystemExit([1, 2]), "[1, 2]"), (SystemExit({}), "{}"), (nested_group(1_000), "ValueError: boom")],
    ids=["list", "dict", "nested group"],
)
def test_every_failure_can_be_sent_to_the_other_ranks(error: BaseException, part: str) -> None:
    """Regression: ``sys.exit([1, 2])``, or a deeply nested exception group, left the other ranks of a job waiting."""
    assert part in failure_report.summarise(error)
    assert not failure_report.is_stop(error) and not is_consequence(error)
    assert failure_report.is_stop(SystemExit(143)) and not failure_report.is_stop(SystemExit(7))
