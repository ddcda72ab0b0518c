"""Keeps virtual time: the clock of a simulation, and what will happen.

The scheduler owns the clock and one heap of future events: a rank's *turn* (:mod:`asyncdist.simulation.rank_turns`), a
timer, an event of the network. Events of the same time happen in an order drawn from the seed.

Nothing here knows of messages or of asyncdist's protocols. The module is compiled where that can be done; see
:mod:`asyncdist.compiled`.
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

#: Things that may happen at one instant before the simulation is taken to be in an endless loop.
EVENT_COUNT_MAX: Final = 1_000_000
#: Things that happen between two collections of garbage: when Python itself would collect depends on what the process
#: has done before.
_COLLECT_EVERY: Final = 10_000
#: So many collections of the youngest objects are followed by one of the middle generation.
_MIDDLE_EVERY: Final = 16
#: With many ranks only every eighth is made: what is young is mostly alive then, and looked through in vain.
_MANY_RANKS_EVERY: Final = 8
#: After so many collections the simulation is a long one.
_MANY_COLLECTIONS: Final = 4
#: Cancelled timers are dropped from the heap when they are more than this, and more than half of it, as in asyncio.
_CANCELLED_COUNT_MIN: Final = 100


class EndlessLoopError(LocalProtocolError):
    """Tasks go on without end and wait for nothing. Carries ``rank`` if one rank's tasks do.

    What :func:`asyncdist.simulate` raises lists the tasks, and carries the SimReport of what came before as ``report``.
    """

    report: Any = None


class Scheduler:
    """Keeps the virtual clock, and lets things happen in the order of their time.

    Args:
        rng: draws the order of things that happen at the same time.
        on_many: with many ranks, called when much has happened, and each time when that has doubled; else None.

    Attributes:
        now: virtual seconds since the start.
        ahead_s: how long the running callback has blocked: it is so far beyond ``now``.
        event_count: number of things that have happened.
        task_count: number of tasks made on all loops.
        idle_turn_count: turns that ranks have taken in a row, woken by nothing from outside.
        user_rank: the rank whose user code ran last; -1 before any has.
        stopped: set to make :meth:`run` return.
        random: draws a number from 0 to 1.
    """

    def __init__(self, rng: random.Random, on_many: Callable[[], object] | None = None) -> None:
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
        self._collect_at = _COLLECT_EVERY
        self._cancelled_count = 0  # cancelled timers in the heap
        self._count_at_now = 0
        self._until_s = math.inf
        self._after_event: Callable[[], object] | None = None
        self._running_loop: object = None
        self._on_many = on_many

    def at(self, when: float, action: Callable[..., object], args: tuple[Any, ...] = ()) -> None:
        """Do ``action(*args)`` at ``when``, in seconds; at once if that time has passed."""
        self._pushed_count += 1
        now = self.now
        heappush(self._heap, (when if when > now else now, self.random(), self._pushed_count, action, args))

    def add_timer(self, when: float, fire: Callable[..., object], timer: Timer) -> None:
        """Do ``fire(timer)`` at ``when``, unless ``timer`` is cancelled before."""
        timer.scheduler = self
        self.at(when, fire, (timer,))

    def forget_timer(self) -> None:
        """Count one more cancelled timer in the heap, and drop all of them when they are many."""
        self._cancelled_count += 1
        if self._cancelled_count > _CANCELLED_COUNT_MIN and 2 * self._cancelled_count > len(self._heap):
            self._heap[:] = [entry for entry in self._heap if not _is_cancelled(entry[4])]
            heapify(self._heap)  # the order of what is left is total, so that it does not change
            self._cancelled_count = 0

    def _next_when(self) -> float:
        """Return the time of the next thing in the heap that is not a cancelled timer; infinity without one."""
        heap = self._heap
        while heap:
            first = heap[0]
            if not _is_cancelled(first[4]):
                return first[0]
            heappop(heap)
            self._cancelled_count -= 1
        return math.inf

    def soon(self, action: Callable[[], object]) -> None:
        """Do ``action`` at this instant, after what is being done; quicker than :meth:`at`."""
        self._now.append(action)

    def time(self) -> float:
        """Return the time of what is being done: ``now``, and how long the running callback has blocked."""
        return self.now + self.ahead_s

    def run(self, until_s: float = math.inf, after_event: Callable[[], object] | None = None) -> bool:
        """Let things happen until ``stopped`` is set or ``until_s`` is reached; return False if nothing is left."""
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
                    f"{EVENT_COUNT_MAX} things happened at {self.now} s of virtual time: "
                    "some task loops without waiting for anything"
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
        """Collect garbage, outside of all ranks' turns: finalisers may run code.

        A collection of all objects is ever rarer, since there may be millions that live to the end.
        """
        number = self._collect_at // _COLLECT_EVERY
        while self._collect_at <= self.event_count:
            self._collect_at += _COLLECT_EVERY
        self.switch_loop(None)
        is_power_of_two = number & (number - 1) == 0
        if self._on_many is not None and is_power_of_two and number >= _MANY_COLLECTIONS:
            self._on_many()
        if self._on_many is not None and number % _MANY_RANKS_EVERY:
            return
        is_power_of_four = number >= 64 and is_power_of_two and number.bit_length() % 2 == 1
        gc.collect(2 if is_power_of_four or number % 1024 == 0 else int(number % _MIDDLE_EVERY == 0))

    def _is_enough(self) -> bool:
        """Call the function that :meth:`run` was given, in no rank's loop; return whether the run is to stop."""
        if self._after_event is None:
            return False
        self.switch_loop(None)
        return bool(self._after_event())

    def switch_loop(self, loop: object) -> None:
        """Tell asyncio which rank's loop is running, or None.

        It is not told after every turn: asyncio asks for the process's number each time, a system call, and the next
        turn is often the same rank's.
        """
        if loop is not self._running_loop:
            self._running_loop = loop
            set_running_loop(loop)  # type: ignore[arg-type]

    def go_on_until(self, when: float) -> bool:
        """Advance to ``when`` and count one event, if nothing else happens before; return whether that was so."""
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
        """Return whether nothing is to come but cancelled timers, and actions that ``is_turn`` is true for."""
        return not self._now and all(_is_cancelled(args) or is_turn(action) for _, _, _, action, args in self._heap)

    def entries(self) -> list[tuple[float, float, int, Callable[..., object], tuple[Any, ...]]]:
        """Return what is to happen: tuples with the time first, and the action and its arguments last."""
        return self._heap

    @property
    def pending_count(self) -> int:
        """Return the number of things in the heap, cancelled timers included."""
        return len(self._heap)


