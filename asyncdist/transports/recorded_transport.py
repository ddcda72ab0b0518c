"""Reports each message that a transport sends and receives, for recordings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asyncdist.transports.base import Buffer, Request, Transport, as_bytes


class RecordedTransport:
    """Wraps a transport and reports its messages, but not the backend's own collectives and one-sided reads.

    All other calls and attributes are those of the wrapped transport.

    ``on_message`` is called with ``"sent"`` or ``"received"``, the other rank, the tag and the size in bytes.
    """

    def __init__(self, inner: Transport, on_message: Callable[[str, int, int, int], None]) -> None:
        self._inner = inner
        self._on_message = on_message

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def isend(self, buffer: Buffer, dest: int, tag: int) -> Request:
        self._on_message("sent", dest, tag, as_bytes(buffer).nbytes)
        return self._inner.isend(buffer, dest, tag)

    def start_send(self, buffer: Buffer, dest: int, tag: int) -> Request | None:
        try:
            return self._inner.start_send(buffer, dest, tag)
        finally:  # If the test reports a loss, the loss is recorded before the message.
            self._on_message("sent", dest, tag, as_bytes(buffer).nbytes)

    def prepare_send(self, nbytes: int, dest: int, tag: int) -> None:
        """Return None, because the messages of a prepared send cannot be reported."""

    def irecv(self, buffer: Buffer, source: int, tag: int) -> _RecordedReceive:
        return _RecordedReceive(self._inner.irecv(buffer, source, tag), tag, self._on_message)

    def persistent_receive(self, buffer: Buffer, tag: int) -> _RecordedReceive:
        return _RecordedReceive(self._inner.persistent_receive(buffer, tag), tag, self._on_message)


class _RecordedReceive:
    """Wraps a receive to report its message when the receive has completed."""

    def __init__(self, request: Any, tag: int, on_message: Callable[[str, int, int, int], None]) -> None:
        self._request = request
        self._tag = tag
        self._on_message = on_message

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)

    def start(self) -> None:
        """Restart a persistent receive."""
        self._request.start()

    def test(self) -> bool:
        request = self._request
        if not request.test():
            return False
        if not request.cancelled:
            self._on_message("received", request.source, self._tag, request.nbytes)
        return True

    def take(self) -> tuple[int, int] | None:
        taken: tuple[int, int] | None = self._request.take()
        if taken is not None:
            self._on_message("received", taken[0], self._tag, taken[1])
        return taken
