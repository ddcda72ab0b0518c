"""Ends this process immediately, and ends forked children of a rank without affecting the rank.

A forked child has a copy of the rank's memory and file descriptors, but is not a rank. It would disturb the rank, hang
or crash if it left the world, ran the rank's loop, called MPI_Finalize or closed gloo's connections. A child therefore
ends as soon as it leaves the context of a policy or of the rank's world. At its exit, it runs only the :mod:`atexit`
functions that it has registered itself.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import opcode
import os
import select
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

from asyncdist import local_host, rank_program
from asyncdist.errors import LocalProtocolError


class ForkedChildError(LocalProtocolError):
    """Raised if a forked child of a rank uses the rank's world."""


def exit_immediately(code: int) -> NoReturn:
    """Exit this process without MPI_Finalize, which can hang after a failure."""
    try:
        rank_program.flush_output()
    finally:  # A signal handler may raise.
        os._exit(code)


class ProgramEnd:
    """Finds the exception that ends the program, because Python does not pass it to :mod:`atexit` functions.

    Python keeps a printed exception in :data:`sys.last_value`, but neither prints nor keeps a SystemExit. This object
    therefore records the exit codes passed to :func:`sys.exit`. The last code counts unless the program has caught the
    SystemExit. In that case, the main thread's outermost frame has ended with a return instruction. The code of a
    SystemExit that was raised in another way, such as ``raise SystemExit(3)`` or ``exit(3)``, is unknown.
    """

    def __init__(self) -> None:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        while frame is not None and frame.f_back is not None:
            frame = frame.f_back
        self._outermost = frame
        self._error_before = _last_error()
        self._exit: SystemExit | None = None
        sys.exit = functools.partial(self._note_exit, sys.exit)

    def _note_exit(self, exit_python: Callable[[Any], NoReturn], code: Any = None, /) -> NoReturn:
        if threading.current_thread() is threading.main_thread():  # in another thread, sys.exit ends only the thread
            self._exit = SystemExit(code)
        exit_python(code)

    def error(self, signalled: BaseException | None = None, *, is_forked: bool = False) -> BaseException | None:
        """Return the exception that ends the program, or None if the program has succeeded.

        Args:
            signalled: Exception that a signal handler has raised. It counts if :func:`sys.exit` was not called.
            is_forked: Whether this process is a forked child. If it is not, a notebook or an interactive Python
                continues after an exception.
        """
        last = _last_error()
        if last is not self._error_before and (is_forked or not hasattr(sys, "ps1")):
            return last
        if self._outermost is None or _has_returned(self._outermost):
            return None
        error = self._exit or signalled
        return None if isinstance(error, SystemExit) and not rank_program.exit_code(error.code) else error


def _has_returned(frame: FrameType) -> bool:
    """Return whether a frame that is no longer running has ended with a return instruction."""
    return frame.f_lasti >= 0 and opcode.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN_")


class _Forks:
    """Records whether this process has hosted a rank, and prepares its forked children for their exit.

    Attributes:
        abandon: Functions that each forked child calls, by the object that registered them.
    """

    def __init__(self) -> None:
        self.abandon: dict[object, Callable[[], None]] = {}
        self.has_hosted = False  # stays True, because MPI stays open after the world is closed

    def prepare_child(self) -> None:
        """Drop the rank's state in a new child, and let the child exit without the rank's ``atexit`` functions."""
        if not self.has_hosted:
            return
        for abandon in self.abandon.values():
            abandon()
        self.abandon.clear()
        atexit.register(_end_child, ProgramEnd())


def _end_child(end: ProgramEnd) -> None:
    error = end.error(is_forked=True)
    if isinstance(error, SystemExit):
        exit_immediately(rank_program.exit_code(error.code))
    exit_immediately(0 if error is None else 1)


def _last_error() -> BaseException | None:
    """Return the last exception that Python has printed, or None."""
    return getattr(sys, "last_value", None)


_forks = _Forks()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forks.prepare_child)


@contextlib.contextmanager
def abandoned_in_children(abandon: Callable[[], None]) -> Iterator[None]:
    """Call ``abandon()`` in each process that is forked during the ``with`` block."""
    owner = object()
    _forks.has_hosted = True
    _forks.abandon[owner] = abandon
    try:
        yield
    finally:
        _forks.abandon.pop(owner, None)


def end_at_next_turn(loop: asyncio.AbstractEventLoop, rank: int) -> None:
    """End this forked child of ``rank`` as soon as it awaits anything in the rank's loop."""
    with contextlib.suppress(RuntimeError):  # Raised if the loop is closed.
        loop.call_soon(_end_in_loop, rank)
        _watch_nothing(loop)


def _watch_nothing(loop: asyncio.AbstractEventLoop) -> None:
    """Let this child's copy of the loop wait for no descriptor.

    The child shares the loop's epoll object and pipes with the rank. One turn of the loop would read the bytes that
    wake the rank. Kqueue objects are not inherited.
    """
    selector = getattr(loop, "_selector", None)
    find = getattr(loop, "_get_backend_id", None) or getattr(selector, "fileno", None)  # of uvloop, of asyncio
    watching = -1 if find is None else find()
    if watching >= 0 and hasattr(select, "epoll"):
        with contextlib.suppress(OSError), select.epoll() as empty:
            os.dup2(empty.fileno(), watching, inheritable=False)


def _end_in_loop(rank: int) -> None:
    local_host.print_line(
        f"asyncdist: process {os.getpid()} ends: it is a forked child of rank {rank} and has awaited in the rank's "
        "event loop, which only the rank may do; end such a process with sys.exit() or os._exit()"
    )
    exit_immediately(1)


def end_forked_child(process_id: int, error: BaseException | None) -> None:
    """If this process is a forked child of the process ``process_id``, end it with an exit code for ``error``."""
    if os.getpid() == process_id:
        return
    while isinstance(error, ForkedChildError) and error.__context__ is not None:
        error = error.__context__  # Because of this exception, the child has left an inner context.
    if error is not None and not isinstance(error, SystemExit):
        rank_program.write_error("".join(traceback.format_exception(error)))
        exit_immediately(1)
    code = error.code if error is not None else 0
    if isinstance(code, str):
        rank_program.write_error(f"{code}\n")
    exit_immediately(rank_program.exit_code(code))


@contextlib.contextmanager
def ending_forked_children() -> Iterator[None]:
    """End each child that ``main``, which runs in the ``with`` block, has forked once the child leaves the block."""
    process_id = os.getpid()
    try:
        yield
    except BaseException as error:
        end_forked_child(process_id, error)
        raise
    end_forked_child(process_id, None)
