"""The engine: the one place that polls, one per rank.

It keeps every request until it has completed, with its buffer, whoever lost interest meanwhile. A request is tested
once when it is posted, since most small ones are done by then; else it joins the outstanding set, which each *pass*
tests whole.

Who runs passes: the training code at its safe points (:meth:`Engine.progress`), and a driver callback on the loop while
coroutines wait. The driver is **hot** (a pass in every loop iteration) for as long as something completes and a little
longer, some milliseconds while a transfer is under way; then **warm** (it gives the core away for tens of microseconds
between passes, if nothing else runs on the loop; asyncio's timers cannot: anything under a millisecond takes 1.07 ms,
and uvloop rounds it to a busy spin); then **idle** (a pass every millisecond). A transport that rings a doorbell is
woken by it at once.

The engine knows no frame, channel or protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import os
import time
import types
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Final, Protocol

from asyncdist.errors import AsyncdistError, TruncationError
from asyncdist.transports.base import Buffer, Request, Transport

HOT_PASS_COUNT: Final = 100
#: With a transfer under way, hot for about as long as 16 MiB take, though whoever else wants the core gets it. A sleep
#: of 20 us takes 50 to 100 on common kernels, and as long again until the caches are warm.
TRANSFER_HOT_S: Final = 0.004
WARM_SLEEP_S: Final = 20e-6
WARM_PASS_COUNT: Final = 20
#: Where threads of the transport move the bytes: how long after the last step of a transfer training code gives them
#: the core and the GIL at its safe points. As long as two chunks take; a receive that waits for ever costs nothing.
TRANSFER_GIVES_S: Final = 0.01
IDLE_PERIOD_S: Final = 0.001
#: Where the transport rings, a slow look all the same: a wake-up may be missed (ucxx#30), and not all requests are
#: messages.
SAFETY_PERIOD_S: Final = 0.05
#: Between two ticks of the driver an otherwise empty loop spends less than this; more, and somebody else is running.
ALONE_GAP_S: Final = 20e-6
DRAIN_PASS_COUNT_MAX: Final = 1000
#: Passes of one safe point that may bring nothing but messages.
TALK_PASS_COUNT_MAX: Final = 16
#: How long one safe point may go on completing requests.
PROGRESS_BUDGET_S: Final = 0.01


@types.coroutine
def yield_to_loop() -> Generator[None, None, None]:
    """Let every other ready task and callback run once."""
    yield


class Inlet(Protocol):
    """Something with receives of its own that a pass must poll, e.g. a lane of channels."""

    def poll(self) -> int:
        """Deliver what has arrived; how many messages that was."""


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """Counts since the engine was made."""

    pass_count: int
    completion_count: int
    outstanding_count: int


class Operation:
    """A request in the engine's keeping and what to do when it has completed.

    Attributes:
        request: the transport's.
        what: for reports: e.g. ``"receive from 3, tag 8001"``.
        on_done: called once with the error, or None.
    """

    __slots__ = ("error", "on_done", "request", "what")

    def __init__(self, request: Request, what: str, on_done: Callable[[AsyncdistError | None], None] | None) -> None:
        self.request = request
        self.what = what
        self.on_done = on_done
        self.error: AsyncdistError | None = None

    def finish(self, error: AsyncdistError | None) -> None:
        """Tell whoever asked to be told."""
        self.error = error
        if self.on_done is not None:
            self.on_done(error)


class Engine:
    """Polls the requests of one rank.

    Args:
        transport: the rank's transport.
        loop: the loop that runs the rank.
    """

    def __init__(self, transport: Transport, loop: asyncio.AbstractEventLoop) -> None:
        self.transport = transport
        self.loop = loop
        self._inlets: tuple[Inlet, ...] = ()
        self._operations: list[Operation] = []
        self._disowned: list[Operation] = []
        self._handle: asyncio.Handle | None = None
        self._quiet_tick_count = 0
        self._quiet_since = 0.0
        self._tick_ended_at = 0.0
        self._passed_since_tick = False
        self._in_pass = False
        self._asleep = True
        self._stopped = True
        self._pass_count = 0
        self._completion_count = 0
        self._request_count = 0  # those of the completions that were no messages of lanes
        self._failure: BaseException | None = None
        self._waiters: dict[asyncio.Future[None], str] = {}
        self._conditions: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        self._abandoned: dict[tuple[int, int], deque[_Abandoned]] = {}
        self._wakes = transport.capabilities.wakes
        self._misses_wakes = transport.capabilities.misses_wakes
        self._has_threads = transport.capabilities.rings_from_threads
        self._transferred_at = 0.0
        self._context = contextvars.copy_context()
        self._rung = False
        transport.set_doorbell(self._ring_from_a_thread if transport.capabilities.rings_from_threads else self.ring)

    # -- passes -----------------------------------------------------------------------------------------------------

    def poll(self) -> int:
        """One pass: test everything outstanding once. Returns how many completed. Never blocks, never yields."""
        if self._in_pass:  # a completion callback asked for progress: it is being made
            return 0
        self._in_pass = True
        self._passed_since_tick = True  # a ring during this pass asks for another one
        try:
            completed = 0
            for inlet in self._inlets:
                completed += inlet.poll()
            if self._operations:
                completed += self._test_operations()
        finally:
            self._in_pass = False
        self._pass_count += 1
        self._completion_count += completed
        if completed and self._conditions:
            self.recheck()
        return completed

    def _test_operations(self) -> int:
        operations, self._operations = self._operations, []
        pending = []
        for position, operation in enumerate(operations):
            try:
                if not operation.request.test():
                    pending.append(operation)
                    continue
                error = None
            except AsyncdistError as caught:
                error = caught
            except BaseException:
                self._operations = pending + operations[position:] + self._operations
                raise
            operation.finish(error)
        completed = len(operations) - len(pending)
        if completed and self._has_threads:
            self._transferred_at = time.perf_counter()
        self._request_count += completed
        self._operations = pending + self._operations if self._operations else pending
        return completed

    async def progress(self, budget_s: float = PROGRESS_BUDGET_S, *, clock: Callable[[], float] | None = None) -> None:
        """Alternate a pass with a yield to the loop until a pass completes nothing or the budget is spent.

        At least one yield always, so that the rank's other tasks live. Peers that never stop talking do not hold a
        rank: passes that bring messages alone are bounded. ``clock`` is what the budget is spent on, where that is not
        real time.
        """
        now = time.perf_counter if clock is None else clock
        completed = self.poll()
        await yield_to_loop()
        if not completed:
            self._give_core()
            return
        deadline = now() + budget_s
        talk_pass_count = 0
        while now() < deadline and talk_pass_count < TALK_PASS_COUNT_MAX:
            requests = self._request_count
            if not self.poll():
                break
            talk_pass_count += self._request_count == requests
            await yield_to_loop()
        await yield_to_loop()

    def _give_core(self) -> None:
        """Let the transport's threads run, where a transfer is under way: a loop of safe points would starve them."""
        if self._has_threads and self._operations and time.perf_counter() - self._transferred_at < TRANSFER_GIVES_S:
            time.sleep(WARM_SLEEP_S)

    async def drain(self) -> None:
        """Take in everything that has arrived: what must happen before a deadline is judged after a gap.

        Bounded, so that a peer that never stops sending cannot put off a deadline for ever.
        """
        for _ in range(DRAIN_PASS_COUNT_MAX):
            if not self.poll():
                break
            await yield_to_loop()
        await yield_to_loop()

    # -- requests ---------------------------------------------------------------------------------------------------

    def watch(
        self, request: Request, what: str, on_done: Callable[[AsyncdistError | None], None] | None = None
    ) -> None:
        """Keep ``request`` until it has completed, then call ``on_done`` with the error or None.

        Tested once here; ``on_done`` may thus be called before this returns.
        """
        operation = Operation(request, what, on_done)
        try:
            if not request.test():
                self._operations.append(operation)
                if self._has_threads:
                    self._transferred_at = time.perf_counter()
                self.wake()
                return
            error = None
        except AsyncdistError as caught:
            error = caught
        operation.finish(error)

    async def wait(self, request: Request, what: str) -> None:
        """Wait until ``request`` has completed.

        **Cancellation**: the request stays with the engine until it completes; its buffer is not free before that.

        Raises:
            RankLostError, TruncationError: as the request.
        """
        await self._wait(Operation(request, what, None))

    def follow(self, request: Request, what: str) -> asyncio.Future[None]:
        """Keep ``request`` until it has completed; returns a future that is settled then, for :meth:`park`.

        Done already where the request is.
        """
        waiter = self._new_waiter()
        self.watch(request, what, functools.partial(settle, waiter))
        return waiter

    def disown(self, request: Request) -> None:
        """Never wait for ``request`` again: it cannot complete, since a peer that it needs has left.

        It is kept with its buffer, not tested, and not counted as under way.
        """
        waited = [operation for operation in self._operations if operation.request is request]
        for operation in waited:
            self._operations.remove(operation)
        self._disowned += waited or [Operation(request, "a request that nobody waits for", None)]

    async def send(self, buffer: Buffer, dest: int, tag: int) -> None:
        """Send ``buffer`` and wait until it may be reused. **Cancellation**: the message is sent all the same."""
        await self.wait(self.transport.isend(buffer, dest, tag), f"send to {dest}, tag {tag}")

    async def receive(self, buffer: Buffer, source: int, tag: int) -> tuple[int, int]:
        """Receive one message into ``buffer``; returns its source and size in bytes.

        **Cancellation**: loses nothing. A message that comes all the same goes to the next ``receive`` of this source
        and tag.
        """
        abandoned = self._abandoned.setdefault((source, tag), deque())
        while abandoned:
            entry = abandoned[0]
            if not entry.resolved:
                await self._until(entry, f"receive from {source}, tag {tag}")
            elif abandoned and abandoned[0] is entry:
                abandoned.popleft()
                return entry.hand_over(buffer)
        request = self.transport.irecv(buffer, source, tag)
        operation = Operation(request, f"receive from {source}, tag {tag}", None)
        try:
            await self._wait(operation)
        except asyncio.CancelledError:
            self._abandon(operation, buffer, abandoned)
            raise
        return request.source, request.nbytes

    async def _wait(self, operation: Operation) -> None:
        if self._failure is not None:
            self._operations.append(operation)
            raise self._failure
        if operation.request.test():
            return
        waiter = self._new_waiter()
        operation.on_done = lambda error: settle(waiter, error)
        self._operations.append(operation)
        await self.park(waiter, operation.what)

    def _abandon(self, operation: Operation, buffer: Buffer, stash: deque[_Abandoned]) -> None:
        """The receiver has gone; the request has not, until the transport says how it ended."""
        entry = _Abandoned(operation.request, buffer)

        def resolve(error: AsyncdistError | None) -> None:
            entry.resolved = True
            entry.error = error if isinstance(error, TruncationError) else None  # a message came, and is lost
            if entry.error is None and (error is not None or operation.request.cancelled) and entry in stash:
                stash.remove(entry)
            for waiter in entry.waiters:
                settle(waiter, None)

        if operation in self._operations:
            stash.append(entry)
            operation.on_done = resolve
            operation.request.cancel()
            self.wake()
        elif operation.error is None or isinstance(operation.error, TruncationError):
            entry.resolved = True  # the message came in the moment of cancellation
            entry.error = operation.error
            stash.append(entry)

    async def _until(self, entry: _Abandoned, what: str) -> None:
        waiter = self._new_waiter()
        entry.waiters.append(waiter)
        await self.park(waiter, what)

    # -- waiting ----------------------------------------------------------------------------------------------------

    def _new_waiter(self) -> asyncio.Future[None]:
        return self.loop.create_future()

    def awaited(self, waiter: Any) -> str | None:
        """What ``waiter`` waits for, in words; None if it does not wait for this engine."""
        return self._waiters.get(waiter)

    async def until(
        self, condition: Callable[[], bool], what: str = "a condition", *, deadline: float | None = None
    ) -> bool:
        """Wait until ``condition()`` holds; asked after every pass that completed something, and on :meth:`recheck`.

        Args:
            condition: cheap, and without side effects. What it raises is raised here.
            what: the same in words, for reports.
            deadline: on the loop's clock, in seconds. Everything that has arrived is taken in before it is judged.

        Returns:
            Whether it holds; False when the deadline has passed.
        """
        drained = False
        while not condition():
            if deadline is not None and self.loop.time() >= deadline:
                if drained:
                    return False
                await self.drain()
                drained = True
                continue
            waiter = self._new_waiter()
            entry = (condition, waiter)
            self._conditions.append(entry)
            timer = self.loop.call_at(deadline, settle, waiter, None) if deadline is not None else None
            try:
                await self.park(waiter, what)
            finally:
                self._conditions.remove(entry)
                if timer is not None:
                    timer.cancel()
        return True

    def recheck(self) -> None:
        """Something that conditions look at has changed outside a pass."""
        for condition, waiter in self._conditions:
            try:
                if condition():
                    settle(waiter, None)
            except Exception as error:
                settle(waiter, error)

    async def park(self, waiter: asyncio.Future[None], what: str = "a wake-up") -> None:
        """Wait for ``waiter``, which an inlet will settle, with the driver at its most attentive.

        Args:
            waiter: a future of this loop.
            what: who is expected to settle it, in words, for reports.
        """
        if self._failure is not None:
            raise self._failure
        if self._misses_wakes:
            self.wake()
        self._waiters[waiter] = what
        try:
            await waiter
        finally:
            del self._waiters[waiter]

    def fail(self, error: BaseException) -> None:
        """Make every wait raise ``error`` from now on. Requests stay in the engine's keeping."""
        self._failure = error
        for waiter in list(self._waiters):
            settle(waiter, error)

    @property
    def failure(self) -> BaseException | None:
        """Why every wait raises, or None."""
        return self._failure

    # -- the driver -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Poll from the loop from now on, in the caller's context: what a message brings about belongs to its rank."""
        self._context = contextvars.copy_context()
        self._stopped = False
        self.wake()

    def stop(self) -> None:
        """Poll no more by itself."""
        self._stopped = True
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def ring(self) -> None:
        """Make a pass soon: something has arrived, or may have without a further ring."""
        if not self._misses_wakes:  # elsewhere the driver looks once more by itself
            self._rung = True
            self._passed_since_tick = False
            if not self._asleep:
                return
        self.wake()

    def _ring_from_a_thread(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self.loop.call_soon_threadsafe(self._on_ring_of_thread, context=self._context)

    def _on_ring_of_thread(self) -> None:
        """As :meth:`ring`, but the pass is made here and now: a turn of the loop is a system call."""
        if not self._asleep or self._stopped:
            self.ring()
            return
        if self._handle is not None:
            self._handle.cancel()
        self._quiet_tick_count = 0
        self._passed_since_tick = False
        self._tick()

    def wake(self) -> None:
        """Be hot: something is waited for, or has arrived."""
        self._quiet_tick_count = 0
        if self._asleep and not self._stopped:
            if self._handle is not None:
                self._handle.cancel()
            self._asleep = False
            self._handle = self.loop.call_soon(self._tick, context=self._context)

    def _tick(self) -> None:
        """One turn of the driver: a pass, unless training code has just made one, and when to come again."""
        self._asleep = self._rung = False
        began_at = time.perf_counter() if not self._wakes else 0.0
        alone = began_at - self._tick_ended_at < ALONE_GAP_S
        if not self._passed_since_tick and self._poll_for_waiters():
            self._quiet_tick_count = 0
        else:
            self._quiet_tick_count += 1
            if self._quiet_tick_count == HOT_PASS_COUNT:
                self._quiet_since = began_at
        self._passed_since_tick = False
        if not self._stopped:
            self._handle = self._next_tick(alone)
        if not self._wakes:
            self._tick_ended_at = time.perf_counter()

    def _poll_for_waiters(self) -> int:
        """A pass whose own failure reaches those who wait, since nobody awaits the driver."""
        try:
            return self.poll()
        except Exception as error:
            self.fail(error)
            return 0

    def _next_tick(self, alone: bool) -> asyncio.Handle | None:
        quiet = self._quiet_tick_count
        if self._wakes:
            if self._rung or (quiet <= 1 and self._misses_wakes):
                return self.loop.call_soon(self._tick)
            self._asleep = True
            if any(not getattr(operation.request, "rings", True) for operation in self._operations):
                return self.loop.call_later(IDLE_PERIOD_S, self._tick)  # a device: its events come from no transport
            return self.loop.call_later(SAFETY_PERIOD_S, self._tick) if self._misses_wakes else None
        if quiet <= HOT_PASS_COUNT:
            return self.loop.call_soon(self._tick)
        if self._operations and time.perf_counter() - self._quiet_since < TRANSFER_HOT_S:
            self._quiet_tick_count = HOT_PASS_COUNT  # the warm passes come after this
            if alone:
                os.sched_yield()
            return self.loop.call_soon(self._tick)
        if quiet <= HOT_PASS_COUNT + WARM_PASS_COUNT and alone:
            time.sleep(WARM_SLEEP_S)
            return self.loop.call_soon(self._tick)
        self._asleep = True
        return self.loop.call_later(IDLE_PERIOD_S, self._tick)

    # -- inlets and reports -----------------------------------------------------------------------------------------

    def add_inlet(self, inlet: Inlet) -> None:
        """Poll ``inlet`` in every pass, and soon: what came for it before it was there has rung already."""
        self._inlets = (*self._inlets, inlet)
        self.ring()

    def remove_inlet(self, inlet: Inlet) -> None:
        """Poll it no more."""
        self._inlets = tuple(other for other in self._inlets if other is not inlet)

    @property
    def is_idle(self) -> bool:
        """Whether no request is under way; a message that nobody has taken may still lie here."""
        return not self._operations

    def outstanding(self) -> tuple[str, ...]:
        """What is under way, abandoned receives included, for reports and for the check at the end."""
        stashed = (
            f"message from {source}, tag {tag}, for nobody"
            for (source, tag), stash in self._abandoned.items()
            for entry in stash
            if entry.resolved
        )
        return (*(operation.what for operation in self._operations), *stashed)

    def statistics(self) -> EngineStatistics:
        """Counts since the engine was made."""
        return EngineStatistics(
            pass_count=self._pass_count,
            completion_count=self._completion_count,
            outstanding_count=len(self._operations),
        )


class _Abandoned:
    """A receive whose caller has gone: first until its end is known, then until somebody takes its message."""

    __slots__ = ("_buffer", "_request", "error", "resolved", "waiters")

    def __init__(self, request: Request, buffer: Buffer) -> None:
        self._request = request
        self._buffer = buffer
        self.resolved = False
        self.error: AsyncdistError | None = None
        self.waiters: list[asyncio.Future[None]] = []

    def hand_over(self, buffer: Buffer) -> tuple[int, int]:
        if self.error is not None:
            raise self.error
        nbytes = self._request.nbytes
        target = memoryview(buffer)
        if nbytes > target.nbytes:
            raise TruncationError(
                f"a message of {nbytes} bytes arrived for a buffer of {target.nbytes} bytes",
                message_nbytes=nbytes,
                buffer_nbytes=target.nbytes,
                source=self._request.source,
            )
        if nbytes:  # an empty view cannot be cast
            target.cast("B")[:nbytes] = memoryview(self._buffer).cast("B")[:nbytes]
        return self._request.source, nbytes


def settle(waiter: asyncio.Future[None], error: BaseException | None) -> None:
    """Complete ``waiter``, unless it has been cancelled or settled already."""
    if waiter.done():
        return
    if error is None:
        waiter.set_result(None)
    else:
        waiter.set_exception(error)
