"""Typed, bounded channels, multiplexed by tag and scope.

A :class:`TagDemultiplexer` has one persistent wildcard receive for its tag. It checks the frames and hands them to the
:class:`Channel` of their scope, which it finds by the route in the frame's header. Frames for a scope that is not open
here yet wait, within a bound (:mod:`asyncdist.messaging.early_frames`); frames for a closed scope are dropped and
counted. Frames that do not decode are counted and logged once per peer, and never raise here. Reasons for drops are
few, so their counts take no memory; the last example of each is kept.

The runtime's own channels have a *handler* in place of a mailbox: a function, called as each message arrives.

A channel's mailbox is bounded. When it is full, a user's channel *stalls*: nothing more is taken on its tag until a
task receives. Frames for channels of a user that are not open yet do the same when they are too many. A protocol's
channel, which knows how much may be under way, fails with RemoteProtocolError instead (``"error"``), or keeps the
newest message of each source (``"latest"``).

A rank whose main has returned receives nothing more on its user's channels: messages that still come are dropped and
counted, so no sender waits for it, and a send that starts when the sender has heard of it raises ClosedError.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass
from typing import Any, Final, Generic

import numpy

from asyncdist.errors import AsyncdistError, BusyError, ClosedError, LocalProtocolError
from asyncdist.messaging import wire
from asyncdist.messaging.early_frames import EarlyFrames
from asyncdist.messaging.engine import Engine, yield_to_loop
from asyncdist.messaging.mailboxes import (
    Envelope as Envelope,
    FrameReceiver,
    Inbox,
    MessageT,
    Outbox,
    Overflow as Overflow,
)
from asyncdist.messaging.polling import resolve_waiter
from asyncdist.transports.base import Request

logger = logging.getLogger("asyncdist.messaging.channels")

#: Tests of the tag inside one ``receive`` before it lets the loop run. A reply that is on its way is caught here.
HOT_TEST_COUNT: Final = 100
#: After so many sends and receives that did not have to wait, one yields to the loop all the same.
FAIRNESS_PERIOD: Final = 64


@dataclass(frozen=True, slots=True)
class ChannelStatistics:
    """Counts since the channel was opened."""

    sent_count: int
    received_count: int
    waiting_count: int
    sending_count: int


class TagDemultiplexer:
    """Receives the frames of one tag on this rank, and hands each to its channel.

    Args:
        engine: polls it.
        tag: the tag.
        nonce: identifies the job; a frame of another job is dropped.
        is_users: whether its channels are a user's, which lose nothing, in place of a protocol's.

    Attributes:
        early: frames for scopes that are not open yet.
        dropped: number of frames that were not delivered, by reason.
        drop_examples: the last one of each reason, in words.
        under_way_count: number of messages that have not left yet.
        receiver: takes the frames.
        slow_dests: ranks to which some message did not leave at once.
    """

    def __init__(self, engine: Engine, tag: int, nonce: int, *, is_users: bool) -> None:
        self.engine = engine
        self.tag = tag
        self.nonce = nonce
        self.is_users = is_users
        self.dropped: Counter[str] = Counter()
        self.drop_examples: dict[str, str] = {}
        self.under_way_count = 0
        self.slow_dests: set[int] = set()
        self._has_left = False
        self._never_opened_count = 0  # frames that came for such scopes after main had returned
        self._channels: dict[int, Channel[Any]] = {}
        self._closed_scopes: set[int] = set()
        self.early = EarlyFrames(tag, engine.loop, self._awaited_names)
        self._complained_about: set[int] = set()
        self._closed_sent_count = self._closed_received_count = 0
        # Not cleared, as a bytearray is: most frames take its first hundred bytes, and simulations have thousands.
        buffer = numpy.empty(wire.FRAME_NBYTES_MAX, dtype=numpy.uint8).data
        request = engine.transport.persistent_receive(buffer, tag)
        self.receiver = FrameReceiver(request, buffer, drop=self.drop, explain=self._explain, ring=engine.ring)
        engine.add_pollable(self.receiver)

    def _explain(self, frame: wire.FrameReader, source: int) -> bool:
        """Drop or keep a frame that is for no open channel; return whether nothing more is to be taken."""
        route = frame.route()
        channel = self._channels.get(route.scope)
        if route.version != wire.VERSION:
            self.drop(source, "another version", f"version {route.version}, not {wire.VERSION}")
        elif route.nonce != self.nonce:
            self.drop(source, "another job")
        elif channel is not None and route.epoch != channel.epoch:
            self.dropped["other epoch"] += 1
        elif channel is not None and route.kind >= channel.kind_count:
            self.drop(source, "unknown kind", f"{channel.name}: kind {route.kind}, of {channel.kind_count} known")
        elif route.scope in self._closed_scopes:
            self.dropped["closed scope"] += 1
        elif self._has_left:
            self._drop_late(channel)
        elif not self.early.is_full or self.is_users:
            self.early.keep(source, frame)
            return self.is_users and self.early.is_full
        else:
            self.drop(source, "too many frames for scopes that nobody has opened")
        return False

    def _drop_late(self, channel: Channel[Any] | None) -> None:
        self.dropped["main had returned"] += 1
        if channel is None:
            self._never_opened_count += 1
        else:
            channel.dropped_count += 1

    def leave(self) -> None:
        """Drop what still comes for a user's channels, so no sender waits: main has returned on this rank."""
        if self.is_users:
            self._has_left = True
            for channel in self._channels.values():
                for (key, _), _ in channel.known_by():
                    self.receiver.close(key)
            self.receiver.resume(self.receiver.stalled_on)

    def on_left(self, rank: int) -> bool:
        """Note that ``rank`` reads users' messages no more; return whether messages for it may still be under way."""
        for channel in self._channels.values():
            channel.on_left()
        return self.is_users and rank in self.slow_dests

    def _awaited_names(self) -> list[str]:
        return [channel.name for channel in self._channels.values() if channel.is_awaited]

    def drop(self, source: int, reason: str, particulars: str = "") -> None:
        """Count a frame that is not delivered; the first one of each peer is logged, unless its sender is lost.

        Args:
            source: the sender's rank.
            reason: one of a few.
            particulars: what is wrong with this frame.
        """
        what = particulars or reason
        self.dropped[reason] += 1
        self.drop_examples[reason] = f"tag {self.tag}, rank {source}: {what}"
        if source not in self._complained_about and reason != "RankLostError":  # a loss is told for itself
            self._complained_about.add(source)
            text = "tag %d: dropped a frame from rank %d: %s (further ones are only counted)"
            logger.warning(text, self.tag, source, what)

    def attach(self, channel: Channel[Any]) -> None:
        """Hand the frames of a channel's scope to it from now on, those that came early first."""
        if channel.scope in self._channels:
            raise LocalProtocolError(f"tag {self.tag}: {channel.name} is open already", tag=self.tag)
        self._channels[channel.scope] = channel
        for (key, stamp), decode in channel.known_by():
            self.receiver.close(key)  # to those who came before, see detach
            self.receiver.routes[key] = stamp, channel.inbox, decode
        early = self.early.take_all()
        self.receiver.resume(self.receiver)
        for source, frame in early:
            self.receiver.deliver(frame, frame.nbytes, source)

    def detach(self, channel: Channel[Any], *, keeps_routes: bool) -> None:
        """Close the scope: frames that still come for it are dropped and counted, or go to the channel's handler."""
        if self._channels.pop(channel.scope, None) is not None:
            counts = channel.statistics()
            self._closed_sent_count += counts.sent_count
            self._closed_received_count += counts.received_count
            for (key, _), _ in () if keeps_routes else channel.known_by():
                self.receiver.close(key)
        self._closed_scopes.add(channel.scope)
        self.receiver.resume(channel.inbox)

    def channels(self) -> tuple[Channel[Any], ...]:
        """Return the channels that are open."""
        return tuple(self._channels.values())

    def close(self) -> None:
        """Cancel the receive. A message that comes in this very moment is dropped and counted."""
        self.engine.remove_pollable(self.receiver)
        self.early.close()
        if self.receiver.is_posted:
            self.receiver.request.cancel()
            self.engine.watch(self.receiver.request, f"closing tag {self.tag}", self._on_closed)

    def _on_closed(self, error: AsyncdistError | None) -> None:
        if error is None and not self.receiver.request.cancelled:
            self.dropped["closed lane"] += 1

    @property
    def sent_count(self) -> int:
        """Number of messages sent on this tag."""
        return self._closed_sent_count + sum(channel.statistics().sent_count for channel in self._channels.values())

    @property
    def received_count(self) -> int:
        """Number of messages received on this tag."""
        of_closed = self._closed_received_count + self.receiver.received_late_count
        return of_closed + sum(channel.statistics().received_count for channel in self._channels.values())

    @property
    def early_count(self) -> int:
        """Number of frames for scopes that are not open: those that wait, and those dropped at the end."""
        return len(self.early) + self._never_opened_count


