"""Makes calls that run a loop of their own while a loop is already running, as in a cell of a notebook.

Such a call gets a thread. The caller waits for it, as for any blocking call, and the caller's loop is blocked
meanwhile.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import functools
import threading
from collections.abc import Callable
from typing import Final, TypeVar, cast

from asyncdist.runtime.compute import call_in_modes, caught, torch_modes

T = TypeVar("T")
#: Seconds between two calls of ``meanwhile`` by a waiting caller.
_MEANWHILE_S: Final = 0.25


def is_loop_running() -> bool:
    """Return whether this thread is inside a loop, as a cell of a notebook is."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def call_beside_loop(fn: Callable[[], T], meanwhile: Callable[[], None] | None = None) -> T:
    """Call ``fn`` here or, if this thread is inside a loop, in a thread of its own, and wait for it.

    The thread has the caller's context variables and torch modes. An exception of a signal handler in the waiting
    caller, usually KeyboardInterrupt, is raised in the thread. The caller still waits for the thread's end, so nothing
    keeps computing after the call has returned.

    Args:
        fn: A function without arguments.
        meanwhile: Called repeatedly by the waiting caller, if ``fn`` runs in a thread.
    """
    if not is_loop_running():
        return fn()
    call = functools.partial(contextvars.copy_context().run, call_in_modes, torch_modes(), fn)
    outcomes: list[tuple[T | None, BaseException | None]] = []
    ended = threading.Event()

    def run() -> None:
        try:
            outcomes.append(caught(call))
        finally:
            ended.set()

    thread = threading.Thread(target=run, name="asyncdist-beside-loop", daemon=True)
    thread.start()
    interrupt: BaseException | None = None
    while not ended.is_set():
        try:
            # and not join(), which takes the thread for ended when a signal handler raises
            while not ended.wait(None if meanwhile is None else _MEANWHILE_S) and meanwhile is not None:
                meanwhile()
        except BaseException as error:
            interrupt = error
            _raise_in(thread, type(error))
    returned, failure = outcomes[0] if outcomes else (None, interrupt)
    failure = failure or interrupt  # an interrupt that was too late for the thread still counts
    if failure is not None:
        raise failure
    return cast(T, returned)


def _raise_in(thread: threading.Thread, kind: type[BaseException]) -> None:
    """Raise an exception in a thread at its next Python instruction; calls into C are not interrupted."""
    assert thread.ident is not None, "the thread has been started"
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(kind))
