"""Copies from devices to host memory that run while training continues."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final

import torch


class DeviceCopy:
    """Completes when copies from device to host memory are done; the engine polls it like a transport's request.

    Args:
        events: One event per device, recorded after its copies.
    """

    cancelled: Final = False
    source: Final = -1
    nbytes: Final = 0
    #: No transport's doorbell rings when the copies complete.
    rings: Final = False

    def __init__(self, events: Sequence[torch.cuda.Event]) -> None:
        """Keep the events, without waiting."""
        self._events = events

    def test(self) -> bool:
        """Return whether all copies are done, without waiting."""
        return all(event.query() for event in self._events)  # type: ignore[no-untyped-call]

    def cancel(self) -> None:
        """Do nothing: a copy cannot be cancelled, and ends on its own."""


@functools.cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the device's stream for copies, which training does not use."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
