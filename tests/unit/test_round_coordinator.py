"""Tests the coordinator of selective averaging: rounds by hand and at random, and regressions."""

import math
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from support.referee import Referee
from support.selective import STRATEGIES, OpenedCoordinator, rules

from protocols.selective.lifecycle import PLAUSIBLE_ROUND_MAX
from protocols.selective.messages import Assign, Frozen, Joined
from protocols.selective.roster import Send
from protocols.selective.rounds import RoundCoordinator
from protocols.selective.selection import SHARED_NBYTES_MIN, Decision, SelectiveRules

LAWS = settings(deadline=None, derandomize=True, max_examples=200)
NAN, INF = math.nan, math.inf


# ------------------------------------------------------------------------------------------------ coordinator, by hand


def report_all(coordinator: RoundCoordinator, listed: list[float], *, iteration: int = 9, now: float = 0.0) -> Any:
    sends: list[Send] = []
    for rank, value in enumerate(listed):
        sends += coordinator.on_report(rank, iteration, value, 0.5, now)
    return sends


def brief(sends: Any) -> list[tuple[int, int, str]]:
    return [(send.dest, send.round, type(send.message).__name__) for send in sends]


def started(count: int = 4, **options: Any) -> RoundCoordinator:
    coordinator = OpenedCoordinator(range(count), rules(**options))
    report_all(coordinator, [float(rank) for rank in range(count)])
    return coordinator


def test_a_round_from_reports_to_end() -> None:
    coordinator = OpenedCoordinator(range(4), rules())
    sends = report_all(coordinator, [0.0, 1.0, 2.0, 3.0])
    assert sends == [
        Send(0, 1, Assign("replacer", (1, 2, 3), (0,), 9, 3)),
        *(Send(rank, 1, Assign("donor", (1, 2, 3), (0,), 9, 3)) for rank in (1, 2, 3)),
    ]
    assert coordinator.on_ready(2, 1, 10, 1.0) == ()
    assert coordinator.on_ready(1, 1, 11, 1.0) == ()
    timeout_s = 8.0 + 3 * (2 * 0.5 + 0.5) + 0.5
    frozen = Frozen((1, 2, 3), (1.0, 1.0, 1.0), (11, 10, 12), 3, timeout_s)
    assert coordinator.on_ready(3, 1, 12, 1.0) == (Send(0, 1, frozen),)
    assert coordinator.next_deadline() == 1.0 + timeout_s + 2 * 0.5 + 8.0 / 4
    assert brief(coordinator.on_applied(0, 1, 20, 2.0)) == [(rank, 1, "End") for rank in range(4)]
    assert coordinator.next_deadline() is None
    statistics = coordinator.statistics()
    assert (statistics.rounds_decided, statistics.rounds_ended, statistics.applied[0]) == (1, 1, 1)
    assert not statistics.ignored
    assert coordinator._history.recent_events()[-1].endswith("ended, every replacer has answered")


def test_safe_points_of_a_stream_lengthen_the_timeout() -> None:
    coordinator = OpenedCoordinator(range(2), rules(), stream_safe_points=10)
    report_all(coordinator, [0.0, 1.0])
    (send,) = coordinator.on_ready(1, 1, 9, 0.0)
    assert isinstance(send.message, Frozen)
    assert send.message.timeout_s == 8.0 + 11 * 0.5 + 10 * 0.5 + 0.5


def test_sharded_round_names_reducers_and_freezes_with_the_rest() -> None:
    coordinator = OpenedCoordinator(range(4), rules(route="sharded"))
    sends = report_all(coordinator, [0.0, 1.0, 2.0, 3.0])
    named = {"reducers": (1, 2, 3)}
    assert sends == [
        Send(0, 1, Assign("replacer", (1, 2, 3), (0,), 9, 3, **named)),
        *(Send(rank, 1, Assign("donor", (1, 2, 3), (0,), 9, 3, **named, part=rank - 1)) for rank in (1, 2, 3)),
    ]
    coordinator.on_ready(1, 1, 10, 1.0)
    coordinator.on_ready(3, 1, 10, 1.0)
    # The sum of both donors' streams, requested in turn, and the additional steps of a reducer, with a part's stream.
    timeout_s = 8.0 + 2 * (2 * 0.5 + 0.5) + (2 * 0.5 + 8 * 2 * 0.5) + 0.5
    frozen = Frozen((1, 3), (1.0, 1.0), (10, 10), 3, timeout_s, (1, 3))
    assert coordinator.on_decline(2, 1, "no", 1.0)[1:] == tuple(Send(rank, 1, frozen) for rank in (0, 1, 3))
    assert brief(coordinator.on_applied(0, 1, 20, 2.0)) == [(0, 1, "End"), (1, 1, "End"), (3, 1, "End")]
    assert coordinator.statistics().routes == {"direct": 0, "sharded": 1}


