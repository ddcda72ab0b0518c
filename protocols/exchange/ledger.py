"""Decides which contributions each averaging round includes, even after the loss of a rank. Used by the leader.

A round passes through these states on the leader:

1. Members report their captured contributions, in the order of the rounds. When all members have contributed to this
   round or to a later one, the leader decides the round. Its verdict names the donors and their weights. These
   determine which rank averages each slice. The policy's function chooses donors and weights from the reports alone.
   With a *quorum*, the leader waits only for the quorum and a grace period. A late member's contribution counts in a
   later round.
2. Members report that they have the mean. When all have it, the round is retired. With a quorum, it is also retired
   when a later round of the same fragment is decided. A member without the mean is then *behind*: it receives the state
   of a member that has the mean (:mod:`protocols.exchange.catch_up`).

If a rank is lost that a decided round needs, or if this rank becomes the leader, the leader takes a *census*. All
members then stop receiving means, and report their state in each round. No mean is received during a census, so its
result is consistent. If a member has a round's mean, the others receive it from that member. If no member has the mean,
no model has changed, and the leader decides the round again from the remaining reports. If all members that were not
behind are lost, the newest remaining state counts as the state after the last retired round. (This is the recovery of a
two-phase commit with a known set of participants: Bernstein, Hadzilacos and Goodman, 1987.)

All functions are pure: they map messages and losses to decisions.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, isfinite
from typing import NamedTuple, Self, TypeAlias

from asyncdist import validation
from asyncdist.protocols.exchange.messages import RoundState, Verdict


class Report(NamedTuple):
    """Describes one member's contribution to a round, in its report to the leader.

    Attributes:
        weight: Weight of the contribution, such as its number of tokens.
        norm: L2 norm of the contribution. NaN or infinite if the contribution must be left out.
        scores: Further values for the policy's function that chooses the donors; () for most policies.
    """

    weight: float
    norm: float
    scores: tuple[float, ...] = ()


#: Function that maps the reports on a round, by rank, to the weight of each donor, by rank. Ranks that are missing from
#: the result are left out. A donor's norm must be finite.
Weighing: TypeAlias = Callable[[Mapping[int, Report]], Mapping[int, float]]


#: The members whose contributions a rank averages, or a mapping from these members to factors by which their weights
#: are multiplied. None if all members share one mean.
Chosen: TypeAlias = Sequence[int] | Mapping[int, float] | None
#: Function of a round's number, a rank and all members that returns whose contributions the rank averages.
Partners: TypeAlias = Callable[[int, int, Sequence[int]], Chosen]


def all_members(number: int, rank: int, members: Sequence[int]) -> None:
    """Return None, so that all members share one mean in each round."""
    del number, rank, members


def reported_weights(reports: Mapping[int, Report]) -> dict[int, float]:
    """Return the reported weights of all contributions whose norm is finite."""
    return {rank: report.weight for rank, report in reports.items() if isfinite(report.norm)}


def verdict_alone(report: Report, weights: Mapping[int, float]) -> Verdict:
    """Return the only member's decision on a round. ``weights`` is empty if its contribution is left out."""
    scores = (report.scores,) * len(weights) if report.scores else ()
    return Verdict(1, tuple(weights), tuple(weights.values()), (report.norm,) * len(weights), scores=scores)


class Decide(NamedTuple):
    """Instructs the leader to send the decision on an averaging round to the ranks ``dests``."""

    round: int
    verdict: Verdict
    dests: tuple[int, ...]


class TakeCensus(NamedTuple):
    """Instructs the leader to make all members stop receiving means and report the state of their rounds."""

    number: int


class Retire(NamedTuple):
    """Instructs the leader to notify all members that the means of rounds up to ``round`` are no longer offered.

    With a quorum, this applies only to rounds of the same fragment (separately averaged part of the model).

    Attributes:
        holder: Member that has the state after the round, or the newest remaining state. -1 without a quorum.
    """

    round: int
    holder: int = -1


