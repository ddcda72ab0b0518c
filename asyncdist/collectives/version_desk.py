"""Asks ranks for the newest versions that they expose, and answers for this rank's own.

Members of a small group tell each version to all others (:mod:`asyncdist.collectives.one_sided`). In a large one that
would be a message to each of thousands for each version, most of which nobody reads, so there readers ask, and only
those that they may read from. A rank has one desk for all of its windows, which stays open for the life of the world:
a question that comes when its window is closed, or not open yet, is answered too, so no reader waits in vain.
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
        version: its number, counted from 1 by its owner.
        iteration: the owner's iteration, at which it was taken.
        metric: how good it is; NaN if it is not to be used.
    """

    version: int
    iteration: int
    metric: float


@dataclass(frozen=True, slots=True)
class Question:
    """Reader to an owner: which is its newest version in a window? ``number`` counts the reader's inquiries."""

    window: int
    number: int


@dataclass(frozen=True, slots=True)
class Answer:
    """Owner to a reader: the record of its newest version; ``version`` is 0 where it exposes none there."""

    number: int
    version: int
    iteration: int
    metric: float


@dataclass(slots=True, eq=False)
class _Inquiry:
    """Keeps what one question to several ranks has found, and who has not answered."""

    unanswered: set[int] = field(default_factory=set)
    found: dict[int, VersionRecord] = field(default_factory=dict)


class VersionDesk:
    """Asks and answers for one rank. Made once for each by ``services.shared(VersionDesk)``."""

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
        """Answer questions about a window from now on, by what ``newest()`` returns."""
        self._windows[window] = newest

    def close(self, window: int) -> None:
        """Answer from now on that this rank exposes nothing there."""
        self._windows.pop(window, None)

    async def ask(self, window: int, ranks: Collection[int], *, deadline: float = math.inf) -> dict[int, VersionRecord]:
        """Ask all of these ranks at once; return the newest records of those that have one, in the order of ``ranks``.

        Args:
            window: the scope of the window.
            ranks: whom to ask. One that is gone, or ends meanwhile, is not waited for.
            deadline: on the loop's clock: those that have not answered by then count as if they had none.
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
            case Question() as question:  # in the loop's next turn: a pass may run while this rank publishes
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
        if inquiry is None or source not in inquiry.unanswered:  # it is too late, or nobody has asked
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
