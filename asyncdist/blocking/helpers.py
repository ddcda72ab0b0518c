"""Makes blocking versions of :mod:`asyncdist`'s helpers and collectives, with the same names and arguments."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from typing import ParamSpec, TypeVar

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
