"""Packs, sends, checks, decodes and queues single messages, without waiting.

An :class:`Outbox` checks, packs and posts a channel's messages. A :class:`FrameReceiver` receives the messages of a tag
as bytes (*frames*), checks them, and selects the :class:`Inbox` of each frame's channel. The inbox checks the order,
decodes the message and queues it until a task receives it. :mod:`asyncdist.messaging.channels` adds the waiting.

The module is compiled if a C compiler is available (:mod:`asyncdist.compiled`).
"""

from __future__ import annotations

import asyncio
import functools
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, Generic, Literal, NamedTuple, TypeAlias, TypeVar

from asyncdist.errors import AsyncdistError, ClosedError, LocalProtocolError, RankLostError, RemoteProtocolError
from asyncdist.messaging import wire
from asyncdist.messaging.flow_control import HeldSend, Lane, TagFlow
from asyncdist.messaging.polling import Pollable, Poller
from asyncdist.messaging.wire import FrameBuffer, FrameReader, FrameWriter
from asyncdist.transports.base import PersistentReceive, Request
from asyncdist.transports.persistent_send import PersistentSend

MessageT = TypeVar("MessageT")
Overflow: TypeAlias = Literal["stall", "error", "latest"]

#: Largest payload, in bytes, that is sent from a prepared buffer.
PREPARED_NBYTES_MAX: Final = 512
#: Maximum number of messages that one poll of a tag delivers.
DELIVERY_COUNT_MAX: Final = 64


class Envelope(NamedTuple, Generic[MessageT]):
    """Received message with its sender and its round number.

    Attributes:
        message: Instance of one of the channel's dataclasses.
        source: Rank of the sender.
        round: Round number of the protocol, or 0 if the protocol has no rounds.
    """

    message: MessageT
    source: int
    round: int


#: Function that makes an envelope in half the time of ``Envelope(...)``. It is called once per message.
_as_envelope: Final[Callable[[Any], Envelope[Any]]] = functools.partial(tuple.__new__, Envelope)


class _Prepared:
    """Reusable buffer, with its persistent send, for messages of one type and size to one rank."""

    def __init__(self, kind: int, dest: int, payload_nbytes: int, buffer: FrameBuffer, send: PersistentSend) -> None:
        self.kind = kind
        self.dest = dest
        self.payload_nbytes = payload_nbytes
        self.buffer = buffer
        self.send = send