def test_replacers_of_one_host_learn_the_source_of_each_part() -> None:
    coordinator = OpenedCoordinator(
        range(4), rules(route="sharded", replacement_ratio=0.5), model_nbytes=SHARED_NBYTES_MIN
    )
    for rank, host in enumerate((7, 7, 9, 9)):
        coordinator.roster.note_host(rank, host)
    sends = report_all(coordinator, [0.0, 1.0, 2.0, 3.0])
    assert [(send.message.reducers, send.message.sources) for send in sends] == [
        *[((2, 3), (0, 1))] * 2,
        *[((2, 3), ())] * 2,
    ]
    coordinator.on_ready(2, 1, 10, 1.0)
    frozen = coordinator.on_ready(3, 1, 10, 1.0)[0].message
    # The same as on the sharded route, plus the steps of both ends of one more stream.
    assert frozen.timeout_s == 8.0 + 2 * (2 * 0.5 + 0.5) + (2 * 0.5 + 8 * 2 * 0.5) + (2 * 0.5 + 0.5) + 0.5


def test_more_numerous_replacers_reduce_while_they_take_part() -> None:
    coordinator = OpenedCoordinator(
        range(4), rules(route="sharded", averaging_strategy="best_only", replacement_ratio=0.7)
    )
    sends = report_all(coordinator, [0.0, 1.0, 2.0, 3.0])
    assert [(send.dest, send.message.part) for send in sends] == [(0, 0), (1, 1), (2, 2), (3, -1)]
    coordinator.on_decline(1, 1, "leaving", 1.0)
    sends = coordinator.on_ready(3, 1, 10, 1.0)
    assert [(send.dest, send.message.reducers) for send in sends] == [(0, (0, 2)), (2, (0, 2))]


def test_reset_freezes_together_with_the_assignment() -> None:
    coordinator = OpenedCoordinator(range(3), rules(averaging_strategy="reset_weights"))
    sends = report_all(coordinator, [1.0, 0.0, 2.0])
    assert sends == [Send(1, 1, Assign("replacer", (), (1,), 9, -1)), Send(1, 1, Frozen((), (), (), -1, 8.5))]
    assert brief(coordinator.on_applied(1, 1, 10, 1.0)) == [(1, 1, "End")]


def test_defect_07_a_round_does_not_wait_for_all_ranks() -> None:
    coordinator = OpenedCoordinator(range(4), rules(quorum=0.5, grace_s=1.0))
    assert coordinator.on_report(1, 9, 1.0, 0.5, 0.0) == ()
    assert coordinator.next_deadline() is None
    assert coordinator.on_report(3, 9, 3.0, 0.5, 2.0) == ()
    assert coordinator.next_deadline() == 3.0
    assert coordinator.on_time(2.9) == ()
    assert brief(coordinator.on_time(3.0)) == [(1, 1, "Assign"), (3, 1, "Assign")]
    stragglers = coordinator.statistics().stragglers
    assert [(straggler.rank, straggler.offset_s) for straggler in stragglers] == [(0, None), (2, None)]
    coordinator.on_report(2, 9, 9.0, 0.5, 7.0)
    assert [straggler.offset_s for straggler in coordinator.statistics().stragglers] == [None, 7.0]


def test_defect_07_incomplete_rounds_do_not_leak() -> None:
    coordinator = started()
    for number in range(1, 20):
        deadline = coordinator.next_deadline() or 0.0  # no rank ever answers
        sends = coordinator.on_time(deadline)
        assert brief(sends) == [(rank, number, "End") for rank in range(4)]
        assert coordinator.next_deadline() is None
        report_all(coordinator, [0.0, 1.0, 2.0, 3.0], iteration=number * 10, now=deadline)
    assert coordinator.statistics().abandoned == {"no donor was ready": 19}


def test_defect_07_a_replacer_that_never_answers_ends_by_time() -> None:
    coordinator = started()
    for rank in (1, 2, 3):
        coordinator.on_ready(rank, 1, 9, 0.0)
    deadline = coordinator.next_deadline()
    assert deadline is not None
    assert brief(coordinator.on_time(deadline)) == [(rank, 1, "End") for rank in range(4)]
    assert coordinator.statistics().overdue_count == 1


