"""Turns Ctrl-C and SIGTERM into the end of a rank.

SIGINT and SIGTERM are plain signal handlers, since a loop's own do not run while torch blocks it. The first one asks
the rank to stop at its next await, the second one ends the process.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Final

from asyncdist import rank_program
from asyncdist.runtime.failing.process_ends import exit_immediately
from asyncdist.runtime.story.requests import StoryRequests, forget_in_child

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Turns the first SIGINT or SIGTERM into the cancellation of some tasks; the second one ends the process at once.

    In a process of another owner, such as a notebook's kernel, the second one is raised, as Python would.

    A context manager. Does nothing outside the main thread, where Python allows no signal handlers. A process that is
    forked meanwhile gets the handlers back that were there before, see ``_restore_signals_in_child``.

    Args:
        spares_process: raise KeyboardInterrupt (or SystemExit) at the second signal.

    Attributes:
        received: the number of the signal that came, or None.
        raises_at_once: whether the first signal, too, is raised where the program is: no task of a loop would hear.
    """

    def __init__(self, *, spares_process: bool = False) -> None:
        self._spares_process = spares_process
        self.received: int | None = None
        self.raises_at_once = False
        self._is_pending = False  # it has come, and no task has been cancelled for it yet
        self._stopping: asyncio.Handle | None = None  # which will cancel them
        self._previous: dict[int, Any] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: Sequence[asyncio.Task[Any]] = ()
        self._story_requests = StoryRequests()
        self._waits: dict[int, Callable[[], str | None]] = {}
        self._waited: dict[int, str | None] = {}

    def ask_before(self, rank: int, wait: Callable[[], str | None]) -> None:
        """Ask what ``rank`` waits for before its tasks are cancelled; :meth:`error` adds the answer as a note."""
        self._waits[rank] = wait

    def error(self, rank: int) -> BaseException | None:
        """Return what ``rank`` is to raise for a signal that has come, with a note on what it was waiting for."""
        if self.received is None:
            return None
        error = interrupt_error(self.received)
        if waited := self._waited.get(rank):
            error.add_note(f"rank {rank} was waiting for {waited}")
        return error

    def cancel_on_first(self, loop: asyncio.AbstractEventLoop, tasks: Sequence[asyncio.Task[Any]]) -> None:
        """Cancel these tasks when the first signal comes, or at once if it has come already."""
        self._loop, self._tasks = loop, tasks
        if self.received is not None:
            self._cancel(loop)

    def check(self) -> None:
        """Raise KeyboardInterrupt or SystemExit if a signal has come."""
        if self.received is not None:
            raise interrupt_error(self.received)

    def check_pending(self) -> None:
        """Raise as :meth:`check` does, but only if no task has been cancelled for the signal yet.

        A main that catches the cancellation, and returns, decides that the signal does not end the rank. A main that
        blocked the loop until it returned has not heard of the signal.
        """
        if self._is_pending:
            self.check()

    def withdraw(self) -> bool:
        """Cancel no task for the signal that has come; return whether there is one for which none has been cancelled.

        Who withdraws it raises it.
        """
        is_pending, self._is_pending = self._is_pending, False
        if is_pending and self._stopping is not None:
            self._stopping.cancel()
        return is_pending

    def __enter__(self) -> Interrupts:
        self._story_requests.__enter__()
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        self._story_requests.__exit__()
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def handler_before(self, number: int) -> Any:
        """Return the handler of that signal that this one has replaced."""
        return self._previous[number]

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        rank_program.write_past_mpirun()
        if number == signal.SIGTERM and not self._spares_process:
            _forget_workers()
        if self.received is not None and not self._spares_process:
            rank_program.abort_over_pmi(128 + number)
            exit_immediately(128 + number)
        if self.received is not None or self.raises_at_once:
            self.received = self.received or number
            raise interrupt_error(number)
        self.received = number
        self._is_pending = True
        if self._loop is not None:
            self._cancel(self._loop)

    def _cancel(self, loop: asyncio.AbstractEventLoop) -> None:
        if loop.is_closed():  # everything has ended already
            return
        self._stopping = loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        self._is_pending = False
        self._waited = {rank: wait() for rank, wait in self._waits.items()}
        for task in self._tasks:
            task.cancel()


def _restore_signals_in_child() -> None:
    """Give a forked process the signal handlers that its parent had before it hosted a rank.

    The child has no loop that could cancel anything: ``Process.terminate()``, and with it the end of a daemon process
    or of a ``Pool``, would have no effect. It is done at the fork and not when a signal comes, since a handler in
    Python is not called while the child blocks in C.
    """
    forget_in_child()
    for number in SIGNALS:
        handler = signal.getsignal(number)
        while isinstance(interrupts := getattr(handler, "__self__", None), Interrupts):
            handler = interrupts.handler_before(number)
            signal.signal(number, handler)


class _Held:
    """Holds back signals while this thread forks: one that came before the child has its handlers would be lost."""

    def __init__(self) -> None:
        self._masks = threading.local()

    def hold(self) -> None:
        self._masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

    def release(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._masks.before)

    def release_in_child(self) -> None:
        _restore_signals_in_child()
        self.release()


if hasattr(os, "register_at_fork"):
    _held = _Held()
    os.register_at_fork(before=_held.hold, after_in_parent=_held.release, after_in_child=_held.release_in_child)


def _forget_workers() -> None:
    """Let the end of a worker of torch's DataLoader raise nothing any more, since this process ends.

    Launchers, mpirun for one, send SIGTERM to the workers of a rank, too. torch's handler then raises RuntimeError
    wherever the rank is: in a callback of its loop, or while the interpreter exits.
    """
    if getattr(signal.getsignal(signal.SIGCHLD), "__module__", "") == "torch.utils.data._utils.signal_handling":
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def interrupt_error(number: int) -> BaseException:
    """Return what ``run`` raises after that signal, which is what Python by itself would raise."""
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)
