"""Transfers large messages over gloo: the data, followed by eight bytes called the *trailer*.

Threads wait for the trailer first, because a wait for data in transit never ends if the peer dies.

The chunks of streams are sent and received without the announcement that other large messages need
(:mod:`asyncdist.transports.torch_distributed.gloo_link`).

On a stream's tag, called a *granted* tag, each receive names its source and has a buffer large enough for its message.
Both ends can therefore pass their requests to gloo immediately, and gloo matches these in order.

- A trailer of eight bytes contains the message's size, which may be smaller than the buffer.
- gloo cannot cancel a receive. To cancel a receive, the receiver therefore asks the sender to answer it with an empty
  message. If a message for this receive is already in transit, the sender ignores the request.
- The thread that has received a message acknowledges it in a control frame, before it notifies the receiver's loop. A
  sender therefore never waits for a receiver whose loop is blocked by training.
"""

from __future__ import annotations

import contextlib
import queue
import struct
import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch

from asyncdist.errors import RankLostError
from asyncdist.transports.base import Buffer
from asyncdist.transports.matching import Matcher, Receive, Send

FOREVER: Final = timedelta(days=3650)
TRAILER_NBYTES: Final = 8
_MARK: Final = struct.Struct("<q")
#: Value of a trailer that answers a cancelled receive without a message.
_EMPTY: Final = -1
#: Lowest gloo tag of stream messages. Other large messages, which are announced first, use lower tags.
_FIRST_TAG: Final = 0x40000000


def bytes_tensor(buffer: Any) -> torch.Tensor:
    """Return a tensor that shares the buffer's memory."""
    return (
        torch.frombuffer(buffer, dtype=torch.uint8) if len(buffer) else torch.empty(0, dtype=torch.uint8, device="cpu")
    )


def readable(view: memoryview) -> torch.Tensor:
    """Return a tensor over the bytes to send. torch requires writable memory, so read-only bytes are copied."""
    return bytes_tensor(bytearray(view) if view.readonly else view)


class Transfer:
    """Represents a large message in transit, at the sender or the receiver.

    Args:
        data: Bytes to send, or buffer to receive into.
        mark: Number that the sender writes into the trailer.

    Attributes:
        works: gloo's handles for the data and the trailer, in this order.
    """

    __slots__ = ("_data", "_mark", "_posting", "tag", "works")

    def __init__(self, tag: int, data: torch.Tensor, mark: int = 0) -> None:
        self.tag = tag
        self.works: list[Any] = []
        # This lock is held until gloo has been given data and trailer. An Event and torch.tensor would take 50 us more.
        self._posting = threading.Lock()
        self._posting.acquire()
        self._mark = bytearray(_MARK.pack(mark))
        self._data = data

    def post(self, start: Callable[[list[torch.Tensor], int, int], Any], peer: int) -> None:
        """Pass the data and the trailer to gloo. The call may block while another transfer is in progress."""
        self.works.append(start([self._data], peer, self.tag))
        self.works.append(start([bytes_tensor(self._mark)], peer, self.tag))
        self._posting.release()

    def wait(self) -> None:
        """Wait until the transfer is complete, first for the trailer, because a wait for the data might never end."""
        with self._posting:
            for work in reversed(self.works):
                work.wait(FOREVER)
            self.works.clear()  # each handle keeps the connections of its group open

    @property
    def mark(self) -> int:
        """Number in the trailer. Valid once the transfer is complete."""
        return int(_MARK.unpack(self._mark)[0])


class _GrantedReceive(Receive):
    """Receive on a stream's tag. ``number`` counts, from 1, the receives from this peer on the tag."""

    __slots__ = ("_transfers", "number", "transfer")

    def __init__(
        self, transfers: StreamTransfers, matcher: Matcher, buffer: Buffer, tag: int, source: int, number: int
    ) -> None:
        super().__init__(matcher, buffer, source, tag)
        self._transfers = transfers
        self.number = number
        self.transfer = Transfer(_FIRST_TAG + tag, bytes_tensor(self.view))

    def cancel(self) -> None:
        if not self.done and self.error is None:
            self._transfers.ask_for_empty_message(self.number)


