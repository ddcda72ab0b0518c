"""Stores the messages that have arrived at a replayed rank until the rank may receive them."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable

from asyncdist.errors import RankLostError
from asyncdist.simulation.replay.log import Key
from asyncdist.transports.base import ANY_SOURCE


class Mailbox:
    """Queues the messages that have arrived at one replayed rank, by source and tag.

    ``ring`` is called with the tag of each arriving message, and ``listen`` with each lost rank.
    """

    def __init__(self) -> None:
        self.ring: Callable[[int], None] | None = None
        self.listen: Callable[[int], None] | None = None
        self.lost: set[int] = set()
        self._messages: defaultdict[Key, deque[tuple[int, bytes]]] = defaultdict(deque)
        self._numbers = itertools.count()

    def put(self, source: int, tag: int, data: bytes) -> None:
        """Add a message, and call ``ring`` with its tag."""
        self._messages[source, tag].append((next(self._numbers), data))
        if self.ring is not None:
            self.ring(tag)

    def pop(self, key: Key) -> bytes:
        """Remove and return the oldest message with this source and tag."""
        return self._messages[key].popleft()[1]

    def count(self, key: Key) -> int:
        """Return the number of messages with this source and tag."""
        return len(self._messages[key])

    def first(self, source: int, tag: int) -> Key | None:
        """Return the key of the oldest message that matches a receive, or None."""
        if source != ANY_SOURCE:
            return (source, tag) if self._messages[source, tag] else None
        waiting = ((queue[0][0], key) for key, queue in self._messages.items() if key[1] == tag and queue)
        return min(waiting, default=(0, None))[1]

    def lose(self, rank: int) -> None:
        """Record that ``rank`` is lost, and call ``listen``."""
        self.lost.add(rank)
        if self.listen is not None:
            self.listen(rank)


def gone(rank: int) -> RankLostError:
    """Return the error for an operation that waits for a lost rank."""
    return RankLostError(f"rank {rank} is gone: its process has ended", rank=rank)
