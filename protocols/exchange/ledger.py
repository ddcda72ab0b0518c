"""Decides, on the leader of an exchange, which contributions each round averages, also after the loss of a rank.

A round passes through these states on the leader:

1. Members report their captured contributions, in the order of the rounds. When all members have contributed to this
   round or to a later one, the leader decides the round: its verdict names the donors, their weights, and thereby the
   owners of the slices. The donors and weights are the result of a function of the reports alone, which the policy
   chooses.
2. Members report that they have the mean. When all have it, the round is retired.

If a rank is lost that a decided round needs, or if this rank becomes the leader, the leader takes a *census*: all
members stop receiving means, and report their standing in each round. No mean is received during a census, so its
result is a consistent state: if a member has a round's mean, the others receive it from that member; if no member has
it, no model has changed, and the leader decides the round again, by the same function of the reports that are left.
(This is the recovery of a two-phase commit with a known set of participants: Bernstein, Hadzilacos and Goodman, 1987.)

All functions are pure: messages and losses in, decisions out.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Final, NamedTuple, TypeAlias

#: Largest attempt that a message may contain. A round is decided again only after a loss.
ATTEMPT_MAX: Final = 1 << 12


@dataclass(frozen=True, slots=True)
class Verdict:
    """The leader's decision on a round.

    Attributes:
        attempt: Number of the decision on this round, from 1; a later decision replaces earlier ones.
        donors: Ranks whose contributions are averaged, ascending; empty if no contribution was finite.
        weights: Weights of the donors, in the same order.
        norms: L2 norms of the donors' contributions, in the same order.
        holder: Rank that has the mean already, from which all slices are requested; -1 if the donors own the slices.
        taker: The only rank that receives this verdict's mean; it averages all slices itself. -1 if all members share
            the mean.
        scores: Further values of the donors' reports, in the same order; empty if the reports have none.
    """

    attempt: int
    donors: tuple[int, ...]
    weights: tuple[float, ...]
    norms: tuple[float, ...]
    holder: int = -1
    taker: int = -1
    scores: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        """Raise ValueError if a field is out of range or contradicts another field."""
        lengths = {len(self.donors), len(self.weights), len(self.norms), len(self.scores or self.donors)}
        if not 1 <= self.attempt <= 2 * ATTEMPT_MAX or len(lengths) != 1:
            raise ValueError(
                f"attempt must be from 1 to {2 * ATTEMPT_MAX}, with a weight and a norm for each donor, got "
                f"{self!r:.300}"
            )
        if list(self.donors) != sorted(set(self.donors)) or not all(weight > 0 for weight in self.weights):
            raise ValueError(f"donors must be ascending, and weights > 0, got {self!r:.300}")

    @property
    def sources(self) -> tuple[int, ...]:
        """Ranks whose data the members need: the holder, or all donors. A holder's donors may be lost."""
        return (self.holder,) if self.holder >= 0 else self.donors

    def among(self, ranks: Container[int]) -> "Verdict":
        """Return the verdict with only those donors that are among ``ranks``."""
        kept = [place for place, donor in enumerate(self.donors) if donor in ranks]
        return replace(
            self,
            donors=tuple(self.donors[place] for place in kept),
            weights=tuple(self.weights[place] for place in kept),
            norms=tuple(self.norms[place] for place in kept),
            scores=tuple(self.scores[place] for place in kept if self.scores),
        )

    def source_of(self, number: int) -> int:
        """Return the rank that provides the mean of slice ``number``: for a taker, the taker itself."""
        if self.taker >= 0:
            return self.taker
        return self.holder if self.holder >= 0 else self.donors[number % len(self.donors)]


class Report(NamedTuple):
    """One member's report on its contribution to a round.

    Attributes:
        weight: Weight of the contribution, such as its number of tokens.
        norm: L2 norm of the contribution; NaN or infinite if it must be left out.
        scores: Values that the policy's function of the reports needs in addition; () for most policies.
    """

    weight: float
    norm: float
    scores: tuple[float, ...] = ()


