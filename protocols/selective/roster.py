"""Defines a coordinator's records of its members, and tracks members that join, are admitted, depart or leave early.

A *newcomer* is the new process of a lost member. It is admitted in a separate round, in which one member sends it the
member's whole state. Rounds do not overlap, so a slow newcomer delays all other rounds. An admission therefore has a
time limit, which doubles after each failed attempt. After an attempt that exceeds its limit, the next attempt is
delayed by nine times the attempt's duration.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from functools import partial
from itertools import repeat
from typing import Final, NamedTuple

from asyncdist.protocols.ranking import order_worst_first
from asyncdist.protocols.selective.messages import ControlMessage
from asyncdist.protocols.selective.selection import Decision, SelectiveRules
from asyncdist.protocols.selective.waiting import DELAY_SHARE, Pace, as_pace, cadence_s, is_late


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


#: Creates a ReportRecord from a tuple in half the time of ReportRecord(...). Each report creates one.
as_record: Final[Callable[[tuple[int, float, float, float]], ReportRecord]] = partial(tuple.__new__, ReportRecord)


@dataclass(slots=True)
class Member:
    """A coordinator's record of one rank: its state, its newest reports and its counts.

    Attributes:
        joined: Whether the rank has confirmed to this coordinator that it takes part.
        admitted: Whether the rank is a member. A restarted rank becomes a member only when it has received another
            member's state. A donor from another island is never a member.
        report: Newest valid report, or None if there is none.
        applied_iteration: Iteration of the rank's last average, or None before the first.
        reported_at: Arrival time of the newest report, or None before the first.
        step_s, interval_s: Seconds per step, and seconds since the previous report, according to the newest report.
        last_step_s, last_interval_s: The same values from the previous report, or 0 if there is none.
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
        """Return the smaller times in the last two reports, so that one long step does not make a member slow."""
        step_s, last_step_s, interval_s, last_s = self.step_s, self.last_step_s, self.interval_s, self.last_interval_s
        step_s = last_step_s if 0 < last_step_s < step_s else step_s
        interval_s = last_s if last_s < interval_s else interval_s
        return as_pace((step_s, interval_s, math.inf if self.reported_at is None else now - self.reported_at))


def values_of(reports: Mapping[int, ReportRecord]) -> dict[int, float]:
    """Return the metric in each rank's report."""
    return {rank: report.value for rank, report in reports.items()}


#: Maximum number of restarted ranks that are admitted in one round.
NEWCOMER_COUNT_MAX: Final = 8
#: Time limit of the first attempt to admit a restarted rank: this many cadences (times between reports) or rounds,
#: whichever is longer.
_FIRST_CADENCES: Final = 2.0
_FIRST_ROUNDS: Final = 6.0


class _Failures(NamedTuple):
    """Counts failed attempts to admit a restarted rank, and stores the decision and time after which to retry."""

    failed_count: int = 0
    after_decision: int = -1
    next_at: float = -math.inf


class Newcomers:
    """Tracks the restarted ranks that are waiting for admission to one policy, and their failed attempts."""

    def __init__(self, members: Mapping[int, Member], rules: SelectiveRules) -> None:
        self._members = members
        self._rules = rules
        self._failures: dict[int, _Failures] = {}
        self._admitted_after = -1  # number of the last decision before the newest admission

    def __bool__(self) -> bool:
        return bool(self._failures)

    def add(self, rank: int) -> None:
        """Add a rank that requests admission."""
        self._failures[rank] = _Failures()

    def remove(self, rank: int) -> None:
        """Remove a rank that was admitted, is lost or has left."""
        self._failures.pop(rank, None)

    def on_round(self, ranks: Sequence[int], decision_count: int, held_s: float, now: float) -> None:
        """Count a failed attempt for each restarted rank that a round should have admitted but did not.

        Args:
            decision_count: Number of decisions made. The next attempt waits for another decision.
            held_s: Duration of the round in seconds if it exceeded its time limit; otherwise 0.
        """
        for rank in ranks:
            if rank in self._failures:
                next_at = now + held_s * (1 / DELAY_SHARE - 1)
                self._failures[rank] = _Failures(self._failures[rank].failed_count + 1, decision_count, next_at)

    def allowed_s(self, ranks: Sequence[int], cadence_s: float, round_s: float) -> float:
        """Return the time limit in seconds for admitting these ranks. Infinite if ``cadence_s`` or ``round_s`` is 0."""
        first_s = max(_FIRST_CADENCES * cadence_s, _FIRST_ROUNDS * round_s)
        count = max((self._failures[rank].failed_count for rank in ranks), default=0)
        return first_s * 2 ** min(count, 16) if cadence_s and round_s else math.inf

    def next(
        self, decision_count: int, is_decision_near: bool, now: float
    ) -> tuple[Decision, dict[int, ReportRecord]] | None:
        """Return the roles and reports for a round that admits restarted ranks, or None if none can be admitted now.

        The state is sent by the member with the best metric, or the next best after each failure. If no metric is
        finite, any member that has reported can send it. While the quorum for a decision is reached, admissions and
        decisions alternate.

        Args:
            is_decision_near: Whether the quorum for the next decision is reached.
        """
        if is_decision_near and self._admitted_after == decision_count:
            return None
        waiting = [
            rank
            for rank, failures in self._failures.items()
            if failures.after_decision < decision_count and failures.next_at <= now
        ]
        reported = {
            rank: member.report
            for rank, member in self._members.items()
            if member.live and member.admitted and member.report is not None
            if now - member.report.received_at <= self._rules.max_report_age_s
        }
        if not waiting or not reported:
            return None
        first, ranks = waiting[0], tuple(sorted(waiting[:NEWCOMER_COUNT_MAX]))
        values = {rank: report.value for rank, report in reported.items() if math.isfinite(report.value)}
        donors = order_worst_first(values, self._rules.metric_mode)[::-1] if values else sorted(reported)
        donor = donors[self._failures[first].failed_count % len(donors)]
        self._admitted_after = decision_count
        judged = {donor: reported[donor]._replace(iteration=-1)}
        judged |= dict.fromkeys(ranks, ReportRecord(-1, math.nan, 0.0, now))
        return Decision(donors=(donor,), replacers=ranks, weights=(1.0,), best=donor), judged


