"""Computes the number of local steps per contribution from the ranks' speeds, without reading a clock.

If all ranks make the same number of steps, the slow ranks' differences are stale. With dynamic local updates (Liu et
al., 2401.09135) the number of steps is proportional to a rank's speed, so that all ranks take about the same time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from asyncdist import validation


def local_steps(average_every: int, speed: float, fastest: float) -> int:
    """Return the number of steps that a rank makes before it contributes: H speed / fastest, rounded down, at least 1.

    Args:
        average_every: Number H of steps of the fastest rank.
        speed: Steps per second of this rank.
        fastest: Steps per second of the fastest rank.

    Raises:
        ValueError: ``average_every`` is not a positive integer, or a speed is not finite and above 0.
    """
    steps = validation.count("average_every", average_every)
    own, most = _speed("speed", speed), _speed("fastest", fastest)
    return max(1, math.floor(steps * min(1.0, own / most)))


def steps_at_speed(average_every: int, rank: int, speeds: Mapping[int, float]) -> int:
    """Return :func:`local_steps` of a rank, or ``average_every`` if its speed is not known.

    Args:
        speeds: Known speeds in steps per second, by rank.
    """
    if rank not in speeds:
        return average_every
    return local_steps(average_every, speeds[rank], max(speeds.values()))


def _speed(name: str, value: float) -> float:
    return validation.real(name, value, "finite and > 0 steps per second", low=validation.SMALLEST)


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
