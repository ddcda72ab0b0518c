"""Samples existing counters to find when a rank last made progress, and when each other rank last sent a message."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Final

from asyncdist.runtime.world import World

#: CPU usage, as a fraction of a core, from which a rank's thread counts as computing.
_BUSY_SHARE: Final = 0.1
#: Minimum seconds over which the CPU usage is measured.
_SHARE_PERIOD_S: Final = 0.2
#: Maximum number of reminders whose sends are outstanding. A rank rarely has more than a few open collective starts.
_REMINDERS_UNDER_WAY_MAX: Final = 32


class Activity:
    """Records when a rank last made progress (a step, a message or a part of a stream), and when other ranks last sent.

    A waiting collective start sends a reminder every second. Reminders are not progress, because the start may hang.
    The object must be created in the rank's own thread.

    Attributes:
        progressed_at: Time of the rank's last observed progress, in seconds on :func:`time.monotonic`'s clock.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._counts: tuple[int, ...] = ()
        self._message_count = 0
        self._request_count = 0
        self._reminded_count = 0
        self._reminders_under_way = 0
        self._sequences: Counter[int] = Counter()
        self._first_departure_at: dict[int, float] = {}
        self.progressed_at = time.monotonic()
        self._lock = threading.Lock()
        has_clocks = hasattr(time, "pthread_getcpuclockid")
        self._clock = time.pthread_getcpuclockid(threading.get_ident()) if has_clocks else None
        self._sampled_cpu_s = self._cpu_s()
        self._sampled_at = self.progressed_at
        self._share = 0.0

    def sample(self) -> None:
        """Compare this rank's counters with the last sample, and record whether the rank has made progress."""
        if not self._lock.acquire(blocking=False):  # A signal handler has called this method during a sample.
            return
        try:
            self._sample(time.monotonic())
        except RuntimeError:  # A dictionary changed while it was read, so the rank makes progress.
            self.progressed_at = time.monotonic()
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
            self.progressed_at = now
        if has_moved or message_count != self._message_count:
            self._message_count = message_count
            sequences = services.last_sequences()
            for rank, number in sequences.items():
                if number != self._sequences.get(rank):
                    self._first_departure_at[rank] = now
            self._sequences = sequences
        if now - self._sampled_at >= _SHARE_PERIOD_S:
            cpu_s = self._cpu_s()
            self._share = (cpu_s - self._sampled_cpu_s) / (now - self._sampled_at)
            self._sampled_cpu_s, self._sampled_at = cpu_s, now

    def _has_requested(self, request_count: int) -> bool:
        sent = self._world.agreements.rivals.sent_count
        new, self._request_count = request_count - self._request_count, request_count
        possible = self._reminders_under_way + sent - self._reminded_count
        self._reminded_count = sent
        self._reminders_under_way = min(max(possible - new, 0), _REMINDERS_UNDER_WAY_MAX)
        return new > possible

    def _cpu_s(self) -> float:
        return 0.0 if self._clock is None else time.clock_gettime(self._clock)

    def computes(self) -> bool:
        """Return whether the rank's thread has recently used the CPU."""
        return self._share >= _BUSY_SHARE

    def still_s(self) -> float:
        """Return how many seconds ago this rank last made progress, as observed by :meth:`sample`."""
        return time.monotonic() - self.progressed_at

    def message_ages_s(self) -> dict[int, float]:
        """Return how many seconds ago the last known message from each rank arrived."""
        now = time.monotonic()
        return {rank: round(now - at, 1) for rank, at in sorted(self._first_departure_at.items())}