#: Seconds after a departure in which no warning is due. Ranks that train for the same time all leave within these
#: seconds.
_PATIENCE_S: Final = 10.0


class Departures:
    """Finds members that have left although the others continue to train and average.

    In a normal end, all ranks take the same number of steps, or train for the same time. In the first case, a slow rank
    may continue for long, but never takes more steps than a member that has left. In the second case, all ranks leave
    within seconds of each other.

    Args:
        average_every: Number of steps between two reports of a member.
    """

    def __init__(self, average_every: int) -> None:
        self._average_every = average_every
        # By rank, until the warning: time of the departure, and iteration of the last report or -1.
        self._departures: dict[int, tuple[float, int]] = {}
        self._early: list[int] = []

    def add(self, rank: int, iteration: int, now: float) -> None:
        """Record that a member has left after its report of ``iteration``."""
        self._departures[rank] = now, iteration

    def note_report(self, rank: int, iteration: int) -> None:
        """Record a report of a member that has left. The report may arrive after the notice of the departure."""
        if rank in self._departures:
            left_at, known = self._departures[rank]
            self._departures[rank] = left_at, max(known, iteration)

    def forget(self, rank: int) -> None:
        """Forget that a member has left, because its new process has joined."""
        self._departures.pop(rank, None)

    def on_decision(self, iterations: Iterable[int], now: float) -> None:
        """Find members that have left early, when the coordinator judges reports of these ``iterations``."""
        reached = list(iterations) if self._departures else []
        if len(reached) < 2:  # a rank that trains alone averages nothing
            return
        for rank, (left_at, iteration) in list(self._departures.items()):
            is_behind = max(reached) > iteration + 2 * self._average_every
            if is_behind and now >= left_at + _PATIENCE_S:
                del self._departures[rank]
                self._early.append(rank)

    def take_early(self) -> list[int]:
        """Return each member that has left early, once."""
        early, self._early = self._early, []
        return early


