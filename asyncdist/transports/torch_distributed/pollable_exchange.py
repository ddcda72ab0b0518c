"""Exchanges messages on a polled backend: small ones whole; large ones are announced, then handed over.

See :mod:`asyncdist.transports.torch_distributed.pollable_backends` for the reasons.
"""

from __future__ import annotations

import contextlib
import itertools
import struct
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from asyncdist.errors import RankLostError
from asyncdist.transports.matching import InlineMessage, Matcher, Receive, Send
from asyncdist.transports.torch_distributed.failures import end_process, reason
from asyncdist.transports.torch_distributed.pollable_pairs import Pairs, Transit

FRAME_NBYTES: Final = 8192
#: Of a frame: the bytes of it that are used. Then come entries.
_FRAME: Final = struct.Struct("<Q")
#: Of an entry: kind, tag (of an abort: the exit code), number of the large message, bytes of the message. Then come the
#: bytes, if it has them with it.
_ENTRY: Final = struct.Struct("<B3xIQQ")
ENTRY_NBYTES_MAX: Final = FRAME_NBYTES - _FRAME.size
INLINE_NBYTES_MAX: Final = ENTRY_NBYTES_MAX - _ENTRY.size

_MESSAGE: Final = 1
_ANNOUNCE: Final = 2
_GO: Final = 3
_DROP: Final = 4
GOODBYE: Final = 5
_ABORT: Final = 6


class _Announced:
    """A large message that is still with its sender."""

    __slots__ = ("_exchange", "_number", "nbytes", "source", "tag")

    is_here: Final = False

    def __init__(self, exchange: Exchange, source: int, tag: int, number: int, nbytes: int) -> None:
        self._exchange = exchange
        self._number = number
        self.source = source
        self.tag = tag
        self.nbytes = nbytes

    def fill(self, receive: Receive) -> None:
        self._exchange.fetch(self.source, self._number, receive)

    def discard(self) -> None:
        self._exchange.drop(self.source, self._number)


class _Handover:
    """A large message that the backend has at this end, and the request that it completes."""

    __slots__ = ("request", "transit")

    def __init__(self, transit: Transit, request: Send | Receive) -> None:
        self.transit = transit
        self.request = request


class Exchange:
    """Exchanges entries with every peer, and the large messages that they announce.

    Args:
        pairs: moves large messages; None where there are no peers.
        matcher: takes what comes.
        tell: ``tell(peer, entry, send)`` takes an entry there, in order, and completes ``send`` when it has left.
        on_broken: ``on_broken(peer, error)`` when the backend has failed a work with a peer.
    """

    def __init__(
        self,
        pairs: Pairs | None,
        matcher: Matcher,
        tell: Callable[[int, bytes, Send | None], None],
        on_broken: Callable[[int, RuntimeError], None],
    ) -> None:
        self._pairs = pairs
        self._matcher = matcher
        self._tell = tell
        self._on_broken = on_broken
        self._numbers = itertools.count(1)
        self._announced: dict[tuple[int, int], tuple[memoryview, Send]] = {}
        self._under_way: dict[tuple[int, bool], deque[_Handover]] = {}
        self._listen: Callable[[int], None] = lambda _: None
        self.lost: dict[int, RankLostError] = {}

    def send(self, view: memoryview, dest: int, tag: int) -> Send:
        """Start sending; a small message leaves with its entry."""
        send = Send(self._matcher.callbacks, view.nbytes)
        send.error = self.lost.get(dest)
        if send.error is not None:
            return send
        if view.nbytes <= INLINE_NBYTES_MAX:
            self._tell(dest, _ENTRY.pack(_MESSAGE, tag, 0, view.nbytes) + view, send)
            return send
        number = next(self._numbers)
        self._announced[dest, number] = view, send
        self._tell(dest, _ENTRY.pack(_ANNOUNCE, tag, number, view.nbytes), None)
        return send

    def hear(self, peer: int, entries: memoryview) -> set[int]:
        """Do what a peer's entries say. Returns the kinds among them that are the transport's own."""
        position = 0
        own = set()
        while position < len(entries):
            kind, tag, number, nbytes = _ENTRY.unpack_from(entries, position)
            position += _ENTRY.size
            if kind == _MESSAGE:
                self._matcher.deliver(InlineMessage(peer, tag, entries[position : position + nbytes]))
                position += nbytes
            elif kind == _ANNOUNCE:
                self._matcher.deliver(_Announced(self, peer, tag, number, nbytes))
            elif kind == _GO:
                view, send = self._announced.pop((peer, number))
                self._hand_over(peer, send, view)
            elif kind == _DROP:
                _, send = self._announced.pop((peer, number))
                send.done = True
            elif kind == _ABORT:
                end_process(peer, tag)
            else:
                own.add(kind)
        return own

    def fetch(self, source: int, number: int, receive: Receive) -> None:
        """Post a matched receive, and then let the sender go."""
        self._hand_over(source, receive, receive.view[: receive.nbytes])
        if source not in self.lost:
            self._tell(source, _ENTRY.pack(_GO, 0, number, 0), None)

    def drop(self, source: int, number: int) -> None:
        """Refuse a large message that does not fit its receive."""
        self._tell(source, _ENTRY.pack(_DROP, 0, number, 0), None)

    def _hand_over(self, peer: int, request: Send | Receive, view: memoryview) -> None:
        """Give the backend a large message, or the buffer for one."""
        assert self._pairs is not None, f"rank {peer} is a peer of a rank that has none"
        is_send = isinstance(request, Send)
        request.error = self.lost.get(peer)
        if request.error is not None:
            return
        try:
            transit = (self._pairs.send if is_send else self._pairs.receive)(view, peer)
        except RuntimeError as error:
            self._on_broken(peer, error)
            request.error = self.lost.get(peer) or closed(peer, error)  # it is not lost before its frames are read
            return
        self._under_way.setdefault((peer, is_send), deque()).append(_Handover(transit, request))

    def poll(self) -> None:
        """Complete what the backend says is complete: of each order the oldest first."""
        for (peer, _), handovers in list(self._under_way.items()):
            while handovers and peer not in self.lost:
                try:
                    if not handovers[0].transit.test():
                        break
                except RuntimeError as error:
                    self._on_broken(peer, error)
                    break
                handovers.popleft().request.done = True

    def is_receiving(self, peer: int) -> bool:
        """Return whether the backend has not completed yet what it was given to receive from ``peer``."""
        return any(not handover.request.done for handover in self._under_way.get((peer, False), ()))

    def lose(self, rank: int, error: RankLostError) -> None:
        """Fail what involves ``rank``, except what has completed since the last look.

        The backend keeps what it has, buffers included, until its groups are closed.
        """
        if rank in self.lost:
            return
        for (peer, _), handovers in self._under_way.items():
            with contextlib.suppress(RuntimeError):  # the peer is being lost already
                while peer == rank and handovers and handovers[0].transit.test():
                    handovers.popleft().request.done = True
        self.lost[rank] = error
        for (dest, _), (_, send) in self._announced.items():
            if dest == rank:
                send.error = error
        for (peer, _), handovers in self._under_way.items():
            for handover in handovers if peer == rank else ():
                handover.request.error = error
        self._matcher.lose(rank, error)
        self._listen(rank)

    def set_loss_listener(self, listen: Callable[[int], None]) -> None:
        """Have ``listen(rank)`` called for each rank that is lost; at once for those that are lost already."""
        self._listen = listen
        for rank in sorted(self.lost):
            listen(rank)


