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
import heapq
import logging
import math
import random
import weakref
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final, NoReturn, TypeVar

from asyncdist.errors import LocalProtocolError

logger = logging.getLogger("asyncdist.simulation")

T = TypeVar("T")

#: Things that may happen at one and the same instant before a simulation is taken to be caught in a loop.
EVENT_COUNT_MAX: Final = 1_000_000


class Scheduler:
    """The clock and what will happen.

    Args:
        rng: decides ties.

    Attributes:
        now: virtual seconds since the start.
        event_count: things that have happened.
        stopped: set by whoever has seen enough; :meth:`run` returns.
    """

    def __init__(self, rng: random.Random) -> None:
        self.now = 0.0
        self.event_count = 0
        self.stopped = False
        self._random = rng.random
        self._heap: list[tuple[float, float, int, Callable[[], None]]] = []
        self._pushed_count = 0
        self._count_at_now = 0

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Do ``action`` at ``when``, in seconds; what is past is now."""
        self._pushed_count += 1
        now = self.now
        heapq.heappush(self._heap, (when if when > now else now, self._random(), self._pushed_count, action))

    def run(self, *, until_s: float = math.inf, after_event: Callable[[], None] | None = None) -> bool:
        """Let things happen until somebody sets ``stopped`` or ``until_s`` is reached; False if nothing is left."""
        heap = self._heap
        pop = heapq.heappop
        while not self.stopped:
            if not heap:
                return False
            if heap[0][0] > until_s:
                self.now = until_s
                return True
            when, _, _, action = pop(heap)
            if when > self.now:
                self.now = when
                self._count_at_now = 0
            else:
                self._count_at_now += 1
                if self._count_at_now > EVENT_COUNT_MAX:
                    raise LocalProtocolError(
                        f"{EVENT_COUNT_MAX} things happened at {self.now} s of virtual time: "
                        "some task loops without waiting for anything"
                    )
            self.event_count += 1
            action()
            if after_event is not None:
                after_event()
        return True


class RankLoop(asyncio.AbstractEventLoop):
    """The event loop of one rank.

    Args:
        scheduler: shared by all ranks.
        rank: whose loop it is.
        before_turn: called with the rank before each turn.

    Attributes:
        dead: it gets no turn any more.
        tasks: every task that was made on it and still exists.
    """

    def __init__(self, scheduler: Scheduler, rank: int, before_turn: Callable[[int], None]) -> None:
        self.rank = rank
        self.dead = False
        self.tasks: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        self._scheduler = scheduler
        self._before_turn = before_turn
        self._ready: deque[asyncio.Handle] = deque()
        self._deaf = False
        self._has_turn = False
        self._running = False
        self._take_turn = self._turn  # one bound method for all turns

    # -- turns ------------------------------------------------------------------------------------------------------

    def _schedule(self) -> None:
        if not self._has_turn and not self._running and not self._deaf:
            self._has_turn = True
            self._scheduler.at(self._scheduler.now, self._take_turn)

    def _turn(self) -> None:
        """Run what is ready now; what becomes ready meanwhile is for the next turn."""
        self._has_turn = False
        if self._deaf:
            return
        ready = self._ready
        self._before_turn(self.rank)
        if self.dead:
            return
        events._set_running_loop(self)
        self._running = True
        try:
            for _ in range(len(ready)):
                handle = ready.popleft()
                if not handle._cancelled:
                    handle._run()
                    if self._is_silent():
                        break
        except SystemExit:
            logger.debug("rank %d: a task raised SystemExit; whoever awaits it has it", self.rank)
        finally:
            self._running = False
            events._set_running_loop(None)
        if ready:
            self._schedule()

    def _is_silent(self) -> bool:
        return self._deaf or self.dead

    async def be_deaf(self, seconds: float) -> None:
        """Compute: get no turn for so long. The caller goes on first when it is over."""
        waiter: asyncio.Future[None] = self.create_future()
        self._deaf = True

        def resume() -> None:
            self._deaf = False
            if not waiter.done():
                waiter.set_result(None)
                self._ready.rotate(1)  # the caller's wake-up was appended last
            if self._ready:
                self._schedule()

        self._scheduler.at(self._scheduler.now + seconds, resume)
        await waiter

    def die(self) -> None:
        """Never take a turn again."""
        self.dead = True
        self._ready.clear()

    # -- what asyncio needs -----------------------------------------------------------------------------------------

    def time(self) -> float:
        return self._scheduler.now

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        if not self.dead:
            self._ready.append(handle)
            if not self._has_turn:
                self._schedule()
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._scheduler.now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        if when < math.inf:
            self._scheduler.at(when, lambda: self._fire(handle))
        return handle

    def _fire(self, handle: asyncio.TimerHandle) -> None:
        if not handle.cancelled() and not self.dead:
            self._ready.append(handle)
            self._schedule()

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Asyncio tells the loop; the heap finds out when the time comes."""

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, T], *, name: str | None = None, context: contextvars.Context | None = None
    ) -> asyncio.Task[T]:
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        self.tasks.add(task)
        return task

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


def refuse(what: str) -> NoReturn:
    """Raise for what a simulated rank has not."""
    raise LocalProtocolError(
        f"{what} is refused in a simulation: its outcome would not follow from the seed (await world.compute(fn) runs "
        "inline there)"
    )


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
