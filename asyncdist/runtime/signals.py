"""Ends a rank after Ctrl-C (SIGINT), SIGTERM or SIGHUP.

The first signal asks the rank to stop at its next await. A second signal ends the process if it arrives ``COPIES_S``
later, or if it is a second Ctrl-C in this process's terminal. The handlers are plain signal handlers, because an event
loop's handlers do not run while torch blocks the loop. When a terminal closes, its ranks receive SIGHUP, often twice,
so a second SIGHUP is ignored.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Sequence
from types import FrameType
from typing import Any, Final

from asyncdist import rank_program
from asyncdist.launchers import launcher_signals
from asyncdist.runtime.failing.process_ends import exit_immediately
from asyncdist.runtime.story.requests import StoryRequests, forget_in_child

logger = logging.getLogger("asyncdist.runtime.signals")

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequest:
    """Distinguishes a user's second stop signal from copies of the first signal.

    Service managers, batch systems and ``timeout`` send one signal to all processes of a job. The launcher and its
    helper processes on each host forward it as well, possibly as SIGTERM. A rank therefore receives several copies of
    the same request. Each Ctrl-C in a terminal, however, reaches the terminal's foreground processes once.
    """

    def __init__(self) -> None:
        self._first_at_s: float | None = None

    def is_copy(self, number: int) -> bool:
        """Record a stop signal. Return whether it is a copy of the first signal."""
        now_s = time.monotonic()
        if self._first_at_s is None:
            self._first_at_s = now_s
            return False
        is_key = number == signal.SIGINT and launcher_signals.is_in_foreground()
        return now_s - self._first_at_s < launcher_signals.COPIES_S and not is_key


class Interrupts:
    """Cancels tasks at the first signal of :data:`SIGNALS`, and ends the process at the second. A context manager.

    Outside the main thread, it does nothing. In a forked process, the previous handlers are restored. SIGHUP has no
    effect if it is ignored, as under ``nohup``, or if the program handles it.

    Args:
        spares_process: Whether the second signal raises KeyboardInterrupt or SystemExit, without waiting for
            ``COPIES_S``, instead of ending the process. Required in a notebook.

    Attributes:
        received: Number of the first received signal, or None.
        raised: The exception of :meth:`end_with`, or None.
        raises_at_once: Whether the first signal raises immediately, because there is no task to cancel.
    """

    def __init__(self, *, spares_process: bool = False) -> None:
        self._spares_process = spares_process
        self.received: int | None = None
        self.raised: BaseException | None = None
        self.raises_at_once = False
        self._request = StopRequest()
        self._is_repeated = False  # whether a later signal has raised, but has not cancelled the tasks again yet
        self._is_pending = False  # a signal was received, but has not cancelled the tasks yet
        self._stopping: asyncio.Handle | None = None  # scheduled cancellation of the tasks
        self._previous: dict[int, Any] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: Sequence[asyncio.Task[Any]] = ()
        self._story_requests = StoryRequests()
        self._waits: dict[int, Callable[[], str | None]] = {}
        self._waited: dict[int, str | None] = {}
        self._leaving: set[asyncio.Task[Any] | None] = set()
        self._are_ending: dict[asyncio.Task[Any] | None, Callable[[], bool]] = {}

    def ask_before(self, rank: int, wait: Callable[[], str | None]) -> None:
        """Register ``wait``, a function that describes the wait of ``rank``. Called before tasks are cancelled."""
        self._waits[rank] = wait

    def spare(self, task: asyncio.Task[Any] | None, is_ending: Callable[[], bool]) -> None:
        """Do not cancel ``task`` if ``is_ending()``, because it may be cleaning up after another rank was stopped."""
        self._are_ending[task] = is_ending

    def note_leaving(self, task: asyncio.Task[Any] | None) -> None:
        """Record that ``main`` has returned in ``task``. A successful exit from other code now changes nothing."""
        self._leaving.add(task)

    def error(self, rank: int) -> BaseException | None:
        """Return the exception for the received signal, with a note that describes the wait of ``rank``, or None."""
        if self.received is None:
            return None
        error = interrupt_error(self.received)
        if waited := self._waited.get(rank):
            error.add_note(f"rank {rank} was waiting for {waited}")
        return error

    def cancel_on_first(self, loop: asyncio.AbstractEventLoop, tasks: Sequence[asyncio.Task[Any]]) -> None:
        """Cancel ``tasks`` at the first signal, or immediately if it has already arrived."""
        self._loop, self._tasks = loop, tasks
        if self.received is not None:
            self._cancel(loop)

    def end_with(self, error: BaseException) -> None:
        """End the tasks with ``error``, which has stopped their loop, unless a task is already being cancelled.

        A callback, a signal handler of the program, or another task of the loop has raised it, or a second signal in a
        notebook, which cancels the tasks again.
        """
        is_repeated, self._is_repeated = self._is_repeated, False
        if any(task.cancelling() for task in self._tasks) and not is_repeated:
            return
        is_success = isinstance(error, SystemExit) and not rank_program.exit_code(error.code)
        spared = self._leaving if is_success else frozenset[asyncio.Task[Any] | None]()
        if all(task.done() or task in spared for task in self._tasks):
            return  # ``main`` has returned, so the rank ends anyway
        self.raised = error
        self._stop(spared)

    def wake_loop(self) -> None:
        """Make the loop run Python code, in which an exception that was set for its thread is raised."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # Raised if the loop is closed.
                self._loop.call_soon_threadsafe(lambda: None)

    def check(self) -> None:
        """Raise KeyboardInterrupt or SystemExit if a signal was received."""
        if self.received is not None:
            raise interrupt_error(self.received)

    def check_pending(self) -> None:
        """Raise KeyboardInterrupt or SystemExit if a signal was received, but has not cancelled a task yet."""
        if self._is_pending:
            self.check()

    def withdraw(self) -> bool:
        """Do not cancel tasks for the received signal.

        Return whether the caller must raise the signal's exception instead.
        """
        is_pending, self._is_pending = self._is_pending, False
        if is_pending and self._stopping is not None:
            self._stopping.cancel()
        return is_pending

    def __enter__(self) -> Interrupts:
        self._story_requests.__enter__()
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                is_free = signal.getsignal(number) is signal.SIG_DFL and not self._spares_process
                if number != signal.SIGHUP or is_free:
                    previous = signal.signal(number, self._handle)
                    self._previous[number] = _default_handler(number) if previous is None else previous
        return self

    def __exit__(self, *_: object) -> None:
        self._story_requests.__exit__()
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP and self.received is not None:
            return
        if self._request.is_copy(number) and not self._spares_process:
            return
        rank_program.write_past_mpirun()
        if number != signal.SIGINT and not self._spares_process:
            _forget_workers()
        if self.received is not None and not self._spares_process:
            rank_program.abort_over_pmi(128 + number)
            exit_immediately(128 + number)
        if self.received is not None or self.raises_at_once:
            self._is_repeated = self.received is not None
            self.received = self.received or number
            raise interrupt_error(number)
        self.received = number
        self._is_pending = True
        if self._loop is not None:
            self._cancel(self._loop)

    def _cancel(self, loop: asyncio.AbstractEventLoop) -> None:
        if loop.is_closed():  # All tasks have ended.
            return
        self._stopping = loop.call_soon_threadsafe(self._stop)

    def _stop(self, spared: Collection[asyncio.Task[Any] | None] = ()) -> None:
        self._is_pending = False
        for rank, wait in self._waits.items():
            try:
                self._waited[rank] = wait()
            except Exception:  # The tasks must be cancelled anyway.
                logger.warning("the wait of rank %d cannot be described", rank, exc_info=True)
        for task in self._tasks:
            if task not in spared and (task not in self._are_ending or not self._are_ending[task]()):
                task.cancel()


