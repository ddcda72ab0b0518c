"""Polls the requests of a replayed rank, and ends its tasks' waits at the recorded points."""

from __future__ import annotations

import asyncio
import copy
import functools
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from asyncdist.messaging.engine import Timer, yield_to_loop
from asyncdist.messaging.polling import Peers, resolve_waiter
from asyncdist.runtime.recording import ObservedEngine
from asyncdist.simulation.processes.event_loop import RankLoop
from asyncdist.simulation.replay.gate import Gate, is_end_of_stream
from asyncdist.simulation.replay.log import FAILED, end_of_collective
from asyncdist.simulation.replay.pending_inputs import gone
from asyncdist.transports.base import Transport
from asyncdist.waits import A_CONDITION, A_WAKE_UP, WaitId, WaitKind

T = TypeVar("T")


class ReplayedEngine(ObservedEngine):
    """Replaces a rank's engine in a replay, and ends waits at the same points as in the recorded run."""

    # A replayed send takes no time, but the sending task waits as long as in the recorded run.
    holds_sends: ClassVar[bool] = False

    def __init__(self, transport: Transport, loop: RankLoop, gate: Gate) -> None:
        super().__init__(transport, loop)
        self._gate = gate
        self.clock = gate.inputs.read_clock

    def begin(self) -> None:
        """Start delivering the recorded inputs, just before ``main`` starts."""
        super().begin()
        self._gate.open(self)

    async def safe_point(self, budget_s: float = 0.0) -> None:
        if not self.has_begun:
            await super().safe_point(budget_s)
            return
        await self._gate.pass_safe_point()
        if self.failure is not None:
            raise self.failure

    async def until(
        self,
        condition: Callable[[], bool],
        what: WaitId = A_CONDITION,
        *,
        deadline: float | None = None,
        is_of_request: bool = False,
        peers: Peers | None = None,
    ) -> bool:
        if not self.has_begun:
            return await super().until(condition, what, deadline=deadline, is_of_request=is_of_request, peers=peers)
        gate = self._gate
        if not condition():
            await gate.deliver_before_wait(condition)
        if deadline is None or gate.inputs.is_done:
            if not gate.log.is_over:
                deadline = None  # wait forever, because the rank stops at the end of its record
            return await super().until(condition, what, deadline=deadline, is_of_request=is_of_request, peers=peers)
        with gate.inputs.deadlines.waiting(what, deadline, self.recheck) as entry:
            gate.input_checks.look_soon()

            def holds() -> bool:
                return entry.is_over or condition()

            await super().until(holds, what, is_of_request=is_of_request, peers=peers)
            return not entry.is_over or condition()

    async def park_until(
        self,
        waiter: asyncio.Future[None],
        is_ready: Callable[[], bool],
        what: WaitId,
        deadline: float,
        *,
        peers: Peers | None = None,
    ) -> bool:
        if not self.has_begun:
            return await super().park_until(waiter, is_ready, what, deadline, peers=peers)
        wake = functools.partial(resolve_waiter, waiter, None)
        with self._gate.inputs.deadlines.waiting(what, deadline, wake) as entry:
            self._gate.input_checks.look_soon()
            await self.park(waiter, what, peers=peers)
            return not entry.is_over or is_ready()

    async def park(
        self,
        waiter: asyncio.Future[None],
        what: WaitId = A_WAKE_UP,
        *,
        is_of_request: bool = False,
        peers: Peers | None = None,
    ) -> None:
        if not self.has_begun:
            await super().park(waiter, what, is_of_request=is_of_request, peers=peers)
            return
        gate = self._gate
        task = asyncio.current_task()
        if not is_of_request and not waiter.done():
            await gate.deliver_before_wait(waiter.done)
            if task is gate.user:
                await gate.deliver_without_wait(waiter)
            if waiter.done() and self.failure is None:  # the task did not wait in the recorded run
                await waiter
                return
        if task is gate.main and not waiter.done():
            gate.main = None  # the task is waiting for something other than a safe point
        gate.waiters[task] = waiter
        gate.counted |= set() if is_of_request else {task}
        try:
            await super().park(waiter, what, is_of_request=is_of_request, peers=peers)
        finally:
            del gate.waiters[task]
            gate.counted.discard(task)

    async def _settled(self, future: asyncio.Future[T], counts: bool) -> T:
        result = await future
        if counts and self.has_begun:
            await self._gate.before_wait_ends()
        return result

    def _note_wait_begun(self, counts: bool) -> None:
        super()._note_wait_begun(counts)
        if self.has_begun:
            self._gate.on_wait_begun()

    def _note_wait_ended(self, counts: bool) -> None:
        if self.has_begun:
            self._gate.on_wait_ended(counts)
        super()._note_wait_ended(counts)

    def call_later(self, delay_s: float, what: WaitId, call: Callable[..., object], *args: Any) -> Timer:
        if not self.has_begun:
            return super().call_later(delay_s, what, call, *args)
        call_at = self._gate.inputs.timers.call_at
        return call_at(self.loop.time() + delay_s, what, functools.partial(call, *args))

    def wake_by(self, what: WaitId, wake: Callable[[], object]) -> None:
        if self.has_begun:
            self._gate.wake_by(what, wake)
        else:
            wake()

    async def let_begin(self) -> None:
        if self.has_begun:
            await self._gate.deliver_before_clock_reading()
        await yield_to_loop()

    async def repeat_held(self, kind: WaitKind, dest: int, tag: int) -> None:
        if self.has_begun:
            what = WaitId(kind, tag, dest, next(copy.copy(self._send_counts[kind, dest, tag])))
            if self._gate.inputs.remains_in_record(what):
                self.name_send(kind, dest, tag)
                await self.repeat_sent(what, dest)

    async def repeat_sent(self, what: WaitId, dest: int) -> bool:
        """Wait until the recorded point at which the sending task continued. A replayed send takes no time."""
        if not self._gate.inputs.remains_in_record(what):
            return False
        waiter: asyncio.Future[None] = self.loop.create_future()

        def wake() -> None:
            resolve_waiter(waiter, gone(dest) if dest in self.transport.lost_ranks() else None)

        self._gate.wake_by(what, wake)
        if is_end_of_stream(what):  # the recorded task waited for a condition instead of a request
            await super().until(waiter.done, what, is_of_request=True)
        else:
            await self.park(waiter, what, is_of_request=True)
        return True

    async def note_failed(self) -> None:
        if self.has_begun and self.failure is None:
            await self._leave(FAILED)

    async def note_collective(self, tag: int) -> None:
        if not self.has_begun:
            return
        what = end_of_collective(tag)
        if self.failure is None or self._gate.inputs.remains_in_record(what):
            await self._leave(what)
        else:
            raise self.failure  # the job failed before this collective ended

    async def _leave(self, what: WaitId) -> None:
        """Wait until the point at which the task continued after the collective in the recorded run."""
        gate = self._gate
        waiter = self.loop.create_future()
        wake = functools.partial(resolve_waiter, waiter, None)
        with gate.inputs.deadlines.waiting(what, self.loop.time(), wake):
            gate.input_checks.look_soon()
            if not gate.inputs.remains_in_record(what):  # the job failed, or ``main`` ended first
                await self.park(waiter, what, is_of_request=True)
                return
            if asyncio.current_task() is gate.main:
                gate.main = None
            gate.pause.begin_if_late()
            await waiter
        self._note_wait_ended(True)

    def measured(self, what: WaitId, value: int) -> int:
        values = self._gate.log.measured.get(what)
        return values.popleft() if self.has_begun and values else value

    def note_reduced(self, tag: int, result: memoryview) -> None:
        if self.has_begun:
            self._gate.repeat_reduction(tag, result)
