"""Tests the leader's ledger of an exchange in a model of the members, whose events and losses are drawn.

The model runs the members' rules with plain data: queues that keep the order between two ranks, losses at any moment,
and a scheduler that draws the next event.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any, Final

import pytest
from support.seeds import seeds
from support.weighing import better_half

from asyncdist.protocols.exchange.ledger import (
    Decide,
    Instruction,
    Ledger,
    Report,
    Retire,
    TakeCensus,
    reported_weights,
)
from asyncdist.protocols.exchange.messages import RoundState, Verdict

NAN: Final = math.nan


@dataclass
class Round:
    """A member's state of one round, as in ``MemberRound``."""

    weight: float = 0.0
    norm: float = 0.0
    scores: tuple[float, ...] = ()
    attempt: int = 0
    verdict: Verdict | None = None
    has_merged: bool = False
    given: set[int] = field(default_factory=set)  # donors whose contributions have arrived here
    means: set[int] = field(default_factory=set)  # owners whose slices have arrived here
    offered: dict[int, Verdict] = field(default_factory=dict)  # means of this member's slices, by attempt


class Member:
    """The rules of ``Exchange`` for one member, without data."""

    def __init__(self, rank: int, model: Model) -> None:
        self.rank, self.model = rank, model
        self.living = set(range(model.size))
        self.leader = 0
        self.ledger = Ledger(self.living, weigh=model.weigh) if rank == 0 else None
        self.rounds: dict[int, Round] = defaultdict(Round)
        self.last_retired = self.contributed = 0
        self.merged: dict[int, tuple[Any, ...]] = {}  # donors and weights of each mean
        self.early: list[tuple[int, Any]] = []

    def tell_leader(self, *message: Any) -> None:
        if self.leader == self.rank:
            self.hear(self.rank, message)
        else:
            self.model.send(self.rank, self.leader, message)

    def contribute(self) -> None:
        """Capture the next round's contribution; every tenth is not finite."""
        self.contributed += 1
        own = self.rounds[self.contributed]
        own.weight, own.norm = self.rank + 1.0, NAN if self.model.rng.random() < 0.1 else 1.0
        own.scores = (self.model.rng.uniform(-0.2, 1.0),)
        self.model.reports[self.contributed][self.rank] = Report(own.weight, own.norm, own.scores)
        self.tell_leader("captured", self.contributed, own.weight, own.norm, own.scores)

    def hear(self, source: int, message: Any) -> None:
        """Handle a message to the leader."""
        if self.ledger is None:
            self.early.append((source, message))
            return
        kind, *rest = message
        handler = {
            "captured": self.ledger.on_captured,
            "merged": self.ledger.on_merged,
            "census": self.ledger.on_census,
        }
        self.carry_out(handler[kind](source, *rest))

    def carry_out(self, instructions: list[Instruction]) -> None:
        for each in instructions:
            dests = each.dests if isinstance(each, Decide) else tuple(sorted(self.living))
            for dest in dests:
                if dest != self.rank:
                    self.model.send(self.rank, dest, each)
            if self.rank in dests:
                self.obey(each)

    def obey(self, message: Instruction) -> None:
        """Handle the leader's instruction as a member."""
        if isinstance(message, Decide):
            if message.round > self.last_retired:
                self.take(message.round, message.verdict)
        elif isinstance(message, TakeCensus):
            self.hold(message.number)
        else:
            self.last_retired = max(self.last_retired, message.round)
            for number in [number for number in self.rounds if number <= self.last_retired]:
                assert number in self.merged, f"rank {self.rank}: round {number} is retired before its mean arrived"
                del self.rounds[number]

    def take(self, number: int, given: Verdict) -> None:
        own = self.rounds[number]
        if given.attempt <= own.attempt:
            return
        own.attempt = given.attempt
        if own.has_merged:
            if given.holder == self.rank:
                own.offered[given.attempt] = given
            return
        own.verdict, own.given, own.means = given, {self.rank}, set()

    def hold(self, census: int) -> None:
        round_states = []
        for number, own in sorted(self.rounds.items()):
            if not own.has_merged:
                own.verdict = None
            v = own.verdict
            mean = ((), (), ()) if v is None else (v.donors, v.weights, v.norms)
            round_states.append(
                RoundState(number, own.attempt, own.has_merged, own.weight, own.norm, *mean, own.scores)
            )
        self.tell_leader("census", census, tuple(round_states), (self.last_retired,))

    def note_gone(self, rank: int) -> None:
        self.living.discard(rank)
        if rank != self.leader:
            if self.ledger is not None:
                self.carry_out(self.ledger.on_gone(rank))
            return
        self.leader = min(self.living)
        if self.leader == self.rank:
            self.ledger = Ledger(self.living, (self.last_retired,), self.model.weigh)
            self.ledger.take_over()
        self.hold(0)
        if self.ledger is not None:
            early, self.early = self.early, []
            for each in early:
                self.hear(*each)

    def transfers(self) -> list[tuple[int, int]]:
        """Return (round, source) of all data that could arrive next; a source of -1 merges the mean."""
        found = []
        for number, own in sorted(self.rounds.items()):
            v = own.verdict
            if v is None or own.has_merged:
                continue
            owners = {v.holder} if v.holder >= 0 else set(v.donors)
            is_owner = self.rank in owners
            if is_owner and v.holder < 0:
                found += [(number, donor) for donor in v.donors if donor not in own.given]
                if own.given >= set(v.donors):
                    own.offered[v.attempt] = v
            own.means |= {self.rank} & owners if v.attempt in own.offered else set()
            found += [(number, owner) for owner in sorted(owners - own.means - {self.rank})]
            if owners <= own.means:
                found.append((number, -1))
        return [each for each in found if each[1] < 0 or self.model.offers(each[1], each[0], self)]

    def transfer(self, number: int, source: int) -> None:
        own = self.rounds[number]
        assert own.verdict is not None
        if source < 0:
            own.has_merged = True
            self.merged[number] = own.verdict.donors, own.verdict.weights
            self.model.check_means(number)
            self.tell_leader("merged", number)
        elif own.verdict.holder < 0 and self.rank in own.verdict.donors and source not in own.given:
            own.given.add(source)
        else:
            own.means.add(source)


