"""Interfaces for finding the current coordinator, with an implementation for ranks that never coordinate."""

from __future__ import annotations

from typing import Protocol

from asyncdist.protocols.selective.statistics import CoordinatorStatistics


class CoordinatorView(Protocol):
    """Interface of objects that know the current coordinator's rank.

    It is a ``Succession`` on a member, and a :class:`ReportedCoordinator` on a rank that another member represents.
    """

    @property
    def coordinator(self) -> int | None:
        """Rank of the coordinator as far as known to this rank, or None if the coordinator is lost or has stopped."""


class CoordinatorTracker(CoordinatorView, Protocol):
    """Interface through which a member finds and watches its coordinator, and may take over from it."""

    @property
    def epoch(self) -> int:
        """Number of the current coordinator: 0 for the first, and larger for each successor."""

    def statistics(self) -> CoordinatorStatistics | None:
        """Return the statistics of this rank as a coordinator, or None if it has never coordinated."""

    def on_report(self, step: int, interval_s: float) -> bool:
        """Return whether the next report must ask the coordinator for an answer. Take over if answers are missing."""

    def leave(self) -> None:
        """Leave the policy, so that this rank no longer watches or replaces the coordinator."""


class ReportedCoordinator:
    """Stores the current coordinator, as reported by other ranks, on a rank that never coordinates."""

    def __init__(self) -> None:
        self.coordinator: int | None = None
        self.epoch = 0

    def follow(self, epoch: int, coordinator: int | None) -> None:
        """Store a new coordinator and its number ``epoch``, or None if there is no coordinator at present."""
        self.epoch, self.coordinator = epoch, coordinator

    def statistics(self) -> None:
        """Return None, because this rank never coordinates."""

    def on_report(self, step: int, interval_s: float) -> bool:
        """Return False, because this rank does not watch the coordinator."""
        del step, interval_s
        return False

    def leave(self) -> None:
        """Do nothing, because this rank does not watch or replace the coordinator."""
