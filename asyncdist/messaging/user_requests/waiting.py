"""Waits for requests of the user's program, which the engine tests in its polling passes."""

from __future__ import annotations

import asyncio
import contextlib
import types
from collections import Counter
from collections.abc import Coroutine, Generator, Sequence
from typing import Any, Final

from asyncdist import validation
from asyncdist.errors import ClosedError, LocalProtocolError
from asyncdist.messaging.engine import FAIRNESS_PERIOD, Engine
from asyncdist.messaging.user_requests.operations import Operation, is_mpi_request, operation_of

#: Requests that had not completed when their waits ended. Their buffers must stay in memory until the process ends,
#: because MPI or a thread may still use them.
_NEVER_COMPLETED: Final[list[object]] = []


class _Awaited:
    """A request of the user's program, stored from the first wait for it until a wait returns its result."""

    __slots__ = ("is_complete", "operation", "request", "waiters")

    def __init__(self, request: object, operation: Operation) -> None:
        self.request = request
        self.operation = operation
        self.is_complete = False
        self.waiters: list[asyncio.Future[None]] = []


class RequestWaiter:
    """Lets tasks wait for requests of the user's program.

    **Ownership**: from the first wait for a request until a wait has returned its result, this object stores the
    request, and the engine tests it.

    Args:
        owner: Name of the object that the user closes, for error messages.
        drives: Whether the engine serves only this object, and runs only while requests must be tested repeatedly.
    """

    def __init__(self, engine: Engine, owner: str, *, drives: bool = False) -> None:
        self._engine = engine
        self._owner = owner
        self._drives = drives
        self._awaited: dict[int, _Awaited] = {}
        self._polled_count = 0  # number of outstanding requests that the engine must test
        self._since_yield_count = 0
        self._is_closed = False

    def wait(self, request: Any, status: Any = None) -> Coroutine[Any, Any, Any]:
        """Wait until a request, or each request of a list, has completed, and return the results.

        **Cancellation**: the requests remain stored. The next wait for one of them returns its result.
        """
        # The coroutine is returned rather than awaited, because each additional coroutine would cost 0.1 us.
        return (self._wait_for_all if isinstance(request, (list, tuple)) else self._wait_for)(request, status)

    async def _wait_for_all(self, request: Sequence[Any], status: Any) -> list[Any]:
        await self._begin()
        statuses = [None] * len(request) if status is None else status
        if not isinstance(statuses, (list, tuple)) or len(statuses) != len(request):
            validation.refuse("status", status, f"None or a list of {len(request)} items", TypeError)
        all_awaited = [self._await(each, to_fill) for each, to_fill in zip(request, statuses, strict=True)]
        for awaited in all_awaited:
            while not awaited.is_complete:
                await self._park((awaited,))
        for awaited in all_awaited:
            if awaited.operation.error is not None:
                self._take(awaited, None)  # This raises the error. The other requests remain stored.
        return [self._take(each, to_fill) for each, to_fill in zip(all_awaited, statuses, strict=True)]

    async def waitany(self, requests: Sequence[Any], status: Any = None) -> tuple[int, Any]:
        """Wait until a request of the list has completed, and return its index and its result.

        **Cancellation**: as for :meth:`wait`.
        """
        await self._begin()
        if not isinstance(requests, (list, tuple)) or not requests:
            validation.refuse("requests", requests, "a list of one or more requests", TypeError)
        # Look for results first, because an inactive persistent request would raise an error below.
        for i, request in enumerate(requests):
            found = self._find(request, status)
            if found is not None and found.is_complete:
                return i, self._take(found, status)
        # MPI sets the handle of a completed request to null, so a null handle may belong to a request that is awaited.
        usable = [i for i, each in enumerate(requests) if id(each) in self._awaited or not _is_null(each)] or [0]
        awaited = {i: self._await(requests[i], status) for i in usable}
        while True:
            for i, each in awaited.items():
                if each.is_complete:
                    return i, self._take(each, status)
            await self._park(tuple(awaited.values()))

    def close(self) -> str | None:
        """Stop testing requests. Describe the requests that have not completed, or whose results no wait has returned.

        The requests that have not completed stay in memory until the process ends.
        """
        self._is_closed = True
        left = list(self._awaited.values())
        unfinished = [each for each in left if not each.is_complete]
        for each in unfinished:
            self._engine.disown(each.operation)
        _NEVER_COMPLETED.extend(unfinished)
        self._awaited.clear()
        names = Counter(
            f"{each.operation.what}{', whose result no wait has returned' if each.is_complete else ''}" for each in left
        )
        return ", ".join(f"{count} x {name}" for name, count in names.items()) or None

    async def _wait_for(self, request: object, status: Any) -> Any:
        await self._begin()
        awaited = self._find(request, status)
        if awaited is None:
            operation = operation_of(request, status, self._ring)
            if operation.test_first():
                return operation.result(status)
            awaited = self._watch(request, operation)
        while not awaited.is_complete:
            await self._park((awaited,))
        return self._take(awaited, status)

    @types.coroutine
    def _begin(self) -> Generator[None, None, None]:
        """Yield to other tasks once in many calls. Raise an error if the caller may not wait for requests."""
        self._since_yield_count += 1
        if self._since_yield_count >= FAIRNESS_PERIOD:
            self._since_yield_count = 0
            yield
        if self._is_closed:
            raise ClosedError(f"{self._owner} is closed: wait for requests while it is open")
        if asyncio.get_running_loop() is not self._engine.loop:
            raise LocalProtocolError(f"{self._owner} belongs to another event loop: wait on the loop that opened it")

    def _await(self, request: object, status: Any) -> _Awaited:
        return self._find(request, status) or self._watch(request, operation_of(request, status, self._ring))

    def _find(self, request: object, status: Any) -> _Awaited | None:
        """Return the entry of a request whose result no wait has returned yet, or None for a new request."""
        found = self._awaited.get(id(request))
        if found is None or (found.is_complete and found.operation.is_outdated()):
            return None
        found.operation.check_status(status)
        return found

    def _watch(self, request: object, operation: Operation) -> _Awaited:
        awaited = self._awaited[id(request)] = _Awaited(request, operation)
        operation.keep_status()
        self._polled_count += not operation.rings
        if self._drives and not operation.rings:
            self._engine.start()
        self._engine.watch(operation, operation.what, lambda _: self._on_done(awaited))
        return awaited

    def _on_done(self, awaited: _Awaited) -> None:
        awaited.is_complete = True
        self._polled_count -= not awaited.operation.rings
        if self._drives and not self._polled_count:
            self._engine.stop()
        for waiter in awaited.waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _ring(self) -> None:
        """Make the loop test the requests. Called by threads."""
        with contextlib.suppress(RuntimeError):  # Raised if the loop is closed.
            self._engine.loop.call_soon_threadsafe(self._engine.poll if self._drives else self._engine.ring)

    async def _park(self, awaited: Sequence[_Awaited]) -> None:
        self._since_yield_count = 0
        waiter: asyncio.Future[None] = asyncio.Future(loop=self._engine.loop)
        for each in awaited:
            each.waiters.append(waiter)
        try:
            await self._engine.park(waiter, awaited[0].operation.what, is_of_request=True)
        finally:
            for each in awaited:
                each.waiters.remove(waiter)

    def _take(self, awaited: _Awaited, status: Any) -> Any:
        """Remove the entry of a completed request, and return the request's result or raise its error."""
        key = id(awaited.request)
        if self._awaited.get(key) is awaited:  # The entry differs if the program has started the request again.
            del self._awaited[key]
        return awaited.operation.result(status)


def _is_null(request: Any) -> bool:
    return is_mpi_request(request) and not request


def refuse_in_simulation(call: str) -> None:
    """Raise LocalProtocolError for ``call``, which a simulated rank has made."""
    raise LocalProtocolError(
        f"{call} cannot be used in a simulation or a replay, because requests of mpi4py and torch complete in real "
        "time: send messages on a channel (world.channel) there"
    )
