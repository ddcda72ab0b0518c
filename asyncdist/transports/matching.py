"""Matches messages with receives on the receiving rank's loop, for backends that only transfer bytes.

As in MPI, the first matching receive or message in the queue of a tag is selected. The matched receive *accepts* the
message. The receive's buffer may be filled later, because the bytes may still be in the sender's buffer. A backend's
threads do not call this module directly. They put calls in a :class:`CallbackQueue`, which the loop empties.
"""

from __future__ import annotations

import abc
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

from asyncdist import local_host
from asyncdist.errors import AsyncdistError, RankLostError, TruncationError
from asyncdist.transports.base import (
    ANY_SOURCE,
    Buffer,
    Capabilities,
    PersistentReceive,
    Request,
    Transport,
    as_bytes,
)

#: Maximum size, in bytes, of an unexpected message from a rank in this process that is copied immediately. Larger
#: messages stay in the sender's buffer.
EAGER_NBYTES: Final = 65536


class CallbackQueue:
    """Queues calls made by threads until the loop executes them in order.

    Adding a call to an empty queue rings the doorbell, which wakes the loop. :meth:`empty` returns only when the queue
    is empty, even if calls are added in the meantime, so no wake-up is missed.

    Attributes:
        calls: Pairs of a function and its argument. The ``test`` methods of requests read this attribute directly.
    """

    def __init__(self) -> None:
        self.calls: deque[tuple[Callable[[Any], object], Any]] = deque()
        self._ring: Callable[[], None] = lambda: None
        self._putting = threading.Lock()

    def set_bell(self, ring: Callable[[], None]) -> None:
        """Set the function that wakes the loop. Any thread may call it. If calls are already queued, call it now."""
        self._ring = ring
        if self.calls:
            ring()

    def put(self, call: Callable[[Any], object], argument: Any) -> None:
        """Queue ``call(argument)`` for execution on the loop. Thread-safe."""
        with self._putting:
            self.calls.append((call, argument))
            is_first = len(self.calls) == 1
        if is_first:
            self._ring()

    def ring(self) -> None:
        """Wake the loop for a completion that needs no queued call."""
        self._ring()

    def empty(self) -> None:
        """Execute the queued calls. Must be called on the loop. If a call raises, the bell rings for the rest."""
        calls = self.calls
        try:
            while calls:
                call, argument = calls.popleft()
                call(argument)
        finally:
            if calls:
                self._ring()


class Send:
    """Represents a send, which completes when its buffer may be modified again."""

    __slots__ = ("_callbacks", "done", "error", "nbytes")

    cancelled: Final = False
    source: Final = ANY_SOURCE

    def __init__(self, callbacks: CallbackQueue, nbytes: int) -> None:
        self._callbacks = callbacks
        self.nbytes = nbytes
        self.done = False
        self.error: AsyncdistError | None = None

    def test(self) -> bool:
        if self._callbacks.calls:
            self._callbacks.empty()
        if self.error is not None:
            raise self.error
        return self.done

    def cancel(self) -> None:
        """Do nothing, because sends cannot be cancelled."""

    def complete(self) -> None:
        """Record that the buffer may be modified, and wake the loop."""
        self.done = True
        self._callbacks.ring()


class Message(Protocol):
    """Represents a message that has arrived or has been announced, but that no receive has accepted yet."""

    source: int
    tag: int
    nbytes: int

    @property
    def has_left_sender(self) -> bool:
        """Whether all bytes have left the sender's memory, so that the message survives the sender's loss."""

    def fill(self, receive: Receive) -> None:
        """Write the bytes to ``receive.view``, which is large enough, and set ``receive.done``, now or later."""

    def discard(self) -> None:
        """Drop the message. The send completes as if the message had been received."""

    def fail(self, error: RankLostError) -> None:
        """Drop the message, because its sender or receiver is lost. If the send belongs to this process, it fails."""


class Receive:
    """Represents a receive, which may be posted repeatedly."""

    __slots__ = ("_callbacks", "_matcher", "cancelled", "done", "error", "nbytes", "source", "tag", "view", "wanted")

    def __init__(self, matcher: Matcher, buffer: Buffer, wanted: int, tag: int) -> None:
        self._matcher = matcher
        self._callbacks = matcher.callbacks
        self.view = as_bytes(buffer)
        self.wanted = wanted
        self.tag = tag
        self.source = ANY_SOURCE
        self.nbytes = 0
        self.done = False
        self.cancelled = False
        self.error: AsyncdistError | None = None

    def test(self) -> bool:
        if self._callbacks.calls:
            self._callbacks.empty()
        if self.error is not None:
            raise self.error
        return self.done

    def take(self) -> tuple[int, int] | None:
        return (self.source, self.nbytes) if self.test() else None

    def start(self) -> None:
        self.done = self.cancelled = False
        self.error = None
        self._matcher.post(self)

    def cancel(self) -> None:
        if not self.done and self.error is None and self._matcher.withdraw(self):
            self.done = self.cancelled = True

    def accept(self, message: Message) -> None:
        """Accept the matched message. If the buffer is too small, the receive fails and the send completes."""
        self.source = message.source
        self.nbytes = message.nbytes
        if message.nbytes <= self.view.nbytes:
            message.fill(self)
            return
        message.discard()
        self.error = TruncationError.of(message.nbytes, self.view.nbytes, message.source)


