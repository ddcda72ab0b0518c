"""Matches messages with receives, on the loop of the receiving rank, for backends that only move bytes.

A :class:`Matcher` owns the receives that are posted and the messages that nobody has asked for yet. Matching follows
MPI: by tag, posted receives and unexpected messages queue in order, and the first that fits wins. A message that is
matched is *taken* by its receive, which may last: its bytes may still be with the sender.

Threads of a backend never enter this module. They put what has arrived into a :class:`CallbackQueue`, which the loop
empties whenever it tests a request.
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
    """Holds calls that threads want made on the loop, in order.

    The bell is rung when a call comes into an empty queue; :meth:`empty` also finds the calls that come later. So no
    wake-up is missed: it ends only when nothing is left. (A mark that says whether the bell has been rung is not
    enough: the queue may be emptied between the call and the mark, which then stays for ever.)

    Attributes:
        calls: the calls that wait; the test of a request looks here first.
    """

    def __init__(self) -> None:
        self.calls: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._ring: Callable[[], None] = lambda: None
        self._putting = threading.Lock()

    def set_bell(self, ring: Callable[[], None]) -> None:
        """Have ``ring`` called from any thread when a call has come; at once if one waits already."""
        self._ring = ring
        if self.calls:
            ring()

    def put(self, call: Callable[[Any], None], argument: Any) -> None:
        """Have ``call(argument)`` made on the loop. From any thread."""
        with self._putting:
            self.calls.append((call, argument))
            is_first = len(self.calls) == 1
        if is_first:
            self._ring()

    def ring(self) -> None:
        """Ring for something that has completed without a call."""
        self._ring()

    def empty(self) -> None:
        """Make the calls; only on the loop."""
        calls = self.calls
        while calls:
            call, argument = calls.popleft()
            call(argument)


class Send:
    """A send request."""

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
    """A message that has arrived, or has been announced.

    Attributes:
        source: the sender's rank.
        tag: its tag.
        nbytes: its size.
    """

    source: int
    tag: int
    nbytes: int

    @property
    def is_here(self) -> bool:
        """Whether its bytes have left the sender, which may die now."""

    def fill(self, receive: Receive) -> None:
        """Put the bytes into ``receive.view``, which is large enough, now or later; then call ``receive.complete``."""

    def discard(self) -> None:
        """Drop the message; its send completes as if it had been received."""


class Receive:
    """A receive request, which may be posted again."""

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
        """Take the message that was matched. A buffer that is too small is an error of this end only."""
        self.source = message.source
        self.nbytes = message.nbytes
        if message.nbytes <= self.view.nbytes:
            message.fill(self)
            return
        message.discard()
        self.error = TruncationError.of(message.nbytes, self.view.nbytes, message.source)

    def complete(self) -> None:
        """Note that the bytes are in the buffer."""
        self.done = True


class InlineMessage:
    """A message that arrived as a whole."""

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
        """Do nothing: its send has completed."""


class LocalMessage:
    """A message of a rank of this process: it stays in the sender's buffer until it is matched, or is copied.

    Args:
        callbacks: of the sender.
        send: its request.
        source: the sender.
        tag: its tag.
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
        """Complete the send of an unexpected message at once, if it is small."""
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
        callbacks: of this rank.
        rings_when_posted: whether a receive that finds its message waiting rings, since its owner may not test it soon.
    """

    def __init__(self, callbacks: CallbackQueue, *, rings_when_posted: bool = False) -> None:
        self.callbacks = callbacks
        self._rings_when_posted = rings_when_posted
        self._posted: dict[int, deque[Receive]] = {}
        self._unexpected: dict[int, deque[Message]] = {}
        self._gone: dict[int, RankLostError] = {}

    def post(self, receive: Receive) -> None:
        """Give ``receive`` the first message that fits it, one that waits or one to come."""
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
        """Take ``receive`` back; False when a message has been matched with it already."""
        posted = self._posted.get(receive.tag, ())
        if receive not in posted:
            return False
        self._posted[receive.tag].remove(receive)
        return True

    def deliver(self, message: Message) -> bool:
        """Give ``message`` to the first receive that it fits, or keep it for one; returns whether there was one."""
        posted = self._posted.get(message.tag, ())
        for receive in posted:
            if receive.wanted in (ANY_SOURCE, message.source):
                self._posted[message.tag].remove(receive)
                receive.accept(message)
                return True
        self._unexpected.setdefault(message.tag, deque()).append(message)
        return False

    def lose(self, rank: int, error: RankLostError) -> list[Message]:
        """Fail the receives that wait for ``rank`` alone. What it has sent whole can still be received.

        Returns:
            The messages that are dropped, since their bytes were with ``rank``.
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

    def fail(self, error: RankLostError) -> list[Message]:
        """Fail all receives, since this rank itself is lost; returns the messages that are dropped."""
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
    """Base of transports whose backend only moves bytes.

    Args:
        rank: this one.
        size: how many there are.
        callbacks: looked into when a request is tested.
        capabilities: of the backend.
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
