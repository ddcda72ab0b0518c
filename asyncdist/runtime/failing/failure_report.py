"""Prints the failure of a rank exactly once, and summarises it for the other ranks.

A failed rank prints its traceback, or one line if a lower rank has failed with the same error, and notifies the other
ranks. They stop with RankLostError, and print one line each (:mod:`asyncdist.runtime.failing.failure`).
"""

from __future__ import annotations

import atexit
import signal
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Final

from asyncdist import local_host
from asyncdist.errors import RankLostError, inner_errors
from asyncdist.runtime.failing.tracebacks import format_error
from asyncdist.tensors.serialization import cut_text, name_and_message

#: Maximum size of a rank's failure summary, in bytes.
_SUMMARY_NBYTES_MAX: Final = 1200
#: Names of the signals that end a rank with SystemExit, by exit code.
_TERMINATIONS: Final[Mapping[int, str]] = {128 + number: number.name for number in (signal.SIGTERM, signal.SIGHUP)}

#: Function that receives the exception that ends this rank. Set by programs that start ranks and report their failures.
failure_reporter: ContextVar[Callable[[BaseException], None] | None] = ContextVar("failure_reporter", default=None)


class FailureReport:
    """Prints exceptions early, and prevents the interpreter from printing the same exceptions again.

    ``run`` must print the traceback before another rank or the launcher ends this process, and must also raise the
    exception.
    """

    def __init__(self) -> None:
        # Errors that the interpreter must not print, or print as one line.
        self._lines: list[tuple[BaseException, str | None]] = []

    def print_traceback(self, error: BaseException, rank: int) -> None:
        """Print the traceback on stderr, beginning with the user's first frame."""
        self._print(f"asyncdist: rank {rank} failed:\n{format_error(error).rstrip()}", error)

    def print_line(self, line: str, error: BaseException) -> None:
        """Print one line about an error, instead of its traceback."""
        self._print(f"asyncdist: {line}", error)

    def shorten(self, error: BaseException, line: str) -> None:
        """Let the interpreter print ``line`` instead of a traceback if ``error`` ends the program."""
        self._add(error, line)

    def _print(self, text: str, error: BaseException) -> None:
        report = failure_reporter.get()
        if report is not None:
            report(error)
            return
        self._add(error, None)
        local_host.print_line(text)

    def _add(self, error: BaseException, line: str | None) -> None:
        self._lines.append((error, line))
        if len(self._lines) == 1:
            previous = sys.excepthook
            sys.excepthook = lambda kind, value, trace: self._hook(previous, kind, value, trace)
            atexit.register(_let_interrupts_kill)

    def _hook(
        self, previous: Any, kind: type[BaseException], value: BaseException, trace: TracebackType | None
    ) -> None:
        if not (sys.flags.interactive or hasattr(sys, "ps1")):  # The program continues in an interactive session.
            _let_interrupts_kill()
        printed = {id(error): line for error, line in self._lines}
        error: BaseException | None = value
        if isinstance(value, KeyboardInterrupt):  # Ctrl-C was pressed while another error was being raised.
            while error is not None and id(error) not in printed:
                error = error.__context__
        if id(error) not in printed:
            previous(kind, value, trace)
        elif line := printed[id(error)]:
            local_host.print_line(f"asyncdist: {line}")


def _let_interrupts_kill() -> None:
    """Let Ctrl-C during the interpreter's exit end the process without a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def summarise(error: BaseException) -> str:
    """Return a one-line summary of an error, short enough for a message to the other ranks. Never raises."""
    return cut_text("; ".join(map(_summary, inner_errors(error))), _SUMMARY_NBYTES_MAX)


def _summary(error: BaseException) -> str:
    _, text = name_and_message(error)
    first = text.splitlines()[0] if text else ""
    if name := termination_of(error):
        first += f" ({name})"
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def termination_of(error: BaseException) -> str:
    """Return the name of the signal (SIGTERM or SIGHUP) that has caused ``error``, or an empty string.

    The error of ``sys.exit`` with the corresponding exit code is treated like the signal.
    """
    # The argument of sys.exit may be any object, and dictionaries accept only hashable keys.
    return _TERMINATIONS.get(error.code, "") if isinstance(error, SystemExit) and type(error.code) is int else ""


def is_stop(error: BaseException) -> bool:
    """Return whether ``error`` ends this rank because a signal has asked it to stop."""
    return isinstance(error, KeyboardInterrupt) or bool(termination_of(error))


def peer_failed(rank: int, summary: str) -> RankLostError:
    """Return the error that all other ranks raise after ``rank`` has failed."""
    return RankLostError(f"rank {rank} failed: {summary}", rank=rank)