def test_an_applied_that_comes_too_late_still_voids_the_reports() -> None:
    coordinator = started()
    for rank in (1, 2, 3):
        coordinator.on_ready(rank, 1, 9, 0.0)
    coordinator.on_time(coordinator.next_deadline() or 0.0)
    coordinator.on_applied(0, 1, 30, 100.0)
    coordinator.on_applied(0, 1, 30, 100.0)
    assert coordinator.statistics().applied[0] == 1
    assert coordinator.on_report(0, 30, -1.0, 0.5, 100.0) == ()
    assert coordinator.statistics().ignored == {
        "Applied after the round's timeout": 1,
        "Applied from a rank that owes none": 1,
        "Report from before the average was applied": 1,
    }


def test_reports_of_a_replaced_rank_are_void_up_to_its_applied() -> None:
    coordinator = started(2)
    coordinator.on_ready(1, 1, 9, 0.0)
    coordinator.on_report(0, 19, -5.0, 0.5, 1.0)
    coordinator.on_report(1, 19, 5.0, 0.5, 1.0)
    assert brief(coordinator.on_applied(0, 1, 19, 2.0)) == [(0, 1, "End"), (1, 1, "End")], "no new round may begin"
    assert coordinator.on_report(0, 19, -5.0, 0.5, 3.0) == ()
    assert brief(coordinator.on_report(0, 29, -5.0, 0.5, 4.0)) == [(0, 2, "Assign"), (1, 2, "Assign")]


def test_rounds_do_not_overlap_and_the_next_follows_at_once() -> None:
    coordinator = started(3)
    assert report_all(coordinator, [5.0, 6.0, 4.0], iteration=19, now=1.0) == []
    told = coordinator.on_decline(0, 1, "leaving soon", 2.0)
    assert told[-1] == Send(2, 2, Assign("replacer", (0, 1), (2,), 19, 1)), (
        "reports that arrived during round 1 must decide round 2"
    )


def test_a_slow_rank_is_judged_by_its_newest_report_and_replaced() -> None:
    coordinator = OpenedCoordinator(range(3), rules(quorum=0.5, replacement_ratio=0.3))
    report_all(coordinator, [1.0, 0.5, 2.0])
    coordinator.on_abandoned(1, 1, "test", 0.5)
    for rank in (0, 2):
        coordinator.on_report(rank, 19, float(rank + 1), 0.5, 5.0)
    sends = coordinator.on_time(6.0)
    assert sends[1] == Send(1, 2, Assign("replacer", (0, 2), (1,), 9, 2))


def test_a_report_that_is_too_old_is_not_judged() -> None:
    coordinator = OpenedCoordinator(range(3), rules(quorum=0.5, max_report_age_s=3.0))
    report_all(coordinator, [1.0, 0.5, 2.0])
    coordinator.on_abandoned(1, 1, "test", 0.5)
    for rank in (0, 2):
        coordinator.on_report(rank, 19, float(rank + 1), 0.5, 5.0)
    assert brief(coordinator.on_time(6.0)) == [(0, 2, "Assign"), (2, 2, "Assign")]


def test_a_decision_without_action_spends_the_reports() -> None:
    coordinator = OpenedCoordinator(range(2), rules(threshold=0.0))
    assert report_all(coordinator, [1.0, 2.0]) == []
    assert coordinator.statistics().decision_count == 1
    assert coordinator.on_report(0, 19, -1.0, 0.5, 1.0) == ()
    assert brief(coordinator.on_report(1, 19, 2.0, 0.5, 1.0)) == [(0, 1, "Assign"), (1, 1, "Assign")]


def test_cooldown_counts_fastest_iterations_with_a_threshold() -> None:
    for threshold, expected in ((5.0, [0, 2]), (None, [0, 1, 2])):
        coordinator = OpenedCoordinator(range(2), rules(threshold=threshold, cooldown=20))
        acted = []
        for index, iteration in enumerate((100, 119, 120)):
            if report_all(coordinator, [1.0, 2.0], iteration=iteration):
                acted.append(index)
                coordinator.on_abandoned(0, len(acted), "test", 0.0)
        assert acted == expected


