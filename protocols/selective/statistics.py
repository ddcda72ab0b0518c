"""Defines the statistics of a member and of the coordinator of selective averaging."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from asyncdist.protocols.journal import format_table
from asyncdist.wording import size_in_words


@dataclass(frozen=True, slots=True)
class Straggler:
    """Records that a live member was late for a decision, or got no role because its steps are too slow.

    A member is late only after more than the usual time between reports has passed since its last report.

    Attributes:
        decision: Number of the decision, from 1. Not every decision starts a round.
        offset_s: Seconds from the decision's first report to the member's report, or None until that report arrives.
    """

    decision: int
    rank: int
    offset_s: float | None


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A donor without which an averaging round continued, and the reason."""

    round: int
    rank: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorStatistics:
    """Counts of a coordinator's reports, decisions and rounds. The mappings are copies.

    In a round that has ended, each replacer has applied its average in time, abandoned it, declined, or was overdue. An
    average that is applied after its round's timeout is counted in `applied` and, as a late message, in `ignored`.

    Attributes:
        reports: Number of reports received, by rank.
        nonfinite_report_count: Number of reports whose metric was NaN or infinite.
        decision_count: Number of times that the reports were judged, with or without a round.
        rounds_decided: Number of rounds started.
        rounds_ended: Number of rounds ended, at most one less than the number started.
        routes: Number of rounds with donors, by the route of their snapshots: `"direct"` or `"sharded"`.
        applied: Number of averages applied, by rank.
        abandoned: Number of replacers that abandoned a round, left or were lost, by reason.
        declines: Number of declined roles, by rank.
        overdue_count: Number of replacers that had not answered when their round timed out.
        left_out: Latest donors that were left out of a round.
        stragglers: Latest members for which a decision or a round did not wait.
        ignored: Number of ignored messages, by reason.
        emigrant_count: Number of times that a member was chosen to send its weights to another island.
        guests: Latest donors from other islands, as pairs of the round and the rank.
    """

    reports: Mapping[int, int]
    nonfinite_report_count: int
    decision_count: int
    rounds_decided: int
    rounds_ended: int
    routes: Mapping[str, int]
    applied: Mapping[int, int]
    abandoned: Mapping[str, int]
    declines: Mapping[int, int]
    overdue_count: int
    left_out: tuple[LeftOut, ...]
    stragglers: tuple[Straggler, ...]
    ignored: Mapping[str, int]
    emigrant_count: int = 0
    guests: tuple[tuple[int, int], ...] = ()


#: Maximum length of each list in the history.
HISTORY_LENGTH: Final = 64
_EVENT_COUNT_MAX: Final = 32


