"""Chooses which members of an island send their weights to other islands, and tracks donors from other islands.

After a fixed number of decisions, the best member of an island, the *emigrant*, is announced to another island. There
it is called a *guest*, and can be a donor. This is the island model of evolutionary computing (Tanese 1989; Whitley,
Rana and Heckendorn 1999). Unlike in that model, an emigrant stays in its own island and sends only its weights.
"""

import math
from collections.abc import Mapping
from typing import Final, TypeVar

from asyncdist.protocols.ranking import order_worst_first
from asyncdist.protocols.selective.messages import End, Joined
from asyncdist.protocols.selective.roster import Member, ReportRecord, Send
from asyncdist.protocols.selective.waiting import FREE_ROUNDS, NOISE_S, plausible_s

T = TypeVar("T")

#: Maximum number of guests (donors from other islands) that are waiting for a round. A further guest replaces the
#: oldest.
GUEST_COUNT_MAX: Final = 4


class Migrants:
    """Tracks one island's emigrant (a donor for another island) and its guests (donors from other islands).

    Args:
        members: Record of each member, by rank. The guests of a round are added until the round ends.
        every: Number of decisions after which the next emigrant is chosen, or 0 to disable emigration.
    """

    def __init__(self, members: dict[int, Member], every: int, metric_mode: str) -> None:
        self._members = members
        self._every = every
        self._metric_mode = metric_mode
        self._invited: dict[int, int] = {}
        self._waiting: dict[int, tuple[ReportRecord, int]] = {}  # by guest: newest report, and number of restarts
        self._emigrant: int | None = None
        self._round = 0
        self.emigrant_count = 0
        self.named: tuple[int, ...] = ()

    def on_decision(self, number: int, reports: Mapping[int, ReportRecord]) -> None:
        """Choose the member with the best finite metric as a donor for another island, if such a donor is due."""
        if not self._every or number % self._every or not reports:
            return
        best = order_worst_first({rank: report.value for rank, report in reports.items()}, self._metric_mode)[-1]
        if math.isfinite(reports[best].value):
            self._emigrant = best
            self.emigrant_count += 1

    def take_emigrant(self) -> tuple[int, int] | None:
        """Return the rank and number of restarts of a newly chosen emigrant (donor for another island), or None."""
        rank, self._emigrant = self._emigrant, None
        return None if rank is None else (rank, self._members[rank].incarnation)

    def invite(self, rank: int, incarnation: int) -> None:
        """Record that a rank of another island has been invited to send its weights."""
        _put_newest(self._invited, rank, incarnation)

    def on_joined(self, rank: int, joined: Joined, now: float) -> bool:
        """Store an invited rank's newest report. Return False if the rank was not invited."""
        if self._invited.get(rank) != joined.incarnation:
            return False
        del self._invited[rank]
        report = ReportRecord(joined.iteration, joined.value, plausible_s(joined.step_time_s), now)
        _put_newest(self._waiting, rank, (report, joined.incarnation))
        return True

    def remove(self, rank: int) -> None:
        """Forget a rank of another island that is lost or has left."""
        self._invited.pop(rank, None)
        self._waiting.pop(rank, None)

    def usable(self, reports: Mapping[int, ReportRecord], oldest_at: float) -> dict[int, ReportRecord]:
        """Return the reports of other islands' ranks that can send their weights in the next round.

        A rank is excluded if its report is older than ``oldest_at``, or if its steps take more than twice as long as
        the slowest step in ``reports``.
        """
        if not self._waiting:
            return {}
        limit_s = FREE_ROUNDS * max([report.step_s for report in reports.values()], default=0.0) + NOISE_S
        return {
            rank: report
            for rank, (report, _) in self._waiting.items()
            if report.received_at >= oldest_at and report.step_s <= limit_s
        }

    def enter(self, guests: tuple[int, ...], round: int) -> None:
        """Add ranks of other islands to a round, without counting them as members. Forget all other waiting ranks."""
        for rank in guests:
            _, incarnation = self._waiting[rank]
            self._members[rank] = Member(joined=True, admitted=False, incarnation=incarnation)
        self.named, self._round = guests, round
        self._waiting.clear()

    def leave(self) -> None:
        """Remove the ranks of other islands from the members after their averaging round has ended."""
        for rank in self.named:
            del self._members[rank]
        self.named = ()

    def without_guests(self) -> dict[int, Member]:
        """Return all members of this island, without ranks of other islands that take part in a round."""
        return {rank: member for rank, member in self._members.items() if rank not in self.named}

    def end_messages(self) -> list[Send]:
        """Return messages that end the roles of other islands' ranks, because a new coordinator does not know them."""
        end = End("the coordinator is replaced")
        return [Send(rank, self._round, end) for rank in self.named if self._members[rank].live]


def _put_newest(guests: dict[int, T], rank: int, what: T) -> None:
    guests.pop(rank, None)
    guests[rank] = what
    if len(guests) > GUEST_COUNT_MAX:
        del guests[next(iter(guests))]
