"""Connects ranks that share one process and event loop, for notebooks, tests and plain ``python train.py``.

A small message is copied when it is sent. A larger message is copied directly from the sender's buffer when a matching
receive is posted. The copy completes the send.
"""

from __future__ import annotations

from collections.abc import Callable

from asyncdist.errors import RankLostError
from asyncdist.transports.base import Buffer, Capabilities, Request, as_bytes
from asyncdist.transports.matching import CallbackQueue, MatchedTransport, Matcher, Send
from asyncdist.wording import plural


class LocalHub:
    """Connects ``size`` ranks that share one process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.matchers = [Matcher(CallbackQueue(), rings_when_posted=True) for _ in range(size)]
        self.loss_listeners: dict[int, Callable[[int], None]] = {}
        self._lost: set[int] = set()

    def transport(self, rank: int) -> LocalTransport:
        """Return the transport of ``rank``."""
        return LocalTransport(self, rank)

    def lose(self, rank: int) -> None:
        """Simulate the death of ``rank``. Requests that involve it raise RankLostError."""
        self._lost.add(rank)
        error = RankLostError(f"rank {rank} is gone", rank=rank)
        for dest, matcher in enumerate(self.matchers):
            if dest == rank:
                matcher.fail(error)
            else:
                matcher.lose(rank, error)
            matcher.callbacks.ring()
        for observer, listen in list(self.loss_listeners.items()):
            if observer != rank:
                listen(rank)

    @property
    def lost(self) -> frozenset[int]:
        """Ranks that have been lost."""
        return frozenset(self._lost)

    def send(self, buffer: Buffer, source: int, dest: int, tag: int) -> Send:
        """Start sending ``buffer`` from rank ``source`` to rank ``dest``."""
        view = as_bytes(buffer)
        send = Send(self.matchers[source].callbacks, view.nbytes)
        if dest in self._lost or source in self._lost:
            send.error = RankLostError(f"rank {dest} is gone", rank=dest)
            return send
        self.matchers[dest].send(send, source, tag, view)
        return send

    def forget(self, rank: int) -> None:
        """Remove the receives and listeners of ``rank``, which has closed its transport."""
        self.matchers[rank].callbacks.set_bell(lambda: None)
        self.matchers[rank].clear()
        self.loss_listeners.pop(rank, None)


class LocalTransport(MatchedTransport):
    """Sends and receives the messages of one rank of a :class:`LocalHub`."""

    name = "local"

    def __init__(self, hub: LocalHub, rank: int) -> None:
        self._hub = hub
        capabilities = Capabilities(
            native_collectives=False, survives_rank_loss=True, wakes=True, tag_max=32767, shares_process=True
        )
        super().__init__(rank, hub.size, hub.matchers[rank].callbacks, capabilities)
        self._matcher = hub.matchers[rank]

    @property
    def local_rank(self) -> int:
        return self.rank

    def _start_send(self, view: memoryview, dest: int, tag: int) -> Request:
        return self._hub.send(view, self.rank, dest, tag)

    def lost_ranks(self) -> frozenset[int]:
        return self._hub.lost

    def abort(self, exit_code: int) -> None:
        """Do nothing, because the ranks are tasks of this process, which the runtime cancels."""

    def close(self) -> None:
        self._hub.forget(self.rank)

    def set_arrival_callback(self, ring: Callable[[], None]) -> None:
        self._callbacks.set_bell(ring)

    def set_loss_listener(self, listen: Callable[[int], None]) -> None:
        self._hub.loss_listeners[self.rank] = listen
        super().set_loss_listener(listen)

    def describe(self) -> str:
        return f"local: {plural(self.size, 'rank')} in this process"
