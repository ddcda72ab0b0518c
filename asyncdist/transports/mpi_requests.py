"""MPI's requests, as a transport hands them out, and the sends of small messages.

Compiled where a C compiler is at hand (see :mod:`asyncdist.compiled`), with C types in the ``.pxd`` file: these run for
each message. The transport itself is not: an interrupt that comes while it waits in MPI must be heard there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NoReturn

from asyncdist.transports.base import ANY_SOURCE, Buffer, Request

#: Sends that are prepared, so that many peers and many sizes do not fill the memory; a small one takes half a KiB.
REPEATED_SEND_COUNT_MAX: Final = 1024
REPEATED_SEND_NBYTES_MAX: Final = 512


class SendRequest:
    """A send or a read: nothing to learn from its status."""

    __slots__ = ("_buffer", "_fail", "_peer", "_request")

    cancelled: Final = False
    source: Final = ANY_SOURCE
    nbytes: Final = 0

    def __init__(
        self, request: Any, buffer: Any, fail: Callable[[BaseException, Any, Any, int], NoReturn], peer: int
    ) -> None:
        self._request = request
        self._buffer = buffer  # MPI reads it until the request has completed
        self._fail = fail
        self._peer = peer

    def test(self) -> bool:
        try:
            return bool(self._request.Test())
        except Exception as error:
            self._fail(error, None, self._buffer, self._peer)

    def cancel(self) -> None:
        """Sends cannot be cancelled in MPI practice (MPI-4.1 deprecates it), and collectives never."""


class ReceiveRequest:
    """A receive, or one that is started again and again."""

    __slots__ = ("_buffer", "_fail", "_peer", "_request", "_start", "_status", "_test")

    def __init__(
        self,
        request: Any,
        buffer: Any,
        status: Any,
        fail: Callable[[BaseException, Any, Any, int], NoReturn],
        peer: int,
    ) -> None:
        self._request = request
        self._test = request.Test
        self._start = getattr(request, "Start", None)
        self._buffer = buffer
        self._status = status
        self._fail = fail
        self._peer = peer

    def test(self) -> bool:
        try:
            return bool(self._test(self._status))
        except Exception as error:
            self._fail(error, self._status, self._buffer, self._peer)

    def take(self) -> tuple[int, int] | None:
        status = self._status
        try:
            return (status.source, status.count) if self._test(status) else None
        except Exception as error:
            self._fail(error, status, self._buffer, self._peer)

    def start(self) -> None:
        self._start()  # type: ignore[misc]

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


class RepeatedSend:
    """A send of so many bytes to one rank on one tag, prepared once (MPI-4.1 section 3.9) and started for each message.

    A start costs 0.25 us and an Isend 0.7: mpi4py need not ask a buffer again what it is, nor make a request.

    Attributes:
        is_free: whether the last message has left, so that the room may be filled again.
    """

    __slots__ = ("_fail", "_peer", "_request", "_room", "_start", "_test", "is_free")

    cancelled: Final = False
    source: Final = ANY_SOURCE
    nbytes: Final = 0

    def __init__(
        self,
        request: Any,
        room: bytearray,
        fail: Callable[[BaseException, Any, Any, int], NoReturn],
        peer: int,
    ) -> None:
        self._request = request
        self._start = request.Start
        self._test = request.Test
        self._room = room
        self._fail = fail
        self._peer = peer
        self.is_free = True

    def send(self, message: Buffer) -> Request | None:
        """Send a copy of ``message``, of just so many bytes; None when it has left already."""
        self._room[:] = message
        self.is_free = False
        try:
            self._start()
            if self._test():
                self.is_free = True
                return None
        except Exception as error:
            self._fail(error, None, self._room, self._peer)
        return self

    def test(self) -> bool:
        try:
            self.is_free = self._test()
        except Exception as error:
            self._fail(error, None, self._room, self._peer)
        return self.is_free

    def cancel(self) -> None:
        """As of any send."""

    def free(self) -> None:
        """Give the request back, unless a message is still on its way, with which it ends."""
        if self.is_free:
            self._request.Free()


class SmallSends:
    """Sends of frames: what was sent to a rank once, on one tag and of one size, is prepared for the next time."""

    def __init__(self, comm: Any, fail: Callable[[BaseException, Any, Any, int], NoReturn]) -> None:
        self._isend = comm.Isend
        self._prepare = comm.Send_init
        self._fail = fail
        self._repeated: dict[tuple[int, int, int], RepeatedSend] = {}
        # The one that was used last, by the very numbers that were given.
        self._last: RepeatedSend | None = None
        self._dest = self._tag = self._nbytes = -1

    def start(self, buffer: bytearray, dest: int, tag: int) -> Request | None:
        """Send and test once; None when the message has left already."""
        last = self._last
        if (
            last is not None
            and last.is_free
            and dest is self._dest
            and tag is self._tag
            and len(buffer) == self._nbytes
        ):
            return last.send(buffer)
        key = dest, tag, len(buffer)
        repeated = self._repeated.get(key)
        if repeated is not None and repeated.is_free:
            self._dest, self._tag, self._nbytes = key
            self._last = repeated
            return repeated.send(buffer)
        if repeated is None and key[2] <= REPEATED_SEND_NBYTES_MAX and len(self._repeated) < REPEATED_SEND_COUNT_MAX:
            room = bytearray(key[2])
            self._repeated[key] = RepeatedSend(self._prepare(room, dest, tag), room, self._fail, dest)
        request = self._isend(buffer, dest, tag)
        try:
            return None if request.Test() else SendRequest(request, buffer, self._fail, dest)
        except Exception as error:
            self._fail(error, None, buffer, dest)

    def free(self) -> None:
        """Give back what was prepared."""
        for send in self._repeated.values():
            send.free()
