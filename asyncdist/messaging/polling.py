"""Runs passes, each of which tests every outstanding request of one rank once.

Training code runs passes at its safe points (:meth:`asyncdist.messaging.engine.Engine.safe_point`). A driver callback
on the loop runs them while coroutines wait. Its state decides when the next pass happens:

========  ============================  =======================================================================
state     next pass                     then
========  ============================  =======================================================================
STOPPED   none                          ``start``: HOT
HOT       next loop iteration           WARM after 100 passes in which nothing completed, 4 ms later during a
                                        transfer; if the transport rings: ASLEEP after one, or two if it may
                                        fail to ring
WARM      next loop iteration, after    IDLE after 20 passes, or when something else runs on the loop
          20 us of sleep
IDLE      after 1 ms                    HOT on a completion, a new wait, or a ring
ASLEEP    after 50 ms if the transport  HOT on a new wait, or a ring
          may fail to ring, else none
========  ============================  =======================================================================

In the warm state the driver sleeps in ``time.sleep``, because an asyncio timer below 1 ms takes 1.07 ms, and uvloop
turns it into a busy loop.

Nothing here awaits; the coroutines are in :mod:`asyncdist.messaging.engine`. The module is compiled if a C compiler is
available (see :mod:`asyncdist.compiled`), since each message rings, and each safe point makes a pass.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import enum
import os
import time
from collections.abc import Callable, Iterable
from typing import Final, TypeAlias

from asyncdist.errors import AsyncdistError, TruncationError
from asyncdist.transports.base import Buffer, Request, Transport
from asyncdist.waits import WaitId

HOT_PASS_COUNT: Final = 100
#: During a transfer the driver stays hot for about the time of 16 MiB, and yields the core to other processes. A sleep
#: of 20 us takes 50 to 100 us on common kernels, and as long again until the caches are warm.
TRANSFER_HOT_S: Final = 0.004
WARM_SLEEP_S: Final = 20e-6
WARM_PASS_COUNT: Final = 20
#: If threads of the transport move the bytes: seconds after the last step of a transfer during which training code
#: gives them the core and the GIL at its safe points. About the time of two chunks; an endless receive costs nothing.
TRANSFER_GIVES_S: Final = 0.01
IDLE_PERIOD_S: Final = 0.001
#: The period of passes if the transport rings: a ring may be missed (ucxx#30), and not all requests are messages.
SAFETY_PERIOD_S: Final = 0.05
#: Resolution of uvloop's clock and timers, in seconds.
CLOCK_TICK_S: Final = 0.001
#: Upper bound of the seconds between two ticks of the driver on an otherwise idle loop.
ALONE_GAP_S: Final = 20e-6


#: Returns the ranks of which each can currently end a wait.
Peers: TypeAlias = Callable[[], Iterable[int]]


class DriverState(enum.Enum):
    """The state of the driver; see the table in the module's docstring."""

    STOPPED = enum.auto()
    PASSING = enum.auto()  #: inside a tick, until it has set the next state
    HOT = enum.auto()
    WARM = enum.auto()
    IDLE = enum.auto()
    ASLEEP = enum.auto()


# Copies that are C variables in the compiled module.
_STOPPED: Final = DriverState.STOPPED
_PASSING: Final = DriverState.PASSING
_HOT: Final = DriverState.HOT
_WARM: Final = DriverState.WARM
_IDLE: Final = DriverState.IDLE
_ASLEEP: Final = DriverState.ASLEEP


class Pollable:
    """An object with receives of its own, which each pass polls; for example the receiver of one tag."""

    def poll(self) -> int:
        """Deliver arrived messages; return their number."""
        raise NotImplementedError


class PendingRequest:
    """Keeps a request until it has completed, with its completion callback.

    Attributes:
        request: Request of the transport.
        what: The identity of the wait for it.
        on_done: Called once with the error, or None.
        disowned: Whether the request is no longer tested.
    """

    __slots__ = ("disowned", "error", "on_done", "request", "what")

    def __init__(self, request: Request, what: WaitId, on_done: Callable[[AsyncdistError | None], None] | None) -> None:
        self.request = request
        self.what = what
        self.on_done = on_done
        self.disowned = False
        self.error: AsyncdistError | None = None

    def finish(self, error: AsyncdistError | None) -> None:
        """Call ``on_done``."""
        self.error = error
        if self.on_done is not None:
            self.on_done(error)


