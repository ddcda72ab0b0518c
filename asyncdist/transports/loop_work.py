"""Reports whether an event loop has anything to run, so that a safe point (a yield to the loop) can be skipped if not.

An iteration of the loop takes 20 to 50 us after torch has replaced the contents of the CPU's caches. :class:`LoopWork`
reads the loop's own queue of ready callbacks, timers and tables of descriptors, so no callback is delayed. Some events,
such as the end of ``loop.getaddrinfo``, do not show in these objects. Therefore, an iteration is due every 100 ms in
any case.

In asyncio's selector loops, these objects are attributes. uvloop has no names for them, but :func:`gc.get_referents`
returns them. They are identified by means of a trial callback and a trial timer. If one is not found, every safe point
yields.
"""

from __future__ import annotations

import asyncio
import gc
import socket
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from time import monotonic
from typing import Any, Final
from weakref import WeakValueDictionary

#: Maximum seconds between two iterations, even if no work is visible.
TURN_PERIOD_S: Final = 0.1
#: A safe point always yields to the loop if it follows the previous one within this many seconds. The yield then costs
#: little. Without it, a task that polls without computing would keep the GIL from other threads.
SPIN_S: Final = 50e-6
#: Number of timers above which a safe point yields instead of checking each timer.
TIMER_COUNT_MAX: Final = 8
#: Current task of each loop. With cold caches, this dict of asyncio takes 1 us, and `asyncio.current_task` takes 5 us.
_tasks: Final[dict[asyncio.AbstractEventLoop, Any]] = getattr(asyncio.tasks, "_current_tasks", {})


class LoopWork:
    """Reports whether an iteration of a loop would run anything.

    Args:
        ready: The loop's queue of ready callbacks.
        timers: The loop's set of timers. None for asyncio's loops, which replace their list of timers now and then.
        tables: The loop's tables of descriptors, transports, servers and processes.
        own_count: Number of entries of ``tables`` that belong to the loop itself.

    Attributes:
        is_running: Whether the loop is already running. Starting and stopping it for an iteration takes 30 us.
        spin_s: Seconds since the last call of :meth:`has_work` below which it returns True if the loop is running.
        turn_period_s: Maximum seconds between calls of :meth:`has_work` that return True.
    """

    __slots__ = (
        "_asked_at",
        "_deadlines",
        "_loop",
        "_own_count",
        "_ran_at",
        "_ready",
        "_seen",
        "_spared",
        "_tables",
        "_timers",
        "is_running",
        "spin_s",
        "turn_period_s",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        ready: deque[asyncio.Handle],
        timers: Collection[asyncio.TimerHandle] | None,
        tables: tuple[Collection[Any], ...],
        own_count: int,
    ) -> None:
        self._loop = loop
        self._ready = ready
        self._timers = timers
        self._tables = tables
        self._own_count = own_count
        self._spared: set[int] = set()
        self._seen: list[asyncio.TimerHandle] = []  # timers at the last check
        self._deadlines: list[float] = []
        self._asked_at = 0.0
        self._ran_at = 0.0  # time at which has_work last returned True, after which the loop ran
        self.is_running = True
        self.spin_s = SPIN_S
        self.turn_period_s = TURN_PERIOD_S

    def spare(self, descriptor: int) -> None:
        """Ignore ``descriptor``, which the loop already watches, in later calls of :meth:`has_work`."""
        if descriptor not in self._spared:
            self._spared.add(descriptor)
            self._own_count += _count_entries(self._tables, [descriptor])

    def has_work(self, spared: asyncio.Handle | None) -> bool:
        """Return whether an iteration would run a callback other than ``spared``, or may do work that cannot be seen.

        The caller is a task of the loop. A cancellation that takes effect at the task's next yield is also work.
        """
        now = monotonic()
        away_s = now - self._asked_at
        self._asked_at = now
        is_spinning = self.is_running and away_s < self.spin_s
        if is_spinning or now - self._ran_at > self.turn_period_s or self._sees_work(now, spared):
            self._ran_at = now
            return True
        return False

    def _sees_work(self, now: float, spared: asyncio.Handle | None) -> bool:
        ready_count = len(self._ready)
        if ready_count > 1 or (ready_count and self._ready[0] is not spared):
            return True
        entry_count = 0
        for table in self._tables:
            entry_count += len(table)
        if entry_count != self._own_count or self._timer_count() > TIMER_COUNT_MAX or self._is_timer_due(now, spared):
            return True
        task = _tasks.get(self._loop)
        return task is None or bool(task._must_cancel)

    def _timer_count(self) -> int:
        """Return the number of timers that are not cancelled. asyncio keeps up to 100 cancelled timers."""
        if self._timers is not None:
            return len(self._timers)
        its: Any = self._loop
        return len(its._scheduled) - int(its._timer_cancelled_count)

    def _is_timer_due(self, now: float, spared: asyncio.Handle | None) -> bool:
        if self._timers is not None:
            timers = list(self._timers)
        else:
            its: Any = self._loop
            timers = [timer for timer in its._scheduled if not timer._cancelled]
        if timers != self._seen:
            self._seen, self._deadlines = timers, [timer.when() for timer in timers]
        for position in range(len(timers)):
            if self._deadlines[position] <= now and timers[position] is not spared:
                return True
        return False


def find_work(loop: asyncio.AbstractEventLoop) -> LoopWork | None:
    """Return an object that reports whether the running ``loop`` has work, or None for an unknown kind of loop."""
    if not hasattr(asyncio.Task, "_must_cancel"):
        return None
    its: Any = loop
    if type(loop) is asyncio.SelectorEventLoop and type(its._selector).__module__ == "selectors":
        tables = its._selector._fd_to_key, its._signal_handlers
        # The only selector entry that belongs to the loop itself is the descriptor that wakes it.
        return LoopWork(loop, its._ready, None, tables, own_count=1)
    return _find_work_of_uvloop(loop) if type(loop).__module__ == "uvloop" else None


def _find_work_of_uvloop(loop: asyncio.AbstractEventLoop) -> LoopWork | None:
    parts: list[Any] = [part for part in gc.get_referents(loop) if part is not getattr(loop, "__dict__", None)]
    timer = loop.call_later(3600.0, int)
    handle = loop.call_soon(int)
    try:
        queues = [part for part in parts if type(part) is deque and handle in part]
        timers = [part for part in parts if type(part) is set and timer in part]
    finally:
        timer.cancel()
        handle.cancel()
    if len(queues) != 1 or len(timers) != 1:
        return None
    tables: list[Any] = [part for part in parts if type(part) in (set, dict) and part is not timers[0]]
    tables += [vars(part)["data"] for part in parts if type(part) is WeakValueDictionary]
    # The loop itself owns sockets, for signals.
    sockets = [part.fileno() for part in parts if isinstance(part, socket.socket)]
    own_count = _count_entries(tables, sockets)
    return LoopWork(loop, queues[0], timers[0], tuple(tables), own_count) if own_count else None


def _count_entries(tables: Iterable[Collection[Any]], descriptors: Sequence[int]) -> int:
    """Count the entries of ``descriptors`` in ``tables``, except tables of signal handlers, whose keys are signals."""
    count = 0
    for table in tables:
        handlers = table.values() if isinstance(table, dict) else ()
        if not any(type(handler).__name__ == "Handle" for handler in handlers):
            count += sum(descriptor in table for descriptor in descriptors)
    return count
