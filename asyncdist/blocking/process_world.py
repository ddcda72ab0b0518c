"""Keeps one world open for code that has no block to put into it: callbacks of a trainer, lines of a plain loop."""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from asyncdist.blocking.callers import LoopCaller, find_caller, set_process_caller
from asyncdist.blocking.world import World, open_world
from asyncdist.runtime.world import refuse_inside_a_world


def process_world() -> World:
    """Return the world that is open here; open one that lasts as long as this process, where there is none.

    This rank leaves it when the interpreter exits, and waits for the others as at the end of a block. An exception that
    ends the program is the failure of this rank.

    Raises:
        LocalProtocolError: in a coroutine of a rank.
        BaseException: as :func:`open_world`.
    """
    caller = find_caller()
    if caller is not None:
        return World(caller)
    refuse_inside_a_world()
    block = open_world()
    world = block.__enter__()
    if isinstance(world._caller, LoopCaller):
        set_process_caller(world._caller)
        _UntilExit(block)
    return world


class _UntilExit:
    """Leaves a block when the interpreter exits, or with the exception that ends the program.

    Args:
        block: has been entered.
    """

    def __init__(self, block: AbstractContextManager[Any]) -> None:
        self._block: AbstractContextManager[Any] | None = block
        self._hook_before = sys.excepthook
        sys.excepthook = self._on_exception
        atexit.register(self._on_exit)

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        was_open = self._block is not None
        try:
            self._leave(kind, error, trace)
        except BaseException as raised:
            kind, error, trace = type(raised), raised, raised.__traceback__
        is_replaced = sys.excepthook != self._on_exception  # by one that knows what has been reported
        hook = sys.excepthook if was_open and is_replaced else self._hook_before
        hook(kind, error, trace)

    def _on_exit(self) -> None:
        try:
            self._leave(None, None, None)
        except BaseException as error:  # too late to change the exit code in another way
            self._hook_before(type(error), error, error.__traceback__)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    def _leave(self, *error: Any) -> None:
        block, self._block = self._block, None
        if block is not None:
            set_process_caller(None)
            block.__exit__(*error)