class BufferedMessage:
    """A message whose bytes are in this process: they have arrived, or are in the buffer of this process's ``send``.

    In the latter case, they stay in the sender's buffer until the message is matched or copied.
    """

    __slots__ = ("_send", "_view", "nbytes", "source", "tag")

    def __init__(self, source: int, tag: int, view: memoryview, send: Send | None = None) -> None:
        self.source = source
        self.tag = tag
        self.nbytes = view.nbytes
        self._view = view
        self._send = send

    @property
    def has_left_sender(self) -> bool:
        return self._send is None or self._send.done

    def copy_if_small(self) -> None:
        """Copy a small message, which completes its send. Called if no receive matches yet."""
        if self._send is not None and self.nbytes <= EAGER_NBYTES:
            self._view = memoryview(bytes(self._view))
            self._send.done = True

    def fill(self, receive: Receive) -> None:
        receive.view[: self.nbytes] = self._view
        receive.done = True
        self.discard()

    def discard(self) -> None:
        if self._send is not None and not self._send.done:
            self._send.complete()

    def fail(self, error: RankLostError) -> None:
        if self._send is not None:
            self._send.error = error


class Matcher:
    """Queues the posted receives and the unexpected messages of one rank, and matches them.

    If ``rings_when_posted`` is true, the loop is woken when a posted receive matches a waiting message.
    """

    def __init__(self, callbacks: CallbackQueue, *, rings_when_posted: bool = False) -> None:
        self.callbacks = callbacks
        self._rings_when_posted = rings_when_posted
        self._posted: dict[int, deque[Receive]] = {}
        self._unexpected: dict[int, deque[Message]] = {}
        self._gone: dict[int, RankLostError] = {}

    def post(self, receive: Receive) -> None:
        """Match ``receive`` with the first matching message, now or when one arrives."""
        waiting = self._unexpected.get(receive.tag, ())
        for message in waiting:
            if receive.wanted in (ANY_SOURCE, message.source):
                self._unexpected[receive.tag].remove(message)
                receive.accept(message)
                if self._rings_when_posted:
                    self.callbacks.ring()
                return
        if receive.wanted in self._gone:
            receive.error = self._gone[receive.wanted]
            return
        self._posted.setdefault(receive.tag, deque()).append(receive)

    def withdraw(self, receive: Receive) -> bool:
        """Remove a posted receive. Return False if it has already been matched."""
        posted = self._posted.get(receive.tag, ())
        if receive not in posted:
            return False
        self._posted[receive.tag].remove(receive)
        return True

    def deliver(self, message: Message) -> bool:
        """Match ``message`` with the first matching receive. Return False if no such receive is posted yet."""
        posted = self._posted.get(message.tag, ())
        for receive in posted:
            if receive.wanted in (ANY_SOURCE, message.source):
                self._posted[message.tag].remove(receive)
                receive.accept(message)
                return True
        self._unexpected.setdefault(message.tag, deque()).append(message)
        return False

    def send(self, send: Send, source: int, tag: int, view: memoryview) -> None:
        """Deliver a message to this rank from ``source``, a rank in the same process."""
        message = BufferedMessage(source, tag, view, send)
        if not self.deliver(message):
            message.copy_if_small()
        self.callbacks.ring()

    def lose(self, rank: int, error: RankLostError) -> None:
        """Fail receives that wait only for ``rank``, and messages from this rank that have not arrived completely."""
        self._gone[rank] = error
        for posted in self._posted.values():
            for receive in [receive for receive in posted if receive.wanted == rank]:
                posted.remove(receive)
                receive.error = error
        for waiting in self._unexpected.values():
            for message in [message for message in waiting if message.source == rank and not message.has_left_sender]:
                waiting.remove(message)
                message.fail(error)

    def admit(self, rank: int) -> None:
        """Accept messages of a new process of ``rank``, and drop the messages of the previous process."""
        self._gone.pop(rank, None)
        for tag, waiting in self._unexpected.items():
            self._unexpected[tag] = deque(message for message in waiting if message.source != rank)

    def fail(self, error: RankLostError) -> None:
        """Fail all receives and messages, because this rank itself is lost."""
        for receive in [receive for posted in self._posted.values() for receive in posted]:
            receive.error = error
        for message in [message for waiting in self._unexpected.values() for message in waiting]:
            message.fail(error)
        self.clear()
        self._unexpected.clear()

    def clear(self) -> None:
        """Drop the posted receives."""
        self._posted.clear()


class MatchedTransport(Transport):
    """Base class of transports that match messages themselves, because their backend only transfers bytes."""

    def __init__(self, rank: int, size: int, callbacks: CallbackQueue, capabilities: Capabilities) -> None:
        self.rank = rank
        self.size = size
        self.capabilities = capabilities
        self._callbacks = callbacks
        self._matcher = Matcher(callbacks)

    @abc.abstractmethod
    def _start_send(self, view: memoryview, dest: int, tag: int) -> Request:
        """Start sending a message to another rank, and return its request."""

    def isend(self, buffer: Buffer, dest: int, tag: int) -> Request:
        view = as_bytes(buffer)
        if dest != self.rank:
            return self._start_send(view, dest, tag)
        send = Send(self._callbacks, view.nbytes)
        self._matcher.send(send, self.rank, tag, view)
        return send

    def irecv(self, buffer: Buffer, source: int, tag: int) -> Request:
        receive = Receive(self._matcher, buffer, source, tag)
        self._matcher.post(receive)
        return receive

    def persistent_receive(self, buffer: Buffer, tag: int) -> PersistentReceive:
        return Receive(self._matcher, buffer, ANY_SOURCE, tag)


def end_process(peer: int, exit_code: int) -> None:
    """Abort this process because ``peer`` has requested this. Called by threads, because the loop may be blocked."""
    local_host.print_line(f"asyncdist: rank {peer} aborted the job: process {os.getpid()} ends")
    os._exit(exit_code)
