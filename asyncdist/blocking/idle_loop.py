"""Makes a loop of asyncio that knows whether it has anything to do."""

from __future__ import annotations

import asyncio
import selectors
from time import monotonic
from typing import Any, Final

#: What :meth:`IdleLoop.has_work` cannot see, such as a signal that asyncio handles, waits no longer than this.
TURN_PERIOD_S: Final = 0.05


class IdleLoop(asyncio.SelectorEventLoop):
    """Tells code that runs it for moments alone whether a turn would run anything.

    asyncio's own, and not uvloop: that takes 30 us to run for a moment, and most calls take a few.
    """

    def __init__(self) -> None:
        self._descriptors = selectors.DefaultSelector()
        super().__init__(self._descriptors)
        self._looked_at = 0.0  # when a turn was last asked for
        self._watched: Any = self._descriptors._fd_to_key  # type: ignore[attr-defined]  # its view takes two more calls
        self._own_count = len(self._watched)  # the pipe by which threads wake it
        self._ready: Any  # as of the base class, in all versions of Python
        self._scheduled: list[Any]  # timers

    def has_work(self, spared: asyncio.Handle | None) -> bool:
        """Return whether a turn would run a callback, or look at descriptors that somebody waits for.

        Args:
            spared: a callback that alone is no reason for a turn.
        """
        now, ready, timers = monotonic(), self._ready, self._scheduled
        if (
            len(ready) > 1
            or (ready and ready[0] is not spared)
            or len(self._watched) > self._own_count
            or now - self._looked_at > TURN_PERIOD_S
        ):
            self._looked_at = now
            return True
        if not timers or timers[0]._when > now:
            return False
        # A heap: if the first one is spared, the next one is the second or the third.
        return any(timer is not spared and timer._when <= now for timer in timers[:3])
