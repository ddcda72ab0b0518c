"""Tests all outstanding requests of one rank in *passes*: in ``safe_point`` and, while tasks wait, in a loop callback.

The loop callback is called the driver. Its state determines when it makes the next pass:

========  ============================  =======================================================================
state     next pass                     then
========  ============================  =======================================================================
STOPPED   none                          ``start``: HOT
HOT       next loop iteration           WARM after 100 passes without a completion, and 4 ms more in a transfer.
                                        IDLE after 5 such passes if only small sends are outstanding. ASLEEP
                                        after 1 pass (2 if it may miss one) if the transport reports arrivals.
WARM      next loop iteration, after    IDLE after 20 passes, or when something else runs on the loop
          20 us of sleep
IDLE      after 1 ms                    HOT on a completion, a new wait, or a ring
ASLEEP    after 50 ms if a ring may be  HOT on a completion, a new wait, or a ring
          missed, else none
========  ============================  =======================================================================

A *ring* is a call of :meth:`Poller.ring` because a message has arrived. Some transports ring (``Capabilities.wakes``).
MPI cannot, but it has a doorbell (:mod:`asyncdist.transports.doorbell`), by which other ranks on the host ring in the
states IDLE and ASLEEP. The driver is then ASLEEP instead of IDLE if no request is outstanding and all ranks of the
world can ring. It skips WARM, and sometimes HOT. If a ring wakes the driver just after it has polled in vain and has
gone to sleep, its polling probably kept the sender from a busy core. It then sleeps immediately in the next waits.

In the state WARM, the driver calls ``time.sleep``, because an asyncio timer below 1 ms takes 1.07 ms, and uvloop turns
it into a busy loop.

The coroutines that wait are in :mod:`asyncdist.messaging.engine`. This module is compiled if a C compiler is available
(:mod:`asyncdist.compiled`), because it runs for every message.
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
from asyncdist.transports.doorbell import Doorbell
from asyncdist.transports.loop_work import LoopWork, find_work
from asyncdist.waits import WaitId

HOT_PASS_COUNT: Final = 100
#: Seconds without a completion before the driver starts sleeping between passes of a transfer. They are about the time
#: to send 16 MiB. A 20 us sleep takes 50 to 100 us on common kernels, and the caches take as long again to become warm.
TRANSFER_HOT_S: Final = 0.004
#: Number of passes without a completion after which the driver is IDLE if only sends of small messages are outstanding.
#: MPI accepts a small message at once unless the receiver has not looked for messages for a while.
SMALL_SEND_PASS_COUNT: Final = 5
#: Number of passes without a completion after which a waiting rank lets another process use its core once. When this
#: rank rings another rank, Linux may wake that rank on this core, and then runs it only once the core is free.
YIELD_PASS_COUNT: Final = 2
WARM_SLEEP_S: Final = 20e-6
WARM_PASS_COUNT: Final = 20
#: Seconds after the last progress of a transfer during which ``safe_point`` sleeps briefly to let the transport's
#: threads run. They are about the time to send two chunks. The limit keeps a receive that never completes from slowing
#: training.
TRANSFER_GIVES_S: Final = 0.01
IDLE_PERIOD_S: Final = 0.001
#: Seconds between polling passes if the transport may fail to notify this rank of a message (ucxx#30).
SAFETY_PERIOD_S: Final = 0.05
#: Number of polling passes after each ``SAFETY_PERIOD_S``. Open MPI checks only in some of its calls whether other
#: ranks have died.
SAFETY_PASS_COUNT: Final = 8
#: If a rank polls in vain, goes to sleep and is woken by a message within this number of seconds, its polling probably
#: prevented the sender from running.
SOON_S: Final = 0.0005
#: Minimum and maximum number of subsequent waits in which a rank then sleeps without polling first. The number doubles
#: each time its polling prevents a sender from running.
UNSPUN_COUNT_MIN: Final = 8
UNSPUN_COUNT_MAX: Final = 512
#: Resolution of uvloop's clock and timers, in seconds.
CLOCK_TICK_S: Final = 0.001
#: Maximum seconds between two calls of the driver on an otherwise idle loop.
ALONE_GAP_S: Final = 20e-6


#: Function that returns the ranks that may currently end a wait.
Peers: TypeAlias = Callable[[], Iterable[int]]


class DriverState(enum.Enum):
    """States of the loop callback that makes the polling passes. The state determines the time of its next pass."""

    STOPPED = enum.auto()
    PASSING = enum.auto()  #: the callback is running, and has not yet set its next state
    HOT = enum.auto()
    WARM = enum.auto()
    IDLE = enum.auto()
    ASLEEP = enum.auto()


# The compiled module keeps these copies of the states as C variables.
_STOPPED: Final = DriverState.STOPPED
_PASSING: Final = DriverState.PASSING
_HOT: Final = DriverState.HOT
_WARM: Final = DriverState.WARM
_IDLE: Final = DriverState.IDLE
_ASLEEP: Final = DriverState.ASLEEP


class Pollable:
    """Base class of objects that manage their own requests. Each polling pass of the engine polls them.

    They are the receiver of a tag's messages (``mailboxes.FrameReceiver``), the receives of streams (``streams.Pacer``)
    and the writer of tensors into other ranks' memory (``user_streams.Writer``).
    """

    def poll(self) -> int:
        """Deliver the messages that have arrived, and return their number."""
        raise NotImplementedError


class PendingRequest:
    """A request that has not completed, and its callback.

    If it is ``disowned``, it cannot complete and is not tested.
    """

    __slots__ = ("disowned", "error", "on_done", "request", "what")

    def __init__(self, request: Request, what: WaitId, on_done: Callable[[AsyncdistError | None], None] | None) -> None:
        self.request = request
        self.what = what
        self.on_done = on_done
        self.disowned = False
        self.error: AsyncdistError | None = None

    def finish(self, error: AsyncdistError | None) -> None:
        """Store the error, and call ``on_done`` with the error."""
        self.error = error
        if self.on_done is not None:
            self.on_done(error)


class AbandonedReceive:
    """Stores the receive of a cancelled caller until it ends, and then its message until a later receive returns it."""

    __slots__ = ("_buffer", "_request", "error", "resolved", "waiters")

    def __init__(self, request: Request, buffer: Buffer) -> None:
        self._request = request
        self._buffer = buffer
        self.resolved = False
        self.error: AsyncdistError | None = None
        self.waiters: list[asyncio.Future[None]] = []

    def copy_into(self, buffer: Buffer) -> tuple[int, int]:
        """Copy the message into ``buffer``. Return the message's source and its size in bytes."""
        if self.error is not None:
            raise self.error
        nbytes = self._request.nbytes
        target = memoryview(buffer)
        if nbytes > target.nbytes:
            raise TruncationError.of(nbytes, target.nbytes, self._request.source)
        if nbytes:  # An empty view cannot be cast.
            target.cast("B")[:nbytes] = memoryview(self._buffer).cast("B")[:nbytes]
        return self._request.source, nbytes


