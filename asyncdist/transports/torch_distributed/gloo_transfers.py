"""Moves large messages over gloo: the bytes, and eight more behind them, the *trailer*.

The trailer is what is waited for: a wait for data that is on its way does not end when the peer dies.
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
    """Make a tensor over the buffer's own memory."""
    return (
        torch.frombuffer(buffer, dtype=torch.uint8) if len(buffer) else torch.empty(0, dtype=torch.uint8, device="cpu")
    )


def readable(view: memoryview) -> torch.Tensor:
    """Make a tensor over what is to be sent. torch wants it writable."""
    return bytes_tensor(bytearray(view) if view.readonly else view)


class Transfer:
    """A large message on its way, at either end.

    Args:
        tag: gloo's, the same on both ends.
        data: what is sent, or where it is received.
        mark: what the sender's trailer says.

    Attributes:
        tag: as above.
        works: gloo's handles, data first.
    """

    __slots__ = ("_data", "_mark", "_posting", "tag", "works")

    def __init__(self, tag: int, data: torch.Tensor, mark: int = 0) -> None:
        self.tag = tag
        self.works: list[Any] = []
        # Held until gloo has both. An Event, and a mark by torch.tensor, cost a stream 50 us more (cold caches).
        self._posting = threading.Lock()
        self._posting.acquire()
        self._mark = bytearray(_MARK.pack(mark))
        self._data = data

    def post(self, start: Callable[[list[torch.Tensor], int, int], Any], peer: int) -> None:
        """Give gloo the data and the trailer. May block for as long as another transfer is being read or written."""
        self.works.append(start([self._data], peer, self.tag))
        self.works.append(start([bytes_tensor(self._mark)], peer, self.tag))
        self._posting.release()

    def wait(self) -> None:
        """Wait until it is complete; for the trailer first, as the module's docstring explains."""
        with self._posting:
            for work in reversed(self.works):
                work.wait(FOREVER)

    @property
    def mark(self) -> int:
        """The number in the trailer, once it is complete."""
        return int(_MARK.unpack(self._mark)[0])