class Outbox:
    """Checks, packs and posts the messages that a channel sends.

    Args:
        sequence: Sequence number of the last message on the tag, from which this channel continues.
        contacts: Set to which the receivers of messages are added.
        left: Ranks that no longer receive on this channel. Call :meth:`recheck_receiver` after adding a rank.
        flow: Flow control of the tag, or None if the channel has no flow control.

    Attributes:
        strangers: Restarted ranks to which nothing is sent until they have sent a message on this channel.
        sequence: Sequence number of the last posted message.
    """

    def __init__(
        self,
        codec: wire.Codec,
        routes: Sequence[bytes],
        engine: Poller,
        *,
        tag: int,
        name: str,
        sequence: int,
        contacts: set[int],
        flow: TagFlow | None,
        left: Collection[int] = (),
    ) -> None:
        self._codec = codec
        self._engine = engine
        self._transport = engine.transport
        self._prepares = True  # whether the transport may prepare further sends
        self._tag = tag
        self._name = name
        self._contacts = contacts
        self._left = left
        self._flow = flow
        self._lane: Lane | None = None  # flow-control state of the last message's receiver
        self.strangers: Collection[int] = ()
        self._dest: int | None = None  # receiver of the last message, which was already checked
        self.routes = routes
        # A writer takes a KiB, so it is created when its message type is first sent.
        self._writers: list[FrameWriter | None] = [None] * len(routes)
        self._prepared: dict[tuple[int, int, int], _Prepared] = {}
        self._last: _Prepared | None = None
        self.sequence = sequence
        self.sent_count = 0
        self.is_closed = False

    def post(self, message: Any, dest: int, round: int) -> Request | HeldSend | None:
        """Check a message and start sending it. Return the request, or None if the message has already left.

        If flow control does not allow another message to the receiver, return a :class:`HeldSend` instead.
        """
        if self.is_closed or dest is not self._dest or round:
            self._check(dest, round)
        kind, payload = self._codec.encode(message)
        self.sequence += 1
        self.sent_count += 1
        lane = self._lane
        if lane is not None and lane.room <= 0:
            held = HeldSend(self._engine, self._frame(kind, payload, round), dest, self._tag, self._name)
            lane.hold(held)
            return held
        rank = dest
        last = self._last
        if last is None or last.kind != kind or last.dest != rank or last.payload_nbytes != len(payload):
            last = self._prepare(kind, rank, len(payload))
        request = None
        if last is not None and last.send.settle():
            last.buffer.write(round, self.sequence, payload)
            last.send.start()
        else:
            request = self._transport.start_send(self._frame(kind, payload, round), dest, self._tag)
        if lane is not None:
            lane.room -= 1  # only now, because a send that fails reaches no receiver that counts it
        return request

    def _frame(self, kind: int, payload: bytes, round: int) -> Any:
        writer = self._writers[kind]
        if writer is None:
            writer = self._writers[kind] = self._transport.shared(FrameWriter, self.routes[kind])
        return writer.frame(round, self.sequence, payload)

    def _prepare(self, kind: int, dest: int, payload_nbytes: int) -> _Prepared | None:
        if not self._prepares and not self._prepared:
            return None
        key = kind, dest, payload_nbytes
        self._last = self._prepared.get(key)
        if self._last is None and self._prepares and payload_nbytes <= PREPARED_NBYTES_MAX:
            send = self._transport.prepare_send(wire.HEADER_NBYTES + payload_nbytes, dest, self._tag)
            if send is None:
                self._prepares = False
            else:
                buffer = FrameBuffer(self.routes[kind], send.buffer, payload_nbytes)
                self._last = self._prepared[key] = _Prepared(kind, dest, payload_nbytes, buffer, send)
        return self._last

    def _check(self, dest: int, round: int) -> None:
        if self.is_closed:
            raise ClosedError(f"{self._name} is closed", tag=self._tag)
        size = self._transport.size
        if type(dest) is not int or not 0 <= dest < size:
            raise LocalProtocolError(f"{self._name}: dest must be a rank from 0 to {size - 1}, got {dest!r}", dest=dest)
        if dest in self._left:
            raise ClosedError(f"{self._name}: rank {dest} has left and no longer receives", dest=dest, tag=self._tag)
        if dest in self.strangers:
            raise RankLostError(
                f"{self._name}: rank {dest} was restarted, and its previous process has ended", rank=dest
            )
        if type(round) is not int or not 0 <= round <= wire.ROUND_MAX:
            raise LocalProtocolError(
                f"{self._name}: round must be an int from 0 to {wire.ROUND_MAX}, got {round!r}", round=round
            )
        self._contacts.add(dest)
        self._dest = dest
        if self._flow is not None:
            self._lane = self._flow.lane(dest)

    def use_routes(self, routes: Sequence[bytes]) -> None:
        """Send later messages with these routes. The sends that were prepared for the old routes are dropped."""
        self.routes = routes
        self._writers = [None] * len(routes)
        self._prepared = {}
        self._last = None

    def recheck_receiver(self) -> None:
        """Check the next message's receiver again. Called when a rank has left or was restarted."""
        self._dest = None


class _LatestMailbox(OrderedDict[int, "Envelope[Any]"]):
    """Keeps only the newest envelope of each source. Sources are ordered by their first unread message."""

    def append(self, envelope: Envelope[Any]) -> None:
        self[envelope.source] = envelope

    def popleft(self) -> Envelope[Any]:
        return self.popitem(last=False)[1]


#: Mailbox of an inbox with a handler: always empty. An empty deque of its own would take 600 bytes.
_NO_MAILBOX: Final[deque[Envelope[Any]]] = deque(maxlen=0)


