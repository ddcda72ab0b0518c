"""Gives turns to starts that take a number, or that enter a call which blocks until all members have entered it.

A rank in two such starts at once could block in one of them while another rank blocks in the other, for example in
MPI_Win_allocate and MPI_Comm_create_group, and each would wait for the other forever. Therefore a rank is in one of
them at a time. However, tasks may request starts in a different order on each rank, for example if each task trains a
model in a group of its own, and a start may wait for a late rank. Therefore each start makes two agreements:

1. **All members have requested the start.** A rank may be in any number of these agreements at once, so none waits for
   another start. The leader gives the start a number larger than those of all starts that a member knows of (Lamport,
   "Time, clocks, and the ordering of events in a distributed system", 1978). The numbers, and keys for equal numbers,
   define one order of all starts, which is equal on all ranks.
2. **All members have their turn.** A rank joins this agreement for the first start, in that order, that all members
   have requested. If an earlier one appears, the rank asks the leader to release it, unless all members have joined,
   and joins the earlier one.

This always ends: each member joins the first of all fully requested starts as soon as it learns that all have requested
it, and the only start that can delay it has all of its members.
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
    """A start of this rank that all members have requested.

    Attributes:
        number: Number of the start.
        meeting: Meeting of its second agreement.
    """

    number: int
    meeting: Meeting

    def place(self) -> tuple[int, Runs, str, int]:
        """Return the sort key of the start in the order of all starts."""
        key = self.meeting.key
        return self.number, key.ranks, key.subject, key.occurrence


class Turns:
    """Gives the starts of one rank their turns.

    Args:
        services: Services of this rank.
        agreements: Agreements of this rank.
    """

    def __init__(self, services: Services, agreements: Agreements) -> None:
        self._services = services
        self._agreements = agreements
        self._number = 0  # the largest number that this rank knows of
        self._waiting: list[_Waiting] = []  # in the order of all starts
        self._current: _Waiting | None = None  # this rank has joined its second agreement, or is in its body

    @contextlib.asynccontextmanager
    async def turn(
        self, start: Start[Any], timeout_s: float, taken: Callable[[], Runs] = tuple
    ) -> AsyncIterator[Agreed]:
        """Agree with the other members, and hold the turn of ``start`` while the body runs.

        Args:
            start: A start of this rank.
            timeout_s: Seconds, from the request, to wait for the last member and then for the turn; for the turn at
                least 5 s.
            taken: Returns the numbers that are in use on this rank; see :meth:`Agreements.agree`.

        Raises:
            StartTimeoutError: Some members did not join in time.
            AsyncdistError: As :meth:`Agreements.agree`.
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
        """Raise in the caller of ``start`` when its time is up; the body continues, since the others count on it.

        The time is :meth:`Start.left_s`, counted from now. Otherwise a rank that receives "go" late, because its loop
        was blocked, would raise although the others are about to start.
        """
        engine = self._services.engine
        left_s = start.left_s(timeout_s)
        text = f"{start.meeting}: all ranks joined, but {left_s:g} s later some were in other starts, or computing"
        error = StartTimeoutError(text, missing=())
        timer: Timer

        def on_time_up() -> None:
            nonlocal timer
            # The answer may have arrived while the loop was blocked: then the task continues first.
            timer = engine.loop.call_soon(start.on_time_up, error)

        timer = engine.call_later(left_s, WaitId(WaitKind.TURN_TIMEOUT, name=start.meeting.key.text), on_time_up)
        try:
            yield
        finally:
            timer.cancel()

    async def _agree(self, number: int, meeting: Meeting, taken: Callable[[], Runs]) -> Agreed:
        """Agree that all members have their turn, and make this start the current one."""
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
