"""Ranks in one process, on one event loop: for notebooks, tests, and ``python train.py`` alone.

A :class:`LocalHub` holds one mailbox per rank and hands out a :class:`LocalTransport` to each. Matching follows MPI:
per destination, posted receives and unexpected messages queue in order, and the first that fits wins.

Small messages are eager: copied at once, the send is complete. Larger ones are rendezvous: the send completes when a
receive has matched, and the bytes are copied straight from the sender's buffer, which is why it must not change until
then.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Final

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

EAGER_NBYTES: Final = 65536


class _Send:
    __slots__ = ("cancelled", "data", "dest", "done", "error", "nbytes", "source", "tag")

    def __init__(self, data: memoryview, source: int, dest: int, tag: int) -> None:
        self.data = data
        self.nbytes = data.nbytes
        self.source = source
        self.dest = dest
        self.tag = tag
        self.done = False
        self.cancelled = False
        self.error: AsyncdistError | None = None

    def test(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.done

    def cancel(self) -> None:
        """A message once sent is on its way."""


class _Receive:
    __slots__ = ("_hub", "buffer", "cancelled", "dest", "done", "error", "nbytes", "source", "tag", "wanted")

    def __init__(self, hub: LocalHub, buffer: Buffer, dest: int, wanted: int, tag: int) -> None:
        self._hub = hub
        self.buffer = as_bytes(buffer)
        self.dest = dest
        self.wanted = wanted
        self.tag = tag
        self.source = ANY_SOURCE
        self.nbytes = 0
        self.done = False
        self.cancelled = False
        self.error: AsyncdistError | None = None

    def test(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.done

    def take(self) -> tuple[int, int] | None:
        return (self.source, self.nbytes) if self.test() else None

    def start(self) -> None:
        self.done = self.cancelled = False
        self.error = None
        self._hub.post(self)

    def cancel(self) -> None:
        if not self.done and self.error is None:
            self._hub.withdraw(self)
            self.done = self.cancelled = True

    def accept(self, send: _Send) -> None:
        """Take the message. The sender is done in any case; a buffer too small is the receiver's error."""
        send.done = True
        self.source = send.source
        self.nbytes = send.nbytes
        if send.nbytes > self.buffer.nbytes:
            self.error = TruncationError(
                f"a message of {send.nbytes} bytes arrived for a buffer of {self.buffer.nbytes} bytes",
                message_nbytes=send.nbytes,
                buffer_nbytes=self.buffer.nbytes,
                source=send.source,
            )
            return
        self.buffer[: send.nbytes] = send.data
        self.done = True


