"""Messages over a backend of torch.distributed whose works can be polled: no threads, nothing waits.

torch.distributed's point-to-point calls are less than messages: a receive has one source and one size, is told neither,
and cannot be taken back. So a receive is given to the backend only when what will come is known:

- **Entries** say everything: a small message, whole; the announcement of a large one; and what the receiver answers to
  that, once a receive of ours has been matched with it: *go*, or *drop* where the receive has no room for it.
- **Large messages** are thus posted by the receiver first, and between a pair in the order of its answers at both ends.
  No tag is needed, nothing waits in the backend for a receive that nobody posts, and no message differs in size from
  its receive. Each direction has a group of its own, since a backend that does one thing after the other, as NCCL does
  per pair, would else wait for itself: both ranks for their receive, before either's send.

Entries travel in one of two ways. :class:`PolledTransport` packs them into frames of one size on the same backend, and
so is whole. :class:`PolledBulk` sends them over another transport, its *control*, and gives the backend large tensors
alone: for NCCL. NCCL itself has never been run under this code; the tests stand backends in for it that ignore tags and
do one thing after the other.

Who tests any request polls everything that is under way: a frame per peer, and the oldest large message per peer and
direction. A work that the backend fails means that its peer is gone. A backend that never fails one for a peer that has
died leaves those who wait for it to the launcher.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch

from asyncdist.errors import RankLostError, TransportError
from asyncdist.transports.base import Capabilities, Request, Transport
from asyncdist.transports.matching import CallbackQueue, InlineMessage, MatchedTransport, Matcher, Receive, Send
from asyncdist.transports.torch_distributed.gloo import end_process, reason

logger = logging.getLogger("asyncdist.transports.torch_distributed.polled")

FRAME_NBYTES: Final = 8192
#: Of a frame: the bytes of it that are used. Then come entries.
_FRAME: Final = struct.Struct("<Q")
#: Of an entry: kind, tag (of an abort: the exit code), number of the large message, bytes of the message. Then come the
#: bytes, if it has them with it.
_ENTRY: Final = struct.Struct("<B3xIQQ")
INLINE_NBYTES_MAX: Final = FRAME_NBYTES - _FRAME.size - _ENTRY.size

_MESSAGE: Final = 1
_ANNOUNCE: Final = 2
_GO: Final = 3
_DROP: Final = 4
_GOODBYE: Final = 5
_ABORT: Final = 6

#: Of everything; a backend may ignore it.
_GROUP_TAG: Final = 1
_CAPABILITIES: Final = Capabilities(native_collectives=False, survives_rank_loss=True, wakes=False, tag_max=2**31 - 1)
#: How long the last entries may take at the end.
GOODBYE_S: Final = 0.5
_PAUSE_S: Final = 0.0005


class Transit:
    """Bytes on their way, at either end, in the backend's keeping.

    Args:
        work: the backend's.
        tensor: what it reads or writes.
        host: where a receive is to land, if that is not the tensor itself.
    """

    __slots__ = ("_host", "_tensor", "_work")

    def __init__(self, work: Any, tensor: torch.Tensor, host: torch.Tensor | None = None) -> None:
        self._work = work
        self._tensor = tensor
        self._host = host

    def is_completed(self) -> bool:
        """What the backend says, whatever that is worth."""
        return bool(self._work.is_completed())

    def land(self) -> None:
        """Copy what has been received from the device to the host."""
        if self._host is not None:
            self._host.copy_(self._tensor)

    def test(self) -> bool:
        """Whether it is complete. Raises RuntimeError if it has failed."""
        if not self._work.is_completed():
            return False
        self._work.wait()  # returns at once, or raises what went wrong
        self.land()
        return True


class Pairs:
    """Bytes between pairs of ranks: per pair and direction in one order, which both ends keep.

    Args:
        make_group: makes a group of all ranks, given a name that is the same on all of them.
        rank: this one.
        device: where the backend wants tensors to be.
    """

    def __init__(self, make_group: Callable[[str], Any], rank: int, device: torch.device) -> None:
        self._rank = rank
        self._device = device
        self._up, self._down = make_group("up"), make_group("down")

    def send(self, view: memoryview, dest: int) -> Transit:
        """Start sending at least one byte."""
        tensor = _bytes_tensor(bytearray(view) if view.readonly else view).to(self._device)
        group = self._up if dest > self._rank else self._down
        return Transit(group.send([tensor], dest, _GROUP_TAG), tensor)

    def receive(self, view: memoryview, source: int) -> Transit:
        """Start receiving exactly as many bytes."""
        host = _bytes_tensor(view)
        group = self._up if source < self._rank else self._down
        if self._device.type == "cpu":
            return Transit(group.recv([host], source, _GROUP_TAG), host)
        tensor = torch.empty_like(host, device=self._device)
        return Transit(group.recv([tensor], source, _GROUP_TAG), tensor, host)

    def close(self) -> None:
        """Give the groups back.

        Raises:
            TransportError: the backend does not want to.
        """
        try:
            for group in (self._up, self._down):
                group.shutdown()
        except RuntimeError as error:
            raise TransportError(f"torch's backend did not shut down: {reason(error)}") from error


def _bytes_tensor(buffer: Any) -> torch.Tensor:
    """A tensor over the buffer's own memory."""
    return torch.frombuffer(buffer, dtype=torch.uint8)


