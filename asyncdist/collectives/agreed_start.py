"""Runs an operation that all members of a group start together, even if the caller is cancelled or times out.

The members first agree on the start (:mod:`asyncdist.collectives.agreement.agreements`): one of them, the leader, sends
all the others its decision, "go" or a refusal. After "go", a member that stopped would leave the others in a collective
that never completes. A separate task therefore does the work, and only a failure of the job cancels this task. The
effect of cancelling the caller depends on how far the start has progressed:

- Before this rank has joined the agreement, the caller and the work are cancelled, and the other members are notified.
- Before the decision has arrived, this rank asks the leader to start without it. The caller is cancelled immediately
  or, if ``is_held`` is true, after the leader's answer. If the decision is "go", the work is still done, and its result
  is released.
- After "go", the caller is cancelled when the work is done and its result has been released.

Starts that block, or allocate a number such as a group's tag, run one at a time on each rank (:class:`Turns`). A
blocking start, such as MPI_Comm_create_group, returns only when all members have entered it. If two ranks entered two
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

import asyncio
import bisect
import contextlib
import dataclasses
import operator
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Final, Generic, TypeAlias, TypeVar

from asyncdist.collectives.agreement.agreements import MEMBER_PATIENCE_S, Agreements
from asyncdist.collectives.agreement.messages import Agreed, Meeting, Runs
from asyncdist.collectives.agreement.verdicts import Postponed
from asyncdist.errors import AsyncdistError, StartTimeoutError
from asyncdist.messaging import wire
from asyncdist.messaging.engine import Engine, Timer, yield_to_loop
from asyncdist.messaging.services import Services
from asyncdist.waits import WaitId, WaitKind

T = TypeVar("T")
#: Sort key of a start, in an order that is equal on all ranks: its number, ranks, subject and occurrence.
_Place: TypeAlias = tuple[int, Runs, str, int]

#: Seconds for which a rank polls for messages, without yielding to its loop, before a blocking call. An idle leader
#: answers in 1 ms.
_HOLD_S: Final = 0.005


class Start(Generic[T]):
    """One operation, such as a collective, that this rank starts together with the other members of a group."""

    def __init__(
        self,
        engine: Engine,
        agreements: Agreements,
        meeting: Meeting,
        give_back: Callable[[T], Awaitable[object]],
        part_of: Start[Any] | None = None,
    ) -> None:
        self.meeting = meeting
        self._part_of = part_of
        self._engine = engine
        self._agreements = agreements
        self._give_back = give_back
        self._loop = asyncio.get_running_loop()
        self._outcome: asyncio.Future[T] = self._loop.create_future()
        self._has_joined = False
        self._is_on = False

    @property
    def name(self) -> str:
        """Name of the operation for reports, unique on this rank and equal on all members."""
        key = self.meeting.key
        return f"{key.subject} {wire.scope_of(self.meeting.ranks, key.subject, key.occurrence):x}"

    async def agree(self, values: Mapping[str, str], **options: Any) -> Agreed:
        """Wait until all members agree to start.

        The coroutine that does the work must await this method first, and must then run to its end.
        """
        self._has_joined = True  # From now on, cancelling the caller no longer stops the work.
        agreed = await self._agreements.meet(self.meeting, values, on_late=self.on_timeout, **options)
        self._is_on = True
        return agreed

    def left_s(self, timeout_s: float) -> float:
        """Return the remaining seconds of the caller's timeout, but at least 5.

        Called when all members have joined. Even after a late join, they then have a few seconds to start.
        """
        return max(round(self.meeting.began_at + timeout_s - self._loop.time(), 3), MEMBER_PATIENCE_S)

    def on_timeout(self, error: StartTimeoutError) -> None:
        """Raise ``error`` in the caller, whose timeout has passed. The work continues, and its result is released."""
        if self._part_of is not None:
            self._part_of.on_timeout(error)
        elif not self._outcome.done():
            self._outcome.set_exception(error)

    async def run(self, work: Callable[[Start[T]], Coroutine[Any, Any, T]]) -> None:
        """Await ``work`` in a separate task.

        Raise an unexpected error in this task if the caller can no longer receive it.
        """
        try:
            result = await work(self)
        except Exception as error:
            if not self._has_joined:
                self._agreements.decline(self.meeting, error)
            if not self._outcome.done():
                self._outcome.set_exception(error)
            elif not isinstance(error, AsyncdistError):
                raise
        except asyncio.CancelledError:
            self._outcome.cancel()
            raise
        else:
            if not self._outcome.done():
                self._outcome.set_result(result)
            else:
                await self._give_back(result)

    async def result(self, task: asyncio.Task[None], *, is_held: bool) -> T:
        """Wait for ``task``, which executes :meth:`run`, and return the result of the work to the caller."""
        try:
            result = await self._engine.settled_by(task, self._outcome)
            await yield_to_loop()  # Let the done callbacks of the ended task run.
            return result
        except asyncio.CancelledError:
            await self._give_up(task, is_held=is_held)
            raise
        except Exception:
            await yield_to_loop()  # Let the done callbacks of the failed task run.
            raise

    async def _give_up(self, task: asyncio.Task[None], *, is_held: bool) -> None:
        if not self._outcome.cancelled():  # The work ended just as the caller was cancelled.
            if self._outcome.exception() is None:
                await self._give_back(self._outcome.result())
        elif task.done():  # The start was refused just as the caller was cancelled.
            return
        elif not self._has_joined:
            self._agreements.decline(self.meeting)
            task.cancel()
        elif not self._agreements.is_ending and (self._is_on or self._agreements.give_up(self.meeting) or is_held):
            await self._until_it_has_ended(task)

    async def _until_it_has_ended(self, task: asyncio.Task[None]) -> None:
        while not task.done():
            try:
                await self._engine.ended(task)
            except asyncio.CancelledError:  # The caller raises the first cancellation.
                continue


async def start_together(
    services: Services,
    agreements: Agreements,
    ranks: Sequence[int],
    subject: str,
    work: Callable[[Start[T]], Coroutine[Any, Any, T]],
    give_back: Callable[[T], Awaitable[object]],
    *,
    name: str,
    leader: int | None = None,
    is_held: bool = False,
    part_of: Start[Any] | None = None,
    outlives_leader: bool = False,
) -> T:
    """Agree with the other ``ranks`` to start an operation, await ``work``, and return its result.

    Args:
        work: Coroutine function that receives the :class:`Start` and must first await its :meth:`Start.agree`.
        give_back: Coroutine function that releases the result of the work if the caller has given up.
        leader: Rank that decides whether the operation starts, by default the first of ``ranks``.
        is_held: Whether a cancelled caller waits for the leader's answer, so that ``work`` ends before this function.
        outlives_leader: Whether the operation continues if the leader is lost. If so, members accept the leader's
            decision from each other.
    """
    meeting = agreements.next_request(ranks, subject, leader, outlives_leader=outlives_leader)
    start = Start(services.engine, agreements, meeting, give_back, part_of)
    task = services.spawn_service(start.run(work), name=name)
    return await start.result(task, is_held=is_held)


async def assemble(agreements: Agreements, ranks: Sequence[int], what: str) -> None:
    """Wait until all ``ranks`` are ready for a call that blocks each process until every rank has made it.

    This prevents a rank from blocking while another rank computes. A ready rank polls briefly without yielding to its
    loop, because another of its tasks might begin a long computation.
    """
    if len(ranks) > 1:
        await agreements.agree(ranks, what, {}, timeout_s=None, hold_s=_HOLD_S)


class Turns:
    """Runs the blocking starts of this rank one at a time, in an order that is equal on all ranks."""

    def __init__(self, services: Services, agreements: Agreements) -> None:
        self._services = services
        self._agreements = agreements
        self._number = 0  # largest number of a start that this rank knows
        # Starts that all members have requested, in the order that is equal on all ranks.
        self._waiting: list[tuple[_Place, Meeting]] = []
        self._current: tuple[_Place, Meeting] | None = None  # start whose second agreement this rank has joined

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
                if self._current is not None and self._current[1] is meeting:
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
        key = meeting.key
        entry = (number, key.ranks, key.subject, key.occurrence), meeting
        bisect.insort(waiting, entry, key=operator.itemgetter(0))
        if self._current is not None and waiting[0] is entry and entry[0] < self._current[0]:
            self._agreements.postpone(self._current[1])
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
