"""Channels: typed, bounded mailboxes for messages between ranks.

Channels that share a tag are distinguished by their *scope*, a hash of group, name and creation index. Instead of a
mailbox, a channel of the runtime may have a *handler*, a function that is called with each arriving message.

When the mailbox of a user's channel is full, its tag *stalls*: nothing is received on the tag until a task takes a
message. When a protocol's channel is full, it fails with RemoteProtocolError (``"error"``) or keeps only the newest
message of each source (``"latest"``). A protocol whose coordinator may change has one *epoch* per coordinator
(:meth:`Channel.enter_epoch`).
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
from asyncdist.messaging.engine import FAIRNESS_PERIOD, yield_to_loop
from asyncdist.messaging.flow_control import HeldSend
from asyncdist.messaging.mailboxes import Envelope as Envelope, Inbox, MessageT, Outbox, Overflow as Overflow
from asyncdist.messaging.polling import Peers, resolve_waiter
from asyncdist.transports.base import Request
from asyncdist.waits import WaitId, WaitKind

logger = logging.getLogger("asyncdist.messaging.channels")

#: Number of times that ``receive`` tests for messages before it yields to the loop. A reply often arrives during these
#: tests.
HOT_TEST_COUNT: Final = 100
#: Seconds during which the last messages of a lost sender may still arrive.
LAST_MESSAGES_S: Final = 1.0


class Channel(Generic[MessageT]):
    """Sends and receives instances of given dataclasses on a tag. Returned by :meth:`asyncdist.World.channel`.

    **Ordering**: messages from one rank arrive in the order in which that rank sent them.
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
        #: Function that returns an error if all other ranks have left or are lost, and at least one is lost.
        self.lost_senders: Callable[[], RankLostError | None] = lambda: None
        self._has_gone_senders = False
        # None while a rank can still send, False while its last messages may arrive, and True after LAST_MESSAGES_S.
        self._is_forsaken: bool | None = None
        self.scope = scope
        self._peer_scope = scope if peer_scope is None else peer_scope
        self.name = name
        self.overflow: Overflow = overflow
        self.has_epochs = epoch is not None
        self.epoch = epoch or 0
        self._senders: Peers | None = None
        self.codec = codec
        self._engine = demultiplexer.engine
        self._capacity = capacity
        self._sending_count = 0
        self.dropped_count = 0  # user messages that arrived after ``main`` had returned
        self.inbox = self._new_inbox(capacity, handler=handler, overflow=overflow)
        self._earlier_inbox = (
            None if earlier_handler is None else self._new_inbox(capacity, handler=earlier_handler, overflow="error")
        )
        self._outbox = Outbox(
            codec,
            self._routes_of(self._peer_scope),
            demultiplexer.engine,
            tag=demultiplexer.tag,
            name=name,
            # Other ranks expect the sequence numbers of an earlier channel with this scope to continue.
            sequence=demultiplexer.sent_count,
            contacts=demultiplexer.sent_to if counts_contacts else set(),
            flow=demultiplexer.flow,
            left=left,
        )
        # If the transport notifies this rank of messages, they arrive only while this rank yields, so one test is
        # enough.
        self._hot_test_count = 1 if demultiplexer.engine.transport.capabilities.wakes else HOT_TEST_COUNT
        self._notes_sends = demultiplexer.engine.notes_sends
        self._since_yield = 0
        demultiplexer.attach(self)

    @functools.cached_property
    def _awaiting(self) -> WaitId:
        return WaitId(WaitKind.MESSAGE, self.demultiplexer.tag, name=self.name)

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
        """Start sending a message, and return without waiting.

        Args:
            message: Instance of one of the channel's dataclasses.
            dest: Rank of the receiver, possibly this rank.
            round: Round number of the protocol, sent with the message.

        Raises:
            LocalProtocolError: ``message`` is not of the channel's types or too large, or ``dest`` is not a rank.
            BusyError: The number of sends in progress has reached the channel's capacity.
            ClosedError: The channel is closed, or ``main`` has returned on ``dest``, which therefore receives no
                further messages. Messages sent before this rank was notified of the return are dropped and counted on
                ``dest``.
            RankLostError: ``dest`` is lost. After the job has failed in another way, a send may return normally, but
                its message is lost. Receives then raise the failure.
        """
        if self._sending_count >= self._capacity:
            self._engine.poll()
            if self._sending_count >= self._capacity:
                raise BusyError(
                    f"{self.name}: the channel's capacity of {self._capacity} sends is in use; await send() to wait "
                    "for a free place",
                    tag=self.demultiplexer.tag,
                )
        request = self._outbox.post(message, dest, round)
        if request is not None:
            self._sending_count += 1
            self._watch(request, dest, self._on_sent)

    async def send(self, message: MessageT, dest: int, *, round: int = 0) -> None:
        """Send a message, and wait until it has left this rank. A large message leaves only when ``dest`` receives it.

        So does a small message if ``dest`` has not yet received 1024 earlier messages on this tag, or has not opened
        the channel. ``dest`` must be able to receive without this rank. It cannot, for example, while it is waiting for
        this rank in a collective.

        The arguments and the errors, except BusyError, are the same as for :meth:`send_nowait`.

        **Cancellation**: the message is sent anyway.
        """
        try:
            request = self._outbox.post(message, dest, round)
        except RankLostError:
            await self._engine.repeat_held(WaitKind.MESSAGE_LEFT, dest, self.demultiplexer.tag)
            raise
        if (request is not None or self._notes_sends) and await self._wait_until_left(request, dest):
            return
        self._since_yield += 1
        # Yield only after the post. If this task yielded before it, another task's send could overtake this message.
        if self._since_yield >= FAIRNESS_PERIOD:
            self._since_yield = 0
            await yield_to_loop()

    async def _wait_until_left(self, request: Request | HeldSend | None, dest: int) -> bool:
        """Wait until a message has left this rank. Return whether the task has waited.

        If ``request`` is None, the message has already left. The task then waits only in a replay of a run in which it
        had to wait.
        """
        engine, tag = self._engine, self.demultiplexer.tag
        name = engine.name_send(WaitKind.MESSAGE_LEFT, dest, tag)
        if request is None:
            return name is not None and await engine.repeat_sent(name, dest)
        waiter: asyncio.Future[None] = engine.loop.create_future()
        has_left = False

        def on_left(error: AsyncdistError | None) -> None:
            nonlocal has_left
            self.demultiplexer.under_way_count -= 1
            has_left = error is None and not waiter.done()
            wake = functools.partial(resolve_waiter, waiter, error)
            engine.wake_by(name, wake) if has_left and name and engine._in_pass else wake()

        self._watch(request, dest, on_left)
        try:
            await engine.park(waiter, self._sending(dest), is_of_request=True)
        finally:
            if name and not has_left:  # An error or a cancellation has ended the wait.
                engine.wake_by(name, bool)
        return True

    def _watch(self, request: Request | HeldSend, dest: int, on_left: Callable[[AsyncdistError | None], None]) -> None:
        """Count a message that has not left yet. When it leaves or fails, call ``on_left`` with None or the error."""
        self.demultiplexer.under_way_count += 1
        self.demultiplexer.slow_dests.add(dest)
        if isinstance(request, HeldSend):
            request.on_left = on_left
        else:
            self._engine.watch(request, self._sending(dest), on_left)

    def _sending(self, dest: int) -> WaitId:
        return WaitId(WaitKind.MESSAGE_SEND, self.demultiplexer.tag, dest, name=self.name)

    def _on_sent(self, error: AsyncdistError | None) -> None:
        self._sending_count -= 1
        self.demultiplexer.under_way_count -= 1
        if error is not None:
            logger.debug("%s: %s", self.name, error)

    # -- receiving --------------------------------------------------------------------------------------------------

    async def receive(self, *, timeout_s: float | None = None) -> Envelope[MessageT]:
        """Wait for the next message, and return it.

        Args:
            timeout_s: Seconds to wait, or None for no limit. A message that has arrived by then is received, even if
                the event loop was blocked during the timeout.

        **Cancellation**: no message is lost.

        Raises:
            TimeoutError: No message arrived in time.
            RemoteProtocolError: A peer overflowed this channel.
            RankLostError: The job has failed, or all other ranks have left or are lost, and at least one is lost.
            ClosedError: The channel is closed.
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
        """Return the next message, or None if no message has arrived. Does not wait."""
        return self.inbox.take(0)

    def receive_all(self) -> list[Envelope[MessageT]]:
        """Remove and return all messages that have arrived, in order, without waiting."""
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
        """Wait until ``receive_nowait`` would return a message or raise an error.

        Raise TimeoutError after ``timeout_s``.
        """
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
                inbox.remove_waiter(waiter)

    async def _wait_until(self, waiter: asyncio.Future[None], deadline: float, timeout_s: float) -> None:
        has_arrived = await self._engine.park_until(
            waiter, lambda: self.is_ready, self._awaiting, deadline, peers=self._senders
        )
        if not has_arrived:
            early = self.demultiplexer.early.describe()
            hint = f"; {early}" if early else ""
            raise TimeoutError(f"{self.name}: no message arrived for {timeout_s:g} s{hint}")

    # -- called by the demultiplexer and the world ------------------------------------------------------------------

    def _routes_of(self, scope: int) -> tuple[bytes, ...]:
        return wire.pack_routes(len(self.codec.decoders), self.demultiplexer.nonce, self.epoch, scope)

    def enter_epoch(self, epoch: int) -> None:
        """Send and receive only messages of ``epoch``, the number of a protocol's new coordinator, from now on.

        Messages of earlier epochs, including those in the mailbox, are dropped and counted. Messages of later epochs
        are kept until this rank enters their epoch.
        """
        assert self.has_epochs and epoch > self.epoch, f"{self.name}: epoch {epoch} after {self.epoch}"
        self.epoch = epoch
        self.demultiplexer.dropped["earlier epoch"] += len(self.inbox.mailbox)
        self.inbox.mailbox.clear()
        self._outbox.use_routes(self._routes_of(self._peer_scope))
        self.demultiplexer.route_to(self)

    def deliver_earlier(self, kind: int, frame: wire.FrameReader, source: int) -> None:
        """Decode a message sent under an earlier coordinator, and pass it to the ``earlier_handler``, if any."""
        if self._earlier_inbox is not None:
            self._earlier_inbox.deliver(self.codec.decoders[kind], frame, source)

    def name_senders(self, senders: Callable[[], Iterable[int]]) -> None:
        """Set the function that returns the ranks that may send on this channel. Reports on waiting tasks use it."""
        self._senders = senders

    def on_gone(self) -> None:
        """Make waiting tasks check whether any rank can still send. Called when a rank has left or is lost."""
        self._has_gone_senders = True
        if self.inbox.waiters and self.lost_senders() is not None:
            self._wake_all()

    def _check_senders(self) -> None:
        """Raise RankLostError if no rank can send any longer, and the last messages have had time to arrive."""
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
        """Expect new sequence numbers from a restarted ``rank``.

        Unless the channel admits restarted ranks, sends to the new process raise RankLostError, because the protocol's
        state refers to the old process. :meth:`admit`, or a message from the new process on this channel, allows them.
        """
        for inbox in (self.inbox, self._earlier_inbox):
            if inbox is not None:
                inbox.on_restarted(rank)
                inbox.on_first = self.admit
        if not self._admits_restarted:
            self._outbox.strangers = {*self._outbox.strangers, rank}
        self._outbox.recheck_receiver()

    def admit(self, rank: int) -> None:
        """Allow sends to the new process of ``rank`` if ``rank`` was restarted."""
        if rank in self._outbox.strangers:
            self._outbox.strangers = {other for other in self._outbox.strangers if other != rank}

    def on_left(self) -> None:
        """Make the next send check its destination again. Called when a rank has left."""
        self._outbox.recheck_receiver()

    def fail(self, error: AsyncdistError) -> None:
        """Make every later receive raise ``error``."""
        self.inbox.failure = error
        self._wake_all()

    def close(self, *, afterwards: Callable[[Envelope[MessageT]], None] | None = None) -> None:
        """Close the channel. Waiting tasks get ClosedError once the mailbox is empty.

        Args:
            afterwards: Function that answers messages after the close. It is called with each message in the mailbox
                and each later message, until a channel with the same scope is opened, or ``ANSWERING_COUNT_MAX`` other
                channels of the tag have closed. None to drop and count the messages.
        """
        if not self.inbox.is_closed:
            self.inbox.is_closed = self._outbox.is_closed = True
            self.demultiplexer.detach(self, answers=afterwards is not None)
            if afterwards is not None:
                self.inbox.handler = afterwards
                while self.inbox.mailbox:
                    afterwards(self.inbox.mailbox.popleft())
            self._wake_all()

    def answer_nowait(self, message: MessageT, dest: int, *, round: int = 0) -> None:
        """Send a message like :meth:`send_nowait`, even on a closed channel, for its function ``afterwards``.

        Raises:
            ClosedError: The channel is closed, and a newer channel with the same scope continues its sequence numbers.
        """
        was_closed = self._outbox.is_closed
        if not any(channel.scope == self.scope for channel in self.demultiplexer.channels()):
            self._outbox.is_closed = False
        try:
            self.send_nowait(message, dest, round=round)
        finally:
            self._outbox.is_closed = was_closed

    def _wake_all(self) -> None:
        for waiter in self.inbox.waiters:
            resolve_waiter(waiter, None)
        self._engine.recheck()

    @property
    def is_awaited(self) -> bool:
        """Whether a task of the user's program is waiting for a message."""
        return bool(self.inbox.waiters) and self.overflow == "stall"

    @property
    def is_ready(self) -> bool:
        """Whether ``receive_nowait`` would return a message or raise."""
        return self.inbox.is_ready

    @property
    def unread_count(self) -> int:
        """Number of messages that no task has received, including those dropped after ``main`` had returned."""
        return len(self.inbox.mailbox) + self.dropped_count

    @property
    def sent_count(self) -> int:
        """Number of messages sent since the channel was opened."""
        return self._outbox.sent_count

    def statistics(self) -> ChannelStatistics:
        """Return the numbers of messages sent and received since the opening, in the mailbox, and being sent."""
        return ChannelStatistics(
            sent_count=self.sent_count,
            received_count=self.inbox.received_count,
            waiting_count=len(self.inbox.mailbox),
            sending_count=self._sending_count,
        )