class Inbox:
    """Queues the received messages of a channel, in order, until a task receives them.

    Args:
        overflow: Effect of a full mailbox: ``"stall"`` stops receiving on the tag, ``"error"`` fails the channel,
            ``"latest"`` keeps only the newest message of each source.
        handler: Function called with each arriving message, or None to queue messages in the mailbox.
        fail: Function called with the error if a peer overflows the mailbox.
        counts_contacts: Whether the senders of messages are added to the receiver's contacts.

    Attributes:
        on_first: Function called with a rank when its first message arrives. None until a rank is restarted.
        waiters: Futures of the waiting tasks. Each arriving message wakes one task.
    """

    def __init__(
        self,
        receiver: FrameReceiver,
        *,
        name: str,
        tag: int,
        capacity: int,
        overflow: Overflow,
        handler: Callable[[Envelope[Any]], None] | None,
        fail: Callable[[AsyncdistError], None],
        counts_contacts: bool = True,
    ) -> None:
        self._receiver = receiver
        self._counts_contacts = counts_contacts
        self._name = name
        self._tag = tag
        self._capacity = capacity
        self._overflow = overflow
        self._fail = fail
        self.handler = handler
        self.on_first: Callable[[int], object] | None = None
        self.mailbox: deque[Envelope[Any]] | _LatestMailbox = _NO_MAILBOX
        if handler is None:
            self.mailbox = _LatestMailbox() if overflow == "latest" else deque()
        self.waiters: list[asyncio.Future[None]] = []
        self.received_count = 0
        self.failure: AsyncdistError | None = None
        self.is_closed = False
        self._last_sequence: dict[int, int] = {}
        # Sender and sequence number of the last frame. They are stored in _last_sequence when another rank's frame
        # arrives.
        self._source = -1
        self._sequence = 0

    def deliver(self, decode: wire.Decode, frame: FrameReader, source: int) -> bool:
        """Decode a received message and queue or drop it. Return whether the tag must stop receiving."""
        rank = source
        if rank != self._source:
            self._last_sequence[self._source] = self._sequence
            self._source = rank
            self._sequence = self._last_sequence.get(source, 0)
            if self._counts_contacts:
                self._receiver.contacts.add(source)
            if not self._sequence and self.on_first is not None:
                self.on_first(source)
        if frame.sequence <= self._sequence:
            self._receiver.drop(
                source, "out of order", f"{self._name}: sequence {frame.sequence} after {self._sequence}"
            )
            return False
        self._sequence = frame.sequence
        try:
            message = decode(frame.payload)
        except Exception as error:  # The bytes are not a valid message, or __post_init__ raised.
            self._receiver.drop(source, "no message", f"{self._name}: {type(error).__name__} {error}".rstrip())
            return False
        envelope = _as_envelope((message, source, frame.round))
        if self.handler is not None:
            self.received_count += 1
            self.handler(envelope)
            return False
        if self.waiters:
            self.wake_one()
        if len(self.mailbox) + 1 < self._capacity:
            self.mailbox.append(envelope)
            return False
        return self._fill(envelope)

    def _fill(self, envelope: Envelope[Any]) -> bool:
        """Queue a message that fills the mailbox, or handle an overflow. Return whether the tag must stop receiving."""
        if self._overflow == "error" and self.is_full:
            self._fail(
                RemoteProtocolError(
                    f"{self._name}: rank {envelope.source} sent more messages than the mailbox's capacity of "
                    f"{self._capacity}",
                    rank=envelope.source,
                    tag=self._tag,
                )
            )
        else:
            self.mailbox.append(envelope)
        return self._overflow == "stall" and self.is_full

    def take(self, test_count: int) -> Envelope[Any] | None:
        """Return the next message, or None if testing the tag's receive ``test_count`` times has found no message.

        Raises:
            AsyncdistError: The channel has failed.
            ClosedError: The channel is closed, and its mailbox is empty.
        """
        if not self.mailbox:
            while test_count:
                if self._receiver.deliver_up_to(1):
                    if self.mailbox:
                        break
                    self._receiver.engine.recheck()
                test_count -= 1
        if self.failure is not None:
            raise self.failure
        if not self.mailbox:
            if self.is_closed:
                raise ClosedError(f"{self._name} is closed", tag=self._tag)
            return None
        envelope = self.mailbox.popleft()
        self.received_count += 1
        if self.is_closed:
            self._receiver.received_late_count += 1
        elif self._receiver.stalled_on is self:
            self._receiver.resume(self)
        return envelope

    def take_all(self) -> list[Envelope[Any]]:
        """Remove and return all messages in the mailbox. Raise an error if the channel has failed or is closed."""
        envelope = self.take(0)
        if envelope is None:
            return []
        envelopes = [envelope]
        if self.mailbox:
            more = [self.mailbox.popleft() for _ in range(len(self.mailbox))]
            envelopes += more
            self.received_count += len(more)
            if self.is_closed:
                self._receiver.received_late_count += len(more)
        return envelopes

    def on_restarted(self, source: int) -> None:
        """Expect new sequence numbers from a restarted ``source``."""
        if source == self._source:
            self._source = -1
            self._sequence = 0
        self._last_sequence.pop(source, None)

    def last_sequences(self) -> dict[int, int]:
        """Return the sequence number of the last message of each sender."""
        return {
            rank: number for rank, number in (*self._last_sequence.items(), (self._source, self._sequence)) if number
        }

    def wake_one(self) -> None:
        """Wake the first waiting task."""
        while self.waiters:
            waiter = self.waiters.pop(0)
            if not waiter.done():
                waiter.set_result(None)
                return

    def remove_waiter(self, waiter: asyncio.Future[None]) -> None:
        """Remove ``waiter``, which was woken or cancelled. If messages remain, wake another waiting task."""
        if waiter in self.waiters:
            self.waiters.remove(waiter)
        elif self.mailbox:
            self.wake_one()

    @property
    def is_ready(self) -> bool:
        """Whether :meth:`take` would return a message or raise an error."""
        return bool(self.mailbox) or self.is_closed or self.failure is not None

    @property
    def is_full(self) -> bool:
        """Whether the mailbox has reached its capacity."""
        return len(self.mailbox) >= self._capacity