class History:
    """Records a coordinator's recent events, for its statistics and for error messages.

    Attributes:
        stragglers: Members for which a decision did not wait, each with the arrival time of the decision's first
            report.
        ignored: Number of late or unexpected messages, by kind.
        guests: Donors from other islands, as pairs of the round and the rank.
        record_entry: Faster form of :meth:`record`. Its only argument is a tuple of the template and its values.
    """

    def __init__(self) -> None:
        self.left_out: deque[LeftOut] = deque(maxlen=HISTORY_LENGTH)
        self.stragglers: deque[tuple[Straggler, float]] = deque(maxlen=HISTORY_LENGTH)
        self.ignored: Counter[str] = Counter()
        self.guests: deque[tuple[int, int]] = deque(maxlen=HISTORY_LENGTH)
        self.abandoned: Counter[str] = Counter()
        self._events: deque[tuple[str, tuple[object, ...]]] = deque(maxlen=_EVENT_COUNT_MAX)
        self.record_entry = self._events.append

    def record(self, words: str, *facts: object) -> None:
        """Record an event as a format string and its values. Only :meth:`recent_events` formats them."""
        self._events.append((words, facts))

    def recent_events(self) -> tuple[str, ...]:
        """Return the latest events, oldest first."""
        return tuple(words.format(*facts) for words, facts in self._events)

    def with_events(self, fact: str) -> str:
        """Return ``fact`` followed by the latest events, as the message of a failed assertion."""
        return "\n  ".join((fact, "the latest events:", *self.recent_events()))

    def ignore(self, what: str) -> None:
        """Count an ignored message. ``what`` names its kind and the reason."""
        self.ignored[what] += 1

    def note_arrival(self, rank: int, now: float) -> None:
        """Set the ``offset_s`` of a straggler whose report has arrived."""
        for index, (straggler, start) in enumerate(self.stragglers):
            if straggler.rank == rank and straggler.offset_s is None:
                self.stragglers[index] = (replace(straggler, offset_s=now - start), start)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectiveStatistics:
    """Counts of one member's reports, roles and transferred bytes.

    Attributes:
        iteration: Number of steps, including those before a resume.
        report_count: Number of metrics reported.
        nonfinite_metric_count: Number of reported metrics that were NaN or infinite.
        snapshot_count: Number of snapshots taken as a donor.
        replacement_count: Number of averages applied.
        abandoned: Number of rounds abandoned as a replacer, by reason.
        declined: Number of declined roles, by reason.
        unapplied_count: Number of complete averages that were discarded because the policy or the round ended first.
        last_round: Number of the newest round in which this rank had a role.
        reduction_count: Number of parts that this rank has added up for the replacers of sharded rounds.
        reasked_count: Number of parts that this rank, as a replacer, has requested from the donors because the reducer
            had failed.
        sent_nbytes: Number of bytes sent as a donor or reducer.
        received_nbytes: Number of bytes received as a replacer or reducer, including abandoned rounds.
        read_nbytes: Number of received bytes that were read directly from the memory of donors on this host.
        epoch: Epoch of the coordinator: 0 for the first coordinator, and larger for each successor.
        coordinator_rank: Rank of the coordinator, as far as this rank knows. None before the start, and if the
            coordinator is lost or has stopped.
        coordinator: Statistics of this rank as a coordinator, or None if it has never coordinated.
        island: Number of this rank's island, from 0, or None without islands.
        migration_count: Number of snapshots that this rank has sent to rounds of other islands.
        title: Name of the policy and of this rank; "" if unknown.
    """

    iteration: int
    report_count: int = 0
    nonfinite_metric_count: int = 0
    snapshot_count: int = 0
    replacement_count: int = 0
    abandoned: Mapping[str, int]
    declined: Mapping[str, int]
    unapplied_count: int = 0
    last_round: int = 0
    reduction_count: int = 0
    reasked_count: int = 0
    sent_nbytes: int = 0
    received_nbytes: int = 0
    read_nbytes: int = 0
    epoch: int = 0
    coordinator_rank: int | None = None
    coordinator: CoordinatorStatistics | None = None
    island: int | None = None
    migration_count: int = 0
    title: str = ""

    def __str__(self) -> str:
        """Return a table of the counts."""
        shown = [(name, label, self._shown(name)) for name, label in _LABELS.items()]
        rows = [(label, value) for name, label, value in shown if value or name in _ALWAYS]
        rows += [(f"abandoned: {reason}", count) for reason, count in sorted(self.abandoned.items())]
        rows += [(f"declined: {reason}", count) for reason, count in sorted(self.declined.items())]
        if self.coordinator_rank is not None:
            rows.append(("coordinator", f"rank {self.coordinator_rank}"))
        if self.coordinator is not None:
            rows.append(("rounds decided here", self.coordinator.rounds_decided))
            rows += [(f"by the {route} route", count) for route, count in self.coordinator.routes.items() if count]
            rows += [
                (f"straggler: rank {late.rank}", f"decision {late.decision}") for late in self.coordinator.stragglers
            ]
        return format_table(self.title, rows)

    def _shown(self, name: str) -> object:
        value = getattr(self, name)
        if name == "island":
            return None if value is None else str(value)
        return size_in_words(value) if name.endswith("_nbytes") and value else value


_ALWAYS: Final = ("iteration", "report_count", "snapshot_count", "replacement_count")
#: Labels of the counts in the printed table, in order.
_LABELS: Final = {
    "iteration": "iteration",
    "report_count": "metrics reported",
    "snapshot_count": "snapshots given",
    "replacement_count": "averages applied",
    "nonfinite_metric_count": "metrics not finite",
    "unapplied_count": "averages not applied",
    "last_round": "last round",
    "reduction_count": "parts added up for others",
    "reasked_count": "parts requested again",
    "sent_nbytes": "sent",
    "received_nbytes": "received",
    "read_nbytes": "read in memory of this host",
    "epoch": "epoch",
    "island": "island",
    "migration_count": "snapshots given to other islands",
}
