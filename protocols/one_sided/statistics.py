"""Holds the statistics of the one-sided policy, and formats them as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from asyncdist.protocols.journal import format_table
from asyncdist.wording import size_in_words


@dataclass(frozen=True, slots=True)
class Durations:
    """Sums up how long one kind of work took.

    Attributes:
        count: how often it was done.
        total_s: all of it.
        largest_s: the longest one.
    """

    count: int = 0
    total_s: float = 0.0
    largest_s: float = 0.0

    def plus(self, duration_s: float) -> Durations:
        """Return the same with one more duration."""
        return Durations(self.count + 1, self.total_s + duration_s, max(self.largest_s, duration_s))


@dataclass(frozen=True, slots=True)
class OneSidedStatistics:
    """Counts what a member has done so far. The first four have the names that torchgfn's policies give them.

    Attributes:
        total_iterations: steps taken.
        agents_killed: how often this rank was to be replaced, by its own judgement.
        num_replacements: how often it was: new weights in place.
        averaging_ranks: snapshots of donors in them, together.
        age: steps since the weights were last replaced, or since the start.
        version: snapshots published.
        unpublished: cadences without a snapshot, by reason.
        nonfinite_metric_count: metrics that were NaN or infinite.
        torn_read_count: reads of a version that its donor had begun to overwrite; they were discarded.
        lost_read_count: reads that ended because the donor was lost.
        abandoned: replacements that came to nothing, by reason.
        received_nbytes: read from donors, discarded reads included.
        timing: ``"publish"``, ``"read"`` (from the judgement to the whole average) and ``"apply"``.
        title: which policy it is, and on which rank; "" if it is not known.
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
        """Return the table of counts and the table of times, below their title."""
        return "\n".join(part for part in (self.title, self.format_counts(), self.format_times()) if part)

    def format_counts(self) -> str:
        """Return one line for each count that is not 0, and for the first six in any case."""
        rows: list[tuple[str, object]] = [
            (name.replace("_", " "), value) for name, value in self._counts() if value or name in _ALWAYS
        ]
        rows += [(f"abandoned: {reason}", count) for reason, count in sorted(self.abandoned.items())]
        rows += [(f"not published: {reason}", count) for reason, count in sorted(self.unpublished.items())]
        rows += [("received", size_in_words(self.received_nbytes))]
        return format_table("", rows)

    def format_times(self) -> str:
        """Return one line for each kind of work that is timed."""
        rows = [
            (name, f"{found.total_s:.4f} s in {found.count}, {1e3 * found.largest_s:.2f} ms at most")
            for name, found in self.timing.items()
        ]
        return format_table("", rows)

    def _counts(self) -> Iterator[tuple[str, int]]:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if isinstance(value, int) and name != "received_nbytes":
                yield name.replace("_count", "s"), value


#: Names that torchgfn's tables have.
_ALWAYS: Final = ("total_iterations", "agents_killed", "num_replacements", "averaging_ranks", "age", "version")
