"""Extends pdb to debug a single rank of a simulation."""

from __future__ import annotations

import asyncio
import pdb  # noqa: T100 - the purpose of this module
import sys
import types
from collections.abc import Callable
from typing import Any


class RankDebugger(pdb.Pdb):
    """Python's debugger for one rank: breakpoints, steps and ``breakpoint()`` work only while that rank runs."""

    def __init__(self, rank: int) -> None:
        super().__init__(nosigint=True)
        self._rank = rank

    def watch(self, main: Callable[..., Any], rank: int) -> None:
        """Stop on the first line of ``main`` if ``rank`` is the debugged rank."""
        if rank != self._rank:
            return
        sys.breakpointhook = self._on_breakpoint
        code = getattr(main, "__code__", None)
        self.reset()
        self.botframe = sys._getframe()
        self.set_continue()
        if code is not None:
            refusal = self.set_break(code.co_filename, code.co_firstlineno, temporary=True, funcname=code.co_name)
            if refusal:
                self.message(refusal)
        sys.settrace(self.trace_dispatch)

    def close(self) -> None:
        """Remove all breakpoints and stop tracing."""
        sys.settrace(None)
        sys.breakpointhook = sys.__breakpointhook__

    def stop_here(self, frame: types.FrameType) -> bool:
        """Return whether to stop, as pdb does; always False while another rank runs."""
        return self._is_running() and bool(super().stop_here(frame))

    def break_here(self, frame: types.FrameType) -> bool:
        """Return whether a breakpoint applies, as pdb does; always False while another rank runs."""
        return self._is_running() and bool(super().break_here(frame))

    def _on_breakpoint(self, *_: Any, **__: Any) -> None:
        if self._is_running():
            self.set_trace(sys._getframe(1))

    def _is_running(self) -> bool:
        try:
            return getattr(asyncio.get_running_loop(), "rank", None) == self._rank
        except RuntimeError:
            return False
