"""Implements prepared sends: a transport sets up a send of fixed size once, and starts it for each message.

The module is compiled if possible (:mod:`asyncdist.compiled`), because it runs for each small message.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from asyncdist.transports.doorbell import PeerBell


class PersistentSend:
    """Sends one buffer to one rank with one tag, and can be started repeatedly (MPI-4.1 section 3.9).

    A start takes 0.25 us, compared with 0.7 us for an Isend, because mpi4py inspects the buffer and makes a request
    only once. No task waits for the send to end, which in Open MPI happens only when the message is received. This is
    safe, because MPI has already accepted the small message, and the buffer does not belong to the user.

    Args:
        request: Persistent request, which has MPI's methods Start, Test and Free.
        fail: Method of the transport that is called with the request's exception, None, the buffer and ``peer``, and
            raises an asyncdist error.
        bell: Object that wakes ``peer`` when it is asleep, or None if it cannot be woken.

    Attributes:
        buffer: Bytes to send, padded to a multiple of eight bytes. May be modified while :attr:`is_free` is true.
        is_free: Whether the previous send had ended when it was last tested.
    """

    __slots__ = ("_bell", "_fail", "_peer", "_request", "buffer", "is_free")

    def __init__(
        self,
        request: Any,
        buffer: bytearray,
        fail: Callable[[BaseException, Any, Any, int], NoReturn],
        peer: int,
        bell: PeerBell | None = None,
    ) -> None:
        self._request = request
        self._bell = bell
        self._fail = fail
        self._peer = peer
        self.buffer = buffer
        self.is_free = True

    def start(self) -> None:
        """Send the buffer. Requires :attr:`is_free`."""
        try:
            self._request.Start()
            self.is_free = False
            if self._bell is not None:
                self._bell.ring_sleeper()
        except Exception as error:
            self._fail(error, None, self.buffer, self._peer)
        self.settle()  # Advance the transfer by one step. This raises an error if the receiver is lost.

    def settle(self) -> bool:
        """Test the previous send, unless it has ended. Return :attr:`is_free`."""
        if not self.is_free:
            try:
                self.is_free = self._request.Test()
            except Exception as error:
                self.is_free = True  # MPI can start a failed request again.
                self._fail(error, None, self.buffer, self._peer)
        return self.is_free

    def give_up(self, failed_request: Any) -> None:
        """Make all later calls raise the error that ``Start`` and ``Test`` of ``failed_request`` raise.

        Called when the receiver is lost. The failed request replaces MPI's request, so no start has to check whether
        the receiver is lost.
        """
        self._request = failed_request
        self.is_free = True

    def free(self) -> None:
        """Free the request, unless a message is still in progress."""
        if self.is_free:
            self._request.Free()
