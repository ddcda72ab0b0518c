"""Typed, bounded channels, multiplexed by tag and scope.

A :class:`Lane` is one tag's inlet: a single persistent wildcard receive, whose frames it checks and hands to the
:class:`Channel` of their scope, which it finds by the route in the frame's header. Frames for a scope that is not open
here yet wait, within a bound; frames for a closed scope are dropped and counted. What does not decode is counted and
logged once per peer, and never raises here.

The runtime's own channels have a *handler* in place of a mailbox: a function, called as each message arrives.

A channel's mailbox is bounded. When it is full, a user's channel *stalls*: its lane takes nothing more until somebody
receives, so only that tag stops. A protocol's channel, which knows how much may be under way, fails with
RemoteProtocolError instead (``"error"``), or keeps the newest message of each source (``"latest"``).
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Final, Generic, Literal, NamedTuple, TypeAlias, TypeVar

from asyncdist import wire
from asyncdist.errors import AsyncdistError, BusyError, ClosedError, LocalProtocolError, RemoteProtocolError
from asyncdist.progress import Engine, settle, yield_to_loop
from asyncdist.transports.base import Request

logger = logging.getLogger("asyncdist.channels")

MessageT = TypeVar("MessageT")
Overflow: TypeAlias = Literal["stall", "error", "latest"]

#: Tests of the lane inside one ``receive`` before it lets the loop run. A reply that is on its way is caught here.
HOT_TEST_COUNT: Final = 100
#: After so many sends and receives that did not have to wait, one yields to the loop all the same.
FAIRNESS_PERIOD: Final = 32
#: Messages that one poll of a lane may deliver.
DELIVERY_COUNT_MAX: Final = 64
#: Frames kept for scopes that are not open yet, per lane.
EARLY_FRAME_COUNT_MAX: Final = 1024
#: How long they may wait while somebody awaits another channel of their tag, before that is told.
EARLY_PATIENCE_S: Final = 5.0


class Envelope(NamedTuple, Generic[MessageT]):
    """A received message and what its frame said.

    Attributes:
        message: the dataclass.
        source: the sender's rank.
        round: the protocol's round; zero outside rounds.
    """

    message: MessageT
    source: int
    round: int


#: Half the time of Envelope(...), which is made once per message.
_as_envelope: Final[Callable[[Any], Envelope[Any]]] = functools.partial(tuple.__new__, Envelope)


@dataclass(frozen=True, slots=True)
class ChannelStatistics:
    """Counts since the channel was opened."""

    sent_count: int
    received_count: int
    waiting_count: int
    sending_count: int


class Lane:
    """One tag's inlet and outlet on this rank.

    Args:
        engine: polls it.
        tag: its tag.
        nonce: of the job; frames with another are strangers.
    """

    def __init__(self, engine: Engine, tag: int, nonce: int) -> None:
        self.engine = engine
        self.tag = tag
        self.nonce = nonce
        self.dropped: Counter[str] = Counter()
        self._buffer = bytearray(wire.FRAME_NBYTES_MAX)
        self._view = memoryview(self._buffer)
        self._channels: dict[int, Channel[Any]] = {}
        self._routes: dict[bytes, tuple[Channel[Any], wire.Decode]] = {}
        self._closed_scopes: set[int] = set()
        self._early: deque[tuple[int, bytes]] = deque()
        self._early_from: set[int] = set()
        self._early_told: set[int] = set()
        self._early_timer: asyncio.TimerHandle | None = None
        self._complained_about: set[int] = set()
        self.stalled_on: Channel[Any] | None = None
        self._closed_sent_count = self._closed_received_count = 0
        self._request = engine.transport.persistent_receive(self._buffer, tag)
        self._request.start()
        self._is_posted = True
        self._take = self._request.take
        engine.add_inlet(self)

    def poll(self, count_max: int = DELIVERY_COUNT_MAX) -> int:
        """Deliver what has arrived, up to ``count_max`` messages. Never raises for what a peer sent.

        The receive that brought the last one is posted again by the next poll: whoever waits for the message comes
        first.
        """
        if self.stalled_on is not None:
            return 0
        delivered = 0
        try:
            while delivered < count_max:
                if not self._is_posted:
                    self._request.start()
                    self._is_posted = True
                arrival = self._take()
                if arrival is None:
                    break
                self._is_posted = False
                delivered += 1
                source, nbytes = arrival
                if self._deliver(self._view[:nbytes], source):
                    break
        except AsyncdistError as error:  # a frame larger than any of ours, or the receive itself failed
            self._is_posted = False
            self.drop(getattr(self._request, "source", -1), str(error))
            self.engine.ring()  # what came meanwhile has rung already
        if delivered == count_max > 1:
            self.engine.ring()  # more may lie here
        return delivered

    def _deliver(self, frame: memoryview, source: int) -> bool:
        """Hand the frame to the channel of its route; whether that one is full now, so that the lane stalls."""
        try:
            _, packed_route, round_number, sequence = wire.decode_header(frame)
        except wire.FrameError as error:
            self.drop(source, str(error))
            return False
        found = self._routes.get(packed_route)
        if found is None:
            self._explain(wire.unpack_route(packed_route), frame, source)
            return False
        channel, decode = found
        if channel.deliver(decode, frame[wire.HEADER_NBYTES :], source, round_number, sequence):
            self.stalled_on = channel
            return True
        return False

    def _explain(self, route: wire.Route, frame: memoryview, source: int) -> None:
        """What becomes of a frame that is for no open channel."""
        if route.version != wire.VERSION:
            self.drop(source, f"version {route.version}, not {wire.VERSION}")
        elif route.nonce != self.nonce:
            self.drop(source, "a frame of another job")
        elif (channel := self._channels.get(route.scope)) is not None:
            if route.epoch != channel.epoch:
                self.dropped["other epoch"] += 1
            else:
                self.drop(source, f"{channel.name}: kind {route.kind}, of {channel.kind_count} known")
        elif route.scope in self._closed_scopes:
            self.dropped["closed scope"] += 1
        elif len(self._early) < EARLY_FRAME_COUNT_MAX:
            self._early.append((source, bytes(frame)))
            self._early_from.add(source)
            self.watch_early()
        else:
            self.drop(source, "too many frames for scopes that nobody has opened")

    def watch_early(self) -> None:
        """Ranks that open a channel under another type or name than their peers would wait in silence: say so in time.

        A user's channels alone: a protocol's members agree on theirs before they use them.
        """
        is_news = self._early_timer is None and not self._early_from <= self._early_told
        if is_news and any(channel.is_awaited for channel in self._channels.values()):
            self._early_timer = self.engine.loop.call_later(EARLY_PATIENCE_S, self._tell_early)

    def _tell_early(self) -> None:
        self._early_timer = None
        awaited = [channel.name for channel in self._channels.values() if channel.is_awaited]
        if awaited and not self._early_from <= self._early_told:
            self._early_told |= self._early_from
            logger.warning("awaiting %s for %g s: %s", " and ".join(awaited), EARLY_PATIENCE_S, self.describe_early())

    def describe_early(self) -> str:
        """What waits for a channel that is not open here, in words; empty where nothing does."""
        count, ranks = len(self._early), sorted(self._early_from)
        if not count:
            return ""
        noun, verb = ("message", "waits") if count == 1 else ("messages", "wait")
        who = f"rank{'s'[: len(ranks) > 1]} {', '.join(map(str, ranks))}"
        return (
            f"{count} {noun} on tag {self.tag} {verb} for a channel that this rank has not opened, from {who} "
            "(a channel is the same where tag, message type or name, and group are, and it is opened as often)"
        )

    def drop(self, source: int, why: str) -> None:
        """Count a frame that is not delivered; the first one of each peer is logged."""
        self.dropped[why] += 1
        if source not in self._complained_about:
            self._complained_about.add(source)
            logger.warning(
                "tag %d: dropped a frame from rank %d: %s (further ones are only counted)", self.tag, source, why
            )

    def resume(self, channel: Channel[Any]) -> None:
        """``channel`` has room again."""
        if self.stalled_on is channel:
            self.stalled_on = None
            self.engine.ring()

    def attach(self, channel: Channel[Any]) -> None:
        """Frames of the channel's scope go to it from now on, those that came early first."""
        if channel.scope in self._channels:
            raise LocalProtocolError(f"tag {self.tag}: {channel.name} is open already", tag=self.tag)
        self._channels[channel.scope] = channel
        self._routes.update((route, (channel, decode)) for route, decode in channel.routes())
        early, self._early = self._early, deque()
        self._early_from = set()
        for source, frame in early:
            self._deliver(memoryview(frame), source)

    def detach(self, channel: Channel[Any]) -> None:
        """The scope is closed: what still comes for it is dropped and counted."""
        if self._channels.pop(channel.scope, None) is not None:
            self._closed_sent_count += channel.statistics().sent_count
            self._closed_received_count += channel.statistics().received_count
            for route, _ in channel.routes():
                del self._routes[route]
        self._closed_scopes.add(channel.scope)
        self.resume(channel)

    def count_received_late(self) -> None:
        """A message was taken from a channel that is closed already."""
        self._closed_received_count += 1

    def channels(self) -> tuple[Channel[Any], ...]:
        """Those that are open."""
        return tuple(self._channels.values())

    def close(self) -> None:
        """Take the receive back. A message that comes in this very moment is dropped and counted."""
        self.engine.remove_inlet(self)
        if self._early_timer is not None:
            self._early_timer.cancel()
        if self._is_posted:
            self._request.cancel()
            self.engine.watch(self._request, f"closing tag {self.tag}", self._on_closed)

    def _on_closed(self, error: AsyncdistError | None) -> None:
        if error is None and not self._request.cancelled:
            self.dropped["closed lane"] += 1

    @property
    def sent_count(self) -> int:
        """Messages sent on this tag."""
        return self._closed_sent_count + sum(channel.statistics().sent_count for channel in self._channels.values())

    @property
    def received_count(self) -> int:
        """Messages received on this tag."""
        return self._closed_received_count + sum(c.statistics().received_count for c in self._channels.values())

    @property
    def early_count(self) -> int:
        """Frames that wait for a scope nobody has opened."""
        return len(self._early)


