"""Tests the leader's ledger of an exchange alone: decisions, retirements and censuses."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import Mock

import pytest
from support.weighing import better_half

from asyncdist.errors import RemoteProtocolError
from asyncdist.protocols.exchange.catch_up import CatchUp
from asyncdist.protocols.exchange.ledger import (
    AwaitGrace,
    Decide,
    Instruction,
    Ledger,
    Quorum,
    Report,
    Retire,
    TakeCensus,
)
from asyncdist.protocols.exchange.messages import CensusReply, RoundState, Verdict

NAN: Final = math.nan


def captured(ledger: Ledger, number: int, *ranks: int) -> list[Instruction]:
    """Report contributions with the weight rank + 1 and the norm 1; return the last report's instructions."""
    made: list[Instruction] = []
    for rank in ranks:
        made = ledger.on_captured(rank, number, rank + 1.0, 1.0)
    return made


def verdict(attempt: int, *donors: int, holder: int = -1) -> Verdict:
    return Verdict(attempt, donors, tuple(donor + 1.0 for donor in donors), (1.0,) * len(donors), holder)


def round_state(number: int, rank: int, attempt: int, *donors: int) -> RoundState:
    """Return the state of a round with a captured contribution; with donors, the rank has the mean."""
    weights, norms = tuple(donor + 1.0 for donor in donors), (1.0,) * len(donors)
    return RoundState(number, attempt, bool(donors), rank + 1.0, 1.0, donors, weights, norms)


# -- false messages ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields", [(-1, (), (0,), (0,)), (1, (), (-1,), (0,)), (1, (), (0,), (-1,)), (1, (), (0,), ())]
)
def test_a_census_with_impossible_numbers_is_refused(fields: Any) -> None:
    with pytest.raises(ValueError, match="must be >= 0"):
        CensusReply(*fields)


@pytest.mark.parametrize("nbytes", [0, 1 << 50])
async def test_a_state_that_is_too_large_is_not_allocated(nbytes: int) -> None:
    fragment: Any = SimpleNamespace(layout=SimpleNamespace(unencoded_nbytes=8), version=0)
    owner, services, offers = Mock(), Mock(), Mock()
    with pytest.raises(RemoteProtocolError, match=f"state of rank 2 after round 5 must have .* got {nbytes}"):
        await CatchUp(owner, services, offers, [fragment])._take(0, 2, 5, nbytes)


# -- decisions --------------------------------------------------------------------------------------------------------


def test_a_round_is_decided_when_all_have_contributed() -> None:
    ledger = Ledger([0, 1, 2])
    assert captured(ledger, 1, 2, 0) == []
    assert captured(ledger, 1, 1) == [Decide(1, verdict(1, 0, 1, 2), (0, 1, 2))]
    assert captured(ledger, 1, 1) == [], "a report that arrives twice must decide nothing"


def test_contributions_that_are_not_finite_are_left_out() -> None:
    ledger = Ledger([0, 1, 2])
    captured(ledger, 1, 0)
    ledger.on_captured(1, 1, 2.0, NAN)
    (made,) = ledger.on_captured(2, 1, 3.0, math.inf)
    assert made == Decide(1, verdict(1, 0), (0, 1, 2))
    ledger.on_captured(0, 2, 1.0, NAN)
    ledger.on_captured(1, 2, 1.0, NAN)
    (made,) = ledger.on_captured(2, 2, 1.0, NAN)
    assert made == Decide(2, Verdict(1, (), (), ()), (0, 1, 2)), "without a donor, the round must still end"


