"""Asks other ranks for the newest version of their state that they have published, and answers such questions.

Used by the versioned windows of large groups (:mod:`asyncdist.collectives.one_sided`), in which sending the record of
each version to all members would take too many messages. A rank has one :class:`VersionQueries` for all its windows. It
answers questions as long as the world is open, even about windows that are closed or not open yet. No reader therefore
waits forever.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Final

from asyncdist import tags
from asyncdist.errors import BusyError, RankLostError
from asyncdist.messaging import wire
from asyncdist.messaging.channels import Channel, Envelope
from asyncdist.messaging.services import Services
from asyncdist.waits import WaitId, WaitKind

logger = logging.getLogger("asyncdist.collectives.version_queries")

_NUMBER_MAX: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """Describes one published version, a copy of a rank's state.

    Attributes:
        iteration: Training iteration of the owner when the version was copied.
        metric: Metric of the version, or NaN if the version must not be used.
    """

    version: int
    iteration: int
    metric: float


@dataclass(frozen=True, slots=True)
class Question:
    """Asks another rank for the record of the newest version that it has published."""

    window: int
    number: int


@dataclass(frozen=True, slots=True)
class Answer:
    """Message with the record of the sender's newest version. ``version`` is 0 if the sender has published none."""

    number: int
    version: int
    iteration: int
    metric: float


@dataclass(slots=True, eq=False)
class _Inquiry:
    """The answers to an open question of this rank, and the ranks that have not answered."""

    unanswered: set[int] = field(default_factory=set)
    found: dict[int, VersionRecord] = field(default_factory=dict)


class VersionQueries:
    """Asks other ranks for the records of their newest versions, and answers their questions."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._windows: dict[int, Callable[[], VersionRecord | None]] = {}
        self._inquiries: dict[int, _Inquiry] = {}
        self._number = 0
        services.on_gone(self._on_gone)
        self._channel: Channel[Question | Answer] = services.open_channel(
            Question | Answer,
            tag=tags.METRIC,
            scope=wire.scope_of((), "newest versions of windows", 0),
            name="newest versions",
            admits_restarted=True,  # Safe, because each answer names its question, and unknown questions are ignored.
            handler=self._on_message,
        )

    def open(self, window: int, newest: Callable[[], VersionRecord | None]) -> None:
        """Answer later questions about a window with the record that ``newest()`` returns."""
        self._windows[window] = newest

    def close(self, window: int) -> None:
        """Answer later questions about a window as if this rank had published no version in it."""
        self._windows.pop(window, None)

    async def ask(self, window: int, ranks: Collection[int], *, deadline: float = math.inf) -> dict[int, VersionRecord]:
        """Ask all ``ranks`` concurrently, and return the records of their newest versions in the same order.

        Ranks that have no version, have left, or do not answer before the deadline are omitted.
        """
        self._number = number = self._number % _NUMBER_MAX + 1
        inquiry = self._inquiries[number] = _Inquiry()
        try:
            for rank in ranks:
                inquiry.unanswered.add(rank)  # before the sends, each of which may notice the loss of any rank
                if not self._send(Question(window, number), rank):
                    inquiry.unanswered.discard(rank)
            await self._services.engine.until(
                lambda: not inquiry.unanswered,
                WaitId(WaitKind.VERSION_ANSWERS),
                deadline=None if deadline == math.inf else deadline,
            )
        finally:
            del self._inquiries[number]
        return {rank: inquiry.found[rank] for rank in ranks if rank in inquiry.found}

    def _on_gone(self, rank: int) -> None:
        for inquiry in self._inquiries.values():
            inquiry.unanswered.discard(rank)

    def _on_message(self, envelope: Envelope[Question | Answer]) -> None:
        match envelope.message:
            case Question() as question:  # Answer later, because this rank may be publishing a version.
                self._services.engine.loop.call_soon(self._answer, question, envelope.source)
            case Answer() as answer:
                self._record_answer(answer, envelope.source)

    def _answer(self, question: Question, source: int) -> None:
        newest = self._windows.get(question.window)
        record = newest() if newest is not None else None
        facts = (0, 0, 0.0) if record is None else (record.version, record.iteration, record.metric)
        self._send(Answer(question.number, *facts), source)

    def _record_answer(self, answer: Answer, source: int) -> None:
        inquiry = self._inquiries.get(answer.number)
        if inquiry is None or source not in inquiry.unanswered:  # The answer is late, or was not requested.
            return
        inquiry.unanswered.remove(source)
        if answer.version > 0:
            inquiry.found[source] = VersionRecord(answer.version, answer.iteration, answer.metric)

    def _send(self, message: Question | Answer, rank: int) -> bool:
        if rank in self._services.gone:
            return False
        try:
            self._channel.send_nowait(message, rank)
        except (RankLostError, BusyError) as error:
            logger.debug("could not send %s to rank %d: %s", type(message).__name__, rank, error)
            return False
        return True
