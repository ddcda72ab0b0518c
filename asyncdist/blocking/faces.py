"""Wraps objects with coroutine methods, such as channels and replay buffer clients, so that these methods block."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any

from asyncdist.blocking.callers import current_caller, entered


class Face:
    """Wraps the object ``awaited`` so that its coroutine methods block."""

    def __init__(self, awaited: Any) -> None:
        self.awaited = awaited
        self._caller = current_caller("blocking.Face")

    def __repr__(self) -> str:
        return f"<{self.awaited!r}, blocking>"

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.awaited, name)
        return functools.partial(self._caller.call, value) if callable(value) else value


@contextmanager
def context(awaited: AbstractAsyncContextManager[Any]) -> Iterator[Any]:
    """Enter an asynchronous context manager, and yield its value as a :class:`Face`, whose methods block.

    ::

        with ad.blocking.context(ReplayBuffer(server)) as buffer:
            buffer.add(states)
    """
    with entered(awaited, current_caller("context")) as given:
        yield Face(given)
