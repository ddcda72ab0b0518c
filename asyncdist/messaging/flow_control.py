"""Flow control of user channels: a rank sends at most :data:`WINDOW` messages that the receiver has not counted.

The receiver of a tag counts the messages that it takes from the transport, for each sender. After half a window, it
sends a :class:`Credit`, which allows the sender the same number of further messages, so that a sender rarely waits. A
sender without credit holds its later messages on the tag, in order, and sends them when a credit arrives. A held
message is not an outstanding request, so polling passes do not test it. A receiver whose mailbox is full takes no
messages from the transport, and therefore sends no credits. At most ``WINDOW`` messages per sender and tag are in the
transport's memory.

Messages from a rank to itself are not limited, because the task that fills the mailbox may be the task that empties it.
Messages to a rank that has left or is lost are not limited either, because that rank no longer sends credits.

The module is compiled if a C compiler is available (:mod:`asyncdist.compiled`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Final

from asyncdist.errors import AsyncdistError, RankLostError
from asyncdist.messaging.polling import Poller
from asyncdist.transports.base import Buffer
from asyncdist.waits import WaitId, WaitKind

#: Maximum number of messages from one rank to another on a tag that the receiver has not taken from the transport.
WINDOW: Final = 1024
#: Number of allowed messages that means "no limit".
_UNLIMITED: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class Credit:
    """Allows the receiver of this message to send half a window of further messages on ``tag``."""

    tag: int


class HeldSend:
    """Message that this rank has not sent yet, because its receiver must first send a :class:`Credit`.

    When the credit arrives, ``Services`` calls :meth:`TagFlow.on_credit`, and :meth:`Lane.send_held` sends the message.

    Attributes:
        on_left: Function set by ``Channel._watch``, called with None when the message has left, or with its error.
    """

    __slots__ = ("_dest", "_engine", "_frame", "_name", "_tag", "on_left")

    on_left: Callable[[AsyncdistError | None], None]

    def __init__(self, engine: Poller, frame: Buffer, dest: int, tag: int, name: str) -> None:
        self._engine = engine
        self._frame = frame
        self._dest = dest
        self._tag = tag
        self._name = name

    def start(self) -> bool:
        """Start sending the message. If that fails, call ``on_left`` with the error and return False."""
        try:
            request = self._engine.transport.start_send(self._frame, self._dest, self._tag)
        except AsyncdistError as error:
            self.on_left(error)
            return False
        if request is None:
            self.on_left(None)
        else:
            what = WaitId(WaitKind.MESSAGE_SEND, self._tag, self._dest, name=self._name)
            self._engine.watch(request, what, self.on_left)
        return True


class Lane:
    """Flow-control state of the messages between this rank and another rank on one tag.

    Attributes:
        room: Number of messages that this rank may send to the other rank without a further credit.
        held: Messages to the other rank that are waiting for a credit, in order.
        uncredited: Number of messages received from the other rank since this rank last sent it a credit.
    """

    def __init__(self, rank: int, room: int) -> None:
        self.rank = rank
        self.room = room
        self.held: deque[HeldSend] | None = None  # An empty deque takes 600 bytes, and each peer has a lane.
        self.uncredited = 0

    def hold(self, message: HeldSend) -> None:
        """Keep a message until its receiver allows further messages."""
        if self.held is None:
            self.held = deque()
        self.held.append(message)

    def send_held(self) -> None:
        """Send as many held messages as the receiver allows (``room``), in order."""
        while self.held and self.room > 0:
            if self.held.popleft().start():
                self.room -= 1


class TagFlow:
    """Limits the messages on one tag between this rank and each other rank.

    Args:
        send_credit: Function that sends a credit for a tag to a rank.
        gone: Ranks that have left or are lost, which send no credits.
        is_limited: Whether this rank waits for credits. False on a replayed rank.

    Attributes:
        credit_count: Number of messages that one credit allows.
        lanes: Flow-control state of each rank to which this rank has sent, or from which it has received.
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
        """Send a credit to the rank whose messages ``lane`` counts, which allows it to send further messages."""
        lane.uncredited = 0
        if lane.rank != self._rank:
            self._send_credit(self._tag, lane.rank)

    # -- the sending rank -------------------------------------------------------------------------------------------

    def on_credit(self, rank: int) -> None:
        """Send as many held messages to ``rank`` as the credit that it has just sent allows."""
        lane = self.lane(rank)
        if lane.room < _UNLIMITED // 2:
            lane.room += self.credit_count
            lane.send_held()

    def release(self, rank: int) -> None:
        """Send all held messages to ``rank``, which has left or is lost, and no longer limit messages to it."""
        lane = self.lane(rank)
        lane.room = _UNLIMITED
        lane.send_held()

    def on_restarted(self, rank: int) -> None:
        """Fail the held messages to the previous process of ``rank``.

        Messages to its new process start with a full window.
        """
        lane = self.lanes.pop(rank, None)
        error = RankLostError(f"rank {rank} was restarted before it received the message", rank=rank)
        for message in (lane and lane.held) or ():
            message.on_left(error)

    def on_connected(self, rank: int) -> None:
        """Allow a full window of messages to ``rank``, to which this restarted rank has just connected."""
        if rank in self.lanes:
            self.lanes[rank].room = self._window