class _LatestMailbox(OrderedDict[int, "Envelope[MessageT]"]):
    """The newest envelope of each source, in the order in which the sources were first heard since their last one."""

    def append(self, envelope: Envelope[MessageT]) -> None:
        self[envelope.source] = envelope

    def popleft(self) -> Envelope[MessageT]:
        return self.popitem(last=False)[1]


_Mailbox: TypeAlias = deque[Envelope[MessageT]] | _LatestMailbox[MessageT]


class Channel(Generic[MessageT]):
    """Messages of one dataclass, or of a union of them, on one tag. Made by :meth:`asyncdist.World.channel`.

    **Ordering**: messages from one rank arrive in the order in which it sent them.
    """

    def __init__(
        self,
        lane: Lane,
        codec: wire.Codec,
        scope: int,
        *,
        name: str,
        capacity: int,
        overflow: Overflow,
        peer_scope: int | None = None,
        handler: Callable[[Envelope[Any]], None] | None = None,
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
        self._start_send = lane.engine.transport.start_send
        self._send_routes = self._routes_of(self._peer_scope)
        self._capacity = capacity
        self._size = lane.engine.transport.size
        self._handler = handler
        self._mailbox: _Mailbox[MessageT] = _LatestMailbox() if overflow == "latest" else deque()
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._last_sequence: dict[int, int] = {}
        # Peers that heard an earlier channel of this scope go on counting from there.
        self._sequence = lane.sent_count
        self._sent_count = self._received_count = self._sending_count = 0
        # Where a doorbell rings, nothing arrives while this rank runs on.
        self._hot_test_count = 1 if lane.engine.transport.capabilities.wakes else HOT_TEST_COUNT
        self._since_yield = 0
        self._failure: AsyncdistError | None = None
        self._closed = False
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
            ClosedError: the channel is closed.
            RankLostError: the peer is gone.
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
            self._engine.watch(request, f"{self.name}: send to {dest}", self._on_sent)

    async def send(self, message: MessageT, dest: int, *, round: int = 0) -> None:
        """Send and wait until the message has left, which for a large one may be when ``dest`` receives.

        **Cancellation**: the message is sent all the same.

        Raises:
            LocalProtocolError, ClosedError, RankLostError: as ``send_nowait``.
        """
        request = self._post(message, dest, round)
        if request is not None:
            await self._engine.wait(request, f"{self.name}: send to {dest}")
            return
        self._since_yield += 1
        if self._since_yield >= FAIRNESS_PERIOD:  # only once it is posted: another task's later send would overtake it
            self._since_yield = 0
            await yield_to_loop()

    def _post(self, message: MessageT, dest: int, round: int) -> Request | None:
        """Start the send; None when the message has left already."""
        if self._closed or type(dest) is not int or not 0 <= dest < self._size or not 0 <= round <= wire.ROUND_MAX:
            raise self._why_not(dest, round)
        kind, payload = self._codec.encode(message)
        self._sequence += 1
        self._sent_count += 1
        frame = wire.encode_frame(self._send_routes[kind], round, self._sequence, payload)
        return self._start_send(frame, dest, self.lane.tag)

    def _why_not(self, dest: int, round: int) -> AsyncdistError:
        if self._closed:
            return ClosedError(f"{self.name} is closed", tag=self.lane.tag)
        if type(dest) is not int or not 0 <= dest < self._size:
            return LocalProtocolError(f"{self.name}: dest is {dest!r}; ranks go from 0 to {self._size - 1}", dest=dest)
        return LocalProtocolError(f"{self.name}: round is {round!r}; rounds go from 0 to {wire.ROUND_MAX}", round=round)

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
        mailbox = self._mailbox
        if not mailbox:
            poll = self.lane.poll
            for _ in range(self._hot_test_count):
                if poll(1) and mailbox:  # a further test would only delay the caller
                    break
            else:
                self._since_yield = 0
                await self.wait_mail(timeout_s)
        return self._take()

    def receive_nowait(self) -> Envelope[MessageT] | None:
        """The next message if one is here, else None. Raises as ``receive``."""
        return self._take() if self._mailbox or self._failure or self._closed else None

    def __aiter__(self) -> AsyncIterator[Envelope[MessageT]]:
        """Messages until the channel is closed."""
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[Envelope[MessageT]]:
        while True:
            try:
                envelope = await self.receive()
            except ClosedError:
                return
            yield envelope

    def _take(self) -> Envelope[MessageT]:
        if self._failure is not None:
            raise self._failure
        if not self._mailbox:
            raise ClosedError(f"{self.name} is closed", tag=self.lane.tag)
        envelope = self._mailbox.popleft()
        self._received_count += 1
        if self._closed:  # the lane took its counts when it was closed
            self.lane.count_received_late()
        if self.lane.stalled_on is self:
            self.lane.resume(self)
        return envelope

    async def wait_mail(self, timeout_s: float | None = None) -> None:
        """Wait until ``receive_nowait`` has something to say. Raises TimeoutError as ``receive``."""
        deadline = None if timeout_s is None else self._engine.loop.time() + timeout_s
        while not self.is_ready:
            waiter = self._engine.loop.create_future()
            self._waiters.append(waiter)
            if self.lane.early_count:
                self.lane.watch_early()
            try:
                if deadline is None:
                    await self._engine.park(waiter, self._awaiting)
                else:
                    await self._wait_until(waiter, deadline, timeout_s or 0.0)
            finally:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
                elif self._mailbox:  # this wake-up was spent on somebody who may have been cancelled: pass it on
                    self._wake_one()

    async def _wait_until(self, waiter: asyncio.Future[None], deadline: float, timeout_s: float) -> None:
        try:
            async with asyncio.timeout_at(deadline):
                await self._engine.park(waiter, self._awaiting)
        except TimeoutError:
            await self._engine.drain()
            if not self.is_ready:
                early = self.lane.describe_early()
                hint = f"; {early}" if early else ""
                raise TimeoutError(f"{self.name}: no message for {timeout_s:g} s{hint}") from None

    # -- called by the lane and the world ---------------------------------------------------------------------------

    def deliver(self, decode: wire.Decode, payload: memoryview, source: int, round: int, sequence: int) -> bool:
        """Take one frame of this scope; whether the lane must stall now."""
        last = self._last_sequence.get(source, 0)
        if sequence <= last:
            self.lane.drop(source, f"{self.name}: sequence {sequence} after {last}")
            return False
        self._last_sequence[source] = sequence
        try:
            message = decode(payload)
        except Exception as error:  # no message, or one whose __post_init__ refuses it; the bytes are a stranger's
            self.lane.drop(source, f"{self.name}: {type(error).__name__} {error}".rstrip())
            return False
        envelope = _as_envelope((message, source, round))
        if self._handler is not None:
            self._received_count += 1
            self._handler(envelope)
            return False
        mailbox = self._mailbox
        if self._waiters:
            self._wake_one()
        if len(mailbox) + 1 < self._capacity:
            mailbox.append(envelope)
            return False
        return self._fill(envelope)

    def _fill(self, envelope: Envelope[MessageT]) -> bool:
        """Take the message that makes the mailbox full, or the one after it."""
        if self.overflow == "error" and self.is_full:
            self.fail(
                RemoteProtocolError(
                    f"{self.name}: rank {envelope.source} overflowed a mailbox of {self._capacity}",
                    rank=envelope.source,
                    tag=self.lane.tag,
                )
            )
        else:
            self._mailbox.append(envelope)
        return self.overflow == "stall" and self.is_full

    def routes(self) -> list[tuple[bytes, wire.Decode]]:
        """What frames for this channel carry in their headers, and how to decode each kind."""
        return list(zip(self._routes_of(self.scope), self._codec.decoders, strict=True))

    def _routes_of(self, scope: int) -> list[bytes]:
        return [wire.pack_route(kind, self.lane.nonce, self.epoch, scope) for kind in range(self.kind_count)]

    @property
    def kind_count(self) -> int:
        """Message types that this channel carries."""
        return len(self._codec.decoders)

    def _wake_one(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def fail(self, error: AsyncdistError) -> None:
        """Everyone who receives gets ``error`` from now on."""
        self._failure = error
        self._wake_all()

    def close(self) -> None:
        """Receive no more. Whoever waits gets ClosedError, once the mailbox is empty."""
        if not self._closed:
            self._closed = True
            self.lane.detach(self)
            self._wake_all()

    def _wake_all(self) -> None:
        for waiter in self._waiters:
            settle(waiter, None)
        self._engine.recheck()

    @property
    def is_full(self) -> bool:
        """Whether the mailbox has reached its capacity."""
        return len(self._mailbox) >= self._capacity

    @property
    def is_awaited(self) -> bool:
        """Whether a user's task waits for a message."""
        return bool(self._waiters) and self.overflow == "stall"

    @property
    def is_ready(self) -> bool:
        """Whether ``receive_nowait`` has something to say: a message, or an error."""
        return bool(self._mailbox) or self._closed or self._failure is not None

    @property
    def waiting_count(self) -> int:
        """Messages that nobody has received yet."""
        return len(self._mailbox)

    def statistics(self) -> ChannelStatistics:
        """Counts since the channel was opened."""
        return ChannelStatistics(
            sent_count=self._sent_count,
            received_count=self._received_count,
            waiting_count=len(self._mailbox),
            sending_count=self._sending_count,
        )
