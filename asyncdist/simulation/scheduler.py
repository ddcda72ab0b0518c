"""Implements virtual time: the clock of a simulation, and its queue of future events.

A future event is a rank's *turn* (:mod:`asyncdist.simulation.rank_turns`), a timer, or an event of the network. Events
at the same time happen in a random order, determined by the seed.
"""

from __future__ import annotations

import gc
import math
import random
from asyncio.events import _set_running_loop as set_running_loop
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any, Final

from asyncdist.errors import LocalProtocolError

#: Number of events at one instant after which the simulation is assumed to be in an endless loop.
EVENT_COUNT_MAX: Final = 1_000_000
#: Number of events between two garbage collections. Python's automatic collections would not be deterministic.
_COLLECT_EVERY: Final = 10_000
#: Number of collections of the youngest generation for each collection of the middle generation.
_MIDDLE_EVERY: Final = 16
#: With many ranks, :data:`_COLLECT_EVERY` is multiplied by the number of ranks divided by this number.
_RANK_COUNT_OF_COLLECTIONS: Final = 32
#: Minimum number of cancelled timers in the heap before they are removed, as in asyncio.
_CANCELLED_COUNT_MIN: Final = 100


class EndlessLoopError(LocalProtocolError):
    """Raised if tasks loop endlessly without waiting. ``rank`` is set if all of them belong to one rank.

    The error raised by :func:`asyncdist.simulate` lists the tasks, and its ``report`` is the SimReport so far.
    """

    report: Any = None


