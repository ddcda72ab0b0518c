"""Matches messages with receives, on the loop of the receiving rank, for backends that only move bytes.

A :class:`Matcher` owns the posted receives and the unexpected messages. It follows MPI's rule: both are queued in order
by tag, and the first fitting one is matched. A receive *accepts* its matched message. Its buffer may be filled later,
since the bytes may still be in the sender's buffer.

Threads of a backend never enter this module. They put their calls into a :class:`CallbackQueue`, which the loop empties
whenever it tests a request.
"""

from __future__ import annotations

import abc
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from asyncdist.errors import AsyncdistError, RankLostError, TruncationError
from asyncdist.transports.base import (
    ANY_SOURCE,
    Buffer,
    Capabilities,
    GroupHandle,
    PersistentReceive,
    Request,
    Transport,
    as_bytes,
)

#: Largest unexpected message of this process that is copied immediately; larger ones stay in the sender's buffer.
EAGER_NBYTES: Final = 65536


class CallbackQueue:
    """Queues calls of threads, in order, to be made on the loop.

    The doorbell rings when a call enters an empty queue. :meth:`empty` returns only when no call is left, including
    calls added while it runs, so no wake-up is missed. (A flag for "the doorbell has rung" would not do: the queue may
    be emptied between the call and the flag, which then stays set forever.)

    Attributes:
        calls: Waiting calls; the test of a request looks here first.
    """

    def __init__(self) -> None:
        self.calls: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._ring: Callable[[], None] = lambda: None
        self._putting = threading.Lock()

    def set_bell(self, ring: Callable[[], None]) -> None:
        """Set the doorbell: ``ring`` is called by any thread that queues a call, and now if a call is waiting."""
        self._ring = ring
        if self.calls:
            ring()

    def put(self, call: Callable[[Any], None], argument: Any) -> None:
        """Queue ``call(argument)`` to be made on the loop. May be called from any thread."""
        with self._putting:
            self.calls.append((call, argument))
            is_first = len(self.calls) == 1
        if is_first:
            self._ring()

    def ring(self) -> None:
        """Ring the doorbell for a completion that needs no call."""
        self._ring()

    def empty(self) -> None:
        """Make the queued calls. Must be called on the loop."""
        calls = self.calls
        while calls:
            call, argument = calls.popleft()
            call(argument)


class Send:
    """Tracks a send, which completes once its buffer may be written again."""

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
        """Do nothing: a send cannot be cancelled."""


class Message(Protocol):
    """Represents a message that has arrived or has been announced, until a receive accepts it.

    Attributes:
        source: Rank of the sender.
        tag: Tag of the message.
        nbytes: Size of the message in bytes.
    """

    source: int
    tag: int
    nbytes: int

    @property
    def is_here(self) -> bool:
        """Whether all bytes have left the sender, so that the message survives the sender's loss."""

    def fill(self, receive: Receive) -> None:
        """Write the bytes to ``receive.view``, which is large enough, and call ``receive.complete``, now or later."""

    def discard(self) -> None:
        """Drop the message; its send completes as if the message had been received."""


class Receive:
    """Tracks a receive, which may be posted again."""

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
        """Accept the matched message. If the buffer is too small, only the receive fails."""
        self.source = message.source
        self.nbytes = message.nbytes
        if message.nbytes <= self.view.nbytes:
            message.fill(self)
            return
        message.discard()
        self.error = TruncationError.of(message.nbytes, self.view.nbytes, message.source)

    def complete(self) -> None:
        """Record that the bytes are in the buffer."""
        self.done = True


class InlineMessage:
    """Holds a message that has arrived completely."""

    __slots__ = ("_data", "nbytes", "source", "tag")

    is_here: Final = True

    def __init__(self, source: int, tag: int, data: memoryview) -> None:
        self.source = source
        self.tag = tag
        self.nbytes = data.nbytes
        self._data = data

    def fill(self, receive: Receive) -> None:
        receive.view[: self.nbytes] = self._data
        receive.complete()

    def discard(self) -> None:
        """Do nothing: the send has completed already."""


class LocalMessage:
    """Refers to a message from a rank of this process, which stays in the sender's buffer until matched or copied.

    Args:
        callbacks: Callback queue of the sender.
        send: Request of the sender.
        source: Rank of the sender.
        tag: Tag of the message.
        view: Buffer of the sender.
    """

    __slots__ = ("_callbacks", "_view", "nbytes", "send", "source", "tag")

    def __init__(self, callbacks: CallbackQueue, send: Send, source: int, tag: int, view: memoryview) -> None:
        self._callbacks = callbacks
        self.send = send
        self.source = source
        self.tag = tag
        self.nbytes = view.nbytes
        self._view = view

    @property
    def is_here(self) -> bool:
        return self.send.done

    def copy_if_small(self) -> None:
        """Copy an unexpected message if it is small, which completes its send."""
        if self.nbytes <= EAGER_NBYTES:
            self._view = memoryview(bytes(self._view))
            self.send.done = True

    def fill(self, receive: Receive) -> None:
        receive.view[: self.nbytes] = self._view
        receive.complete()
        self.discard()

    def discard(self) -> None:
        if not self.send.done:
            self.send.done = True
            self._callbacks.ring()


