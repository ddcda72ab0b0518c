"""On each rank, starts one operation at a time if the start blocks, or allocates a number such as a group's tag.

A blocking start, such as MPI_Comm_create_group, returns only when all members have entered it. If two ranks entered two
such starts in opposite order, each would wait for the other forever. Tasks may request starts in a different order on
each rank, however. Each start therefore makes two agreements:

1. **All members have requested the start.** A rank may be in any number of these agreements at once. The leader gives
   the start a number that is larger than the numbers of all starts known to a member (Lamport, "Time, clocks, and the
   ordering of events in a distributed system", 1978). The numbers define one order of all starts, equal on all ranks.
2. **All members are ready for the start.** A rank joins this agreement for one start at a time: the first start in this
   order that all members have requested. If an earlier start appears, the rank asks the leader to release it from the
   agreement, and joins the earlier start. The release succeeds unless all members have joined.

No start waits forever, because all members join the first of all requested starts before any other start.
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
    """The joint start of an operation. All members have requested it, and it waits for its turn on this rank."""

    number: int
    meeting: Meeting

    def place(self) -> tuple[int, Runs, str, int]:
        key = self.meeting.key
        return self.number, key.ranks, key.subject, key.occurrence


class Turns:
    """Runs the blocking starts of this rank one at a time, in an order that is equal on all ranks."""

    def __init__(self, services: Services, agreements: Agreements) -> None:
        self._services = services
        self._agreements = agreements
        self._number = 0  # largest number of a start that this rank knows
        self._waiting: list[_Waiting] = []  # starts in the order that is equal on all ranks
        self._current: _Waiting | None = None  # start whose second agreement this rank has joined

    @contextlib.asynccontextmanager
    async def turn(
        self, start: Start[Any], timeout_s: float, taken: Callable[[], Runs] = tuple
    ) -> AsyncIterator[Agreed]:
        """Wait until all members are ready for ``start``. While the block runs, other starts of this rank wait.

        Args:
            timeout_s: Seconds, from the request, to wait for the other members and for the turn. At least 5 s are
                allowed for the turn.
            taken: Function that returns the resource numbers in use on this rank. The members agree on a number that no
                member uses.

        Raises:
            StartTimeoutError: Some members did not join in time.
            AsyncdistError: The members do not agree, or a member has left or is lost.
        """
        with self._agreements.rivals.starting(start.meeting) as open_start:
            asked = await start.agree({}, timeout_s=timeout_s, taken=((0, self._number),))
            open_start.have_all_joined = True
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
        """Raise StartTimeoutError in the caller of ``start`` when its time has passed. The block continues.

        The remaining time is measured from now, because a blocked loop may have received the leader's answer late.
        """
        engine = self._services.engine
        left_s = start.left_s(timeout_s)
        text = (
            f"{start.meeting}: all ranks joined, but after another {left_s:g} s some of them were still in other "
            "starts or computing"
        )
        error = StartTimeoutError(text, missing=())
        timer: Timer

        def on_timeout() -> None:
            nonlocal timer
            # If the answer arrived while the loop was blocked, let the waiting task continue first.
            timer = engine.loop.call_soon(start.on_timeout, error)

        timer = engine.call_later(left_s, WaitId(WaitKind.TURN_TIMEOUT, name=start.meeting.key.text), on_timeout)
        try:
            yield
        finally:
            timer.cancel()

    async def _agree(self, number: int, meeting: Meeting, taken: Callable[[], Runs]) -> Agreed:
        """Wait until this start is the first in the common order and all members are ready. Return their agreement."""
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
