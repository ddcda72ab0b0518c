"""Makes the starts of one rank take turns that take a number, or enter a call that blocks until all members enter it.

A rank that is in two such starts at once could block in one of them while another rank blocks in the other one, in
MPI_Win_allocate and MPI_Comm_create_group for example, and each would wait for the other for ever. So a rank is in one
of them at a time. But tasks may ask for starts in another order on each rank, for example when each of them begins to
train a model of its own in a group of its own, and a start may wait for a rank that is late. Hence two agreements:

1. **All members have asked for it.** A rank may be in any number of these at once, so none of them waits for another
   start. Their leader gives the start a number that is larger than those of all starts that a member has heard of
   before (Lamport, "Time, clocks, and the ordering of events in a distributed system", 1978). Numbers, and keys where
   two of them are equal, put all starts into one order, which is the same on all ranks.
2. **All members have their turn.** A rank comes to this agreement for the first start in that order among those for
   which all members have asked. When an earlier one turns up, the rank asks the leader to wait for it later, unless all
   have come, and comes to the earlier one.

This always ends: of all starts whose members have all asked, each member comes to the first one as soon as it hears
that all have asked, and the one start that may keep it back has all of its members.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from asyncdist.collectives.agreed_start import Start
from asyncdist.collectives.agreement.agreements import Agreements
from asyncdist.collectives.agreement.messages import Agreed, Meeting, Runs
from asyncdist.collectives.agreement.verdicts import Postponed
from asyncdist.errors import StartTimeoutError
from asyncdist.messaging.engine import Timer
from asyncdist.messaging.services import Services
from asyncdist.waits import WaitId, WaitKind


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """A start of this rank for which all members have asked.

    Attributes:
        number: that it was given.
        meeting: of its second agreement.
    """

    number: int
    meeting: Meeting

    def place(self) -> tuple[int, Runs, str, int]:
        """Return its place in the order of all starts."""
        key = self.meeting.key
        return self.number, key.ranks, key.subject, key.occurrence


class Turns:
    """Gives the starts of one rank their turns.

    Args:
        services: of this rank.
        agreements: of this rank.
    """

    def __init__(self, services: Services, agreements: Agreements) -> None:
        self._services = services
        self._agreements = agreements
        self._number = 0  # the largest that this rank has heard of
        self._waiting: list[_Waiting] = []  # in their order; the first one comes next
        self._current: _Waiting | None = None  # this rank has come to its second agreement, or is in its body

    @contextlib.asynccontextmanager
    async def turn(
        self, start: Start[Any], timeout_s: float, taken: Callable[[], Runs] = tuple
    ) -> AsyncIterator[Agreed]:
        """Agree with the other members when it is this start's turn, and keep it in the body.

        Args:
            start: of this rank.
            timeout_s: how long to wait for the last member, and after that for the turn, since the start was asked for;
                for the turn at least 5 s.
            taken: returns the numbers that are in use on this rank; see :meth:`Agreements.agree`.

        Raises:
            StartTimeoutError: some members did not come in time.
            AsyncdistError: as :meth:`Agreements.agree`.
        """
        with self._agreements.rivals.starting(start.meeting) as open_start:
            asked = await start.agree({}, timeout_s=timeout_s, taken=((0, self._number),))
            open_start.have_all_come = True
            self._number = max(self._number, asked.number)
            meeting = self._agreements.second_meeting(start.meeting)
            try:
                with self._limited(start, timeout_s):
                    agreed = await self._agree(asked.number, meeting, taken)
                yield dataclasses.replace(agreed, time=asked.time)
            finally:
                if self._current is not None and self._current.meeting is meeting:
                    self._current = None
                    self._services.engine.recheck()

    @contextlib.contextmanager
    def _limited(self, start: Start[Any], timeout_s: float) -> Iterator[None]:
        """Raise in the caller of ``start`` when its time is up; the body goes on, since the others count on it.

        Its time is :meth:`Start.left_s`, counted from now: a rank that hears go late, since something blocked its loop,
        would otherwise raise although the others are about to make what it has asked for.
        """
        engine = self._services.engine
        left_s = start.left_s(timeout_s)
        text = f"{start.meeting}: all ranks came, but {left_s:g} s later some were still in other starts, or computing"
        error = StartTimeoutError(text, missing=())
        timer: Timer

        def on_time_up() -> None:
            nonlocal timer
            # The word may have come while something blocked the loop: then the task goes on first.
            timer = engine.loop.call_soon(start.on_time_up, error)

        timer = engine.call_later(left_s, WaitId(WaitKind.TURN_TIMEOUT, name=start.meeting.key.text), on_time_up)
        try:
            yield
        finally:
            timer.cancel()

    async def _agree(self, number: int, meeting: Meeting, taken: Callable[[], Runs]) -> Agreed:
        """Agree that all members have their turn; this rank's is the current one from then on."""
        engine, waiting = self._services.engine, self._waiting
        entry = _Waiting(number, meeting)
        bisect.insort(waiting, entry, key=_Waiting.place)
        if self._current is not None and waiting[0] is entry and entry.place() < self._current.place():
            self._agreements.postpone(self._current.meeting)
        try:
            while True:
                what = WaitId(WaitKind.TURN, name=meeting.key.text)
                await engine.until(lambda: self._current is None and waiting[0] is entry, what)
                self._current = entry
                try:
                    return await self._agreements.meet(meeting, {}, timeout_s=None, taken=taken())
                except Postponed:
                    self._current = None
                    engine.recheck()
        finally:
            waiting.remove(entry)
