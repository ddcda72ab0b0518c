"""Defines simulated messages, and queues messages that arrive before a matching receive is posted."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from typing import Final

from asyncdist.errors import AsyncdistError
from asyncdist.transports.base import ANY_SOURCE


class Message:
    """Represents a simulated message, which is also the sender's send request."""

    __slots__ = (
        "data",
        "dest",
        "dest_incarnation",
        "done",
        "eager",
        "error",
        "left_at",
        "nbytes",
        "source",
        "source_incarnation",
        "tag",
    )

    cancelled: Final = False

    def __init__(self, data: bytes | bytearray | memoryview, nbytes: int, source: int, dest: int, tag: int) -> None:
        self.data = data
        self.nbytes = nbytes
        self.source = source
        self.dest = dest
        self.tag = tag
        self.eager = False
        self.done = False
        self.left_at = 0.0
        self.source_incarnation = self.dest_incarnation = 0
        self.error: AsyncdistError | None = None

    def test(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.done

    def cancel(self) -> None:
        """Do nothing, because a sent message cannot be withdrawn."""


class ArrivalQueue:
    """Queues messages with one tag that arrived before a matching receive was posted."""

    def __init__(self) -> None:
        self._by_source: dict[int, deque[Message]] = {}
        self._sources: list[int] = []  # ranks with queued messages, in any order

    def is_empty(self) -> bool:
        return not self._sources

    def add(self, message: Message) -> None:
        """Append a message to the queue of its source."""
        of_source = self._by_source.setdefault(message.source, deque())
        if not of_source:
            self._sources.append(message.source)
        of_source.append(message)

    def of(self, source: int) -> Iterable[Message]:
        """Return the queued messages from ``source``, oldest first."""
        return self._by_source.get(source, ())

    def drop(self, source: int) -> Iterable[Message]:
        """Remove and return all messages from ``source``."""
        messages = self._by_source.pop(source, None)
        if messages:
            self._sources.remove(source)
        return messages or ()

    def take(self, wanted: int, rng: random.Random) -> Message | None:
        """Remove and return the oldest message from ``wanted``, or from a random source if ``wanted`` is a wildcard."""
        sources = self._sources
        if wanted != ANY_SOURCE:
            if not self._by_source.get(wanted):
                return None
            position = sources.index(wanted)
        else:
            position = int(rng.random() * len(sources)) if len(sources) > 1 else 0
        of_source = self._by_source[sources[position]]
        message = of_source.popleft()
        if not of_source:
            sources[position] = sources[-1]
            sources.pop()
        return message
