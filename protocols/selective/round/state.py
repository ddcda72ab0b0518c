"""Defines the coordinator's records of its members and of the round in progress."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import Final, NamedTuple

from asyncdist.protocols.ranking import best_of
from asyncdist.protocols.selective.messages import ControlMessage, PackedAssign, PackedFrozen
from asyncdist.protocols.selective.round.plan import Freeze, Plan
from asyncdist.protocols.selective.rules import Decision
from asyncdist.protocols.selective.waiting import Pace, as_pace

#: Largest accepted ratio of the safe points of a donor's other state to those of its weights.
STATE_STREAM_COUNT_MAX: Final = 20
#: Safe points of a part's stream: `PART_CHUNK_COUNT` chunks, `WINDOW_COUNT` of them in flight.
_PART_SAFE_POINTS: Final = 8


class Send(NamedTuple):  # a frozen dataclass takes twice as long to create, and a round has twenty
    """One message for the coordinator's coroutine to send, with the round for the frame header."""

    dest: int
    round: int
    message: ControlMessage


#: Takes half the time of Send(...); each round creates two for each member.
_as_send: Final[Callable[[tuple[int, int, ControlMessage]], Send]] = partial(tuple.__new__, Send)


def sends_of(ranks: Sequence[int], round: int, message: ControlMessage) -> list[Send]:
    """Return the sends of one message to several ranks."""
    return list(map(_as_send, zip(ranks, repeat(round), repeat(message))))


class ReportRecord(NamedTuple):
    """Holds a member's newest report and its arrival time. `step_s` is a plausible step time, fit for deadlines."""

    iteration: int
    value: float
    step_s: float
    received_at: float

    @property
    def is_finite(self) -> bool:
        """Whether the metric is finite, and so can be compared."""
        return math.isfinite(self.value)


#: Called for each report: a frozen dataclass takes a microsecond, ReportRecord(...) half of that, and this a quarter.
as_record: Final[Callable[[tuple[int, float, float, float]], ReportRecord]] = partial(tuple.__new__, ReportRecord)


@dataclass(slots=True)
class Member:
    """Holds the coordinator's knowledge of one rank.

    Attributes:
        admitted: Whether it counts. A newcomer does not count until it has a donor's state, but receives messages.
        incarnation: Number of restarts of its process before it asked to be admitted.
        fresh: Whether it has reported since the last decision.
        heard_at: Arrival time of its newest report; None before the first one.
        step_s, interval_s: Step time, and time since the previous report, of the newest report.
        last_step_s, last_interval_s: The same values of the previous report; 0 if there is none.
    """

    joined: bool
    admitted: bool = True
    incarnation: int = 0
    live: bool = True
    report: ReportRecord | None = None
    fresh: bool = False
    applied_iteration: int | None = None
    report_count: int = 0
    applied_count: int = 0
    decline_count: int = 0
    heard_at: float | None = None
    step_s: float = 0.0
    interval_s: float = 0.0
    last_step_s: float = 0.0
    last_interval_s: float = 0.0

    @property
    def counts(self) -> bool:
        """Whether it is waited for and judged."""
        return self.live and self.admitted

    def hear(self, step_s: float, interval_s: float, now: float) -> None:
        """Note the times in a report, after they were checked for plausibility."""
        self.last_step_s, self.last_interval_s = self.step_s, self.interval_s
        self.step_s, self.interval_s, self.heard_at = step_s, interval_s, now

    def pace(self, now: float) -> Pace:
        """Return the member's pace. A single long step, or the first steps of a job, do not make a rank slow."""
        step_s, last_step_s, interval_s, last_s = self.step_s, self.last_step_s, self.interval_s, self.last_interval_s
        step_s = last_step_s if 0 < last_step_s < step_s else step_s
        interval_s = last_s if last_s < interval_s else interval_s
        return as_pace((step_s, interval_s, math.inf if self.heard_at is None else now - self.heard_at))


