"""Counts the messages of the program's own channels in a recording, and those that never arrived."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from typing import Final, TypeAlias

from asyncdist import tags
from asyncdist.recording.events import Event

#: A sequence of messages: source, destination and tag.
Line: TypeAlias = tuple[int, int, int]


class MessageCounts:
    """Counts sent and received messages. A restarted rank's counts are those of all its processes together."""

    def __init__(self) -> None:
        self.sent: Final = Counter[Line]()
        self.received: Final = Counter[Line]()

    def add(self, rank: int, event: Event) -> None:
        """Count an event of ``rank`` of the kind ``sent`` or ``received``, unless it belongs to a policy."""
        tag = int(event.get("tag"))
        if not tags.is_for_users(tag):
            return
        if event.kind == "sent":
            self.sent[rank, int(event.get("dest")), tag] += 1
        else:
            self.received[int(event.get("source")), rank, tag] += 1

    def lost(self, ranks: Container[int]) -> list[tuple[int, Line]]:
        """Return the numbers of messages that were sent to ``ranks`` but not received, largest first."""
        lost = ((count - self.received[line], line) for line, count in self.sent.items() if line[1] in ranks)
        return sorted((each for each in lost if each[0] > 0), reverse=True)