def _is_cancelled(args: tuple[Any, ...]) -> bool:
    """Return whether these are the arguments of a cancelled timer."""
    if args and isinstance(args[0], Timer):
        timer = args[0]
        return timer.is_cancelled
    return False


class Handle:
    """Replaces asyncio's handle, which ``call_soon`` returns, at a third of the cost. A step makes several."""

    callback: Any
    args: tuple[Any, ...]
    context: Any
    is_cancelled: bool

    def cancel(self) -> None:
        """Do not call it."""
        self.is_cancelled = True
        self.callback = None
        self.args = ()

    def cancelled(self) -> bool:
        """Return whether it will not be called."""
        return self.is_cancelled

    def __repr__(self) -> str:
        return f"<Handle {'cancelled' if self.is_cancelled else self.callback}>"


class Timer(Handle):
    """Replaces asyncio's timer handle, which ``call_at`` returns.

    Attributes:
        scheduler: keeps it in its heap; None before and after.
    """

    when_s: float
    scheduler: Scheduler | None

    def cancel(self) -> None:
        """Do not call it."""
        if self.scheduler is not None and not self.is_cancelled:
            self.is_cancelled = True
            self.scheduler.forget_timer()
        self.is_cancelled = True
        self.callback = None
        self.args = ()

    def when(self) -> float:
        """Return the time for which it was set, in virtual seconds."""
        return self.when_s
