"""Progress engine of one rank: completes the transport's requests while coroutines wait for them.

The engine stores every request and its buffer until the request has completed, even if no task is waiting for it. Each
*pass* tests all outstanding requests (:mod:`asyncdist.messaging.polling`). This module has the methods that coroutines
call.

:class:`Engine` is used by ranks that are neither recorded nor replayed. Its subclasses for recordings
(:mod:`asyncdist.runtime.recording`) and replays (:mod:`asyncdist.simulation.replay.engine`) override methods that
record an event, or repeat it at the recorded time.
"""

from __future__ import annotations

import asyncio
import os
import time
import types
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Generator, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol, TypeVar

from asyncdist import tags
from asyncdist.errors import AsyncdistError, TruncationError
from asyncdist.messaging.polling import (
    AbandonedReceive,
    Alarm,
    Peers,
    PendingRequest,
    Poller,
    clock_of,
    resolve_waiter,
)
from asyncdist.transports.base import Buffer, Request, Transport
from asyncdist.validation import refuse_other_loop
from asyncdist.waits import A_CONDITION, A_WAKE_UP, WaitId, WaitKind

T = TypeVar("T")

DRAIN_PASS_COUNT_MAX: Final = 1000
#: Number of sends, receives and waits that may complete immediately before the next one yields to the loop.
FAIRNESS_PERIOD: Final = 64
#: Maximum number of polling passes in one :meth:`Engine.safe_point` in which only messages are delivered.
TALK_PASS_COUNT_MAX: Final = 16
#: Default time in seconds after which :meth:`Engine.safe_point` begins no further polling pass.
PROGRESS_BUDGET_S: Final = 0.01
_NO_WAIT: Final = WaitId(""), 0.0, None


class Timer(Protocol):
    """Interface of a scheduled call, as returned by :meth:`Engine.call_later`."""

    def cancel(self) -> None:
        """Cancel the scheduled call."""

    def cancelled(self) -> bool:
        """Return whether the scheduled call was cancelled."""


