"""Reports each message that a transport sends and receives, for recordings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

from asyncdist.transports.base import (
    Buffer,
    GroupHandle,
    PersistentReceive,
    Request,
    Transport,
    as_bytes,
)
from asyncdist.transports.persistent_send import PersistentSend

P = ParamSpec("P")
T = TypeVar("T")


class RecordedTransport(Transport):
    """Wraps a transport and reports its messages, except the backend's own collectives and one-sided reads.

    ``on_message`` is called with ``"sent"`` or ``"received"``, the other rank, the tag and the size in bytes.
    """

    def __init__(self, inner: Transport, on_message: Callable[[str, int, int, int], None]) -> None:
        self._inner = inner
        self._on_message = on_message
        self.name = inner.name
        self.rank, self.size, self.incarnation = inner.rank, inner.size, inner.incarnation
        self.may_return = inner.may_return
        self.capabilities = inner.capabilities
        self.collective_checker = inner.collective_checker
        self.job_nonce, self.launch_nonce = inner.job_nonce, inner.launch_nonce
        self.trusts_network = inner.trusts_network
        self.hosts = inner.hosts
        self.doorbell = inner.doorbell

    def isend(self, buffer: Buffer, dest: int, tag: int) -> Request:
        self._on_message("sent", dest, tag, as_bytes(buffer).nbytes)
        return self._inner.isend(buffer, dest, tag)

    def start_send(self, buffer: Buffer, dest: int, tag: int) -> Request | None:
        try:
            return self._inner.start_send(buffer, dest, tag)
        finally:  # If the test reports a loss, the loss is recorded before the message.
            self._on_message("sent", dest, tag, as_bytes(buffer).nbytes)

    def prepare_send(self, nbytes: int, dest: int, tag: int) -> PersistentSend | None:
        """Return None, because the messages of a prepared send could not be reported."""
        del nbytes, dest, tag
        return None

    def is_sending(self) -> bool:
        return self._inner.is_sending()

    def irecv(self, buffer: Buffer, source: int, tag: int) -> Request:
        return _RecordedReceive(self._inner.irecv(buffer, source, tag), tag, self._on_message)

    def persistent_receive(self, buffer: Buffer, tag: int) -> PersistentReceive:
        return _RecordedPersistentReceive(self._inner.persistent_receive(buffer, tag), tag, self._on_message)

    def shared(self, make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return self._inner.shared(make, *args, **kwargs)

    @property
    def hostname(self) -> str:
        return self._inner.hostname

    @property
    def local_rank(self) -> int:
        return self._inner.local_rank

    @property
    def world_group(self) -> GroupHandle | None:
        return self._inner.world_group

    @property
    def end_group(self) -> GroupHandle | None:
        return self._inner.end_group

    def new_group(self, ranks: Sequence[int], tag: int) -> GroupHandle | None:
        return self._inner.new_group(ranks, tag)

    def lost_ranks(self) -> frozenset[int]:
        return self._inner.lost_ranks()

    def missed_ranks(self) -> frozenset[int]:
        return self._inner.missed_ranks()

    def vacant_ranks(self) -> frozenset[int]:
        return self._inner.vacant_ranks()

    def abort(self, exit_code: int) -> None:
        self._inner.abort(exit_code)

    def close(self) -> None:
        self._inner.close()

    def close_failed(self) -> None:
        self._inner.close_failed()

    def note_handshake(self) -> None:
        self._inner.note_handshake()

    def set_arrival_callback(self, ring: Callable[[], None]) -> None:
        self._inner.set_arrival_callback(ring)

    def set_loss_listener(self, listen: Callable[[int], None]) -> None:
        self._inner.set_loss_listener(listen)

    def on_finalize(self, leave: Callable[[], None]) -> None:
        self._inner.on_finalize(leave)

    def set_return_listener(self, listen: Callable[[int, int], None]) -> None:
        self._inner.set_return_listener(listen)

    def accept(self, rank: int, incarnation: int) -> bool:
        return self._inner.accept(rank, incarnation)

    def describe(self) -> str:
        return self._inner.describe()


class _RecordedReceive:
    """Wraps a receive to report its message when the receive has completed."""

    def __init__(self, request: Any, tag: int, on_message: Callable[[str, int, int, int], None]) -> None:
        self._request = request
        self._tag = tag
        self._on_message = on_message

    def test(self) -> bool:
        request = self._request
        if not request.test():
            return False
        if not request.cancelled:
            self._on_message("received", request.source, self._tag, request.nbytes)
        return True

    def cancel(self) -> None:
        self._request.cancel()

    @property
    def cancelled(self) -> bool:
        return bool(self._request.cancelled)

    @property
    def source(self) -> int:
        return int(self._request.source)

    @property
    def nbytes(self) -> int:
        return int(self._request.nbytes)

    @property
    def rings(self) -> bool:
        return bool(getattr(self._request, "rings", True))


class _RecordedPersistentReceive(_RecordedReceive):
    def start(self) -> None:
        self._request.start()

    def take(self) -> tuple[int, int] | None:
        taken: tuple[int, int] | None = self._request.take()
        if taken is not None:
            self._on_message("received", taken[0], self._tag, taken[1])
        return taken