def test_a_policy_chooses_donors_and_weights_by_its_function() -> None:
    ledger = Ledger([0, 1, 2, 3], weigh=better_half)
    for rank, score in enumerate((0.5, -1.0, 0.25)):
        ledger.on_captured(rank, 1, 1.0, rank + 1.0, (score,))
    (made,) = ledger.on_captured(3, 1, 1.0, 4.0, (0.125,))
    assert made == Decide(1, Verdict(1, (0, 2), (0.5, 0.25), (1.0, 3.0), scores=((0.5,), (0.25,))), (0, 1, 2, 3))
    for rank in range(3):
        ledger.on_captured(rank, 2, 1.0, 1.0, (-1.0,))
    (made,) = ledger.on_captured(3, 2, 1.0, 1.0, (-1.0,))
    assert made == Decide(2, Verdict(1, (), (), ()), (0, 1, 2, 3)), (
        "a round whose donors are all left out must still end"
    )


def test_a_census_chooses_by_the_same_function_of_what_is_left() -> None:
    """Because of the lost donor, another rank had been in the worse half."""
    ledger = Ledger([0, 1, 2, 3], weigh=better_half)
    scores = {0: 0.5, 1: 0.25, 2: 0.125, 3: 1.0}
    for rank, score in scores.items():
        made = ledger.on_captured(rank, 1, 1.0, 1.0, (score,))
    assert made == [Decide(1, Verdict(1, (0, 3), (0.5, 1.0), (1.0, 1.0), scores=((0.5,), (1.0,))), (0, 1, 2, 3))]
    assert ledger.on_gone(2) == [], "a rank that was left out must not be needed"
    assert ledger.on_gone(3) == [TakeCensus(1)]
    ledger.on_census(0, 1, [RoundState(1, 1, False, 1.0, 1.0, scores=(0.5,))], (0,))
    made = ledger.on_census(1, 1, [RoundState(1, 1, False, 1.0, 1.0, scores=(0.25,))], (0,))
    assert made == [Decide(1, Verdict(2, (0,), (0.5,), (1.0,), scores=((0.5,),)), (0, 1))]
    other = Ledger([1, 2], weigh=better_half)
    other.take_over()
    other.on_census(1, 0, [RoundState(1, 1, False, 1.0, 1.0, scores=(0.25,))], (0,))
    made = other.on_census(2, 0, [RoundState(1, 1, False, 1.0, 1.0, scores=(0.125,))], (0,))
    assert made == [Decide(1, Verdict(2, (1,), (0.25,), (1.0,), scores=((0.25,),)), (1, 2))], (
        "a new leader must decide in the same way"
    )


def test_a_holders_verdict_has_the_scores_of_the_donors() -> None:
    ledger = Ledger([0, 1, 2], weigh=better_half)
    ledger.take_over()
    scores = ((0.5,), (1.0,))
    ledger.on_census(0, 0, [RoundState(1, 1, True, 1.0, 1.0, (0, 2), (0.5, 1.0), (1.0, 1.0), (0.5,), scores)], (0,))
    ledger.on_census(1, 0, [RoundState(1, 1, False, 1.0, 1.0, scores=(0.25,))], (0,))
    (made,) = ledger.on_gone(2)
    assert made == Decide(1, Verdict(2, (0, 2), (0.5, 1.0), (1.0, 1.0), holder=0, scores=scores), (0, 1))


def test_a_member_may_pass_over_a_round() -> None:
    """Its contribution to a later round shows that it will not contribute, and it receives the mean of the others."""
    ledger = Ledger([0, 1, 2])
    assert captured(ledger, 2, 0, 2) == []
    assert captured(ledger, 3, 1) == [Decide(2, verdict(1, 0, 2), (0, 1, 2))]
    assert captured(ledger, 3, 0, 2) == [Decide(3, verdict(1, 0, 1, 2), (0, 1, 2))]


def test_a_round_whose_contributors_are_lost_has_no_donors() -> None:
    """Regression: the round stayed undecided, so that no later round was retired."""
    ledger = Ledger([0, 1, 2])
    captured(ledger, 2, 0)
    assert ledger.on_gone(0) == []
    assert captured(ledger, 3, 1) == []
    assert captured(ledger, 3, 2) == [Decide(2, verdict(1), (1, 2)), Decide(3, verdict(1, 1, 2), (1, 2))]


