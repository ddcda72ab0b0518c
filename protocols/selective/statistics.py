"""Defines what a member and the coordinator of selective averaging report about themselves."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from asyncdist.protocols.journal import format_table
from asyncdist.protocols.selective.messages import count_reason
from asyncdist.wording import size_in_words


@dataclass(frozen=True, slots=True)
class Straggler:
    """Names a live member that was late for a decision, or that got no role since the round would have waited for it.

    A member that has reported within the population's cadence, and is only between two reports, is not late.

    Attributes:
        decision: Which decision, counted from 1; not every decision starts a round.
        rank: The member.
        offset_s: Its report's arrival after the first report of that decision; None while it has not come.
    """

    decision: int
    rank: int
    offset_s: float | None


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Names a donor that a round went on without, and why."""

    round: int
    rank: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorStatistics:
    """Counts what a coordinator has done so far. The mappings are copies.

    For ended rounds, replacers named = applied in time + abandoned + declined (as replacers) + overdue. An `Applied`
    that comes after its round's time was up is counted in `applied` too, and in `ignored` as late.

    Attributes:
        reports: Reports received, by rank.
        nonfinite_report_count: Reports whose metric was NaN or infinite.
        decision_count: Times the reports were judged, with or without a round.
        rounds_decided: Rounds started.
        rounds_ended: Rounds ended; at most one less than decided.
        routes: Rounds with donors, by the route that their snapshots took: `"direct"` or `"sharded"`.
        applied: Averages applied, by rank.
        abandoned: Replacers that gave up, left or were lost, by reason.
        declines: Refusals, by rank, of either role.
        overdue_count: Replacers that had not answered when their round's time was up.
        left_out: Donors that rounds went on without, the latest ones.
        stragglers: Members that decisions, or rounds, did not wait for, the latest ones.
        ignored: Messages that fitted nothing, by what was wrong.
        emigrant_count: Members that were chosen to give to another island.
        guests: Ranks of other islands that gave to a round here, each after the round's number, the latest ones.
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


#: So many of the newest are kept.
HISTORY_LENGTH: Final = 64
_STORY_LENGTH: Final = 32


class History:
    """Keeps what has happened at a coordinator lately, for statistics and error messages.

    Attributes:
        left_out: donors that a round went on without.
        stragglers: those that decisions did not wait for, each with the time at which the decision's reports began.
        ignored: how many messages came too late or were not allowed, by kind.
        guests: ranks of other islands that have given, each after its round.
        note: does what :meth:`tell` does, of words and facts in a tuple: at half the time, for each report.
        abandoned: replacers that came to nothing, by reason.
    """

    def __init__(self) -> None:
        self.left_out: deque[LeftOut] = deque(maxlen=HISTORY_LENGTH)
        self.stragglers: deque[tuple[Straggler, float]] = deque(maxlen=HISTORY_LENGTH)
        self.ignored: Counter[str] = Counter()
        self.guests: deque[tuple[int, int]] = deque(maxlen=HISTORY_LENGTH)
        self.abandoned: Counter[str] = Counter()
        self._story: deque[tuple[str, tuple[object, ...]]] = deque(maxlen=_STORY_LENGTH)
        self.note = self._story.append

    def tell(self, words: str, *facts: object) -> None:
        """Note what happened. The text is made only when it is asked for, which is rare: making it takes long."""
        self._story.append((words, facts))

    def story(self) -> tuple[str, ...]:
        """Return the latest events, oldest first."""
        return tuple(words.format(*facts) for words, facts in self._story)

    def broken(self, fact: str) -> str:
        """Return the words of an assertion that has failed."""
        return "\n  ".join((fact, "the story so far:", *self.story()))

    def ignore(self, what: str) -> None:
        """Count a message that changes nothing."""
        self.ignored[what] += 1

    def note_abandoned(self, reason: str) -> None:
        """Count a replacer that came to nothing."""
        count_reason(self.abandoned, reason)

    def note_stragglers(self, decision: int, late: Iterable[tuple[int, float | None]], start: float) -> None:
        """Note those that a decision, whose reports began at ``start``, or its round did not wait for."""
        self.stragglers.extend((Straggler(decision, rank, offset_s), start) for rank, offset_s in late)

    def note_arrival(self, rank: int, now: float) -> None:
        """Fill in how late a straggler was, for the decisions that did not wait for it."""
        for index, (straggler, start) in enumerate(self.stragglers):
            if straggler.rank == rank and straggler.offset_s is None:
                self.stragglers[index] = (replace(straggler, offset_s=now - start), start)


@dataclass(frozen=True, slots=True)
class SelectiveStatistics:
    """Counts what a member has done so far.

    Attributes:
        iteration: steps taken.
        report_count: metrics sent.
        nonfinite_metric_count: how many of these were NaN or infinite.
        snapshot_count: snapshots taken as a donor.
        replacement_count: rounds applied.
        abandoned: rounds given up as a replacer, by reason.
        declined: roles refused, by reason.
        unapplied_count: averages that were complete when the policy ended, or was told to forget them.
        last_round: the newest round this rank was named in.
        reduction_count: parts of an average that this rank has added up for the replacers of a sharded round.
        reasked_count: parts of an average that this rank, as a replacer, has asked the donors for anew, since the rank
            that was to add them up had failed.
        sent_nbytes: bytes streamed as a donor, or as a reducer of a sharded round.
        received_nbytes: bytes streamed, or read, as a replacer or as a reducer, abandoned rounds included.
        read_nbytes: of these, read in the memory of donors on this host.
        epoch: 0 under the first coordinator; it grows whenever another rank takes over.
        coordinator_rank: the rank that coordinates, as far as this rank knows; None before the start and where it is
            gone.
        coordinator: on a rank that coordinates, or has coordinated, what it has decided there; else None.
        island: the number of this rank's island, from 0; None without islands.
        migration_count: snapshots that this rank has given to rounds of other islands.
        title: which policy it is, and on which rank; "" if it is not known.
    """

    iteration: int
    report_count: int
    nonfinite_metric_count: int
    snapshot_count: int
    replacement_count: int
    abandoned: Mapping[str, int]
    declined: Mapping[str, int]
    unapplied_count: int
    last_round: int
    reduction_count: int
    reasked_count: int
    sent_nbytes: int
    received_nbytes: int
    read_nbytes: int
    epoch: int
    coordinator_rank: int | None
    coordinator: CoordinatorStatistics | None
    island: int | None = None
    migration_count: int = 0
    title: str = ""

    def __str__(self) -> str:
        """Return a table of what has happened: ``print(policy.statistics())``."""
        rows: list[tuple[str, object]] = [(_LABELS[name], getattr(self, name)) for name in _ALWAYS]
        others = {label: self._shown(name) for name, label in _LABELS.items() if name not in _ALWAYS}
        rows += [(label, value) for label, value in others.items() if value]
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
        """Return what the table says of a count, false where that is nothing."""
        value = getattr(self, name)
        if name == "island":
            return None if value is None else str(value)
        return size_in_words(value) if name.endswith("_nbytes") and value else value


_ALWAYS: Final = ("iteration", "report_count", "snapshot_count", "replacement_count")
#: How the table calls the counts, in its order.
_LABELS: Final = {
    "iteration": "iteration",
    "report_count": "metrics reported",
    "snapshot_count": "snapshots given",
    "replacement_count": "averages applied",
    "nonfinite_metric_count": "metrics not finite",
    "unapplied_count": "averages not applied",
    "last_round": "last round",
    "reduction_count": "parts added up for others",
    "reasked_count": "parts asked for anew",
    "sent_nbytes": "sent",
    "received_nbytes": "received",
    "read_nbytes": "read in memory of this host",
    "epoch": "epoch",
    "island": "island",
    "migration_count": "snapshots given to other islands",
}
