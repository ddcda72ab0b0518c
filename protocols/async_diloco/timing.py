"""Computes numbers of steps and grace periods from the ranks' measured speeds, without reading a clock.

If all ranks took the same number of steps, the slow ranks' differences would be stale. With dynamic local updates (Liu
et al., 2401.09135) the number of steps is proportional to a rank's speed, so that all ranks take about the same time.

After the quorum, the leader can wait for further contributions without loss of time, because the ranks train meanwhile.
Decoupled DiLoCo (2604.21428) waits for a share g < 1 of the time that remains in tau training steps:

    grace = max(0, g (tau step_s - quorum_s - sync_s))
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final

#: Share g of the remaining time. The paper requires g < 1. The remaining 0.1 allows for steps of varying duration.
_SHARE: Final = 0.9


def steps_at_speed(average_every: int, rank: int, speeds: Mapping[int, float]) -> int:
    """Return the number of steps that a rank takes before it contributes, at least 1.

    This is ``average_every`` times the rank's speed over the largest speed, rounded down, or ``average_every`` if the
    rank's speed is not known.

    Args:
        speeds: Known speeds in steps per second, above 0, by rank.
    """
    if rank not in speeds:
        return average_every
    return max(1, math.floor(average_every * (speeds[rank] / max(speeds.values()))))


def grace_period(steps: float, step_s: float, quorum_s: float, sync_s: float) -> float:
    """Return the length of a grace period in seconds.

    Args:
        steps: Number tau of training steps within which the workers should have the new anchor (common weights).
        step_s: Duration of a training step of the fastest rank.
        quorum_s: Seconds between the first contribution and the quorum.
        sync_s: Seconds from the outer step until the workers have the new anchor.
    """
    return max(0.0, _SHARE * (steps * step_s - quorum_s - sync_s))


class Stopwatch:
    """Measures a rank's training speed between the policy's steps, without the policy's waits."""

    def __init__(self) -> None:
        self._resumed_at: float | None = None  # None before the end of the first step
        self._count = 0
        self._seconds = 0.0

    def on_step(self, now: float) -> None:
        """Count a training step that has just ended."""
        if self._resumed_at is not None:
            self._count, self._seconds = self._count + 1, self._seconds + now - self._resumed_at

    def on_resume(self, now: float) -> None:
        """Record that ``policy.step`` returns to the training loop."""
        self._resumed_at = now

    def take(self) -> float:
        """Return the steps per second since the last call, or 0 if unknown, and start a new measurement."""
        speed = self._count / self._seconds if self._seconds > 0.0 else 0.0
        self._count, self._seconds = 0, 0.0
        return speed


class SyncTimes:
    """Measures the time from the start of an anchor's version until each contributing rank has received it."""

    def __init__(self) -> None:
        # By rank: the last version that contains its contribution, and the start time of this version.
        self._decided_at: dict[int, tuple[int, float]] = {}
        self._seconds: dict[int, float] = {}  # by rank: last measured time

    def on_decided(self, version: int, ranks: Iterable[int], now: float) -> None:
        """Record that a version of the anchor is being made from the contributions of ``ranks``."""
        self._decided_at.update(dict.fromkeys(ranks, (version, now)))

    def on_taken(self, version: int, rank: int, now: float) -> None:
        """Record that a rank has received a version of the anchor."""
        decided_version, decided_at = self._decided_at.get(rank, (-1, 0.0))
        if decided_version == version:
            self._seconds[rank] = now - decided_at

    def on_gone(self, rank: int) -> None:
        """Forget a rank that is lost or has left."""
        self._decided_at.pop(rank, None)
        self._seconds.pop(rank, None)

    def longest_s(self, ranks: Iterable[int]) -> float:
        """Return the longest of the ranks' last measured times in seconds, or 0 if no time is known."""
        return max((self._seconds.get(rank, 0.0) for rank in ranks), default=0.0)
