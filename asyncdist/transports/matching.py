"""Which message goes into which receive, on the loop of the receiving rank: for backends that only move bytes.

A :class:`Matcher` owns the receives that are posted and the messages that nobody has asked for yet. Matching follows
MPI: by tag, posted receives and unexpected messages queue in order, and the first that fits wins. A message that is
matched is *taken* by its receive, which may last: its bytes may still be with the sender.

Threads of a backend never come in here. They hand what has arrived to an :class:`CallbackQueue`, whose content the loop
takes whenever it tests a request.
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

#: A message to oneself up to this size is copied at once; a larger one waits in its sender's buffer.
EAGER_NBYTES: Final = 65536


class CallbackQueue:
    """Calls that threads want made on the loop, in order.

    The bell is rung when something comes and nothing lay here; what comes later is found by the same look. So no
    wake-up is missed: a look ends only when nothing is left. (A mark that says whether the bell has been rung is not
    enough. A look may come between the call and the mark, which then stays for ever.)

    Attributes:
        calls: what waits; whoever tests a request looks here first.
    """

    def __init__(self) -> None:
        self.calls: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._ring: Callable[[], None] = lambda: None
        self._putting = threading.Lock()

    def set_bell(self, ring: Callable[[], None]) -> None:
        """``ring`` is called from any thread when something has come; at once if something is here."""
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
        """Make the loop look at what has completed without a call."""
        self._ring()

    def empty(self) -> None:
        """Make the calls. On the loop alone."""
        calls = self.calls
        while calls:
            call, argument = calls.popleft()
            call(argument)


class Send:
    """A send request: what it has come to."""

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
        """A message once sent is on its way."""


class Message(Protocol):
    """What has arrived, or has been announced.

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
        """Whether its bytes are on this rank already, so that the sender may die."""

    def fill(self, receive: Receive) -> None:
        """Put the bytes into ``receive.view``, which has room for them, now or later; then ``receive.complete``."""

    def discard(self) -> None:
        """Nobody will have it; to the sender it is as good as received."""


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
        """Take the message that was matched. A buffer too small is this end's error, and none of the sender's."""
        self.source = message.source
        self.nbytes = message.nbytes
        if message.nbytes <= self.view.nbytes:
            message.fill(self)
            return
        message.discard()
        self.error = TruncationError(
            f"a message of {message.nbytes} bytes arrived for a buffer of {self.view.nbytes} bytes",
            message_nbytes=message.nbytes,
            buffer_nbytes=self.view.nbytes,
            source=message.source,
        )

    def complete(self) -> None:
        """The bytes are in the buffer."""
        self.done = True


class InlineMessage:
    """A message that came whole."""

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
        """Its bytes go with it."""


class OwnMessage:
    """A message of this rank to itself: eager when it is small, else waiting in the sender's buffer."""

    __slots__ = ("_callbacks", "_send", "_view", "nbytes", "source", "tag")

    is_here: Final = True

    def __init__(self, callbacks: CallbackQueue, send: Send, rank: int, tag: int, view: memoryview) -> None:
        self._callbacks = callbacks
        self._send = send
        self.source = rank
        self.tag = tag
        self.nbytes = view.nbytes
        self._view = view
        if view.nbytes <= EAGER_NBYTES:
            self._view = memoryview(bytes(view))
            send.done = True

    def fill(self, receive: Receive) -> None:
        receive.view[: self.nbytes] = self._view
        receive.complete()
        self.discard()

    def discard(self) -> None:
        if not self._send.done:
            self._send.done = True
            self._callbacks.ring()


class Matcher:
    """The posted receives and the unexpected messages of one rank.

    Args:
        inbox: rung when a receive completes outside of a test.
    """

    def __init__(self, callbacks: CallbackQueue) -> None:
        self.callbacks = callbacks
        self._posted: dict[int, deque[Receive]] = {}
        self._unexpected: dict[int, deque[Message]] = {}
        self._gone: dict[int, RankLostError] = {}

    def post(self, receive: Receive) -> None:
        """Have ``receive`` take the first message that fits it, one that is here or one to come."""
        waiting = self._unexpected.get(receive.tag, ())
        for message in waiting:
            if receive.wanted in (ANY_SOURCE, message.source):
                self._unexpected[receive.tag].remove(message)
                receive.accept(message)
                return
        if receive.wanted in self._gone:
            receive.error = self._gone[receive.wanted]
            return
        self._posted.setdefault(receive.tag, deque()).append(receive)

    def withdraw(self, receive: Receive) -> bool:
        """Post it no more; False when a message has been matched with it already."""
        posted = self._posted.get(receive.tag, ())
        if receive not in posted:
            return False
        self._posted[receive.tag].remove(receive)
        return True

    def deliver(self, message: Message) -> None:
        """Give ``message`` to the first receive that it fits, or keep it for one."""
        posted = self._posted.get(message.tag, ())
        for receive in posted:
            if receive.wanted in (ANY_SOURCE, message.source):
                self._posted[message.tag].remove(receive)
                receive.accept(message)
                return
        self._unexpected.setdefault(message.tag, deque()).append(message)

    def lose(self, rank: int, error: RankLostError) -> None:
        """Fail the receives that wait for ``rank`` alone. What it has sent whole can still be received."""
        self._gone[rank] = error
        for posted in self._posted.values():
            for receive in [receive for receive in posted if receive.wanted == rank]:
                posted.remove(receive)
                receive.error = error
        for waiting in self._unexpected.values():
            for message in [message for message in waiting if message.source == rank and not message.is_here]:
                waiting.remove(message)


class MatchedTransport(Transport):
    """A transport whose backend only takes messages to peers.

    Args:
        rank: this one.
        size: how many there are.
        inbox: what whoever tests a request looks into.
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
        self._matcher.deliver(OwnMessage(self._callbacks, send, self.rank, tag, view))
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
