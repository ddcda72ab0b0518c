"""Opens one world for the whole process, for code that cannot use a ``with`` block, such as a trainer's callbacks."""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from asyncdist import rank_program
from asyncdist.blocking.callers import LoopCaller, find_caller, set_process_caller
from asyncdist.blocking.world import World, open_world
from asyncdist.errors import LateError
from asyncdist.runtime.failing.process_ends import ProgramEnd, exit_immediately
from asyncdist.runtime.failing.tracebacks import user_traceback
from asyncdist.runtime.world import refuse_inside_a_world, set_world_of_process


def process_world() -> World:
    """Return the open world, or open a world that lasts until the process ends if none is open.

    When the interpreter exits, this rank leaves that world and waits for the other ranks. If an exception ends the
    program, this rank fails with that exception. This includes the SystemExit that ``sys.exit(3)``, SIGTERM or SIGHUP
    raises. Only ``asyncdist run`` also detects ``exit(3)`` and ``raise SystemExit(3)``.

    Raises:
        LocalProtocolError: Called in a rank's coroutine.
        BaseException: Any error that :func:`open_world` raises.
    """
    global _until_exit
    caller = find_caller()
    if caller is not None:
        caller.note_opened()
        return World(caller)
    refuse_inside_a_world()
    block = open_world()
    world = block.__enter__()
    if isinstance(world._caller, LoopCaller):
        set_process_caller(world._caller)
        set_world_of_process(world.awaited)
        _until_exit = _UntilExit(block, world._caller)
    return world


def end_process_world() -> None:
    """Leave the world that :func:`process_world` has opened, if any, and wait until the other ranks leave it too.

    ``MPI.Finalize()`` also leaves the world.
    """
    if _until_exit is not None:
        _until_exit.leave(None)


class _UntilExit:
    """Exits an entered context manager when the interpreter exits or an exception ends the program."""

    def __init__(self, block: AbstractContextManager[Any], caller: LoopCaller) -> None:
        self._block: AbstractContextManager[Any] | None = block
        self._caller = caller
        self._end = ProgramEnd()
        self._process_id = os.getpid()
        self._hook_before = sys.excepthook
        sys.excepthook = self._on_exception
        atexit.register(self._on_exit)

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        was_open = self._block is not None
        try:
            self.leave(error)
        except BaseException as raised:
            if isinstance(error, LateError) and isinstance(raised, SystemExit):
                exit_immediately(rank_program.exit_code(raised.code))  # after this hook, Python would exit with 1
            trace = raised.__traceback__
            if isinstance(raised, KeyboardInterrupt) and isinstance(error, KeyboardInterrupt):
                # One Ctrl-C was raised in the user's code, and again in leave. Show the user's traceback.
                trace, raised.__suppress_context__ = user_traceback(error), True
            kind, error = type(raised), raised.with_traceback(trace)
        is_replaced = sys.excepthook != self._on_exception  # by a later hook, which prints only unreported errors
        hook = sys.excepthook if was_open and is_replaced else self._hook_before
        hook(kind, error, trace)

    def _on_exit(self) -> None:
        try:
            self.leave(self._end.error(self._caller.signalled()))
        except SystemExit as error:  # raised for a signal, and already reported
            exit_immediately(rank_program.exit_code(error.code))
        except BaseException as error:  # at this point, only os._exit can change the exit code
            rank_program.call_excepthook(error)  # prints only errors not yet reported
            exit_immediately(1)

    def leave(self, error: BaseException | None) -> None:
        """Exit the context manager with the error that ends the program, or None."""
        block, self._block = self._block, None
        if block is not None and os.getpid() == self._process_id:  # a forked child is not a rank of the world
            set_process_caller(None)
            block.__exit__(type(error) if error is not None else None, error, getattr(error, "__traceback__", None))


_until_exit: _UntilExit | None = None


def leave_with(error: BaseException) -> BaseException:
    """Leave this process's world, if any, because ``error`` ended the program. Return the error to print."""
    if _until_exit is not None:
        try:
            _until_exit.leave(error)
        except BaseException as raised:  # this error has already been reported
            return raised if isinstance(error, KeyboardInterrupt | LateError) else error
    return error
