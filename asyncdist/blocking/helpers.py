"""Makes blocking versions of :mod:`asyncdist`'s helpers, collectives and objects, with the same names and arguments."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from typing import Any, ParamSpec, TypeVar

from asyncdist.blocking.callers import current_caller, entered

P = ParamSpec("P")
T = TypeVar("T")


def blocking(fn: Callable[P, Awaitable[T]]) -> Callable[P, T]:
    """Return a blocking version of a coroutine function."""

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return current_caller(fn.__name__).call(fn, *args, **kwargs)

    call.__doc__ = f"Call :func:`asyncdist.{fn.__name__}`, block until it completes, return its result.\n\n{fn.__doc__}"
    return call


def blocking_context(
    fn: Callable[P, AbstractAsyncContextManager[T]],
) -> Callable[P, AbstractContextManager[T]]:
    """Return a blocking version of a function that returns an asynchronous context manager."""

    @functools.wraps(fn)
    @contextmanager
    def enter(*args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        with entered(fn(*args, **kwargs), current_caller(fn.__name__)) as given:
            yield given

    return enter


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
