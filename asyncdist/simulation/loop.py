"""Virtual time: one scheduler, and one event loop per simulated rank.

Every rank has a loop of its own, as in reality: its ready callbacks, its timers. The scheduler owns the clock and one
heap of things that will happen: a rank's *turn* (it runs what is ready, as one iteration of asyncio's loop does), a
timer, an event of the network. Things that happen at the same time happen in an order drawn from the seed.

A rank that computes is *deaf*: it gets no turn until its time has passed, so none of its tasks, timers or callbacks
run, however many messages arrive meanwhile.

Nothing here knows of messages or of asyncdist's protocols.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
import math
import random
import types
import weakref
from asyncio.events import _set_running_loop as set_running_loop
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from heapq import heappop, heappush
from typing import Any, Final, NoReturn, TypeVar

from asyncdist.errors import LocalProtocolError
from asyncdist.simulation.outside import refuse

logger = logging.getLogger("asyncdist.simulation")

T = TypeVar("T")

#: Things that may happen at one and the same instant before a simulation is taken to be caught in a loop.
EVENT_COUNT_MAX: Final = 1_000_000
#: Turns that a rank may take in a row, woken by nothing from outside, before it is taken to be caught in one.
TURN_COUNT_MAX: Final = 1_000_000
#: The same of all ranks together while nothing else is to come: they wait for what cannot happen any more.
IDLE_TURN_COUNT_MAX: Final = 100_000
#: So many of these are each rank's own affair, where there are many.
_IDLE_TURN_COUNT_OF_A_RANK: Final = 100
#: A turn that follows another one comes up to so much later: turns take time, and messages arrive meanwhile.
TURN_S: Final = 2e-6


class Scheduler:
    """The clock and what will happen.

    Args:
        rng: decides ties.

    Attributes:
        now: virtual seconds since the start.
        event_count: things that have happened.
        task_count: tasks made on all loops.
        idle_turn_count: turns that ranks have taken in a row, woken by nothing from outside.
        stopped: set by whoever has seen enough; :meth:`run` returns.
        random: the generator's, from 0 to 1.
    """

    def __init__(self, rng: random.Random) -> None:
        self.now = 0.0
        self.event_count = 0
        self.task_count = 0
        self.idle_turn_count = 0
        self.stopped = False
        self.random = rng.random
        self._heap: list[tuple[float, float, int, Callable[[], None]]] = []
        self._now: list[Callable[[], None]] = []
        self._pushed_count = 0
        self._count_at_now = 0
        self._until_s = math.inf
        self._after_event: Callable[[], object] | None = None

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Do ``action`` at ``when``, in seconds; what is past is now."""
        self._pushed_count += 1
        now = self.now
        heappush(self._heap, (when if when > now else now, self.random(), self._pushed_count, action))

    def soon(self, action: Callable[[], None]) -> None:
        """Do ``action`` now, when what is being done has ended; quicker than :meth:`at`."""
        self._now.append(action)

    def run(self, *, until_s: float = math.inf, after_event: Callable[[], object] | None = None) -> bool:
        """Let things happen until somebody sets ``stopped`` or ``until_s`` is reached; False if nothing is left."""
        self._until_s = until_s
        self._after_event = after_event
        soon, heap = self._now, self._heap
        while not self.stopped:
            if soon:
                action = soon.pop(int(self.random() * len(soon)) if len(soon) > 1 else 0)
            elif not heap:
                return False
            elif heap[0][0] > until_s:
                self.now = until_s
                return True
            else:
                when, _, _, action = heappop(heap)
                if when > self.now:
                    self.now = when
                    self._count_at_now = 0
            self._count_at_now += 1
            if self._count_at_now > EVENT_COUNT_MAX:
                raise LocalProtocolError(
                    f"{EVENT_COUNT_MAX} things happened at {self.now} s of virtual time: "
                    "some task loops without waiting for anything"
                )
            self.event_count += 1
            action()
            if after_event is not None and after_event():
                self.stopped = True
        return True

    def go_on_until(self, when: float) -> bool:
        """Whether nothing else happens up to ``when``; it is that time now, then, and a further event has ended."""
        if self._now or (self._heap and self._heap[0][0] <= when):
            return False
        if when > self._until_s or self.stopped:
            return False
        if self._after_event is not None and self._after_event():
            self.stopped = True
            return False
        self.now = when
        self.event_count += 1
        self._count_at_now = 0
        return not self.stopped

    def has_only_turns(self) -> bool:
        """Whether nothing is to come but turns of ranks that go on by themselves."""
        return not self._now and not any(_may_wake(action) for _, _, _, action in self._heap)

    @property
    def pending_count(self) -> int:
        """Things that will happen."""
        return len(self._heap)


