"""Stores a replayed rank's timers and deadlines, which end at the recorded points."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator

from asyncdist.simulation.processes.event_loop import RankLoop
from asyncdist.waits import WaitId


class _Timer:
    """A scheduled call. Its virtual time ``when_s`` is used only after the end of the record."""

    __slots__ = ("_call", "_context", "_is_cancelled", "is_over", "what", "when_s")

    def __init__(
        self, what: WaitId, when_s: float, call: Callable[[], object], context: contextvars.Context | None
    ) -> None:
        self.what = what
        self.when_s = when_s
        self.is_over = self._is_cancelled = False
        self._call = call
        self._context = context or contextvars.copy_context()

    def cancel(self) -> None:
        self.is_over = self._is_cancelled = True

    def cancelled(self) -> bool:
        return self._is_cancelled

    def when(self) -> float:
        return self.when_s

    def fire(self) -> None:
        """Make the call, unless it was already made or cancelled."""
        if not self.is_over:
            self.is_over = True
            self._context.run(self._call)


class Timers:
    """Stores a replayed rank's timers, or its waits' deadlines, which fire at the recorded points."""

    def __init__(self, loop: RankLoop) -> None:
        self._loop = loop
        self._pending: list[_Timer] = []
        self._is_released = False

    def call_at(
        self, when_s: float, what: WaitId, call: Callable[[], object], context: contextvars.Context | None = None
    ) -> _Timer:
        """Schedule a call, to be made by :meth:`fire` or, after :meth:`release`, at ``when_s`` on the loop's clock."""
        timer = _Timer(what, when_s, call, context)
        if self._is_released:
            self._loop.call_at(when_s, timer.fire)
        else:
            self._pending = [each for each in self._pending if not each.is_over]
            self._pending.append(timer)
        return timer

    @contextlib.contextmanager
    def waiting(self, what: WaitId, when_s: float, wake: Callable[[], object]) -> Iterator[_Timer]:
        """Set a deadline until the context ends. ``wake`` is called when it expires, to wake the waiting task."""
        deadline = self.call_at(when_s, what, wake)
        try:
            yield deadline
        finally:
            deadline.cancel()

    def has(self, what: WaitId) -> bool:
        """Return whether a timer with this identity is pending."""
        return self._first(what) is not None

    def fire(self, what: WaitId) -> None:
        """Make the call of the earliest timer with this identity."""
        timer = self._first(what)
        assert timer is not None, f"no timer {what}"
        timer.fire()

    def release(self) -> None:
        """Let the pending timers fire by the virtual clock, because the record has ended."""
        self._is_released = True
        pending, self._pending = self._pending, []
        for timer in pending:
            self._loop.call_at(timer.when_s, timer.fire)

    def _first(self, what: WaitId) -> _Timer | None:
        waiting = (timer for timer in self._pending if timer.what == what and not timer.is_over)
        return min(waiting, key=lambda timer: timer.when_s, default=None)