def test_rounds_are_retired_in_order() -> None:
    ledger = Ledger([0, 1])
    captured(ledger, 1, 0, 1)
    captured(ledger, 2, 0, 1)
    assert ledger.on_merged(0, 2) == ledger.on_merged(1, 2) == ledger.on_merged(0, 1) == []
    assert ledger.on_merged(1, 1) == [Retire(1), Retire(2)]
    assert ledger.on_merged(1, 1) == captured(ledger, 2, 0, 1) == [], "messages about retired rounds must be ignored"
    assert ledger.retired == [2]


# -- quorum -----------------------------------------------------------------------------------------------------------


def with_quorum(
    count: int, *members: int, grace_s: float = 0.0, members_wait: bool = False, fragments: int = 1
) -> Ledger:
    quorum = Quorum(count, grace_s, members_wait)
    return Ledger(members, (0,) * fragments, quorum=quorum)


def late_verdict(late: tuple[int, ...], attempt: int, *donors: int) -> Verdict:
    return replace(verdict(attempt, *donors), late=late)


def test_a_quorum_decides_and_names_the_late_members() -> None:
    ledger = with_quorum(2, 0, 1, 2)
    assert captured(ledger, 1, 2) == []
    assert captured(ledger, 1, 0) == [Decide(1, late_verdict((1,), 1, 0, 2), (0, 1, 2))]
    assert captured(ledger, 1, 1) == [], "a contribution after the verdict must not count in a verdict on this round"
    assert captured(ledger, 2, 1) == []
    assert captured(ledger, 2, 0) == [Decide(2, late_verdict((2,), 1, 0, 1), (0, 1, 2))]


def test_a_grace_period_lets_further_contributions_count() -> None:
    ledger = with_quorum(2, 0, 1, 2, 3, grace_s=1.0)
    captured(ledger, 1, 0)
    assert captured(ledger, 1, 2) == [AwaitGrace(1, 1)], "the grace period must begin with the quorum"
    assert captured(ledger, 1, 3) == [] and ledger.is_in_grace(1, 1)
    assert ledger.on_grace_over(1, 2) == [], "the end of an earlier grace period must be ignored"
    assert ledger.on_grace_over(1, 1) == [Decide(1, late_verdict((1,), 1, 0, 2, 3), (0, 1, 2, 3))]
    assert not ledger.is_in_grace(1, 1) and ledger.on_grace_over(1, 1) == []


def test_a_round_of_all_members_needs_no_grace_period() -> None:
    ledger = with_quorum(2, 0, 1, 2, grace_s=1.0)
    assert captured(ledger, 1, 0, 1) == [AwaitGrace(1, 1)]
    assert captured(ledger, 1, 2) == [Decide(1, verdict(1, 0, 1, 2), (0, 1, 2))]


def test_a_quorum_of_more_than_the_living_is_all_of_them() -> None:
    ledger = with_quorum(3, 0, 1, 2, 3)
    captured(ledger, 1, 0, 1)
    assert ledger.on_gone(2) == []
    assert ledger.on_gone(3) == [Decide(1, verdict(1, 0, 1), (0, 1))]


def test_a_grace_period_awaits_no_paused_or_ending_member() -> None:
    ledger = with_quorum(1, 0, 1, 2, grace_s=1.0)
    assert captured(ledger, 1, 0) == [AwaitGrace(1, 1)]
    assert ledger.on_paused(1) == []
    assert ledger.on_ending(2) == [Decide(1, late_verdict((1, 2), 1, 0), (0, 1, 2))]


def test_a_round_is_retired_when_the_next_one_is_decided() -> None:
    """Member 2 is then behind, and the leader names a member from which it receives the state."""
    ledger = with_quorum(2, 0, 1, 2)
    captured(ledger, 1, 0, 1)
    assert ledger.on_merged(0, 1) == ledger.on_merged(1, 1) == []
    captured(ledger, 2, 0, 1)
    assert ledger.on_merged(1, 2) == [Retire(1, 0)]
    assert ledger.retired == [1]
    assert ledger.on_merged(2, 1) == [], "member 2 has caught up, so nothing is left to retire"


