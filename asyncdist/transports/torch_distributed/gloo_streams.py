"""Moves the large messages of streams, which need no announcement since their receives are posted first.

gloo cannot match most messages on its own. A receive may be from any source, may be smaller than its message (which
would end the process), and may be abandoned; so a large message is announced, and fetched once its receive is found. On
a *granted* tag the caller guarantees that a receive names its source and that no message is larger than its receive.
Both ends then pass their requests to gloo at once, which matches them in order.

- The trailer holds the message's size, which may be less than the buffer's.
- gloo cannot cancel a receive. A receiver that cancels one asks the sender to answer it with *nothing* in its turn. If
  the message of that receive is already in transit, the sender ignores this.
- The thread that has waited for a message acknowledges it in a control frame, before the receiver's loop is notified.
  So a sender never waits for a receiver whose training blocks its loop. (Waiting for its own send, or the trailer's,
  would end sooner, but never if the peer dies while bytes are in transit.)
"""

from __future__ import annotations

import contextlib
import queue
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from asyncdist.errors import RankLostError
from asyncdist.transports.base import Buffer
from asyncdist.transports.matching import Matcher, Receive, Send
from asyncdist.transports.torch_distributed.gloo_transfers import Transfer, bytes_tensor, readable

#: Value of a trailer without a message, which answers a cancelled receive.
_NOTHING: Final = -1
#: Smallest of gloo's tags for granted messages; announced messages use the smaller ones.
_FIRST_TAG: Final = 0x40000000


class _GrantedReceive(Receive):
    """A receive of one passage; ``number`` counts the passage's receives from 1."""

    __slots__ = ("_passage", "number", "transfer")

    def __init__(self, passage: Passage, matcher: Matcher, buffer: Buffer, tag: int, source: int, number: int) -> None:
        super().__init__(matcher, buffer, source, tag)
        self._passage = passage
        self.number = number
        self.transfer = Transfer(_FIRST_TAG + tag, bytes_tensor(self.view))

    def cancel(self) -> None:
        if not self.done and self.error is None:
            self._passage.ask_for_nothing(self.number)


class Passage:
    """Sends and receives on one granted tag between this rank and a peer.

    All methods run on the loop, except ``_run_*``, which run on threads.

    Args:
        tag: Granted tag.
        peer: Rank of the peer.
        place: Rank of the peer in gloo's group.
        bulk: gloo's group for large messages.
        matcher: Matcher to whose inbox the threads report.
        start: Starts a thread with the given name and function, unless there is a thread of that name.
        acknowledge: Notifies the peer, from any thread, that one of its messages has arrived.
        ask_for_nothing: Asks the peer to answer the receive of the given number with nothing.
    """

    def __init__(
        self,
        tag: int,
        peer: int,
        place: int,
        bulk: Any,
        matcher: Matcher,
        *,
        start: Callable[[str, Callable[[], None]], None],
        acknowledge: Callable[[], object],
        ask_for_nothing: Callable[[int], None],
    ) -> None:
        self._tag = tag
        self._peer = peer
        self._place = place
        self._bulk = bulk
        self._matcher = matcher
        self._callbacks = matcher.callbacks
        self._start = start
        self._acknowledge = acknowledge
        self.ask_for_nothing = ask_for_nothing
        self._uploads: deque[tuple[Transfer, Send]] = deque()
        self._receives: deque[_GrantedReceive] = deque()
        self._sent_count = 0
        self._received_count = 0
        self._unwanted: set[int] = set()
        self._to_send: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self._to_land: queue.SimpleQueue[_GrantedReceive | None] = queue.SimpleQueue()

    def send(self, view: memoryview) -> Send:
        """Start sending the next message, for which the peer has posted a receive or is about to."""
        send = self._send(view, view.nbytes)
        self._send_nothing()
        return send

    def _send(self, view: memoryview, mark: int) -> Send:
        self._sent_count += 1
        send = Send(self._callbacks, view.nbytes)
        upload = Transfer(_FIRST_TAG + self._tag, readable(view), mark)
        self._uploads.append((upload, send))
        self._start(f"send-{self._tag}", self._run_sends)
        self._to_send.put(upload)
        return send

    def _send_nothing(self) -> None:
        """Answer the next receives with nothing, as long as they are cancelled."""
        while self._sent_count + 1 in self._unwanted:
            self._unwanted.remove(self._sent_count + 1)
            self._send(memoryview(b""), _NOTHING)

    def on_unwanted(self, number: int) -> None:
        """Record that the peer has cancelled its receive of that number."""
        if number > self._sent_count:
            self._unwanted.add(number)
            self._send_nothing()

    def on_acknowledged(self) -> None:
        """Complete the oldest message, which has arrived."""
        upload, send = self._uploads.popleft()
        with contextlib.suppress(RuntimeError):  # the peer has received it, and has died since
            upload.wait()
        send.done = True

    def receive(self, buffer: Buffer) -> Receive:
        """Post the next receive."""
        self._received_count += 1
        receive = _GrantedReceive(self, self._matcher, buffer, self._tag, self._peer, self._received_count)
        self._receives.append(receive)
        self._start(f"land-{self._tag}", self._run_landings)
        self._to_land.put(receive)
        return receive

    def _on_landed(self, receive: _GrantedReceive) -> None:
        if receive.error is not None:
            return
        self._receives.popleft()
        mark = receive.transfer.mark
        receive.source = self._peer
        receive.nbytes = max(0, mark)
        receive.cancelled = mark == _NOTHING
        receive.complete()

    def lose(self, error: RankLostError) -> None:
        """Fail the sends and receives in progress, since the peer is gone. Their handles and buffers are kept."""
        for _, send in self._uploads:
            send.error = error
        for receive in self._receives:
            receive.error = error

    def stop(self) -> None:
        """End the threads; those that wait in gloo end when its connections are closed."""
        self._to_send.put(None)
        self._to_land.put(None)

    # -- threads ----------------------------------------------------------------------------------------------------

    def _run_sends(self) -> None:
        """Pass messages to gloo, which writes on this thread as much as the connection takes."""
        with contextlib.suppress(RuntimeError):  # closed: the link's threads report it
            while (upload := self._to_send.get()) is not None:
                upload.post(self._bulk.send, self._place)
                del upload  # frees the memory of an ended stream, once the message has arrived

    def _run_landings(self) -> None:
        """Post receives, and wait for the oldest when all are posted."""
        posted: deque[_GrantedReceive] = deque()
        with contextlib.suppress(RuntimeError):
            while True:
                while not posted or not self._to_land.empty():
                    receive = self._to_land.get()
                    if receive is None:
                        return
                    receive.transfer.post(self._bulk.recv, self._place)
                    posted.append(receive)
                receive = posted.popleft()
                receive.transfer.wait()
                self._acknowledge()
                self._callbacks.put(self._on_landed, receive)
                del receive
