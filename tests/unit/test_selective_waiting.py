"""Tests how long the coordinator of selective averaging waits for which ranks, with given values and in rounds."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st
from support.selective import OpenedCoordinator

from protocols.selective.messages import Assign
from protocols.selective.roster import Roster, Send
from protocols.selective.rounds import RoundCoordinator
from protocols.selective.selection import SelectiveRules
from protocols.selective.statistics import Straggler
from protocols.selective.waiting import (
    DELAY_SHARE,
    FREE_CADENCES,
    NOISE_S,
    Pace,
    Patience,
    allowed_round_s,
    cadence_s,
    expected_round_s,
    grace_s,
    is_expected,
    is_late,
    slow_ranks,
)

INF = math.inf
LAWS = settings(deadline=None, derandomize=True, max_examples=200)
times = st.floats(0.0, 1e6)


def test_grace_is_the_rest_of_a_cadence_after_quorum_and_round() -> None:
    assert grace_s(10.0, 2.0, []) == 8.0
    assert grace_s(10.0, 2.0, [3.0, 4.0, 100.0]) == 4.0
    assert grace_s(10.0, 2.0, [9.0]) == 0.0


@LAWS
@given(times, times, st.lists(times))
def test_law_no_grace_delays_the_round_beyond_the_next_reports(cadence: float, quorum: float, rounds: Any) -> None:
    assert 0 <= grace_s(cadence, quorum, rounds) <= max(0.0, cadence - quorum)


def test_cadence_is_that_of_the_median_member_with_an_interval() -> None:
    assert cadence_s([]) == cadence_s([0.0, 0.0]) == 0.0
    assert cadence_s([0.0, 5.0, 500.0]) == 5.0
    assert cadence_s([5.0, 4.0, 6.0]) == 5.0


def test_a_report_is_expected_an_interval_after_the_last_one() -> None:
    pace = Pace(step_s=1.0, interval_s=5.0, silent_s=4.5)
    assert is_expected(pace, 1.0, 0.5)
    assert not is_expected(pace, 1.0, 0.4), "the report is due after the deadline"
    assert not is_expected(pace._replace(silent_s=7.0), 1.0, 1.0), (
        "an overdue report may arrive at any time, so it is not expected"
    )
    assert is_expected(pace._replace(interval_s=0.0), 5.0, 0.5), (
        "without an interval, the report must be expected like other ranks' reports"
    )


def test_a_member_between_two_reports_is_not_late() -> None:
    pace = Pace(step_s=1.0, interval_s=5.0, silent_s=5.0)
    assert not is_late(pace, 5.0)
    assert is_late(pace, 3.9)
    assert is_late(pace._replace(silent_s=INF), 5.0)


def test_round_takes_three_steps_of_the_slowest_plus_overdue() -> None:
    pace = Pace(step_s=2.0, interval_s=5.0, silent_s=4.0)
    assert expected_round_s(pace, 1) == 6.0
    assert expected_round_s(pace, 10) == 24.0
    assert expected_round_s(pace._replace(silent_s=7.0), 1) == 8.0
    assert expected_round_s(pace._replace(interval_s=0.0, silent_s=7.0), 1) == 6.0


def test_round_may_take_one_cadence_or_twice_the_median_time() -> None:
    assert allowed_round_s({}, 4.0) == 0.0
    assert allowed_round_s({0: 1.0, 1: 1.0, 2: 50.0}, 4.0) == FREE_CADENCES * 4.0
    assert allowed_round_s({0: 3.0, 1: 3.0, 2: 50.0}, 4.0) == 6.0


def test_slow_ranks_take_longer_unless_too_few_members_remain() -> None:
    assert slow_ranks({0: 1.0, 1: 9.0, 2: 2.0}, 2.0) == {1}
    assert slow_ranks({0: 1.0, 1: 9.0}, 2.0) == frozenset(), "a single fast rank has no rank to average with"


@LAWS
@given(st.dictionaries(st.integers(0, 9), times), times)
def test_law_two_ranks_are_left_where_there_are_two(holds: dict[int, float], allowed: float) -> None:
    assert len(holds) - len(slow_ranks(holds, allowed)) >= min(2, len(holds))


@pytest.mark.parametrize("given_s", [0.0, 3.0])
def test_a_grace_of_the_user_is_kept_to(given_s: float) -> None:
    patience = Patience(given_s, 1)
    patience.on_quorum({3: Pace(1.0, 1.0, 900.0)}, 10.0, 1.0, 100.0)
    assert (patience.awaited, patience.deadline) == ({3}, 100.0 + given_s)
    patience.on_no_quorum()
    assert patience.deadline is None


def test_slow_rank_takes_part_if_it_delays_rounds_by_a_tenth() -> None:
    patience = Patience(None, 1)
    paces = {rank: Pace(1.0, 5.0, 0.0) for rank in range(3)} | {3: Pace(10.0, 50.0, 0.0)}
    assert patience.slow_ranks(paces.items(), 5.0, 0.0) == {3}
    wait_s = (30.0 - FREE_CADENCES * 5.0) / DELAY_SHARE
    assert patience.slow_ranks(paces.items(), 5.0, wait_s - 1) == {3}
    assert patience.slow_ranks(paces.items(), 5.0, wait_s + 1) == frozenset()
    patience.on_round([0, 1, 2], 3.0, wait_s + 2)
    assert patience.slow_ranks(paces.items(), 5.0, wait_s + 3) == frozenset(), (
        "the slow rank has had no turn yet, so it must be waited for"
    )
    patience.on_round([0, 1, 3], 30.0, wait_s + 30)
    assert patience.slow_ranks(paces.items(), 5.0, wait_s + 31) == {3}


#: Values of a report, such that some members are slow or overdue, and some times are unknown.
near_times = st.sampled_from([0.0, 0.1, 1.0, 3.0, 5.0, 9.0, 30.0])


@settings(LAWS, max_examples=1000)
@given(
    st.dictionaries(
        st.integers(0, 4),
        st.tuples(near_times, near_times, near_times, near_times, st.sampled_from([60.0, 90.0, 97.0, 99.0, 100.0])),
        min_size=1,
    ),
    st.sampled_from([None, 0.0, 4.0]),
)
@example({**dict.fromkeys(range(3), (1.0, 1.0, 30.0, 30.0, 100.0)), 3: (1.0, 1.0, 1.0, 30.0, 60.0)}, None)
def test_law_one_look_at_the_slowest_pace_changes_nothing(
    reports: dict[int, tuple[float, float, float, float, float]], grace_s: float | None
) -> None:
    roster = Roster(reports, 1.0, have_joined=True, incarnations={})
    for rank, (*times_s, reported_at) in reports.items():
        for place in (0, 1):
            roster.members[rank].record_report(*times_s[place::2], reported_at)
    paces = [(rank, member.pace(100.0)) for rank, member in roster.members.items()]
    one, two = Patience(grace_s, 3), Patience(grace_s, 3)
    cadence = roster.cadence_s()
    slow = one.slow_ranks(paces, cadence, 100.0, slowest=roster.slowest_pace(reports, 100.0))
    assert slow == two.slow_ranks(paces, cadence, 100.0)
    assert vars(one) == vars(two)


def test_no_other_pace_is_tried_if_the_slowest_is_fast_enough() -> None:
    paces: Iterator[tuple[int, Pace]] = iter([(0, Pace(1.0, 5.0, 1.0))])
    assert Patience(None, 1).slow_ranks(paces, 5.0, 0.0, slowest=Pace(1.0, 5.0, 1.0)) == frozenset()
    assert len(list(paces)) == 1


# -- in rounds --------------------------------------------------------------------------------------------------------

STEP_S, EVERY = 1.0, 5


def report(coordinator: RoundCoordinator, rank: int, now: float, *, factor: float = 1.0) -> tuple[Send, ...]:
    """Let a rank report whose steps take ``factor`` times as long."""
    interval_s = factor * STEP_S * EVERY
    return coordinator.on_report(rank, round(now), float(rank), factor * STEP_S, now, interval_s=interval_s)


def named(sends: Any) -> list[int]:
    return [send.dest for send in sends if isinstance(send.message, Assign)]


def finish(coordinator: RoundCoordinator, now: float) -> None:
    """End the round in progress, whose replacer is the lowest assigned rank."""
    number = coordinator.statistics().rounds_decided
    replacer = min(state.decision.replacers) if (state := coordinator._lifecycle.current) else -1
    coordinator.on_abandoned(replacer, number, "test", now)


def test_expected_ranks_are_awaited_and_a_slow_one_is_not() -> None:
    coordinator = OpenedCoordinator(range(4), SelectiveRules())
    for begin in (0.0, 5.0, 10.0):
        for rank in (1, 2, 3):
            report(coordinator, rank, begin + rank / 10)
        if not begin:
            report(coordinator, 0, 0.9, factor=100.0)
        elif coordinator._lifecycle.current is None:
            coordinator.on_time(coordinator.next_deadline() or 0.0)
        finish(coordinator, begin + 1.0)
    assert coordinator.statistics().rounds_ended == 3
    report(coordinator, 1, 15.1)
    report(coordinator, 2, 15.2)
    deadline = coordinator.next_deadline()
    assert deadline is not None and deadline > 15.3, "rank 3 must be expected to report at 15.3, as before"
    assert report(coordinator, 3, 15.3) == ()
    assert coordinator.next_deadline() == 15.3, "all expected reports have arrived"
    assert named(coordinator.on_time(15.3)) == [1, 2, 3], (
        "rank 0 would delay the round for 300 s, so it must be left out"
    )


def test_a_slow_rank_is_named_with_its_offset() -> None:
    coordinator = OpenedCoordinator(range(3), SelectiveRules())
    report(coordinator, 1, 0.0)
    report(coordinator, 2, 0.5)
    assert named(report(coordinator, 0, 0.75, factor=50.0)) == [1, 2]
    assert coordinator.statistics().stragglers == (Straggler(1, 0, 0.75),)
    finish(coordinator, 1.0)
    report(coordinator, 1, 5.0)
    report(coordinator, 2, 5.5)
    assert named(coordinator.on_time(coordinator.next_deadline() or 0.0)) == [1, 2]
    assert coordinator.statistics().stragglers[-1] == Straggler(2, 0, None)
    report(coordinator, 0, 250.75, factor=50.0)
    assert coordinator.statistics().stragglers[-1] == Straggler(2, 0, 245.75)


def test_member_between_two_reports_is_not_a_straggler() -> None:
    coordinator = OpenedCoordinator(range(3), SelectiveRules(grace_s=0.0))
    for begin in (0.0, 5.0):
        for rank in range(3):
            report(coordinator, rank, begin + 2.0 * rank)
            coordinator.on_time(begin + 2.0 * rank)
            if coordinator._lifecycle.current is not None:
                finish(coordinator, begin + 2.0 * rank + 0.5)
    later = [straggler for straggler in coordinator.statistics().stragglers if straggler.decision > 1]
    assert coordinator.statistics().decision_count >= 3 and not later


def test_first_decision_awaits_first_reports_within_a_cadence() -> None:
    coordinator = OpenedCoordinator(range(4), SelectiveRules())
    report(coordinator, 0, 5.0)
    report(coordinator, 1, 5.5)
    assert coordinator.next_deadline() == 5.5 + EVERY * STEP_S - 0.5
    assert named(coordinator.on_time(10.0)) == [0, 1]


def test_a_time_below_the_noise_makes_no_slow_rank() -> None:
    coordinator = OpenedCoordinator(range(3), SelectiveRules())
    for rank, step_s in enumerate((NOISE_S / 4, 1e-3, 1e-3)):
        sends = coordinator.on_report(rank, 9, float(rank), step_s, 0.0, interval_s=5 * step_s)
    assert named(sends) == [0, 1, 2]


@pytest.mark.parametrize("claimed", [math.nan, INF, -1.0, 1e308])
def test_an_interval_that_cannot_be_true_does_not_stop_the_clock(claimed: float) -> None:
    coordinator = OpenedCoordinator(range(3), SelectiveRules(max_report_age_s=INF))
    for rank in range(2):
        coordinator.on_report(rank, 9, float(rank), 0.1, 0.0, interval_s=claimed)
    deadline = coordinator.next_deadline()
    assert deadline is not None and deadline <= 3600.0
    assert named(coordinator.on_time(deadline)) == [0, 1]
