"""Defines the coordinator's records of its members and of the round in progress."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import Final, NamedTuple

from asyncdist.protocols.ranking import order_worst_first
from asyncdist.protocols.selective.messages import ControlMessage, PackedAssign, PackedFrozen
from asyncdist.protocols.selective.round.plan import Freeze, Plan
from asyncdist.protocols.selective.selection import Decision
from asyncdist.protocols.selective.waiting import Pace, as_pace

#: Limit for the time to send a donor's optimizer and policy state, as a multiple of the time for its weights. Both are
#: counted in safe points (calls in which training code lets messages move).
STATE_STREAM_COUNT_MAX: Final = 20
#: Number of safe points that the stream of one part takes: `PART_CHUNK_COUNT` chunks with `WINDOW_COUNT` chunks in
#: flight.
_PART_SAFE_POINTS: Final = 8


class Send(NamedTuple):  # a named tuple is created twice as fast as a frozen dataclass
    """A message that the coordinator must send about ``round`` to rank ``dest``."""

    dest: int
    round: int
    message: ControlMessage


#: Creates a Send from a tuple in half the time of Send(...). Each round creates two for each member.
_as_send: Final[Callable[[tuple[int, int, ControlMessage]], Send]] = partial(tuple.__new__, Send)


def sends_of(ranks: Sequence[int], round: int, message: ControlMessage) -> list[Send]:
    """Return a `Send` object with the same message for each of ``ranks``."""
    return list(map(_as_send, zip(ranks, repeat(round), repeat(message))))


class ReportRecord(NamedTuple):
    """A member's newest report and its arrival time.

    `step_s` is the reported duration of a step, or a plausible limit, for use in deadlines.
    """

    iteration: int
    value: float
    step_s: float
    received_at: float

    @property
    def is_finite(self) -> bool:
        """True if the metric is finite."""
        return math.isfinite(self.value)


#: Creates a ReportRecord from a tuple in half the time of ReportRecord(...). Each report creates one.
as_record: Final[Callable[[tuple[int, float, float, float]], ReportRecord]] = partial(tuple.__new__, ReportRecord)


@dataclass(slots=True)
class Member:
    """A coordinator's record of one rank: its state, its newest reports and its counts.

    Attributes:
        joined: Whether the rank has confirmed to this coordinator that it takes part.
        admitted: Whether the rank is a member. A restarted rank becomes a member only when it has received another
            member's state. A donor from another island is never a member.
        report: Newest valid report, or None without one.
        applied_iteration: Iteration of the rank's last average, or None before the first.
        reported_at: Arrival time of the newest report, or None before the first.
        step_s, interval_s: Seconds per step, and seconds since the previous report, according to the newest report.
        last_step_s, last_interval_s: The same values from the previous report, or 0 without one.
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
    reported_at: float | None = None
    step_s: float = 0.0
    interval_s: float = 0.0
    last_step_s: float = 0.0
    last_interval_s: float = 0.0

    @property
    def is_member(self) -> bool:
        """True if the rank is a live member: the coordinator judges its metric and waits for its reports."""
        return self.live and self.admitted

    def record_report(self, step_s: float, interval_s: float, now: float) -> None:
        """Record the arrival time of a member's report, and the plausible step and report times in the report."""
        self.last_step_s, self.last_interval_s = self.step_s, self.interval_s
        self.step_s, self.interval_s, self.reported_at = step_s, interval_s, now

    def pace(self, now: float) -> Pace:
        """Return the member's speed in its last two reports. A single long step does not make the member slow."""
        step_s, last_step_s, interval_s, last_s = self.step_s, self.last_step_s, self.interval_s, self.last_interval_s
        step_s = last_step_s if 0 < last_step_s < step_s else step_s
        interval_s = last_s if last_s < interval_s else interval_s
        return as_pace((step_s, interval_s, math.inf if self.reported_at is None else now - self.reported_at))