def _may_wake(action: Any) -> bool:
    """Whether it is more than a rank's next turn, or a timer that was cancelled."""
    if isinstance(action, functools.partial) and getattr(action.func, "__func__", None) is RankLoop._fire:
        return not action.args[0].cancelled()
    return getattr(action, "__func__", None) is not RankLoop._turn


@types.coroutine
def _fall_asleep() -> Generator[None, None, None]:
    """The task's next step is the last thing that is ready now."""
    yield


class _Handle(asyncio.Handle):
    """What asyncio makes of a callback, at a third of the cost; there are several in each step of each rank.

    :meth:`RankLoop.call_soon` fills it.
    """

    __slots__ = ()

    __init__ = object.__init__  # asyncio's wants to be told more

    def cancel(self) -> None:
        self._cancelled = True
        self._callback = self._args = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<Handle {'cancelled' if self._cancelled else self._callback}>"


class SimTask(asyncio.Task[Any]):
    """A task that a set finds by its number, not its address: asyncio cancels and returns tasks in the order of sets.

    Attributes:
        number: tasks are numbered as they are made.
    """

    def __init__(self, coro: Coroutine[Any, Any, Any], number: int, **options: Any) -> None:
        self.number = number
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self.number


class RankLoop(asyncio.AbstractEventLoop):
    """The event loop of one rank.

    Args:
        scheduler: shared by all ranks.
        rank: whose loop it is.
        before_turn: called with the rank before each turn, if it is given.
        enter: called with the rank before a callback that may run user code.
        background: callbacks that are methods of this function run none.

    Attributes:
        dead: it gets no turn any more.
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
        self._tasks: weakref.WeakSet[SimTask] = weakref.WeakSet()
        self._scheduler = scheduler
        self._before_turn = before_turn
        self._enter = enter
        self._background = background
        self._ready: deque[asyncio.Handle] = deque()
        self._sleeper: asyncio.Handle | None = None  # the step with which the rank goes on when it has computed
        self._deaf = False
        self._has_turn = False
        self._running = False
        self._turns_in_a_row = 0
        self._take_turn = self._turn  # one bound method for all turns
        self._take_up = self._resume

    # -- turns ------------------------------------------------------------------------------------------------------

    def _schedule(self) -> None:
        """Something from outside wants a turn."""
        self._is_woken()
        if not self._has_turn and not self._running and not self._deaf:
            self._has_turn = True
            self._scheduler.soon(self._take_turn)

    def _goes_on(self) -> bool:
        """The turn that has just ended left something to do: whether its next one comes before all else."""
        scheduler = self._scheduler
        self._turns_in_a_row += 1
        scheduler.idle_turn_count += 1
        if self._turns_in_a_row > TURN_COUNT_MAX or scheduler.idle_turn_count % IDLE_TURN_COUNT_MAX == 0:
            self._refuse_endless_turns()
        when = scheduler.now + TURN_S * scheduler.random()
        if scheduler.go_on_until(when):
            return True
        self._has_turn = True
        scheduler.at(when, self._take_turn)
        return False

    def _refuse_endless_turns(self) -> None:
        scheduler = self._scheduler
        in_vain = scheduler.idle_turn_count >= _IDLE_TURN_COUNT_OF_A_RANK * scheduler.pending_count
        if self._turns_in_a_row > TURN_COUNT_MAX or (in_vain and scheduler.has_only_turns()):
            raise LocalProtocolError(
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

    def _run_ready(self) -> None:
        """Run what is ready now; what becomes ready meanwhile is for the next turn."""
        if self._before_turn is not None:
            self._before_turn(self.rank)
        if self.dead:
            return
        ready = self._ready
        set_running_loop(self)
        self._running = True
        entered = False
        try:
            for _ in range(len(ready)):
                handle: Any = ready.popleft()
                if handle._cancelled:
                    continue
                callback = handle._callback
                if not entered and getattr(callback, "__func__", None) is not self._background:
                    self._enter(self.rank)
                    entered = True
                try:
                    handle._context.run(callback, *handle._args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:
                    self.call_exception_handler({"message": f"Exception in callback {callback}", "exception": error})
                if self._deaf or self.dead:
                    break
            if self._deaf:
                self._sleeper = ready.pop()
        except SystemExit:
            logger.debug("rank %d: a task raised SystemExit; whoever awaits it has it", self.rank)
        finally:
            self._running = False
            set_running_loop(None)

    def _is_silent(self) -> bool:
        return self._deaf or self.dead

    async def be_deaf(self, seconds: float) -> None:
        """Compute: get no turn for so long.

        The caller goes on first when it is over, and its next turn comes at the same instant: a safe point that finds
        nothing takes no time.
        """
        self._deaf = True
        self._scheduler.at(self._scheduler.now + seconds, self._take_up)
        await _fall_asleep()  # a future would cost as much again as all of this

    def _resume(self) -> None:
        """The rank has computed."""
        self._deaf = False
        self._has_turn = True  # this one
        if self._sleeper is not None:
            self._ready.appendleft(self._sleeper)
            self._sleeper = None
        self._is_woken()
        self._run_ready()
        self._turn()

    def has_computed(self) -> None:
        """User code has come to a safe point, in no time: whether it does so for ever is not for others to say."""
        self._scheduler.idle_turn_count = 0

    def die(self) -> None:
        """Take no turn any more. What is ready stays so: a task whose wake-up is dropped could not be cancelled."""
        self.dead = True

    def revive(self) -> None:
        """Take turns again."""
        self.dead = False
        if self._ready:
            self._schedule()

    # -- what asyncio needs -----------------------------------------------------------------------------------------

    def time(self) -> float:
        return self._scheduler.now

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle: Any = _Handle()
        handle._callback = callback
        handle._args = args
        handle._context = contextvars.copy_context() if context is None else context
        handle._cancelled = False
        self._ready.append(handle)
        if not self._running and not self.dead:
            self._is_woken()
            if not self._has_turn and not self._deaf:
                self._has_turn = True
                self._scheduler.soon(self._take_turn)
        return handle  # type: ignore[no-any-return]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._scheduler.now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        if when < math.inf:
            self._scheduler.at(when, functools.partial(self._fire, handle))
        return handle

    def _fire(self, handle: asyncio.TimerHandle) -> None:
        if not handle.cancelled():
            self._ready.append(handle)
            self._is_woken()
            if not self._has_turn and not self.dead:
                self._turn()

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Asyncio tells the loop; the heap finds out when the time comes."""

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, T], *, name: str | None = None, context: contextvars.Context | None = None
    ) -> asyncio.Task[T]:
        self._scheduler.task_count += 1
        number = self._scheduler.task_count
        task = SimTask(coro, number, loop=self, name=name or f"task {number}", context=context)
        self._tasks.add(task)
        return task

    def unfinished_tasks(self) -> list[SimTask]:
        """Those that are not done, in the order in which they were made."""
        return sorted((task for task in self._tasks if not task.done()), key=lambda task: task.number)

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self.dead:
            logger.error("rank %d: %s", self.rank, context.get("message"), exc_info=context.get("exception"))

    def call_soon_threadsafe(  # type: ignore[override]
        self, *args: Any, **kwargs: Any
    ) -> NoReturn:
        refuse("a call from another thread")

    def run_in_executor(  # type: ignore[override]
        self, *args: Any, **kwargs: Any
    ) -> NoReturn:
        refuse("a thread or process pool")


def _refusing(name: str) -> Any:
    def method(self: RankLoop, *args: Any, **kwargs: Any) -> NoReturn:
        del self, args, kwargs
        refuse(f"loop.{name}, a socket, pipe, signal or subprocess,")

    return method


#: What touches the world outside. asyncio's own NotImplementedError would not say why.
_OUTSIDE: Final = (
    "add_reader",
    "add_signal_handler",
    "add_writer",
    "connect_accepted_socket",
    "connect_read_pipe",
    "connect_write_pipe",
    "create_connection",
    "create_datagram_endpoint",
    "create_server",
    "create_unix_connection",
    "create_unix_server",
    "getaddrinfo",
    "getnameinfo",
    "remove_reader",
    "remove_signal_handler",
    "remove_writer",
    "sendfile",
    "sock_accept",
    "sock_connect",
    "sock_recv",
    "sock_recv_into",
    "sock_recvfrom",
    "sock_recvfrom_into",
    "sock_sendall",
    "sock_sendfile",
    "sock_sendto",
    "start_tls",
    "subprocess_exec",
    "subprocess_shell",
)

for _name in _OUTSIDE:
    setattr(RankLoop, _name, _refusing(_name))