def test_a_state_holder_that_is_lost_leads_to_a_census() -> None:
    ledger = with_quorum(2, 0, 1, 2)
    captured(ledger, 1, 0, 1)
    ledger.on_merged(0, 1)
    captured(ledger, 2, 0, 1)
    ledger.on_merged(0, 2)
    assert ledger.retired == [2], "round 2 must be kept, as members 1 and 2 lack the mean of round 1"
    assert ledger.on_gone(0) == [TakeCensus(1)]


def test_members_that_all_wait_get_the_first_round() -> None:
    """Without this rule, no round gets its quorum, and all members wait forever."""
    ledger = with_quorum(2, 0, 1, members_wait=True, fragments=2)
    assert captured(ledger, 1, 0) == []
    assert captured(ledger, 2, 1) == [Decide(1, late_verdict((1,), 1, 0), (0, 1))]
    free = with_quorum(2, 0, 1, fragments=2)
    assert captured(free, 1, 0) == captured(free, 2, 1) == [], "members that do not wait must contribute later"


@pytest.mark.parametrize(("count", "members", "most"), [(3, 4, 3), (1, 4, 5), (2, 5, 4), (3, 2, 2)])
def test_a_member_that_misses_more_than_its_share_is_slow(count: int, members: int, most: int) -> None:
    quorum = Quorum(count, 0.0, False)
    assert [quorum.must_abdicate(missed, members) for missed in (1, most, most + 1)] == [False, False, True]


def test_a_leaving_member_leaves_no_member_behind() -> None:
    ledger = with_quorum(1, 0, 1)
    captured(ledger, 1, 0)
    ledger.on_merged(0, 1)
    captured(ledger, 2, 0)
    ledger.on_merged(0, 2)
    ledger.on_ending(0)
    assert ledger.released() == set(), "member 0 must stay, as member 1 lacks the state after its rounds"
    ledger.on_merged(1, 2)
    assert ledger.released() == {0}


# -- losses -----------------------------------------------------------------------------------------------------------


def test_messages_of_strangers_and_lost_ranks_are_ignored() -> None:
    ledger = Ledger([0, 1])
    ledger.on_gone(1)
    assert captured(ledger, 1, 1, 7) == ledger.on_gone(7) == ledger.on_gone(1) == []
    assert captured(ledger, 1, 0) == [Decide(1, verdict(1, 0), (0,))]
    assert ledger.on_merged(1, 1) == ledger.on_census(1, 0, (), (0,)) == []


def test_a_loss_before_the_decision_needs_no_census() -> None:
    ledger = Ledger([0, 1, 2])
    captured(ledger, 1, 0, 1)
    assert ledger.on_gone(2) == [Decide(1, verdict(1, 0, 1), (0, 1))]
    assert ledger.census == 0


def test_a_loss_of_a_rank_that_no_round_needs_retires_it() -> None:
    ledger = Ledger([0, 1, 2])
    captured(ledger, 1, 0, 1)
    ledger.on_captured(2, 1, 3.0, NAN)
    ledger.on_merged(0, 1)
    ledger.on_merged(1, 1)
    assert ledger.on_gone(2) == [Retire(1)]


# -- censuses ---------------------------------------------------------------------------------------------------------


def lost_donor() -> Ledger:
    """Return a ledger that takes a census after the loss of rank 2, a donor of round 1."""
    ledger = Ledger([0, 1, 2])
    captured(ledger, 1, 0, 1, 2)
    assert ledger.on_gone(2) == [TakeCensus(1)]
    return ledger


def test_a_mean_that_no_member_has_is_decided_without_the_lost() -> None:
    ledger = lost_donor()
    assert ledger.on_census(0, 1, [round_state(1, 0, 1)], (0,)) == []
    assert ledger.on_census(1, 1, [round_state(1, 1, 1)], (0,)) == [Decide(1, verdict(2, 0, 1), (0, 1))]


