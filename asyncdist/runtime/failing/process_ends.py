"""Ends this process immediately, and ends processes that a rank has forked without affecting the rank.

A forked child is not a rank, although it has a copy of the rank's memory and descriptors. If it left the world, the
peers would receive its messages as messages of the rank. If it ran the loop, the rank's loop would lose its sockets. If
it called MPI_Finalize, or closed the connections of gloo, it would hang or crash, since a fork copies no threads.

Therefore a child ends as soon as it leaves a policy or the world of the rank. At its exit only those :mod:`atexit`
functions run that the child itself has registered, as in children of :mod:`multiprocessing`.
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

from asyncdist import rank_program
from asyncdist.errors import LocalProtocolError


class ForkedChildError(LocalProtocolError):
    """A process that a rank has forked uses the rank's world."""


def exit_immediately(code: int) -> NoReturn:
    """Exit without MPI_Finalize, which can hang after a failure."""
    for file in filter(None, (sys.stdout, sys.stderr)):  # None if the descriptor was closed
        with contextlib.suppress(OSError, ValueError):  # the reader is gone
            file.flush()
    os._exit(code)


class _Forks:
    """Records whether this process has hosted a rank, and prepares the children that it forks afterwards.

    Attributes:
        abandon: Functions to call in each child, by their owners.
    """

    def __init__(self) -> None:
        self.abandon: dict[object, Callable[[], None]] = {}
        self.has_hosted = False  # never reset: MPI stays open after the world is closed
        self._code = 0
        self._error_before: BaseException | None = None

    def prepare_child(self) -> None:
        """Prepare a new child for its end."""
        if not self.has_hosted:
            return
        for abandon in self.abandon.values():
            abandon()
        self.abandon.clear()
        self._error_before = _last_error()
        sys.exit = functools.partial(self._note_exit, sys.exit)  # atexit functions cannot read the exit code
        atexit.register(self._end_child)

    def _note_exit(self, exit_python: Callable[[Any], NoReturn], code: Any = None, /) -> NoReturn:
        self._code = rank_program.exit_code(code)
        exit_python(code)

    def _end_child(self) -> None:
        has_failed = _last_error() is not self._error_before
        exit_immediately(1 if has_failed else self._code)


def _last_error() -> BaseException | None:
    """Return the printed exception that ends the program; or None."""
    return getattr(sys, "last_value", None)


_forks = _Forks()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forks.prepare_child)


@contextlib.contextmanager
def abandoned_in_children(abandon: Callable[[], None]) -> Iterator[None]:
    """Call ``abandon()`` in each process forked during the body of ``with``, which is the life of a rank."""
    owner = object()
    _forks.has_hosted = True
    _forks.abandon[owner] = abandon
    try:
        yield
    finally:
        _forks.abandon.pop(owner, None)


def end_at_next_turn(loop: asyncio.AbstractEventLoop, rank: int) -> None:
    """End this child of ``rank`` if it runs the rank's loop, as every waiting ``await`` does."""
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon(_end_in_loop, rank)


def _end_in_loop(rank: int) -> None:
    sys.stderr.write(
        f"asyncdist: process {os.getpid()} ends: rank {rank} has forked it, and it awaits in the loop of the rank, "
        "which only the rank may do; end such a process with sys.exit() or os._exit()\n"
    )
    exit_immediately(1)


def end_forked_child(process_id: int, error: BaseException | None) -> None:
    """Return if this is process ``process_id``; otherwise end this process, a forked child of it.

    Args:
        process_id: Process that hosts the rank.
        error: Exception with which this process leaves a context of the rank; or None.
    """
    if os.getpid() == process_id:
        return
    while isinstance(error, ForkedChildError) and error.__context__ is not None:
        error = error.__context__  # the exception that led to the exit from an inner context
    if error is not None and not isinstance(error, SystemExit):
        traceback.print_exception(error)
        exit_immediately(1)
    code = error.code if error is not None else 0
    if isinstance(code, str):
        print(code, file=sys.stderr)
    exit_immediately(rank_program.exit_code(code))


@contextlib.contextmanager
def ending_forked_children() -> Iterator[None]:
    """End processes that main has forked when they leave main, the body of ``with``."""
    process_id = os.getpid()
    try:
        yield
    except BaseException as error:
        end_forked_child(process_id, error)
        raise
    end_forked_child(process_id, None)
