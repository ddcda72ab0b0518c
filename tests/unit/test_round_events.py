"""Tests the ``on_event`` calls for one member's rounds, against the state machine alone."""

from __future__ import annotations

from typing import Any

import pytest

from protocols import PolicyEvent, RoleAssigned, RoundAbandoned, RoundEnded
from protocols.selective.member import Instructions, RoundMember
from protocols.selective.messages import DONOR, REPLACER, Assign, Frozen
from protocols.selective.roles.member_roles import RoundEvents
from protocols.step_info import UserEvents

TO_GIVE = Assign(DONOR, (1, 2), (0,), 9, 2)
TO_TAKE = Assign(REPLACER, (1, 2), (0,), 9, 2)
FROZEN = Frozen((1,), (1.0,), (9,), 1, 5.0)


class Told:
    """A member that delivers its events immediately."""

    def __init__(self, island: int = -1) -> None:
        self.events: list[PolicyEvent] = []
        self.member = RoundMember()
        self.pending = UserEvents(self.events.append)
        self._rounds = RoundEvents(self.member, self.pending, island)

    def note(self, instructions: Instructions, *args: Any, **options: Any) -> list[PolicyEvent]:
        self._rounds.note(instructions, *args, **options)
        self.pending.deliver()
        told, self.events[:] = list(self.events), []
        return told

    def assign(self, assign: Assign, round: int) -> list[PolicyEvent]:
        return self.note(self.member.on_assign(assign, round), assign, round)


def test_a_donor_hears_of_its_role_and_of_its_end() -> None:
    told = Told(island=4)
    assert told.assign(TO_GIVE, 3) == [RoleAssigned(3, "donor", (1, 2), (0,), 4)]
    told.member.on_step()
    assert told.note(told.member.on_copied(3, 9)) == []
    assert told.note(told.member.on_end("complete", 2), reason="complete") == [], (
        "the end of another round must be ignored"
    )
    assert told.note(told.member.on_end("complete", 3), reason="complete") == [RoundEnded(3, "complete", 4)]
    assert told.note(told.member.on_end("complete", 3), reason="complete") == [], "the end must be reported once"


def test_a_donor_that_gives_nothing_hears_why() -> None:
    told = Told()
    told.assign(TO_GIVE, 3)
    told.member.on_step()
    declined = told.member.on_copied(3, 9, fault="weights are not finite")
    assert told.note(declined) == [RoundAbandoned(3, "weights are not finite")]


def test_a_newer_round_ends_the_role_before() -> None:
    told = Told()
    told.assign(TO_GIVE, 3)
    assert told.assign(TO_GIVE, 4) == [RoundEnded(3, "round 4 began"), RoleAssigned(4, "donor", (1, 2), (0,))]
    assert told.assign(TO_TAKE, 5) == [RoundEnded(4, "round 5 began"), RoleAssigned(5, "replacer", (1, 2), (0,))]
    assert told.assign(TO_GIVE, 6) == [RoundAbandoned(5, "round 6 began"), RoleAssigned(6, "donor", (1, 2), (0,))]


def test_a_replacer_hears_why_its_round_was_abandoned() -> None:
    told = Told()
    told.assign(TO_TAKE, 3)
    told.note(told.member.on_frozen(FROZEN, 3))
    assert told.note(told.member.on_failed(3, "the stream broke")) == [RoundAbandoned(3, "the stream broke")]
    assert told.note(told.member.on_end("complete", 3), reason="complete") == []


def test_applied_role_ends_its_events_and_a_refused_one_abandons() -> None:
    told = Told()
    told.assign(TO_TAKE, 3)
    told.note(told.member.on_frozen(FROZEN, 3))
    assert told.member.on_averaged(3)
    told.member.on_step()
    assert told.note(told.member.on_applied(11)) == []
    assert told.note(told.member.on_end("complete", 3), reason="complete") == []
    assigned, abandoned = told.assign(TO_TAKE, 4)
    assert isinstance(assigned, RoleAssigned)
    assert isinstance(abandoned, RoundAbandoned) and abandoned.round == 4 and "iteration 11" in abandoned.reason


@pytest.mark.parametrize("assign", [TO_GIVE, TO_TAKE])
def test_the_loss_of_the_coordinator_ends_a_role(assign: Assign) -> None:
    told = Told()
    told.assign(assign, 3)
    reason = "the coordinator is lost"
    ended: list[PolicyEvent] = [RoundEnded(3, reason) if assign is TO_GIVE else RoundAbandoned(3, reason)]
    assert told.note(told.member.on_coordinator_gone("is lost"), reason=reason) == ended


def test_a_newcomer_hears_of_no_role_before_it_makes_steps() -> None:
    told = Told()
    assert told.assign(Assign(REPLACER, (1,), (0,), 9, 1, admits=True), 3) == []
    assert told.note(told.member.on_end("time is up", 3), reason="time is up") == []


def test_callback_that_raises_gets_the_rest_in_the_next_step() -> None:
    told: list[Any] = []

    def on_event(event: PolicyEvent) -> None:
        told.append(event)
        if len(told) == 1:
            raise OSError("the disk is full")

    pending = UserEvents(on_event)
    for number in (1, 2):
        pending.add(RoundEnded(number, "complete"))
    with pytest.raises(OSError, match="full"):
        pending.deliver()
    pending.deliver()
    assert [event.round for event in told] == [1, 2]
    silent = UserEvents(None)
    silent.add(RoundEnded(1, "complete"))
    silent.deliver()
