"""Receives the messages (*frames*) of one tag, and passes each to its channel.

A :class:`TagDemultiplexer` has one persistent wildcard receive for its tag. The route in a frame's header selects the
channel. Frames for channels or epochs that are not open yet are kept, up to a maximum number. Frames for closed
channels, and invalid frames, are dropped, counted by reason, and logged once per peer. They raise no exception on this
rank.

After ``main`` has returned, a rank drops and counts messages on the user's channels, so that no sender waits for this
rank.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol

import numpy

from asyncdist.errors import AsyncdistError, LocalProtocolError
from asyncdist.messaging import wire
from asyncdist.messaging.engine import Engine
from asyncdist.messaging.flow_control import TagFlow
from asyncdist.messaging.mailboxes import FrameReceiver, Inbox
from asyncdist.transports.rank_sets import RankSet
from asyncdist.waits import WaitId, WaitKind
from asyncdist.wording import ranks_in_words

logger = logging.getLogger("asyncdist.messaging.demultiplexer")
# The name of a former module, kept because users' filters for these warnings contain it.
logger_of_early_frames = logging.getLogger("asyncdist.messaging.early_frames")

#: Maximum number of closed channels per tag that still answer other ranks. The oldest ones are removed, so that a long
#: job's memory does not grow.
ANSWERING_COUNT_MAX: Final = 64
#: Maximum number of scopes per tag that are remembered as closed.
CLOSED_SCOPE_COUNT_MAX: Final = 4096
#: Maximum number of frames kept for unopened channels, per tag.
EARLY_FRAME_COUNT_MAX: Final = 1024
#: Seconds after which a warning about kept messages is logged if a task is waiting on a different channel of the tag.
EARLY_PATIENCE_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class ChannelStatistics:
    """Counts of a channel's messages: sent and received since it was opened, in its mailbox, and being sent."""

    sent_count: int
    received_count: int
    waiting_count: int
    sending_count: int


class ReceivingChannel(Protocol):
    """Interface of the channels to which a demultiplexer passes messages."""

    name: str
    scope: int
    epoch: int
    has_epochs: bool
    codec: wire.Codec
    inbox: Inbox
    dropped_count: int

    @property
    def is_awaited(self) -> bool:
        """Whether a task of the user's program is waiting for a message."""

    @property
    def unread_count(self) -> int:
        """Number of messages that no task has received."""

    @property
    def sent_count(self) -> int:
        """Number of messages sent since the channel was opened."""

    def deliver_earlier(self, kind: int, frame: wire.FrameReader, source: int) -> None:
        """Handle a message of an earlier coordinator of the protocol."""

    def on_left(self) -> None:
        """Make the next send check its destination again. Called when a rank has left."""

    def on_gone(self) -> None:
        """Make waiting tasks check whether any rank can still send. Called when a rank has left or is lost."""

    def on_restarted(self, rank: int) -> None:
        """Expect new sequence numbers from the new process of ``rank``."""

    def statistics(self) -> ChannelStatistics:
        """Return the numbers of messages sent, received, in the mailbox and being sent."""


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
        """Schedule a warning about messages for unopened channels if a task is waiting on another channel."""
        is_news = self._timer is None and not self.counts.keys() <= self._warned_of
        if is_news and self._awaited():
            self._timer = self._loop.call_later(EARLY_PATIENCE_S, self._warn)

    def _warn(self) -> None:
        self._timer = None
        awaited = self._awaited()
        if awaited and not self.counts.keys() <= self._warned_of:
            self._warned_of |= self.counts.keys()
            text, names = "awaiting %s for %g s: %s", " and ".join(awaited)
            logger_of_early_frames.warning(text, names, EARLY_PATIENCE_S, self.describe())

    def describe(self) -> str:
        """Describe the stored messages for unopened channels. Return "" if there are none."""
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


def _new_frame() -> wire.FrameReader:
    # ``numpy.empty`` does not touch the buffer's memory pages, and most messages are small.
    return wire.FrameReader(numpy.empty(wire.FRAME_NBYTES_MAX, dtype=numpy.uint8).data)


