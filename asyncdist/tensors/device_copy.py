"""Copies from devices to host memory that are under way, while training goes on."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final

import torch


class DeviceCopy:
    """Completes when copies from device to host memory have; the engine polls it like a transport's request.

    Args:
        events: one per device, recorded behind its copies.
    """

    cancelled: Final = False
    source: Final = -1
    nbytes: Final = 0
    #: No transport rings when it completes.
    rings: Final = False

    def __init__(self, events: Sequence[torch.cuda.Event]) -> None:
        """Keep the events, without waiting."""
        self._events = events

    def test(self) -> bool:
        """Tell whether all copies are done, without waiting."""
        return all(event.query() for event in self._events)  # type: ignore[no-untyped-call]

    def cancel(self) -> None:
        """Do nothing: a copy cannot be taken back, and ends by itself."""


@functools.cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of the device for copies, apart from those that train."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
