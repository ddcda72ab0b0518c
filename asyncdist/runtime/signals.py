"""Turns Ctrl-C and SIGTERM into the end of a rank.

SIGINT and SIGTERM have plain signal handlers, since a loop's handlers do not run while torch blocks it. The first
signal asks the rank to stop at its next await, the second one ends the process.
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
    """Cancels some tasks at the first SIGINT or SIGTERM, and ends the process at the second one.

    In a process with another owner, such as a notebook's kernel, the second signal raises instead, as in plain Python.

    This is a context manager. It does nothing outside the main thread, where Python allows no signal handlers. A forked
    process gets the previous handlers back; see ``_restore_signals_in_child``.

    Args:
        spares_process: Whether to raise KeyboardInterrupt (or SystemExit) at the second signal.

    Attributes:
        received: Number of the received signal; or None.
        raises_at_once: Whether the first signal also raises at the program's current line, because no task would be
            cancelled.
    """

    def __init__(self, *, spares_process: bool = False) -> None:
        self._spares_process = spares_process
        self.received: int | None = None
        self.raises_at_once = False
        self._is_pending = False  # a signal was received, and no task has been cancelled for it yet
        self._stopping: asyncio.Handle | None = None  # will cancel the tasks
        self._previous: dict[int, Any] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: Sequence[asyncio.Task[Any]] = ()
        self._story_requests = StoryRequests()
        self._waits: dict[int, Callable[[], str | None]] = {}
        self._waited: dict[int, str | None] = {}

    def ask_before(self, rank: int, wait: Callable[[], str | None]) -> None:
        """Call ``wait``, which describes the wait of ``rank``, before its tasks are cancelled, for :meth:`error`."""
        self._waits[rank] = wait

    def error(self, rank: int) -> BaseException | None:
        """Return the exception of ``rank`` for a received signal, with a note about its wait."""
        if self.received is None:
            return None
        error = interrupt_error(self.received)
        if waited := self._waited.get(rank):
            error.add_note(f"rank {rank} was waiting for {waited}")
        return error

    def cancel_on_first(self, loop: asyncio.AbstractEventLoop, tasks: Sequence[asyncio.Task[Any]]) -> None:
        """Cancel these tasks at the first signal, or at once if it was already received."""
        self._loop, self._tasks = loop, tasks
        if self.received is not None:
            self._cancel(loop)

    def check(self) -> None:
        """Raise KeyboardInterrupt or SystemExit if a signal was received."""
        if self.received is not None:
            raise interrupt_error(self.received)

    def check_pending(self) -> None:
        """Raise as :meth:`check` does, but only if no task has been cancelled for the signal yet.

        A main that catches the cancellation and returns has handled the signal. A main that blocked the loop until it
        returned was not notified of it.
        """
        if self._is_pending:
            self.check()

    def withdraw(self) -> bool:
        """Cancel no task for the received signal; return whether there is a signal that the caller must now raise."""
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
        """Return the previous handler of the signal."""
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
        if loop.is_closed():  # everything has ended
            return
        self._stopping = loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        self._is_pending = False
        self._waited = {rank: wait() for rank, wait in self._waits.items()}
        for task in self._tasks:
            task.cancel()


def _restore_signals_in_child() -> None:
    """Give a forked process the signal handlers that its parent had before it hosted a rank.

    The child has no loop that could cancel anything, so ``Process.terminate()``, and with it the end of a daemon
    process or of a ``Pool``, would have no effect. This is done at the fork, since a Python handler is not called while
    the child blocks in C.
    """
    forget_in_child()
    for number in SIGNALS:
        handler = signal.getsignal(number)
        while isinstance(interrupts := getattr(handler, "__self__", None), Interrupts):
            handler = interrupts.handler_before(number)
            signal.signal(number, handler)


class _Held:
    """Blocks signals while this thread forks, since a signal before the child has its handlers would be lost."""

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
    """Keep the end of torch's DataLoader workers from raising, because this process is ending.

    Launchers such as mpirun also send SIGTERM to the workers of a rank. torch's handler would then raise RuntimeError
    anywhere in the rank: in a callback of its loop, or while the interpreter exits.
    """
    if getattr(signal.getsignal(signal.SIGCHLD), "__module__", "") == "torch.utils.data._utils.signal_handling":
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def interrupt_error(number: int) -> BaseException:
    """Return the exception that ``run`` raises after the signal, which is also Python's default."""
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)
