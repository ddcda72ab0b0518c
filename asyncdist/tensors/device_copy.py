"""Copies data from GPUs to host memory while training continues."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final

import torch


class DeviceCopy:
    """An unfinished copy from devices to host memory, which the engine polls like a transport's request."""

    cancelled: Final = False
    source: Final = -1
    nbytes: Final = 0
    #: Whether a transport wakes the loop when the copies complete.
    rings: Final = False

    def __init__(self, events: Sequence[torch.cuda.Event]) -> None:
        """Store the events."""
        self._events = events

    def test(self) -> bool:
        """Return whether all copies are complete, without waiting."""
        return all(event.query() for event in self._events)  # type: ignore[no-untyped-call]

    def cancel(self) -> None:
        """Do nothing, since a copy cannot be cancelled, and completes on its own."""


@functools.cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the device's stream for copies, which training does not use."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
