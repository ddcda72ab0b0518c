"""Runs several collective calls as one unit that all members complete, even if the caller is cancelled on some rank.

Without joint work, a rank whose caller is cancelled between two calls would omit the second call. The other members
would wait for it forever. With joint work, the members first take part in one exchange in the caller's group. A
separate task then completes the work, in a group that no other call uses.

**Cancellation** of the caller is recorded. At the work's next :meth:`JointWork.check` on this rank, it becomes a
RemoteError for the other members. After the last check, the work is completed on all ranks.
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
from asyncdist.errors import AsyncdistError
from asyncdist.messaging.polling import resolve_waiter
from asyncdist.runtime.world import World
from asyncdist.tensors import serialization
from asyncdist.waits import WaitId, WaitKind

T = TypeVar("T")

#: Seconds to wait for the work's group. All members have joined the work, but a member may block its event loop.
_GROUP_TIMEOUT_S: Final = 600.0
#: Seconds that functions wait for the group of the surviving ranks, if they use this group by default.
SURVIVORS_TIMEOUT_S: Final = 60.0


class JointWork(Generic[T]):
    """Runs this rank's part of a group's joint work. ``operation`` is the name of the called function, for errors.

    Attributes:
        is_over: Whether the joint work has ended, successfully or not.
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
            # Prevents asyncio from logging an exception that a cancelled caller never retrieves.
            future.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._is_abandoned = False
        self._release: asyncio.Future[None] | None = None  # completed when a delayed cancellation may be raised
        self.is_over = False

    async def begin(
        self,
        prepare: Callable[[], Coroutine[Any, Any, Any]],
        work: Callable[[Group, Any], Coroutine[Any, Any, T]],
        *,
        arrive: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> Any:
        """Start the work when all members have joined and earlier joint work has ended. Return the prepared value.

        Args:
            prepare: Coroutine function that every member awaits before it joins. Its exception is raised unchanged on
                this rank, and as RemoteError on the others.
            work: Coroutine function that does the work. It gets a group and the first member's result of ``prepare``.
            arrive: Coroutine function that every member awaits first, or None. ``prepare`` is then called when
                ``arrive`` has returned on all members, and not if this rank's caller was cancelled. An exception of
                ``arrive`` is raised at once on this rank, because other members may never call the work, and as
                RemoteError on the others.
        """
        previous, self._group.lease.joint_work = self._group.lease.joint_work, self
        self._previous = previous if isinstance(previous, JointWork) else None

        async def in_turn() -> Any:
            if arrive is not None:
                await arrive()
            if (earlier := self._previous) is not None:
                what = WaitId(WaitKind.EARLIER_WORK, name=earlier._operation)
                await self._engine.until(lambda: earlier.is_over, what)
            return await prepare() if arrive is None else None

        async def prepare_after_all() -> Any:
            self.check()
            return await prepare()

        outcome = first = await attempt(in_turn)
        group, call = self._group, Call(self._operation)

        async def begin_work(collectives: Collectives) -> Any:
            nonlocal outcome
            if arrive is not None:
                raise_first_error(await exchange_headers(collectives, group, first, call))
                result = await attempt(prepare_after_all)
                task = asyncio.current_task()
                if task is not None and task.cancelling():  # a loss has ended these exchanges
                    raise asyncio.CancelledError
                outcome = result
            headers = await exchange_headers(collectives, group, outcome, call)
            raise_first_error(headers)
            prepared = serialization.decode(await share_payload(collectives, group, outcome, headers[0]))
            self._task = self._world.spawn(self._run(work, prepared), name=self._operation)
            return prepared

        try:
            prepared = await run_and_raise(
                self._world.collectives,
                group,
                first,
                begin_work,
                on_end=self._end_unless_begun,
                raises_at_once=arrive is not None,
            )
            assert self._task is not None, "all have come"
            await self._engine.settled_by(self._task, asyncio.shield(self._begun))
            return prepared
        except asyncio.CancelledError:
            await self._abandon()
            raise
        except AsyncdistError:
            if outcome.error is None:
                raise
            raise outcome.error from None  # raised in `prepare` on this rank

    def _end_unless_begun(self) -> None:
        if self._task is None:
            self._end()

    async def result(self) -> T:
        """Return the result of the work. **Cancellation**: the work continues."""
        assert self._task is not None, "it has begun"
        return await self._engine.settled_by(self._task, asyncio.shield(self._outcome))

    async def result_or_abandon(self) -> T:
        """Return the result of the work. **Cancellation**: the work is abandoned if it has not made its last check."""
        try:
            return await self.result()
        except asyncio.CancelledError:
            await self._abandon()
            raise

    def check(self) -> None:
        """Raise CancelledError if the caller was cancelled. Inside a collective call, this notifies the other ranks."""
        if self._is_abandoned:
            raise asyncio.CancelledError(f"{self._operation} was cancelled")

    def delay_cancellation(self) -> None:
        """Delay a cancellation of the caller until the end of the work, which changes objects of the caller."""
        self._release = self._engine.loop.create_future()

    @contextlib.contextmanager
    def delayed_cancellation(self) -> Iterator[None]:
        """Delay a cancellation of the caller until the end of the context, which reads objects of the caller."""
        self.delay_cancellation()
        try:
            yield
        finally:
            self._raise_delayed()

    async def _new_group(self) -> Group:
        """Return a new group of the same members, or the group itself if it has one rank."""
        if self._group.size == 1:
            return self._group
        subject = f"group of joint work in group {self._group.number}"
        if subject not in self._group.lease.subjects:
            self._group.lease.subjects.append(subject)
        return await self._world.peers.groups.new_group(self._group.ranks, _GROUP_TIMEOUT_S, subject=subject)

    async def _run(self, work: Callable[[Group, Any], Coroutine[Any, Any, T]], prepared: Any) -> None:
        # The group is not made in the exchange of ``begin``, because the other members would then report the loss of
        # this rank as a cancellation.
        own = self._group
        try:
            own = await self._new_group()
            self._begun.set_result(None)
            self._outcome.set_result(await work(own, prepared))
        except Exception as error:
            self._settle(error)
        except BaseException as error:
            self._settle(None)
            if not (self._is_abandoned and isinstance(error, asyncio.CancelledError)):
                raise
        finally:
            self._end()
            if own is not self._group:
                await own.free()

    def _settle(self, error: Exception | None) -> None:
        futures: tuple[asyncio.Future[Any], ...] = (self._begun, self._outcome)
        for future in futures:
            if future.done():
                continue
            if error is None:
                future.cancel()
            else:
                future.set_exception(error)

    def _raise_delayed(self) -> None:
        if self._release is not None:
            resolve_waiter(self._release, None)

    def _end(self) -> None:
        self.is_over = True
        self._raise_delayed()
        lease, previous, self._previous = self._group.lease, self._previous, None
        if lease.joint_work is self:  # After an early abandonment, the previous work may still be running.
            lease.joint_work = None if previous is None or previous.is_over else previous
        self._engine.recheck()

    async def _abandon(self) -> None:
        self._is_abandoned = True
        while self._release is not None and not self._release.done():
            with contextlib.suppress(asyncio.CancelledError):  # only the first cancellation is raised
                await asyncio.wait([self._release])  # The engine's own wait would raise if the job has failed.
