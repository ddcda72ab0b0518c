"""Adapts MPI's requests to the :class:`~asyncdist.transports.base.Request` contract.

The module is compiled if possible (:mod:`asyncdist.compiled`), because its methods run for each message.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NoReturn

from asyncdist.transports.base import ANY_SOURCE
from asyncdist.transports.doorbell import PeerBell

#: Source in a status that MPI has not filled in yet.
NOBODY: Final = -77
#: Maximum size of a small message in bytes. It is below the eager limits of MPI libraries.
SMALL_NBYTES_MAX: Final = 1024


class SendRequest:
    """Wraps the MPI request of a send. The status of a send contains no information.

    Each test wakes the receiver if it is asleep, because a large message takes several steps of both ranks.
    """

    __slots__ = ("_bell", "_buffer", "_fail", "_peer", "_request")

    cancelled: Final = False
    source: Final = ANY_SOURCE
    nbytes: Final = 0

    def __init__(
        self,
        request: Any,
        buffer: Any,
        fail: Callable[[BaseException, Any, Any, int], NoReturn],
        peer: int,
        bell: PeerBell | None = None,
    ) -> None:
        self._request = request
        self._bell = bell
        self._buffer = buffer  # MPI reads the buffer until the request has completed.
        self._fail = fail
        self._peer = peer

    @property
    def is_small_send(self) -> bool:
        """Whether the message is so small that MPI accepts it before it is received, if there is space for it."""
        return memoryview(self._buffer).nbytes <= SMALL_NBYTES_MAX

    def test(self) -> bool:
        try:
            has_left = bool(self._request.Test())
            if self._bell is not None:
                self._bell.ring_sleeper()
            return has_left
        except Exception as error:
            self._fail(error, None, self._buffer, self._peer)

    def cancel(self) -> None:
        """Do nothing, because MPI-4.1 deprecates cancelling sends, and collectives cannot be cancelled."""


class ReceiveRequest:
    """Wraps the MPI request of a receive, which may be persistent."""

    __slots__ = ("_buffer", "_fail", "_peer", "_request", "_status")

    def __init__(
        self,
        request: Any,
        buffer: Any,
        status: Any,
        fail: Callable[[BaseException, Any, Any, int], NoReturn],
        peer: int,
    ) -> None:
        self._request = request
        self._buffer = buffer
        self._status = status
        self._fail = fail
        self._peer = peer

    def test(self) -> bool:
        try:
            return bool(self._request.Test(self._status))
        except Exception as error:
            self._fail(error, self._status, self._buffer, self._peer)

    def take(self) -> tuple[int, int] | None:
        status = self._status
        try:
            return (status.source, status.count) if self._request.Test(status) else None
        except Exception as error:
            self._fail(error, status, self._buffer, self._peer)

    def start(self) -> None:
        self._request.Start()

    def cancel(self) -> None:
        self._request.Cancel()

    @property
    def cancelled(self) -> bool:
        return bool(self._status.Is_cancelled())

    @property
    def source(self) -> int:
        return int(self._status.source)

    @property
    def nbytes(self) -> int:
        return int(self._status.count)


class WildcardReceive(ReceiveRequest):
    """Wraps a persistent receive from any source, in a job that continues when ranks die (ULFM; MPI-5.0).

    When a rank dies, each test of the receive raises MPI_ERR_PROC_FAILED_PENDING until the death is acknowledged. The
    receive then continues, unless the failed test's status shows that a message has arrived.

    Args:
        acknowledge: Function called with each exception that a test raises. If the exception reports a death, the
            function acknowledges the death and returns True.
        lost: Ranks that are known to be lost, whose messages are dropped.
    """

    __slots__ = ("_acknowledge", "_lost")

    def __init__(
        self,
        request: Any,
        buffer: Any,
        status: Any,
        fail: Callable[[BaseException, Any, Any, int], NoReturn],
        acknowledge: Callable[[BaseException], bool],
        lost: set[int],
    ) -> None:
        super().__init__(request, buffer, status, fail, ANY_SOURCE)
        self._acknowledge = acknowledge
        self._lost = lost

    def start(self) -> None:
        self._status.source = NOBODY
        self._request.Start()

    def test(self) -> bool:
        return self.take() is not None

    def take(self) -> tuple[int, int] | None:
        status = self._status
        while True:
            try:
                if not self._request.Test(status):
                    return None
            except Exception as error:
                if not self._acknowledge(error):
                    self._fail(error, status, self._buffer, ANY_SOURCE)
                if status.source == NOBODY:
                    return None
            if status.source not in self._lost:
                return status.source, status.count
            self.start()