class Matcher:
    """Owns the posted receives and the unexpected messages of one rank, and matches them.

    Args:
        callbacks: Callback queue of the rank.
        rings_when_posted: Whether the doorbell rings if a newly posted receive matches a waiting message, since the
            owner of the receive may not test it soon.
    """

    def __init__(self, callbacks: CallbackQueue, *, rings_when_posted: bool = False) -> None:
        self.callbacks = callbacks
        self._rings_when_posted = rings_when_posted
        self._posted: dict[int, deque[Receive]] = {}
        self._unexpected: dict[int, deque[Message]] = {}
        self._gone: dict[int, RankLostError] = {}

    def post(self, receive: Receive) -> None:
        """Match ``receive`` with the first fitting message, whether it is waiting or yet to arrive."""
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
        """Withdraw a posted receive; return False if it has been matched already."""
        posted = self._posted.get(receive.tag, ())
        if receive not in posted:
            return False
        self._posted[receive.tag].remove(receive)
        return True

    def deliver(self, message: Message) -> bool:
        """Match ``message`` with the first fitting receive and return True, or keep it and return False."""
        posted = self._posted.get(message.tag, ())
        for receive in posted:
            if receive.wanted in (ANY_SOURCE, message.source):
                self._posted[message.tag].remove(receive)
                receive.accept(message)
                return True
        self._unexpected.setdefault(message.tag, deque()).append(message)
        return False

    def lose(self, rank: int, error: RankLostError) -> list[Message]:
        """Fail the receives that wait only for ``rank``. Messages that it has sent completely can still be received.

        Returns:
            The dropped messages, whose bytes ``rank`` still held.
        """
        self._gone[rank] = error
        for posted in self._posted.values():
            for receive in [receive for receive in posted if receive.wanted == rank]:
                posted.remove(receive)
                receive.error = error
        dropped: list[Message] = []
        for waiting in self._unexpected.values():
            for message in [message for message in waiting if message.source == rank and not message.is_here]:
                waiting.remove(message)
                dropped.append(message)
        return dropped

    def admit(self, rank: int) -> None:
        """Accept messages of a new process of ``rank``; drop the messages of the earlier process."""
        self._gone.pop(rank, None)
        for tag, waiting in self._unexpected.items():
            self._unexpected[tag] = deque(message for message in waiting if message.source != rank)

    def fail(self, error: RankLostError) -> list[Message]:
        """Fail all receives, since this rank itself is lost; return the dropped messages."""
        for receive in [receive for posted in self._posted.values() for receive in posted]:
            receive.error = error
        dropped = [message for waiting in self._unexpected.values() for message in waiting]
        self.clear()
        self._unexpected.clear()
        return dropped

    def clear(self) -> None:
        """Drop the posted receives."""
        self._posted.clear()


class MatchedTransport(Transport):
    """Matches messages for transports whose backend only moves bytes; a subclass sends them to peers.

    Args:
        rank: This process's rank.
        size: Number of ranks.
        callbacks: Queue that is emptied when a request is tested.
        capabilities: Capabilities of the backend.
    """

    def __init__(self, rank: int, size: int, callbacks: CallbackQueue, capabilities: Capabilities) -> None:
        self.rank = rank
        self.size = size
        self.capabilities = capabilities
        self._callbacks = callbacks
        self._matcher = Matcher(callbacks)

    @abc.abstractmethod
    def _send_away(self, view: memoryview, dest: int, tag: int) -> Request:
        """Start sending to a peer."""

    def isend(self, buffer: Buffer, dest: int, tag: int) -> Request:
        view = as_bytes(buffer)
        if dest != self.rank:
            return self._send_away(view, dest, tag)
        send = Send(self._callbacks, view.nbytes)
        message = LocalMessage(self._callbacks, send, self.rank, tag, view)
        if not self._matcher.deliver(message):
            message.copy_if_small()
        self._callbacks.ring()
        return send

    def irecv(self, buffer: Buffer, source: int, tag: int) -> Request:
        receive = Receive(self._matcher, buffer, source, tag)
        self._matcher.post(receive)
        return receive

    def persistent_receive(self, buffer: Buffer, tag: int) -> PersistentReceive:
        return Receive(self._matcher, buffer, ANY_SOURCE, tag)

    def new_group(self, ranks: Sequence[int], tag: int) -> GroupHandle | None:
        del ranks, tag
        return None
