"""Delivers recorded inputs to a replayed rank between its safe points, and pauses a rank that gets ahead of them."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from typing import Final

from asyncdist.simulation.replay.admission import Admission
from asyncdist.simulation.replay.log import RecordedInput
from asyncdist.simulation.replay.pending_inputs import PendingInputs
from asyncdist.simulation.scheduler import Handle

#: Shortest pause between two checks of the next recorded input, in virtual seconds. Sending the input takes no time.
PAUSE_S: Final = 1e-5
#: Longest pause between two checks of the next recorded input, in virtual seconds.
PAUSE_MAX_S: Final = 0.1
#: Virtual seconds without the expected input after which a replay is considered to differ from its record.
PATIENCE_S: Final = 300.0


class InputChecks:
    """Checks, shortly after each event, whether the next recorded input of a replayed rank is due.

    ``deliver`` delivers one input.
    """

    def __init__(self, inputs: PendingInputs, admission: Admission, deliver: Callable[[RecordedInput], None]) -> None:
        self._inputs = inputs
        self._admission = admission
        self._loop = inputs.loop
        self._deliver = deliver
        self._has_main_ended = False
        self._timer: Handle | None = None
        self._look_at_s = 0.0
        self._deferred: RecordedInput | None = None

    def note_end(self) -> None:
        """Record that ``main`` has ended. From now on, inputs are delayed only briefly."""
        self._has_main_ended = True
        self.look_soon()

    def look_soon(self, after_s: float = PAUSE_S) -> None:
        """Schedule a check in at most ``after_s`` virtual seconds."""
        at_s = self._loop.time() + after_s
        if not self._inputs.is_open or (self._timer is not None and self._look_at_s <= at_s):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._look_at_s = self._loop.call_later(after_s, self._look), at_s

    def _look(self) -> None:
        """Deliver the next recorded input, unless user code must reach a safe point first."""
        self._timer = None
        if self._inputs.is_done:
            if self._inputs.log.is_over:  # a rank whose record is cut short stays paused
                self._release()
            return
        if self._inputs.is_in_point:
            return
        self._inputs.catch_up(0)
        pending = self._inputs.next()
        if pending is None:
            if self._has_main_ended:
                self._deliver_all()
        elif self._inputs.is_possible(pending) and not self._admission.has_permitted:
            # The rank is waiting although this input is not due yet, because its tasks ran in a different order.
            if pending is not self._deferred:
                self._deferred = pending
                self.look_soon(PATIENCE_S)
            elif self._is_patience_over():
                self._deliver(pending)
                self.look_soon()
        elif self._has_main_ended and self._is_patience_over():
            self._deliver_all()

    def _is_patience_over(self) -> bool:
        """Return whether no input was delivered for PATIENCE_S seconds. Otherwise, schedule the next check."""
        ends_at_s = self._inputs.progressed_at_s + PATIENCE_S
        if self._loop.time() >= ends_at_s:
            return True
        self.look_soon(ends_at_s + PAUSE_S - self._loop.time())
        return False

    def _deliver_all(self) -> None:
        """Stop delaying inputs, because ranks may end in an order that differs from the recorded run."""
        self._inputs.clear()
        self._admission.clear()
        self._release()

    def _release(self) -> None:
        self._inputs.timers.release()
        self._inputs.deadlines.release()
        self._inputs.engine.ring()


class Pause:
    """Pauses a replayed rank after its current step until its next recorded message has arrived.

    This cannot deadlock, because the recorded sender needed nothing more from this rank before it sent the message.
    ``can_begin`` returns whether the rank may be paused now. When the message has arrived, all due inputs are delivered
    before anything else runs, in ``context``, the context in which the user's ``main`` starts.
    """

    context: contextvars.Context

    def __init__(self, inputs: PendingInputs, can_begin: Callable[[], bool]) -> None:
        self.is_on = False
        self._inputs = inputs
        self._loop = inputs.loop
        self._can_begin = can_begin
        self._until_s = self._ends_at_s = 0.0

    def begin_if_late(self, ending_count: int = 0) -> None:
        """Pause the rank if its next recorded message is due but has not arrived."""
        if self.is_on or not self._inputs.is_open or not self._can_begin():
            return
        pending = self._inputs.next()
        if (
            pending is None
            or not self._inputs.must_have_arrived(pending, ending_count)
            or self._inputs.is_possible(pending)
        ):
            return
        if self._inputs.collective_end_after(pending) is not None:
            return  # a collective must end first, and other ranks may need this rank to end it
        self.is_on = True
        self._until_s = self._loop.time() + PATIENCE_S
        self._continue(PAUSE_S)
        self._loop.call_when_idle(self._end, ())  # called when the rank is no longer busy, before anything else

    def _continue(self, pause_s: float) -> None:
        pending = self._inputs.next()
        if pending is None or self._inputs.is_possible(pending) or self._loop.time() > self._until_s:
            return
        self._loop.stall(pause_s)
        self._ends_at_s = max(self._ends_at_s, self._loop.time()) + pause_s
        next_pause_s = min(1.5 * pause_s, PAUSE_MAX_S)
        self._loop._scheduler.at(self._ends_at_s - pause_s / 8, self._continue, (next_pause_s,))

    def _end(self) -> None:
        self.is_on = False
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self._loop)
        try:
            self.context.run(self._inputs.catch_up, 0)
        except Exception as error:
            self._inputs.engine.fail(error)
        finally:
            asyncio._set_running_loop(before)