class Channel(Generic[MessageT]):
    """Carries messages of one dataclass, or of a union of them, on a tag. Made by :meth:`asyncdist.World.channel`.

    **Ordering**: messages from one rank arrive in the order in which it sent them.
    """

    def __init__(
        self,
        demultiplexer: TagDemultiplexer,
        codec: wire.Codec,
        scope: int,
        *,
        name: str,
        capacity: int,
        overflow: Overflow,
        peer_scope: int | None = None,
        handler: Callable[[Envelope[Any]], None] | None = None,
        left: Collection[int] = (),
    ) -> None:
        self.demultiplexer = demultiplexer
        self.scope = scope
        self._peer_scope = scope if peer_scope is None else peer_scope
        self.name = name
        self.overflow: Overflow = overflow
        self.epoch = 0
        self._awaiting = f"a message on {name}, tag {demultiplexer.tag}"
        self._codec = codec
        self._engine = demultiplexer.engine
        self._capacity = capacity
        self._sending_count = 0
        self.dropped_count = 0  # messages that came after main had returned
        self.inbox = Inbox(
            demultiplexer.receiver,
            name=name,
            tag=demultiplexer.tag,
            capacity=capacity,
            overflow=overflow,
            handler=handler,
            fail=self.fail,
        )
        self._outbox = Outbox(
            codec,
            self._routes_of(self._peer_scope),
            demultiplexer.engine.transport.start_send,
            demultiplexer.engine.transport.prepare_send,
            tag=demultiplexer.tag,
            size=demultiplexer.engine.transport.size,
            name=name,
            # Peers that heard an earlier channel of this scope go on counting from there.
            sequence=demultiplexer.sent_count,
            left=left,
        )
        self._post = self._outbox.post
        # Where a doorbell rings, nothing arrives while this rank runs on.
        self._hot_test_count = 1 if demultiplexer.engine.transport.capabilities.wakes else HOT_TEST_COUNT
        self._since_yield = 0
        demultiplexer.attach(self)

    # -- sending ----------------------------------------------------------------------------------------------------

    def send_nowait(self, message: MessageT, dest: int, *, round: int = 0) -> None:
        """Start to send, and go on; the runtime keeps the message until it has left.

        Args:
            message: one of the channel's dataclasses.
            dest: a rank, possibly this one.
            round: the protocol's round, carried in the header.

        Raises:
            LocalProtocolError: it is not a message of this channel, it is too large, or there is no such rank.
            BusyError: as many sends as the channel's capacity are still under way.
            ClosedError: the channel is closed, or main has returned on ``dest``, which receives nothing more. (Messages
                sent before this rank heard so are dropped and counted there.)
            RankLostError: the peer is lost, or the job has failed.
        """
        if self._sending_count >= self._capacity:
            self._engine.poll()
            if self._sending_count >= self._capacity:
                raise BusyError(
                    f"{self.name}: {self._capacity} sends are under way; await send() to wait",
                    tag=self.demultiplexer.tag,
                )
        request = self._post(message, dest, round)
        if request is not None:
            self._sending_count += 1
            self._watch(request, dest, self._on_sent)

    async def send(self, message: MessageT, dest: int, *, round: int = 0) -> None:
        """Send and wait until the message has left, which for a large one may be when ``dest`` receives.

        **Cancellation**: the message is sent all the same.

        Raises:
            LocalProtocolError, ClosedError, RankLostError: as ``send_nowait``.
        """
        request = self._post(message, dest, round)
        if request is not None:
            waiter = self._engine.loop.create_future()
            self._watch(request, dest, functools.partial(resolve_waiter, waiter))
            await self._engine.park(waiter, f"{self.name}: send to {dest}")
            return
        self._since_yield += 1
        if self._since_yield >= FAIRNESS_PERIOD:  # only once it is posted: another task's later send would overtake it
            self._since_yield = 0
            await yield_to_loop()

    def _watch(self, request: Request, dest: int, on_done: Callable[[AsyncdistError | None], None]) -> None:
        """Keep a message that has not left at once."""
        demultiplexer = self.demultiplexer

        def on_left(error: AsyncdistError | None) -> None:
            demultiplexer.under_way_count -= 1
            on_done(error)

        demultiplexer.under_way_count += 1
        demultiplexer.slow_dests.add(dest)
        self._engine.watch(request, f"{self.name}: send to {dest}", on_left)

    def _on_sent(self, error: AsyncdistError | None) -> None:
        self._sending_count -= 1
        if error is not None:
            logger.debug("%s: %s", self.name, error)

    # -- receiving --------------------------------------------------------------------------------------------------

    async def receive(self, *, timeout_s: float | None = None) -> Envelope[MessageT]:
        """Wait for the next message, and return it.

        Args:
            timeout_s: give up after so many seconds. Everything that has arrived is taken in before that is judged, so
                a loop that was blocked by computing does not time out on a message that lay there.

        **Cancellation**: loses nothing.

        Raises:
            TimeoutError: no message came in time.
            RemoteProtocolError: a peer overflowed this channel.
            RankLostError: the job has failed, or the peer it waits for.
            ClosedError: the channel is closed.
        """
        self._since_yield += 1
        if self._since_yield >= FAIRNESS_PERIOD:
            self._since_yield = 0
            await yield_to_loop()
        envelope = self.inbox.take(self._hot_test_count)
        if envelope is None:
            self._since_yield = 0
            await self.wait_mail(timeout_s)
            envelope = self.inbox.take(0)
            assert envelope is not None, f"{self.name} was ready, and had no message"
        return envelope

    def receive_nowait(self) -> Envelope[MessageT] | None:
        """Return the next message if one is here, else None. Raises as ``receive``."""
        return self.inbox.take(0)

    def __aiter__(self) -> AsyncIterator[Envelope[MessageT]]:
        """Iterate over messages until the channel is closed."""
        return self

    async def __anext__(self) -> Envelope[MessageT]:
        try:
            return await self.receive()
        except ClosedError:
            raise StopAsyncIteration from None

    async def wait_mail(self, timeout_s: float | None = None) -> None:
        """Wait until ``receive_nowait`` returns a message or raises. Raises TimeoutError as ``receive``."""
        deadline = None if timeout_s is None else self._engine.loop.time() + timeout_s
        inbox = self.inbox
        while not inbox.is_ready:
            waiter = self._engine.loop.create_future()
            inbox.waiters.append(waiter)
            if self.demultiplexer.early_count:
                self.demultiplexer.early.watch()
            try:
                if deadline is None:
                    await self._engine.park(waiter, self._awaiting)
                else:
                    await self._wait_until(waiter, deadline, timeout_s or 0.0)
            finally:
                inbox.wait_no_more(waiter)

    async def _wait_until(self, waiter: asyncio.Future[None], deadline: float, timeout_s: float) -> None:
        try:
            async with asyncio.timeout_at(deadline):
                await self._engine.park(waiter, self._awaiting)
        except TimeoutError:
            await self._engine.drain()
            if not self.is_ready:
                early = self.demultiplexer.early.describe()
                hint = f"; {early}" if early else ""
                raise TimeoutError(f"{self.name}: no message for {timeout_s:g} s{hint}") from None

    # -- called by the demultiplexer and the world ------------------------------------------------------------------

    def known_by(self) -> list[tuple[tuple[int, int], wire.Decode]]:
        """Return, for each kind, the key and stamp of its frames, and how to decode them."""
        return list(zip(map(wire.keys_of, self._routes_of(self.scope)), self._codec.decoders, strict=True))

    def _routes_of(self, scope: int) -> list[bytes]:
        return [wire.pack_route(kind, self.demultiplexer.nonce, self.epoch, scope) for kind in range(self.kind_count)]

    @property
    def kind_count(self) -> int:
        """Number of message types that this channel carries."""
        return len(self._codec.decoders)

    def on_left(self) -> None:
        """Check the next message's rank: a rank has left."""
        self._outbox.look_again()

    def fail(self, error: AsyncdistError) -> None:
        """Make every receive raise ``error`` from now on."""
        self.inbox.failure = error
        self._wake_all()

    def close(self, *, afterwards: Callable[[Envelope[MessageT]], None] | None = None) -> None:
        """Receive no more. Tasks that wait get ClosedError, once the mailbox is empty.

        Args:
            afterwards: called with each message that was not received, and with each that still comes until the scope
                is opened again: its sender may wait for an answer. Without it, messages that still come are dropped and
                counted.
        """
        if not self.inbox.is_closed:
            self.inbox.is_closed = self._outbox.is_closed = True
            self.demultiplexer.detach(self, keeps_routes=afterwards is not None)
            if afterwards is not None:
                self.inbox.handler = afterwards
                while self.inbox.mailbox:
                    afterwards(self.inbox.mailbox.popleft())
            self._wake_all()

    def _wake_all(self) -> None:
        for waiter in self.inbox.waiters:
            resolve_waiter(waiter, None)
        self._engine.recheck()

    @property
    def is_full(self) -> bool:
        """Whether the mailbox has reached its capacity."""
        return self.inbox.is_full

    @property
    def is_awaited(self) -> bool:
        """Whether a user's task waits for a message."""
        return bool(self.inbox.waiters) and self.overflow == "stall"

    @property
    def is_ready(self) -> bool:
        """Whether ``receive_nowait`` returns a message or raises."""
        return self.inbox.is_ready

    @property
    def waiting_count(self) -> int:
        """Number of messages that have not been received yet."""
        return len(self.inbox.mailbox)

    @property
    def unread_count(self) -> int:
        """Number of messages that were not received, those dropped after main had returned included."""
        return len(self.inbox.mailbox) + self.dropped_count

    def statistics(self) -> ChannelStatistics:
        """Return the counts since the channel was opened."""
        return ChannelStatistics(
            sent_count=self._outbox.sent_count,
            received_count=self.inbox.received_count,
            waiting_count=len(self.inbox.mailbox),
            sending_count=self._sending_count,
        )
