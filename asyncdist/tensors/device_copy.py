"""Copies data from GPUs to host memory while training continues."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final

import torch


class DeviceCopy:
    """A pending copy from devices to host memory, which the engine polls like a transport's request."""

    cancelled: Final = False
    source: Final = -1
    nbytes: Final = 0
    #: Whether a transport wakes the event loop when the copy completes.
    rings: Final = False

    def __init__(self, events: Sequence[torch.cuda.Event]) -> None:
        self._events = events

    def test(self) -> bool:
        """Return whether the copy is complete, without waiting."""
        return all(event.query() for event in self._events)  # type: ignore[no-untyped-call]

    def cancel(self) -> None:
        """Do nothing. A copy cannot be cancelled, and completes on its own."""


@functools.cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the CUDA stream that is reserved for copies from this device."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
