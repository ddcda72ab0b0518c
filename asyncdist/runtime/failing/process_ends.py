"""Ends this process immediately, and ends forked children of a rank without affecting the rank.

A forked child has a copy of the rank's memory and file descriptors, but is not a rank. It would disturb the rank, hang
or crash if it left the world, ran the rank's loop, called MPI_Finalize or closed gloo's connections. A child therefore
ends as soon as it leaves a policy or the rank's world. At its exit, only the :mod:`atexit` functions run that the child
itself has registered.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from asyncdist import local_host, rank_program
from asyncdist.errors import LocalProtocolError


class ForkedChildError(LocalProtocolError):
    """Raised if a forked child of a rank uses the rank's world."""


def exit_immediately(code: int) -> NoReturn:
    """Exit this process without MPI_Finalize, which can hang after a failure."""
    for file in filter(None, (sys.stdout, sys.stderr)):  # A stream is None if its descriptor was closed.
        with contextlib.suppress(OSError, ValueError):  # Raised if nothing reads the stream any longer.
            file.flush()
    os._exit(code)


class _Forks:
    """Records whether this process has hosted a rank, and prepares its forked children for their exit.

    Attributes:
        abandon: Functions that each child calls, by the object that registered them.
    """

    def __init__(self) -> None:
        self.abandon: dict[object, Callable[[], None]] = {}
        self.has_hosted = False  # stays True, because MPI stays open after the world is closed
        self._code = 0
        self._error_before: BaseException | None = None

    def prepare_child(self) -> None:
        """Drop the rank's state in a new child, and make the child exit without the rank's ``atexit`` functions."""
        if not self.has_hosted:
            return
        for abandon in self.abandon.values():
            abandon()
        self.abandon.clear()
        self._error_before = _last_error()
        # Record the exit code, which atexit functions cannot read.
        sys.exit = functools.partial(self._note_exit, sys.exit)
        atexit.register(self._end_child)

    def _note_exit(self, exit_python: Callable[[Any], NoReturn], code: Any = None, /) -> NoReturn:
        self._code = rank_program.exit_code(code)
        exit_python(code)

    def _end_child(self) -> None:
        has_failed = _last_error() is not self._error_before
        exit_immediately(1 if has_failed else self._code)


def _last_error() -> BaseException | None:
    """Return the exception that ends the program and has been printed, or None."""
    return getattr(sys, "last_value", None)


_forks = _Forks()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forks.prepare_child)


@contextlib.contextmanager
def abandoned_in_children(abandon: Callable[[], None]) -> Iterator[None]:
    """Call ``abandon()`` in each process that is forked during the body of ``with``."""
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


def _end_in_loop(rank: int) -> None:
    local_host.print_line(
        f"asyncdist: process {os.getpid()} ends: it is a forked child of rank {rank} and has awaited in the rank's "
        "event loop, which only the rank may do; end such a process with sys.exit() or os._exit()"
    )
    exit_immediately(1)


def end_forked_child(process_id: int, error: BaseException | None) -> None:
    """End this process, with an exit code for ``error``, if it is a forked child of the process ``process_id``."""
    if os.getpid() == process_id:
        return
    while isinstance(error, ForkedChildError) and error.__context__ is not None:
        error = error.__context__  # This exception made the child leave an inner context.
    if error is not None and not isinstance(error, SystemExit):
        traceback.print_exception(error)
        exit_immediately(1)
    code = error.code if error is not None else 0
    if isinstance(code, str):
        print(code, file=sys.stderr)
    exit_immediately(rank_program.exit_code(code))


@contextlib.contextmanager
def ending_forked_children() -> Iterator[None]:
    """End each child that main has forked when the child leaves the body of ``with``, in which main runs."""
    process_id = os.getpid()
    try:
        yield
    except BaseException as error:
        end_forked_child(process_id, error)
        raise
    end_forked_child(process_id, None)
