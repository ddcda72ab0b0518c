"""Transfers large messages over gloo: the data, followed by eight bytes called the *trailer*.

The threads of :mod:`asyncdist.transports.torch_distributed.gloo_link` wait for the trailer instead of the data, because
a wait for data in transit never ends if the peer dies.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch

FOREVER: Final = timedelta(days=3650)
TRAILER_NBYTES: Final = 8
_MARK: Final = struct.Struct("<q")


def bytes_tensor(buffer: Any) -> torch.Tensor:
    """Return a tensor that shares the buffer's memory."""
    return (
        torch.frombuffer(buffer, dtype=torch.uint8) if len(buffer) else torch.empty(0, dtype=torch.uint8, device="cpu")
    )


def readable(view: memoryview) -> torch.Tensor:
    """Return a tensor over the bytes to send. torch requires writable memory, so read-only bytes are copied."""
    return bytes_tensor(bytearray(view) if view.readonly else view)


class Transfer:
    """Large message in transit, at the sender or the receiver.

    Args:
        data: Bytes to send, or buffer to receive into.
        mark: Number that the sender writes into the trailer.

    Attributes:
        works: gloo's handles for the data and the trailer, in this order.
    """

    __slots__ = ("_data", "_mark", "_posting", "tag", "works")

    def __init__(self, tag: int, data: torch.Tensor, mark: int = 0) -> None:
        self.tag = tag
        self.works: list[Any] = []
        # This lock is held until gloo has the data and the trailer. An Event and torch.tensor would take 50 us more.
        self._posting = threading.Lock()
        self._posting.acquire()
        self._mark = bytearray(_MARK.pack(mark))
        self._data = data

    def post(self, start: Callable[[list[torch.Tensor], int, int], Any], peer: int) -> None:
        """Pass the data and the trailer to gloo. The call may block while another transfer is in progress."""
        self.works.append(start([self._data], peer, self.tag))
        self.works.append(start([bytes_tensor(self._mark)], peer, self.tag))
        self._posting.release()

    def wait(self) -> None:
        """Wait until the transfer is complete. Wait for the trailer first, since a wait for the data may never end."""
        with self._posting:
            for work in reversed(self.works):
                work.wait(FOREVER)
            self.works.clear()  # each handle keeps the connections of its group open

    @property
    def mark(self) -> int:
        """Number in the trailer, valid when the transfer is complete."""
        return int(_MARK.unpack(self._mark)[0])
