"""Chooses who emigrates from one island, and keeps those who have come from others until a round takes them.

Pure, like `protocols.selective.rounds`, of which it is a part. An island is a population of its own, and every so many
decisions its best member is a donor in another one: the island model of evolutionary computing (Tanese 1989; Whitley,
Rana and Heckendorn 1999), with a donor in place of a copy that moves in. An emigrant stays where it is.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple, TypeVar

from asyncdist.protocols.ranking import order_worst_first
from asyncdist.protocols.selective.messages import End, Joined
from asyncdist.protocols.selective.round.state import Member, ReportRecord, Send
from asyncdist.protocols.selective.waiting import FREE_ROUNDS, NOISE_S, believed_s

T = TypeVar("T")

#: So many guests wait at a coordinator; of more the newest do.
GUEST_COUNT_MAX: Final = 4


class Guest(NamedTuple):
    """Holds what a coordinator knows of a rank of another island."""

    report: ReportRecord
    incarnation: int


class Migrants:
    """Keeps the emigrant and the guests of one coordinator.

    Args:
        members: Of the coordinator, which changes them; this puts the guests of a round among them, and takes them out.
        every: Decisions from one emigrant to the next; 0 for none.
        metric_mode: `"max"` or `"min"`.

    Attributes:
        emigrant_count: Those that were chosen so far.
        named: Guests of the round under way.
    """

    def __init__(self, members: dict[int, Member], every: int, metric_mode: str) -> None:
        self._members = members
        self._every = every
        self._metric_mode = metric_mode
        self._invited: dict[int, int] = {}
        self._waiting: dict[int, Guest] = {}
        self._emigrant: int | None = None
        self._round = 0
        self.emigrant_count = 0
        self.named: tuple[int, ...] = ()

    def on_decision(self, number: int, reports: Mapping[int, ReportRecord]) -> None:
        """Choose an emigrant, if it is time to: the best of those that were judged, if its metric is finite."""
        if not self._every or number % self._every or not reports:
            return
        best = order_worst_first({rank: report.value for rank, report in reports.items()}, self._metric_mode)[-1]
        if reports[best].is_finite:
            self._emigrant = best
            self.emigrant_count += 1

    def take_emigrant(self) -> tuple[int, int] | None:
        """Return, once, the member that is to give to another island, and its incarnation."""
        rank, self._emigrant = self._emigrant, None
        return None if rank is None else (rank, self._members[rank].incarnation)

    def invite(self, rank: int, incarnation: int) -> None:
        """Note that a rank of another island is asked to be a guest."""
        _put_newest(self._invited, rank, incarnation)

    def on_joined(self, rank: int, joined: Joined, now: float) -> bool:
        """Keep a guest that has come for the next round, with its newest report; False for any other rank."""
        if self._invited.get(rank) != joined.incarnation:
            return False
        del self._invited[rank]
        report = ReportRecord(joined.iteration, joined.value, believed_s(joined.step_time_s), now)
        _put_newest(self._waiting, rank, Guest(report, joined.incarnation))
        return True

    def remove(self, rank: int) -> None:
        """Forget a guest, which is gone."""
        self._invited.pop(rank, None)
        self._waiting.pop(rank, None)

    def usable(self, reports: Mapping[int, ReportRecord], oldest_at: float) -> dict[int, ReportRecord]:
        """Return the reports of guests that a round may name: none that is old, or much slower than all members."""
        if not self._waiting:
            return {}
        limit_s = FREE_ROUNDS * max([report.step_s for report in reports.values()], default=0.0) + NOISE_S
        return {
            rank: guest.report
            for rank, guest in self._waiting.items()
            if guest.report.received_at >= oldest_at and guest.report.step_s <= limit_s
        }

    def enter(self, guests: tuple[int, ...], round: int) -> None:
        """Let these take part in a round, as members that do not count; the others that waited are not needed."""
        for rank in guests:
            incarnation = self._waiting[rank].incarnation
            self._members[rank] = Member(joined=True, admitted=False, incarnation=incarnation)
        self.named, self._round = guests, round
        self._waiting.clear()

    def leave(self) -> None:
        """Let them go: the round has ended."""
        for rank in self.named:
            del self._members[rank]
        self.named = ()

    def without_guests(self) -> dict[int, Member]:
        """Return the members of the island."""
        return {rank: member for rank, member in self._members.items() if rank not in self.named}

    def dismissals(self) -> list[Send]:
        """Return what lets the guests of a round under way go: another rank coordinates, which knows none."""
        end = End("the coordinator is replaced")
        return [Send(rank, self._round, end) for rank in self.named if self._members[rank].live]


def _put_newest(guests: dict[int, T], rank: int, what: T) -> None:
    guests.pop(rank, None)
    guests[rank] = what
    if len(guests) > GUEST_COUNT_MAX:
        del guests[next(iter(guests))]