def test_a_mean_that_a_member_has_is_passed_on() -> None:
    ledger = lost_donor()
    ledger.on_census(0, 1, [round_state(1, 0, 1)], (0,))
    made = ledger.on_census(1, 1, [round_state(1, 1, 1, 0, 1, 2)], (0,))
    assert made == [Decide(1, verdict(2, 0, 1, 2, holder=1), (0, 1))]
    assert ledger.on_merged(0, 1) == [Retire(1)], "the holder must not need to report a second time"


def test_a_mean_that_all_members_have_is_retired_at_once() -> None:
    ledger = lost_donor()
    ledger.on_census(0, 1, [round_state(1, 0, 1, 0, 1, 2)], (0,))
    assert ledger.on_census(1, 1, [round_state(1, 1, 1, 0, 1, 2)], (0,))[-1] == Retire(1)


def test_a_lost_holder_leads_to_another_census() -> None:
    ledger = Ledger([0, 1, 2, 3])
    captured(ledger, 1, 0, 1, 2, 3)
    ledger.on_gone(3)
    for rank in (0, 2):
        ledger.on_census(rank, 1, [round_state(1, rank, 1)], (0,))
    (made,) = ledger.on_census(1, 1, [round_state(1, 1, 1, 0, 1, 2, 3)], (0,))
    assert made.verdict == verdict(2, 0, 1, 2, 3, holder=1)
    assert ledger.on_gone(1) == [TakeCensus(2)]
    ledger.on_census(0, 2, [round_state(1, 0, 2)], (0,))
    assert ledger.on_census(2, 2, [round_state(1, 2, 2)], (0,)) == [Decide(1, verdict(3, 0, 2), (0, 2))]


def test_a_loss_in_a_census_ends_it_without_the_lost() -> None:
    ledger = lost_donor()
    assert ledger.on_census(0, 1, [round_state(1, 0, 1)], (0,)) == []
    assert ledger.on_gone(1) == [Decide(1, verdict(2, 0), (0,))]


def test_an_answer_of_a_rank_that_is_lost_later_does_not_count() -> None:
    ledger = Ledger([0, 1, 2, 3])
    captured(ledger, 1, 0, 1, 2, 3)
    ledger.on_gone(3)
    ledger.on_census(2, 1, [round_state(1, 2, 1, 0, 1, 2, 3)], (0,))
    ledger.on_gone(2)
    ledger.on_census(0, 1, [round_state(1, 0, 1)], (0,))
    assert ledger.on_census(1, 1, [round_state(1, 1, 1)], (0,)) == [Decide(1, verdict(2, 0, 1), (0, 1))]


def test_answers_that_are_late_or_repeated_are_ignored() -> None:
    ledger = lost_donor()
    assert ledger.on_census(0, 0, [round_state(1, 0, 1, 0, 1, 2)], (0,)) == [], (
        "an answer to an earlier census must be ignored"
    )
    ledger.on_census(0, 1, [round_state(1, 0, 1)], (0,))
    assert ledger.on_census(0, 1, [round_state(1, 0, 1, 0, 1, 2)], (0,)) == []
    assert ledger.on_census(1, 1, [round_state(1, 1, 1)], (0,)) == [Decide(1, verdict(2, 0, 1), (0, 1))]
    assert ledger.on_census(1, 1, [round_state(1, 1, 1)], (0,)) == []


def test_contributions_reported_during_a_census_count() -> None:
    ledger = lost_donor()
    ledger.on_census(0, 1, [round_state(1, 0, 1)], (0,))
    assert captured(ledger, 2, 0) == []
    made = ledger.on_census(1, 1, [round_state(1, 1, 1), round_state(2, 1, 0)], (0,))
    assert made == [Decide(1, verdict(2, 0, 1), (0, 1)), Decide(2, verdict(1, 0, 1), (0, 1))]


