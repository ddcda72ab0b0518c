"""Runs starts to their end, although their caller is cancelled or its time is up meanwhile.

The members of a start agree first (:mod:`asyncdist.collectives.agreement.agreements`). Once the leader has said go,
they count on each other: a member that stopped there would leave the rest in a collective that cannot complete, in
MPI_Comm_create_group for example, where not even a signal is handled. And a member that gives up before it has heard
anything cannot know what the leader has said meanwhile.

So a task of its own does the work, which nothing but a failure of the job cancels. A caller that gives up

- before this rank has said that it comes, is cancelled at once, and so is the work; the others are told that this rank
  stays away;
- while the verdict is not known, asks the leader to go on without this rank, and is cancelled at once, or when the
  leader has answered (``is_held``). If the answer is go, the work is done all the same, and its result is given back;
- after go, is cancelled when the work has been done, and its result has been given back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

from asyncdist.collectives.agreement.agreements import MEMBER_PATIENCE_S, Agreements
from asyncdist.collectives.agreement.messages import Agreed, Meeting
from asyncdist.errors import AsyncdistError, StartTimeoutError
from asyncdist.messaging import wire
from asyncdist.messaging.engine import Engine, yield_to_loop
from asyncdist.messaging.services import Services

T = TypeVar("T")

#: For how long a rank that is about to block keeps its loop to itself: an idle leader answers in less than 1 ms.
_HOLD_S: Final = 0.005


class Start(Generic[T]):
    """Carries out one start of this rank.

    Args:
        engine: of this rank.
        agreements: of this rank.
        meeting: the agreement that it begins with.
        give_back: takes the result where the caller does not want it any more.
        part_of: the start whose work this one belongs to, if any.
    """

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
        self._has_come = False
        self._is_on = False

    @property
    def name(self) -> str:
        """A name that no other start of this rank has, the same on all members."""
        key = self.meeting.key
        return f"{key.subject} {wire.scope_of(self.meeting.ranks, key.subject, key.occurrence):x}"

    async def agree(self, values: Mapping[str, str], **options: Any) -> Agreed:
        """Agree as :meth:`Agreements.meet` does; the work begins with this. After go the work is done in any case."""
        agreed = await self._agreements.meet(self.meeting, values, caller=self, **options)
        self._is_on = True
        return agreed

    def left_s(self, timeout_s: float) -> float:
        """Return how much of the caller's time is left after go; not less than 5 s, since all members are there."""
        return max(round(self.meeting.began_at + timeout_s - self._loop.time(), 3), MEMBER_PATIENCE_S)

    def on_asked(self) -> None:
        """Note that this rank says that it comes."""
        self._has_come = True

    def on_time_up(self, error: StartTimeoutError) -> None:
        """Raise ``error`` in the caller, whose time is up; the work goes on, and its result is given back.

        Of a start that is a part of another one, the caller is that one's: its work goes on too, since the members have
        agreed on it.
        """
        if self._part_of is not None:
            self._part_of.on_time_up(error)
        elif not self._outcome.done():
            self._outcome.set_exception(error)

    async def run(self, work: Callable[[Start[T]], Coroutine[Any, Any, T]]) -> None:
        """Do the work, in a task of its own. Raises errors that no caller would hear of."""
        try:
            result = await work(self)
        except Exception as error:
            if not self._has_come:
                self._agreements.stay_away(self.meeting, error)
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
        """Return what came of the work, which ``task`` does in :meth:`run`."""
        try:
            result = await self._engine.settled_by(task, self._outcome)
            await yield_to_loop()  # the task has ended; this rank forgets it now
            return result
        except asyncio.CancelledError:
            await self._give_up(task, is_held=is_held)
            raise
        except Exception:
            await yield_to_loop()  # likewise
            raise

    async def _give_up(self, task: asyncio.Task[None], *, is_held: bool) -> None:
        if not self._outcome.cancelled():  # the work was done in the moment of the cancellation
            if self._outcome.exception() is None:
                await self._give_back(self._outcome.result())
        elif task.done():  # it was refused in that moment, and there is nothing to give up
            return
        elif not self._has_come:
            self._agreements.stay_away(self.meeting)
            task.cancel()
        elif not self._agreements.is_ending and (self._is_on or self._agreements.give_up(self.meeting) or is_held):
            await self._until_it_has_ended(task)

    async def _until_it_has_ended(self, task: asyncio.Task[None]) -> None:
        while not task.done():
            try:
                await self._engine.ended(task)
            except asyncio.CancelledError:  # once more; the first one is raised in any case
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
    """Do what the ranks have agreed to do together, to its end, as the head of this module says.

    Args:
        services: of this rank.
        agreements: of this rank.
        ranks, subject, leader: what they agree on; see :meth:`Agreements.agree`.
        work: is given the start, and first awaits its :meth:`Start.agree`.
        give_back: is given the result of the work where the caller has given up.
        name: of the task that does the work, for reports.
        is_held: whether a caller that gives up hears the leader's word first, since it must not be done later.
        part_of: the start whose work this one belongs to, if any.
        outlives_leader: whether what starts goes on without its leader, as a member takes the verdict from another one.
    """
    meeting = agreements.next_meeting(ranks, subject, leader, outlives_leader=outlives_leader)
    start = Start(services.engine, agreements, meeting, give_back, part_of)
    task = services.spawn_service(start.run(work), name=name)
    return await start.result(task, is_held=is_held)


async def assemble(agreements: Agreements, ranks: Sequence[int], what: str) -> None:
    """Return when all ``ranks`` are here and may enter a call that blocks until all of them have entered it.

    No rank enters before every loop has come this far, so a rank does not block while another one computes. A rank that
    has come keeps its loop to itself for a moment, since a task of it may be about to compute; after that, and in all
    cases where two ranks compute again and again, a loop may be blocked for the length of one step.

    Args:
        agreements: of this rank.
        ranks: the ranks that have agreed on it: only a failure of the job may keep one of them away, or cancel this.
        what: the call that follows; equal on all ranks.
    """
    if len(ranks) > 1:
        await agreements.agree(ranks, what, {}, timeout_s=None, hold_s=_HOLD_S)
