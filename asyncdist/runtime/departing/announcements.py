"""Relays the announcements of leaving, ended and failed ranks along a tree of the ranks, in large worlds.

:mod:`asyncdist.runtime.departing.departures` decides which announcements of leaving and ended ranks must be sent. A
failed rank notifies its neighbours in the tree, which notify their own neighbours. If many ranks fail at once, a rank
relays a failure only if it has not relayed the failure of a lower rank.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from asyncdist import tags
from asyncdist.errors import BusyError, RankLostError, RemoteProtocolError
from asyncdist.messaging import wire
from asyncdist.messaging.channels import Channel, Envelope
from asyncdist.messaging.engine import Timer
from asyncdist.messaging.services import Services
from asyncdist.runtime.departing.departures import Departed, Departure, Departures, EndAcknowledged
from asyncdist.waits import WaitId, WaitKind

#: Seconds by which announcements are delayed, so that several can share a message. The delay of the tree's root is a
#: fraction of the time since the first announcement, up to a maximum. Each tree level below the root halves the delay,
#: down to a minimum.
_DELAY_PART: Final = 0.5
_DELAY_MAX_S: Final = 1.0
_DELAY_MIN_S: Final = 0.05
#: Seconds before a message that has not been answered is repeated. They double with each repetition.
_REPEAT_S: Final = 2.0
_REPEAT_COUNT: Final = 5


@dataclass(frozen=True, slots=True)
class Failure:
    """Notifies a neighbour in the tree that ``rank`` has failed and that the job must stop."""

    rank: int
    summary: str


class Announcements:
    """Exchanges announcements of leaving, ended and failed ranks with this rank's neighbours in the tree.

    Args:
        on_departure: Function called with each newly announced departure of ranks.
        on_failure: Function called with a failed rank and a summary of its error.

    Attributes:
        departures: Record of the ranks that have left or ended.
    """

    def __init__(
        self,
        services: Services,
        everybody: tuple[int, ...],
        on_departure: Callable[[Departure], None],
        on_failure: Callable[[int, str], None],
    ) -> None:
        self.failed: dict[int, str] = {}  # error summaries by failed rank, in the order of arrival
        self._services = services
        self._on_departure = on_departure
        self._on_failure = on_failure
        self.departures = Departures(services.size, services.rank)
        self._loop = services.engine.loop
        self._soon: asyncio.Handle | None = None
        self._later: Timer | None = None
        self._repeat: Timer | None = None
        self._repeat_count = 0
        self._first_departure_at: float | None = None  # time of the first departure
        self._is_closed = False
        self._channel: Channel[Any] = services.open_channel(
            Departed | EndAcknowledged | Failure,
            tag=tags.CONTROL,
            scope=wire.scope_of(everybody, "departures", 0),
            name="departures",
            handler=self._on_message,
            counts_contacts=False,
        )

    def depart(self, departure: Departure) -> None:
        """Announce to all ranks that ``main`` has returned on this rank, or that this rank has ended."""
        self.departures.add(departure, self._services.rank)
        self._send_soon()

    def fail(self, rank: int, summary: str, source: int) -> None:
        """Notify this rank's neighbours in the tree, except ``source``, that ``rank`` has failed.

        Nothing is sent if this rank already knows of this failure or the failure of a lower rank.
        """
        if rank in self.failed:
            return
        is_first = all(rank < other for other in self.failed)
        self.failed[rank] = summary
        if is_first:
            for neighbour in self.departures.tree.neighbours:
                if neighbour not in (rank, source):
                    self._send(Failure(rank, summary), neighbour)

    def on_lost(self, rank: int) -> None:
        """Remove a lost rank from the tree, and send this rank's new neighbours the announcements that they lack."""
        before = self.departures.tree.neighbours
        self.departures.on_lost(rank)
        for neighbour in self.departures.tree.neighbours:
            if neighbour not in before and self.failed:
                self._send(Failure(min(self.failed), self.failed[min(self.failed)]), neighbour)
        self._answer()
        self._send_soon()

    def close(self) -> None:
        """Stop sending, and cancel all timers."""
        self._is_closed = True
        for timer in (self._soon, self._later, self._repeat):
            if timer is not None:
                timer.cancel()

    def _on_message(self, envelope: Envelope[Any]) -> None:
        source = envelope.source
        match envelope.message:
            case Departed() as departed:
                for departure in self.departures.on_departed(departed, source):
                    self._on_departure(departure)
                self._answer()
                self._send_soon()
            case EndAcknowledged():
                self.departures.on_end_known(source)
                self._answer()
                self._send_soon()
            case Failure(rank, summary):
                if not 0 <= rank < self._services.size:
                    raise RemoteProtocolError(f"rank {source} reported a failure of rank {rank}, which does not exist")
                if rank not in self.failed and rank != self._services.rank:
                    self.fail(rank, summary, source)
                    self._on_failure(rank, summary)
        self._services.engine.recheck()

    # -- sending ----------------------------------------------------------------------------------------------------

    def _answer(self) -> None:
        """If this rank's whole subtree knows that all ranks have ended, acknowledge this to the neighbours."""
        for rank in self.departures.take_answers():
            self._send(EndAcknowledged(), rank)

    def _send_soon(self) -> None:
        """Send urgent messages in the loop's next iteration, when all arrived messages have been handled."""
        if self._soon is None and not self._is_closed:
            self._soon = self._loop.call_soon(self._send_urgent)

    def _send_urgent(self) -> None:
        engine = self._services.engine
        self._soon = None
        self._send_all(self.departures.urgent())
        if self._later is None and self.departures.has_more:
            self._later = engine.call_later(self._delay_s(), WaitId(WaitKind.DEPARTURES), self._send_others)
        if self._repeat is None and not self.departures.is_answered and self._repeat_count < _REPEAT_COUNT:
            self._repeat = engine.call_later(
                _REPEAT_S * 2**self._repeat_count, WaitId(WaitKind.DEPARTURES_AGAIN), self._send_again
            )
        engine.recheck()  # Waiting tasks may be waiting for the next stage.

    def _delay_s(self) -> float:
        """Return the delay of this rank's announcements in seconds. It halves with each tree level below the root."""
        now = self._loop.time()
        if self._first_departure_at is None:
            self._first_departure_at = now
        delay_s: float = min(_DELAY_PART * (now - self._first_departure_at), _DELAY_MAX_S)
        return max(delay_s * 0.5**self.departures.tree.level, _DELAY_MIN_S)

    def _send_others(self) -> None:
        self._later = None
        self._send_all(self.departures.others())

    def _send_again(self) -> None:
        self._repeat = None
        if not self.departures.is_answered:
            self._repeat_count += 1
            self.departures.resend_announcements()
            self._answer()
            self._send_urgent()

    def _send_all(self, messages: Iterable[tuple[int, Departed]]) -> None:
        for rank, message in messages:
            self._send(message, rank)

    def _send(self, message: Departed | EndAcknowledged | Failure, rank: int) -> None:
        # Losses are handled elsewhere. A message to a busy rank is repeated later.
        with contextlib.suppress(RankLostError, BusyError):
            self._channel.send_nowait(message, rank)
