"""Keeps frames for channels that this rank has not opened yet, within a bound, and says in time that they wait."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Final

from asyncdist.messaging import wire

logger = logging.getLogger("asyncdist.messaging.early_frames")

#: Frames kept for scopes that are not open yet, per tag.
EARLY_FRAME_COUNT_MAX: Final = 1024
#: How long they may wait while somebody awaits another channel of their tag, before that is told.
EARLY_PATIENCE_S: Final = 5.0


class EarlyFrames:
    """Keeps one tag's frames for scopes that are not open.

    Args:
        tag: of the frames.
        loop: runs the timer.
        awaited: returns the names of the channels of this tag that tasks of the user await.
    """

    def __init__(self, tag: int, loop: asyncio.AbstractEventLoop, awaited: Callable[[], list[str]]) -> None:
        self._tag = tag
        self._loop = loop
        self._awaited = awaited
        self._frames: deque[tuple[int, wire.FrameReader]] = deque()
        self._sources: set[int] = set()
        self._told_of: set[int] = set()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def is_full(self) -> bool:
        """Whether as many frames wait as may."""
        return len(self._frames) >= EARLY_FRAME_COUNT_MAX

    def keep(self, source: int, frame: wire.FrameReader) -> None:
        """Keep a copy of the frame."""
        self._frames.append((source, frame.copy()))
        self._sources.add(source)
        self.watch()

    def take_all(self) -> deque[tuple[int, wire.FrameReader]]:
        """Hand the frames over, each with its source, in the order in which they came."""
        frames, self._frames = self._frames, deque()
        self._sources = set()
        return frames

    def forget(self, source: int) -> int:
        """Drop the frames of ``source``; return how many these were."""
        kept = deque((rank, frame) for rank, frame in self._frames if rank != source)
        count = len(self._frames) - len(kept)
        self._frames = kept
        self._sources.discard(source)
        self._told_of.discard(source)
        return count

    def watch(self) -> None:
        """Say in a while that frames wait, if a task of the user awaits another channel by then.

        Ranks that open a channel under another type or name than their peers would wait in silence. The members of a
        protocol agree on their channels before they use them.
        """
        is_news = self._timer is None and not self._sources <= self._told_of
        if is_news and self._awaited():
            self._timer = self._loop.call_later(EARLY_PATIENCE_S, self._tell)

    def _tell(self) -> None:
        self._timer = None
        awaited = self._awaited()
        if awaited and not self._sources <= self._told_of:
            self._told_of |= self._sources
            logger.warning("awaiting %s for %g s: %s", " and ".join(awaited), EARLY_PATIENCE_S, self.describe())

    def describe(self) -> str:
        """Say what waits for a channel that is not open here; empty where nothing does."""
        count, ranks = len(self._frames), sorted(self._sources)
        if not count:
            return ""
        noun, verb = ("message", "waits") if count == 1 else ("messages", "wait")
        who = f"rank{'s'[: len(ranks) > 1]} {', '.join(map(str, ranks))}"
        return (
            f"{count} {noun} on tag {self._tag} {verb} for a channel that this rank has not opened, from {who} "
            "(a channel is the same where tag, message type or name, and group are, and it is opened as often)"
        )

    def close(self) -> None:
        """Say nothing any more."""
        if self._timer is not None:
            self._timer.cancel()
