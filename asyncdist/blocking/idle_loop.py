"""An asyncio event loop that can report whether it has anything to run."""

from __future__ import annotations

import asyncio
import selectors
from time import monotonic
from typing import Any, Final

#: Seconds after which :meth:`IdleLoop.has_work` returns True, since it cannot detect some events, such as signals.
TURN_PERIOD_S: Final = 0.05


class IdleLoop(asyncio.SelectorEventLoop):
    """Event loop that reports whether it has work. It extends asyncio's loop, not uvloop, whose start takes 30 us."""

    def __init__(self) -> None:
        self._descriptors = selectors.DefaultSelector()
        super().__init__(self._descriptors)
        self._looked_at = 0.0  # time at which has_work last returned True
        self._watched: Any = self._descriptors._fd_to_key  # type: ignore[attr-defined]  # get_map() is two calls slower
        self._own_count = len(self._watched)  # number of descriptors for the loop's own wake-up pipe
        self._ready: Any  # defined by the base class in all versions of Python
        self._scheduled: list[Any]  # timers, defined by the base class

    def has_work(self, spared: asyncio.Handle | None, spared_descriptor_count: int) -> bool:
        """Return whether an iteration would run a callback other than ``spared``, or check more descriptors."""
        now, ready, timers = monotonic(), self._ready, self._scheduled
        if (
            len(ready) > 1
            or (ready and ready[0] is not spared)
            or len(self._watched) > self._own_count + spared_descriptor_count
            or now - self._looked_at > TURN_PERIOD_S
        ):
            self._looked_at = now
            return True
        if not timers or timers[0]._when > now:
            return False
        # The timers form a heap: if its first item is spared, the next timer is its second or third item.
        return any(timer is not spared and timer._when <= now for timer in timers[:3])