class Scheduler:
    """Stores the virtual clock and the event queue of a simulation.

    Args:
        rng: Random generator for the order of simultaneous events.
        many_rank_count: Number of ranks, or 0 if there are few. With many ranks, garbage collections are rarer. Each
            time the number of collections has doubled, the surviving objects are frozen, so that later collections skip
            them. Instead of the first collection, all objects are frozen, because almost all were created when the
            ranks started.

    Attributes:
        ahead_s: Virtual seconds for which the running callback has blocked, in addition to ``now``.
        idle_turn_count: Number of consecutive turns, of any ranks, that were not caused by an outside event.
        user_rank: Rank whose user code ran last; -1 at the beginning.
        stopped: Whether :meth:`run` must return.
    """

    def __init__(self, rng: random.Random, many_rank_count: int = 0) -> None:
        self.now = 0.0
        self.ahead_s = 0.0
        self.event_count = 0
        self.task_count = 0
        self.idle_turn_count = 0
        self.user_rank = -1
        self.stopped = False
        self.random = rng.random
        self._heap: list[tuple[float, float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._now: list[Callable[[], object]] = []
        self._pushed_count = 0
        self._collect_every = _COLLECT_EVERY * max(1, many_rank_count // _RANK_COUNT_OF_COLLECTIONS)
        self._collect_at = self._collect_every
        self._cancelled_count = 0  # number of cancelled timers in the heap
        self._count_at_now = 0
        self._until_s = math.inf
        self._after_event: Callable[[], object] | None = None
        self._running_loop: object = None
        self._freezes = many_rank_count > 0

    def at(self, when: float, action: Callable[..., object], args: tuple[Any, ...] = ()) -> None:
        """Schedule ``action(*args)`` at the virtual time ``when``, in seconds, or now if that time has passed."""
        self._pushed_count += 1
        now = self.now
        heappush(self._heap, (when if when > now else now, self.random(), self._pushed_count, action, args))

    def add_timer(self, when: float, fire: Callable[..., object], timer: Timer) -> None:
        """Schedule ``fire(timer)`` at ``when``. If ``timer`` is cancelled before, the call is skipped."""
        timer.scheduler = self
        self.at(when, fire, (timer,))

    def forget_timer(self) -> None:
        """Count a cancelled timer in the heap, and remove all cancelled timers if there are many."""
        self._cancelled_count += 1
        if self._cancelled_count > _CANCELLED_COUNT_MIN and 2 * self._cancelled_count > len(self._heap):
            self._heap[:] = [entry for entry in self._heap if not _is_cancelled(entry[4])]
            heapify(self._heap)  # The order of events is total, so this preserves it.
            self._cancelled_count = 0

    def _next_when(self) -> float:
        """Return the time of the next event that is not a cancelled timer, or infinity."""
        heap = self._heap
        while heap:
            first = heap[0]
            if not _is_cancelled(first[4]):
                return first[0]
            heappop(heap)
            self._cancelled_count -= 1
        return math.inf

    def soon(self, action: Callable[[], object]) -> None:
        """Schedule ``action`` at this instant, after the current event. This is faster than :meth:`at`."""
        self._now.append(action)

    def time(self) -> float:
        """Return the running callback's virtual time: ``now + ahead_s``."""
        return self.now + self.ahead_s

    def run(self, until_s: float = math.inf, after_event: Callable[[], object] | None = None) -> bool:
        """Run events until ``stopped`` is set or ``until_s`` is reached. Return False if no event is left."""
        self._until_s = until_s
        self._after_event = after_event
        try:
            return self._run()
        finally:
            self.switch_loop(None)

    def _run(self) -> bool:
        until_s = self._until_s
        soon, heap = self._now, self._heap
        args: tuple[Any, ...]
        while not self.stopped:
            if self.event_count >= self._collect_at:
                self._collect()
            if soon:
                action: Callable[..., object] = soon.pop(int(self.random() * len(soon)) if len(soon) > 1 else 0)
                args = ()
            else:
                when = self._next_when()
                if not heap:
                    return False
                if when > until_s:
                    self.now = until_s
                    return True
                first = heappop(heap)
                action, args = first[3], first[4]
                if when > self.now:
                    self.now = when
                    self._count_at_now = 0
            self._count_at_now += 1
            if self._count_at_now > EVENT_COUNT_MAX:
                raise EndlessLoopError(
                    f"{EVENT_COUNT_MAX} events happened at {self.now} s of virtual time, because a task loops without "
                    "waiting"
                )
            self.event_count += 1
            if args:
                action(*args)
            else:
                action()
            if self._is_enough():
                self.stopped = True
        return True

    def _collect(self) -> None:
        """Collect garbage while no rank runs, because finalisers may run code."""
        number = self._collect_at // self._collect_every
        while self._collect_at <= self.event_count:
            self._collect_at += self._collect_every
        self.switch_loop(None)
        is_power_of_two = number & (number - 1) == 0
        is_power_of_four = number >= 64 and is_power_of_two and number.bit_length() % 2 == 1
        is_full = is_power_of_four or number % 1024 == 0
        if is_full and self._freezes:
            gc.unfreeze()
        if number > 1 or not self._freezes:
            gc.collect(2 if is_full else int(number % _MIDDLE_EVERY == 0))
        if self._freezes and (is_full or is_power_of_two):
            gc.freeze()

    def _is_enough(self) -> bool:
        """Call the ``after_event`` function of :meth:`run` outside all loops, and return whether to stop."""
        if self._after_event is None:
            return False
        self.switch_loop(None)
        return bool(self._after_event())

    def switch_loop(self, loop: object) -> None:
        """Set asyncio's running loop. It stays set after a turn, because each change costs a system call."""
        if loop is not self._running_loop:
            self._running_loop = loop
            set_running_loop(loop)  # type: ignore[arg-type]

    def advance_until(self, when: float) -> bool:
        """Advance to ``when`` and count one event, unless another event is earlier. Return whether time advanced."""
        if self._now or self._next_when() <= when or when > self._until_s or self.stopped:
            return False
        if self._is_enough():
            self.stopped = True
            return False
        self.now = when
        self.event_count += 1
        self._count_at_now = 0
        return not self.stopped

    def has_only(self, is_turn: Callable[[Callable[..., object]], bool]) -> bool:
        """Return whether all future events are cancelled timers, or actions for which ``is_turn`` is true."""
        return not self._now and all(_is_cancelled(args) or is_turn(action) for _, _, _, action, args in self._heap)

    def entries(self) -> list[tuple[float, float, int, Callable[..., object], tuple[Any, ...]]]:
        """Return all future events as tuples that begin with the time and end with the action and its arguments."""
        return self._heap

    @property
    def pending_count(self) -> int:
        """Number of entries in the heap, including cancelled timers."""
        return len(self._heap)


def _is_cancelled(args: tuple[Any, ...]) -> bool:
    if args and isinstance(args[0], Timer):
        timer = args[0]
        return timer.is_cancelled
    return False


class Handle:
    """Replaces the handle that asyncio's ``call_soon`` returns, at a third of its cost."""

    callback: Any
    args: tuple[Any, ...]
    context: Any
    is_cancelled: bool

    def cancel(self) -> None:
        """Cancel the callback."""
        self.is_cancelled = True
        self.callback = None
        self.args = ()

    def cancelled(self) -> bool:
        """Return whether the callback was cancelled."""
        return self.is_cancelled

    def __repr__(self) -> str:
        return f"<Handle {'cancelled' if self.is_cancelled else self.callback}>"


class Timer(Handle):
    """Replaces asyncio's timer handle. ``scheduler`` is the scheduler whose heap contains the timer, or None."""

    when_s: float
    scheduler: Scheduler | None

    def cancel(self) -> None:
        """Cancel the callback."""
        if self.scheduler is not None and not self.is_cancelled:
            self.is_cancelled = True
            self.scheduler.forget_timer()
        self.is_cancelled = True
        self.callback = None
        self.args = ()

    def when(self) -> float:
        """Return the time at which the timer fires, in virtual seconds."""
        return self.when_s
