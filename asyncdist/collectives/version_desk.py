"""Asks ranks for the newest versions that they expose, and answers such questions for this rank.

Members of a small group send the record of each version to all others (:mod:`asyncdist.collectives.one_sided`). In a
large group that would be thousands of messages per version, most of them unused, so readers ask the ranks that they may
read from. A rank has one desk for all of its windows. The desk stays open for the life of the world, and also answers
questions about windows that are closed or not open yet, so no reader waits in vain.
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

logger = logging.getLogger("asyncdist.collectives.version_desk")

_NUMBER_MAX: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """Describes one version.

    Attributes:
        version: Number of the version, counted from 1 by its owner.
        iteration: Iteration of the owner at which the version was copied.
        metric: Metric of the version; NaN if it must not be used.
    """

    version: int
    iteration: int
    metric: float


@dataclass(frozen=True, slots=True)
class Question:
    """Reader to an owner: what is your newest version in a window? ``number`` counts the reader's questions."""

    window: int
    number: int


@dataclass(frozen=True, slots=True)
class Answer:
    """Owner to a reader: the record of its newest version; ``version`` is 0 if it exposes none in this window."""

    number: int
    version: int
    iteration: int
    metric: float


@dataclass(slots=True, eq=False)
class _Inquiry:
    """The answers to one question, and the ranks that have not answered."""

    unanswered: set[int] = field(default_factory=set)
    found: dict[int, VersionRecord] = field(default_factory=dict)


class VersionDesk:
    """Asks and answers for one rank. Created once per rank by ``services.shared(VersionDesk)``."""

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
            handler=self._on_message,
        )

    def open(self, window: int, newest: Callable[[], VersionRecord | None]) -> None:
        """Answer questions about a window with ``newest()`` from now on."""
        self._windows[window] = newest

    def close(self, window: int) -> None:
        """Answer from now on that this rank exposes no version in this window."""
        self._windows.pop(window, None)

    async def ask(self, window: int, ranks: Collection[int], *, deadline: float = math.inf) -> dict[int, VersionRecord]:
        """Ask all of these ranks at once; return the newest records of those that have one, in the order of ``ranks``.

        Args:
            window: Scope of the window.
            ranks: Ranks to ask. Ranks that are gone, or end meanwhile, are not waited for.
            deadline: Time on the loop's clock, in seconds. Ranks that have not answered by then count as without a
                version.
        """
        self._number = number = self._number % _NUMBER_MAX + 1
        inquiry = self._inquiries[number] = _Inquiry()
        try:
            inquiry.unanswered.update([rank for rank in ranks if self._tell(Question(window, number), rank)])
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
            case Question() as question:  # answered later, since a pass may run while this rank publishes
                self._services.engine.loop.call_soon(self._answer, question, envelope.source)
            case Answer() as answer:
                self._take(answer, envelope.source)

    def _answer(self, question: Question, source: int) -> None:
        newest = self._windows.get(question.window)
        record = newest() if newest is not None else None
        facts = (0, 0, 0.0) if record is None else (record.version, record.iteration, record.metric)
        self._tell(Answer(question.number, *facts), source)

    def _take(self, answer: Answer, source: int) -> None:
        inquiry = self._inquiries.get(answer.number)
        if inquiry is None or source not in inquiry.unanswered:  # late, or not asked for
            return
        inquiry.unanswered.remove(source)
        if answer.version > 0:
            inquiry.found[source] = VersionRecord(answer.version, answer.iteration, answer.metric)

    def _tell(self, message: Question | Answer, rank: int) -> bool:
        """Send a message; return whether that was possible."""
        if rank in self._services.gone:
            return False
        try:
            self._channel.send_nowait(message, rank)
        except (RankLostError, BusyError) as error:
            logger.debug("%s to rank %d: %s", type(message).__name__, rank, error)
            return False
        return True
