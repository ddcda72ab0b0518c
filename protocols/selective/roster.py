"""Lists a coordinator's members, and counts the live members and the members that have reported."""

from collections.abc import Collection, Iterable, Mapping
from decimal import ROUND_CEILING, Decimal

from asyncdist.protocols.selective.round.state import Member, ReportRecord
from asyncdist.protocols.selective.waiting import Pace, cadence_s, is_late


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
        """Replace the record of a lost member by a record of its new process, which requests admission."""
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
        """Record that a member, or a restarted rank that waits for admission, is lost or has left."""
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
        """Return the ranks of all live members, and of restarted ranks that wait for admission."""
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
