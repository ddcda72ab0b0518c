"""Samples when a rank has done something last, and when something has come from each of its peers.

Nothing is counted for this: the counts of the engine and of the channels are compared, now and then.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Final

from asyncdist.runtime.world import World

#: A rank whose thread has taken less of a core than this since it moved last waits, or blocks; else it computes.
_BUSY_SHARE: Final = 0.1
#: Over how many seconds, at least.
_SHARE_PERIOD_S: Final = 0.2
#: For so many reminders that this rank has sent, the ends of their sends are waited for: the last ones of a few starts.
_REMINDERS_UNDER_WAY_MAX: Final = 32


class Signs:
    """Keeps when a rank moved last: a step, a message, a piece of a stream; and when each peer was heard last.

    Ranks that wait in a start for others remind those each second, for ever. That is no movement: a start to which a
    rank does not come is a hang as any other.

    Attributes:
        moved_at: when the rank moved last, as far as samples tell.

    Args:
        world: the rank's. It is made in the rank's own thread.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._counts: tuple[int, ...] = ()
        self._message_count = 0
        self._request_count = 0
        self._reminded_count = 0
        self._reminders_under_way = 0
        self._sequences: Counter[int] = Counter()
        self._heard_at: dict[int, float] = {}
        self.moved_at = time.monotonic()
        self._lock = threading.Lock()
        has_clocks = hasattr(time, "pthread_getcpuclockid")
        self._clock = time.pthread_getcpuclockid(threading.get_ident()) if has_clocks else None
        self._sampled_cpu_s = self._cpu_s()
        self._sampled_at = self.moved_at
        self._share = 0.0

    def sample(self) -> None:
        """Look whether anything has changed."""
        if not self._lock.acquire(blocking=False):  # a signal's handler asks in the midst of it
            return
        try:
            self._sample(time.monotonic())
        except RuntimeError:  # a dictionary has changed while this thread read it: the rank does something
            self.moved_at = time.monotonic()
        finally:
            self._lock.release()

    def _sample(self, now: float) -> None:
        services = self._world.services
        steps = sum(probe().step for probe in tuple(services.progress_probes))
        streams = services.slots.sent_nbytes + services.slots.received_nbytes
        statistics = services.engine.statistics()
        message_count = statistics.completion_count - statistics.request_count
        counts = (message_count - self._world.agreements.rivals.received_count, steps, streams)
        has_moved = self._has_requested(statistics.request_count) or counts != self._counts
        self._counts = counts
        if has_moved:
            self.moved_at = now
        if has_moved or message_count != self._message_count:
            self._message_count = message_count
            sequences = services.last_sequences()
            for rank, number in sequences.items():
                if number != self._sequences.get(rank):
                    self._heard_at[rank] = now
            self._sequences = sequences
        if now - self._sampled_at >= _SHARE_PERIOD_S:
            cpu_s = self._cpu_s()
            self._share = (cpu_s - self._sampled_cpu_s) / (now - self._sampled_at)
            self._sampled_cpu_s, self._sampled_at = cpu_s, now

    def _has_requested(self, request_count: int) -> bool:
        """Whether more requests have ended than sends of reminders can have."""
        sent = self._world.agreements.rivals.sent_count
        new, self._request_count = request_count - self._request_count, request_count
        possible = self._reminders_under_way + sent - self._reminded_count
        self._reminded_count = sent
        self._reminders_under_way = min(max(possible - new, 0), _REMINDERS_UNDER_WAY_MAX)
        return new > possible

    def _cpu_s(self) -> float:
        return 0.0 if self._clock is None else time.clock_gettime(self._clock)

    def computes(self) -> bool:
        """Whether the rank's thread has lately used a core."""
        return self._share >= _BUSY_SHARE

    def still_s(self) -> float:
        """Return for how many seconds nothing has moved, as of the last sample."""
        return time.monotonic() - self.moved_at

    def heard_s(self) -> dict[int, float]:
        """Return how many seconds ago something came from each rank last, as far as samples tell."""
        now = time.monotonic()
        return {rank: round(now - at, 1) for rank, at in sorted(self._heard_at.items())}
