"""Typed, bounded channels, multiplexed by tag and scope.

A :class:`TagDemultiplexer` is one tag's inlet: a single persistent wildcard receive, whose frames it checks and hands
to the :class:`Channel` of their scope, which it finds by the route in the frame's header. Frames for a scope that is
not open here yet wait, within a bound; frames for a closed scope are dropped and counted. What does not decode is
counted and logged once per peer, and never raises here. Reasons for drops are few, so that their counts take no memory;
the last example of each is kept.

The runtime's own channels have a *handler* in place of a mailbox: a function, called as each message arrives.

A channel's mailbox is bounded. When it is full, a user's channel *stalls*: its lane takes nothing more until somebody
receives, so only that tag stops. Frames for channels of a user that are not open yet do the same when they are too
many. A protocol's channel, which knows how much may be under way, fails with RemoteProtocolError instead
(``"error"``), or keeps the newest message of each source (``"latest"``).

A rank whose main has returned receives nothing more on its user's channels: what still comes is dropped and counted, so
that no sender waits for it, and a send that starts when the sender has heard of it raises ClosedError.
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

#: Tests of the lane inside one ``receive`` before it lets the loop run. A reply that is on its way is caught here.
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
    """One tag's inlet and outlet on this rank.

    Args:
        engine: polls it.
        tag: its tag.
        nonce: of the job; frames with another are strangers.
        is_users: whether its channels are a user's, which lose nothing, in place of a protocol's.

    Attributes:
        early: frames for scopes that are not open yet.
        dropped: frames that were not delivered, by reason.
        drop_examples: the last one of each reason, in words.
        under_way_count: messages that have not left yet.
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
        self.inlet = FrameReceiver(request, buffer, drop=self.drop, explain=self._explain, ring=engine.ring)
        engine.add_inlet(self.inlet)

    def _explain(self, frame: wire.FrameReader, source: int) -> bool:
        """Drop or keep a frame that is for no open channel; whether nothing more is to be taken."""
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
        """Main has returned here: take what still comes for a user's channels and drop it, so that no sender waits."""
        if self.is_users:
            self._has_left = True
            for channel in self._channels.values():
                for (key, _), _ in channel.known_by():
                    self.inlet.close(key)
            self.inlet.resume(self.inlet.stalled_on)

    def on_left(self, rank: int) -> bool:
        """``rank`` receives nothing more on a user's channels; whether messages for it may still be under way."""
        for channel in self._channels.values():
            channel.on_left()
        return self.is_users and rank in self.slow_dests

    def _awaited_names(self) -> list[str]:
        return [channel.name for channel in self._channels.values() if channel.is_awaited]

    def drop(self, source: int, reason: str, particulars: str = "") -> None:
        """Count a frame that is not delivered; the first one of each peer is logged.

        Args:
            source: the sender's rank.
            reason: one of a few.
            particulars: of this frame.
        """
        what = particulars or reason
        self.dropped[reason] += 1
        self.drop_examples[reason] = f"tag {self.tag}, rank {source}: {what}"
        if source not in self._complained_about:
            self._complained_about.add(source)
            logger.warning(
                "tag %d: dropped a frame from rank %d: %s (further ones are only counted)", self.tag, source, what
            )

    def attach(self, channel: Channel[Any]) -> None:
        """Frames of the channel's scope go to it from now on, those that came early first."""
        if channel.scope in self._channels:
            raise LocalProtocolError(f"tag {self.tag}: {channel.name} is open already", tag=self.tag)
        self._channels[channel.scope] = channel
        for (key, stamp), decode in channel.known_by():
            self.inlet.close(key)  # to those who came before, see detach
            self.inlet.routes[key] = stamp, channel.inbox, decode
        early = self.early.take_all()
        self.inlet.resume(self.inlet)
        for source, frame in early:
            self.inlet.deliver(frame, frame.nbytes, source)

    def detach(self, channel: Channel[Any], *, keeps_routes: bool) -> None:
        """The scope is closed: what still comes for it is dropped and counted, or goes to the channel's handler."""
        if self._channels.pop(channel.scope, None) is not None:
            counts = channel.statistics()
            self._closed_sent_count += counts.sent_count
            self._closed_received_count += counts.received_count
            for (key, _), _ in () if keeps_routes else channel.known_by():
                self.inlet.close(key)
        self._closed_scopes.add(channel.scope)
        self.inlet.resume(channel.inbox)

    def channels(self) -> tuple[Channel[Any], ...]:
        """Those that are open."""
        return tuple(self._channels.values())

    def close(self) -> None:
        """Take the receive back. A message that comes in this very moment is dropped and counted."""
        self.engine.remove_inlet(self.inlet)
        self.early.close()
        if self.inlet.is_posted:
            self.inlet.request.cancel()
            self.engine.watch(self.inlet.request, f"closing tag {self.tag}", self._on_closed)

    def _on_closed(self, error: AsyncdistError | None) -> None:
        if error is None and not self.inlet.request.cancelled:
            self.dropped["closed lane"] += 1

    @property
    def sent_count(self) -> int:
        """Messages sent on this tag."""
        return self._closed_sent_count + sum(channel.statistics().sent_count for channel in self._channels.values())

    @property
    def received_count(self) -> int:
        """Messages received on this tag."""
        of_closed = self._closed_received_count + self.inlet.received_late_count
        return of_closed + sum(channel.statistics().received_count for channel in self._channels.values())

    @property
    def early_count(self) -> int:
        """Frames that have come for a scope that is not open: those that wait, and those dropped at the end."""
        return len(self.early) + self._never_opened_count