def test_a_donor_lost_before_the_freeze_is_left_out_and_named() -> None:
    coordinator = started(averaging_strategy="weighted_mean")
    coordinator.on_ready(3, 1, 9, 0.0)
    coordinator.on_ready(1, 1, 9, 0.0)
    assert coordinator.on_lost(3, 0.5) == ()
    sends = coordinator.on_decline(2, 1, "not finite", 1.0)
    assert brief(sends) == [(2, 1, "End"), (0, 1, "Frozen")]
    assert sends[1].message == Frozen((1,), (1.0,), (9,), 1, 8.0 + 1.5 + 0.5)
    assert [(out.rank, out.reason) for out in coordinator.statistics().left_out] == [(3, "was lost"), (2, "not finite")]
    assert brief(coordinator.on_applied(0, 1, 10, 2.0)) == [(0, 1, "End"), (1, 1, "End")]


def test_the_freeze_does_not_wait_for_a_slow_donor() -> None:
    coordinator = started()
    coordinator.on_ready(1, 1, 9, 0.0)
    assert coordinator.next_deadline() == 0.5 + 8.0 / 4
    sends = coordinator.on_time(2.5)
    assert brief(sends) == [(2, 1, "End"), (3, 1, "End"), (0, 1, "Frozen")]
    assert isinstance(sends[-1].message, Frozen)
    assert sends[-1].message.best == 1
    assert coordinator.on_ready(3, 1, 12, 3.0) == ()
    ((reason, count),) = coordinator.statistics().ignored.items()
    assert reason.startswith("Ready") and count == 1


def test_no_donor_left_ends_the_round() -> None:
    coordinator = started(averaging_strategy="best_only")
    assert brief(coordinator.on_decline(3, 1, "leaving", 1.0)) == [(0, 1, "End"), (3, 1, "End")]


def test_replacers_end_one_by_one() -> None:
    coordinator = started(5, replacement_ratio=0.8)
    assert coordinator.on_decline(0, 1, "applied since", 1.0) == ()
    frozen = coordinator.on_ready(4, 1, 9, 1.0)
    assert brief(frozen) == [(rank, 1, "Frozen") for rank in (1, 2, 3)]
    assert coordinator.on_abandoned(1, 1, "donor 4 lost", 2.0) == ()
    assert coordinator.on_lost(2, 2.0) == ()
    assert brief(coordinator.on_leave(3, 2.0)) == [(0, 1, "End"), (1, 1, "End"), (4, 1, "End")]
    statistics = coordinator.statistics()
    assert statistics.abandoned == {"donor 4 lost": 1, "the replacer was lost": 1, "the replacer left": 1}
    assert statistics.declines[0] == 1


def test_what_fits_nothing_is_counted() -> None:
    coordinator = started()
    coordinator.on_report(77, 1, 1.0, 0.5, 0.0)
    coordinator.on_ready(77, 1, 1, 0.0)
    coordinator.on_ready(1, 2, 1, 0.0)
    coordinator.on_ready(0, 1, 1, 0.0)
    coordinator.on_applied(0, 1, 1, 0.0)
    coordinator.on_abandoned(3, 1, "?", 0.0)
    coordinator.on_leave(2, 0.0)
    coordinator.on_decline(2, 1, "?", 0.0)
    coordinator.on_lost(2, 0.0)
    coordinator.on_lost(78, 0.0)
    assert sum(coordinator.statistics().ignored.values()) == 7


def test_a_member_that_leaves_is_not_waited_for() -> None:
    coordinator = OpenedCoordinator(range(3), rules())
    coordinator.on_report(0, 9, 0.0, 0.5, 0.0)
    coordinator.on_report(1, 9, 1.0, 0.5, 0.0)
    assert brief(coordinator.on_leave(2, 1.0)) == [(0, 1, "Assign"), (1, 1, "Assign")]
    finished = [coordinator.finished]
    assert brief(coordinator.on_leave(0, 1.0)) == [(1, 1, "End")]
    assert coordinator.on_lost(1, 1.0) == ()
    finished.append(coordinator.finished)
    assert finished == [False, True]
    assert coordinator.next_deadline() is None


@pytest.mark.parametrize("claimed", [NAN, INF, -1.0, 1e308])
def test_a_step_time_that_cannot_be_true_does_not_stop_the_clock(claimed: float) -> None:
    coordinator = OpenedCoordinator(range(2), rules())
    for rank in range(2):
        coordinator.on_report(rank, 9, float(rank), claimed, 0.0)
    for _ in range(2):
        deadline = coordinator.next_deadline()
        assert deadline is not None
        assert deadline < 1e5
        coordinator.on_ready(1, 1, 9, 0.0)
    assert coordinator.on_time(coordinator.next_deadline() or 0.0)
    assert coordinator.next_deadline() is None