def _restore_signals_in_child() -> None:
    """Restore, in a forked child, the signal handlers that the parent had before it hosted a rank.

    With the rank's handlers, ``Process.terminate()`` would have no effect, because the child has no tasks to cancel.
    """
    forget_in_child()
    for number in SIGNALS:
        handler = signal.getsignal(number)
        while isinstance(interrupts := getattr(handler, "__self__", None), Interrupts):
            handler = interrupts._previous[number]
            signal.signal(number, handler)


#: Signal mask of each thread before it forked.
_masks: Final = threading.local()


def _hold_signals() -> None:
    """Block signals during a fork, so that a child loses no signals that arrive before its handlers are set."""
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _release_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _release_signals_in_child() -> None:
    _restore_signals_in_child()
    _release_signals()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_hold_signals, after_in_parent=_release_signals, after_in_child=_release_signals_in_child
    )


def _default_handler(number: int) -> Any:
    """Return Python's default handler. It replaces a handler set by C code, which Python cannot set again."""
    return signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL


def _forget_workers() -> None:
    """Prevent torch from raising RuntimeError about ended DataLoader workers while this process exits."""
    if getattr(signal.getsignal(signal.SIGCHLD), "__module__", "") == "torch.utils.data._utils.signal_handling":
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def interrupt_error(number: int) -> BaseException:
    """Return the exception that Python, and therefore ``run``, raises for a signal."""
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)
