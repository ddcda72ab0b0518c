"""Virtual time, and when each rank has its turn.

Every rank has a loop of its own, as in reality: its ready callbacks, its timers. The scheduler owns the clock and one
heap of things that will happen: a rank's *turn* (it runs what is ready, as one iteration of asyncio's loop does), a
timer, an event of the network. Things that happen at the same time happen in an order drawn from the seed.

A rank that computes is *deaf*: it gets no turn until its time has passed, so none of its tasks, timers or callbacks
run, however many messages arrive meanwhile. A callback that blocks (``time.sleep``) runs to its end at one instant of
the scheduler. It and what it does are ahead of that instant by the time that it has blocked for, and its rank is deaf
until then.

Nothing here knows of messages or of asyncdist's protocols. It is compiled where that can be done (see
:mod:`asyncdist.compiled`); what of a loop asyncio wants besides is in :mod:`asyncdist.simulation.event_loop`.
"""

from __future__ import annotations

import contextvars
import gc
import logging
import math
import random
import sys
from asyncio import Future
from asyncio.events import _set_running_loop as set_running_loop
from collections.abc import Callable
from contextvars import copy_context
from heapq import heapify, heappop, heappush
from types import MethodType
from typing import Any, Final

from asyncdist.errors import LocalProtocolError

logger = logging.getLogger("asyncdist.simulation")

#: Things that may happen at one and the same instant before a simulation is taken to be caught in a loop.
EVENT_COUNT_MAX: Final = 1_000_000
#: Turns that a rank may take in a row, woken by nothing from outside, before it is taken to be caught in one.
TURN_COUNT_MAX: Final = 1_000_000
#: The same of all ranks together while nothing else is to come: they wait for what cannot happen any more.
IDLE_TURN_COUNT_MAX: Final = 100_000
#: So many of these are each rank's own affair, where there are many.
_IDLE_TURN_COUNT_OF_A_RANK: Final = 100
#: Clocks may be read so often in one callback before a further read takes time.
_FREE_READ_COUNT: Final = 1000
#: How long the next so many reads take, each, in seconds; those after them twice as long, and so on.
_READ_S: Final = 1e-5
#: Reads of clocks in one callback before it is taken to be caught in a loop; they take 450 s of virtual time.
READ_COUNT_MAX: Final = 300_000
#: Things that happen between two times at which garbage is collected: when Python itself would do it depends on what
#: the process has done before.
_COLLECT_EVERY: Final = 10_000
#: So many collections of the youngest objects are followed by one of the middle generation.
_MIDDLE_EVERY: Final = 16
#: Modules through which user code reads a clock.
_READERS: Final = ("asyncdist.", "asyncio.")
#: Cancelled timers are thrown out of the heap when they are more than this, and more than half of it; as asyncio does.
_CANCELLED_COUNT_MIN: Final = 100
#: A turn that follows another one comes up to so much later: turns take time, and messages arrive meanwhile.
TURN_S: Final = 2e-6


class EndlessLoopError(LocalProtocolError):
    """Ranks go on and on, and nothing comes of it. Carries ``rank`` where it is one."""


