"""Defines what a member knows of its coordinator, on a rank that may coordinate and on a rank that only follows."""

from __future__ import annotations

from typing import Protocol

from asyncdist.protocols.selective.statistics import CoordinatorStatistics


class KnowsCoordinator(Protocol):
    """Knows which rank coordinates."""

    @property
    def coordinator(self) -> int | None:
        """The rank that coordinates, as far as this rank knows; None when that rank is gone."""


class Coordination(KnowsCoordinator, Protocol):
    """Is a member's side of the question who coordinates: :class:`Leadership`, or :class:`Followed`."""

    @property
    def epoch(self) -> int:
        """The coordinator's epoch, which grows with each new coordinator."""

    def statistics(self) -> CoordinatorStatistics | None:
        """Return what this rank has decided as the coordinator; None if it has never coordinated."""

    def on_report(self, step: int, interval_s: float) -> bool:
        """Look after the coordinator before a report, and return whether the report asks for an answer."""

    def leave(self) -> None:
        """Take part no longer."""


class Followed:
    """Knows the coordinator from another rank's messages, on a rank that never coordinates.

    Attributes:
        coordinator, epoch: The newest ones that were received.
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
        """Return False: another rank looks after the coordinator."""
        del step, interval_s
        return False

    def leave(self) -> None:
        """Do nothing: the coordinator does not know this rank."""