class AwaitGrace(NamedTuple):
    """Instructs the leader to call :meth:`Ledger.on_grace_over` after a grace period, which starts now."""

    round: int
    number: int


Instruction: TypeAlias = Decide | TakeCensus | Retire | AwaitGrace


@dataclass(frozen=True, slots=True)
class Quorum:
    """Defines when a round is decided without waiting for all members.

    Attributes:
        count: Number of contributions that suffice. If fewer members are left, all must contribute.
        grace_s: Seconds to wait for further contributions when the quorum is reached.
        members_wait: Whether a member waits for a fragment's mean before it contributes to other fragments. If members
            are waiting for different fragments, perhaps no round can reach the quorum. The first of these rounds is
            then decided without the quorum.
    """

    count: int
    grace_s: float
    members_wait: bool

    @classmethod
    def of_members(cls, members: int, count: int | None, grace_s: float, members_wait: bool) -> Self | None:
        """Return the quorum that a policy's options ask for, or None if ``count`` is None.

        A quorum equal to the number of members is kept: the saved job may have had more members, some of them late.

        Raises:
            ValueError: ``count`` is larger than the number of members.
        """
        if count is not None and count > members:
            validation.refuse("quorum", count, f"None, or from 1 to the number of members ({members})")
        return None if count is None else cls(count, grace_s, members_wait)

    def must_abdicate(self, missed: int, members: int) -> bool:
        """Return whether a member that has missed this many rounds must be slower than the others.

        A leader for which this is true is replaced, because it delays all members. Among equally fast members, each
        contributes to one of ``members / count`` rounds. By chance, it may miss one more.

        Args:
            missed: Number of a fragment's rounds since the member's last contribution.
            members: Number of living members.
        """
        return missed > ceil(members / self.count) + 1


@dataclass(slots=True, eq=False)
class _Round:
    captured: dict[int, Report] = field(default_factory=dict)  # by member: report on its contribution
    exempt: set[int] = field(default_factory=set)  # members admitted after the round had begun
    merged: set[int] = field(default_factory=set)
    attempt: int = 0
    verdict: Verdict | None = None
    member_verdicts: dict[int, Verdict] = field(default_factory=dict)  # by receiver: its own verdict, if means differ
    grace: int = 0  # number of the grace period; 0 before its start
    is_grace_over: bool = False

    def needs(self, rank: int) -> bool:
        """Return whether a member may still request data from ``rank`` for this round."""
        missing = [verdict for receiver, verdict in self.member_verdicts.items() if receiver not in self.merged]
        found = missing if self.verdict is None else [self.verdict, *missing]
        return any(rank in verdict.sources for verdict in found)


