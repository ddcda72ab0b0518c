"""Reports a failure once: a traceback or a line on the rank that failed, one line on its peers.

A rank that fails prints its traceback, once, tells every peer on the control tag, and waits for their acknowledgements.
Where a lower rank has failed with the same words, it prints a line in place of the traceback. Peers stop at their next
safe point, or where they wait, with RankLostError, and print one line too. A rank that has not stopped within the grace
period is aborted. :mod:`asyncdist.runtime.failing.failure` carries this out.
"""

from __future__ import annotations

import atexit
import signal
import sys
from collections.abc import Callable
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Final

from asyncdist.errors import RankLostError
from asyncdist.runtime.failing.tracebacks import format_error
from asyncdist.tensors.serialization import cut_text, words_of

#: What a rank says of its failure: more than :func:`words_of` says of one exception.
_SUMMARY_NBYTES_MAX: Final = 1200

#: Takes the exception that ends this rank, in place of standard error: what started the rank reports it to the user.
told_elsewhere: ContextVar[Callable[[BaseException], None] | None] = ContextVar("told_elsewhere", default=None)


class FailureReport:
    """Prints an exception early, and keeps the interpreter from printing it again when it reaches the top.

    ``run`` must both show the traceback before the peers (and then the launcher) end this process, and raise the
    exception for its caller. The exception itself is remembered, not its text: another one is printed as usual.
    """

    def __init__(self) -> None:
        self._printed: list[BaseException] = []
        self._lines: list[tuple[BaseException, str]] = []
        self._has_hook = False

    def print_traceback(self, error: BaseException, rank: int) -> None:
        """Print the whole traceback on stderr, from the user's first frame on."""
        self._print(f"asyncdist: rank {rank} failed:\n{format_error(error)}", error)

    def print_line(self, line: str, error: BaseException) -> None:
        """Print one line in place of a traceback."""
        self._print(f"asyncdist: {line}\n", error)

    def shorten(self, error: BaseException, line: str) -> None:
        """Let the interpreter print that line in place of a traceback, if the error reaches the top."""
        self._set_hook()
        self._lines.append((error, line))

    def _print(self, text: str, error: BaseException) -> None:
        tell = told_elsewhere.get()
        if tell is not None:
            tell(error)
            return
        self._set_hook()
        self._printed.append(error)
        sys.stderr.write(text)
        sys.stderr.flush()

    def _set_hook(self) -> None:
        if not self._has_hook:
            self._has_hook = True
            previous = sys.excepthook
            sys.excepthook = lambda kind, value, trace: self._hook(previous, kind, value, trace)
            atexit.register(_let_interrupts_kill)

    def _hook(
        self, previous: Any, kind: type[BaseException], value: BaseException, trace: TracebackType | None
    ) -> None:
        if not (sys.flags.interactive or hasattr(sys, "ps1")):  # else the session goes on
            _let_interrupts_kill()
        told = {id(error): None for error in self._printed} | {id(error): line for error, line in self._lines}
        error: BaseException | None = value
        if isinstance(value, KeyboardInterrupt):  # a Ctrl-C on the way here, of an error that says what happened
            while error is not None and id(error) not in told:
                error = error.__context__
        if id(error) not in told:
            previous(kind, value, trace)
        elif line := told[id(error)]:
            sys.stderr.write(f"asyncdist: {line}\n")


def _let_interrupts_kill() -> None:
    """Let a Ctrl-C that comes while the process ends kill it: a traceback would say nothing.

    It has ended the peers too, which have reported it. For the interpreter's end this is registered last, so it is
    called before other functions of :mod:`atexit`.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def summarise(error: BaseException) -> str:
    """Return one line that says what happened, for the peers.

    It never raises, and is always of a length and in characters that a message can carry: a rank that cannot tell its
    failure leaves the others waiting.
    """
    return cut_text(_summary(error), _SUMMARY_NBYTES_MAX)


def _summary(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(map(_summary, error.exceptions))
    _, text = words_of(error)
    first = text.splitlines()[0] if text else ""
    if is_termination(error):
        first += " (SIGTERM)"
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def is_termination(error: BaseException) -> bool:
    """Return whether SIGTERM ends this rank, or a ``sys.exit`` with the same code."""
    return isinstance(error, SystemExit) and error.code == 128 + signal.SIGTERM


def peer_failed(rank: int, summary: str) -> RankLostError:
    """Return the error that the other ranks raise."""
    return RankLostError(f"rank {rank} failed: {summary}", rank=rank)
