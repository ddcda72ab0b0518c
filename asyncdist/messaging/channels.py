"""Typed, bounded channels, multiplexed by tag and scope.

:mod:`asyncdist.messaging.demultiplexer` receives the frames of a tag and hands them to the :class:`Channel` of their
scope. The runtime's own channels have a *handler* in place of a mailbox: a function, called as each message arrives.

A channel's mailbox is bounded. When it is full, a user's channel *stalls*: nothing more is taken on its tag until a
task receives. Frames for channels of a user that are not open yet do the same when they are too many. A protocol's
channel, which knows how much may be under way, fails with RemoteProtocolError instead (``"error"``), or keeps the
newest message of each source (``"latest"``).

A protocol whose coordinator may change has *epochs*, one for each coordinator (:meth:`Channel.enter_epoch`).
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from typing import Any, Final, Generic

from asyncdist.errors import AsyncdistError, BusyError, ClosedError, RankLostError
from asyncdist.messaging import wire
from asyncdist.messaging.demultiplexer import ChannelStatistics as ChannelStatistics, TagDemultiplexer
from asyncdist.messaging.engine import yield_to_loop
from asyncdist.messaging.mailboxes import (
    Envelope as Envelope,
    Inbox,
    MessageT,
    Outbox,
    Overflow as Overflow,
)
from asyncdist.messaging.polling import Peers, resolve_waiter
from asyncdist.transports.base import Request
from asyncdist.waits import WaitId, WaitKind

logger = logging.getLogger("asyncdist.messaging.channels")

#: Tests of the tag inside one ``receive`` before it lets the loop run. A reply that is on its way is caught here.
HOT_TEST_COUNT: Final = 100
#: After so many sends and receives that did not have to wait, one yields to the loop all the same.
FAIRNESS_PERIOD: Final = 64
#: How long a message may take that its sender has sent before it died, after its loss is known, in seconds.
LAST_MESSAGES_S: Final = 1.0


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
        epoch: int | None = None,
        earlier_handler: Callable[[Envelope[Any]], None] | None = None,
        admits_restarted: bool = False,
        counts_contacts: bool = True,
    ) -> None:
        self.demultiplexer = demultiplexer
        self._counts_contacts = counts_contacts
        self._admits_restarted = admits_restarted
        #: Returns an error where all other ranks are gone, and some of them lost.
        self.lost_senders: Callable[[], RankLostError | None] = lambda: None
        self._has_gone_senders = False
        self._is_forsaken: bool | None = None  # None while there are senders, True when their last messages have come
        self.scope = scope
        self._peer_scope = scope if peer_scope is None else peer_scope
        self.name = name
        self.overflow: Overflow = overflow
        self.has_epochs = epoch is not None
        self.epoch = epoch or 0
        self._awaiting = WaitId(WaitKind.MESSAGE, demultiplexer.tag, name=name)
        self._senders: Peers | None = None
        self._codec = codec
        self._engine = demultiplexer.engine
        self._capacity = capacity
        self._sending_count = 0
        self.dropped_count = 0  # messages that came after main had returned
        self.inbox = self._new_inbox(capacity, handler=handler, overflow=overflow)
        self._earlier_inbox = (
            None if earlier_handler is None else self._new_inbox(capacity, handler=earlier_handler, overflow="error")
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
            contacts=demultiplexer.sent_to if counts_contacts else set(),
            left=left,
        )
        self._post = self._outbox.post
        # Where a doorbell rings, nothing arrives while this rank runs on.
        self._hot_test_count = 1 if demultiplexer.engine.transport.capabilities.wakes else HOT_TEST_COUNT
        self._tells_sends = demultiplexer.engine.tells_sends
        self._since_yield = 0
        demultiplexer.attach(self)

    def _new_inbox(
        self, capacity: int, *, handler: Callable[[Envelope[Any]], None] | None, overflow: Overflow
    ) -> Inbox:
        return Inbox(
            self.demultiplexer.receiver,
            name=self.name,
            tag=self.demultiplexer.tag,
            capacity=capacity,
            overflow=overflow,
            handler=handler,
            fail=self.fail,
            counts_contacts=self._counts_contacts,
        )

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
        if (request is not None or self._tells_sends) and await self._has_waited_for(request, dest):
            return
        self._since_yield += 1
        if self._since_yield >= FAIRNESS_PERIOD:  # only once it is posted: another task's later send would overtake it
            self._since_yield = 0
            await yield_to_loop()

    async def _has_waited_for(self, request: Request | None, dest: int) -> bool:
        """Wait until a message has left; return whether that took its time."""
        engine, tag = self._engine, self.demultiplexer.tag
        name = engine.name_send(WaitKind.MESSAGE_LEFT, dest, tag)
        if request is None:
            return name is not None and await engine.repeat_sent(name, dest)
        waiter: asyncio.Future[None] = engine.loop.create_future()
        has_left = False

        def on_done(error: AsyncdistError | None) -> None:
            nonlocal has_left
            has_left = error is None and not waiter.done()
            wake = functools.partial(resolve_waiter, waiter, error)
            engine.wake_by(name, wake) if has_left and name and engine._in_pass else wake()

        self._watch(request, dest, on_done)
        try:
            await engine.park(waiter, self._sending(dest), is_of_request=True)
        finally:
            if name and not has_left:  # the wait has ended by something else
                engine.wake_by(name, bool)
        return True

    def _watch(self, request: Request, dest: int, on_done: Callable[[AsyncdistError | None], None]) -> None:
        """Keep a message that has not left at once."""
        demultiplexer = self.demultiplexer

        def on_left(error: AsyncdistError | None) -> None:
            demultiplexer.under_way_count -= 1
            on_done(error)

        demultiplexer.under_way_count += 1
        demultiplexer.slow_dests.add(dest)
        self._engine.watch(request, self._sending(dest), on_left)

    def _sending(self, dest: int) -> WaitId:
        """Identify the wait until a message to ``dest`` has left."""
        return WaitId(WaitKind.MESSAGE_SEND, self.demultiplexer.tag, dest, name=self.name)

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
            RankLostError: the job has failed; or nobody is left who could send: all other ranks are gone, some of them
                lost. While one of them lives it is waited for, also where the one that was to send is lost: a channel
                does not know which one that is.
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

    def receive_all(self) -> list[Envelope[MessageT]]:
        """Return all messages that are here, in their order: none waits, and each is taken. Raises as ``receive``."""
        return self.inbox.take_all()

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
            if self._has_gone_senders:
                self._check_senders()
            waiter = self._engine.loop.create_future()
            inbox.waiters.append(waiter)
            if self.demultiplexer.early_count:
                self.demultiplexer.early.watch()
            try:
                if deadline is None:
                    await self._engine.park(waiter, self._awaiting, peers=self._senders)
                else:
                    await self._wait_until(waiter, deadline, timeout_s or 0.0)
            finally:
                inbox.wait_no_more(waiter)

    async def _wait_until(self, waiter: asyncio.Future[None], deadline: float, timeout_s: float) -> None:
        has_come = await self._engine.park_until(
            waiter, lambda: self.is_ready, self._awaiting, deadline, peers=self._senders
        )
        if not has_come:
            early = self.demultiplexer.early.describe()
            hint = f"; {early}" if early else ""
            raise TimeoutError(f"{self.name}: no message for {timeout_s:g} s{hint}")

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

    def enter_epoch(self, epoch: int) -> None:
        """Exchange messages of this epoch from now on.

        Messages of earlier ones are dropped and counted, those that wait here included. Messages of later ones wait
        until this rank enters these.

        Args:
            epoch: a larger number than before.
        """
        assert self.has_epochs and epoch > self.epoch, f"{self.name}: epoch {epoch} after {self.epoch}"
        self.epoch = epoch
        self.demultiplexer.dropped["earlier epoch"] += len(self.inbox.mailbox)
        self.inbox.mailbox.clear()
        self._outbox.use_routes(self._routes_of(self._peer_scope))
        self.demultiplexer.route_to(self)

    def deliver_earlier(self, kind: int, frame: wire.FrameReader, source: int) -> None:
        """Give a message of an earlier epoch to the function that was named for these, if there is one."""
        if self._earlier_inbox is not None:
            self._earlier_inbox.deliver(self._codec.decoders[kind], frame, source)

    def name_senders(self, senders: Callable[[], Iterable[int]]) -> None:
        """Let reports know which ranks may send here."""
        self._senders = senders

    def on_gone(self) -> None:
        """Let those that wait look whether anybody is left who could send: a rank has left, or is lost."""
        self._has_gone_senders = True
        if self.inbox.waiters and self.lost_senders() is not None:
            self._wake_all()

    def _check_senders(self) -> None:
        """Raise RankLostError if nobody is left who could send, and what they had sent has had the time to arrive."""
        error = self.lost_senders()
        if error is None:
            self._is_forsaken = None
        elif self._is_forsaken:
            raise error
        elif self._is_forsaken is None:
            self._is_forsaken = False
            what = WaitId(WaitKind.LAST_MESSAGES, self.demultiplexer.tag, name=self.name)
            self._engine.call_later(LAST_MESSAGES_S, what, self._note_silence)

    def _note_silence(self) -> None:
        self._is_forsaken = True
        self._wake_all()

    def on_restarted(self, rank: int) -> None:
        """Expect the first messages of a new process in the place of ``rank``.

        A protocol's state was made with the process before. Unless the channel was opened for both, sends to the new
        one raise RankLostError until it has sent something on this channel, or :meth:`admit` is called.
        """
        for inbox in (self.inbox, self._earlier_inbox):
            if inbox is not None:
                inbox.on_restarted(rank)
                inbox.on_first = self.admit
        if not self._admits_restarted:
            self._outbox.strangers = {*self._outbox.strangers, rank}
        self._outbox.look_again()

    def admit(self, rank: int) -> None:
        """Send to the new process in the place of ``rank`` from now on; nothing where it is not new."""
        if rank in self._outbox.strangers:
            self._outbox.strangers = {other for other in self._outbox.strangers if other != rank}

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
                is opened again, or until so many other channels of this tag have closed that it is forgotten
                (:data:`asyncdist.messaging.demultiplexer.ANSWERING_COUNT_MAX`): its sender may wait for an answer.
                Without it, messages that still come are dropped and counted.
        """
        if not self.inbox.is_closed:
            self.inbox.is_closed = self._outbox.is_closed = True
            self.demultiplexer.detach(self, answers=afterwards is not None)
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