class Scheduler:
    """The clock and what will happen.

    Args:
        rng: decides ties.

    Attributes:
        now: virtual seconds since the start.
        ahead_s: how far the callback that is running has come beyond ``now``, since it has blocked for so long.
        event_count: things that have happened.
        task_count: tasks made on all loops.
        idle_turn_count: turns that ranks have taken in a row, woken by nothing from outside.
        user_rank: whose user code ran last; -1 before any has.
        stopped: set by whoever has seen enough; :meth:`run` returns.
        random: the generator's, from 0 to 1.
    """

    def __init__(self, rng: random.Random) -> None:
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
        self._cancelled_count = 0  # timers in the heap that nothing will come of
        self._count_at_now = 0
        self._until_s = math.inf
        self._after_event: Callable[[], object] | None = None
        self._running_loop: Turns | None = None

    def at(self, when: float, action: Callable[..., object], args: tuple[Any, ...] = ()) -> None:
        """Do ``action(*args)`` at ``when``, in seconds; what is past is now."""
        self._pushed_count += 1
        now = self.now
        heappush(self._heap, (when if when > now else now, self.random(), self._pushed_count, action, args))

    def add_timer(self, when: float, fire: Callable[..., object], timer: Timer) -> None:
        """As :meth:`at`, for ``fire(timer)``, which does not happen if ``timer`` is cancelled before."""
        timer.scheduler = self
        self.at(when, fire, (timer,))

    def forget_timer(self) -> None:
        """One more timer that is in the heap has been cancelled."""
        self._cancelled_count += 1
        if self._cancelled_count > _CANCELLED_COUNT_MIN and 2 * self._cancelled_count > len(self._heap):
            self._heap[:] = [entry for entry in self._heap if not _is_cancelled(entry[4])]
            heapify(self._heap)  # the order of what is left is total, so that it does not change
            self._cancelled_count = 0

    def _next_when(self) -> float:
        """The time of the next thing in the heap; infinity if there is none. Cancelled timers are none."""
        heap = self._heap
        while heap:
            first = heap[0]
            if not _is_cancelled(first[4]):
                return first[0]
            heappop(heap)
            self._cancelled_count -= 1
        return math.inf

    def soon(self, action: Callable[[], object]) -> None:
        """Do ``action`` now, when what is being done has ended; quicker than :meth:`at`."""
        self._now.append(action)

    def time(self) -> float:
        """The time of what is being done: ``now``, but for a callback that has blocked."""
        return self.now + self.ahead_s

    def run(self, until_s: float = math.inf, after_event: Callable[[], object] | None = None) -> bool:
        """Let things happen until somebody sets ``stopped`` or ``until_s`` is reached; False if nothing is left."""
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
        """Collect garbage, outside of all ranks' turns: what is finalised then may do something.

        All objects are looked through ever more rarely, since there may be millions that live to the end.
        """
        number = self._collect_at // _COLLECT_EVERY
        while self._collect_at <= self.event_count:
            self._collect_at += _COLLECT_EVERY
        self.switch_loop(None)
        is_power_of_four = number >= 64 and number & (number - 1) == 0 and number.bit_length() % 2 == 1
        gc.collect(2 if is_power_of_four or number % 1024 == 0 else int(number % _MIDDLE_EVERY == 0))

    def _is_enough(self) -> bool:
        """An event has ended: whether the caller of :meth:`run`, who is in no rank's loop, has seen enough."""
        if self._after_event is None:
            return False
        self.switch_loop(None)
        return bool(self._after_event())

    def switch_loop(self, loop: Turns | None) -> None:
        """Tell asyncio whose turn it is.

        Not after every turn that there is none: asyncio asks for the process's number each time, a system call, and the
        next turn is often the same rank's.
        """
        if loop is not self._running_loop:
            self._running_loop = loop
            set_running_loop(loop)  # type: ignore[arg-type]

    def go_on_until(self, when: float) -> bool:
        """Whether nothing else happens up to ``when``; it is that time now, then, and a further event has ended."""
        if self._now or self._next_when() <= when or when > self._until_s or self.stopped:
            return False
        if self._is_enough():
            self.stopped = True
            return False
        self.now = when
        self.event_count += 1
        self._count_at_now = 0
        return not self.stopped

    def has_only_turns(self) -> bool:
        """Whether nothing is to come but turns of ranks that go on by themselves."""
        return not self._now and not any(_may_wake(action, args) for _, _, _, action, args in self._heap)

    def entries(self) -> list[tuple[float, float, int, Callable[..., object], tuple[Any, ...]]]:
        """What is to happen, with the time as the first entry and the action and its arguments as the last ones."""
        return self._heap

    @property
    def pending_count(self) -> int:
        """Things that will happen, and timers that were cancelled and are still kept."""
        return len(self._heap)


def _is_cancelled(args: tuple[Any, ...]) -> bool:
    """Whether they are those of a timer that was cancelled."""
    if args and isinstance(args[0], Timer):
        timer = args[0]
        return timer.is_cancelled
    return False


def _may_wake(action: Any, args: tuple[Any, ...]) -> bool:
    """Whether it is more than a rank's next turn, or a timer that was cancelled."""
    if args and isinstance(args[0], Timer):
        return not _is_cancelled(args)
    owner = getattr(action, "__self__", None)
    return not (isinstance(owner, Turns) and owner.is_next_turn(action))


class Handle:
    """What ``call_soon`` returns: asyncio's, at a third of the cost; there are several in each step of each rank."""

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
        """Whether it will not be called."""
        return self.is_cancelled

    def __repr__(self) -> str:
        return f"<Handle {'cancelled' if self.is_cancelled else self.callback}>"


