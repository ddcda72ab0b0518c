"""Moves large messages that need no announcement, since their receives are posted first: those of streams.

Gloo cannot be left to match most messages by itself. A receive may be from any source, may be smaller than its message
(which would end the process), and may be abandoned; so a large message is announced, and fetched once its receive is
found. On a *granted* tag the caller promises what makes that needless: a receive names its source, and no message is
larger than its receive. Both ends then hand theirs to gloo at once, which matches them in their order.

- The trailer says how long the message is, which may be less than its buffer.
- Gloo takes no receive back. A receiver that cancels one asks the sender to answer it with *nothing*, once all messages
  before it have been sent; if its own message is on its way already, the request is void.
- The thread that has waited for a message acknowledges it, in a control frame, before the receiver's loop hears of it:
  a sender that trains, or streams the next chunk, is not kept waiting for a receiver that does. (A wait for its own
  send, or for the trailer's, would end sooner, but never where the peer dies while bytes are on their way.)
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

#: In a trailer, in place of the message's size: there is no message, since the receive has been cancelled.
_NOTHING: Final = -1
#: Of gloo's tags for these; those below are of announced messages.
_FIRST_TAG: Final = 0x40000000


class _GrantedReceive(Receive):
    """A receive request of one passage; ``number`` counts them from 1."""

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
    """One granted tag between this rank and a peer, both ways.

    Everything belongs to the loop but the methods that are threads, ``_run_*``.

    Args:
        tag: the tag.
        peer: its rank.
        place: its rank in gloo's group.
        bulk: gloo's group.
        matcher: whose inbox the threads tell.
        start: starts a thread, given its name and what it runs, unless there is one of that name.
        acknowledge: tells the peer, from any thread, that a message of its has landed.
        ask_for_nothing: asks the peer to answer the receive of that number with nothing.
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
        """Start sending the next message, for which the peer has posted a receive, or is about to."""
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
        """Answer the receives that are next and have been cancelled."""
        while self._sent_count + 1 in self._unwanted:
            self._unwanted.remove(self._sent_count + 1)
            self._send(memoryview(b""), _NOTHING)

    def on_unwanted(self, number: int) -> None:
        """Note that the peer has cancelled its receive of that number."""
        if number > self._sent_count:
            self._unwanted.add(number)
            self._send_nothing()

    def on_acknowledged(self) -> None:
        """Note that the oldest message has landed."""
        upload, send = self._uploads.popleft()
        with contextlib.suppress(RuntimeError):  # the peer has it, and has died since
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
        """Fail what is under way, since the peer is gone. Its handles and buffers stay."""
        for _, send in self._uploads:
            send.error = error
        for receive in self._receives:
            receive.error = error

    def stop(self) -> None:
        """Let the threads end; those that wait in gloo are woken by its end."""
        self._to_send.put(None)
        self._to_land.put(None)

    # -- threads ----------------------------------------------------------------------------------------------------

    def _run_sends(self) -> None:
        """Hand messages to gloo, which writes them here and now as far as the connection takes them."""
        with contextlib.suppress(RuntimeError):  # closed: the link's threads report it
            while (upload := self._to_send.get()) is not None:
                upload.post(self._bulk.send, self._place)
                del upload  # and with it, once it has landed, the memory of a stream that has ended

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