@dataclass(slots=True)
class Round:
    """A coordinator's record of the averaging round in progress.

    Attributes:
        judged: Report on which the decision is based, by rank with a role in the round.
        waiting_donors, waiting_replacers: Donors and replacers whose answers have not arrived.
        reducers: Reducers assigned at the start. Empty on the direct route.
        sources: Rank from which each part is requested, by replacer that shares parts on its host.
        ready: Iteration of the snapshot, by donor that is ready.
        released: Ranks to which an `End` was sent.
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
    limit_at: float = math.inf  # time limit of a round that admits restarted ranks
    state_safe_points: int = 0  # safe points to send a donor's optimizer and policy state

    def start_messages(self, members: Mapping[int, Member]) -> list[Send]:
        """Return the messages that assign each rank its role in this round."""
        judged, named = self.judged, self.named
        iterations = tuple([judged[rank].iteration for rank in named])
        restarted = tuple([(rank, n) for rank in named if (n := members[rank].incarnation)])
        who = tuple(named), self.decision.replacers, iterations, self.decision.best
        plan = Plan(*who, self.admits, restarted, self.reducers, self.decision.parents).packed()
        if not self.sources:
            return sends_of(named, self.number, PackedAssign(plan))
        of = {each: PackedAssign(plan, each) for each in {(), *self.sources.values()}}
        return [Send(rank, self.number, of[self.sources.get(rank, ())]) for rank in named]

    def freeze_messages(self, metric_mode: str, timeouts: Mapping[int, float]) -> list[Send]:
        """Return the messages that list the final donors, for the ranks that average or adopt their weights.

        A rank that is only a donor needs no message, because it answers every request.

        Args:
            metric_mode: `"max"` or `"min"`, to find the best remaining donor.
            timeouts: Timeout in seconds of each rank that adopts the average.
        """
        weight_of = dict(zip(self.decision.donors, self.decision.weights, strict=True))
        donors = tuple(sorted(self.ready))
        weights = tuple([weight_of[rank] for rank in donors])
        iterations = tuple([self.ready[rank] for rank in donors])
        values = {rank: self.judged[rank].value for rank in donors}
        best = order_worst_first(values, metric_mode)[-1] if donors else -1
        reducers = tuple([rank for rank in self.reducers if rank in self.ready or rank in self.waiting_replacers])
        freeze, longest_s = Freeze(donors, weights, iterations, best, reducers).packed(), max(timeouts.values())
        of = {timeout_s: PackedFrozen(freeze, timeout_s) for timeout_s in {*timeouts.values()}}
        return [Send(rank, self.number, of[timeouts.get(rank, longest_s)]) for rank in sorted({*timeouts, *reducers})]

    @property
    def named(self) -> list[int]:
        """Ranks with a role in the round, in ascending order."""
        return sorted(self.decision.donors + self.decision.replacers)

    def timeouts_s(self, round_timeout_s: float, stream_safe_points: int) -> dict[int, float]:
        """Return the timeout of each rank that adopts the average, in seconds from its receipt of `Frozen`.

        The timeout is `round_timeout_s` plus the duration of the steps that messages wait for in the worst case. On the
        direct route, a replacer requests the snapshots from the donors in turn, after the freeze. Each donor reads the
        request in its next step, and the stream takes `stream_safe_points` steps of both ranks. Applying the average
        takes one more step.

        A newcomer also receives the size of the donor's optimizer and policy state, and then the state itself. It makes
        no steps of its own. If the donors have offered their state, each replacer receives it in the same way, between
        its steps.

        On the sharded route, more steps may pass before a replacer requests missing parts from the donors. A reducer
        needs one step to read `Frozen`, one to add up, and the steps of its own streams. A rank that fetches parts for
        its host needs the same steps. The stream of a part has small chunks and takes at least `_PART_SAFE_POINTS`
        steps.
        """
        count = stream_safe_points
        judged = self.judged
        donors_s = sum([judged[donor].step_s for donor in self.ready])
        others_s = (1 + count) * donors_s
        own_count = 1 + count * len(self.ready)
        if self.admits or self.state_safe_points:
            state_count = 3 + min(max(0, self.state_safe_points), STATE_STREAM_COUNT_MAX * count)
            others_s += state_count * donors_s
            own_count += 0 if self.admits else state_count
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
    """Return the metric in each rank's report."""
    return {rank: report.value for rank, report in reports.items()}