class Roster:
    """Tracks a coordinator's members: which are live, which have reported, and how many must report for a decision.

    Counts are updated incrementally, since there may be thousands of ranks.

    Args:
        quorum: Fraction of live members that must have reported before a decision.
        have_joined: Whether the initial members are known to take part.

    Attributes:
        members: Records of all members by rank, including newcomers, lost members and departed members.
        live_count: Number of live, admitted members.
        fresh_count: Number of live members that have reported since the last decision.
        quorum_count: Number of reports needed for a quorum of the live members.

    Raises:
        ValueError: There are no ranks, or a rank is listed twice.
    """

    def __init__(
        self, ranks: Iterable[int], quorum: float, *, have_joined: bool, incarnations: Mapping[int, int]
    ) -> None:
        ordered = sorted(ranks)
        if not ordered or len(set(ordered)) != len(ordered):
            raise ValueError(f"members must be one or more distinct ranks, got {ordered}")
        self.members = {rank: Member(joined=have_joined) for rank in ordered}
        for rank, incarnation in incarnations.items():
            if rank in self.members:
                self.members[rank].incarnation = incarnation
        self._hosts: dict[int, int] = {}
        self._quorum = Decimal(repr(quorum))
        self.fresh_count = 0
        self.live_count = 0
        self.quorum_count = 1
        self._count_live(len(ordered))

    def add(self, rank: int) -> None:
        """Add a restarted rank that a former coordinator has admitted."""
        self.members[rank] = Member(joined=False)
        self._count_live(1)

    def add_newcomer(self, rank: int, incarnation: int) -> None:
        """Replace the record of a lost member with a record of its new process, which requests admission."""
        self.members[rank] = Member(joined=False, admitted=False, incarnation=incarnation)

    def admit(self, member: Member) -> None:
        """Make a restarted rank a live member."""
        member.admitted = member.joined = True
        self._count_live(1)

    def mark(self, member: Member, *, fresh: bool) -> None:
        """Record whether a member has reported since the last decision."""
        self.fresh_count += fresh - member.fresh
        member.fresh = fresh

    def depart(self, member: Member) -> None:
        """Record that a member, or a restarted rank that is waiting for admission, is lost or has left."""
        self.mark(member, fresh=False)
        member.live, member.report = False, None
        self._count_live(-1 if member.admitted else 0)

    def note_host(self, rank: int, host: int) -> None:
        """Store the number of a rank's host. Ignore 0, which means that the host is unknown."""
        if host:
            self._hosts[rank] = host

    def hosts_of(self, ranks: Iterable[int]) -> dict[int, int]:
        """Return the host number of each rank, or {} if a host is unknown.

        Each rank of another island gets its own number.
        """
        if not self._hosts:
            return {}
        hosts = {rank: self._hosts.get(rank, 0) if rank in self.members else -1 - rank for rank in ranks}
        return hosts if all(hosts.values()) else {}

    def live_ranks(self) -> list[int]:
        """Return the ranks of all live members, and of restarted ranks that are waiting for admission."""
        return [rank for rank, member in self.members.items() if member.live]

    def reported_since(self, moment: float) -> dict[int, ReportRecord]:
        """Return the newest report of each live member that has reported at or after `moment`."""
        return {
            rank: report
            for rank, member in self.members.items()
            if member.live and (report := member.report) is not None and report.received_at >= moment
        }

    def mark_reports_judged(self) -> None:
        """Mark all reports as judged, so that the next decision waits for new reports."""
        for member in self.members.values():
            member.fresh = False
        self.fresh_count = 0

    def paces_of_others(self, now: float) -> dict[int, Pace]:
        """Return the step and report times of the members that have not reported since the last decision."""
        if self.fresh_count == self.live_count:
            return {}
        return {
            rank: member.pace(now) for rank, member in self.members.items() if not member.fresh and member.is_member
        }

    def slowest_pace(self, ranks: Iterable[int], now: float) -> Pace | None:
        """Return the longest step, shortest report interval and longest silence of these ranks.

        Return None if the report interval of any of them is unknown.
        """
        members = [self.members[rank] for rank in ranks]
        interval_s = min(
            min([member.interval_s for member in members], default=0.0),
            min([member.last_interval_s for member in members], default=0.0),
        )
        if not interval_s:
            return None
        reported_at = min([member.reported_at for member in members if member.reported_at is not None])
        return Pace(max([member.step_s for member in members]), interval_s, now - reported_at)

    def stragglers(self, slow: Collection[int], start: float, now: float) -> list[tuple[int, float | None]]:
        """Return the ranks in `slow` and the members that are late for a decision, each with its delay.

        The delay is the number of seconds from `start` to the arrival of the report, or None if the report has not
        arrived.
        """
        if not slow and self.fresh_count == self.live_count:
            return []
        cadence_s = self.cadence_s()
        return [
            (rank, member.reported_at - start if member.fresh and member.reported_at is not None else None)
            for rank, member in self.members.items()
            if (rank in slow or (not member.fresh and is_late(member.pace(now), cadence_s))) and member.is_member
        ]

    def live_members(self) -> tuple[tuple[int, int], ...]:
        """Return the rank and the number of restarts of each live member."""
        return tuple((rank, member.incarnation) for rank, member in self.members.items() if member.is_member)

    def cadence_s(self) -> float:
        """Return the median of the members' times between reports, in seconds."""
        return cadence_s([member.interval_s for member in self.members.values() if member.live and member.admitted])

    def _count_live(self, more: int) -> None:
        self.live_count += more
        needed = (self._quorum * self.live_count).to_integral_value(ROUND_CEILING)
        self.quorum_count = max(1, int(needed))
