"""Defines a member's knowledge of its coordinator, on ranks that may coordinate and on ranks that only follow."""

from __future__ import annotations

from typing import Protocol

from asyncdist.protocols.selective.statistics import CoordinatorStatistics


class KnowsCoordinator(Protocol):
    """Knows which rank coordinates."""

    @property
    def coordinator(self) -> int | None:
        """The coordinator's rank, as far as this rank knows; None if that rank is gone."""


class Coordination(KnowsCoordinator, Protocol):
    """Describes how a member takes part in choosing the coordinator: :class:`Leadership` or :class:`Followed`."""

    @property
    def epoch(self) -> int:
        """The coordinator's epoch, which grows with each new coordinator."""

    def statistics(self) -> CoordinatorStatistics | None:
        """Return the statistics of this rank as a coordinator; None if it has never coordinated."""

    def on_report(self, step: int, interval_s: float) -> bool:
        """Check on the coordinator before a report, and return whether the report asks for an answer."""

    def leave(self) -> None:
        """Stop taking part."""


class Followed:
    """Knows the coordinator from messages of other ranks, on a rank that never coordinates.

    Attributes:
        coordinator, epoch: The newest coordinator, and its epoch.
    """

    def __init__(self) -> None:
        self.coordinator: int | None = None
        self.epoch = 0

    def follow(self, epoch: int, coordinator: int | None) -> None:
        """Note which rank coordinates in which epoch."""
        self.epoch, self.coordinator = epoch, coordinator

    def statistics(self) -> None:
        """Return None: this rank never coordinates."""

    def on_report(self, step: int, interval_s: float) -> bool:
        """Return False: another rank checks on the coordinator."""
        del step, interval_s
        return False

    def leave(self) -> None:
        """Do nothing: the coordinator does not know this rank."""
