"""Wraps objects such as channels and replay buffer clients, so that their coroutine methods block."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, ParamSpec

from asyncdist.blocking.callers import current_caller, entered
from asyncdist.blocking.helpers import blocking

P = ParamSpec("P")


class Face:
    """Wraps the object ``awaited`` so that its coroutine methods block."""

    def __init__(self, awaited: Any) -> None:
        self.awaited = awaited
        self._caller = current_caller("blocking.Face")

    def __repr__(self) -> str:
        return f"<{self.awaited!r}, blocking>"

    def __getattr__(self, name: str) -> Any:
        if name == "awaited":  # getattr would recurse if the attribute is not set yet, as in a copy
            raise AttributeError(name)
        value = getattr(self.awaited, name)
        return functools.partial(self._caller.call, value) if callable(value) else value


def with_wrapped_result(fn: Callable[P, Awaitable[Any]]) -> Callable[P, Any]:
    """Return a blocking version of ``fn``, which wraps the value of ``fn`` so that its coroutine methods block."""
    call = blocking(fn)

    @functools.wraps(call)
    def call_with_wrapped_result(*args: P.args, **kwargs: P.kwargs) -> Face:
        return Face(call(*args, **kwargs))

    return call_with_wrapped_result


@contextmanager
def context(awaited: AbstractAsyncContextManager[Any]) -> Iterator[Any]:
    """Enter an asynchronous context manager, and yield its value wrapped so that its coroutine methods block.

    ::

        with ad.blocking.context(ReplayBuffer(server)) as buffer:
            buffer.add(states)
    """
    with entered(awaited, current_caller("context")) as given:
        yield Face(given)
