"""Runs collective starts to their end, even if their caller is cancelled or times out.

The members of a start agree first (:mod:`asyncdist.collectives.agreement.agreements`). After the leader's verdict "go"
they count on each other. A member that stopped then would leave the rest in a collective that cannot complete, for
example in MPI_Comm_create_group, where not even a signal is handled. A member that gives up earlier cannot know whether
the leader has decided meanwhile.

Therefore a separate task does the work, and only a failure of the job cancels it. The effect of a caller's cancellation
depends on the progress of the start:

- Before this rank has joined: the caller and the work are cancelled at once, and the other members are notified that
  this rank stays away.
- Before the verdict is known: this rank asks the leader to continue without it. The caller is cancelled at once, or,
  with ``is_held``, after the leader's answer. If the verdict is "go" nevertheless, the work is done, and its result is
  given back.
- After "go": the caller is cancelled when the work is done and its result has been given back.
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

#: Seconds for which a rank that is about to block does not yield to its loop: an idle leader answers within 1 ms.
_HOLD_S: Final = 0.005


class Start(Generic[T]):
    """One start of this rank.

    Args:
        engine: Engine of this rank.
        agreements: Agreements of this rank.
        meeting: Agreement with which the start begins.
        give_back: Called with the result if the caller has given up.
        part_of: Start whose work includes this start; or None.
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
        """A name that is unique among the starts of this rank, and equal on all members."""
        key = self.meeting.key
        return f"{key.subject} {wire.scope_of(self.meeting.ranks, key.subject, key.occurrence):x}"

    async def agree(self, values: Mapping[str, str], **options: Any) -> Agreed:
        """Agree as :meth:`Agreements.meet` does; the first step of the work. After "go" the work is always done."""
        agreed = await self._agreements.meet(self.meeting, values, caller=self, **options)
        self._is_on = True
        return agreed

    def left_s(self, timeout_s: float) -> float:
        """Return the remaining seconds of the caller's timeout after "go", but at least 5: all members are present."""
        return max(round(self.meeting.began_at + timeout_s - self._loop.time(), 3), MEMBER_PATIENCE_S)

    def on_asked(self) -> None:
        """Note that this rank joins the agreement now."""
        self._has_come = True

    def on_time_up(self, error: StartTimeoutError) -> None:
        """Raise ``error`` in the caller, whose time is up; the work continues, and its result is given back.

        For a start that is part of another one, the caller is that of the outer start, whose work also continues.
        """
        if self._part_of is not None:
            self._part_of.on_time_up(error)
        elif not self._outcome.done():
            self._outcome.set_exception(error)

    async def run(self, work: Callable[[Start[T]], Coroutine[Any, Any, T]]) -> None:
        """Do the work, in a task of its own. Raises errors that no caller would receive."""
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
        """Return the result of the work, which ``task`` does in :meth:`run`."""
        try:
            result = await self._engine.settled_by(task, self._outcome)
            await yield_to_loop()  # lets the ended task be forgotten
            return result
        except asyncio.CancelledError:
            await self._give_up(task, is_held=is_held)
            raise
        except Exception:
            await yield_to_loop()  # likewise
            raise

    async def _give_up(self, task: asyncio.Task[None], *, is_held: bool) -> None:
        if not self._outcome.cancelled():  # the work was finished at the moment of the cancellation
            if self._outcome.exception() is None:
                await self._give_back(self._outcome.result())
        elif task.done():  # the start was refused at that moment
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
            except asyncio.CancelledError:  # cancelled again; the first cancellation is raised in any case
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
    """Agree with the other ranks, do the work, and return its result; see the module's docstring.

    Args:
        services: Services of this rank.
        agreements: Agreements of this rank.
        ranks, subject, leader: See :meth:`Agreements.agree`.
        work: Called with the start; must first await its :meth:`Start.agree`.
        give_back: Called with the result of the work if the caller has given up.
        name: Name of the task that does the work, for reports.
        is_held: Whether a cancelled caller waits for the leader's answer, because the work must not happen later.
        part_of: Start whose work includes this start; or None.
        outlives_leader: Whether the started operation continues without the leader, so that members may take the
            verdict from each other.
    """
    meeting = agreements.next_meeting(ranks, subject, leader, outlives_leader=outlives_leader)
    start = Start(services.engine, agreements, meeting, give_back, part_of)
    task = services.spawn_service(start.run(work), name=name)
    return await start.result(task, is_held=is_held)


async def assemble(agreements: Agreements, ranks: Sequence[int], what: str) -> None:
    """Wait until all ``ranks`` are ready for a call that blocks until all of them have entered it.

    No rank enters the call before every rank has reached this point, so that none blocks while another computes. A
    ready rank does not yield to its loop for a moment, since another of its tasks may be about to compute. After that
    moment a loop may still be blocked for the length of one step.

    Args:
        agreements: Agreements of this rank.
        ranks: Ranks that have agreed on the call. Only a failure of the job may keep one away, or cancel this wait.
        what: Name of the call; equal on all ranks.
    """
    if len(ranks) > 1:
        await agreements.agree(ranks, what, {}, timeout_s=None, hold_s=_HOLD_S)
