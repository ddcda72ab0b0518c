"""Flow control of user channels: a rank whose mailbox is full asks the senders of the tag to hold their messages.

A tag that is still stalled in the pass after it stalled sends a :class:`Pause` to each rank that has sent on the tag.
The sender then holds its later messages on the tag, in order, until a :class:`Resume` arrives, which is sent when the
mailbox is at most half full. A held message is not an outstanding request, so it costs no passes. Only messages that
were sent before the pause arrived are in the transport's memory.

A rank never pauses itself, because the task that fills its own mailbox may be the task that empties it. A rank that has
not sent on the tag before is paused when the tag receives its first message. A rank is paused again only after another
message from it has arrived, because a rank that computes receives no pauses, and they would accumulate.

A pause may be omitted, because the transport then keeps the messages. A resumption is never omitted. Each paused rank
that is not lost gets one when the mailbox has room, when its channel is closed, or when main returns on the receiver,
even if main has already returned on the paused rank.
"""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from asyncdist import tags
from asyncdist.errors import AsyncdistError, ClosedError, RankLostError
from asyncdist.messaging import wire
from asyncdist.messaging.mailboxes import Envelope, FrameReceiver, HeldSend, Inbox

#: Number of pauses and resumptions in progress above which a rank sends no further pause.
SENDING_COUNT_MAX: Final = 4096


@dataclass(frozen=True, slots=True)
class Pause:
    """Message with which a rank asks its receiver to hold the messages on ``tag``."""

    tag: int


@dataclass(frozen=True, slots=True)
class Resume:
    """Message that ends a :class:`Pause`."""

    tag: int


class ChannelOpener(Protocol):
    """The part of :class:`asyncdist.messaging.services.Services` that the flow control uses."""

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

    def lost_ranks(self) -> frozenset[int]:
        """Return the ranks whose processes ended without leaving the world."""


class FlowControl:
    """Sends and receives the pauses of one rank.

    Args:
        flow_of: Function that returns the flow control of a tag, or None if pauses of the tag are ignored.
    """

    def __init__(self, services: ChannelOpener, flow_of: Callable[[int], TagFlow | None]) -> None:
        self._flow_of = flow_of
        self._lost_ranks = services.lost_ranks
        self._channel = services.open_channel(
            Pause | Resume,
            tag=tags.CONTROL,
            scope=wire.scope_of(range(services.size), "flow control", 0),
            name="flow control",
            capacity=sys.maxsize,  # a resumption must never raise BusyError
            handler=self._on_message,
            admits_restarted=True,
            counts_contacts=False,
        )

    def tell(self, message: Pause | Resume, rank: int) -> bool:
        """Send a message to ``rank``, and return whether it was sent.

        Nothing is sent to a lost rank. A pause is not sent while too many messages are in progress.
        """
        if isinstance(message, Pause) and self._channel.statistics().sending_count >= SENDING_COUNT_MAX:
            return False
        with contextlib.suppress(RankLostError, ClosedError):
            self._channel.send_nowait(message, rank)
            return True
        return False

    def _on_message(self, envelope: Envelope[Any]) -> None:
        flow = self._flow_of(envelope.message.tag)
        if flow is None:
            return
        if isinstance(envelope.message, Resume):
            flow.release(envelope.source)
        elif envelope.source not in self._lost_ranks():
            flow.hold(envelope.source)


class TagFlow:
    """Holds this rank's messages on one tag for paused receivers, and pauses the senders of the tag.

    Args:
        rank: This rank.
        tell: Function that sends a message to a rank, and returns whether it was sent.

    Attributes:
        held: Messages to each rank that has paused this rank, by rank, in order.
        paused: Ranks that this rank has paused.
    """

    def __init__(self, tag: int, rank: int, tell: Callable[[Pause | Resume, int], bool]) -> None:
        self._tag = tag
        self._rank = rank
        self._tell = tell
        self.held: dict[int, deque[HeldSend]] = {}
        self.paused: set[int] = set()
        self._arrived: dict[int, int] = {}  # number of each sender's messages at the time of its last pause
        self._full: set[Inbox | FrameReceiver] = set()

    # -- the receiving rank -----------------------------------------------------------------------------------------

    def pause(self, full: Inbox | FrameReceiver, arrived: Mapping[int, int]) -> None:
        """Pause the other ranks that have sent a message since their last pause, until ``full`` has room.

        Args:
            arrived: For each sender, a number that changes with each message that arrives from it.
        """
        self._full.add(full)
        for rank in sorted(arrived.keys() - self.paused - {self._rank}):
            if arrived[rank] != self._arrived.get(rank) and self._tell(Pause(self._tag), rank):
                self.paused.add(rank)
                self._arrived[rank] = arrived[rank]

    def on_room(self, full: Inbox | FrameReceiver) -> None:
        """Resume the paused senders, unless another mailbox of the tag still has no room."""
        self._full.discard(full)
        if not self._full:
            self._resume()

    def _resume(self) -> None:
        paused, self.paused = self.paused, set()
        for rank in sorted(paused):
            self._tell(Resume(self._tag), rank)

    def resume_all(self) -> None:
        """Resume all paused senders, because their messages will be dropped."""
        self._full.clear()
        self._resume()

    # -- the sending rank -------------------------------------------------------------------------------------------

    def hold(self, rank: int) -> None:
        """Hold messages to ``rank`` from now on."""
        self.held.setdefault(rank, deque())

    def release(self, rank: int) -> None:
        """Send the held messages to ``rank``, and hold none from now on."""
        for message in self._take(rank):
            message.start()

    def fail(self, rank: int, error: AsyncdistError) -> None:
        """Fail the held messages to ``rank``, and hold none from now on."""
        for message in self._take(rank):
            message.on_left(error)

    def _take(self, rank: int) -> deque[HeldSend]:
        return self.held.pop(rank, deque())

    def forget(self, rank: int) -> None:
        """Forget that ``rank`` is paused, because it has a new process."""
        self.paused.discard(rank)
        self._arrived.pop(rank, None)