def test_a_successor_learns_all_rounds_from_the_census() -> None:
    ledger = Ledger([1, 2, 3], (3,))
    ledger.take_over()
    assert ledger.on_census(2, 0, [round_state(5, 2, 1, 0, 1), round_state(6, 2, 0)], (4,)) == []
    assert captured(ledger, 6, 3) == []
    assert ledger.on_census(3, 0, [round_state(4, 3, 1, 0, 1), round_state(5, 3, 1)], (3,)) == []
    made = ledger.on_census(1, 0, [round_state(5, 1, 4), round_state(6, 1, 0)], (3,))
    assert made == [
        Retire(4),
        Decide(5, verdict(5, 0, 1, holder=2), (1, 2, 3)),
        Decide(6, verdict(1, 1, 2, 3), (1, 2, 3)),
    ]


@pytest.mark.parametrize(
    "fields",
    [(0, (1,), (1.0,), (1.0,)), (1, (1, 0), (1.0, 1.0), (1.0, 1.0)), (1, (0,), (0.0,), (1.0,)), (1, (0,), (), (1.0,))],
)
def test_a_verdict_whose_fields_do_not_fit_is_refused(fields: Any) -> None:
    with pytest.raises(ValueError, match="must be"):
        Verdict(*fields)


# -- newcomers --------------------------------------------------------------------------------------------------------


def test_a_newcomer_contributes_to_rounds_its_leader_has_not() -> None:
    """Regression: it was excused from them, so it could receive their mean before it had applied the previous one."""
    ledger = Ledger([0, 1, 3])
    captured(ledger, 1, 0, 1)
    captured(ledger, 2, 1)
    assert ledger.on_admitted(2, by=0) == []
    assert captured(ledger, 1, 3) == [Decide(1, verdict(1, 0, 1, 3), (0, 1, 2, 3))], (
        "rank 2 must receive the mean, as its state is from before the round"
    )
    assert captured(ledger, 2, 0, 3) == []
    assert captured(ledger, 2, 2) == [Decide(2, verdict(1, 0, 1, 2, 3), (0, 1, 2, 3))]


def test_a_newcomer_receives_the_means_of_decided_rounds() -> None:
    ledger = Ledger([0, 1])
    captured(ledger, 1, 0, 1)
    assert ledger.on_admitted(2, by=0) == [Decide(1, verdict(1, 0, 1), (2,))]
    ledger.on_merged(0, 1)
    assert ledger.on_merged(1, 1) == []
    assert ledger.on_merged(2, 1) == [Retire(1)]


def test_a_newcomer_passes_the_rounds_that_its_leader_passed() -> None:
    """Regression: a member that ends contributes to round 2 alone, and waited forever for the newcomer's part."""
    ledger = Ledger([0, 1])
    captured(ledger, 3, 0)
    assert ledger.on_admitted(2, by=0) == []
    assert captured(ledger, 2, 1) == [Decide(2, verdict(1, 1), (0, 1, 2))]


def test_a_successor_knows_the_rounds_that_a_newcomer_passed() -> None:
    ledger = Ledger([1, 2])
    ledger.take_over()
    assert ledger.on_census(1, 0, [round_state(2, 1, 0)]) == []
    (made,) = ledger.on_census(2, 0, [RoundState(3, 0, False, 0.0, 0.0)])
    assert made == Decide(2, verdict(1, 1), (1, 2))


def test_a_message_does_not_examine_all_members_of_each_round() -> None:
    """Regression: with 400 ranks and 24 fragments, a step of the warm-up cost the leader 6 s."""
    examined = 0

    class Counted(dict[int, Report]):
        def keys(self) -> Any:
            nonlocal examined
            examined += len(self)
            return super().keys()

    ranks, fragments = 50, 10
    ledger = Ledger(range(ranks), [0] * fragments)
    for number in range(1, fragments + 1):
        ledger._round(number).captured = Counted()
    decided = [
        each for rank in range(ranks) for number in range(fragments) for each in captured(ledger, number + 1, rank)
    ]
    assert len(decided) == fragments
    assert examined <= 4 * ranks * fragments