class LocalHub:
    """The shared medium of ``size`` ranks in one process."""

    def __init__(self, size: int) -> None:
        self.size = size
        # Of each rank, by tag: messages that nobody takes on one tag are no work for the others.
        self._posted: list[defaultdict[int, deque[_Receive]]] = [defaultdict(deque) for _ in range(size)]
        self._unexpected: list[defaultdict[int, deque[_Send]]] = [defaultdict(deque) for _ in range(size)]
        self._doorbells: dict[int, Callable[[], None]] = {}
        self._loss_listeners: dict[int, Callable[[int], None]] = {}
        self._lost: set[int] = set()

    def transport(self, rank: int) -> LocalTransport:
        return LocalTransport(self, rank)

    def lose(self, rank: int) -> None:
        """Fail ``rank`` as if its process had died: requests that involve it end with RankLostError, and no others."""
        self._lost.add(rank)
        for dest in range(self.size):
            for posted in self._posted[dest].values():
                for receive in [r for r in posted if r.wanted == rank or dest == rank]:
                    posted.remove(receive)
                    receive.error = RankLostError(f"rank {rank} is gone", rank=rank)
            for unexpected in self._unexpected[dest].values():
                for send in [s for s in unexpected if dest == rank or (s.source == rank and not s.done)]:
                    unexpected.remove(send)
                    send.error = RankLostError(f"rank {rank} is gone", rank=rank)
            self._ring(dest)
        for observer, listen in list(self._loss_listeners.items()):
            if observer != rank:
                listen(rank)

    @property
    def lost(self) -> frozenset[int]:
        return frozenset(self._lost)

    def send(self, buffer: Buffer, source: int, dest: int, tag: int) -> _Send:
        view = as_bytes(buffer)
        send = _Send(view, source, dest, tag)
        if dest in self._lost or source in self._lost:
            send.error = RankLostError(f"rank {dest} is gone", rank=dest)
            return send
        posted = self._posted[dest][tag]
        for receive in posted:
            if receive.wanted in (ANY_SOURCE, source):
                posted.remove(receive)
                receive.accept(send)
                self._ring(dest)
                return send
        if view.nbytes <= EAGER_NBYTES:
            send.data = memoryview(bytes(view))
            send.done = True
        self._unexpected[dest][tag].append(send)
        self._ring(dest)
        return send

    def post(self, receive: _Receive) -> None:
        waiting = self._unexpected[receive.dest][receive.tag]
        for send in waiting:
            if receive.wanted in (ANY_SOURCE, send.source):
                waiting.remove(send)
                receive.accept(send)
                self._ring(send.source)
                self._ring(receive.dest)  # a lane that posts again does not test at once
                return
        if receive.wanted in self._lost:
            receive.error = RankLostError(f"rank {receive.wanted} is gone", rank=receive.wanted)
            return
        self._posted[receive.dest][receive.tag].append(receive)

    def withdraw(self, receive: _Receive) -> None:
        posted = self._posted[receive.dest][receive.tag]
        if receive in posted:
            posted.remove(receive)

    def set_doorbell(self, rank: int, ring: Callable[[], None]) -> None:
        self._doorbells[rank] = ring

    def set_loss_listener(self, rank: int, listen: Callable[[int], None]) -> None:
        self._loss_listeners[rank] = listen

    def forget(self, rank: int) -> None:
        """``rank`` closed its transport."""
        self._doorbells.pop(rank, None)
        self._loss_listeners.pop(rank, None)
        self._posted[rank].clear()

    def _ring(self, rank: int) -> None:
        if rank in self._doorbells:
            self._doorbells[rank]()


class LocalTransport(Transport):
    """One rank of a :class:`LocalHub`."""

    name = "local"

    def __init__(self, hub: LocalHub, rank: int) -> None:
        self._hub = hub
        self.rank = rank
        self.size = hub.size
        self.capabilities = Capabilities(
            native_collectives=False, survives_rank_loss=True, wakes=True, tag_max=32767, shares_process=True
        )

    def isend(self, buffer: Buffer, dest: int, tag: int) -> Request:
        return self._hub.send(buffer, self.rank, dest, tag)

    def irecv(self, buffer: Buffer, source: int, tag: int) -> Request:
        receive = _Receive(self._hub, buffer, self.rank, source, tag)
        self._hub.post(receive)
        return receive

    def persistent_receive(self, buffer: Buffer, tag: int) -> PersistentReceive:
        return _Receive(self._hub, buffer, self.rank, ANY_SOURCE, tag)

    def new_group(self, ranks: Sequence[int], tag: int) -> GroupHandle | None:
        del ranks, tag
        return None

    def lost_ranks(self) -> frozenset[int]:
        return self._hub.lost

    def abort(self, exit_code: int) -> None:
        """Nothing to end: the ranks are tasks of this process, which the runtime cancels."""

    def close(self) -> None:
        self._hub.forget(self.rank)

    def set_doorbell(self, ring: Callable[[], None]) -> None:
        self._hub.set_doorbell(self.rank, ring)

    def set_loss_listener(self, listen: Callable[[int], None]) -> None:
        self._hub.set_loss_listener(self.rank, listen)

    def describe(self) -> str:
        return f"local: {self.size} rank{'s' if self.size > 1 else ''} in this process"