class VirtualClock(Protocol):
    """Interface of the simulation's clock, which advances by each rank's computing time."""

    def before_safe_point(self) -> Awaitable[None]:
        """Advance the clock by the time since the rank last called ``safe_point``. Await the result immediately."""

    def run_concurrently(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Run ``call`` for ``World.compute``.

        Return a future that receives the call's result when its virtual time has passed.
        """


@types.coroutine
def yield_to_loop() -> Generator[None, None, None]:
    """Yield to the event loop, so that every other ready task and callback runs once."""
    yield


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """Counts of an engine's polling passes, completed requests and outstanding requests."""

    pass_count: int
    completion_count: int
    request_count: int
    outstanding_count: int


class Engine(Poller):
    """Progress engine of one rank: completes requests in polling passes, and lets coroutines wait for them.

    Attributes:
        collective_waits: Futures that coroutines in collectives await. Reports of hangs list them.
        on_waited: Function called with the identity and the duration in seconds of each wait, or None.
        virtual_clock: Clock of a simulated rank, or None on real ranks.
        turn: Number of passes and yields in the current call of :meth:`safe_point`, odd during a yield.
        woken_count: Number of wake-ups since the last call of :meth:`safe_point` began, or 0 if the rank is not
            recorded.
        clock: Function that returns the time in seconds. Code whose decisions depend on the time calls this function,
            so that recordings contain the returned times.
        notes_sends: Whether tasks must pass each send to :meth:`name_send` and :meth:`repeat_sent`, even if the message
            left immediately. True if the rank is recorded or replayed.
        holds_sends: Whether flow control holds this rank's messages back until their receiver allows more.
    """

    notes_sends: ClassVar[bool] = False
    holds_sends: ClassVar[bool] = True

    def __init__(self, transport: Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(transport, loop)
        self.collective_waits: set[asyncio.Future[Any]] = set()
        self.on_waited: Callable[[WaitId, float], None] | None = None
        self.virtual_clock: VirtualClock | None = None
        self.clock = clock_of(loop)
        self.turn = self.woken_count = 0
        self.serves_blocking_code = False  # whether the loop runs only during calls from code that has no event loop
        self._disowned: list[PendingRequest] = []
        self._abandoned: dict[tuple[int, int], deque[AbandonedReceive]] = {}
        self._settlers: dict[asyncio.Future[Any], asyncio.Task[Any]] = {}
        self._alarms: dict[asyncio.Future[None], Alarm] = {}  # by awaited future that is completed at a deadline

    # -- passes -----------------------------------------------------------------------------------------------------

    async def safe_point(self, budget_s: float = 0.0) -> None:
        """Alternate polling passes and yields to other tasks until a pass completes nothing or the budget is spent.

        The first yield is skipped if the loop has nothing to run. The number of passes that deliver only messages is
        bounded, so constant senders cannot block this rank.

        Args:
            budget_s: Seconds after which no further pass begins, virtual in a simulation. With 0, there is one pass and
                one yield.

        Raises:
            BaseException: The error that has ended the job, if any.
        """
        if self.virtual_clock is not None:
            await self.virtual_clock.before_safe_point()
        self._note_safe_point_begun()  # Recorded only if the rank is recorded or replayed.
        completed = self.first_pass()
        self.turn = 1
        if not self.is_loop_idle():
            await yield_to_loop()
        self.turn = 2
        if budget_s:
            if completed:
                await self._pass_on(budget_s)
            else:
                self.yield_core()
        self._note_safe_point_ended()
        if self.failure is not None:
            raise self.failure

    async def _pass_on(self, budget_s: float) -> None:
        """Make the remaining polling passes of :meth:`safe_point` after its first pass has completed a request."""
        now = time.perf_counter if self.virtual_clock is None else self.loop.time
        deadline = now() + budget_s
        talk_pass_count = 0
        while now() < deadline and talk_pass_count < TALK_PASS_COUNT_MAX:
            requests = self._request_count
            completed = self.poll()
            self.turn += 1
            if not completed:
                break
            talk_pass_count += self._request_count == requests
            await yield_to_loop()
            self.turn += 1
        self.turn |= 1
        await yield_to_loop()

    def yield_core_to_receivers(self) -> None:
        """Yield the core once if a small message of this rank has not been received yet. Called before a long copy.

        If there are more busy processes than cores, the receiver may be waiting for the core on which this rank runs.
        """
        if self.transport.is_sending():
            os.sched_yield()

    async def drain(self) -> None:
        """Deliver all messages that have arrived. Called before a deadline is considered missed.

        The number of polling passes is bounded, so a rank that never stops sending cannot postpone the deadline
        forever.
        """
        for _ in range(DRAIN_PASS_COUNT_MAX):
            if not self.poll():
                break
            await yield_to_loop()
        await yield_to_loop()

    # -- requests ---------------------------------------------------------------------------------------------------

    async def wait(self, request: Request, what: WaitId) -> None:
        """Wait until ``request`` has completed.

        **Cancellation**: the engine stores the request and its buffer until the request has completed.

        Raises:
            RankLostError, TruncationError: The request has failed.
        """
        await self._wait(PendingRequest(request, what, None))

    async def wait_or_disown(self, request: Request, what: WaitId) -> None:
        """Wait for a request. If the caller is cancelled, :meth:`disown` the request, which may then never complete."""
        try:
            await self.wait(request, what)
        except asyncio.CancelledError:
            self.disown(request)
            raise

    def disown(self, request: Request) -> None:
        """Stop testing ``request``, which cannot complete because its peer has left.

        The engine still stores the request and its buffer, but no longer counts the request as outstanding. The
        callback of a completed request may disown any other request of the current polling pass.
        """
        waited = [operation for operation in (*self._in_test, *self._operations) if operation.request is request]
        for operation in waited:
            operation.disowned = True
        self._has_disowned = True
        self._operations[:] = [operation for operation in self._operations if not operation.disowned]
        self._disowned += waited or [PendingRequest(request, WaitId(WaitKind.DISOWNED), None)]

    async def send(self, buffer: Buffer, dest: int, tag: int) -> None:
        """Send ``buffer``, and wait until it may be reused. **Cancellation**: the message is sent anyway."""
        await self.wait(self.transport.isend(buffer, dest, tag), WaitId(WaitKind.SEND, tag, dest))

    async def receive(self, buffer: Buffer, source: int, tag: int) -> tuple[int, int]:
        """Receive one message into ``buffer``. Return its source and its size in bytes.

        **Cancellation**: no message is lost. The next ``receive`` from this source on this tag returns the message.
        """
        abandoned = self._abandoned.setdefault((source, tag), deque())
        what = WaitId(WaitKind.RECEIVE, tag, source)
        while abandoned:
            entry = abandoned[0]
            if not entry.resolved:
                waiter = self._new_waiter()
                entry.waiters.append(waiter)
                await self.park(waiter, what, is_of_request=True)
            elif abandoned and abandoned[0] is entry:
                abandoned.popleft()
                return entry.copy_into(buffer)
        request = self.transport.irecv(buffer, source, tag)
        operation = PendingRequest(request, what, None)
        try:
            await self._wait(operation)
        except asyncio.CancelledError:
            self._abandon(operation, buffer, abandoned)
            raise
        return request.source, request.nbytes

    async def _wait(self, operation: PendingRequest) -> None:
        if self.failure is not None:
            self._operations.append(operation)
            raise self.failure
        if operation.request.test():
            return
        waiter = self._new_waiter()
        operation.on_done = lambda error: resolve_waiter(waiter, error)
        self._operations.append(operation)
        await self.park(waiter, operation.what, is_of_request=True)

    def _abandon(self, operation: PendingRequest, buffer: Buffer, stash: deque[AbandonedReceive]) -> None:
        """Keep the request of a cancelled ``receive``, and the message that it receives, for the next ``receive``."""
        entry = AbandonedReceive(operation.request, buffer)

        def resolve(error: AsyncdistError | None) -> None:
            entry.resolved = True
            # The next ``receive`` raises this error.
            entry.error = error if isinstance(error, TruncationError) else None
            if entry.error is None and (error is not None or operation.request.cancelled) and entry in stash:
                stash.remove(entry)
            for waiter in entry.waiters:
                resolve_waiter(waiter, None)

        if operation in self._operations:
            stash.append(entry)
            operation.on_done = resolve
            operation.request.cancel()
            self.wake()
        elif operation.error is None or isinstance(operation.error, TruncationError):
            entry.resolved = True  # The message arrived just as the caller was cancelled.
            entry.error = operation.error
            stash.append(entry)

    # -- waiting ----------------------------------------------------------------------------------------------------

    def check_loop(self) -> None:
        """Raise LocalProtocolError if the calling coroutine runs in another event loop, where it could not wait."""
        running = asyncio._get_running_loop()  # None in a forked child, and in a thread that only makes a coroutine
        if running is not None and running is not self.loop:
            refuse_other_loop(self.transport.rank, serves_blocking_code=self.serves_blocking_code)

    def _new_waiter(self) -> asyncio.Future[None]:
        return asyncio.Future(loop=self.loop)  # ``loop.create_future`` may return a class that is slower.

    def awaited(self, waiter: Any) -> WaitId | None:
        """Return the identity of a task's wait for the future ``waiter``, or None if no task of this rank awaits it."""
        found = self._waiters.get(waiter)
        return None if found is None else found[0]

    def awaited_peers(self, waiter: Any) -> Iterable[int]:
        """Return the ranks, if known, that may end the wait for the future ``waiter``."""
        what, _, peers = self._waiters.get(waiter, _NO_WAIT)
        return peers() if peers is not None else () if what.peer is None else (what.peer,)

    def awaited_s(self, waiter: Any) -> float | None:
        """Return the seconds that a task has been waiting for the future ``waiter``, or None if no task is waiting."""
        found = self._waiters.get(waiter)
        return None if found is None else self.loop.time() - found[1]

    def has_deadline(self, waiter: Any) -> bool:
        """Return whether the wait for the future ``waiter`` ends at a deadline."""
        return waiter in self._alarms

    def _stop_alarm(self, waiter: asyncio.Future[None]) -> None:
        if (alarm := self._alarms.pop(waiter, None)) is not None:
            alarm.cancel()

    async def until(
        self,
        condition: Callable[[], bool],
        what: WaitId = A_CONDITION,
        *,
        deadline: float | None = None,
        is_of_request: bool = False,
        peers: Peers | None = None,
    ) -> bool:
        """Wait until ``condition()`` is true. Return False if the deadline passes first.

        Args:
            condition: Fast function without side effects, called after each polling pass that completes a request or
                delivers a message, and by :meth:`recheck`. This method raises its exceptions.
            deadline: Time on the loop's clock, in seconds. When it has passed, arrived messages are delivered, and the
                condition is evaluated once more.
            is_of_request: Whether the wait is for the end of a request, for example a send.
            peers: Function that returns the ranks that may end the wait, if there are several.
        """
        drained = has_waited = False
        try:
            while not condition():
                if deadline is not None and not has_waited:
                    # Record the beginning and the end only once for the whole wait.
                    self._note_wait_begun(not is_of_request)
                has_waited = True
                if deadline is not None and self.loop.time() >= deadline:
                    if drained:
                        self._note_deadline(what)
                        return False
                    await self.drain()
                    drained = True
                    continue
                waiter = self._new_waiter()
                self._conditions[waiter] = condition
                if deadline is not None:
                    self._alarms[waiter] = Alarm(self.loop, deadline, waiter)
                try:
                    await self.park(waiter, what, is_of_request=is_of_request or deadline is not None, peers=peers)
                finally:
                    del self._conditions[waiter]
                    self._stop_alarm(waiter)
            return True
        finally:
            # The end of a wait with a deadline is recorded only here, because the messages delivered last decide its
            # result.
            if has_waited and deadline is not None:
                self._note_wait_ended(not is_of_request)

    async def park_until(
        self,
        waiter: asyncio.Future[None],
        is_ready: Callable[[], bool],
        what: WaitId,
        deadline: float,
        *,
        peers: Peers | None = None,
    ) -> bool:
        """Wait until a polling pass completes the future ``waiter``. Return False if the deadline passes first.

        Args:
            is_ready: Function that returns whether the awaited event has happened. Called after the deadline, when all
                arrived messages have been delivered.
            deadline: Time on the loop's clock, in seconds.
            peers: Function that returns the ranks that may end the wait, if there are several.
        """
        self._alarms[waiter] = Alarm(self.loop, deadline, waiter)
        self._note_wait_begun(True)
        try:
            await self.park(waiter, what, is_of_request=True, peers=peers)
            if is_ready() or self.loop.time() < deadline:
                return True
            await self.drain()
            if is_ready():
                return True
            self._note_deadline(what)
            return False
        finally:
            self._stop_alarm(waiter)
            self._note_wait_ended(True)

    async def park(
        self,
        waiter: asyncio.Future[None],
        what: WaitId = A_WAKE_UP,
        *,
        is_of_request: bool = False,
        peers: Peers | None = None,
    ) -> None:
        """Wait until a polling pass completes the future ``waiter``.

        Until then, the driver polls, at first at its highest rate, unless the transport reports all arrivals.

        Args:
            is_of_request: Whether the wait is for the end of a request, for example a send.
            peers: Function that returns the ranks that may end the wait, if there are several.
        """
        self.check_loop()
        if self.failure is not None:
            raise self.failure
        if self._misses_wakes:
            self.wake()
        is_counted = self.on_waited is not None
        began_at = self.loop.time()
        self._waiters[waiter] = what, began_at, peers
        self._note_wait_begun(not is_of_request)
        try:
            await self._settled(waiter, not is_of_request)
        finally:
            del self._waiters[waiter]
            self._note_wait_ended(not is_of_request)
            if self.on_waited is not None and is_counted:
                self.on_waited(what, self.loop.time() - began_at)

    def call_later(self, delay_s: float, what: WaitId, call: Callable[..., object], *args: Any) -> Timer:
        """Schedule ``call(*args)``, which must not raise, after ``delay_s`` seconds.

        Messages that have arrived are delivered first, and may cancel the call. Code whose timers affect messages or
        decisions uses this method, not the loop's ``call_later``, so that replays repeat the call when it was recorded.
        """
        held: list[Timer] = []
        held.append(self.loop.call_later(delay_s, self._fire, held, what, call, args))
        return held[0]

    def _fire(self, held: list[Timer], what: WaitId, call: Callable[..., object], args: tuple[Any, ...]) -> None:
        timer = held.pop()  # ends the reference cycle
        self.poll()
        if not timer.cancelled():
            self._note_timer(what)
            call(*args)

    def wake_by(self, what: WaitId, wake: Callable[[], object]) -> None:
        """Call ``wake()`` to resume a task after an event outside the engine, such as an asyncio timer.

        A recording stores the time of the event, and a replay repeats the call at that time.
        """
        wake()

    async def let_begin(self) -> None:
        """Let a new task take its first step. A replay first repeats the events recorded before that step."""
        await yield_to_loop()

    # -- tasks that others count on ---------------------------------------------------------------------------------

    async def shielded(self, task: asyncio.Task[T], tag: int) -> T:
        """Return the result of a task that runs a collective. Cancelling the caller does not cancel the task."""
        waiter = asyncio.shield(task)
        self.collective_waits.add(waiter)
        try:
            # The end of the collective is recorded instead of the end of the wait.
            result = await self.settled_by(task, waiter, WaitId(WaitKind.COLLECTIVE), counts=False)
        except AsyncdistError:
            await self.note_failed()
            raise
        finally:
            self.collective_waits.discard(waiter)
        await self.note_collective(tag)
        return result

    async def ended(self, task: asyncio.Task[Any]) -> None:
        """Wait until a task has returned, failed or been cancelled. Cancelling the caller does not cancel the task."""
        if task.done():
            return
        waiter = self._new_waiter()

        def wake(_: object) -> None:
            resolve_waiter(waiter, None)

        task.add_done_callback(wake)
        try:
            await self.settled_by(task, waiter)
        finally:
            task.remove_done_callback(wake)

    async def settled_by(
        self, task: asyncio.Task[Any], future: asyncio.Future[T], what: WaitId | None = None, *, counts: bool = True
    ) -> T:
        """Return the result of ``future``, which ``task`` completes. In reports, the caller is waiting for ``task``."""
        self._settlers[future] = task
        began_at = None if self.on_waited is None else self.loop.time()
        try:
            return await self._settled(future, counts)
        finally:
            del self._settlers[future]
            self._note_wait_ended(counts)
            if self.on_waited is not None and began_at is not None:
                self.on_waited(what or WaitId(WaitKind.TASK, name=task.get_name()), self.loop.time() - began_at)

    def settler(self, future: Any) -> asyncio.Task[Any] | None:
        """Return the task that completes ``future``, if a coroutine awaits the future through :meth:`settled_by`."""
        return self._settlers.get(future)

    # -- hooks of recordings and replays -----------------------------------------------------------------------------
    # Recorded and replayed ranks override these methods.

    def measured(self, what: WaitId, value: int) -> int:
        """Return ``value``, a number that depends on timing. In a replay, return the number recorded for ``what``."""
        del what
        return value

    def note_reduced(self, tag: int, result: memoryview) -> None:
        """Record the result of a reduction whose order MPI chose. In a replay, replace it with the recorded bytes."""

    def name_send(self, kind: WaitKind, dest: int, tag: int) -> WaitId | None:
        """Return an identity for the wait for a send, or None if this rank is neither recorded nor replayed."""
        del kind, dest, tag
        return None

    async def repeat_held(self, kind: WaitKind, dest: int, tag: int) -> None:
        """In a replay, if the recorded send was held back until ``dest`` was lost, wait as long as it did."""

    async def repeat_sent(self, what: WaitId, dest: int) -> bool:
        """Return whether the recorded send had to wait.

        In a replay, wait as long as the recorded send did, and fail if it failed.
        """
        del what, dest
        return False

    def note_collective_begun(self) -> None:
        """Record that a collective begins."""

    async def note_collective(self, tag: int) -> None:
        """Record the end of a collective. In a replay, wait until the collective's recorded end."""

    async def note_failed(self) -> None:
        """Record that a collective has failed although the job has not.

        In a replay, wait until the recorded failure.
        """

    def _settled(self, future: asyncio.Future[T], counts: bool) -> Awaitable[T]:
        """Return an awaitable for the result of ``future``. In a replay, it completes at the recorded time."""
        del counts
        return future

    def _note_safe_point_begun(self) -> None: ...

    def _note_safe_point_ended(self) -> None: ...

    def _note_wait_begun(self, counts: bool) -> None: ...

    def _note_wait_ended(self, counts: bool) -> None: ...

    def _note_deadline(self, what: WaitId) -> None: ...

    def _note_timer(self, what: WaitId) -> None: ...

    # -- reports -----------------------------------------------------------------------------------------------------

    @property
    def waiter_count(self) -> int:
        """Number of tasks that are waiting for a request, a message or a condition."""
        return len(self._waiters)

    def outstanding(self, spoiled_tags: Collection[int] = ()) -> tuple[str, ...]:
        """Describe the outstanding requests, and the messages that cancelled receives have left unreceived."""
        has_losses = bool(self.transport.lost_ranks())
        stashed = (
            f"unreceived message from {source}, tag {tag}"
            for (source, tag), stash in self._abandoned.items()
            for entry in stash
            if entry.resolved
            and tag not in spoiled_tags
            and not (has_losses and tags.COLLECTIVE_FIRST <= tag <= tags.COLLECTIVE_LAST)
        )
        return (*(str(operation.what) for operation in self._operations), *stashed)

    def statistics(self) -> EngineStatistics:
        """Return the numbers of polling passes and completed requests, and of outstanding requests."""
        return EngineStatistics(
            pass_count=self._pass_count,
            completion_count=self._completion_count,
            request_count=self._request_count,
            outstanding_count=len(self._operations),
        )
