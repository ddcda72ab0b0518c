"""Ends this process at once, and ends a process that a rank has forked without touching the rank.

A forked child is not a rank, though it holds a copy of the rank's memory and its descriptors. If it left the world, its
messages would reach the peers as messages of the rank. If it turned the loop, the loop would lose its sockets. If it
called MPI_Finalize, or destroyed the connections of gloo, it would hang or crash, since a fork copies no threads.

So the child ends where it leaves a policy or the world of the rank. An interpreter that exits in a child calls the
functions of :mod:`atexit` that the child has registered, and no others; children of :mod:`multiprocessing` leave out
the functions of their parent, too.
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
    """Leave without MPI_Finalize, which can hang once something has gone wrong."""
    for file in filter(None, (sys.stdout, sys.stderr)):  # Python has none if the descriptor was closed
        with contextlib.suppress(OSError, ValueError):  # its reader has gone
            file.flush()
    os._exit(code)


class _Forks:
    """Knows whether this process has hosted a rank, and prepares the children that it forks from then on.

    Attributes:
        abandon: Called in each child, keyed by their owners.
    """

    def __init__(self) -> None:
        self.abandon: dict[object, Callable[[], None]] = {}
        self.has_hosted = False  # for good: MPI stays open after the world is closed
        self._code = 0
        self._error_before: BaseException | None = None

    def prepare_child(self) -> None:
        """Prepare the end of a child that was just forked."""
        if not self.has_hosted:
            return
        for abandon in self.abandon.values():
            abandon()
        self.abandon.clear()
        self._error_before = _last_error()
        sys.exit = functools.partial(self._note_exit, sys.exit)  # functions of atexit cannot ask for the exit code
        atexit.register(self._end_child)

    def _note_exit(self, exit_python: Callable[[Any], NoReturn], code: Any = None, /) -> NoReturn:
        self._code = rank_program.exit_code(code)
        exit_python(code)

    def _end_child(self) -> None:
        has_failed = _last_error() is not self._error_before
        exit_immediately(1 if has_failed else self._code)


def _last_error() -> BaseException | None:
    """Return the last exception that has ended the program, and was printed."""
    return getattr(sys, "last_value", None)


_forks = _Forks()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forks.prepare_child)


@contextlib.contextmanager
def abandoned_in_children(abandon: Callable[[], None]) -> Iterator[None]:
    """Call ``abandon()`` in each process that is forked in the body of ``with``, which is the life of a rank."""
    owner = object()
    _forks.has_hosted = True
    _forks.abandon[owner] = abandon
    try:
        yield
    finally:
        _forks.abandon.pop(owner, None)


def end_at_next_turn(loop: asyncio.AbstractEventLoop, rank: int) -> None:
    """End this child of ``rank`` when it turns the rank's loop, as each ``await`` does that waits."""
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon(_end_in_loop, rank)


def _end_in_loop(rank: int) -> None:
    sys.stderr.write(
        f"asyncdist: process {os.getpid()} ends: rank {rank} has forked it, and it has come to an await in the loop of "
        "the rank, where only the rank can wait; end such a process with sys.exit() or os._exit()\n"
    )
    exit_immediately(1)


def end_forked_child(process_id: int, error: BaseException | None) -> None:
    """Return if this is process ``process_id``; otherwise end this process, which that process has forked.

    Args:
        process_id: The process that hosts the rank.
        error: The exception with which this process leaves a context of the rank; None if there is none.
    """
    if os.getpid() == process_id:
        return
    while isinstance(error, ForkedChildError) and error.__context__ is not None:
        error = error.__context__  # it was raised in an exit from another context, because of this exception
    if error is not None and not isinstance(error, SystemExit):
        traceback.print_exception(error)
        exit_immediately(1)
    code = error.code if error is not None else 0
    if isinstance(code, str):
        print(code, file=sys.stderr)
    exit_immediately(rank_program.exit_code(code))


@contextlib.contextmanager
def ending_forked_children() -> Iterator[None]:
    """End a process that main has forked where main ends; the body of ``with`` is main."""
    process_id = os.getpid()
    try:
        yield
    except BaseException as error:
        end_forked_child(process_id, error)
        raise
    end_forked_child(process_id, None)