class Timer(Handle):
    """What ``call_at`` returns.

    Attributes:
        scheduler: in whose heap it is; None before and after.
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
        """The time for which it was set, in virtual seconds."""
        return self.when_s


def _new_handle(callback: Any, args: tuple[Any, ...], context: contextvars.Context | None) -> Handle:
    """Filled here, since an ``__init__`` would cost as much again as all of it."""
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
    """What is ready on one rank, and when it runs.

    Args:
        scheduler: shared by all ranks.
        rank: whose it is.
        before_turn: called with the rank before each turn, if it is given.
        enter: called with the rank before a callback that may run user code, where another rank's ran last.
        background: callbacks that are methods of this function run none.

    Attributes:
        dead: it gets no turn any more.
        deaf_s: virtual seconds for which it has computed, blocked or stalled, those under way included.
        slowness: the factor on the time of its turns. Above 1 it is late also for the first one that it is woken for.
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
        self.deaf_s = 0.0
        self.slowness = 1.0
        self._scheduler = scheduler
        self._before_turn = before_turn
        self._enter = enter
        self._background = background
        self._ready: list[Handle] = []
        self._put_off: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        self._sleeper: Handle | None = None  # the step with which the rank goes on when it has computed
        self._has_sleeper = False
        self._debug = False
        self._deaf = False
        self._stalled_s = 0.0  # for so much longer
        self._heard_count = 0  # what was ready when it fell deaf
        self._has_turn = False
        self._running = False
        self._turns_in_a_row = 0
        self._read_count = 0  # of clocks, in the callback that is running
        self._take_turn = self._turn  # one bound method for all turns
        self._take_up = self._resume
        self._take_timer = self._fire

    # -- turns ------------------------------------------------------------------------------------------------------

    def _schedule(self) -> None:
        """Something from outside wants a turn."""
        self._is_woken()
        if not self._has_turn and not self._deaf:
            self._has_turn = True
            if self.slowness > 1.0:
                self._scheduler.at(self._next_turn_at(), self._take_turn)
            else:
                self._scheduler.soon(self._take_turn)

    def _next_turn_at(self) -> float:
        return self._scheduler.now + TURN_S * self.slowness * self._scheduler.random()

    def _goes_on(self) -> bool:
        """The turn that has just ended left something to do: whether its next one comes before all else."""
        scheduler = self._scheduler
        self._turns_in_a_row += 1
        scheduler.idle_turn_count += 1
        if self._turns_in_a_row > TURN_COUNT_MAX or scheduler.idle_turn_count % IDLE_TURN_COUNT_MAX == 0:
            self._refuse_endless_turns()
        when = self._next_turn_at()
        if scheduler.go_on_until(when):
            return True
        self._has_turn = True
        scheduler.at(when, self._take_turn)
        return False

    def _refuse_endless_turns(self) -> None:
        scheduler = self._scheduler
        in_vain = scheduler.idle_turn_count >= _IDLE_TURN_COUNT_OF_A_RANK * scheduler.pending_count
        if self._turns_in_a_row > TURN_COUNT_MAX or (in_vain and scheduler.has_only_turns()):
            raise EndlessLoopError(
                f"rank {self.rank} took {self._turns_in_a_row} turns in a row until {scheduler.now} s of virtual time: "
                "some task of it loops without waiting for anything",
                rank=self.rank,
            )

    def _is_woken(self) -> None:
        self._turns_in_a_row = self._scheduler.idle_turn_count = 0

    def _turn(self) -> None:
        """Take turns until nothing is ready, or something else happens first."""
        self._has_turn = False
        while self._ready and not self._deaf:
            self._run_ready()
            if self._is_silent() or not self._ready or not self._goes_on():
                return

    def _is_silent(self) -> bool:
        return self._deaf or self.dead

    def _run_ready(self) -> None:
        """Run what is ready now; what becomes ready meanwhile is for the next turn."""
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
                if self._deaf or self.dead:
                    break
            if self._has_sleeper:
                self._has_sleeper = False
                self._sleeper = self._ready.pop()
        except SystemExit:
            logger.debug("rank %d: a task raised SystemExit; whoever awaits it has it", self.rank)
        finally:
            self._running = False
            if done_count < len(ready):
                self._ready[:0] = ready[done_count:]
            if self._deaf:
                self._heard_count = len(self._ready)

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
                self._fall_deaf(0.0)

    def is_next_turn(self, action: Any) -> bool:
        """Whether ``action``, which the scheduler has, is the rank's next turn."""
        return action is self._take_turn

    def fall_deaf(self, seconds: float) -> None:
        """Get no turn for so long. The step that the running task is to take next comes first when it is over.

        Its next turn comes at the same instant: a safe point that finds nothing takes no time.
        """
        self._has_sleeper = True
        self._fall_deaf(seconds)

    def block(self, seconds: float) -> None:
        """The running callback blocks for so long: it goes on at once, and later than everything else."""
        self._scheduler.ahead_s += seconds

    def unblock(self) -> float:
        """What the running callback has blocked for is no affair of the rank's loop: take it back, and return it."""
        seconds = self._scheduler.ahead_s
        self._scheduler.ahead_s = 0.0
        return seconds

    def _fall_deaf(self, seconds: float) -> None:
        """Get no turn for so long, counted from where the running callback has come to."""
        scheduler = self._scheduler
        seconds += scheduler.ahead_s
        scheduler.ahead_s = 0.0
        self._deaf = True
        self.deaf_s += seconds
        scheduler.at(scheduler.now + seconds, self._take_up)

    def stall(self, seconds: float) -> None:
        """Get no turn for so much longer, whatever the rank is doing."""
        if self._deaf:
            self._stalled_s += seconds
            self.deaf_s += seconds
        else:
            self._heard_count = len(self._ready)
            self._fall_deaf(seconds)

    def attend(self, action: Callable[..., object], args: tuple[Any, ...]) -> None:
        """Do ``action(*args)`` as soon as the rank is not deaf: what needs its attention."""
        if self._deaf and not self.dead:
            self._put_off.append((action, args))
        else:
            action(*args)

    def _resume(self) -> None:
        """The rank has computed."""
        if self._stalled_s:
            self._scheduler.at(self._scheduler.now + self._stalled_s, self._take_up)
            self._stalled_s = 0.0
            return
        self._deaf = False
        if self._put_off:
            self._do_what_was_put_off()
        self._has_turn = True  # this one
        if len(self._ready) > self._heard_count + 1 and self._scheduler.random() < 0.5:
            self._put_timers_first()
        if self._sleeper is not None:
            self._ready.insert(0, self._sleeper)
            self._sleeper = None
        self._is_woken()
        self._run_ready()
        self._turn()

    def _put_timers_first(self) -> None:
        """Of what came while the rank was deaf. A loop is free to look at its clock before it looks at what arrived."""
        late = self._ready[self._heard_count :]
        timers = [handle for handle in late if isinstance(handle, Timer)]
        self._ready[self._heard_count :] = timers + [handle for handle in late if not isinstance(handle, Timer)]

    def has_computed(self) -> None:
        """User code has come to a safe point, in no time: whether it does so for ever is not for others to say."""
        self._scheduler.idle_turn_count = 0

    def _do_what_was_put_off(self) -> None:
        put_off, self._put_off = self._put_off, []
        for action, args in put_off:
            action(*args)

    def die(self) -> None:
        """Take no turn any more. What is ready stays so: a task whose wake-up is dropped could not be cancelled."""
        self.dead = True
        self._do_what_was_put_off()

    def revive(self) -> None:
        """Take turns again."""
        self.dead = False
        if self._ready and not self._running:
            self._schedule()

    # -- what asyncio needs on each turn ----------------------------------------------------------------------------

    def time(self) -> float:
        """Virtual seconds since the start.

        A callback that asks for them very often waits for the time to pass: so it does.
        """
        self._read_count += 1
        if self._read_count > _FREE_READ_COUNT and self._running:
            if self._read_count > READ_COUNT_MAX:
                self._refuse_endless_reads()
            self.block(_READ_S * (self._read_count // _FREE_READ_COUNT))
        return self._scheduler.time()

    def _refuse_endless_reads(self) -> None:
        self._read_count = 0  # what is done about the error reads clocks, too
        frame = sys._getframe()
        while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(_READERS):
            frame = frame.f_back
        raise LocalProtocolError(
            f"rank {self.rank} read clocks {READ_COUNT_MAX} times without awaiting anything, until "
            f"{self._scheduler.time():g} s of virtual time: line {frame.f_lineno} of {frame.f_code.co_filename} loops",
            rank=self.rank,
        )

    def get_debug(self) -> bool:
        """As asyncio's, which asks for every future and task."""
        return self._debug

    def set_debug(self, enabled: bool) -> None:
        """As asyncio's: futures and tasks remember where they were made. Slow callbacks are not told of."""
        self._debug = enabled

    def create_future(self) -> Future[Any]:
        """As asyncio's."""
        return Future(loop=self)  # type: ignore[arg-type]

    def call_soon(self, callback: Any, *args: Any, context: contextvars.Context | None = None) -> Handle:
        """As asyncio's."""
        handle = _new_handle(callback, args, context)
        self._ready.append(handle)
        if not self._running and not self.dead:
            self._schedule()
        return handle

    def call_later(self, delay: float, callback: Any, *args: Any, context: contextvars.Context | None = None) -> Handle:
        """As asyncio's."""
        return self.call_at(self._scheduler.time() + delay, callback, *args, context=context)

    def timers_due(self, after_s: float, until_s: float) -> list[float]:
        """When the rank's timers fire that fire within that time, in order."""
        due = [
            entry[0]
            for entry in self._scheduler.entries()
            if after_s < entry[0] <= until_s and entry[3] is self._take_timer and not entry[4][0].cancelled()
        ]
        return sorted(due)

    def call_at(self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None) -> Handle:
        """As asyncio's."""
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
        """As asyncio's."""
        return self._running

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """As asyncio's: somebody will want to read it."""
        if not self.dead:
            logger.error("rank %d: %s", self.rank, context.get("message"), exc_info=context.get("exception"))
