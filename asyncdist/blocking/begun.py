"""Represents blocking calls that have started, and their results."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Generator
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar, cast

T = TypeVar("T")


@dataclass(slots=True)
class Outcome(Generic[T]):
    """Holds the value that a call has returned, or the error that it has raised."""

    value: T | None = None
    error: BaseException | None = None

    def result(self) -> T:
        """Return the value, or raise the error."""
        if self.error is not None:
            raise self.error
        return cast(T, self.value)


async def outcome_of(made: Awaitable[T]) -> Outcome[T]:
    """Await ``made``, and return its value or its error."""
    try:
        return Outcome(await made)
    except BaseException as error:
        return Outcome(error=error)


async def called(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``fn``, and return its value. If the value is awaitable, await it and return the result."""
    made = fn(*args, **kwargs)
    return await made if inspect.isawaitable(made) else made


async def awaited(made: Awaitable[T]) -> T:
    """Return the value of ``made``, for callers that need a coroutine instead of another awaitable."""
    return await made


class BegunCall:
    """An awaitable that continues a coroutine which was started outside any event loop.

    Reports about waiting tasks inspect the coroutine through ``cr_frame`` and ``cr_await``.

    Args:
        coroutine: Coroutine after the first ``send(None)``.
        awaited: Future for which the coroutine then waited, or None if it only yielded to other tasks, which have run.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any], awaited: Any) -> None:
        self.outcomes: list[Outcome[Any]] = []
        self.is_cancelled = False
        self._coroutine: Any = coroutine
        self._awaited = awaited

    cr_frame = property(lambda self: self._coroutine.cr_frame)
    cr_await = property(lambda self: self._coroutine.cr_await)

    def __await__(self) -> Generator[Any, Any, Any]:
        return cast(Generator[Any, Any, Any], self)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return self.send(None)

    def send(self, value: Any) -> Any:
        """Continue the coroutine, and return the future for which it waits next."""
        awaited, self._awaited = self._awaited, None
        if self.is_cancelled:  # as in asyncio, cancel the awaited future first
            self.is_cancelled = False
            # An unstarted coroutine cannot handle the cancellation, so it is closed instead.
            if inspect.getcoroutinestate(self._coroutine) == inspect.CORO_CREATED:
                self._coroutine.close()
                raise asyncio.CancelledError
            if awaited is None or not awaited.cancel():
                return self._coroutine.throw(asyncio.CancelledError())
        return awaited if awaited is not None else self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        """Raise ``error`` inside the coroutine, at the point where it is suspended."""
        self._awaited = None
        return self._coroutine.throw(*error)

    def close(self) -> None:
        """Close the wrapped coroutine."""
        self._coroutine.close()


class Pause(asyncio.Future[None]):
    """A future that main awaits between two blocking calls. Cancelling it calls ``on_cancel`` instead.

    If the future were cancelled, main would continue only in the loop's next iteration, too late for the call that is
    ending. ``on_cancel`` returns whether to cancel the future anyway.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_cancel: Callable[[], bool]) -> None:
        super().__init__(loop=loop)
        self._on_cancel = on_cancel

    def cancel(self, msg: Any = None) -> bool:
        """Call ``on_cancel``. Cancel this future only if that returns true, or if the future is done."""
        if self.done() or self._on_cancel():
            return super().cancel(msg)
        return True
