"""Counts of one member of a DiLoCo policy."""

from __future__ import annotations

from dataclasses import dataclass

from asyncdist.protocols.journal import format_table
from asyncdist.wording import size_in_words


@dataclass(frozen=True, slots=True)
class DiLoCoStatistics:
    """Counts of one member's steps and averages so far.

    Attributes:
        iteration: Number of steps.
        average_count: Number of applied averages; each fragment counts.
        waited_s: Seconds that steps have waited for averages, and in which they applied them.
        sent_nbytes: Total encoded size in bytes of this member's contributions.
        title: Name of the policy and of this rank.
    """

    iteration: int
    average_count: int
    waited_s: float
    sent_nbytes: int
    title: str = ""

    def __str__(self) -> str:
        """Return a table of the counts, for ``print(policy.statistics())``."""
        rows = [
            ("iteration", self.iteration),
            ("averages applied", self.average_count),
            ("spent in them", f"{self.waited_s:.2f} s"),
            ("contributed", size_in_words(self.sent_nbytes)),
        ]
        return format_table(self.title, rows)