class AbandonedReceive:
    """Keeps the receive of a cancelled caller until it ends, and its message until another receive takes it."""

    __slots__ = ("_buffer", "_request", "error", "resolved", "waiters")

    def __init__(self, request: Request, buffer: Buffer) -> None:
        self._request = request
        self._buffer = buffer
        self.resolved = False
        self.error: AsyncdistError | None = None
        self.waiters: list[asyncio.Future[None]] = []

    def hand_over(self, buffer: Buffer) -> tuple[int, int]:
        """Copy the message into ``buffer``; return its source and its size in bytes."""
        if self.error is not None:
            raise self.error
        nbytes = self._request.nbytes
        target = memoryview(buffer)
        if nbytes > target.nbytes:
            raise TruncationError.of(nbytes, target.nbytes, self._request.source)
        if nbytes:  # an empty view cannot be cast
            target.cast("B")[:nbytes] = memoryview(self._buffer).cast("B")[:nbytes]
        return self._request.source, nbytes


class Poller:
    """Tests the outstanding requests of one rank, and wakes the tasks that wait for them.

    Attributes:
        failure: Error that every wait raises; or None.
    """

    def __init__(self, transport: Transport, loop: asyncio.AbstractEventLoop) -> None:
        self.transport = transport
        self.loop = loop
        self.failure: BaseException | None = None
        self._pollables: tuple[Pollable, ...] = ()
        self._operations: list[PendingRequest] = []
        self._in_test: list[PendingRequest] = []  # requests of the current pass
        self._has_disowned = False  # whether some of them were disowned
        # For each waiter: the identity of its wait, its beginning, and the ranks that can end it.
        self._waiters: dict[asyncio.Future[None], tuple[WaitId, float, Peers | None]] = {}
        self._conditions: dict[asyncio.Future[None], Callable[[], bool]] = {}
        self._in_pass = False
        self._pass_count = 0
        self._completion_count = 0
        self._request_count = 0  # completions that were not messages of a tag's receive
        self._transferred_at = 0.0
        # The driver.
        self._handle: asyncio.Handle | None = None
        self._take_tick = self._tick  # one bound method for all ticks
        self._quiet_tick_count = 0
        self._quiet_since = 0.0
        self._tick_ended_at = 0.0
        self._passed_since_tick = False
        self._state = _STOPPED
        self._context = contextvars.copy_context()
        self._wakes = transport.capabilities.wakes
        self._misses_wakes = transport.capabilities.misses_wakes
        self._has_threads = transport.capabilities.rings_from_threads
        transport.set_doorbell(self._ring_from_a_thread if self._has_threads else self.ring)

    # -- passes -----------------------------------------------------------------------------------------------------

    def poll(self) -> int:
        """Make one pass: test every request once, without blocking or yielding. Return the number of completions."""
        if self._in_pass:  # called from a completion callback of this pass
            return 0
        self._in_pass = True
        self._passed_since_tick = True  # a ring during this pass asks for another one
        try:
            completed = 0
            for pollable in self._pollables:
                completed += pollable.poll()
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
        self._in_test = operations
        pending = []
        position = completed = 0
        try:
            for operation in operations:
                position += 1
                if operation.disowned:
                    continue
                try:
                    if not operation.request.test():
                        pending.append(operation)
                        continue
                    error = None
                except AsyncdistError as caught:
                    error = caught
                except BaseException:  # an interrupt
                    pending.append(operation)
                    raise
                completed += 1
                operation.finish(error)
        finally:  # even after an exception: keep the incomplete requests
            left = pending + operations[position:]
            if self._has_disowned:
                left = [operation for operation in left if not operation.disowned]
            self._has_disowned = False
            self._in_test = []
            self._operations = left + self._operations
        if completed and self._has_threads:
            self._transferred_at = time.perf_counter()
        self._request_count += completed
        return completed

    def give_core(self) -> None:
        """Let the transport's threads run during a transfer, since a loop of safe points would starve them."""
        if self._has_threads and self._operations and time.perf_counter() - self._transferred_at < TRANSFER_GIVES_S:
            time.sleep(WARM_SLEEP_S)

    def watch(
        self, request: Request, what: WaitId, on_done: Callable[[AsyncdistError | None], None] | None = None
    ) -> None:
        """Keep ``request`` until it has completed, then call ``on_done`` with the error or None.

        The request is tested immediately, so ``on_done`` may be called before this returns.
        """
        error: AsyncdistError | None = None
        try:
            if not request.test():
                self._operations.append(PendingRequest(request, what, on_done))
                if self._has_threads:
                    self._transferred_at = time.perf_counter()
                self.wake()
                return
        except AsyncdistError as caught:
            error = caught
        if on_done is not None:
            on_done(error)

    @property
    def is_idle(self) -> bool:
        """Whether no request is outstanding; a message may still wait in a mailbox."""
        return not self._operations

    @property
    def spared_tick(self) -> asyncio.Handle | None:
        """The driver's scheduled callback, if a pass has been made elsewhere since it last ran; else None."""
        return self._handle if self._passed_since_tick else None

    # -- pollables ---------------------------------------------------------------------------------------------------

    def add_pollable(self, pollable: Pollable) -> None:
        """Poll ``pollable`` in every pass, and soon, since earlier messages for it have already rung."""
        self._pollables = (*self._pollables, pollable)
        self.ring()

    def remove_pollable(self, pollable: Pollable) -> None:
        """Stop polling ``pollable``."""
        self._pollables = tuple([other for other in self._pollables if other is not pollable])

    # -- waiting tasks ----------------------------------------------------------------------------------------------

    def recheck(self) -> None:
        """Evaluate all conditions, because something that they depend on has changed outside of a pass."""
        for waiter, condition in self._conditions.items():
            try:
                if condition():
                    resolve_waiter(waiter, None)
            except Exception as error:
                resolve_waiter(waiter, error)

    def fail(self, error: BaseException) -> None:
        """Make every wait raise ``error`` from now on. The engine keeps the requests."""
        self.failure = error
        for waiter in list(self._waiters):
            resolve_waiter(waiter, error)

    def abandon(self, error: BaseException) -> None:
        """Stop all passes, and make every wait raise ``error``, because this process is a forked copy of the rank's."""
        self.stop()
        self.failure = error
        self._in_pass = True  # as if a pass never ended

    # -- the driver -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the driver in the caller's context, so that callbacks of messages run in their rank's context."""
        self._context = contextvars.copy_context()
        if self._state is _STOPPED:
            self._state = _ASLEEP
        self.wake()

    def stop(self) -> None:
        """Stop the driver."""
        self._state = _STOPPED
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def ring(self) -> None:
        """Request a pass, because something has arrived, or may have arrived without a ring."""
        if not self._misses_wakes:  # otherwise the driver makes one more pass on its own
            self._passed_since_tick = False
            if self._state is _PASSING:
                self._state = _HOT
        self.wake()

    def _ring_from_a_thread(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing waits any more
            self.loop.call_soon_threadsafe(self._on_ring_of_thread, context=self._context)

    def _on_ring_of_thread(self) -> None:
        """Make a pass at once, unlike :meth:`ring`, because an iteration of the loop is a system call."""
        if self._state is not _ASLEEP and self._state is not _IDLE:
            self.ring()
            return
        if self._handle is not None:
            self._handle.cancel()
        self._quiet_tick_count = 0
        self._passed_since_tick = False
        self._tick()

    def wake(self) -> None:
        """Make the driver hot, because a task waits or something has arrived."""
        self._quiet_tick_count = 0
        if self._state is _ASLEEP or self._state is _IDLE:
            if self._handle is not None:
                self._handle.cancel()
            self._state = _HOT
            self._handle = self.loop.call_soon(self._take_tick, context=self._context)

    def _tick(self) -> None:
        """Run the driver once: make a pass, unless training code has just made one, and set the next state."""
        self._state = _PASSING
        began_at = 0.0 if self._wakes else time.perf_counter()
        alone = not self._wakes and began_at - self._tick_ended_at < ALONE_GAP_S
        if not self._passed_since_tick and self._poll_for_waiters():
            self._quiet_tick_count = 0
        else:
            self._quiet_tick_count += 1
            if self._quiet_tick_count == HOT_PASS_COUNT:
                self._quiet_since = began_at
        self._passed_since_tick = False
        if self._state is not _STOPPED:
            self._handle = self._next_tick(alone)
        if not self._wakes:
            self._tick_ended_at = time.perf_counter()

    def _poll_for_waiters(self) -> int:
        """Make a pass. If it fails, every wait raises its error, since no task awaits the driver."""
        try:
            return self.poll()
        except Exception as error:
            self.fail(error)
            return 0

    def _next_tick(self, alone: bool) -> asyncio.Handle | None:
        """Set the next state and schedule its pass; ``alone`` tells whether nothing else runs on the loop."""
        quiet = self._quiet_tick_count
        if self._wakes:
            if self._state is _HOT or (quiet <= 1 and self._misses_wakes):  # rung meanwhile
                self._state = _HOT
                return self.loop.call_soon(self._take_tick)
            self._state = _ASLEEP
            for operation in self._operations:
                if not getattr(operation.request, "rings", True):  # a device event, for which no transport rings
                    return self.loop.call_later(IDLE_PERIOD_S, self._take_tick)
            return self.loop.call_later(SAFETY_PERIOD_S, self._take_tick) if self._misses_wakes else None
        self._state = _HOT
        if quiet <= HOT_PASS_COUNT:
            return self.loop.call_soon(self._take_tick)
        if self._operations and time.perf_counter() - self._quiet_since < TRANSFER_HOT_S:
            self._quiet_tick_count = HOT_PASS_COUNT  # warm passes are counted from here
            if alone:
                os.sched_yield()
            return self.loop.call_soon(self._take_tick)
        if quiet <= HOT_PASS_COUNT + WARM_PASS_COUNT and alone:
            self._state = _WARM
            time.sleep(WARM_SLEEP_S)
            return self.loop.call_soon(self._take_tick)
        self._state = _IDLE
        return self.loop.call_later(IDLE_PERIOD_S, self._take_tick)


def clock_of(loop: asyncio.AbstractEventLoop) -> Callable[[], float]:
    """Return the loop's clock; for uvloop, whose clock has millisecond steps, the underlying clock."""
    return time.monotonic if type(loop).__module__ == "uvloop" else loop.time


def resolve_waiter(waiter: asyncio.Future[None], error: BaseException | None) -> None:
    """Settle ``waiter``, unless it is already cancelled or settled."""
    if waiter.done():
        return
    if error is None:
        waiter.set_result(None)
    else:
        waiter.set_exception(error)


class Alarm:
    """Settles a waiter once a deadline has passed.

    uvloop's timers and clock have millisecond steps, so a timer may fire half a millisecond early. A task that is woken
    then, and waits again, would do so some hundred times until the clock advances. An alarm fires only after the
    deadline.

    Args:
        deadline: Time on the loop's clock, in seconds.
        waiter: A future of the loop.
    """

    __slots__ = ("_deadline", "_loop", "_timer", "_waiter")

    def __init__(self, loop: asyncio.AbstractEventLoop, deadline: float, waiter: asyncio.Future[None]) -> None:
        self._loop = loop
        self._deadline = deadline
        self._waiter = waiter
        self._timer = loop.call_at(deadline, self._ring)

    def _ring(self) -> None:
        if self._loop.time() < self._deadline:
            self._timer = self._loop.call_later(CLOCK_TICK_S, self._ring)
        else:
            resolve_waiter(self._waiter, None)

    def cancel(self) -> None:
        """Cancel the alarm."""
        self._timer.cancel()
