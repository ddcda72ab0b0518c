"""Tests that the members of a replica repeat their leader's inputs and end in the same role."""

from __future__ import annotations

import random
from unittest.mock import MagicMock

from asyncdist.tensors import serialization
from protocols.replica_averaging.members import FollowingMember, LeadingMember
from protocols.selective.member import (
    Apply,
    Discard,
    Instruction,
    ReceiveAverage,
    RequestSnapshots,
    State,
    TakeSnapshot,
)
from protocols.selective.messages import DONOR, REPLACER, Assign, Frozen
from protocols.selective.roles.member_roles import MemberRoles
from protocols.selective.succession import ReportedCoordinator

#: Ranks of three replicas of two ranks: each leader, and the other rank of its replica.
COUNTERPARTS = {0: 1, 2: 3, 4: 5}
ASSIGN = Assign(REPLACER, (0, 2), (4,), 7, 2, restarted=((2, 1),), reducers=(0, 2), part=-1, sources=(0, 2))
FROZEN = Frozen((0, 2), (1.0, 3.0), (5, 6), 2, 30.0, (0, 2))


class Replica:
    """A leader, and a follower that receives its inputs at swap points."""

    def __init__(self) -> None:
        self.leader, self.follower = LeadingMember(), FollowingMember()
        self.done: list[Instruction] = []

    def swap(self) -> None:
        events = serialization.decode(serialization.encode(self.leader.take_events()))
        for instructions in self.follower.repeat(events, COUNTERPARTS):
            self.done.extend(instructions)


def test_ranks_are_those_of_the_counterparts() -> None:
    replica = Replica()
    replica.leader.on_assign(ASSIGN, 1)
    replica.leader.on_frozen(FROZEN, 1)
    replica.swap()
    ask, read = (
        next(each for each in replica.done if isinstance(each, kind)) for kind in (RequestSnapshots, ReceiveAverage)
    )
    assert ask == RequestSnapshots(1, Assign(REPLACER, (1, 3), (5,), 7, 3, reducers=(1, 3), part=-1, sources=(1, 3)))
    assert read == ReceiveAverage(1, Frozen((1, 3), (1.0, 3.0), (5, 6), 3, 30.0, (1, 3)))
    assert replica.follower.state is State.RECEIVING and replica.follower.assignment_count == 1


def test_a_round_begins_after_its_coordinator_was_lost() -> None:
    """Regression: the follower failed, because no coordinator was known when it repeated its leader's assignment."""
    replica, reported, roles = Replica(), ReportedCoordinator(), MagicMock()
    replica.leader.on_assign(ASSIGN, 1)
    replica.leader.on_coordinator_gone("is gone")
    reported.follow(0, None)
    members = MemberRoles(MagicMock(), replica.follower, MagicMock(), reported, MagicMock(), None, MagicMock())
    members.replacer = roles
    for instructions in replica.follower.repeat(replica.leader.take_events(), COUNTERPARTS):
        members.carry_out(instructions)
    (asked,) = roles.ask.call_args_list
    assert asked.args[:2] == (1, -1)


def test_round_given_up_by_the_leader_ends_for_all_with_a_reason() -> None:
    replica = Replica()
    replica.leader.on_assign(ASSIGN, 1)
    replica.leader.on_frozen(FROZEN, 1)
    replica.swap()
    assert replica.follower.on_averaged(1)
    replica.leader.on_failed(1, "the stream broke")
    replica.swap()
    assert replica.done[-1] == Discard(1, "the stream broke") and replica.follower.state is State.IDLE
    assert replica.follower.on_step() is None


def test_a_failure_is_told_until_the_next_assignment() -> None:
    replica = Replica()
    for number in (1, 2):
        replica.leader.on_assign(ASSIGN, number)
        replica.leader.on_frozen(FROZEN, number)
        replica.swap()
        assert replica.follower.failure == ""
        replica.follower.on_failed(number, "no")
        assert (replica.follower.failure, replica.follower.assignment_count) == ("no", number)


def _draw(rng: random.Random, replica: Replica, number: int) -> None:
    leader = replica.leader
    match rng.choice(("donor", "replacer", "frozen", "end", "gone", "late")):
        case "donor":
            leader.on_assign(Assign(DONOR, (0, 2), (4,), rng.randint(0, 9), 2), number)
        case "replacer":
            leader.on_assign(ASSIGN, number)
        case "frozen":
            leader.on_frozen(FROZEN, leader.round or number)
        case "end":
            leader.on_end("over", rng.choice((leader.round, number)))
        case "gone":
            leader.on_coordinator_gone("is lost")
            leader.on_epoch(number, 0)
        case "late":
            leader.on_frozen(FROZEN, number - 1)


def test_both_have_one_role_after_each_swap_point() -> None:
    seen = set()
    for seed in range(300):
        rng, replica = random.Random(seed), Replica()
        leader, follower = replica.leader, replica.follower
        for iteration in range(30):
            for _ in range(rng.randint(0, 3)):
                _draw(rng, replica, iteration)
            replica.swap()
            facts = [(m.state, m.round, m.last_round, m.reducing, m.assignment_count) for m in (leader, follower)]
            assert facts[0] == facts[1], f"seed {seed}, iteration {iteration}"
            if leader.state is State.RECEIVING and rng.random() < 0.7:
                assert leader.on_averaged(leader.round) and follower.on_averaged(follower.round)
            actions = [member.on_step() for member in (leader, follower)]
            assert [type(each) for each in actions] == [type(actions[0])] * 2
            seen.add(type(actions[0]))
            for member, action in zip((leader, follower), actions, strict=True):
                if isinstance(action, TakeSnapshot):
                    member.on_copied(action.round, iteration)
                elif isinstance(action, Apply):
                    member.on_applied(iteration)
    assert seen == {TakeSnapshot, Apply, type(None)}
