"""Runs blocking calls that need their own event loop, in a new thread if a loop is running, as in a notebook."""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import functools
import threading
from collections.abc import Callable
from typing import Final, TypeVar, cast

from asyncdist.runtime.compute import caught, in_these_modes

T = TypeVar("T")
#: Seconds between two calls of ``meanwhile`` (:func:`call_outside_loop`).
_MEANWHILE_S: Final = 0.25


def is_loop_running() -> bool:
    """Return whether an event loop is running in this thread, as in a notebook cell."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def call_outside_loop(
    fn: Callable[[], T], meanwhile: Callable[[], None] | None = None, wake: Callable[[], None] | None = None
) -> T:
    """Call ``fn`` and return its result. If a loop is running in this thread, a new thread calls ``fn``.

    The new thread has the caller's context variables and torch modes. If a signal handler raises an exception in the
    waiting caller, usually KeyboardInterrupt, the caller continues to wait, and the thread raises the exception.
    ``meanwhile`` is called repeatedly while the caller waits. After an exception, ``wake()`` makes the thread run
    Python code, because its loop may be waiting for events.
    """
    if not is_loop_running():
        return fn()
    call = functools.partial(contextvars.copy_context().run, in_these_modes(fn))
    outcomes: list[tuple[T | None, BaseException | None]] = []
    ended = threading.Event()

    def run() -> None:
        try:
            outcomes.append(caught(call))
        finally:
            ended.set()

    thread = threading.Thread(target=run, name="asyncdist-outside-loop", daemon=True)
    thread.start()
    interrupt: BaseException | None = None
    while not ended.is_set():
        try:
            # After an exception from a signal handler, join() would consider the thread ended.
            while not ended.wait(None if meanwhile is None else _MEANWHILE_S) and meanwhile is not None:
                meanwhile()
        except BaseException as error:
            interrupt = error
            _raise_in(thread, type(error))
            if wake is not None:
                wake()
    returned, failure = outcomes[0] if outcomes else (None, interrupt)
    failure = failure or interrupt  # Raise an interrupt that arrived too late for the thread.
    if failure is not None:
        raise failure
    return cast(T, returned)


def _raise_in(thread: threading.Thread, kind: type[BaseException]) -> None:
    """Raise an exception in a thread at its next Python instruction. A call into C may delay the exception."""
    assert thread.ident is not None, "the thread has been started"
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(kind))