class Channel(Generic[MessageT]):
    """Messages of one dataclass, or of a union of them, on one tag. Made by :meth:`asyncdist.World.channel`.

    **Ordering**: messages from one rank arrive in the order in which it sent them.
    """

    def __init__(
        self,
        lane: TagDemultiplexer,
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
        self.lane = lane
        self.scope = scope
        self._peer_scope = scope if peer_scope is None else peer_scope
        self.name = name
        self.overflow: Overflow = overflow
        self.epoch = 0
        self._awaiting = f"a message on {name}, tag {lane.tag}"
        self._codec = codec
        self._engine = lane.engine
        self._capacity = capacity
        self._sending_count = 0
        self.dropped_count = 0  # messages that came after main had returned
        self.inbox = Inbox(
            lane.inlet,
            name=name,
            tag=lane.tag,
            capacity=capacity,
            overflow=overflow,
            handler=handler,
            fail=self.fail,
        )
        self._outbox = Outbox(
            codec,
            self._routes_of(self._peer_scope),
            lane.engine.transport.start_send,
            lane.engine.transport.prepare_send,
            tag=lane.tag,
            size=lane.engine.transport.size,
            name=name,
            # Peers that heard an earlier channel of this scope go on counting from there.
            sequence=lane.sent_count,
            left=left,
        )
        self._post = self._outbox.post
        # Where a doorbell rings, nothing arrives while this rank runs on.
        self._hot_test_count = 1 if lane.engine.transport.capabilities.wakes else HOT_TEST_COUNT
        self._since_yield = 0
        lane.attach(self)

    # -- sending ----------------------------------------------------------------------------------------------------

    def send_nowait(self, message: MessageT, dest: int, *, round: int = 0) -> None:
        """Send and go on; the runtime keeps the message until it has left.

        Args:
            message: one of the channel's dataclasses.
            dest: a rank, possibly this one.
            round: the protocol's round, carried in the header.

        Raises:
            LocalProtocolError: not a message of this channel, above the limit, or no such rank.
            BusyError: as many sends as the channel's capacity are still under way.
            ClosedError: the channel is closed, or main has returned on ``dest``, which receives nothing more. (What it
                was sent before this rank heard so is dropped and counted there.)
            RankLostError: the peer is lost, or the job has failed.
        """
        if self._sending_count >= self._capacity:
            self._engine.poll()
            if self._sending_count >= self._capacity:
                raise BusyError(
                    f"{self.name}: {self._capacity} sends are under way; await send() to wait", tag=self.lane.tag
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
        lane = self.lane

        def on_left(error: AsyncdistError | None) -> None:
            lane.under_way_count -= 1
            on_done(error)

        lane.under_way_count += 1
        lane.slow_dests.add(dest)
        self._engine.watch(request, f"{self.name}: send to {dest}", on_left)

    def _on_sent(self, error: AsyncdistError | None) -> None:
        self._sending_count -= 1
        if error is not None:
            logger.debug("%s: %s", self.name, error)

    # -- receiving --------------------------------------------------------------------------------------------------

    async def receive(self, *, timeout_s: float | None = None) -> Envelope[MessageT]:
        """The next message.

        Args:
            timeout_s: give up after so long. Everything that has arrived is taken in before that is judged, so a loop
                that was blocked by compute does not time out on a message that lay there.

        **Cancellation**: loses nothing.

        Raises:
            TimeoutError: nothing came in time.
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
            assert envelope is not None, f"{self.name} was ready, and had nothing to say"
        return envelope

    def receive_nowait(self) -> Envelope[MessageT] | None:
        """The next message if one is here, else None. Raises as ``receive``."""
        return self.inbox.take(0)

    def __aiter__(self) -> AsyncIterator[Envelope[MessageT]]:
        """Messages until the channel is closed."""
        return self

    async def __anext__(self) -> Envelope[MessageT]:
        try:
            return await self.receive()
        except ClosedError:
            raise StopAsyncIteration from None

    async def wait_mail(self, timeout_s: float | None = None) -> None:
        """Wait until ``receive_nowait`` has something to say. Raises TimeoutError as ``receive``."""
        deadline = None if timeout_s is None else self._engine.loop.time() + timeout_s
        inbox = self.inbox
        while not inbox.is_ready:
            waiter = self._engine.loop.create_future()
            inbox.waiters.append(waiter)
            if self.lane.early_count:
                self.lane.early.watch()
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
                early = self.lane.early.describe()
                hint = f"; {early}" if early else ""
                raise TimeoutError(f"{self.name}: no message for {timeout_s:g} s{hint}") from None

    # -- called by the lane and the world ---------------------------------------------------------------------------

    def known_by(self) -> list[tuple[tuple[int, int], wire.Decode]]:
        """By what its frames are known, and how to decode each kind."""
        return list(zip(map(wire.keys_of, self._routes_of(self.scope)), self._codec.decoders, strict=True))

    def _routes_of(self, scope: int) -> list[bytes]:
        return [wire.pack_route(kind, self.lane.nonce, self.epoch, scope) for kind in range(self.kind_count)]

    @property
    def kind_count(self) -> int:
        """Message types that this channel carries."""
        return len(self._codec.decoders)

    def on_left(self) -> None:
        """A rank has left: the next message may be for it."""
        self._outbox.look_again()

    def fail(self, error: AsyncdistError) -> None:
        """Everyone who receives gets ``error`` from now on."""
        self.inbox.failure = error
        self._wake_all()

    def close(self, *, afterwards: Callable[[Envelope[MessageT]], None] | None = None) -> None:
        """Receive no more. Whoever waits gets ClosedError, once the mailbox is empty.

        Args:
            afterwards: called with each message that nobody has received, and with each that still comes until the
                scope is opened again: its sender may wait for an answer. Without it, what still comes is dropped and
                counted.
        """
        if not self.inbox.is_closed:
            self.inbox.is_closed = self._outbox.is_closed = True
            self.lane.detach(self, keeps_routes=afterwards is not None)
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
        """Whether ``receive_nowait`` has something to say: a message, or an error."""
        return self.inbox.is_ready

    @property
    def waiting_count(self) -> int:
        """Messages that nobody has received yet."""
        return len(self.inbox.mailbox)

    @property
    def unread_count(self) -> int:
        """Those, and the ones that were dropped since main had returned."""
        return len(self.inbox.mailbox) + self.dropped_count

    def statistics(self) -> ChannelStatistics:
        """Counts since the channel was opened."""
        return ChannelStatistics(
            sent_count=self._outbox.sent_count,
            received_count=self.inbox.received_count,
            waiting_count=len(self.inbox.mailbox),
            sending_count=self._sending_count,
        )