class TagDemultiplexer:
    """Receives the messages of one tag on this rank, and passes each to its channel.

    Args:
        nonce: Number that identifies the job. Frames of other jobs are dropped.
        flow: Flow control of the tag, or None if the channels belong to protocols. With flow control, a full mailbox
            makes the senders wait.
        sent_to: Set to which the receivers of messages are added.
        received_from: Set to which the senders of received messages are added.
        openers: Functions that open the channels that open on first use, by scope. All of them are called if too many
            frames for unopened channels arrive.

    Attributes:
        is_users: Whether the channels belong to the user's program.
        dropped: Number of dropped frames, by reason.
        drop_examples: Description of the last dropped frame, by reason.
        under_way_count: Number of sent messages that have not left this rank yet.
        slow_dests: Destinations of messages that did not leave immediately.
    """

    def __init__(
        self,
        engine: Engine,
        tag: int,
        nonce: int,
        *,
        flow: TagFlow | None,
        sent_to: set[int],
        received_from: set[int],
        openers: Mapping[int, Callable[[], object]] = MappingProxyType({}),
    ) -> None:
        self.engine = engine
        self.tag = tag
        self.nonce = nonce
        self.is_users = flow is not None
        self.flow = flow
        self.sent_to = sent_to
        self.dropped: Counter[str] = Counter()
        self.drop_examples: dict[str, str] = {}
        self.under_way_count = 0
        self.slow_dests: set[int] = set()
        self._has_left = False
        self._never_opened_count = 0  # frames for unopened channels that arrived after ``main`` had returned
        self._channels: dict[int, ReceivingChannel] = {}
        # Closed channels that still answer, by scope and epoch, oldest first. The scopes are also ordered oldest first.
        self._answering: dict[tuple[int, int], ReceivingChannel] = {}
        self._closed_scopes: dict[int, None] = {}
        self.early = EarlyFrames(
            tag, engine.loop, lambda: [channel.name for channel in self._channels.values() if channel.is_awaited]
        )
        self._openers = openers
        self._complained_about: set[int] = set()
        self._closed_sent_count = self._closed_received_count = 0
        frame = engine.transport.shared(_new_frame)
        request = engine.transport.persistent_receive(frame.buffer, tag)
        self.receiver = FrameReceiver(
            request,
            frame,
            engine,
            drop=self.drop,
            on_unrouted=self._handle_unrouted,
            contacts=received_from,
            flow=flow,
        )
        engine.add_pollable(self.receiver)

    def _handle_unrouted(self, frame: wire.FrameReader, source: int) -> bool:
        """Keep a frame whose channel is not open yet, or drop it and count the reason.

        Returns:
            Whether the tag must stop receiving, because no further frame can be kept.
        """
        route = frame.route()
        channel = self._channels.get(route.scope)
        if route.version != wire.VERSION:
            self.drop(source, "another version", f"version {route.version}, not {wire.VERSION}")
        elif route.nonce != self.nonce:
            self.drop(source, "another job")
        elif route.reserved:
            self.drop(source, "reserved part of the route", f"reserved part {route.reserved} of the route, not 0")
        elif channel is not None and route.kind >= (count := len(channel.codec.decoders)):
            self.drop(source, "unknown kind", f"{channel.name}: kind {route.kind}, of {count} known")
        elif channel is not None and not channel.has_epochs and route.epoch:
            self.drop(source, "no epochs", f"{channel.name}: epoch {route.epoch} of a channel without epochs")
        elif channel is not None and route.epoch < channel.epoch:
            self.dropped["earlier epoch"] += 1
            channel.deliver_earlier(route.kind, frame, source)
        elif route.scope in self._closed_scopes:
            self._drop_closed(route, frame, source)
        elif self._has_left:
            self._drop_late(channel)
        elif not self.early.is_full or self.is_users:
            self.early.keep(source, frame)
            return self.is_users and self.early.is_full
        elif unopened := self._unopened():
            self.early.keep(source, frame)
            for open_channel in unopened:
                open_channel()  # takes the kept frames of its scope
        else:
            self.drop(source, "too many frames for unopened scopes")
        return False

    def _unopened(self) -> list[Callable[[], object]]:
        """Return the functions of :attr:`openers` whose channels have not been opened yet."""
        opened = self._channels, self._closed_scopes
        return [call for scope, call in self._openers.items() if not any(scope in scopes for scopes in opened)]

    def _drop_closed(self, route: wire.Route, frame: wire.FrameReader, source: int) -> None:
        self.dropped["closed scope"] += 1
        for (scope, epoch), channel in reversed(self._answering.items()):
            if scope == route.scope and route.epoch < epoch and route.kind < len(channel.codec.decoders):
                channel.deliver_earlier(route.kind, frame, source)
                return

    def _drop_late(self, channel: ReceivingChannel | None) -> None:
        self.dropped["main had returned"] += 1
        if channel is None:
            self._never_opened_count += 1
        else:
            channel.dropped_count += 1

    def leave(self) -> None:
        """Drop all later messages for the user's channels, because ``main`` has returned on this rank."""
        if self.is_users:
            self._has_left = True
            for scope in self._channels:
                self.receiver.close(scope)
            self.receiver.resume(self.receiver.stalled_on)

    def on_left(self, ranks: RankSet) -> list[int]:
        """Record that ``main`` has returned on ``ranks``. Return the ranks to which messages may be in transit."""
        for channel in self._channels.values():
            channel.on_left()
        return sorted(rank for rank in self.slow_dests if rank in ranks) if self.is_users else []

    def on_gone(self, ranks: RankSet) -> None:
        """Notify the channels that ``ranks`` have left or are lost.

        Send the messages that flow control held back for them.
        """
        if self.flow is not None:
            for rank in [rank for rank in self.flow.lanes if rank in ranks]:
                self.flow.release(rank)
        for channel in self._channels.values():
            channel.on_gone()

    def on_restarted(self, rank: int) -> None:
        """Drop undelivered messages of the old process of ``rank``, and notify the channels of its restart."""
        self.slow_dests.discard(rank)
        self._complained_about.discard(rank)
        if self.flow is not None:
            self.receiver.forget_lane()
            self.flow.on_restarted(rank)
        if count := self.early.forget(rank):
            self.dropped["earlier incarnation"] += count
            self.receiver.resume(self.receiver)
        for channel in self._all():  # closed channels that still answer, too
            channel.on_restarted(rank)

    def drop(self, source: int, reason: str, particulars: str = "") -> None:
        """Count a dropped message by its reason. Log the first dropped message of each sender, with ``particulars``."""
        what = particulars or reason
        self.dropped[reason] += 1
        self.drop_examples[reason] = f"tag {self.tag}, rank {source}: {what}"
        if source not in self._complained_about and reason != "RankLostError":  # Losses are reported elsewhere.
            self._complained_about.add(source)
            text = "tag %d: dropped a frame from rank %d: %s (further ones are only counted)"
            logger.warning(text, self.tag, source, what)

    def attach(self, channel: ReceivingChannel) -> None:
        """Register a new channel, and deliver its messages, including those that have already arrived."""
        if channel.scope in self._channels:
            raise LocalProtocolError(
                f"the channel {channel.name} on tag {self.tag} is already open; close it first, or use another tag",
                tag=self.tag,
            )
        self._channels[channel.scope] = channel
        self._closed_scopes.pop(channel.scope, None)
        self.route_to(channel)

    def route_to(self, channel: ReceivingChannel) -> None:
        """Deliver messages of the channel's scope and epoch to the channel, including those that have arrived."""
        self.receiver.close(channel.scope)  # detach may have left the route open for late messages.
        stamp = wire.stamp_of(self.nonce, channel.epoch)
        self.receiver.routes[channel.scope] = stamp, channel.inbox, channel.codec.decoders_by_key
        early = self.early.take_all()
        self.receiver.resume(self.receiver)
        for source, frame in early:
            self.receiver.deliver(frame, frame.nbytes, source)

    def detach(self, channel: ReceivingChannel, *, answers: bool) -> None:
        """Remove a closed channel. Its later messages are dropped or, if ``answers`` is true, passed to its handler."""
        if self._channels.pop(channel.scope, None) is not None:
            if answers:
                self._forget_answering((channel.scope, channel.epoch))
                self._answering[channel.scope, channel.epoch] = channel
                if len(self._answering) > ANSWERING_COUNT_MAX:
                    self._forget_answering(next(iter(self._answering)))
            else:
                self._forget(channel)
        self._closed_scopes[channel.scope] = None
        if len(self._closed_scopes) > CLOSED_SCOPE_COUNT_MAX:
            del self._closed_scopes[next(iter(self._closed_scopes))]
        self.receiver.resume(channel.inbox)
        # Kept frames may be for a later epoch of this channel's scope.
        for source, frame in self.early.take_all():
            self.receiver.deliver(frame, frame.nbytes, source)

    def _forget_answering(self, key: tuple[int, int]) -> None:
        channel = self._answering.pop(key, None)
        if channel is not None:
            self._forget(channel)

    def _forget(self, channel: ReceivingChannel) -> None:
        """Remove a closed channel's routes, and add its message counts to the totals of closed channels."""
        self._closed_sent_count += channel.sent_count
        self._closed_received_count += channel.inbox.received_count
        found = self.receiver.routes.get(channel.scope)
        if found is not None and found[1] is channel.inbox:  # A newer channel may already use the scope.
            self.receiver.close(channel.scope)

    def channels(self) -> tuple[ReceivingChannel, ...]:
        """Return the open channels."""
        return tuple(self._channels.values())

    def close(self) -> None:
        """Stop receiving. Drop and count a message that arrives before the receive is cancelled."""
        self.engine.remove_pollable(self.receiver)
        self.early.close()
        if self.receiver.is_posted:
            self.receiver.request.cancel()
            self.engine.watch(self.receiver.request, WaitId(WaitKind.CLOSED_TAG, self.tag), self._on_closed)

    def _on_closed(self, error: AsyncdistError | None) -> None:
        if error is None and not self.receiver.request.cancelled:
            self.dropped["closed lane"] += 1

    @property
    def sent_count(self) -> int:
        """Number of messages sent on this tag."""
        return self._closed_sent_count + sum(channel.sent_count for channel in self._all())

    @property
    def received_count(self) -> int:
        """Number of messages received on this tag."""
        of_closed = self._closed_received_count + self.receiver.received_late_count
        return of_closed + sum(channel.inbox.received_count for channel in self._all())

    def _all(self) -> Iterator[ReceivingChannel]:
        return itertools.chain(self._channels.values(), self._answering.values())

    @property
    def early_count(self) -> int:
        """Number of messages for unopened channels, including those dropped after ``main`` had returned."""
        return len(self.early) + self._never_opened_count