class Frames:
    """Moves the entries to and from one peer, with one frame under way in each direction; later entries share the next.

    Args:
        pairs: moves frames.
        peer: its rank.
    """

    def __init__(self, pairs: Pairs, peer: int) -> None:
        self._pairs = pairs
        self._peer = peer
        self._received = memoryview(bytearray(FRAME_NBYTES))
        self._frame = memoryview(bytearray(FRAME_NBYTES))
        self._receiving: Transit | None = pairs.receive(self._received, peer)
        self._sending: Transit | None = None
        self._queued: deque[tuple[bytes, Send | None]] = deque()
        self.said_goodbye = False
        self.heard_goodbye = False
        self.lost_at = 0.0  # when the peer counts as lost at the latest, once it has said goodbye

    @property
    def is_over(self) -> bool:
        """Whether both ends have said goodbye."""
        return self.heard_goodbye and self.is_silent

    @property
    def is_silent(self) -> bool:
        """Whether nothing is left to send."""
        return self._sending is None and not self._queued

    def fail(self, error: RankLostError) -> None:
        """Fail the sends that have not left."""
        for _, send in self._queued:
            if send is not None:
                send.error = error

    def tell(self, entry: bytes, send: Send | None = None) -> None:
        """Send an entry with the next frame. Not before :meth:`flush` does it leave."""
        self._queued.append((entry, send))

    def say_goodbye(self) -> None:
        """Send the last entry."""
        if not self.said_goodbye:
            self.said_goodbye = True
            self.tell(_ENTRY.pack(GOODBYE, 0, 0, 0))

    def abort(self, exit_code: int) -> None:
        """End the peer, when it next polls."""
        self.tell(_ENTRY.pack(_ABORT, exit_code, 0, 0))

    def flush(self) -> None:
        """Send what is queued, if the frame before it has left. Raises RuntimeError if the peer is gone."""
        while self._queued or self._sending is not None:
            if self._sending is not None and not self._sending.test():
                return
            self._sending = None
            if self._queued:
                self._sending = self._send_frame()

    def _send_frame(self) -> Transit:
        nbytes = _FRAME.size
        leaving: list[tuple[bytes, Send | None]] = []
        while self._queued and nbytes + len(self._queued[0][0]) <= FRAME_NBYTES:
            leaving.append(self._queued.popleft())
            entry, _ = leaving[-1]
            self._frame[nbytes : nbytes + len(entry)] = entry
            nbytes += len(entry)
        _FRAME.pack_into(self._frame, 0, nbytes)
        try:
            transit = self._pairs.send(self._frame, self._peer)
        except RuntimeError:
            self._queued.extendleft(reversed(leaving))  # for `fail`
            raise
        for _, send in leaving:
            if send is not None:
                send.done = True
        return transit

    def take(self) -> Iterable[memoryview]:
        """Yield the entries of each frame that has come. Raises RuntimeError if the peer is gone."""
        while self._receiving is not None and self._receiving.test():
            (nbytes,) = _FRAME.unpack_from(self._received)
            entries = memoryview(bytes(self._received[_FRAME.size : nbytes]))
            self._receiving = None
            yield entries
            if not self.heard_goodbye:
                self._receiving = self._pairs.receive(self._received, self._peer)


def gone(rank: int, why: str) -> RankLostError:
    """Make the error of a peer that is lost."""
    return RankLostError(f"rank {rank} is gone: {why}", rank=rank)


def closed(rank: int, error: RuntimeError) -> RankLostError:
    """Make the error of a peer with which the backend has failed a work."""
    return gone(rank, f"its connection was closed ({reason(error)})")
