"""Matches messages with receives, on the loop of the receiving rank, for backends that only move bytes.

A :class:`Matcher` owns the posted receives and the unexpected messages. It follows MPI's rule: both queue in order, by
tag, and the first one that fits is matched. A receive *accepts* the message it was matched with; filling its buffer may
take longer, since the bytes may still be in the sender's.

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

#: An unexpected message of this process up to this size is copied at once; a larger one waits in its sender's buffer.
EAGER_NBYTES: Final = 65536


class CallbackQueue:
    """Queues calls of threads, in order, to be made on the loop.

    The doorbell rings when a call enters an empty queue. :meth:`empty` ends only when no call is left, those included
    that come while it runs, so no wake-up is missed. (A flag that says whether the doorbell has rung is not enough: the
    queue may be emptied between the call and the flag, which then stays set for ever.)

    Attributes:
        calls: the waiting calls; the test of a request looks here first.
    """

    def __init__(self) -> None:
        self.calls: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._ring: Callable[[], None] = lambda: None
        self._putting = threading.Lock()

    def set_bell(self, ring: Callable[[], None]) -> None:
        """Set the doorbell: ``ring`` is called from any thread when a call comes, and at once if one waits already."""
        self._ring = ring
        if self.calls:
            ring()

    def put(self, call: Callable[[Any], None], argument: Any) -> None:
        """Queue ``call(argument)`` to be made on the loop; from any thread."""
        with self._putting:
            self.calls.append((call, argument))
            is_first = len(self.calls) == 1
        if is_first:
            self._ring()

    def ring(self) -> None:
        """Ring the doorbell for a completion that needs no call."""
        self._ring()

    def empty(self) -> None:
        """Make the queued calls; only on the loop."""
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
        """Do nothing: a message cannot be called back."""


class Message(Protocol):
    """Represents a message that has arrived or has been announced, until a receive accepts it.

    Attributes:
        source: the sender's rank.
        tag: the message's tag.
        nbytes: the message's size.
    """

    source: int
    tag: int
    nbytes: int

    @property
    def is_here(self) -> bool:
        """Whether all bytes have left the sender, so that the message survives the sender's loss."""

    def fill(self, receive: Receive) -> None:
        """Write the bytes to ``receive.view``, which is large enough, now or later; then call ``receive.complete``."""

    def discard(self) -> None:
        """Drop the message; its send completes as if it had been received."""


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
        """Accept the matched message. A buffer that is too small is an error of the receiver only."""
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
    """Holds a message that arrived as a whole."""

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
        callbacks: the sender's queue.
        send: the sender's request.
        source: the sender.
        tag: the message's tag.
        view: the sender's buffer.
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
        callbacks: the rank's queue.
        rings_when_posted: whether the doorbell rings when a receive matches a waiting message as it is posted, since
            its owner may not test it soon.
    """

    def __init__(self, callbacks: CallbackQueue, *, rings_when_posted: bool = False) -> None:
        self.callbacks = callbacks
        self._rings_when_posted = rings_when_posted
        self._posted: dict[int, deque[Receive]] = {}
        self._unexpected: dict[int, deque[Message]] = {}
        self._gone: dict[int, RankLostError] = {}

    def post(self, receive: Receive) -> None:
        """Match ``receive`` with the first message that fits it, one that waits or one to come."""
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
        """Match ``message`` with the first posted receive that it fits, or keep it; return whether one fitted."""
        posted = self._posted.get(message.tag, ())
        for receive in posted:
            if receive.wanted in (ANY_SOURCE, message.source):
                self._posted[message.tag].remove(receive)
                receive.accept(message)
                return True
        self._unexpected.setdefault(message.tag, deque()).append(message)
        return False

    def lose(self, rank: int, error: RankLostError) -> list[Message]:
        """Fail the receives that wait for ``rank`` alone. Messages that it has sent completely can still be received.

        Returns:
            The messages that are dropped, since ``rank`` still held their bytes.
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
        """Take messages of a new process in the place of ``rank``; those of the process before are dropped."""
        self._gone.pop(rank, None)
        for tag, waiting in self._unexpected.items():
            self._unexpected[tag] = deque(message for message in waiting if message.source != rank)

    def fail(self, error: RankLostError) -> list[Message]:
        """Fail all receives, since this rank itself is lost; return the messages that are dropped."""
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
        rank: this rank.
        size: the number of ranks.
        callbacks: the queue that is emptied when a request is tested.
        capabilities: those of the backend.
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