class Poller:
    """Tests the outstanding requests of one rank, and wakes the tasks that are waiting for them.

    Attributes:
        loop_work: Detector of work on the loop. None before the start, and for unknown kinds of loops, such as a
            simulated rank's.
    """

    def __init__(self, transport: Transport, loop: asyncio.AbstractEventLoop) -> None:
        self.transport = transport
        self.loop = loop
        self.failure: BaseException | None = None
        self.loop_work: LoopWork | None = None
        self._pollables: tuple[Pollable, ...] = ()
        self._operations: list[PendingRequest] = []
        self._in_test: list[PendingRequest] = []  # requests of the current polling pass
        self._has_disowned = False  # whether the current polling pass has disowned any request
        # The future of each waiting task, with the wait's identity, its begin time, and the ranks that may end it.
        self._waiters: dict[asyncio.Future[None], tuple[WaitId, float, Peers | None]] = {}
        self._conditions: dict[asyncio.Future[None], Callable[[], bool]] = {}
        self._in_pass = False
        self._unused_result = -1  # result of a pass that the next safe_point need not repeat, or -1
        self._must_yield = False  # whether try_safe_point has found work on the loop
        self._pass_count = 0
        self._completion_count = 0
        self._request_count = 0  # number of completions other than messages delivered to channels
        self._transferred_at = 0.0
        # State of the driver, which makes the polling passes while tasks are waiting:
        self._handle: asyncio.Handle | None = None
        self._take_tick = self._tick  # stored, because self._tick would create a bound method for each tick
        self._quiet_tick_count = 0
        self._quiet_since = 0.0
        self._tick_ended_at = 0.0
        self._passed_since_tick = False
        self._state = _STOPPED
        self._context = contextvars.copy_context()
        self._wakes = transport.capabilities.wakes
        self._misses_wakes = transport.capabilities.misses_wakes
        self._has_threads = transport.capabilities.rings_from_threads
        transport.set_arrival_callback(self._ring_from_a_thread if self._has_threads else self.ring)
        self._bell: Doorbell | None = None if self._wakes else transport.doorbell
        self._has_spun = False  # whether the driver had polled in vain before it last went to sleep
        self._slept_at = 0.0
        self._unspun_count = 0  # number of subsequent waits that begin without polling
        self._unspun_count_max = UNSPUN_COUNT_MIN

    # -- passes -----------------------------------------------------------------------------------------------------

    def poll(self) -> int:
        """Make one polling pass: test every request once, without waiting. Return the number of completions."""
        if self._in_pass:  # A completion callback of this polling pass has called this method.
            return 0
        self._in_pass = True
        self._passed_since_tick = True  # A message that arrives during this pass requests another pass.
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

    def try_safe_point(self) -> bool:
        """Make the first polling pass of ``Engine.safe_point``. Return True if the caller need not await that method.

        If False, the caller must await ``safe_point``, which uses the result of this pass.
        """
        if self.loop_work is None or self.failure is not None or (self._has_threads and self._operations):
            return False
        completed = self.poll()
        if not completed and self.failure is None:
            if self.is_loop_idle():
                return True
            self._must_yield = True  # The loop reports its work only once.
        self._unused_result = completed
        return False

    def first_pass(self) -> int:
        """Make the first polling pass of ``safe_point``, unless :meth:`try_safe_point` has made it.

        Return its number of completions.
        """
        completed, self._unused_result = self._unused_result, -1
        return self.poll() if completed < 0 else completed

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
                except BaseException:  # KeyboardInterrupt, for example, is raised by a signal handler.
                    pending.append(operation)
                    raise
                completed += 1
                operation.finish(error)
        finally:  # Incomplete requests stay outstanding, even after an exception.
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

    def yield_core(self) -> None:
        """Sleep briefly during a transfer, so that frequent calls of ``safe_point`` let the transport's threads run."""
        if self._has_threads and self._operations and time.perf_counter() - self._transferred_at < TRANSFER_GIVES_S:
            time.sleep(WARM_SLEEP_S)

    def watch(
        self, request: Request, what: WaitId, on_done: Callable[[AsyncdistError | None], None] | None = None
    ) -> None:
        """Store ``request`` until it has completed, and then call ``on_done`` with its error or None.

        The request is tested immediately, so ``on_done`` may be called before this method returns.
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
        """Whether no request is outstanding. Mailboxes may still contain messages."""
        return not self._operations

    def is_loop_idle(self) -> bool:
        """Return whether the loop has nothing to run, so that the calling task need not yield.

        The driver's callback is not counted if ``safe_point`` has made a polling pass since the driver last ran.
        """
        if self._must_yield:
            self._must_yield = False
            return False
        work = self.loop_work
        return work is not None and not work.has_work(self._handle if self._passed_since_tick else None)

    # -- pollables ---------------------------------------------------------------------------------------------------

    def add_pollable(self, pollable: Pollable, *, is_first: bool = False) -> None:
        """Poll ``pollable`` in every polling pass, and request a pass for messages that have already arrived.

        Args:
            is_first: Whether to poll ``pollable`` before all others. True for pollables that copy parts of streams, so
                that messages that arrive during the copy are delivered in the same pass.
        """
        self._pollables = (pollable, *self._pollables) if is_first else (*self._pollables, pollable)
        self.ring()

    def remove_pollable(self, pollable: Pollable) -> None:
        """Remove ``pollable`` from the objects that each polling pass polls."""
        self._pollables = tuple([other for other in self._pollables if other is not pollable])

    # -- waiting tasks ----------------------------------------------------------------------------------------------

    def recheck(self) -> None:
        """Evaluate the conditions of all waiting tasks after a change outside a polling pass."""
        for waiter, condition in self._conditions.items():
            try:
                if condition():
                    resolve_waiter(waiter, None)
            except Exception as error:
                resolve_waiter(waiter, error)

    def fail(self, error: BaseException) -> None:
        """Make every wait raise ``error``, now and later. Outstanding requests remain stored."""
        self.failure = error
        for waiter in list(self._waiters):
            resolve_waiter(waiter, error)

    def abandon(self, error: BaseException) -> None:
        """Stop all polling passes and make every wait raise ``error``. Called in a fork of the rank's process."""
        self._bell = None  # The parent's event loop still watches the bell's descriptor.
        self.stop()
        self.failure = error
        self._in_pass = True  # Makes every further polling pass return immediately.

    # -- the driver -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the driver. Message callbacks run in a copy of the caller's context, which identifies the rank."""
        self._context = contextvars.copy_context()
        if self.loop_work is None:
            self.loop_work = find_work(self.loop)
        if self._state is _STOPPED:
            self._state = _ASLEEP
        if self._bell is not None:
            self._watch_bell(self._bell)
        self.wake()

    def stop(self) -> None:
        """Stop making polling passes, and cancel the scheduled one."""
        self._state = _STOPPED
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        if self._bell is not None:
            self.loop.remove_reader(self._bell.fileno())
            self._bell.end()
            self._bell.close()
            self._bell = None

    def _watch_bell(self, bell: Doorbell) -> None:
        """Make a polling pass whenever another rank writes to this rank's doorbell, a file descriptor.

        The pass runs in the caller's context.
        """
        try:
            self.loop.add_reader(bell.fileno(), self._on_bell)
            if self.loop_work is not None:
                # A ring does not count as work on the loop, because safe_point makes the polling pass itself.
                self.loop_work.spare(bell.fileno())
        except NotImplementedError:  # The loop is neither asyncio's nor uvloop's.
            bell.withdraw()
            self._bell = None

    def _on_bell(self) -> None:
        if self._bell is None:
            return
        self._bell.clear()
        if self._has_spun and time.perf_counter() - self._slept_at < SOON_S:
            self._unspun_count = self._unspun_count_max
            self._unspun_count_max = min(2 * self._unspun_count_max, UNSPUN_COUNT_MAX)
        self._has_spun = False
        self._poll_on_ring()

    def ring(self) -> None:
        """Request a polling pass, because a message may have arrived."""
        if not self._misses_wakes:  # A transport that may fail to notify makes one more pass anyway.
            self._passed_since_tick = False
            if self._state is _PASSING:
                self._state = _HOT
        self.wake()

    def _ring_from_a_thread(self) -> None:
        with contextlib.suppress(RuntimeError):  # Raised if the loop is closed. Then no task is waiting.
            self.loop.call_soon_threadsafe(self._poll_on_ring, context=self._context)

    def _poll_on_ring(self) -> None:
        """Make a polling pass now. :meth:`ring` would make it in the next loop iteration, which takes a system call."""
        if self._state is not _ASLEEP and self._state is not _IDLE:
            self.ring()
            return
        if self._handle is not None:
            self._handle.cancel()
        self._quiet_tick_count = 0
        self._passed_since_tick = False
        self._tick()

    def wake(self) -> None:
        """Make polling passes at the highest rate, because a task is waiting or a message has arrived."""
        self._quiet_tick_count = 0
        if self._state is _ASLEEP or self._state is _IDLE:
            if self._handle is not None:
                self._handle.cancel()
            if self._bell is not None:
                self._bell.disarm()
            self._state = _HOT
            self._handle = self.loop.call_soon(self._take_tick, context=self._context)

    def _tick(self) -> None:
        """Run the driver once: make a polling pass, unless ``safe_point`` has just made one, and set the next state."""
        pass_count = SAFETY_PASS_COUNT if self._state is _ASLEEP and self._bell is not None else 1
        self._state = _PASSING
        began_at = 0.0 if self._wakes else time.perf_counter()
        alone = not self._wakes and began_at - self._tick_ended_at < ALONE_GAP_S
        if not self._passed_since_tick and self._poll_for_waiters(pass_count):
            if self._bell is not None:
                self._bell.disarm()
                if self._quiet_tick_count and self._unspun_count_max > UNSPUN_COUNT_MIN:
                    self._unspun_count_max -= 1  # Polling was useful, so skip it in fewer later waits.
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

    def _poll_for_waiters(self, pass_count: int = 1) -> int:
        """Make up to ``pass_count`` polling passes, until one completes something.

        Raise a pass's error in every wait, because no task awaits the driver, which would lose the error.
        """
        try:
            completed = 0
            while pass_count and not completed:
                completed = self.poll()
                pass_count -= 1
            return completed
        except Exception as error:
            self.fail(error)
            return 0
        except BaseException:  # SystemExit, for example, is raised by a signal handler.
            if self._state is not _STOPPED:
                self._state, self._handle = _HOT, self.loop.call_soon(self._take_tick)
            raise

    def _next_tick(self, alone: bool) -> asyncio.Handle | None:
        """Set the next state and schedule the next polling pass. ``alone`` says that nothing else runs on the loop."""
        quiet = self._quiet_tick_count
        if self._wakes:
            # HOT means that a message arrived during the polling pass.
            if self._state is _HOT or (quiet <= 1 and self._misses_wakes):
                self._state = _HOT
                return self.loop.call_soon(self._take_tick)
            self._state = _ASLEEP
            for operation in self._operations:
                if not getattr(operation.request, "rings", True):  # A device event, for example, does not notify.
                    return self.loop.call_later(IDLE_PERIOD_S, self._take_tick)
            return self.loop.call_later(SAFETY_PERIOD_S, self._take_tick) if self._misses_wakes else None
        self._state = _HOT
        # ``quiet`` is 1 after a pass in which a pollable requested another pass, because it has more to copy.
        if self._unspun_count and quiet > 1 and not self._operations:
            self._unspun_count -= 1
            return self._sleep()
        if quiet > SMALL_SEND_PASS_COUNT and self._operations and self._has_only_small_sends():
            return self._sleep()
        if quiet <= HOT_PASS_COUNT:
            if quiet == YIELD_PASS_COUNT and self._bell is not None:
                os.sched_yield()
            return self.loop.call_soon(self._take_tick)
        if self._operations and time.perf_counter() - self._quiet_since < TRANSFER_HOT_S:
            self._quiet_tick_count = HOT_PASS_COUNT  # Count warm passes from the end of the transfer.
            if alone:
                os.sched_yield()
            return self.loop.call_soon(self._take_tick)
        if quiet <= HOT_PASS_COUNT + WARM_PASS_COUNT and alone and not self._is_rung_by_all():
            self._state = _WARM
            time.sleep(WARM_SLEEP_S)
            return self.loop.call_soon(self._take_tick)
        return self._sleep()

    def _has_only_small_sends(self) -> bool:
        found = True
        for operation in self._operations:
            found = found and getattr(operation.request, "is_small_send", False)  # other requests lack the attribute
        return found

    def _sleep(self) -> asyncio.Handle | None:
        """Enter the state IDLE or ASLEEP, unless a last polling pass completes something."""
        bell = self._bell
        if bell is not None and bell.arm():
            self._has_spun = self._quiet_tick_count > HOT_PASS_COUNT
            self._slept_at = time.perf_counter()
            if self._poll_for_waiters():
                self._quiet_tick_count = 0
                bell.disarm()
                return self.loop.call_soon(self._take_tick)
        if self._state is _STOPPED:
            return None
        self._passed_since_tick = False  # Poll at the next tick, although arming the bell has made a pass.
        if not self._operations and self._is_rung_by_all() and not self.transport.is_sending():
            self._state = _ASLEEP
            return self.loop.call_later(SAFETY_PERIOD_S, self._take_tick)
        self._state = _IDLE
        return self.loop.call_later(IDLE_PERIOD_S, self._take_tick)

    def _is_rung_by_all(self) -> bool:
        """Return whether every other rank wakes this rank when it sends a message."""
        return self._bell is not None and self._bell.is_rung_by_all()


def clock_of(loop: asyncio.AbstractEventLoop) -> Callable[[], float]:
    """Return the loop's clock, or ``time.monotonic`` for uvloop, whose clock advances in steps of a millisecond."""
    return time.monotonic if type(loop).__module__ == "uvloop" else loop.time


def resolve_waiter(waiter: asyncio.Future[None], error: BaseException | None) -> None:
    """Complete the future ``waiter`` with None or with the exception ``error``, unless it is already done."""
    if waiter.done():
        return
    if error is None:
        waiter.set_result(None)
    else:
        waiter.set_exception(error)


class Alarm:
    """Timer that completes a future at a deadline on the loop's clock, in seconds, and never earlier.

    uvloop's timers may fire half a millisecond early, because its clock advances in steps of a millisecond. A task that
    is woken early would wait again, some hundred times, until the clock advances.
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
        """Cancel the timer."""
        self._timer.cancel()