#: Function of the reports on a round, by rank, that returns the weight of each donor by rank; all others are left out.
#: A donor's norm must be finite.
Weighing: TypeAlias = Callable[[Mapping[int, Report]], Mapping[int, float]]


#: Function of a round's number, a rank and all members that returns the members whose contributions the rank averages,
#: or None if all members share one mean in this round.
Partners: TypeAlias = Callable[[int, int, Sequence[int]], Sequence[int] | None]


def all_members(number: int, rank: int, members: Sequence[int]) -> None:
    """Let all members share one mean in each round."""
    del number, rank, members


def reported_weights(reports: Mapping[int, Report]) -> dict[int, float]:
    """Return the reported weights of all contributions whose norm is finite."""
    return {rank: report.weight for rank, report in reports.items() if isfinite(report.norm)}


@dataclass(frozen=True, slots=True)
class Standing:
    """One member's standing in one round.

    Attributes:
        attempt: Attempt of the last verdict that this member knows; 0 if it knows none.
        has_merged: Whether the member has the mean.
        weight, norm: The member's contribution, if it is captured; 0 if the member was admitted after the round had
            begun, and only receives the mean.
        donors, weights, norms: The verdict's donors if the member has the mean; otherwise empty.
        scores: Further values of the member's report; see :class:`Report`.
        donor_scores: The verdict's scores if the member has the mean; otherwise empty.
    """

    round: int
    attempt: int
    has_merged: bool
    weight: float
    norm: float
    donors: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()
    scores: tuple[float, ...] = ()
    donor_scores: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        """Raise ValueError if a field is out of range or contradicts another field."""
        if self.round < 1 or not 0 <= self.attempt <= ATTEMPT_MAX:
            raise ValueError(
                f"round must be >= 1, and attempt from 0 to {ATTEMPT_MAX}, got round {self.round} and attempt "
                f"{self.attempt}"
            )
        if self.has_merged:
            Verdict(self.attempt, self.donors, self.weights, self.norms, scores=self.donor_scores)


class Decide(NamedTuple):
    """Instruction: send a round's verdict to some members."""

    round: int
    verdict: Verdict
    dests: tuple[int, ...]


class TakeCensus(NamedTuple):
    """Instruction: let all members hold, and report their standings."""

    number: int


class Retire(NamedTuple):
    """Instruction: notify all members that a round is retired."""

    round: int


Instruction: TypeAlias = Decide | TakeCensus | Retire


@dataclass(slots=True, eq=False)
class _Round:
    """State of one round that is not retired."""

    captured: dict[int, Report] = field(default_factory=dict)  # by rank
    excused: set[int] = field(default_factory=set)  # members that were admitted after the round had begun
    merged: set[int] = field(default_factory=set)
    attempt: int = 0
    verdict: Verdict | None = None
    taken: dict[int, Verdict] = field(default_factory=dict)  # by taker, if the members do not share one mean

    def needs(self, rank: int) -> bool:
        """Return whether a member may still request data from a rank."""
        missing = [verdict for taker, verdict in self.taken.items() if taker not in self.merged]
        found = missing if self.verdict is None else [self.verdict, *missing]
        return any(rank in verdict.sources for verdict in found)


