"""Waits for requests of the user's program, which the engine tests in its passes."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from asyncdist import validation
from asyncdist.errors import LocalProtocolError
from asyncdist.messaging.engine import Engine
from asyncdist.messaging.user_requests.operations import Operation, is_mpi_request, operation_of
from asyncdist.waits import WaitId, WaitKind
from asyncdist.wording import plural

#: Requests that had not completed when their waits were given up. MPI or a thread may still use their buffers, which
#: must therefore stay in memory until the process ends.
_NEVER_COMPLETED: Final[list[object]] = []


class _Awaited:
    """A request, from the first wait for it until a wait has returned its result."""

    __slots__ = ("is_complete", "operation", "request", "waiters", "what")

    def __init__(self, request: object, operation: Operation) -> None:
        self.request = request
        self.operation = operation
        self.what = WaitId(WaitKind.USER_REQUEST, name=operation.name)
        self.is_complete = False
        self.waiters: list[asyncio.Future[None]] = []


class RequestWaiter:
    """Lets tasks wait for requests of the user's program.

    **Ownership**: from the first wait for a request until a wait has returned its result, this object stores the
    request, and the engine tests it even if no task waits for it.

    Args:
        engine: Engine that tests the requests.
        drives: Whether the engine runs only while requests are outstanding.
    """

    def __init__(self, engine: Engine, *, drives: bool = False) -> None:
        self._engine = engine
        self._drives = drives
        self._awaited: dict[int, _Awaited] = {}
        self._outstanding_count = 0

    async def wait(self, request: Any, status: Any = None) -> Any:
        """Wait until a request, or each request of a list, has completed; return the results.

        **Cancellation**: the requests stay stored. The next wait for one of them returns its result.
        """
        if not isinstance(request, (list, tuple)):
            awaited = self._await(request)
            while not awaited.is_complete:
                await self._park((awaited,))
            return self._take(awaited, status)
        statuses = [None] * len(request) if status is None else status
        if not isinstance(statuses, (list, tuple)) or len(statuses) != len(request):
            validation.refuse("status", status, f"None or a list of {plural(len(request), 'status')}", TypeError)
        all_awaited = [self._await(each) for each in request]
        for awaited in all_awaited:
            while not awaited.is_complete:
                await self._park((awaited,))
        return self._take_all(all_awaited, statuses)

    async def waitany(self, requests: Sequence[Any], status: Any = None) -> tuple[int, Any]:
        """Wait until a request of the list has completed; return its index and its result.

        **Cancellation**: as for :meth:`wait`.
        """
        if not isinstance(requests, (list, tuple)) or not requests:
            validation.refuse("requests", requests, "a list of one or more requests", TypeError)
        usable = [i for i, each in enumerate(requests) if not _is_null(each)] or [0]
        awaited = {i: self._await(requests[i]) for i in usable}
        while True:
            for i, each in awaited.items():
                if each.is_complete:
                    return i, self._take(each, status)
            await self._park(tuple(awaited.values()))

    def close(self) -> str | None:
        """Stop testing all requests; describe those that have not completed, or whose result no wait has returned.

        The requests that have not completed stay in memory until the process ends.
        """
        left = list(self._awaited.values())
        unfinished = [each for each in left if not each.is_complete]
        for each in unfinished:
            self._engine.disown(each.operation)
        _NEVER_COMPLETED.extend(unfinished)
        self._awaited.clear()
        names = Counter(
            each.operation.name + (", completed after its wait was cancelled" if each.is_complete else "")
            for each in left
        )
        return ", ".join(f"{count} x {name}" for name, count in names.items()) or None

    def _await(self, request: object) -> _Awaited:
        """Return the entry of ``request``; the engine tests a new request until it has completed."""
        found = self._awaited.get(id(request))
        if found is not None and not (found.is_complete and found.operation.is_outdated()):
            return found
        awaited = _Awaited(request, operation_of(request, self._ring))
        self._awaited[id(request)] = awaited
        self._outstanding_count += 1
        if self._drives:
            self._engine.start()
        self._engine.watch(awaited.operation, awaited.what, lambda _: self._on_done(awaited))
        return awaited

    def _on_done(self, awaited: _Awaited) -> None:
        awaited.is_complete = True
        self._outstanding_count -= 1
        if self._drives and not self._outstanding_count:
            self._engine.stop()
        for waiter in awaited.waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _ring(self) -> None:
        """Make the loop test the requests; called by threads."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._engine.loop.call_soon_threadsafe(self._engine.ring)

    async def _park(self, awaited: Sequence[_Awaited]) -> None:
        """Wait until one of the requests completes."""
        waiter: asyncio.Future[None] = asyncio.Future(loop=self._engine.loop)
        for each in awaited:
            each.waiters.append(waiter)
        try:
            await self._engine.park(waiter, awaited[0].what, is_of_request=True)
        finally:
            for each in awaited:
                each.waiters.remove(waiter)

    def _take(self, awaited: _Awaited, status: Any) -> Any:
        """Return the result of a completed request, or raise its error."""
        self._awaited.pop(id(awaited.request), None)
        if awaited.operation.error is not None:
            raise awaited.operation.error
        if status is not None:
            awaited.operation.fill(status)
        return awaited.operation.value

    def _take_all(self, all_awaited: Sequence[_Awaited], statuses: Sequence[Any]) -> list[Any]:
        """Return the results of completed requests. If some have failed, raise the error of the first one."""
        failed = [each for each in all_awaited if each.operation.error is not None]
        for each in all_awaited:
            self._awaited.pop(id(each.request), None)
        if failed:
            return [self._take(failed[0], None)]
        return [self._take(each, status) for each, status in zip(all_awaited, statuses, strict=True)]


def _is_null(request: Any) -> bool:
    return is_mpi_request(request) and not request


def refuse_in_simulation(call: str) -> None:
    """Raise LocalProtocolError for ``call``, which a simulated rank has made."""
    raise LocalProtocolError(
        f"{call} cannot be used in a simulation or a replay, because requests of mpi4py and torch complete in real "
        "time: send messages on a channel (world.channel) there"
    )