class StreamTransfers:
    """Exchanges stream messages with one peer on one tag.

    Methods named ``_run_*`` run on threads, all others on the loop.

    Args:
        group_rank: Rank of the peer in the gloo group.
        start: Function that starts a thread with a given name and target, unless a thread of that name exists.
        acknowledge: Thread-safe function that notifies the peer that one of its messages has arrived.
        ask_for_empty_message: Function that takes a receive's number, and asks the peer for an empty message for that
            receive.
    """

    def __init__(
        self,
        tag: int,
        peer: int,
        group_rank: int,
        bulk: Any,
        matcher: Matcher,
        *,
        start: Callable[[str, Callable[[], None]], None],
        acknowledge: Callable[[], object],
        ask_for_empty_message: Callable[[int], None],
    ) -> None:
        self._tag = tag
        self._peer = peer
        self._group_rank = group_rank
        self._bulk = bulk
        self._matcher = matcher
        self._callbacks = matcher.callbacks
        self._start = start
        self._acknowledge = acknowledge
        self.ask_for_empty_message = ask_for_empty_message
        self._uploads: deque[tuple[Transfer, Send]] = deque()
        self._receives: deque[_GrantedReceive] = deque()
        self._sent_count = 0
        self._received_count = 0
        self._cancelled: set[int] = set()
        self._to_send: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self._to_receive: queue.SimpleQueue[_GrantedReceive | None] = queue.SimpleQueue()

    def send(self, view: memoryview) -> Send:
        """Start sending the next message, for which the peer has posted a receive or will post one."""
        send = self._send(view, view.nbytes)
        self._send_empty_messages()
        return send

    def _send(self, view: memoryview, mark: int) -> Send:
        self._sent_count += 1
        send = Send(self._callbacks, view.nbytes)
        upload = Transfer(_FIRST_TAG + self._tag, readable(view), mark)
        self._uploads.append((upload, send))
        self._start(f"send-{self._tag}", self._run_sends)
        self._to_send.put(upload)
        return send

    def _send_empty_messages(self) -> None:
        """Send empty messages for the receives that the peer has cancelled, up to the first other receive."""
        while self._sent_count + 1 in self._cancelled:
            self._cancelled.remove(self._sent_count + 1)
            self._send(memoryview(b""), _EMPTY)

    def on_receive_cancelled(self, number: int) -> None:
        """Record that the peer has cancelled its receive of this number."""
        if number > self._sent_count:
            self._cancelled.add(number)
            self._send_empty_messages()

    def on_acknowledged(self) -> None:
        """Complete the oldest send, whose message has arrived."""
        upload, send = self._uploads.popleft()
        with contextlib.suppress(RuntimeError):  # Raised if the peer has died since it received the message.
            upload.wait()
        send.done = True

    def receive(self, buffer: Buffer) -> Receive:
        """Post the next receive."""
        self._received_count += 1
        receive = _GrantedReceive(self, self._matcher, buffer, self._tag, self._peer, self._received_count)
        self._receives.append(receive)
        self._start(f"land-{self._tag}", self._run_receives)
        self._to_receive.put(receive)
        return receive

    def _on_received(self, receive: _GrantedReceive) -> None:
        if receive.error is not None:
            return
        self._receives.popleft()
        mark = receive.transfer.mark
        receive.source = self._peer
        receive.nbytes = max(0, mark)
        receive.cancelled = mark == _EMPTY
        receive.done = True

    def lose(self, error: RankLostError) -> None:
        """Fail all sends and receives in progress, because the peer is lost. Their handles and buffers are kept."""
        for _, send in self._uploads:
            send.error = error
        for receive in self._receives:
            receive.error = error

    def stop(self) -> None:
        """End the threads. A thread that is waiting in gloo ends when its connections are closed."""
        self._to_send.put(None)
        self._to_receive.put(None)

    def release(self) -> None:
        """Drop gloo's group and all handles, after the threads have ended."""
        for receive in self._receives:
            receive.transfer.works.clear()
        self._uploads.clear()
        self._receives.clear()
        self._bulk = None

    # -- threads ----------------------------------------------------------------------------------------------------

    def _run_sends(self) -> None:
        """Pass messages to gloo. During each call, gloo writes as much as the connection accepts."""
        with contextlib.suppress(RuntimeError):  # Raised if the connection is closed, which the link's threads report.
            while (upload := self._to_send.get()) is not None:
                upload.post(self._bulk.send, self._group_rank)
                del upload  # Free the memory of an ended stream once its message has arrived.

    def _run_receives(self) -> None:
        """Repeatedly post all queued receives, and then wait for the oldest one."""
        posted: deque[_GrantedReceive] = deque()
        with contextlib.suppress(RuntimeError):
            while True:
                while not posted or not self._to_receive.empty():
                    receive = self._to_receive.get()
                    if receive is None:
                        return
                    receive.transfer.post(self._bulk.recv, self._group_rank)
                    posted.append(receive)
                receive = posted.popleft()
                receive.transfer.wait()
                self._acknowledge()
                self._callbacks.put(self._on_received, receive)
                del receive
