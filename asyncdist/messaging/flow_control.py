"""Flow control of user channels: a rank sends at most :data:`WINDOW` messages that the receiver has not counted.

The receiver of a tag counts the messages that it takes from the transport, for each sender. After half a window it
sends a :class:`Credit`, which allows the sender the same number of further messages, so that a sender rarely waits. A
sender without credit holds its later messages on the tag, in order, and sends them when a credit arrives. A held
message is not an outstanding request, so it costs no passes. A receiver whose mailbox is full takes no messages from
the transport and therefore sends no credits. At most ``WINDOW`` messages per sender and tag are in the transport's
memory.

Messages to the rank itself are not limited, because the task that fills the mailbox may be the task that empties it.
Messages to a rank that has left or is lost are not limited either, because that rank no longer sends credits.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any, Final, Protocol

from asyncdist import tags
from asyncdist.errors import ClosedError, RankLostError
from asyncdist.messaging import wire
from asyncdist.messaging.mailboxes import Envelope, Lane

#: Maximum number of messages from one rank to another on a tag that the receiver has not taken from the transport.
WINDOW: Final = 1024
#: Number of messages that is never reached.
_UNLIMITED: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class Credit:
    """Message that allows its receiver to send half a window of further messages on ``tag``."""

    tag: int


class ChannelOpener(Protocol):
    """Interface of the object with which the flow control opens its channel."""

    size: int

    def open_channel(
        self,
        message_types: Any,
        *,
        tag: int,
        scope: int,
        name: str,
        capacity: int,
        handler: Callable[[Envelope[Any]], None] | None = None,
        admits_restarted: bool = False,
        counts_contacts: bool = True,
    ) -> Any:
        """Open a channel of the runtime."""


class FlowControl:
    """Sends and receives one rank's credits, which allow senders further messages.

    Args:
        flow_of: Function that returns the flow control of a tag, or None if no user channel has used the tag.
    """

    def __init__(self, services: ChannelOpener, flow_of: Callable[[int], TagFlow | None]) -> None:
        self._flow_of = flow_of
        self._channel = services.open_channel(
            Credit,
            tag=tags.CONTROL,
            scope=wire.scope_of(range(services.size), "flow control", 0),
            name="flow control",
            capacity=sys.maxsize,  # A credit must never raise BusyError.
            handler=self._on_credit,
            admits_restarted=True,
            counts_contacts=False,
        )

    def send_credit(self, tag: int, rank: int) -> None:
        """Allow ``rank`` to send further messages on ``tag``. Do nothing if ``rank`` is lost."""
        with contextlib.suppress(RankLostError, ClosedError):
            self._channel.send_nowait(Credit(tag), rank)

    def _on_credit(self, envelope: Envelope[Any]) -> None:
        flow = self._flow_of(envelope.message.tag)
        if flow is not None:
            flow.on_credit(envelope.source)


class TagFlow:
    """Limits the messages on one tag between this rank and each other rank.

    Args:
        send_credit: Function that sends a credit for a tag to a rank.
        gone: Ranks that have left or are lost, which send no credits.
        is_limited: Whether this rank waits for credits. A replayed rank does not.

    Attributes:
        credit_count: Number of messages that one credit allows.
        lanes: State of the messages to and from each rank that this rank has sent to or received from.
    """

    def __init__(
        self,
        tag: int,
        rank: int,
        send_credit: Callable[[int, int], None],
        *,
        gone: Container[int],
        is_limited: bool = True,
    ) -> None:
        self._gone = gone
        self._tag = tag
        self._rank = rank
        self._send_credit = send_credit
        self._window = WINDOW if is_limited else _UNLIMITED
        self.credit_count = WINDOW // 2
        self.lanes: dict[int, Lane] = {}

    def lane(self, rank: int) -> Lane:
        """Return the flow-control state of the messages to and from ``rank``."""
        lane = self.lanes.get(rank)
        if lane is None:
            is_unlimited = rank == self._rank or rank in self._gone
            lane = self.lanes[rank] = Lane(rank, _UNLIMITED if is_unlimited else self._window)
        return lane

    # -- the receiving rank -----------------------------------------------------------------------------------------

    def credit(self, lane: Lane) -> None:
        """Allow the rank whose messages ``lane`` counts to send further messages."""
        lane.uncredited = 0
        if lane.rank != self._rank:
            self._send_credit(self._tag, lane.rank)

    # -- the sending rank -------------------------------------------------------------------------------------------

    def on_credit(self, rank: int) -> None:
        """Send as many held messages to ``rank`` as its newly received credit allows."""
        lane = self.lane(rank)
        if lane.room < _UNLIMITED // 2:
            lane.room += self.credit_count
            lane.send_held()

    def release(self, rank: int) -> None:
        """Send all held messages to ``rank``, which has left or is lost, and limit no later messages."""
        lane = self.lane(rank)
        lane.room = _UNLIMITED
        lane.send_held()

    def on_restarted(self, rank: int) -> None:
        """Fail the held messages to the previous process of ``rank``, and limit messages to the new process anew."""
        lane = self.lanes.pop(rank, None)
        error = RankLostError(f"rank {rank} was restarted before it received the message", rank=rank)
        for message in (lane and lane.held) or ():
            message.on_left(error)

    def on_connected(self, rank: int) -> None:
        """Limit messages to ``rank`` anew, because this restarted rank has just connected to it."""
        if rank in self.lanes:
            self.lanes[rank].room = self._window

    @property
    def held_ranks(self) -> list[int]:
        """Ranks for which this rank holds messages."""
        return [rank for rank, lane in self.lanes.items() if lane.held]
