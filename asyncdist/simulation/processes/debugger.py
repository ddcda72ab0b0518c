"""Extends pdb to debug a single rank of a simulation."""

from __future__ import annotations

import asyncio
import inspect
import os
import pdb  # noqa: T100 - the purpose of this module
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

#: File in the current folder with commands that pdb executes when it starts.
_COMMANDS: Final = ".pdbrc"
#: Module that provides the main function for scripts that have none.
_RUNNER: Final = "asyncdist.simulation.run_script"


class RankDebugger(pdb.Pdb):
    """Python's debugger for one rank: breakpoints, steps and ``breakpoint()`` work only while that rank runs."""

    def __init__(self, rank: int) -> None:
        may_read = _may_read_commands(Path.cwd(), os.getuid())
        super().__init__(nosigint=True, readrc=may_read)
        self._rank = rank
        if not may_read:
            self.message(f"{_COMMANDS} belongs to another user than the current folder, and is not executed")

    def watch(self, main: Callable[..., Any], rank: int) -> None:
        """Stop on the first line of ``main`` if ``rank`` is the debugged rank."""
        if rank != self._rank or main.__module__ == _RUNNER:
            return
        sys.breakpointhook = self._on_breakpoint
        code = getattr(inspect.unwrap(main), "__code__", None)
        self.reset()
        self.botframe = sys._getframe()
        self.set_continue()
        if code is not None:
            refusal = self.set_break(code.co_filename, code.co_firstlineno, temporary=True, funcname=code.co_name)
            if refusal:
                self.message(refusal)
        sys.settrace(self.trace_dispatch)

    def watch_script(self, frame: types.FrameType | None, rank: int) -> None:
        """Stop on the next line of a script that opens its world without a main function, if ``rank`` is debugged.

        Args:
            frame: Innermost frame of the stack on which the script runs.
        """
        if rank != self._rank:
            return
        sys.breakpointhook = self._on_breakpoint
        self.reset()
        self.set_continue()
        is_found = False
        while frame is not None:
            frame.f_trace = self.trace_dispatch
            self.botframe = frame
            if not is_found and frame.f_globals.get("__name__") == "__main__":
                is_found = True
                self.set_next(frame)
            frame = frame.f_back
        sys.settrace(self.trace_dispatch)

    def close(self) -> None:
        """Remove all breakpoints and stop tracing."""
        sys.settrace(None)
        sys.breakpointhook = sys.__breakpointhook__

    def stop_here(self, frame: types.FrameType) -> bool:
        """Return whether to stop, as in pdb, but False while another rank runs."""
        return self._is_running() and bool(super().stop_here(frame))

    def break_here(self, frame: types.FrameType) -> bool:
        """Return whether a breakpoint applies, as in pdb, but False while another rank runs."""
        return self._is_running() and bool(super().break_here(frame))

    def _on_breakpoint(self, *_: Any, **__: Any) -> None:
        if self._is_running():
            self.set_trace(sys._getframe(1))

    def _is_running(self) -> bool:
        try:
            return getattr(asyncio.get_running_loop(), "rank", None) == self._rank
        except RuntimeError:
            return False


def _may_read_commands(folder: Path, user: int) -> bool:
    """Return whether pdb may execute ``.pdbrc`` in the current folder, which all users may share (``/tmp``)."""
    try:
        owner = (folder / _COMMANDS).lstat().st_uid
    except OSError:
        return True
    return owner in (user, 0, folder.stat().st_uid)
