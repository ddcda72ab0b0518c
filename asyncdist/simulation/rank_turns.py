"""Decides when each simulated rank runs, and for how long it is busy.

In a *turn*, a rank runs its ready callbacks, as one iteration of asyncio's loop does. The
:class:`~asyncdist.simulation.scheduler.Scheduler` decides when turns happen.

A rank that computes is *busy*: none of its tasks, timers or callbacks run until the computing time has passed, even if
messages arrive. The scheduler's time stands still while a callback blocks (``time.sleep``). The callback's own clock
and the times of its messages advance by the blocked time, and its rank is then busy for this time.
"""

from __future__ import annotations

import contextvars
import logging
import math
import sys
from collections.abc import Callable
from contextvars import copy_context
from types import MethodType
from typing import Any, Final

from asyncdist.errors import LocalProtocolError
from asyncdist.simulation.scheduler import EndlessLoopError, Handle, Scheduler, Timer

logger = logging.getLogger("asyncdist.simulation")

#: Number of consecutive loop iterations of a rank, without an outside event, after which an endless loop is assumed.
TURN_COUNT_MAX: Final = 1_000_000
#: Number of consecutive turns of all ranks, while no other event is pending, after which an endless loop is assumed.
IDLE_TURN_COUNT_MAX: Final = 100_000
#: Minimum number of idle turns per rank before an endless loop is assumed in simulations of many ranks.
_IDLE_TURN_COUNT_OF_A_RANK: Final = 100
#: Number of clock reads in one callback that take no virtual time.
_FREE_READ_COUNT: Final = 1000
#: Virtual seconds that a clock read takes after the free reads. The time grows with every 1000 reads.
_READ_S: Final = 1e-5
#: Number of clock reads and sleeps in one callback after which an endless loop is assumed. Reads alone take 450 virtual
#: seconds.
READ_COUNT_MAX: Final = 300_000
#: Prefixes of modules that read clocks on behalf of user code.
_READERS: Final = ("asyncdist.", "asyncio.")
#: Maximum time between consecutive turns of a rank, in seconds. The time is random, and messages may arrive during it.
TURN_S: Final = 2e-6


def _new_handle(callback: Any, args: tuple[Any, ...], context: contextvars.Context | None) -> Handle:
    """Return a new handle without calling ``__init__``, which would double the time."""
    handle = Handle.__new__(Handle)
    handle.callback = callback
    handle.args = args
    handle.context = copy_context() if context is None else context
    handle.is_cancelled = False
    return handle


def _new_timer(when_s: float, callback: Any, args: tuple[Any, ...], context: contextvars.Context | None) -> Timer:
    timer = Timer.__new__(Timer)
    timer.callback = callback
    timer.args = args
    timer.context = copy_context() if context is None else context
    timer.is_cancelled = False
    timer.when_s = when_s
    timer.scheduler = None
    return timer