class Ledger:
    """The leader's view of all rounds.

    Args:
        members: Ranks that take part.
        last_retired: Last round that is known to be retired.
        weigh: Pure function that chooses the donors and their weights, equal on all members.
        partners: Pure function that chooses whose contributions a member averages, equal on all members. A member's
            verdict follows when these contributions and its own are reported, so only partners wait for each other.

    Attributes:
        census: Number of the latest census; 0 before the first.
    """

    def __init__(
        self,
        members: Iterable[int],
        last_retired: int = 0,
        weigh: Weighing = reported_weights,
        partners: Partners = all_members,
    ) -> None:
        self.members = set(members)
        self._partners = partners
        self.last_retired = last_retired
        self._weigh = weigh
        self.census = 0
        self._awaited: set[int] | None = None  # members whose answer to the census is awaited; None without a census
        self._standings: dict[int, tuple[Standing, ...]] = {}
        self._rounds: dict[int, _Round] = {}

    # -- events -----------------------------------------------------------------------------------------------------

    def take_over(self) -> None:
        """Begin as the successor of a lost leader: all members hold and report when they notice the loss."""
        self._begin_census(0)

    def on_captured(
        self, rank: int, round: int, weight: float, norm: float, scores: tuple[float, ...] = ()
    ) -> list[Instruction]:
        """Record a member's contribution."""
        if rank not in self.members or round <= self.last_retired:
            return []
        self._round(round).captured[rank] = Report(weight, norm, scores)
        return self._decisions()

    def on_merged(self, rank: int, round: int) -> list[Instruction]:
        """Record that a member has a round's mean."""
        found = self._rounds.get(round)
        if rank not in self.members or found is None:
            return []
        found.merged.add(rank)
        return self._retirements()

    def on_census(self, rank: int, number: int, standings: Iterable[Standing], last_retired: int) -> list[Instruction]:
        """Record a member's answer to a census."""
        if self._awaited is None or rank not in self._awaited or number < self.census:
            return []
        self._awaited.discard(rank)
        self._standings[rank] = tuple(standings)
        self.last_retired = max(self.last_retired, last_retired)
        return self._end_census()

    def on_admitted(self, rank: int, by: int) -> list[Instruction]:
        """Record a new member, which has the state of member ``by``.

        It receives the means of all rounds, but does not contribute to rounds to which ``by`` has contributed already.
        """
        assert self._awaited is None, "no member is admitted during a census"
        self.members.add(rank)
        made: list[Instruction] = []
        for number, each in sorted(self._rounds.items()):
            if by in each.captured:
                each.excused.add(rank)
            if each.verdict is not None:
                made.append(Decide(number, each.verdict, (rank,)))
        return [*made, *self._decisions()]

    @property
    def can_admit(self) -> bool:
        """True if a member may be admitted now, since no census is in progress."""
        return self._awaited is None

    def on_gone(self, rank: int) -> list[Instruction]:
        """Record that a member is lost or has left. A round that needs its data is decided again."""
        if rank not in self.members:
            return []
        self.members.discard(rank)
        self._standings.pop(rank, None)
        is_needed = False
        for each in self._rounds.values():
            each.captured.pop(rank, None)
            each.merged.discard(rank)
            each.taken.pop(rank, None)
            is_needed |= each.needs(rank)
        if self._awaited is not None:
            self._awaited.discard(rank)
            return self._end_census()
        if is_needed:
            return self._begin_census(self.census + 1)
        return [*self._retirements(), *self._decisions()]

    # -- decisions --------------------------------------------------------------------------------------------------

    def _round(self, number: int) -> _Round:
        return self._rounds.setdefault(number, _Round())

    def _decisions(self) -> list[Instruction]:
        """Decide all rounds to which every member has contributed, or every partner of a member.

        If all ranks that have contributed to a round are lost, and no member will contribute, it has no donors.
        """
        if self._awaited is not None or not self.members:
            return []
        made: list[Instruction] = []
        for number, each in sorted(self._rounds.items()):
            if not self._is_shared(number):
                made += self._taken(number, each)
            elif each.verdict is None and self._awaited_in(number, each) <= each.captured.keys():
                each.verdict = self._verdict(each)
                made.append(Decide(number, each.verdict, tuple(sorted(self.members - each.merged))))
        return made

    def _awaited_in(self, number: int, each: _Round) -> set[int]:
        """Return the members that contribute to a round: not those that have contributed to a later one only."""
        passed = {rank for later, other in self._rounds.items() if later > number for rank in other.captured}
        return self.members - each.excused - passed

    def _is_shared(self, number: int) -> bool:
        """Return whether all members share one mean in a round."""
        return not self.members or self._partners(number, min(self.members), tuple(sorted(self.members))) is None

    def _taken(self, number: int, each: _Round) -> list[Instruction]:
        """Decide a round for each member to which its partners and the member itself have contributed."""
        made: list[Instruction] = []
        members = tuple(sorted(self.members))
        for rank in members:
            if rank in each.merged or rank in each.taken:
                continue
            partners = set(self._partners(number, rank, members) or ()) & self.members
            if (partners | {rank}) - each.excused <= each.captured.keys():
                each.taken[rank] = self._verdict(each, partners, rank)
                made.append(Decide(number, each.taken[rank], (rank,)))
        return made

    def _verdict(self, each: _Round, partners: Iterable[int] | None = None, taker: int = -1) -> Verdict:
        """Return the next verdict on a round, from the reports of all members or of a taker's partners."""
        each.attempt += 1
        ranks = each.captured.keys() if partners is None else each.captured.keys() & set(partners)
        chosen = self._weigh({rank: each.captured[rank] for rank in sorted(ranks)}) if ranks else {}
        donors = tuple(sorted(chosen))
        norms = tuple(each.captured[rank].norm for rank in donors)
        scores = tuple(each.captured[rank].scores for rank in donors)
        given = scores if any(scores) else ()
        return Verdict(each.attempt, donors, tuple(chosen[rank] for rank in donors), norms, taker=taker, scores=given)

    def _retirements(self) -> list[Instruction]:
        """Retire all rounds whose mean every member has, in order."""
        made: list[Instruction] = []
        while self._rounds and self._awaited is None and self.members:
            number = min(self._rounds)
            if not self.members <= self._rounds[number].merged:
                break
            del self._rounds[number]
            self.last_retired = number
            made.append(Retire(number))
        return made

    def _begin_census(self, number: int) -> list[Instruction]:
        self.census = number
        self._awaited = set(self.members)
        self._standings = {}
        return [TakeCensus(number)]

    def _end_census(self) -> list[Instruction]:
        """Once every member has answered the census, decide all rounds again."""
        if self._awaited is None or self._awaited:
            return []
        self._awaited = None
        rounds: dict[int, _Round] = {}
        holders: dict[int, tuple[int, Standing]] = {}
        for rank, standings in sorted(self._standings.items()):
            for own in standings:
                if own.round <= self.last_retired:
                    continue
                each = rounds.setdefault(own.round, _Round())
                each.attempt = max(each.attempt, own.attempt)
                if own.weight:
                    each.captured[rank] = Report(own.weight, own.norm, own.scores)
                elif not own.has_merged:
                    each.excused.add(rank)
                if own.has_merged:
                    each.merged.add(rank)
                    if self._is_shared(own.round):  # otherwise each member's mean is different
                        holders.setdefault(own.round, (rank, own))
        for number, known in self._rounds.items():  # contributions that were reported after the answer
            each = rounds.setdefault(number, _Round())
            each.attempt = max(each.attempt, known.attempt)
            each.excused |= known.excused & self.members
            for rank in self.members & known.captured.keys():
                each.captured.setdefault(rank, known.captured[rank])
        self._rounds = rounds
        made: list[Instruction] = []
        for number, (rank, own) in sorted(holders.items()):
            each = rounds[number]
            each.attempt += 1
            each.verdict = Verdict(
                each.attempt, own.donors, own.weights, own.norms, holder=rank, scores=own.donor_scores
            )
            # The holder needs the verdict as well, to offer the mean under the new attempt.
            made.append(Decide(number, each.verdict, tuple(sorted({rank, *self.members} - (each.merged - {rank})))))
        # A member may have missed the last message about retired rounds.
        retired: list[Instruction] = [Retire(self.last_retired)] if self.last_retired else []
        return [*retired, *made, *self._retirements(), *self._decisions()]
