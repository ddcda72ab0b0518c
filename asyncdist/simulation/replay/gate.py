"""Delivers the recorded inputs (messages, timers and losses) to a replayed rank, in the recorded order."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator
from typing import Any, Final

from asyncdist.messaging.engine import yield_to_loop
from asyncdist.messaging.polling import resolve_waiter
from asyncdist.recording.events import Field
from asyncdist.runtime.recording import ObservedEngine, set_sleeps_by
from asyncdist.simulation.processes.event_loop import RankLoop
from asyncdist.simulation.replay.admission import Admission
from asyncdist.simulation.replay.comparison import Comparison, DivergenceError, describe_missing
from asyncdist.simulation.replay.input_checks import PATIENCE_S, PAUSE_MAX_S, PAUSE_S, InputChecks, Pause
from asyncdist.simulation.replay.log import (
    CollectiveEnd,
    DeadlineExpired,
    Key,
    RankLog,
    RankLost,
    ReceivedByTask,
    ReceivedMessages,
    RecordedInput,
    TimerFired,
)
from asyncdist.simulation.replay.pending_inputs import Mailbox, PendingInputs
from asyncdist.waits import WaitId, WaitKind

#: Maximum virtual seconds to hold back a message until the rank reaches the safe point that followed it in the record.
_DEFERRAL_S: Final = 1.0
#: Maximum virtual seconds for which a message is deferred until work in a thread ends. The work may sleep in virtual
#: time.
_WORK_S: Final = 100.0
#: Maximum number of times that other tasks are run in order to reach the point at which an input was recorded.
_TRY_COUNT: Final = 20


class Gate:
    """Delays the messages, timers and losses of a replayed rank until the points at which they were recorded.

    Args:
        found: List to which differences from the record are appended.
        is_cut_off: Function that returns whether a rank has stopped at the end of its own record, or of the record of a
            rank that it needs. If the second argument is true, a rank that is waiting at the end of its record counts
            as stopped.

    Attributes:
        has_stopped: Whether the rank has reached the end of its record or of its ``main``.
        waiters: Future for which each task is waiting, keyed by task.
        counted: Tasks whose waits are counted in the record.
        woken_late: Tasks that are waiting for a message in the replay, but did not wait for it in the recorded run.
        user: Task that reached the last safe point.
        main: The task ``user``, or None while it is waiting for something other than a safe point.
    """

    def __init__(
        self,
        rank: int,
        log: RankLog,
        mailbox: Mailbox,
        loop: RankLoop,
        found: list[DivergenceError],
        is_cut_off: Callable[[int, bool], bool],
    ) -> None:
        self.rank = rank
        self.log = log
        self.waiters: dict[asyncio.Task[Any] | None, asyncio.Future[None]] = {}
        self.counted: set[asyncio.Task[Any] | None] = set()
        self.woken_late: set[asyncio.Task[Any] | None] = set()
        self.user: asyncio.Task[Any] | None = None
        self.main: asyncio.Task[Any] | None = None
        self.comparison = Comparison(rank, log, found)
        self.has_stopped = self._is_at_end_of_record = False
        self._is_cut_off = is_cut_off
        self._mailbox = mailbox
        self._loop = loop
        self.inputs = PendingInputs(log, mailbox, loop)
        self.inputs.catch_up = self._catch_up
        self.pause = Pause(self.inputs, lambda: not self._is_main_running())
        self.admission = Admission(
            self.inputs, self.pause.begin_if_late, lambda: self.input_checks.look_soon(), self.deliver_losses
        )
        self.input_checks = InputChecks(self.inputs, self.admission, self._deliver)
        self._deferred: RecordedInput | None = None
        self._deferred_until_s = 0.0
        self._ring: Callable[[], None] = lambda: None
        self._engine: ObservedEngine
        mailbox.ring = self._on_arrival

    def open(self, engine: ObservedEngine) -> None:
        """Start delivering the recorded inputs, just before the user's ``main`` starts."""
        self._engine = engine
        self.inputs.open(engine)
        self.admission.open()
        self.pause.context = contextvars.copy_context()
        self.input_checks.look_soon()
        if self.log.tells_sleeps:
            set_sleeps_by(self._loop, self._set_sleep)

    @property
    def has_stopped_at_cut(self) -> bool:
        """Whether the rank has stopped at the end of its own record, or of the record of a rank that it needs."""
        return self._is_at_end_of_record or (self.has_stopped and not self.log.is_over)

    @property
    def is_at_cut(self) -> bool:
        """Whether the rank has stopped at the end of a record, or may wait forever because its own record has ended."""
        return self.has_stopped_at_cut or (self.inputs.is_done and not self.log.is_over)

    def awaited_ranks(self) -> set[int]:
        """Return the ranks that must send a message before this rank continues, including peers in MPI collectives."""
        pending = self.inputs.next()
        missing = self.inputs.missing_sources(pending)
        if not self.inputs.is_open or (pending is not None and missing and self.inputs.is_due(pending)):
            return missing
        unrecorded = [
            peer
            for waiter in self.waiters.values()
            if (what := self._engine.awaited(waiter)) is not None and self.log.is_without_messages(what.tag)
            for peer in self._engine.awaited_peers(waiter)
        ]
        return missing.union(unrecorded)

    def missing(self) -> tuple[float, str]:
        """Return the recorded time, on the rank's clock, and a description of the input that the rank needs next."""
        entry = self.inputs.next_entry()
        time_s = math.inf if entry is None else entry.time_s
        return time_s, f"rank {self.rank}, {self.comparison.where()}: {describe_missing(self.inputs.next())}"

    def set_arrival_callback(self, ring: Callable[[], None]) -> None:
        """Set the function to call when a message may have arrived for the rank."""
        self._ring = ring

    def _on_arrival(self, tag: int) -> None:
        self.input_checks.look_soon()
        if not self.inputs.is_open or self.inputs.is_done or self.log.is_without_messages(tag):
            self._ring()

    def deliver_losses(self) -> None:
        """Deliver the losses that preceded the current operation, such as a failed send, in the recorded run."""
        while (
            isinstance(pending := self.inputs.next(), RankLost) and self.inputs.is_open and self.inputs.is_due(pending)
        ):
            self._deliver(pending)

    def wake_by(self, what: WaitId, wake: Callable[[], object]) -> None:
        """Call ``wake`` at the point at which the task woke in the recorded run, or at once if none is recorded."""
        if self.inputs.remains_in_record(what):
            self._set_sleep(what, self._loop.time(), wake, (), None)
        else:
            wake()

    def _set_sleep(
        self,
        what: WaitId,
        when_s: float,
        callback: Callable[..., object],
        args: tuple[object, ...],
        context: contextvars.Context | None,
    ) -> Any:
        """Set a timer that fires at the recorded point: an asyncio timer, or the end of work in a thread."""

        def fire() -> None:
            self._loop.call_soon(self._engine._note_wait_ended, True)
            callback(*args)

        self.input_checks.look_soon()
        return self.inputs.timers.call_at(when_s, what, fire, context)

    def note_sent(self, tag: int) -> None:
        """Count a sent message, and deliver the recorded inputs that are due after it."""
        self.inputs.note_sent(tag)
        self.pause.begin_if_late()
        self.input_checks.look_soon()

    def _deliver(self, pending: RecordedInput) -> None:
        """Deliver a recorded input to the rank, and wake the tasks that are waiting for it."""
        self.inputs.remove(pending)
        match pending:
            case ReceivedMessages(keys=keys):
                self.admission.permit(keys)
                self._end_streams(pending)
                if self.inputs.wakes_one_before_point(pending):
                    self._wake_user(keys)
                late_for = pending.late_for if isinstance(pending, ReceivedByTask) else None
                if late_for is None:
                    self._engine.poll()
                else:
                    self._loop.do_first(functools.partial(self._deliver_late, late_for))
            case RankLost(rank=rank):
                self._mailbox.lose(rank)
                self._engine.poll()  # fails the receives from the lost rank
            case TimerFired(what=what):
                self.inputs.timers.fire(what)
                self._engine.recheck()
            case DeadlineExpired(what=what) | CollectiveEnd(what=what):
                self.inputs.deadlines.fire(what)

    def _deliver_late(self, task: asyncio.Task[Any]) -> bool:
        """Deliver a message for which ``task`` did not wait in the recorded run. Return whether ``task`` resumes."""
        self._engine.poll()
        if task in self.woken_late or (waiter := self.waiters.get(task)) is None or not waiter.done():
            return False
        self.woken_late.add(task)
        self._engine.begun_count -= task in self.counted
        return True

    def _end_streams(self, taken: ReceivedMessages) -> None:
        """End the streams whose last part was sent in this polling pass, so that tasks resume in the recorded order."""
        for pending in list(itertools.takewhile(taken.is_same_point, self.inputs.upcoming())):
            if (
                not isinstance(pending, TimerFired)
                or not is_end_of_stream(pending.what)
                or not self.inputs.timers.has(pending.what)
            ):
                return
            self.inputs.remove(pending)
            self.inputs.timers.fire(pending.what)

    def _wake_user(self, keys: Collection[Key]) -> None:
        """If the user's task is waiting for one of these messages, wake it first, as a timeout did when recorded."""
        if (waiter := self.waiters.get(self.user)) is None:
            return
        what, peers = self._engine.awaited(waiter), frozenset(self._engine.awaited_peers(waiter))
        if what is not None and any(tag == what.tag and source in peers for source, tag in keys):
            resolve_waiter(waiter, None)

    def _catch_up(self, seen_count: int = 0) -> None:
        """Deliver all due inputs that can be delivered. Do not defer the first ``seen_count`` inputs of the record."""
        while (pending := self.inputs.next()) is not None and self.inputs.is_due(pending):
            if self.admission.has_permitted and self._engine.poll() == 0 and self.admission.has_permitted:
                return
            if not self.inputs.is_possible(pending) or (
                _is_reserved_for_task(pending) and not self._is_waited_for(pending)
            ):
                return
            if self.inputs.seen_count >= seen_count and self._is_deferred(pending):
                if (late := self.inputs.first_late()) is None or not self.inputs.is_possible(late):
                    return
                pending = late  # a task is already waiting for this message
            left = self.inputs.collective_end_after(pending)
            if left is not None and self.inputs.is_due(left[0]):
                self._deliver(left[0])
                # The collective's wait has ended before this input is delivered, so one more wait precedes the input.
                pending.woken_count += 1
                continue
            self._deliver(pending)

    def _is_waited_for(self, pending: RecordedInput) -> bool:
        assert isinstance(pending, ReceivedByTask), f"{pending} was not taken by a task"
        requests: Iterator[Any] = (operation.request for operation in self._engine._operations)
        return any(request.is_for(pending.keys[0]) for request in requests if hasattr(request, "is_for"))

    def _is_deferred(self, pending: RecordedInput) -> bool:
        """Return whether an input must not wake its task before another task has continued.

        In the recorded run, the other task was ready when a polling pass received the message. The other task then
        reached a safe point first, or continued after a collective, a sleep or work in a thread. The deferral is
        limited in time, in case user code waits for the input.
        """
        left = self.inputs.collective_end_after(pending)
        is_late = self.inputs.has_late_timer_after(pending)
        if not is_late and not self.inputs.is_received_at_point(pending) and (left is None or left[1]):
            return False
        now_s = self._loop.time()
        if pending is not self._deferred:
            self._deferred, self._deferred_until_s = pending, now_s + (_WORK_S if is_late else _DEFERRAL_S)
        if now_s >= self._deferred_until_s:
            return False
        self.input_checks.look_soon(self._deferred_until_s - now_s + PAUSE_S)
        return True

    def on_wait_begun(self) -> None:
        """Deliver the next recorded input if it has become due because a wait has begun."""
        self.pause.begin_if_late()
        self.input_checks.look_soon()

    async def before_wait_ends(self) -> None:
        """Deliver all inputs that were recorded before the current wait ended, unless they ended a wait themselves."""
        if asyncio.current_task(self._loop) in self.woken_late:  # the task did not wait in the recorded run
            return
        for _ in range(_TRY_COUNT):
            self._catch_up()
            pending = self.inputs.next()
            if pending is None or pending.woken_count > self._engine.woken_count or isinstance(pending, ReceivedByTask):
                return
            if not self.inputs.is_due(pending):
                await yield_to_loop()
            elif self.inputs.is_possible(pending) or not await self._until_possible(pending):
                return  # the input is deferred or never arrives

    async def deliver_before_wait(self, is_ready: Callable[[], bool]) -> None:
        """Deliver all messages and timers recorded before the rank's next wait, unless ``is_ready`` returns True."""
        for _ in range(_TRY_COUNT):
            pending = self.inputs.next()
            if is_ready() or pending is None or not self.inputs.is_before_next_begin(pending):
                return
            if not self.inputs.is_due(pending):
                await yield_to_loop()
                continue
            if not self.inputs.is_possible(pending) and not await self._until_possible(pending):
                return
            if (
                self.admission.has_permitted
                or self._is_deferred(pending)
                or self.inputs.collective_end_after(pending) is not None
            ):
                return
            if pending is self.inputs.next():
                self._deliver(pending)

    def on_wait_ended(self, counts: bool) -> None:
        """Deliver the inputs that were recorded before the current task continued."""
        if self.inputs.is_done and not self.admission.has_permitted:
            return
        self._catch_up()
        task = asyncio.current_task(self._loop)
        if task in self.woken_late:
            self.woken_late.remove(task)
            self._engine.woken_count -= counts
        self.pause.begin_if_late(counts)
        self.input_checks.look_soon()  # the next recorded input may now be due

    def _is_main_running(self) -> bool:
        return self.main is not None and asyncio.current_task(self._loop) is self.main

    async def pass_safe_point(self) -> None:
        """Poll and yield as often as in the recorded safe point."""
        self.main = self.user = asyncio.current_task()
        if self._engine.virtual_clock is not None:
            await self._engine.virtual_clock.before_safe_point()
        while self.pause.is_on:
            await yield_to_loop()
        await self._deliver_before_safe_point()
        if self.inputs.next_entry() is None and not self.log.is_over:
            await self._stop()
        turn_count = self.inputs.begin_point()
        self.woken_late.clear()
        try:
            for turn in range(0, max(turn_count, 2), 2):
                await self._deliver_turn(turn)
                self._engine.poll()
                self.inputs.set_turn(turn + 1)
                await self._wait_for_next()
                self._loop.call_soon(self._on_turn)  # the woken tasks must continue after the current task
                await yield_to_loop()
                await self._deliver_turn(turn + 1)
        finally:
            self.inputs.end_point()
            self.input_checks.look_soon()
        await self._wait_for_next()

    def _on_turn(self) -> None:
        if self.inputs.is_in_point and not self.pause.is_on:
            self._catch_up()

    async def _deliver_before_safe_point(self) -> None:
        """Deliver the remaining inputs that were recorded before this safe point."""
        while (pending := self.inputs.next()) is not None or self.admission.has_permitted:
            if pending is not None and self.inputs.is_due(pending) and not _is_reserved_for_task(pending):
                await self._deliver_when_possible(pending)
            elif not await self._until_changed(pending):
                if pending is None:
                    break
                await self._deliver_when_possible(pending)
        for _ in range(_TRY_COUNT):
            if self.inputs.is_point_due():
                return
            await yield_to_loop()

    async def _until_changed(self, pending: RecordedInput | None) -> bool:
        """Run other tasks until ``pending`` can be delivered or is no longer next. Return False if neither happens."""
        for try_count in range(_TRY_COUNT):
            self._engine.poll()
            self._engine.recheck()
            if try_count:
                await self._loop.be_busy(PAUSE_S * 2.0**try_count)
            await yield_to_loop()
            if self.inputs.next() is not pending or (pending is None and not self.admission.has_permitted):
                return True
            if pending is None or _is_reserved_for_task(pending):
                continue
            if self.inputs.is_due(pending) and self.inputs.is_possible(pending):
                return True
        return False

    async def _deliver_turn(self, turn: int) -> None:
        """Deliver the inputs recorded up to the given turn (polling pass or yield) of this safe point."""
        self.inputs.set_turn(turn)
        while (pending := self.inputs.next()) is not None:
            is_due = self.inputs.is_due(pending) and not _is_reserved_for_task(pending)
            if is_due or not turn % 2 or not await self._until_changed(pending):
                await self._deliver_when_possible(pending)

    async def _wait_for_next(self) -> None:
        """Pause the rank until the next recorded input can be delivered, if this input is due."""
        while (pending := self.inputs.next()) is not None and self.inputs.must_have_arrived(pending):
            await self._until_possible(pending)
            if not isinstance(pending, DeadlineExpired):
                return
            self._deliver(pending)  # the input was recorded by the task that continues in this turn
            self._engine.recheck()

    async def _deliver_when_possible(self, pending: RecordedInput) -> None:
        """Pause the rank until a recorded input can be delivered, and deliver it."""
        while not await self._until_possible(pending):
            is_late = self.inputs.progressed_at_s < self._loop.time() - _TRY_COUNT * PATIENCE_S
            if any(self._is_cut_off(rank, is_late) for rank in self.inputs.missing_sources(pending)):
                await self._stop()
            if is_late:
                raise self.comparison.divergence(describe_missing(pending))
        if pending is self.inputs.next():
            self._deliver(pending)

    async def _until_possible(self, pending: RecordedInput) -> bool:
        pause_s, waited_s = PAUSE_S, 0.0
        while pending is self.inputs.next() and not self.inputs.is_possible(pending):
            if waited_s > PATIENCE_S:
                return False
            await self._loop.be_busy(pause_s)
            waited_s += pause_s
            pause_s = min(1.5 * pause_s, PAUSE_MAX_S)
        return True

    async def _stop(self) -> None:
        self.has_stopped = self._is_at_end_of_record = True
        await self._loop.create_future()

    async def deliver_without_wait(self, waiter: asyncio.Future[None]) -> None:
        """Deliver the messages for which user code did not wait in the recorded run, before it begins to wait."""
        while not waiter.done() and (pending := self.inputs.next()) is not None:
            is_there = self.inputs.is_received_at_point(pending) and self.inputs.is_due(pending)
            if not is_there or not await self._until_possible(pending):
                return
            if pending is self.inputs.next():
                self._deliver(pending)

    async def deliver_before_clock_reading(self) -> None:
        """Deliver the inputs recorded before the next clock reading, which the current task is about to make."""
        seen_count = self.inputs.seen_before_reading()
        while self.inputs.seen_count < seen_count and (pending := self.inputs.next()) and self.inputs.is_due(pending):
            await self._deliver_when_possible(pending)

    def on_event(self, time_s: float, kind: str, fields: tuple[Field, ...]) -> None:
        """Compare an event of the rank with its record."""
        if not self._engine.failure:
            self.comparison.on_event(time_s, kind, fields, self.has_stopped)

    def repeat_reduction(self, tag: int, result: memoryview) -> None:
        """Overwrite the result of a reduction with the recorded result, because MPI may add in a different order."""
        results = self.log.results.get(tag)
        if not results:
            return
        nbytes, recorded = results.popleft()
        if nbytes != len(result):
            what = f"the recording has an all_reduce of {nbytes} bytes next, but the replay reduces {len(result)}"
            raise self.comparison.divergence(what)
        if recorded:
            result[:] = recorded
        else:
            self.comparison.note_other_order(nbytes)

    def note_end(self, error: BaseException | None) -> None:
        """Compare the end of ``main`` with the recorded end."""
        if not isinstance(error, asyncio.CancelledError):  # tasks are also cancelled after the end of the simulation
            self.has_stopped = True
            self.input_checks.note_end()
        self.comparison.on_end(error)


def is_end_of_stream(what: WaitId) -> bool:
    """Return whether a wait with this identity ends when the last part of a stream has been sent."""
    return what.kind == WaitKind.STREAM_LEFT


def _is_reserved_for_task(pending: RecordedInput) -> bool:
    """Return whether a task must receive this message directly, outside polling passes, and has not tried to yet."""
    return isinstance(pending, ReceivedByTask) and pending.late_for is None
