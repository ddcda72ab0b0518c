"""Holds what a blocking call comes to, and a call that has been begun beside the loop, until main goes on with it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Generator
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar, cast

T = TypeVar("T")


@dataclass(slots=True)
class Outcome(Generic[T]):
    """Holds what came of a call: a value, or an error."""

    value: T | None = None
    error: BaseException | None = None

    def result(self) -> T:
        """Return the value, or raise the error."""
        if self.error is not None:
            raise self.error
        return cast(T, self.value)


async def outcome_of(made: Awaitable[T]) -> Outcome[T]:
    """Await something, and return what comes of it."""
    try:
        return Outcome(await made)
    except BaseException as error:
        return Outcome(error=error)


async def called(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``fn``, await what it returns where that can be awaited, and return its value."""
    made = fn(*args, **kwargs)
    return await made if inspect.isawaitable(made) else made


async def awaited(made: Awaitable[T]) -> T:
    """Make a coroutine of what can be awaited."""
    return await made


class BegunCall:
    """Goes on, where it is awaited, with a coroutine that has been begun outside of any loop.

    It looks like that coroutine to what reports where a task waits.

    Args:
        coroutine: has been sent its first None.
        awaited: the future that it has yielded then; None if it let others run, which they have done meanwhile.

    Attributes:
        outcomes: where its outcome is put.
        is_cancelled: whether it is cancelled, rather than sent None, when it goes on.
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
        """Go on, as a coroutine does: return what it waits for."""
        awaited, self._awaited = self._awaited, None
        if self.is_cancelled:  # as asyncio does it: what is awaited is cancelled first, if it can be
            self.is_cancelled = False
            if inspect.getcoroutinestate(self._coroutine) == inspect.CORO_CREATED:  # it would not catch what is thrown
                self._coroutine.close()
                raise asyncio.CancelledError
            if awaited is None or not awaited.cancel():
                return self._coroutine.throw(asyncio.CancelledError())
        return awaited if awaited is not None else self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        """Raise ``error`` where it waits."""
        self._awaited = None
        return self._coroutine.throw(*error)

    def close(self) -> None:
        """End it where it waits."""
        self._coroutine.close()


class Pause(asyncio.Future[None]):
    """Is what main waits for between two calls. A cancellation of main meanwhile is told at once, and wakes nobody.

    If it woke main, that would be in the next turn of the loop: the call that is ending could not see it, and the next
    one could not be begun.

    Args:
        loop: main's.
        on_cancel: is called; returns whether main is to be cancelled nevertheless.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_cancel: Callable[[], bool]) -> None:
        super().__init__(loop=loop)
        self._on_cancel = on_cancel

    def cancel(self, msg: Any = None) -> bool:
        """Tell of the cancellation, unless main is to go on already."""
        if self.done() or self._on_cancel():
            return super().cancel(msg)
        return True