class _Poller(CallbackQueue):
    """In place of what threads bring: there is always something to look at, and a look polls."""

    def __init__(self, poll: Callable[[], None]) -> None:
        super().__init__()
        self._poll = poll
        self.calls.append((lambda _: None, None))

    def empty(self) -> None:
        self._poll()


class _Announced:
    """A large message that is still with its sender."""

    __slots__ = ("_exchange", "_number", "nbytes", "source", "tag")

    is_here: Final = False

    def __init__(self, exchange: _Exchange, source: int, tag: int, number: int, nbytes: int) -> None:
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


class _Exchange:
    """Entries with every peer, and the large messages that they are about.

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
        """Nobody will have it."""
        self._tell(source, _ENTRY.pack(_DROP, 0, number, 0), None)

    def _hand_over(self, peer: int, request: Send | Receive, view: memoryview) -> None:
        """Give the backend a large message, or the room for one."""
        assert self._pairs is not None, f"rank {peer} is a peer of a rank that has none"
        is_send = isinstance(request, Send)
        request.error = self.lost.get(peer)
        if request.error is not None:
            return
        try:
            transit = (self._pairs.send if is_send else self._pairs.receive)(view, peer)
        except RuntimeError as error:
            self._on_broken(peer, error)
            request.error = self.lost.get(peer) or _closed(peer, error)  # it is not lost before its frames are read
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
        """``listen(rank)`` for each that is gone, those of before at once."""
        self._listen = listen
        for rank in sorted(self.lost):
            listen(rank)


class _Frames:
    """The entries to and from one peer: one frame under way in each direction. What comes meanwhile shares the next.

    Args:
        pairs: moves frames.
        peer: its rank.
    """

    def __init__(self, pairs: Pairs, peer: int) -> None:
        self._pairs = pairs
        self._peer = peer
        self._room = memoryview(bytearray(FRAME_NBYTES))
        self._frame = memoryview(bytearray(FRAME_NBYTES))
        self._receiving: Transit | None = pairs.receive(self._room, peer)
        self._sending: Transit | None = None
        self._queued: deque[tuple[bytes, Send | None]] = deque()
        self.said_goodbye = False
        self.heard_goodbye = False

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
        """The last entry."""
        if not self.said_goodbye:
            self.said_goodbye = True
            self.tell(_ENTRY.pack(_GOODBYE, 0, 0, 0))

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
        """The entries of each frame that has come. Raises RuntimeError if the peer is gone."""
        while self._receiving is not None and self._receiving.test():
            (nbytes,) = _FRAME.unpack_from(self._room)
            entries = memoryview(bytes(self._room[_FRAME.size : nbytes]))
            self._receiving = None
            yield entries
            if not self.heard_goodbye:
                self._receiving = self._pairs.receive(self._room, self._peer)


class PolledTransport(MatchedTransport):
    """The ranks of a torch.distributed job, on a backend whose works can be polled.

    Args:
        rank: this one.
        size: how many there are.
        backend: its name, for reports.
        pairs: for frames, and for large messages; None where there are no peers.
    """

    name = "torch"

    def __init__(self, rank: int, size: int, backend: str, pairs: tuple[Pairs, Pairs] | None) -> None:
        super().__init__(rank, size, _Poller(self._poll), _CAPABILITIES)
        self._backend = backend
        self._pairs = list(pairs or ())
        self._exchange = _Exchange(pairs[1] if pairs else None, self._matcher, self._tell, self._break)
        self._frames = {peer: _Frames(pairs[0], peer) for peer in range(size) if peer != rank} if pairs else {}
        self._is_closing = False

    def _send_away(self, view: memoryview, dest: int, tag: int) -> Request:
        return self._exchange.send(view, dest, tag)

    def _tell(self, peer: int, entry: bytes, send: Send | None) -> None:
        frames = self._frames.get(peer)
        if frames is None:  # it is gone, and whoever waits for it has been told
            return
        frames.tell(entry, send)
        try:
            frames.flush()
        except RuntimeError as error:
            self._break(peer, error)

    def _poll(self) -> None:
        for peer, frames in list(self._frames.items()):
            try:
                for entries in frames.take():
                    if _GOODBYE in self._exchange.hear(peer, entries):
                        frames.heard_goodbye = True
                        frames.say_goodbye()  # it waits for that
                frames.flush()
            except RuntimeError as error:
                self._break(peer, error)
            if frames.heard_goodbye and not self._is_closing:
                self._lose(peer, frames, _gone(peer, "it has closed its connections"))
        self._exchange.poll()

    def _break(self, peer: int, error: RuntimeError) -> None:
        """The backend has failed a work with ``peer``. What has come from it before is received all the same."""
        frames = self._frames.pop(peer, None)
        if frames is None:
            return
        with contextlib.suppress(RuntimeError):  # what there was has been taken
            for entries in frames.take():
                self._exchange.hear(peer, entries)
        self._lose(peer, frames, _closed(peer, error))

    def _lose(self, peer: int, frames: _Frames, error: RankLostError) -> None:
        self._exchange.lose(peer, error)
        frames.fail(self._exchange.lost[peer])

    def lost_ranks(self) -> frozenset[int]:
        return frozenset(self._exchange.lost)

    def set_loss_listener(self, listen: Callable[[int], None]) -> None:
        self._exchange.set_loss_listener(listen)

    def abort(self, exit_code: int) -> None:
        """End the peers, each when it next polls."""
        for frames in self._frames.values():
            frames.tell(_ENTRY.pack(_ABORT, exit_code, 0, 0))
        self._poll_until(lambda: all(frames.is_silent for frames in self._frames.values()))

    def close(self) -> None:
        """Say goodbye, wait for the peers to do so, for half a second at most, and give the groups back.

        Raises:
            TransportError: the backend does not want to.
        """
        self._is_closing = True
        for frames in self._frames.values():
            frames.say_goodbye()
        self._poll_until(lambda: all(frames.is_over for frames in self._frames.values()))
        self._frames = {}
        while self._pairs:
            self._pairs.pop().close()

    def close_failed(self) -> None:
        _close_quietly(self.close)

    def _poll_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + GOODBYE_S
        self._poll()
        while not condition() and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
            self._poll()

    def describe(self) -> str:
        return f"torch: {self._backend} of torch {torch.__version__}, polled, {_ranks(self.size)}"


class PolledBulk(MatchedTransport):
    """The ranks of another transport, on a backend that moves bytes between them and need keep no tags.

    Args:
        control: takes the entries.
        tag: of the entries there, which nobody else may use.
        backend: its name, for reports.
        pairs: for large messages; None where there are no peers.
    """

    name = "torch"

    def __init__(self, control: Transport, tag: int, backend: str, pairs: Pairs | None) -> None:
        super().__init__(control.rank, control.size, _Poller(self._poll), _CAPABILITIES)
        self._control = control
        self._tag = tag
        self._backend = backend
        self._pairs = pairs
        self._exchange = _Exchange(pairs, self._matcher, self._tell, self._break)
        self._leaving: list[tuple[int, Request, Send | None]] = []
        self._room = memoryview(bytearray(_ENTRY.size + INLINE_NBYTES_MAX))
        self._inlet = control.persistent_receive(self._room, tag)
        self._inlet.start()

    def _send_away(self, view: memoryview, dest: int, tag: int) -> Request:
        return self._exchange.send(view, dest, tag)

    def _tell(self, peer: int, entry: bytes, send: Send | None) -> None:
        try:
            request = self._control.start_send(entry, peer, self._tag)
        except RankLostError as error:
            self._exchange.lose(peer, error)
            if send is not None:
                send.error = error
            return
        if request is not None:
            self._leaving.append((peer, request, send))
        elif send is not None:
            send.done = True

    def _poll(self) -> None:
        while (taken := self._inlet.take()) is not None:
            peer, nbytes = taken
            entry = memoryview(bytes(self._room[:nbytes]))
            self._inlet.start()
            self._exchange.hear(peer, entry)
        self._leaving = [entry for entry in self._leaving if not self._has_left(*entry)]
        for rank in self._control.lost_ranks() - self._exchange.lost.keys():
            self._exchange.lose(rank, _gone(rank, f"{self._control.name} (control) has lost it"))
        self._exchange.poll()

    def _has_left(self, peer: int, request: Request, send: Send | None) -> bool:
        try:
            if not request.test():
                return False
        except RankLostError as error:
            self._exchange.lose(peer, error)
            if send is not None:
                send.error = error
            return True
        if send is not None:
            send.done = True
        return True

    def _break(self, peer: int, error: RuntimeError) -> None:
        self._exchange.lose(peer, _closed(peer, error))

    def lost_ranks(self) -> frozenset[int]:
        return frozenset(self._exchange.lost)

    def set_loss_listener(self, listen: Callable[[int], None]) -> None:
        self._exchange.set_loss_listener(listen)

    def abort(self, exit_code: int) -> None:
        self._control.abort(exit_code)

    def close(self) -> None:
        """Take back what waits on control, and give the groups back.

        Raises:
            TransportError: the backend does not want to.
        """
        self._inlet.cancel()
        deadline = time.monotonic() + GOODBYE_S
        while not self._inlet.test() and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
        self._close_pairs()

    def close_failed(self) -> None:
        _close_quietly(self._close_pairs)

    def _close_pairs(self) -> None:
        pairs, self._pairs = self._pairs, None
        if pairs is not None:
            pairs.close()

    def describe(self) -> str:
        return f"torch: {self._backend} of torch {torch.__version__}, polled, {_ranks(self.size)}"


def _gone(rank: int, why: str) -> RankLostError:
    return RankLostError(f"rank {rank} is gone: {why}", rank=rank)


def _closed(rank: int, error: RuntimeError) -> RankLostError:
    return _gone(rank, f"its connection was closed ({reason(error)})")


def _close_quietly(close: Callable[[], None]) -> None:
    try:
        close()
    except TransportError as error:  # there is a failure already, and it is the one to be told
        logger.warning("%s", error)


def _ranks(size: int) -> str:
    return f"{size} rank{'s' if size > 1 else ''}"
