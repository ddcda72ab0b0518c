"""Computes the length of a grace period that the user sets in training steps, without reading a clock.

After the quorum, the leader can wait for further contributions without loss of time, because the ranks train meanwhile.
Decoupled DiLoCo (2604.21428) waits for a share g < 1 of the time that remains of tau training steps:

    grace = max(0, g (tau step_s - quorum_s - sync_s))

:func:`grace_period` explains the symbols.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

#: Share g of the remaining time. The paper requires g < 1. The remaining 0.1 allows for steps of varying duration.
SHARE: Final = 0.9


def grace_period(steps: float, step_s: float, quorum_s: float, sync_s: float, *, share: float = SHARE) -> float:
    """Return the length of a grace period in seconds.

    Args:
        steps: Number tau of training steps within which the workers should have the new anchor (common weights).
        step_s: Duration of a training step of the fastest rank.
        quorum_s: Seconds between the first contribution and the quorum.
        sync_s: Seconds from the outer step until the workers have the new anchor.
        share: Share of the remaining time, below 1.
    """
    return max(0.0, share * (steps * step_s - quorum_s - sync_s))


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