class Ledger:
    """Decides all averaging rounds, on the leader. Round n belongs to fragment ``(n - 1) % fragment_count``.

    Each event method returns instructions that the leader must carry out.

    Args:
        retired: Last round of each fragment whose mean is no longer offered, or 0.
        weigh: Pure function that chooses the donors and their weights. Equal on all members.
        partners: Pure function that chooses whose contributions a member averages. Equal on all members. A member's
            round is decided when these contributions and its own are reported, so only partners wait for each other.
        quorum: Condition under which a round is decided without all members, or None to wait for all members.

    Attributes:
        census: Number of the latest census, or 0 before the first.
    """

    def __init__(
        self,
        members: Iterable[int],
        retired: Sequence[int] = (0,),
        weigh: Weighing = reported_weights,
        partners: Partners = all_members,
        *,
        quorum: Quorum | None = None,
    ) -> None:
        self.members = set(members)
        self._partners = partners
        self.retired = list(retired)
        self._weigh = weigh
        self._quorum = quorum
        self._grace_count = 0
        self.census = 0
        self._awaited: set[int] | None = None  # members whose census answers are missing; None without a census
        self._round_states: dict[int, tuple[RoundState, ...]] = {}
        self._rounds: dict[int, _Round] = {}
        self._last: dict[int, int] = {}  # by rank: newest round to which it has contributed, or need not contribute
        self._newest: dict[int, list[int]] = {}  # by rank: last round of each fragment whose state the rank has
        self._ending: set[int] = set()  # members that contribute to no further round
        self._paused: set[int] = set()  # members that asked rounds not to wait for them
        self._holders = [-1] * len(self.retired)  # by fragment: rank that has the state after the last retired round

    # -- events -----------------------------------------------------------------------------------------------------

    def take_over(self) -> None:
        """Start as the successor of a lost leader, and wait for the reports that all members send on their own."""
        self._begin_census(0)

    def on_captured(
        self, rank: int, round: int, weight: float, norm: float, scores: tuple[float, ...] = ()
    ) -> list[Instruction]:
        """Record a member's report that its contribution to a round can be requested."""
        if rank not in self.members or round <= self.retired[self._fragment(round)]:
            return []
        self._paused.discard(rank)
        found = self._round(round)
        if self._quorum is None or found.verdict is None:  # a contribution after the decision counts in a later round
            found.captured[rank] = Report(weight, norm, scores)
            self._note_passed(rank, round)
        return self._decisions()

    def on_grace_over(self, round: int, number: int) -> list[Instruction]:
        """Decide a round with the contributions that have arrived, unless a later grace period has started."""
        if not self.is_in_grace(round, number):
            return []
        self._rounds[round].is_grace_over = True
        return self._decisions()

    def is_in_grace(self, round: int, number: int) -> bool:
        """Return whether a round still waits for the end of grace period ``number``."""
        found = self._rounds.get(round)
        return found is not None and found.grace == number and found.verdict is None

    def on_merged(self, rank: int, round: int) -> list[Instruction]:
        """Record that a member has a round's mean, or a state that includes it."""
        if rank not in self.members:
            return []
        newest, fragment = self._newest_of(rank), self._fragment(round)
        newest[fragment] = max(newest[fragment], round)
        if self._quorum is None and round not in self._rounds:
            return []
        for number, each in self._rounds.items():
            is_earlier = number < round and self._fragment(number) == fragment
            if number == round or (is_earlier and self._quorum is not None):
                each.merged.add(rank)
        return self._retirements()

    def on_census(
        self,
        rank: int,
        number: int,
        round_states: Iterable[RoundState],
        retired: Sequence[int] = (),
        newest: Sequence[int] = (),
    ) -> list[Instruction]:
        """Record a member's report on its rounds, which the leader collects after a loss.

        Args:
            retired: Last retired round of each fragment, as known to the member; () if it knows none.
            newest: Last round of each fragment whose state the member has; () if it has no state.
        """
        if self._awaited is None or rank not in self._awaited or number < self.census:
            return []
        self._awaited.discard(rank)
        self._round_states[rank] = tuple(round_states)
        # Members offer the means of old rounds until they know that no member needs them. With a quorum, some members
        # know this of later rounds than other members do.
        self.retired = list(map(max, self.retired, retired or self.retired))
        self._newest[rank] = list(newest or [0] * len(self.retired))
        return self._end_census()

    def on_admitted(self, rank: int, by: int) -> list[Instruction]:
        """Record a new member, which has loaded the state of member ``by``.

        The newcomer receives the means of all rounds. It does not contribute to rounds to which ``by`` had contributed.
        """
        assert self._awaited is None, "no member is admitted during a census"
        self.members.add(rank)
        self._ending.discard(rank)
        self._paused.discard(rank)
        self._newest[rank] = list(self._newest_of(by))
        # With a quorum, the new member's state may be old, so it must know which means are no longer offered.
        made = [] if self._quorum is None else self._repeated_retirements()
        for number, each in sorted(self._rounds.items()):
            if by in each.captured:
                each.exempt.add(rank)
                self._note_passed(rank, number)
            if each.verdict is not None:
                made.append(Decide(number, each.verdict, (rank,)))
        return [*made, *self._decisions()]

    @property
    def can_admit(self) -> bool:
        """True if a restarted rank may be admitted. False while members report after a loss."""
        return self._awaited is None

    def on_paused(self, rank: int) -> list[Instruction]:
        """Record that rounds do not wait for a member until it contributes again."""
        self._paused.add(rank)
        return self._decisions()

    def on_ending(self, rank: int) -> list[Instruction]:
        """Record that a member will contribute to no further round."""
        if rank in self.members:
            self._ending.add(rank)
        return self._decisions()

    def released(self) -> set[int]:
        """Return the departing members that may leave, because no other member needs their contributions or state."""
        others = self.members - self._ending
        behind = set().union(*map(self._members_behind, range(len(self.retired))))
        if self._awaited is not None or (others and others <= behind):
            return set()
        return self._ending & self.members - {rank for each in self._rounds.values() for rank in each.captured}

    def on_gone(self, rank: int) -> list[Instruction]:
        """Record that a member is lost or has left. Rounds that need its data are decided again."""
        if rank not in self.members:
            return []
        self.members.discard(rank)
        self._round_states.pop(rank, None)
        self._newest.pop(rank, None)
        self._last.pop(rank, None)
        is_needed = any(holder == rank and self._members_behind(place) for place, holder in enumerate(self._holders))
        for each in self._rounds.values():
            each.captured.pop(rank, None)
            each.merged.discard(rank)
            each.member_verdicts.pop(rank, None)
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

    def _fragment(self, number: int) -> int:
        return (number - 1) % len(self.retired)

    def _newest_of(self, rank: int) -> list[int]:
        return self._newest.setdefault(rank, [0] * len(self.retired))

    def _members_behind(self, fragment: int) -> set[int]:
        """Return the members that lack a model fragment's last mean that is no longer offered."""
        if self._quorum is None:
            return set()
        return {rank for rank in self.members if self._newest_of(rank)[fragment] < self.retired[fragment]}

    def _decisions(self) -> list[Instruction]:
        """Decide each round to which all members, a member's partners, or a quorum have contributed.

        If all ranks that have contributed to a round are lost, and no other member will contribute, the round is
        decided without donors.
        """
        if self._awaited is not None or not self.members:
            return []
        made: list[Instruction] = []
        members = tuple(sorted(self.members))
        passed = min(self._last.get(rank, 0) for rank in members)
        for number, each in sorted(self._rounds.items()):
            if each.verdict is not None:
                continue
            if not self._is_shared(number, members):
                made += self._decide_per_member(number, each, members)
            elif number <= passed if self._quorum is None else self._is_ready(number, each):
                made.append(self._decide(number, each))
            elif self._has_quorum(each) and not each.grace:
                self._grace_count += 1
                each.grace = self._grace_count
                made.append(AwaitGrace(number, each.grace))
        return made or self._resolve_deadlock()

    def _decide(self, number: int, each: _Round) -> Decide:
        each.verdict = self._verdict(each)
        return Decide(number, each.verdict, tuple(sorted(self.members - each.merged)))

    def _resolve_deadlock(self) -> list[Instruction]:
        """If all members that train wait for rounds that cannot reach the quorum, decide the first of these rounds."""
        if self._quorum is None or not self._quorum.members_wait:
            return []
        waits = {number: each for number, each in self._rounds.items() if each.verdict is None and each.captured}
        waiting = {rank for each in waits.values() for rank in each.captured}
        training = self.members - self._paused - self._ending
        if not waits or not training <= waiting or any(map(self._has_quorum, waits.values())):
            return []
        first = min(waits)
        return [self._decide(first, waits[first])]

    def _is_ready(self, number: int, each: _Round) -> bool:
        """Return whether all expected members have contributed, or a quorum has and its grace period is over."""
        assert self._quorum is not None, "without a quorum, a round is ready when all members have passed it"
        later = self._later(number)
        missing = self.members - each.exempt - later - self._ending - self._paused - each.captured.keys()
        if not missing and (each.captured or later or each.attempt):  # all donors of an earlier attempt may be lost
            return True
        is_grace_over = (
            each.is_grace_over or not self._quorum.grace_s or missing <= self._members_behind(self._fragment(number))
        )
        return is_grace_over and self._has_quorum(each)

    def _has_quorum(self, each: _Round) -> bool:
        return self._quorum is not None and len(each.captured) >= min(self._quorum.count, len(self.members))

    def _later(self, number: int) -> set[int]:
        """Return the members whose contributions count in a later round instead of in round ``number``.

        If all other members are lost, these members need an empty decision on the round.
        """
        count = len(self.retired)
        later = [each for each in self._rounds if each > number and (each - number) % count == 0]
        return self.members & {rank for each in later for rank in self._rounds[each].captured}

    def _note_passed(self, rank: int, number: int) -> None:
        """Record that no round up to ``number`` waits for a member.

        Members contribute in the order of the rounds. A newcomer is exempt from the rounds to which the leader had
        contributed before it admitted the newcomer.
        """
        self._last[rank] = max(number, self._last.get(rank, 0))

    def _is_shared(self, number: int, members: tuple[int, ...]) -> bool:
        """Return whether all members share one mean in a round."""
        return not members or self._partners(number, members[0], members) is None

    def _decide_per_member(self, number: int, each: _Round, members: tuple[int, ...]) -> list[Instruction]:
        """Decide a round separately for each member if the member and its partners have contributed."""
        made: list[Instruction] = []
        for rank in members:
            if rank in each.merged or rank in each.member_verdicts:
                continue
            if rank not in each.captured and rank not in each.exempt:
                continue
            chosen = self._partners(number, rank, members) or ()
            partners = {partner: _factor(chosen, partner) for partner in chosen if partner in self.members}
            if partners.keys() - each.exempt <= each.captured.keys():
                each.member_verdicts[rank] = self._verdict(each, partners, rank)
                made.append(Decide(number, each.member_verdicts[rank], (rank,)))
        return made

    def _verdict(self, each: _Round, partners: Mapping[int, float] | None = None, receiver: int = -1) -> Verdict:
        """Return the leader's next decision on a round (donors and weights), among all members or ``partners``."""
        each.attempt += 1
        ranks = each.captured.keys() if partners is None else each.captured.keys() & partners.keys()
        chosen = self._weigh({rank: each.captured[rank] for rank in sorted(ranks)}) if ranks else {}
        donors = tuple(sorted(chosen))
        norms = tuple(each.captured[rank].norm for rank in donors)
        scores = tuple(each.captured[rank].scores for rank in donors)
        given = scores if any(scores) else ()
        late = () if self._quorum is None else tuple(sorted(self.members - each.captured.keys()))
        weights = tuple(chosen[rank] * (1.0 if partners is None else partners[rank]) for rank in donors)
        return Verdict(each.attempt, donors, weights, norms, receiver=receiver, scores=given, late=late)

    def _retirements(self) -> list[Instruction]:
        """End the rounds whose mean is no longer needed. Without a quorum, they end in order."""
        made: list[Instruction] = []
        if self._awaited is not None or not self.members:
            return made
        waiting: set[int] = set()  # fragments with an earlier round that has not ended
        for number, each in sorted(self._rounds.items()):
            fragment = self._fragment(number)
            if fragment in waiting or not (self.members <= each.merged or self._can_end_without_all(number, each)):
                if self._quorum is None:  # without a quorum, rounds end in order
                    break
                waiting.add(fragment)
                continue
            del self._rounds[number]
            if self._quorum is None:
                self.retired = [number] * len(self.retired)
            else:
                self.retired[fragment] = number
                self._holders[fragment] = self._holder(number, each)
            made.append(Retire(number, self._holders[fragment]))
        return made

    def _holder(self, number: int, each: _Round) -> int:
        """Return a member that has a round's mean, preferably one that has contributed to the newest round."""
        holders = self.members & each.merged
        newest = self._rounds.get(number + len(self.retired), each).verdict or each.verdict
        return min(holders.intersection(() if newest is None else newest.donors) or holders)

    def _can_end_without_all(self, number: int, each: _Round) -> bool:
        """Return whether a round can end although some members do not have its mean."""
        fragment, later = self._fragment(number), self._rounds.get(number + len(self.retired))
        if self._quorum is None or not self.members & each.merged:
            return False
        has_later = later is not None and later.verdict is not None
        return has_later or self.members - each.merged <= self._members_behind(fragment)

    def _repeated_retirements(self) -> list[Instruction]:
        """Return instructions that repeat, for each model fragment, which means are no longer offered."""
        if self._quorum is None:
            return [Retire(max(self.retired))] if any(self.retired) else []
        rounds = zip(self.retired, self._holders, strict=True)
        return [Retire(number, holder) for number, holder in rounds if number]

    def _begin_census(self, number: int) -> list[Instruction]:
        self.census = number
        self._awaited = set(self.members)
        self._round_states = {}
        return [TakeCensus(number)]

    def _end_census(self) -> list[Instruction]:
        """Decide all rounds again when every member has reported the state of its rounds."""
        if self._awaited is None or self._awaited:
            return []
        self._awaited = None
        if self._quorum is not None:
            self._count_as_retired()
        members, rounds = tuple(sorted(self.members)), dict[int, _Round]()
        holders: dict[int, tuple[int, RoundState]] = {}
        for rank, round_states in sorted(self._round_states.items()):
            for own in round_states:
                if own.round <= self.retired[self._fragment(own.round)]:
                    continue
                each = rounds.setdefault(own.round, _Round())
                each.attempt = max(each.attempt, own.attempt)
                if own.weight:
                    each.captured[rank] = Report(own.weight, own.norm, own.scores)
                elif not own.has_merged:
                    each.exempt.add(rank)
                if own.has_merged:
                    each.merged.add(rank)
                    if self._is_shared(own.round, members):  # otherwise each member's mean is different
                        holders.setdefault(own.round, (rank, own))
        for number, known in self._rounds.items():  # add contributions that were reported after a member had answered
            if number <= self.retired[self._fragment(number)]:
                continue
            each = rounds.setdefault(number, _Round())
            each.attempt = max(each.attempt, known.attempt)
            each.exempt |= known.exempt & self.members
            for rank in self.members & known.captured.keys():
                each.captured.setdefault(rank, known.captured[rank])
        self._rounds, self._last = rounds, {}
        for number, each in rounds.items():
            for rank in (*each.captured, *each.exempt):
                self._note_passed(rank, number)
        self._fill_gaps()
        made: list[Instruction] = []
        for number, (rank, own) in sorted(holders.items()):
            each = rounds[number]
            each.attempt += 1
            given = own.donors, own.weights, own.norms
            each.verdict = Verdict(each.attempt, *given, holder=rank, scores=own.donor_scores, late=own.late)
            # The holder of the mean also needs the decision, because it offers the mean under the new attempt number.
            made.append(Decide(number, each.verdict, tuple(sorted({rank, *self.members} - (each.merged - {rank})))))
        return [*self._repeated_retirements(), *made, *self._retirements(), *self._decisions()]

    def _count_as_retired(self) -> None:
        """Count a round as retired if a member has the state after it, but no member can offer its mean.

        The member with the newest state becomes the holder. If all members with newer states are lost, its state may be
        older than the last retired round.
        """
        offered = {own.round for each in self._round_states.values() for own in each if own.has_merged}
        for fragment, last in enumerate(self.retired):
            newest = {rank: self._newest_of(rank)[fragment] for rank in self.members}
            self._holders[fragment] = max(newest, key=lambda rank: (newest[rank], -rank))
            candidates = range(max(newest.values()), last, -len(self.retired))
            self.retired[fragment] = next((number for number in candidates if number not in offered), last)

    def _fill_gaps(self) -> None:
        """Add missing rounds before known rounds. They get no donors, because all their donors are lost."""
        if self._quorum is None:
            return
        count = len(self.retired)
        for number in list(self._rounds):
            fragment = self._fragment(number)
            first = self.retired[fragment] + count if self.retired[fragment] else fragment + 1
            for earlier in range(first, number, count):
                self._round(earlier)


def _factor(chosen: Chosen, partner: int) -> float:
    return chosen[partner] if isinstance(chosen, Mapping) else 1.0