class FrameReceiver(Pollable):
    """Receives the messages (frames) of one tag, checks them, and passes each to the inbox of its channel.

    Args:
        request: Persistent receive into the buffer of ``frame`` that is not posted yet.
        drop: Function called with the source, the reason and the details when a frame is dropped.
        on_unrouted: Function that handles a frame whose route has no inbox, given the frame's reader and source. It
            returns whether the tag must stop receiving.
        contacts: Set to which the senders of messages are added.
        flow: Flow control that counts the frames of each source, or None.

    Attributes:
        routes: Stamp (job and epoch), inbox and decoders of each channel that receives on the tag, by its scope.
        stalled_on: Full inbox that prevents the tag from receiving. This object if ``on_unrouted`` has stopped the tag.
            None while the tag is receiving.
        received_late_count: Number of messages that tasks took from closed inboxes.
    """

    def __init__(
        self,
        request: PersistentReceive,
        frame: FrameReader,
        engine: Poller,
        *,
        drop: Callable[[int, str, str], None],
        on_unrouted: Callable[[FrameReader, int], bool],
        contacts: set[int],
        flow: TagFlow | None,
    ) -> None:
        self._flow = flow
        self._credit_count = 0 if flow is None else flow.credit_count
        self._lane: Lane | None = None  # flow-control state of the last frame's source
        self.request = request
        self.engine = engine
        self.contacts = contacts
        self._frame = frame
        self.drop = drop
        self._on_unrouted = on_unrouted
        self.routes: dict[int, tuple[int, Inbox, dict[int, wire.Decode]]] = {}
        # Route of the last delivered frame, because the next frame often has the same route.
        self._key = self._stamp = 0
        self._inbox: Inbox | None = None
        self._decode: wire.Decode
        self.stalled_on: Inbox | FrameReceiver | None = None
        self.received_late_count = 0
        self.request.start()
        self.is_posted = True

    def poll(self) -> int:
        """Deliver arrived messages, up to ``DELIVERY_COUNT_MAX``, and return their number."""
        return self.deliver_up_to(DELIVERY_COUNT_MAX)

    def deliver_up_to(self, count_max: int) -> int:
        """Deliver up to ``count_max`` arrived messages, and return their number. Invalid messages are dropped.

        After the last message, the next poll posts the receive, so that the task that is waiting for the message runs
        earlier.
        """
        if self.stalled_on is not None:
            return 0
        delivered = 0
        try:
            while delivered < count_max:
                if not self.is_posted:
                    self.request.start()
                    self.is_posted = True
                arrival = self.request.take()
                if arrival is None:
                    break
                self.is_posted = False
                delivered += 1
                source, nbytes = arrival
                is_stalled = self.deliver(self._frame, nbytes, source)
                if self._flow is not None:
                    self._count(source, self._flow)
                if is_stalled:
                    break
        except AsyncdistError as error:  # The frame is too large, or the receive has failed.
            self.is_posted = False
            self.drop(getattr(self.request, "source", -1), type(error).__name__, str(error))
            self.engine.ring()  # Other messages may have arrived before this error.
        if delivered == count_max > 1:
            self.engine.ring()  # More messages may have arrived.
        return delivered

    def _count(self, source: int, flow: TagFlow) -> None:
        lane = self._lane
        if lane is None or lane.rank != source:
            lane = self._lane = flow.lane(source)
        lane.uncredited += 1
        if lane.uncredited >= self._credit_count:
            flow.credit(lane)

    def forget_lane(self) -> None:
        """Remove the flow-control state of the last sender from the cache, because a rank was restarted."""
        self._lane = None

    def deliver(self, frame: FrameReader, nbytes: int, source: int) -> bool:
        """Pass a received message to the inbox of its channel. Return whether the tag must stop receiving."""
        try:
            frame.open(nbytes)
        except wire.FrameError as error:
            self.drop(source, error.reason, str(error))
            return False
        if self._inbox is None or frame.key != self._key or frame.stamp != self._stamp:
            found = self.routes.get(frame.key >> 32)
            decode = None if found is None or found[0] != frame.stamp else found[2].get(frame.key & 0xFFFFFFFF)
            if found is None or decode is None:
                if self._on_unrouted(frame, source):
                    self.stalled_on = self
                    return True
                return False
            self._key = frame.key
            self._stamp = frame.stamp
            self._inbox = found[1]
            self._decode = decode
        inbox = self._inbox
        if inbox.deliver(self._decode, frame, source):
            self.stalled_on = inbox
            return True
        return False

    def close(self, scope: int) -> None:
        """Stop passing messages with this scope to an inbox."""
        self.routes.pop(scope, None)
        self._inbox = None

    def resume(self, full: Inbox | FrameReceiver | None) -> None:
        """Resume receiving if it was stopped by the inbox ``full``, which has room again or was closed."""
        if self.stalled_on is full and full is not None:
            self.stalled_on = None
            self.engine.ring()
