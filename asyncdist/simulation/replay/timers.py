"""Stores a replayed rank's timers, sleeps and deadlines, which end at the recorded points."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from asyncdist.runtime.recording import ObservedEngine
from asyncdist.simulation.processes.event_loop import RankLoop
from asyncdist.waits import WaitId


class _Timer:
    """A scheduled call. Its virtual time ``when_s`` is used only after the end of the record."""

    __slots__ = ("_args", "_call", "_context", "_is_cancelled", "is_over", "what", "when_s")

    def __init__(
        self,
        what: WaitId,
        when_s: float,
        call: Callable[..., object],
        args: tuple[Any, ...],
        context: contextvars.Context | None = None,
    ) -> None:
        self.what = what
        self.when_s = when_s
        self.is_over = self._is_cancelled = False
        self._call = call
        self._args = args
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
            self._context.run(self._call, *self._args)


class Timers:
    """The timers of a replayed rank, which fire at the recorded points instead of by the clock."""

    def __init__(self, loop: RankLoop) -> None:
        self._loop = loop
        self._pending: list[_Timer] = []
        self._is_released = False

    def call_later(self, delay_s: float, what: WaitId, call: Callable[..., object], *args: Any) -> _Timer:
        """Schedule a call, to be made by :meth:`fire` or, after :meth:`release`, at its virtual time."""
        return self._keep(_Timer(what, self._loop.time() + delay_s, call, args))

    def call_at(
        self,
        when_s: float,
        what: WaitId,
        call: Callable[..., object],
        context: contextvars.Context | None,
    ) -> _Timer:
        """Schedule a call, to be made by :meth:`fire` or, after :meth:`release`, at ``when_s`` on the loop's clock."""
        return self._keep(_Timer(what, when_s, call, (), context))

    def _keep(self, timer: _Timer) -> _Timer:
        if self._is_released:
            self._loop.call_at(timer.when_s, timer.fire)
        else:
            self._pending = [each for each in self._pending if not each.is_over]
            self._pending.append(timer)
        return timer

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


class SleepTimers:
    """Wakes tasks after sleeps and work in threads, at the recorded points."""

    def __init__(
        self, loop: RankLoop, timers: Timers, remains_in_record: Callable[[WaitId], bool], look_soon: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._timers = timers
        self._remains_in_record = remains_in_record
        self._look_soon = look_soon
        self._engine: ObservedEngine

    def open(self, engine: ObservedEngine) -> None:
        """Begin to wake tasks, just before the user's ``main`` starts."""
        self._engine = engine

    def wake_by(self, what: WaitId, wake: Callable[[], object]) -> None:
        """Call ``wake`` at the point at which the task woke in the recorded run, or at once if none is recorded."""
        if self._remains_in_record(what):
            self._keep(self._loop.time(), what, wake, None)
        else:
            wake()

    def set_sleep(
        self,
        what: WaitId,
        when_s: float,
        callback: Callable[..., object],
        args: tuple[object, ...],
        context: contextvars.Context | None,
    ) -> object:
        """Set an asyncio timer that fires at the recorded point."""
        return self._keep(when_s, what, functools.partial(callback, *args), context)

    def _keep(
        self, when_s: float, what: WaitId, wake: Callable[[], object], context: contextvars.Context | None
    ) -> object:
        def fire() -> None:
            self._loop.call_soon(self._engine._note_wait_ended, True)
            wake()

        self._look_soon()
        return self._timers.call_at(when_s, what, fire, context)


@dataclass(slots=True, eq=False)
class Deadline:
    """Deadline of a task's wait. Its virtual time ``when_s`` is used only after the end of the record."""

    what: WaitId
    when_s: float
    on_passed: Callable[[], object]
    has_passed: bool = False


class Deadlines:
    """The deadlines of a replayed rank's tasks, which expire at the recorded points."""

    def __init__(self, loop: RankLoop) -> None:
        self._loop = loop
        self._waiting: list[Deadline] = []

    @contextlib.contextmanager
    def waiting(self, what: WaitId, when_s: float, on_passed: Callable[[], object]) -> Iterator[Deadline]:
        """Store a deadline until the context ends. ``on_passed`` is called when it expires, to wake the task."""
        deadline = Deadline(what, when_s, on_passed)
        self._waiting.append(deadline)
        try:
            yield deadline
        finally:
            if deadline in self._waiting:
                self._waiting.remove(deadline)

    def has(self, what: WaitId) -> bool:
        """Return whether a task waits for ``what`` with a deadline."""
        return any(each.what == what for each in self._waiting)

    def expire(self, what: WaitId) -> None:
        """Expire the earliest deadline of the waits for ``what``."""
        self._expire(min((each for each in self._waiting if each.what == what), key=lambda each: each.when_s))

    def release(self) -> None:
        """Let the pending deadlines expire by the virtual clock, because the record has ended."""
        for deadline in self._waiting:
            self._loop.call_at(deadline.when_s, self._expire, deadline)

    def _expire(self, deadline: Deadline) -> None:
        if deadline in self._waiting:
            self._waiting.remove(deadline)
            deadline.has_passed = True
            deadline.on_passed()
