"""Interfaces through which a member finds its coordinator, with an implementation for ranks that never coordinate."""

from __future__ import annotations

from typing import Protocol

from asyncdist.protocols.selective.statistics import CoordinatorStatistics


class KnowsCoordinator(Protocol):
    """Interface of objects that know the current coordinator's rank."""

    @property
    def coordinator(self) -> int | None:
        """The coordinator's rank, as far as this rank knows; None if the coordinator is lost or has stopped."""


class Coordination(KnowsCoordinator, Protocol):
    """Interface through which a member finds and watches its coordinator, and may take over from it."""

    @property
    def epoch(self) -> int:
        """Epoch of the coordinator, which grows with each new coordinator."""

    def statistics(self) -> CoordinatorStatistics | None:
        """Return the statistics of this rank as a coordinator; None if it has never coordinated."""

    def on_report(self, step: int, interval_s: float) -> bool:
        """Check the coordinator before this rank sends a report; return whether the report asks for an answer."""

    def leave(self) -> None:
        """Leave the policy: this rank no longer watches or replaces the coordinator."""


class Followed:
    """Stores the current coordinator on a rank that never coordinates, as reported by other ranks."""

    def __init__(self) -> None:
        self.coordinator: int | None = None
        self.epoch = 0

    def follow(self, epoch: int, coordinator: int | None) -> None:
        """Store a new coordinator (None if there is none at present) and its epoch."""
        self.epoch, self.coordinator = epoch, coordinator

    def statistics(self) -> None:
        """Return None, since this rank never coordinates."""

    def on_report(self, step: int, interval_s: float) -> bool:
        """Return False, since this rank does not watch the coordinator."""
        del step, interval_s
        return False

    def leave(self) -> None:
        """Do nothing, since this rank does not watch or replace the coordinator."""
