"""Tests the member's state machine in selective averaging: its table, its instructions and its invariants."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from protocols.selective.member import (
    TRANSITIONS,
    AddUp,
    Apply,
    Discard,
    Instructions,
    OfferSnapshot,
    ReceiveAverage,
    Reduce,
    RefuseMeans,
    RefuseUpTo,
    RequestSnapshots,
    RoundMember,
    SendToCoordinator,
    State,
    StopReducing,
    TakeSnapshot,
    Withdraw,
)
from protocols.selective.messages import (
    DONOR,
    REASON_LIMIT,
    REPLACER,
    Abandoned,
    Applied,
    Assign,
    Decline,
    Frozen,
    Joined,
    Leave,
    Ready,
    Report,
    count_reason,
)

TO_GIVE = Assign(DONOR, (1, 2), (0,), 9, 2)
TO_TAKE = Assign(REPLACER, (1, 2), (0,), 9, 2)
TO_BUILD = Assign(REPLACER, (), (0,), 9, -1)
FROZEN = Frozen((1, 2), (1.0, 1.0), (9, 8), 2, 30.0)
#: States of donors that reduce, and of a replacer that does.
TO_GIVE_AND_REDUCE = Assign(DONOR, (1, 2), (0,), 9, 2, reducers=(1, 2), part=0)
TO_TAKE_AND_REDUCE = Assign(REPLACER, (2,), (0, 1), 9, 2, reducers=(0, 1), part=1)
#: State of a replacer that fetches the part of rank 1 for its host.
TO_TAKE_AND_SHARE = Assign(REPLACER, (1, 2), (0, 3), 9, 2, reducers=(1, 2), sources=(0, 3))
FRESH = Frozen((), (), (), -1, 30.0)

LAWS = settings(deadline=None, derandomize=True, max_examples=300)


def member_in(state: State) -> RoundMember:
    """Return a member that was brought to a state by events alone, in round 3 if that state has a round."""
    member = RoundMember()
    if state in (State.CHOSEN, State.COPYING, State.GIVING, State.LASTING):
        member.on_assign(TO_GIVE, 3)
    if state in (State.COPYING, State.GIVING, State.LASTING):
        assert member.on_step() == TakeSnapshot(3)
    if state in (State.GIVING, State.LASTING):
        member.on_copied(3, 10)
    if state in (State.ASKING, State.RECEIVING, State.COMPLETE):
        member.on_assign(TO_TAKE, 3)
    if state in (State.RECEIVING, State.COMPLETE):
        member.on_frozen(FROZEN, 3)
    if state is State.COMPLETE:
        assert member.on_averaged(3)
    if state in (State.LEAVING, State.LASTING):
        member.on_leave()
    if state is State.OUT:
        member.on_leave()
        member.on_left()
    assert member.state is state
    return member


@pytest.mark.parametrize("state", State)
def test_every_state_is_reached_and_only_out_is_final(state: State) -> None:
    assert member_in(state).state is state
    assert [before for before, after in TRANSITIONS.items() if not after] == [State.OUT] and set(TRANSITIONS) == set(
        State
    )
    assert {after for states in TRANSITIONS.values() for after in states} == set(State)


def test_a_donors_round() -> None:
    member = RoundMember()
    assert not member.wants_step
    assert member.on_assign(TO_GIVE, 3) == (RefuseUpTo(2),)
    assert member.wants_step and member.last_round == 3
    assert member.on_step() == TakeSnapshot(3)
    assert not member.wants_step and member.on_step() is None
    assert member.on_copied(3, 10) == (OfferSnapshot(3, 10), SendToCoordinator(Ready(10), 3))
    assert member.on_end("every replacer has answered", 3) == (Withdraw(), RefuseUpTo(3), RefuseUpTo(3))
    assert member.state is State.IDLE and not member.wants_step


def test_a_replacers_round() -> None:
    member = RoundMember()
    assert member.on_assign(TO_TAKE, 3) == (RefuseUpTo(2), RequestSnapshots(3, TO_TAKE))
    assert not member.wants_step
    assert member.on_frozen(FROZEN, 3) == (ReceiveAverage(3, FROZEN),)
    assert member.on_averaged(3) and member.wants_step
    assert member.on_step() == Apply(3, FROZEN)
    assert member.on_applied(12) == (SendToCoordinator(Applied(12), 3),)
    assert member.on_end("every replacer has answered", 3) == (RefuseUpTo(3),)
    assert member.state is State.IDLE and not member.abandoned and not member.unapplied_count


def test_a_donor_reduces_until_its_round_ends() -> None:
    member = RoundMember()
    assert member.on_assign(TO_GIVE_AND_REDUCE, 3) == (RefuseUpTo(2), Reduce(3, TO_GIVE_AND_REDUCE))
    member.on_step()
    member.on_copied(3, 10)
    assert member.on_frozen(FROZEN, 3) == (AddUp(3, FROZEN),)
    assert member.on_frozen(FROZEN, 3) == (), "a message that arrives twice must be added up only once"
    assert member.on_end("over", 3) == (StopReducing(3), Withdraw(), RefuseUpTo(3), RefuseUpTo(3))
    assert not member.reducing


def test_replacer_still_reduces_after_applying_or_when_leaving() -> None:
    member = RoundMember()
    frozen = Frozen((2,), (1.0,), (9,), 2, 30.0, (0, 1))
    before = RefuseUpTo(2), Reduce(3, TO_TAKE_AND_REDUCE), RequestSnapshots(3, TO_TAKE_AND_REDUCE)
    assert member.on_assign(TO_TAKE_AND_REDUCE, 3) == before
    assert member.on_frozen(frozen, 3) == (AddUp(3, frozen), ReceiveAverage(3, frozen))
    member.on_averaged(3)
    member.on_step()
    member.on_applied(12)
    assert member.state is State.IDLE and member.reducing == 3
    assert member.on_leave() == (RefuseUpTo(math.inf),) and member.reducing == 3
    assert member.on_end("over", 3) == (StopReducing(3), RefuseUpTo(3))
    assert member.on_left() == (SendToCoordinator(Leave()),)


def test_declining_leaving_or_orphaned_member_does_not_reduce() -> None:
    member = RoundMember()
    member.on_assign(TO_GIVE_AND_REDUCE, 3)
    member.on_step()
    reason = "weights are not finite"
    declined = StopReducing(3), RefuseUpTo(3), SendToCoordinator(Decline(reason), 3)
    assert member.on_copied(3, 10, fault="weights are not finite") == declined
    for end in (RoundMember.on_leave, lambda member: member.on_coordinator_gone("is gone")):
        member = RoundMember()
        member.on_assign(TO_TAKE_AND_REDUCE, 3)
        assert end(member)[0] == StopReducing(3)
    member = RoundMember()
    member.on_leave()
    assert not any(isinstance(each, Reduce) for each in member.on_assign(TO_GIVE_AND_REDUCE, 3))


def test_fresh_weights_need_no_exchange() -> None:
    member = RoundMember()
    assert member.on_assign(TO_BUILD, 1) == (RefuseUpTo(0), RequestSnapshots(1, TO_BUILD))
    assert member.on_frozen(FRESH, 1) == ()
    assert member.wants_step and member.on_step() == Apply(1, FRESH)


def test_a_report_from_before_the_last_average_makes_no_replacer() -> None:
    member = member_in(State.COMPLETE)
    member.on_step()
    member.on_applied(9)
    assert isinstance(member.on_assign(TO_TAKE, 4)[-1], RequestSnapshots), (
        "an average at the judged iteration must not prevent the role"
    )
    member = member_in(State.COMPLETE)
    member.on_step()
    member.on_applied(10)
    reason = "replaced at iteration 10, after the judged iteration"
    assert member.on_assign(TO_TAKE, 4) == (RefuseUpTo(3), RefuseMeans(4), SendToCoordinator(Decline(reason), 4))
    assert member.state is State.IDLE and member.declined == {reason: 1}


def test_replacer_that_fetches_for_others_shares_until_round_end() -> None:
    member = RoundMember()
    reduce, ask = Reduce(3, TO_TAKE_AND_SHARE), RequestSnapshots(3, TO_TAKE_AND_SHARE)
    assert member.on_assign(TO_TAKE_AND_SHARE, 3) == (RefuseUpTo(2), reduce, ask)
    assert member.on_frozen(FROZEN, 3) == (ReceiveAverage(3, FROZEN),), (
        "a replacer that is not a reducer must add up nothing"
    )
    assert member.on_averaged(3)
    member.on_step()
    member.on_applied(10)
    assert member.reducing == 3
    assert member.on_end("over", 3)[0] == StopReducing(3)


def test_weights_that_are_not_finite_are_declined() -> None:
    member = member_in(State.COPYING)
    declined = SendToCoordinator(Decline("weights are not finite"), 3)
    assert member.on_copied(3, 10, fault="weights are not finite") == (RefuseUpTo(3), declined)
    assert member.state is State.IDLE


def test_failed_exchange_abandons_the_round_and_the_step_says_so() -> None:
    member = member_in(State.RECEIVING)
    assert member.on_failed(3, "lost") == (Discard(3, "lost"), SendToCoordinator(Abandoned("lost"), 3))
    assert member.wants_step and member.on_step() is None and not member.wants_step
    assert member.abandoned == {"lost": 1} and not member.unapplied_count


@pytest.mark.parametrize("state", [State.ASKING, State.RECEIVING, State.COMPLETE])
def test_the_end_of_a_round_takes_the_replacers_role_away(state: State) -> None:
    member = member_in(state)
    assert member.on_end("time is up", 3) == (RefuseUpTo(3), Discard(3, "time is up"))
    assert member.state is State.IDLE and member.abandoned == {"time is up": 1}
    assert member.unapplied_count == (state is State.COMPLETE)


@pytest.mark.parametrize("state", [State.CHOSEN, State.COPYING, State.GIVING, State.ASKING, State.RECEIVING])
def test_a_newer_round_takes_any_role_away(state: State) -> None:
    member = member_in(state)
    before = member.on_assign(TO_GIVE, 4)
    assert RefuseUpTo(3) in before and member.state is State.CHOSEN and member.round == 4
    assert (Withdraw() in before) == (state is State.GIVING)
    assert (Discard(3, "round 4 began") in before) == (state in (State.ASKING, State.RECEIVING))


@pytest.mark.parametrize("state", [state for state in State if state is not State.OUT])
def test_without_a_coordinator_no_role_is_left(state: State) -> None:
    member = member_in(state)
    instructions = member.on_coordinator_gone("has stopped")
    assert member.state is (State.LEAVING if state in (State.LEAVING, State.LASTING) else State.IDLE)
    assert RefuseUpTo(member.last_round) in instructions
    assert (Withdraw() in instructions) == (state in (State.GIVING, State.LASTING))
    discarded = Discard(3, "the coordinator has stopped") in instructions
    assert discarded == (state in (State.ASKING, State.RECEIVING, State.COMPLETE))
    assert not [told for told in instructions if isinstance(told, SendToCoordinator)], (
        "no coordinator is left to send to"
    )


def test_a_new_coordinator_is_told_what_the_last_one_knew() -> None:
    member = member_in(State.COMPLETE)
    member.on_step()
    member.on_applied(10)
    member.on_coordinator_gone("is gone")
    assert member.joined(Report(11, 0.5, 2.0, 9.0)) == SendToCoordinator(
        Joined(3, 10, TO_TAKE.judged_iteration, 11, 0.5, 2.0, 9.0)
    )
    assert RoundMember().joined(None) == SendToCoordinator(Joined(0, -1, -1, -1, 0.0, 0.0, 0.0))


def test_a_member_that_is_out_hears_nothing() -> None:
    member = member_in(State.OUT)
    assert member.on_coordinator_gone("is gone") == () == member.on_leave() == member.on_left()
    assert member.on_assign(TO_GIVE, 5) == () == member.on_end("late", 5)
    assert member.state is State.OUT and member.last_round == 5 and not member.wants_step


def test_leaving_gives_up_and_declines_but_finishes_its_giving() -> None:
    assert member_in(State.IDLE).on_leave() == (RefuseUpTo(math.inf),)
    declined = SendToCoordinator(Decline("leaving"), 3)
    assert member_in(State.CHOSEN).on_leave() == (declined, RefuseUpTo(math.inf))
    assert member_in(State.COPYING).on_leave() == (declined, RefuseUpTo(math.inf))
    discard = Discard(3, "the policy ended")
    assert member_in(State.COMPLETE).on_leave() == (discard, RefuseUpTo(math.inf))
    giving = member_in(State.GIVING)
    assert giving.on_leave() == (RefuseUpTo(math.inf),) and giving.state is State.LASTING
    assert giving.on_end("over", 3) == (Withdraw(), RefuseUpTo(3), RefuseUpTo(3)) and giving.state is State.LEAVING
    assert (
        giving.on_assign(TO_TAKE, 4)[-1] == SendToCoordinator(Decline("leaving"), 4) and giving.state is State.LEAVING
    )
    assert giving.on_left() == (SendToCoordinator(Leave()),) and giving.state is State.OUT


def test_a_member_that_cannot_wait_withdraws_its_snapshot() -> None:
    member = member_in(State.LASTING)
    assert member.on_left() == (Withdraw(), RefuseUpTo(3), SendToCoordinator(Leave()))


@pytest.mark.parametrize("state", State)
def test_words_about_another_round_change_nothing(state: State) -> None:
    member = member_in(state)
    assert member.on_frozen(FROZEN, 2) == () == member.on_copied(2, 1) == member.on_failed(2, "late")
    assert not member.on_averaged(2)
    assert set(member.on_end("late", 2)) <= {RefuseUpTo(2)}
    assert member.state is state


CALLS = st.sampled_from(
    [
        "give",
        "take",
        "build",
        "give and reduce",
        "take and reduce",
        "frozen",
        "fresh",
        "end",
        "step",
        "copied",
        "unsound",
        "averaged",
        "failed",
        "leave",
        "gone",
    ]
)


def call(member: RoundMember, name: str, number: int) -> Instructions:
    """Pass an event to the member as the policy would, for its own round or for another round."""
    messages: dict[str, Any] = {"give": TO_GIVE, "take": TO_TAKE, "build": TO_BUILD}
    messages |= {"give and reduce": TO_GIVE_AND_REDUCE, "take and reduce": TO_TAKE_AND_REDUCE}
    match name:
        case "give" | "take" | "build" | "give and reduce" | "take and reduce":
            return member.on_assign(messages[name], number)
        case "frozen" | "fresh":
            return member.on_frozen(FROZEN if name == "frozen" else FRESH, number)
        case "end":
            return member.on_end("over", number)
        case "step":
            done = member.on_step()
            return (done, *member.on_applied(number)) if isinstance(done, Apply) else (done,) if done else ()
        case "copied" | "unsound":
            return member.on_copied(number, 1, fault="" if name == "copied" else "odd")
        case "averaged":
            member.on_averaged(number)
            return ()
        case "failed":
            return member.on_failed(number, "failed")
        case _:
            return member.on_coordinator_gone("is gone")


@LAWS
@given(st.lists(st.tuples(CALLS, st.integers(1, 4)), max_size=40))
def test_any_order_of_events_frees_resources_once(
    calls: list[tuple[str, int]],
) -> None:
    """At most one snapshot is offered, and at most one exchange runs. Both are freed at the end."""
    member, has_left = RoundMember(), False
    offered: list[int] = []
    exchanging: list[int] = []
    reducing: list[int] = []
    for name, number in [*calls, ("leave", 0), ("left", 0)]:
        if name == "leave":
            if has_left:
                continue
            has_left, instructions = True, member.on_leave()
        elif name == "left":
            instructions = member.on_left()
        else:
            instructions = call(member, name, number)
        for instruction in instructions:
            match instruction:
                case OfferSnapshot(round):
                    offered.append(round)
                case Withdraw():
                    offered.pop()
                case RequestSnapshots(round):
                    exchanging.append(round)
                case Discard(round) | Apply(round):
                    exchanging.remove(round)
                case Reduce(round):
                    reducing.append(round)
                case AddUp(round):
                    assert reducing == [round]
                case StopReducing(round):
                    reducing.remove(round)
        assert len(offered) + len(exchanging) <= 1 >= len(reducing)
        assert sum(reducing) == member.reducing
        assert bool(offered) == (member.state in (State.GIVING, State.LASTING))
        assert bool(exchanging) == (member.state in (State.ASKING, State.RECEIVING, State.COMPLETE))
    assert not offered and not exchanging and not reducing and member.state is State.OUT


def test_reasons_that_hold_numbers_share_a_count_beyond_a_limit() -> None:
    counts: Counter[str] = Counter()
    for number in range(1000):
        count_reason(counts, f"round {number} began")
        count_reason(counts, "round 3 began")
    assert len(counts) == REASON_LIMIT + 1
    assert counts["round 3 began"] == 1001 and counts["other"] == 1000 - REASON_LIMIT