class Model:
    """A population whose events are drawn from one seed."""

    ROUNDS: Final = 6

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(f"ledger {seed}")
        self.size = self.rng.randint(2, 5)
        self.window = self.rng.randint(1, 3)  # number of rounds that a member has in flight
        self.weigh = self.rng.choice((reported_weights, better_half))
        self.reports: dict[int, dict[int, Report]] = defaultdict(dict)  # by round and rank
        self.queues: dict[tuple[int, int], deque[Any]] = defaultdict(deque)
        self.members = {rank: Member(rank, self) for rank in range(self.size)}
        self.loss_count = self.rng.randint(0, self.size - 1)
        self.seen: set[str] = set()

    def send(self, source: int, dest: int, message: Any) -> None:
        self.queues[source, dest].append(message)
        if isinstance(message, TakeCensus):
            self.seen.add("census")
        if isinstance(message, Decide) and message.verdict.holder >= 0:
            self.seen.add("holder")

    def offers(self, source: int, number: int, asker: Member) -> bool:
        """Return whether a living source offers the data that ``asker`` needs next."""
        there = self.members.get(source)
        if there is None or number not in there.rounds:
            return False
        own, mine = there.rounds[number], asker.rounds[number]
        assert mine.verdict is not None
        if mine.verdict.holder < 0 and asker.rank in mine.verdict.donors and source not in mine.given:
            return bool(own.weight)
        return mine.attempt in own.offered

    def check_means(self, number: int) -> None:
        """Check that all living members that have a round's mean have the same one."""
        means = {rank: member.merged[number] for rank, member in self.members.items() if number in member.merged}
        assert len(set(means.values())) == 1, f"the means of round {number} differ: {means}"

    def kill(self) -> None:
        """Kill a member; a part of its messages is lost, and the others notice the loss after the rest."""
        rank = self.rng.choice(sorted(self.members))
        self.seen.add("leader lost" if self.members[rank].ledger is not None else "member lost")
        del self.members[rank]
        self.loss_count -= 1
        for other in self.members:
            queue = self.queues[rank, other]
            for _ in range(self.rng.randint(0, len(queue))):
                queue.pop()
            queue.append(("gone", rank))

    def choices(self) -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = [("message", *pair) for pair, queue in sorted(self.queues.items()) if queue]
        found = [each for each in found if each[2] in self.members]
        for rank, member in sorted(self.members.items()):
            found += [("transfer", rank, *each) for each in member.transfers()]
            if member.contributed < min(self.ROUNDS, len(member.merged) + self.window):
                found.append(("contribute", rank))
        return found

    def run(self) -> None:
        for _ in range(20_000):
            if self.loss_count and self.rng.random() < 0.02:
                self.kill()
            choices = self.choices()
            if not choices:
                break
            kind, *rest = self.rng.choice(choices)
            if kind == "contribute":
                self.members[rest[0]].contribute()
            elif kind == "transfer":
                self.members[rest[0]].transfer(*rest[1:])
            else:
                self.deliver(*rest)
        else:
            raise AssertionError("the members exchange messages without end")
        for member in self.members.values():
            assert set(member.merged) == set(range(1, self.ROUNDS + 1)), f"rank {member.rank} is stuck: {member.merged}"
            assert not member.rounds and member.last_retired == self.ROUNDS, f"rank {member.rank} has not retired all"
            for number, (donors, weights) in member.merged.items():
                assert self.is_weighed(number, dict(zip(donors, weights, strict=True))), f"round {number}: {donors}"

    def is_weighed(self, number: int, chosen: dict[int, float]) -> bool:
        """Return whether the donors follow from the reports of the living members and of some of the lost ones."""
        reports = dict(sorted(self.reports[number].items()))
        lost = [rank for rank in reports if rank not in self.members]
        for count in range(len(lost) + 1):
            for without in itertools.combinations(lost, count):
                left = {rank: report for rank, report in reports.items() if rank not in without}
                if self.weigh(left) == chosen:
                    self.seen.add(self.weigh.__name__)
                    return True
        return False

    def deliver(self, source: int, dest: int) -> None:
        member, message = self.members[dest], self.queues[source, dest].popleft()
        if isinstance(message, Decide | TakeCensus | Retire):
            if source == member.leader:
                member.obey(message)
        elif message[0] == "gone":
            member.note_gone(message[1])
        else:
            member.hear(source, message)


@pytest.mark.parametrize("block", seeds(16))
def test_members_agree_on_each_mean_whoever_is_lost(block: int) -> None:
    seen: set[str] = set()
    for seed in range(block * 50, block * 50 + 50):
        model = Model(seed)
        try:
            model.run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        seen |= model.seen
    assert seen == {"census", "holder", "leader lost", "member lost", "better_half", "reported_weights"}