class Turns:
    """Stores the ready callbacks of one rank, and runs them in the rank's turns (iterations of its event loop).

    Args:
        before_turn: Function called with the rank before each turn, or None.
        enter: Function called with the rank before its user code runs, if another rank's user code ran last.
        background: Unbound method that runs no user code, so ``enter`` is not called before it.

    Attributes:
        dead: Whether the rank has been killed and takes no more turns.
        on_exit: Function called with a SystemExit that a task or callback has raised, or None.
        busy_s: Virtual seconds for which the rank has computed, blocked or stalled, including the current period.
        slowness: Factor that multiplies the duration of the rank's turns. If it is above 1, the first turn after a
            wake-up is also delayed.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        rank: int,
        *,
        before_turn: Callable[[int], None] | None,
        enter: Callable[[int], None],
        background: Callable[..., None],
    ) -> None:
        self.rank = rank
        self.dead = False
        self.on_exit: Callable[[BaseException], None] | None = None
        self.busy_s = 0.0
        self.slowness = 1.0
        self._scheduler = scheduler
        self._before_turn = before_turn
        self._enter = enter
        self._background = background
        self._ready: list[Handle] = []
        self._deferred: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        self._sleeper: Handle | None = None  # callback that resumes the computing task, before all other callbacks
        self._has_sleeper = False
        self._debug = False
        self._busy = False
        self._stalled_s = 0.0  # seconds by which to extend the current busy period
        self._ready_count_before = 0  # number of callbacks that were ready when the rank became busy
        self._has_turn = False
        self._running = False
        self._turns_in_a_row = 0
        self._has_free_safe_points = False
        self._read_count = 0  # number of clock reads and sleeps in the running callback
        self._take_turn = self._turn  # methods are bound once, because binding them for each turn would be slower
        self._take_up = self._resume
        self._take_timer = self._fire

    def _schedule(self) -> None:
        """Schedule a turn (loop iteration) after an outside event has made a callback ready."""
        self._is_woken()
        if not self._has_turn and not self._busy:
            self._has_turn = True
            if self.slowness > 1.0:
                self._scheduler.at(self._next_turn_at(), self._take_turn)
            else:
                self._scheduler.soon(self._take_turn)

    def _next_turn_at(self) -> float:
        return self._scheduler.now + TURN_S * self.slowness * self._scheduler.random()

    def _continues(self) -> bool:
        """Return whether the rank's next turn can run before all other events. Otherwise schedule this turn."""
        scheduler = self._scheduler
        self._turns_in_a_row += 1
        scheduler.idle_turn_count += 1
        if self._turns_in_a_row > TURN_COUNT_MAX or scheduler.idle_turn_count % IDLE_TURN_COUNT_MAX == 0:
            self._refuse_endless_turns()
        when = self._next_turn_at()
        if scheduler.advance_until(when):
            return True
        self._has_turn = True
        scheduler.at(when, self._take_turn)
        return False

    def _refuse_endless_turns(self) -> None:
        scheduler = self._scheduler
        in_vain = scheduler.idle_turn_count >= _IDLE_TURN_COUNT_OF_A_RANK * scheduler.pending_count
        if self._turns_in_a_row > TURN_COUNT_MAX or (in_vain and scheduler.has_only(_is_next_turn)):
            free = ", or at safe points that take no time (Compute.step_s is 0)" if self._has_free_safe_points else ""
            raise EndlessLoopError(
                f"rank {self.rank} took {self._turns_in_a_row} turns in a row until {scheduler.now:.9f} s of virtual "
                f"time, because a task of it loops without waiting{free}",
                rank=self.rank,
            )

    def _is_woken(self) -> None:
        self._turns_in_a_row = self._scheduler.idle_turn_count = 0

    def _turn(self) -> None:
        """Run turns (loop iterations) until no callback is ready or another event precedes the next turn."""
        self._has_turn = False
        while self._ready and not self._busy:
            self._run_ready()
            if self._is_silent() or not self._ready or not self._continues():
                return

    def _is_silent(self) -> bool:
        return self._busy or self.dead

    def _run_ready(self) -> None:
        """Run the ready callbacks, but not callbacks that they make ready."""
        if self._before_turn is not None:
            self._before_turn(self.rank)
        if self.dead:
            return
        ready = self._ready
        self._ready = []
        done_count = 0
        self._scheduler.switch_loop(self)
        self._running = True
        try:
            while done_count < len(ready):
                handle = ready[done_count]
                done_count += 1
                if handle.is_cancelled:
                    continue
                self._call(handle)
                if self._busy or self.dead:
                    break
            if self._has_sleeper:
                self._has_sleeper = False
                self._sleeper = self._ready.pop()
        except SystemExit as error:
            if self.on_exit is not None:
                self.call_soon(self.on_exit, error)
        finally:
            self._running = False
            if done_count < len(ready):
                self._ready[:0] = ready[done_count:]
            if self._busy:
                self._ready_count_before = len(self._ready)

    def _call(self, handle: Handle) -> None:
        callback = handle.callback
        scheduler = self._scheduler
        if scheduler.user_rank != self.rank and not (
            isinstance(callback, MethodType) and callback.__func__ is self._background
        ):
            self._enter(self.rank)
            scheduler.user_rank = self.rank
        self._read_count = 0
        try:
            if handle.args:
                handle.context.run(callback, *handle.args)
            else:
                handle.context.run(callback)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            self.call_exception_handler({"message": f"Exception in callback {callback}", "exception": error})
        finally:
            if scheduler.ahead_s:
                self._become_busy(0.0)

    def is_next_turn(self, action: Any) -> bool:
        """Return whether the scheduler's ``action`` runs this rank's next turn (loop iteration)."""
        return action is self._take_turn

    def become_busy(self, seconds: float) -> None:
        """Make the rank busy for ``seconds``, after which the running task continues before all other tasks."""
        self._has_sleeper = True
        self._become_busy(seconds)

    def block(self, seconds: float) -> None:
        """Advance the running callback's own clock by ``seconds``, as if the callback blocked."""
        self._scheduler.ahead_s += seconds

    def sleep(self, seconds: float) -> None:
        """Block the rank as ``time.sleep`` does. Raise if the callback sleeps in an endless loop."""
        self._read_count += 1
        if self._read_count > READ_COUNT_MAX and self._running:
            self._refuse_endless_reads()
        self.block(seconds)

    def unblock(self) -> float:
        """Return and reset the seconds for which the running callback has blocked, so that its rank is not busy."""
        seconds = self._scheduler.ahead_s
        self._scheduler.ahead_s = 0.0
        return seconds

    def _become_busy(self, seconds: float) -> None:
        """Run no callbacks for ``seconds``, counted from the running callback's own clock."""
        scheduler = self._scheduler
        seconds += scheduler.ahead_s
        scheduler.ahead_s = 0.0
        self._busy = True
        self.busy_s += seconds
        scheduler.at(scheduler.now + seconds, self._take_up)

    def stall(self, seconds: float) -> None:
        """Extend the current busy period, or start a new one, by ``seconds``."""
        if self._busy:
            self._stalled_s += seconds
            self.busy_s += seconds
        else:
            self._ready_count_before = len(self._ready)
            self._become_busy(seconds)

    def call_when_idle(self, action: Callable[..., object], args: tuple[Any, ...]) -> None:
        """Call ``action(*args)`` as soon as the rank is not busy."""
        if self._busy and not self.dead:
            self._deferred.append((action, args))
        else:
            action(*args)

    def do_first(self, action: Callable[[], bool]) -> None:
        """Call ``action()``. If it returns True, the callbacks that it made ready run before all others."""
        others, self._ready = self._ready, []
        comes_first = False
        try:
            comes_first = action()
        finally:
            self._ready = self._ready + others if comes_first else others + self._ready

    def _resume(self) -> None:
        """End the busy period and run callbacks, or extend the period if the rank was stalled meanwhile."""
        if self._stalled_s:
            self._scheduler.at(self._scheduler.now + self._stalled_s, self._take_up)
            self._stalled_s = 0.0
            return
        self._busy = False
        if self._deferred:
            self._do_deferred()
        self._has_turn = True  # prevents callbacks from scheduling another turn
        if len(self._ready) > self._ready_count_before + 1 and self._scheduler.random() < 0.5:
            self._put_timers_first()
        if self._sleeper is not None:
            self._ready.insert(0, self._sleeper)
            self._sleeper = None
        self._is_woken()
        self._run_ready()
        self._turn()

    def _put_timers_first(self) -> None:
        """Move due timers before messages that arrived during the busy period, as a real event loop may."""
        late = self._ready[self._ready_count_before :]
        timers = [handle for handle in late if isinstance(handle, Timer)]
        self._ready[self._ready_count_before :] = timers + [handle for handle in late if not isinstance(handle, Timer)]

    def has_computed(self) -> None:
        """Record that user code has computed for no time at a safe point, so that this turn does not count as idle."""
        self._scheduler.idle_turn_count = 0
        self._has_free_safe_points = True

    def _do_deferred(self) -> None:
        deferred, self._deferred = self._deferred, []
        for action, args in deferred:
            action(*args)

    def die(self) -> None:
        """Run no more callbacks, but keep them, because a task whose wake-up callback is lost cannot be cancelled."""
        self.dead = True
        self._do_deferred()

    def revive(self) -> None:
        """Run callbacks again after :meth:`die`, to clean up the rank's tasks."""
        self.dead = False
        if self._ready and not self._running:
            self._schedule()

    def time(self) -> float:
        """Return the virtual seconds since the simulation began. Many reads in one callback also advance the time."""
        self._read_count += 1
        if self._read_count > _FREE_READ_COUNT and self._running:
            if self._read_count > READ_COUNT_MAX:
                self._refuse_endless_reads()
            self.block(_READ_S * (self._read_count // _FREE_READ_COUNT))
        return self._scheduler.time()

    def _refuse_endless_reads(self) -> None:
        self._read_count = 0  # handling the error also reads clocks
        frame = sys._getframe()
        while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(_READERS):
            frame = frame.f_back
        raise LocalProtocolError(
            f"rank {self.rank} slept or read clocks {READ_COUNT_MAX} times without an await, until "
            f"{self._scheduler.time():g} s of virtual time: await in the loop at line {frame.f_lineno} of "
            f"{frame.f_code.co_filename}",
            rank=self.rank,
        )

    def get_debug(self) -> bool:
        """Return whether asyncio's debug mode is on."""
        return self._debug

    def set_debug(self, enabled: bool) -> None:
        """Set asyncio's debug mode: futures and tasks store where they were created. Slow callbacks are not logged."""
        self._debug = enabled

    def call_soon(self, callback: Any, *args: Any, context: contextvars.Context | None = None) -> Handle:
        """Schedule a callback for the next iteration of the rank's loop."""
        handle = _new_handle(callback, args, context)
        self._ready.append(handle)
        if not self._running and not self.dead:
            self._schedule()
        return handle

    def call_later(self, delay: float, callback: Any, *args: Any, context: contextvars.Context | None = None) -> Handle:
        """Schedule a callback in ``delay`` virtual seconds."""
        return self.call_at(self._scheduler.time() + delay, callback, *args, context=context)

    def timers_due(self, after_s: float, until_s: float) -> list[float]:
        """Return the sorted times of the rank's timers after ``after_s`` and up to ``until_s``."""
        due = [
            entry[0]
            for entry in self._scheduler.entries()
            if after_s < entry[0] <= until_s and entry[3] is self._take_timer and not entry[4][0].cancelled()
        ]
        return sorted(due)

    def call_at(self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None) -> Handle:
        """Schedule a callback at the virtual time ``when``, in seconds."""
        timer = _new_timer(when, callback, args, context)
        if when < math.inf:
            self._scheduler.add_timer(when, self._take_timer, timer)
        return timer

    def _fire(self, timer: Timer) -> None:
        timer.scheduler = None
        self._ready.append(timer)
        self._is_woken()
        if self._has_turn or self.dead:
            return
        if self.slowness > 1.0:
            self._schedule()
        else:
            self._turn()

    def is_running(self) -> bool:
        """Return whether a callback of this rank is running."""
        return self._running

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Log an exception that no task of this rank retrieves, unless the rank was killed."""
        if not self.dead:
            logger.error("rank %d: %s", self.rank, context.get("message"), exc_info=context.get("exception"))


def _is_next_turn(action: Callable[..., object]) -> bool:
    owner = getattr(action, "__self__", None)
    return isinstance(owner, Turns) and owner.is_next_turn(action)