@dataclass(slots=True)
class Round:
    """Tracks the round in progress.

    Attributes:
        waiting_donors, waiting_replacers: Ranks that have not yet answered.
        reducers: Reducers named at the start; empty on the direct route.
        sources: Result of `sources_of`.
        released: Ranks that were sent their `End`.
    """

    number: int
    began_at: float
    decision: Decision
    judged: dict[int, ReportRecord]
    deadline: float
    waiting_donors: set[int]
    waiting_replacers: set[int]
    reducers: tuple[int, ...] = ()
    sources: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    ready: dict[int, int] = field(default_factory=dict)
    released: set[int] = field(default_factory=set)
    frozen: bool = False
    admits: bool = False
    limit_at: float = math.inf  # latest time until which it may delay other rounds
    state_safe_points: int = 0  # announced by the donor of a round that admits

    def openings(self, members: Mapping[int, Member]) -> list[Send]:
        """Return the messages that tell the named ranks their roles. The plan is packed once for all of them."""
        judged, named = self.judged, self.named
        iterations = tuple([judged[rank].iteration for rank in named])
        restarted = tuple([(rank, n) for rank in named if (n := members[rank].incarnation)])
        who = tuple(named), self.decision.replacers, iterations, self.decision.best
        plan = Plan(*who, self.admits, restarted, self.reducers).packed()
        if not self.sources:
            return sends_of(named, self.number, PackedAssign(plan))
        of = {each: PackedAssign(plan, each) for each in {(), *self.sources.values()}}
        return [Send(rank, self.number, of[self.sources.get(rank, ())]) for rank in named]

    def freezings(self, metric_mode: str, timeouts: Mapping[int, float]) -> list[Send]:
        """Return the messages that tell replacers, each with its timeout, and reducers that the donors are fixed.

        A donor without another role gets no message: it answers every replacer that asks.
        """
        weight_of = dict(zip(self.decision.donors, self.decision.weights, strict=True))
        donors = tuple(sorted(self.ready))
        weights = tuple([weight_of[rank] for rank in donors])
        iterations = tuple([self.ready[rank] for rank in donors])
        values = {rank: self.judged[rank].value for rank in donors}
        best = best_of(values, metric_mode) if donors else -1
        reducers = tuple([rank for rank in self.reducers if rank in self.ready or rank in self.waiting_replacers])
        freeze, longest_s = Freeze(donors, weights, iterations, best, reducers).packed(), max(timeouts.values())
        of = {timeout_s: PackedFrozen(freeze, timeout_s) for timeout_s in {*timeouts.values()}}
        return [Send(rank, self.number, of[timeouts.get(rank, longest_s)]) for rank in sorted({*timeouts, *reducers})]

    @property
    def named(self) -> list[int]:
        """Ranks with a role in the round, ascending."""
        return sorted(self.decision.donors + self.decision.replacers)

    def timeouts_s(self, round_timeout_s: float, stream_safe_points: int) -> dict[int, float]:
        """Return the seconds that each replacer may take from the moment when it reads `Frozen`.

        To `round_timeout_s` are added the safe points that messages may wait for. The worst case is a replacer that
        asks the donors in turn (as with a large state) and only now (as when a donor was left out). For each donor, one
        of its steps passes until it reads the grant, and then `stream_safe_points` steps of each end. Applying takes a
        last step.

        A newcomer makes no steps. After the weights it receives the size of the donor's other state, and then that
        state.

        On the sharded route, these times are for parts that the donors have to send after all. Before that, each
        reducer takes a step to read `Frozen`, a step to add up, and the steps of its own stream. A rank that fetches
        parts for its host takes these steps, too. Parts have small chunks, so their streams need at least
        `_PART_SAFE_POINTS`.
        """
        count = stream_safe_points
        judged = self.judged
        donors_s = sum([judged[donor].step_s for donor in self.ready])
        others_s = (1 + count) * donors_s
        own_count = 1 + count * len(self.ready)
        if self.admits:
            others_s += (3 + min(max(0, self.state_safe_points), STATE_STREAM_COUNT_MAX * count)) * donors_s
        if self.reducers:
            part_count = max(count, _PART_SAFE_POINTS)
            others_s += (2 + part_count) * max(judged[rank].step_s for rank in self.reducers)
            own_count += part_count
        if self.sources:
            others_s += (1 + count) * max(judged[rank].step_s for rank in self.sources)
            own_count += count
        shared_s = round_timeout_s + others_s
        return {rank: shared_s + own_count * judged[rank].step_s for rank in sorted(self.waiting_replacers)}


def values_of(reports: Mapping[int, ReportRecord]) -> dict[int, float]:
    """Return the metric of each rank."""
    return {rank: report.value for rank, report in reports.items()}
