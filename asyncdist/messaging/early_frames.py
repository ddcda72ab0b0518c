"""Keeps a bounded number of messages for channels that are not open yet, and warns if they stay unopened."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

from asyncdist.messaging import wire
from asyncdist.wording import ranks_in_words

logger = logging.getLogger("asyncdist.messaging.early_frames")

#: Maximum number of frames kept for unopened channels, per tag.
EARLY_FRAME_COUNT_MAX: Final = 1024
#: Seconds until a warning about kept messages is logged, if a task waits on a different channel of the tag.
EARLY_PATIENCE_S: Final = 5.0


class EarlyFrames:
    """Stores the messages of one tag that arrive before this rank has opened their channel.

    Attributes:
        counts: Number of stored messages of each sender.
    """

    def __init__(self, tag: int, loop: asyncio.AbstractEventLoop, awaited: Callable[[], list[str]]) -> None:
        self._tag = tag
        self._loop = loop
        self._awaited = awaited
        self._frames: list[tuple[int, wire.FrameReader]] = []
        self.counts: dict[int, int] = {}
        self._warned_of: set[int] = set()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def is_full(self) -> bool:
        """Whether the number of stored messages has reached its maximum."""
        return len(self._frames) >= EARLY_FRAME_COUNT_MAX

    def keep(self, source: int, frame: wire.FrameReader) -> None:
        """Store a copy of a received message."""
        self._frames.append((source, frame.copy()))
        self.counts[source] = self.counts.get(source, 0) + 1
        self.watch()

    def take_all(self) -> Sequence[tuple[int, wire.FrameReader]]:
        """Remove and return the stored messages with their senders, in order of arrival."""
        if not self._frames:
            return ()
        frames, self._frames, self.counts = self._frames, [], {}
        return frames

    def forget(self, source: int) -> int:
        """Drop the messages from rank ``source``, and return their number."""
        kept = [(rank, frame) for rank, frame in self._frames if rank != source]
        count = len(self._frames) - len(kept)
        self._frames = kept
        self.counts.pop(source, None)
        self._warned_of.discard(source)
        return count

    def watch(self) -> None:
        """Schedule a warning about messages for unopened channels if a task waits on another channel of this tag."""
        is_news = self._timer is None and not self.counts.keys() <= self._warned_of
        if is_news and self._awaited():
            self._timer = self._loop.call_later(EARLY_PATIENCE_S, self._warn)

    def _warn(self) -> None:
        self._timer = None
        awaited = self._awaited()
        if awaited and not self.counts.keys() <= self._warned_of:
            self._warned_of |= self.counts.keys()
            logger.warning("awaiting %s for %g s: %s", " and ".join(awaited), EARLY_PATIENCE_S, self.describe())

    def describe(self) -> str:
        """Describe the messages that wait for unopened channels. Return "" if there are none."""
        count, ranks = len(self._frames), sorted(self.counts)
        if not count:
            return ""
        noun, verb = ("message", "waits") if count == 1 else ("messages", "wait")
        who = ranks_in_words(ranks)
        return (
            f"{count} {noun} on tag {self._tag} {verb} for a channel that this rank has not opened, from {who} "
            "(ranks share a channel if tag, message type or name, and group are equal, and it was opened equally often)"
        )

    def close(self) -> None:
        """Cancel the scheduled warning."""
        if self._timer is not None:
            self._timer.cancel()
