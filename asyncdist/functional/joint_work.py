"""Carries out several helper calls as one call, although its caller on some rank is cancelled meanwhile.

A helper that is cancelled completes in the background, since the other members have entered it. A function that made
several of them in a row would stop there on that rank: the others would wait in the next one, or meet a call in it that
the rank makes later. So the members first meet in one exchange in the caller's group, as in any helper. Then a task of
its own does the work, to its end, in a group of its own, which no other call of a rank can get in between.

**Cancellation** of the caller is noted, and the others hear of it at the next :meth:`JointWork.check` of the work on
this rank, as a RemoteError. After the last check the work is completed on all ranks.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Final, Generic, TypeVar

from asyncdist.collectives.collectives import Collectives
from asyncdist.collectives.error_exchange import (
    Call,
    attempt,
    exchange_headers,
    raise_first_error,
    run_and_raise,
    share_payload,
)
from asyncdist.collectives.groups import Group
from asyncdist.messaging.polling import resolve_waiter
from asyncdist.runtime.world import World
from asyncdist.tensors import serialization
from asyncdist.waits import WaitId, WaitKind

T = TypeVar("T")

#: How long the group of the work may take to be made. All members are there; one may be blocking its loop.
_GROUP_TIMEOUT_S: Final = 600.0


class JointWork(Generic[T]):
    """Represents one call of this rank.

    Args:
        world: of this rank.
        group: the members.
        operation: the name of the function that is called; one that headers can name.
    """

    def __init__(self, world: World, group: Group, operation: str) -> None:
        self._world = world
        self._group = group
        self._operation = operation
        self._engine = world.services.engine
        self._task: asyncio.Task[None] | None = None
        self._previous: JointWork[Any] | None = None
        self._begun: asyncio.Future[None] = self._engine.loop.create_future()
        self._outcome: asyncio.Future[T] = self._engine.loop.create_future()
        for future in (self._begun, self._outcome):
            future.add_done_callback(_mark_retrieved)
        self._is_given_up = False
        self._is_held = False
        self._released: asyncio.Future[None] | None = None  # done when it is held no more
        self._is_over = False

    async def begin(
        self, prepare: Callable[[], Coroutine[Any, Any, Any]], work: Callable[[Group, Any], Coroutine[Any, Any, T]]
    ) -> Any:
        """Wait until all members have come, and begin. Works of a group are done one after the other.

        Args:
            prepare: awaited on every member, before it comes; the others are told what it raises.
            work: is given the group of the work, and what ``prepare`` has returned on the first member.

        Returns:
            What ``prepare`` has returned on the first member.

        Raises:
            Exception: ``prepare`` raised it here.
            RemoteError: ``prepare`` raised on another member.
            AsyncdistError: the members cannot begin.
        """
        previous, self._group.lease.joint_work = self._group.lease.joint_work, self
        self._previous = previous if isinstance(previous, JointWork) else None

        async def in_turn() -> Any:
            earlier = self._previous
            if earlier is not None:
                what = WaitId(WaitKind.EARLIER_WORK, name=earlier._operation)
                await self._engine.until(lambda: earlier._is_over, what)
            return await prepare()

        outcome = await attempt(in_turn)
        group = self._group

        async def meet(collectives: Collectives) -> Any:
            headers = await exchange_headers(collectives, group, outcome, Call(self._operation))
            raise_first_error(headers)
            prepared = serialization.decode(await share_payload(collectives, group, outcome, headers[0]))
            self._task = self._world.spawn(self._run(work, prepared), name=self._operation)
            return prepared

        def on_met() -> None:
            if self._task is None:
                self._end()

        try:
            prepared = await run_and_raise(self._world.collectives, group, outcome, meet, on_end=on_met)
            assert self._task is not None, "all have come"
            await self._engine.settled_by(self._task, asyncio.shield(self._begun))
            return prepared
        except asyncio.CancelledError:
            await self._give_up()
            raise

    async def result(self) -> T:
        """Return what came of the work. **Cancellation**: the work goes on."""
        assert self._task is not None, "it has begun"
        return await self._engine.settled_by(self._task, asyncio.shield(self._outcome))

    async def result_or_give_up(self) -> T:
        """Return what came of the work. **Cancellation**: it is given up."""
        try:
            return await self.result()
        except asyncio.CancelledError:
            await self._give_up()
            raise

    @property
    def is_over(self) -> bool:
        """Whether the work has ended, well or not."""
        return self._is_over

    # -- for the work ------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise CancelledError if the caller has given up; from a helper's function, so that the others are told."""
        if self._is_given_up:
            raise asyncio.CancelledError(f"{self._operation} was cancelled")

    def hold(self) -> None:
        """Raise a cancellation in the caller only when the work has ended: it changes what is the caller's."""
        self._is_held = True
        self._released = self._engine.loop.create_future()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Raise a cancellation in the caller only after the body: it reads what is the caller's."""
        self.hold()
        try:
            yield
        finally:
            self._release()

    # -- the rest ----------------------------------------------------------------------------------------------------

    async def _new_group(self) -> Group:
        """Make a group of the same members. A group of one rank needs none: no call gets in between."""
        if self._group.size == 1:
            return self._group
        subject = f"group of joint work in group {self._group.number}"
        if subject not in self._group.lease.subjects:
            self._group.lease.subjects.append(subject)
        return await self._world.peers.groups.new_group(self._group.ranks, _GROUP_TIMEOUT_S, subject=subject)

    async def _run(self, work: Callable[[Group, Any], Coroutine[Any, Any, T]], prepared: Any) -> None:
        # Not a part of the exchange before, which is cancelled where a member is lost: the making of a group would
        # tell the others of that cancellation, and not of the loss.
        own = self._group
        try:
            own = await self._new_group()
            self._begun.set_result(None)
            self._outcome.set_result(await work(own, prepared))
        except Exception as error:
            self._settle(error)
        except BaseException as error:
            self._settle(None)
            if not (self._is_given_up and isinstance(error, asyncio.CancelledError)):
                raise
        finally:
            self._end()
            if own is not self._group:
                await own.free()

    def _settle(self, error: Exception | None) -> None:
        """End with an error, or as cancelled."""
        futures: tuple[asyncio.Future[Any], ...] = (self._begun, self._outcome)
        for future in futures:
            if future.done():
                continue
            if error is None:
                future.cancel()
            else:
                future.set_exception(error)

    def _release(self) -> None:
        self._is_held = False
        if self._released is not None:
            resolve_waiter(self._released, None)

    def _end(self) -> None:
        self._is_over = True
        self._release()
        lease, previous, self._previous = self._group.lease, self._previous, None
        if lease.joint_work is self:  # the one before goes on where this one has been given up before its turn
            lease.joint_work = None if previous is None or previous._is_over else previous
        self._engine.recheck()

    async def _give_up(self) -> None:
        self._is_given_up = True
        while self._is_held and not self._is_over:
            assert self._released is not None, "it is held"
            with contextlib.suppress(asyncio.CancelledError):  # the first one is raised
                await asyncio.wait([self._released])  # by this alone: the engine would raise where the job has failed


def _mark_retrieved(outcome: asyncio.Future[Any]) -> None:
    """Keep asyncio from reporting an error that no task awaits: a caller that has given up wants none."""
    if not outcome.cancelled():
        outcome.exception()
