"""Sends messages over a backend of torch.distributed whose works can be polled, without threads or waits.

gloo's cannot, and it is not used here: threads wait for it, see :mod:`asyncdist.transports.torch_distributed.gloo`.

torch.distributed's point-to-point calls are less than messages: a receive has one source and one size, is told neither,
and cannot be taken back. So a receive is given to the backend only when what will come is known:

- **Entries** say everything: a small message, whole; the announcement of a large one; and the receiver's answer to
  that, once a receive has been matched with it: *go*, or *drop* where the receive's buffer is too small.
- **Large messages** are thus posted by the receiver first, and between a pair in the order of its answers at both ends.
  No tag is needed, nothing waits in the backend for a receive that nobody posts, and no message differs in size from
  its receive. Each direction has a group of its own, since a backend that does one thing after the other, as NCCL does
  per pair, would else wait for itself: both ranks for their receive, before either's send.

Entries travel in one of two ways. :class:`PolledTransport` packs them into frames of one size on the same backend, and
so is whole. :class:`PolledBulk` sends them over another transport, its *control*, and gives the backend large tensors
alone: for NCCL. NCCL itself has never been run under this code; the tests stand backends in for it that ignore tags and
do one thing after the other.

A test of any request polls everything that is under way: a frame per peer, and the oldest large message per peer and
direction. A work that the backend fails means that its peer is gone. Where a
backend never fails one for a peer that has died, the launcher must end those that wait for it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Final

import torch

from asyncdist.errors import RankLostError, TransportError
from asyncdist.transports.base import Capabilities, Request, Transport
from asyncdist.transports.matching import CallbackQueue, MatchedTransport, Send
from asyncdist.transports.torch_distributed.pollable_exchange import (
    ENTRY_NBYTES_MAX,
    GOODBYE,
    Exchange,
    Frames,
    closed,
    gone,
)
from asyncdist.transports.torch_distributed.pollable_pairs import Pairs

logger = logging.getLogger("asyncdist.transports.torch_distributed.pollable_backends")

_CAPABILITIES: Final = Capabilities(native_collectives=False, survives_rank_loss=True, wakes=False, tag_max=2**31 - 1)
#: How long the last entries may take at the end.
GOODBYE_S: Final = 0.5
_PAUSE_S: Final = 0.0005


class _Poller(CallbackQueue):
    """Takes the place of a queue that threads fill: it is never empty, and a look into it polls."""

    def __init__(self, poll: Callable[[], None]) -> None:
        super().__init__()
        self._poll = poll
        self.calls.append((lambda _: None, None))

    def empty(self) -> None:
        self._poll()


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
        self._exchange = Exchange(pairs[1] if pairs else None, self._matcher, self._tell, self._break)
        self._frames = {peer: Frames(pairs[0], peer) for peer in range(size) if peer != rank} if pairs else {}
        self._is_closing = False

    def _send_away(self, view: memoryview, dest: int, tag: int) -> Request:
        return self._exchange.send(view, dest, tag)

    def _tell(self, peer: int, entry: bytes, send: Send | None) -> None:
        frames = self._frames.get(peer)
        if frames is None:  # it is gone, and the requests that involve it have failed
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
                    if GOODBYE in self._exchange.hear(peer, entries):
                        frames.heard_goodbye = True
                        frames.lost_at = time.monotonic() + GOODBYE_S
                        frames.say_goodbye()  # it waits for that
                frames.flush()
            except RuntimeError as error:
                self._break(peer, error)
            if frames.heard_goodbye and not self._is_closing and self._has_all_of(peer, frames):
                self._lose(peer, frames, gone(peer, "it has closed its connections"))
        self._exchange.poll()

    def _has_all_of(self, peer: int, frames: Frames) -> bool:
        """Return whether what ``peer`` sent before its goodbye has come, or its time is over.

        A large message may be on its way still: it takes another connection than the goodbye.
        """
        return not self._exchange.is_receiving(peer) or time.monotonic() >= frames.lost_at

    def _break(self, peer: int, error: RuntimeError) -> None:
        """Lose ``peer``, with which the backend has failed a work, after receiving what has come from it."""
        frames = self._frames.pop(peer, None)
        if frames is None:
            return
        with contextlib.suppress(RuntimeError):  # what there was has been taken
            for entries in frames.take():
                self._exchange.hear(peer, entries)
        self._lose(peer, frames, closed(peer, error))

    def _lose(self, peer: int, frames: Frames, error: RankLostError) -> None:
        self._exchange.lose(peer, error)
        frames.fail(self._exchange.lost[peer])

    def lost_ranks(self) -> frozenset[int]:
        return frozenset(self._exchange.lost)

    def set_loss_listener(self, listen: Callable[[int], None]) -> None:
        self._exchange.set_loss_listener(listen)

    def abort(self, exit_code: int) -> None:
        """End the peers, each when it next polls."""
        for frames in self._frames.values():
            frames.abort(exit_code)
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
        self._exchange = Exchange(pairs, self._matcher, self._tell, self._break)
        self._leaving: list[tuple[int, Request, Send | None]] = []
        self._lost_at: dict[int, float] = {}  # when a rank that control has lost counts as lost here at the latest
        self._entry = memoryview(bytearray(ENTRY_NBYTES_MAX))
        self._receive = control.persistent_receive(self._entry, tag)
        self._receive.start()

    def _send_away(self, view: memoryview, dest: int, tag: int) -> Request:
        return self._exchange.send(view, dest, tag)

    def _tell(self, peer: int, entry: bytes, send: Send | None) -> None:
        try:
            request = self._control.start_send(entry, peer, self._tag)
        except RankLostError as error:  # the peer is lost in `_poll`: a large message may be on its way from it still
            if send is not None:
                send.error = error
            return
        if request is not None:
            self._leaving.append((peer, request, send))
        elif send is not None:
            send.done = True

    def _poll(self) -> None:
        while (taken := self._receive.take()) is not None:
            peer, nbytes = taken
            entry = memoryview(bytes(self._entry[:nbytes]))
            self._receive.start()
            self._exchange.hear(peer, entry)
        self._leaving = [entry for entry in self._leaving if not self._has_left(*entry)]
        for rank in self._control.lost_ranks() - self._exchange.lost.keys():
            if self._has_all_of(rank):
                self._exchange.lose(rank, gone(rank, f"{self._control.name} (control) has lost it"))
        self._exchange.poll()

    def _has_all_of(self, peer: int) -> bool:
        """Return whether what ``peer``, which control has lost, had sent has come, or its time is over.

        A large message may be on its way still: it takes another connection than the peer's goodbye to control.
        """
        now = time.monotonic()
        return now >= self._lost_at.setdefault(peer, now + GOODBYE_S) or not self._exchange.is_receiving(peer)

    def _has_left(self, peer: int, request: Request, send: Send | None) -> bool:
        try:
            if not request.test():
                return False
        except RankLostError as error:
            if send is not None:
                send.error = error
            return True
        if send is not None:
            send.done = True
        return True

    def _break(self, peer: int, error: RuntimeError) -> None:
        self._exchange.lose(peer, closed(peer, error))

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
        self._receive.cancel()
        deadline = time.monotonic() + GOODBYE_S
        while not self._receive.test() and time.monotonic() < deadline:
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


def _close_quietly(close: Callable[[], None]) -> None:
    try:
        close()
    except TransportError as error:  # there is a failure already, and it is the one to be told
        logger.warning("%s", error)


def _ranks(size: int) -> str:
    return f"{size} rank{'s' if size > 1 else ''}"
