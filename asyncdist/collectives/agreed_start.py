"""Runs an operation that all members of a group start together, even if the caller is cancelled or times out.

The members first agree on the start (:mod:`asyncdist.collectives.agreement.agreements`): one of them, the leader, sends
all the others its decision, "go" or a refusal. After "go", a member that stopped would leave the others in a collective
that never completes. A separate task therefore does the work, and only a failure of the job cancels this task. If the
caller is cancelled, the effect depends on the progress of the start:

- Before this rank has joined the agreement, the caller and the work are cancelled, and the other members are notified.
- Before the decision has arrived, this rank asks the leader to start without it. The caller is cancelled immediately
  or, if ``is_held`` is true, after the leader's answer. If the decision is "go", the work is still done, and its result
  is released.
- After "go", the caller is cancelled when the work is done and its result has been released.
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

        The work must await this method first, and must then run to its end.
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
        if not self._outcome.cancelled():  # The work ended at the moment of the cancellation.
            if self._outcome.exception() is None:
                await self._give_back(self._outcome.result())
        elif task.done():  # The start was refused at the moment of the cancellation.
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