def test_reasons_from_peers_do_not_grow_without_bound() -> None:
    coordinator = OpenedCoordinator(range(2), rules())
    for number in range(1, 100):
        report_all(coordinator, [0.0, 1.0], iteration=number)
        coordinator.on_abandoned(0, number, f"reason {number}", 0.0)
    abandoned = coordinator.statistics().abandoned
    assert sum(abandoned.values()) == 99
    assert len(abandoned) == 33


def test_a_round_number_that_no_frame_can_carry_is_not_believed() -> None:
    coordinator = OpenedCoordinator(range(2), rules(), may_join=range(2))
    for rank in range(2):
        sends = coordinator.on_joined(rank, Joined(2**63 - 1, -1, -1, 9, float(rank), 0.5, 0.0), 0.0)
    assert [send.round for send in sends] == [PLAUSIBLE_ROUND_MAX + 1] * 2


@pytest.mark.parametrize("members", [[], [1, 1]])
def test_members_are_checked(members: list[int]) -> None:
    with pytest.raises(ValueError, match="members must be"):
        OpenedCoordinator(members, rules())
    with pytest.raises(ValueError, match="stream_safe_points must be >= 1, got 0"):
        OpenedCoordinator([0], rules(), stream_safe_points=0)


def test_a_broken_invariant_tells_the_story() -> None:
    coordinator = started()
    decision = Decision((1,), (0,), (1.0,), 1)
    with pytest.raises(
        AssertionError, match=r"(?s)before the previous round has ended.*rank 3 reports 3\.0 at iteration 9"
    ):
        coordinator._lifecycle.start(decision, {}, 0.0)


# -------------------------------------------------------------------------------------- coordinator, at random


KINDS = ("report",) * 6 + ("ready",) * 4 + ("applied",) * 2 + ("decline", "abandoned", "gone", "time", "time")
events = st.tuples(
    st.sampled_from(KINDS),
    st.integers(0, 4),
    st.sampled_from((0, 0, 0, 0, 1)),
    st.integers(0, 400),
    st.one_of(st.floats(-3.0, 3.0), st.sampled_from((NAN, INF))),
    st.floats(0.0, 2.0),
)
round_rules = st.builds(
    SelectiveRules,
    replacement_ratio=st.sampled_from((0.0, 0.25, 0.5, 1.0)),
    averaging_strategy=st.sampled_from(STRATEGIES),
    metric_mode=st.sampled_from(("max", "min")),
    threshold=st.sampled_from((None, None, 0.0)),
    cooldown=st.sampled_from((0, 50)),
    quorum=st.sampled_from((0.0, 0.5, 0.7, 1.0)),
    grace_s=st.sampled_from((None, None, 0.0, 1.0)),
    max_report_age_s=st.sampled_from((5.0, 600.0)),
    round_timeout_s=st.sampled_from((1.0, 20.0)),
    route=st.sampled_from(("direct", "sharded")),
)


@pytest.mark.slow
@settings(LAWS, max_examples=400)
@given(st.integers(1, 5), round_rules, st.lists(events, max_size=80))
def test_law_any_sequence_of_events_keeps_every_promise(
    size: int, options: SelectiveRules, listed: list[tuple[str, int, int, int, float, float]]
) -> None:
    referee = Referee(size, options)
    for event in listed:
        referee.feed(event)
    referee.drain()


@pytest.mark.slow
@settings(LAWS, max_examples=100)
@given(st.integers(2, 5), round_rules, st.lists(events, max_size=40))
def test_law_a_coordinator_is_a_function_of_its_events(
    size: int, options: SelectiveRules, listed: list[tuple[str, int, int, int, float, float]]
) -> None:
    stories = []
    for _ in range(2):
        referee = Referee(size, options)
        for event in listed:
            referee.feed(event)
        stories.append((referee.coordinator._history.recent_events(), referee.coordinator.statistics()))
    assert stories[0] == stories[1]


@pytest.mark.slow
@LAWS
@given(st.integers(2, 6), st.integers(0, 5), st.integers(1, 4))
def test_law_live_members_are_judged_again_after_a_silent_round(size: int, silent: int, repeats: int) -> None:
    """Liveness: with any members silent, each batch of reports from the others leads to one more decision."""
    coordinator = OpenedCoordinator(range(size), rules(quorum=0.5))
    now = 0.0
    for batch in range(1, repeats + 1):
        for rank in range(size):
            if size == 2 or rank != silent:
                coordinator.on_report(rank, batch * 10, float(rank), 0.1, now)
        while (deadline := coordinator.next_deadline()) is not None:
            now = deadline
            coordinator.on_time(now)
        assert coordinator.statistics().decision_count == batch
        assert coordinator.statistics().rounds_ended == batch
