"""Defines the statistics of one-sided policies, and formats them as tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from asyncdist.protocols.journal import format_table
from asyncdist.wording import plural, size_in_words


@dataclass(frozen=True, slots=True)
class Durations:
    """Counts the runs of one operation, such as publishing, and stores their total and maximum duration in seconds."""

    count: int = 0
    total_s: float = 0.0
    largest_s: float = 0.0

    def plus(self, duration_s: float) -> Durations:
        """Return a copy that includes one more duration."""
        return Durations(self.count + 1, self.total_s + duration_s, max(self.largest_s, duration_s))


@dataclass(frozen=True, slots=True)
class OneSidedStatistics:
    """Counts and durations of one member. The first four counts have the same names as in torchgfn's policies.

    Attributes:
        total_iterations: Number of steps, including those before a resume.
        agents_killed: Number of times that this rank decided to be replaced.
        num_replacements: Number of times that this rank's weights were replaced.
        averaging_ranks: Total number of donors over all replacements.
        age: Number of steps since the weights were last replaced, or since the start if they never were. Includes steps
            before a resume.
        version: Number of snapshots published.
        unpublished: Number of steps in which a snapshot was due but not published, by reason.
        nonfinite_metric_count: Number of metrics that were NaN or infinite.
        torn_read_count: Number of reads discarded because the donor had begun to overwrite the snapshot.
        lost_read_count: Number of reads that ended because the donor was lost.
        abandoned: Number of abandoned replacements, by reason.
        received_nbytes: Number of bytes read from donors, including discarded reads.
        timing: Durations of ``"publish"``, ``"read"`` (from the decision to the complete average) and ``"apply"``.
        title: Name of the policy and of this rank; "" if unknown.
    """

    total_iterations: int
    agents_killed: int
    num_replacements: int
    averaging_ranks: int
    age: int
    version: int
    unpublished: Mapping[str, int]
    nonfinite_metric_count: int
    torn_read_count: int
    lost_read_count: int
    abandoned: Mapping[str, int]
    received_nbytes: int
    timing: Mapping[str, Durations] = field(default_factory=dict)
    title: str = ""

    def __str__(self) -> str:
        """Return the title, the table of counts and the table of durations."""
        return "\n".join(part for part in (self.title, self.format_counts(), self.format_times()) if part)

    def format_counts(self) -> str:
        """Return a table of the first six counts, and of all further counts that are not 0."""
        rows: list[tuple[str, object]] = []
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if isinstance(value, int) and name != "received_nbytes" and (value or name in _ALWAYS):
                rows.append((name.replace("_count", "s").replace("_", " "), value))
        rows += [(f"abandoned: {reason}", count) for reason, count in sorted(self.abandoned.items())]
        rows += [(f"not published: {reason}", count) for reason, count in sorted(self.unpublished.items())]
        rows += [("received", size_in_words(self.received_nbytes))]
        return format_table("", rows)

    def format_times(self) -> str:
        """Return a table of durations, with one row each for publish, read and apply."""
        return format_table("", _durations(self.timing))


@dataclass(frozen=True, slots=True)
class PullStatistics:
    """Counts and durations of one member in asynchronous PAPA.

    Attributes:
        iteration: Number of steps, including those before a resume.
        pull_count: Number of times that this rank's weights were pulled towards a mean.
        donor_count: Total number of donors over all pulls.
        snapshot_count: Number of snapshots published.
        unpublished: Number of steps in which a snapshot was due but no usable one was published, by reason.
        abandoned: Number of abandoned reads, by reason.
        torn_read_count: Number of reads discarded because the donor had begun to overwrite the snapshot.
        lost_read_count: Number of reads that ended because the donor was lost.
        received_nbytes: Number of bytes read from donors, including discarded reads.
        timing: Durations of ``"publish"``, ``"read"`` (from the due step to the complete mean) and ``"apply"``.
        title: Name of the policy and of this rank; "" if unknown.
    """

    iteration: int
    pull_count: int
    donor_count: int
    snapshot_count: int
    unpublished: Mapping[str, int]
    abandoned: Mapping[str, int]
    torn_read_count: int
    lost_read_count: int
    received_nbytes: int
    timing: Mapping[str, Durations] = field(default_factory=dict)
    title: str = ""

    def __str__(self) -> str:
        """Return the title, and a table of the counts and durations."""
        rows: list[tuple[str, object]] = [
            ("iteration", self.iteration),
            ("pulls", f"{self.pull_count} to {plural(self.donor_count, 'snapshot')}"),
            ("snapshots", self.snapshot_count),
            ("torn reads", self.torn_read_count),
            ("lost reads", self.lost_read_count),
            *((f"abandoned: {reason}", count) for reason, count in sorted(self.abandoned.items())),
            *((f"not published: {reason}", count) for reason, count in sorted(self.unpublished.items())),
            ("received", size_in_words(self.received_nbytes)),
            *_durations(self.timing),
        ]
        return format_table(self.title, rows)


def _durations(timing: Mapping[str, Durations]) -> list[tuple[str, object]]:
    return [
        (name, f"{found.total_s:.4f} s in {found.count}, {1e3 * found.largest_s:.2f} ms at most")
        for name, found in timing.items()
    ]


#: Counts that are always shown, as in torchgfn's tables.
_ALWAYS: Final = ("total_iterations", "agents_killed", "num_replacements", "averaging_ranks", "age", "version")
