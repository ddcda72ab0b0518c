"""Tests which contributions make a version of the anchor, and the choice of a new leader's state."""

from __future__ import annotations

import pytest

from protocols.async_diloco.arrivals import Arrival, Arrivals, Handling, Quorum, newest, weight_of
from protocols.async_diloco.messages import AnchorOffer, Applied, Arrived, MemberState


def arrival(rank: int, sequence: int = 1) -> Arrival:
    return Arrival(rank, sequence, 0, 10, 20.0, 1.0)


def arrived(arrivals: Arrivals, rank: int, at: float = 0.0, sequence: int = 1) -> None:
    """Report a contribution half a second before it arrives."""
    assert arrivals.on_arrived(arrival(rank, sequence), at - 0.5) is Handling.FETCH
    arrivals.on_received(arrival(rank, sequence), at)


def taken(arrivals: Arrivals, *, takes_all: bool = False) -> list[tuple[int, int]]:
    found = [(each.rank, each.sequence) for each in arrivals.take(takes_all=takes_all)]
    arrivals.note_applied()
    return found


def test_each_contribution_is_a_version_with_a_quorum_of_one() -> None:
    arrivals = Arrivals(range(3), 1)
    for rank in (2, 0):
        arrived(arrivals, rank)
    assert (taken(arrivals), taken(arrivals), arrivals.quorum()) == ([(2, 1)], [(0, 1)], None)
    assert arrivals.applications() == ((0, 1), (2, 1))


def test_a_quorum_counts_living_ranks_and_is_in_rank_order() -> None:
    arrivals = Arrivals(range(4), 3)
    for rank in (3, 1):
        arrived(arrivals, rank)
    assert arrivals.quorum() is None
    arrivals.on_gone(3)  # its contribution counts, but not for the quorum of the living ranks
    arrived(arrivals, 0)
    assert arrivals.quorum() is None
    arrived(arrivals, 2)
    assert taken(arrivals) == [(0, 1), (1, 1), (2, 1), (3, 1)]


def test_a_quorum_larger_than_the_members_is_all_of_them() -> None:
    arrivals = Arrivals(range(3), 3)
    arrived(arrivals, 0)
    arrivals.on_gone(1)
    assert arrivals.quorum() is None
    arrivals.on_gone(2)
    assert taken(arrivals) == [(0, 1)]


def test_a_quorum_has_its_ranks_and_its_times() -> None:
    arrivals = Arrivals(range(3), 2)
    assert arrivals.on_arrived(arrival(0), 0.0) is Handling.FETCH
    arrived(arrivals, 1, at=1.0)
    assert arrivals.quorum() is None
    arrivals.on_received(arrival(0), 2.0)
    assert (arrivals.quorum(), arrivals.is_complete) == (Quorum(frozenset((0, 1)), 0.0, 2.0), False)
    arrived(arrivals, 2, at=2.25)
    assert arrivals.quorum() == Quorum(frozenset((0, 1)), 0.0, 2.0), "the third contribution must not be needed"
    assert arrivals.is_complete and len(arrivals.take(takes_all=True)) == 3


def test_without_grace_a_version_has_no_more_than_the_quorum() -> None:
    arrivals = Arrivals(range(3), 2)
    for rank in (0, 2, 1):
        arrived(arrivals, rank)
    assert taken(arrivals) == [(0, 1), (2, 1)] and arrivals.quorum() is None


def test_a_repeated_contribution_is_answered_but_not_applied() -> None:
    arrivals = Arrivals(range(3), 1, {1: 4})
    assert arrivals.on_arrived(arrival(1, 4), 0.0) is Handling.ANSWER
    arrived(arrivals, 1, sequence=5)
    assert arrivals.on_arrived(arrival(1, 5), 0.0) is Handling.IGNORE
    assert taken(arrivals) == [(1, 5)]
    assert arrivals.on_arrived(arrival(1, 5), 0.0) is Handling.ANSWER
    assert arrivals.on_arrived(arrival(7), 0.0) is Handling.IGNORE, (
        "a contribution of a rank that is not a member must be ignored"
    )


def test_a_taken_contribution_is_applied_once_the_anchor_has_it() -> None:
    """Regression: a state that was copied while the mean was computed counted contributions that its anchor lacked."""
    arrivals = Arrivals(range(2), 1)
    arrived(arrivals, 1)
    assert [each.rank for each in arrivals.take(takes_all=False)] == [1]
    assert arrivals.applications() == () and arrivals.quorum() is None
    assert arrivals.on_arrived(arrival(1), 0.0) is Handling.IGNORE
    arrivals.note_applied()
    assert arrivals.applications() == ((1, 1),)
    assert arrivals.on_arrived(arrival(1), 0.0) is Handling.ANSWER


def test_two_processes_of_a_rank_contribute_to_two_versions() -> None:
    arrivals = Arrivals(range(2), 1)
    arrived(arrivals, 1, sequence=3)
    arrivals.on_gone(1)
    arrivals.on_admitted(1)
    assert arrivals.reported[1] == 3
    arrived(arrivals, 1, sequence=4)
    assert (taken(arrivals, takes_all=True), taken(arrivals, takes_all=True)) == ([(1, 3)], [(1, 4)])


def test_a_contribution_under_way_from_a_lost_rank_is_dropped() -> None:
    arrivals = Arrivals(range(2), 1)
    assert arrivals.on_arrived(arrival(1), 0.0) is Handling.FETCH
    arrivals.on_gone(1)
    arrivals.on_received(arrival(1), 0.0)
    assert not taken(arrivals)


def test_a_worker_with_a_new_source_drops_what_is_not_applied() -> None:
    """The workers of the global server are islands; the rank that contributes for an island changes."""
    arrivals, first = Arrivals((0, 1), 2), Arrival(1, 4, 0, 10, 20.0, 1.0, source=5)
    assert arrivals.on_arrived(first, 0.0) is Handling.FETCH and arrivals.is_awaited(first)
    arrivals.forget(1, source=6)
    assert arrivals.is_awaited(first)
    arrivals.forget(1, source=5)
    arrivals.on_received(first, 0.0)
    assert not taken(arrivals)
    assert arrivals.on_arrived(first, 0.0) is Handling.FETCH
    arrivals.on_received(first, 0.0)
    arrivals.forget(1, source=5)
    assert arrivals.on_arrived(first, 0.0) is Handling.IGNORE, "the contribution has arrived"
    arrivals.forget(1)
    assert arrivals.on_arrived(Arrival(1, 4, 0, 9, 1.0, 1.0, source=7), 0.0) is Handling.FETCH


def test_weights_of_contributions() -> None:
    assert [weight_of(20.0, 10, weighting) for weighting in ("equal", "tokens", "rate")] == [1.0, 20.0, 40.0]


def test_a_new_leader_takes_the_newest_states() -> None:
    versions = {1: 4, 2: 7, 3: 7, 4: 5}
    assert newest(versions, 1) == (7, 2)
    assert newest(versions, 3) == (7, 3), "among equally new states, a leader must prefer its own"
    assert newest({2: -1}, 2) == (-1, 2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Arrived(-1, 1, 1.0, 1.0, 0.0),
        lambda: Arrived(0, 1, float("nan"), 1.0, 0.0),
        lambda: Arrived(0, 1, 1.0, 1.0, -1.0),
        lambda: MemberState(1, (), 2, 0, ()),
        lambda: MemberState(1, (), 0, 1, ()),
        lambda: AnchorOffer((), -1, 0),
        lambda: AnchorOffer((), 0, -1),
        lambda: Applied(1, (), (0,), (), 0, 1.0, 0.0, 1, 0, 0.0, 0),
        lambda: Applied(1, (), (0,), (0.0,), 0, 1.0, 0.0, 1, 0, 0.0, 0),
        lambda: Applied(1, (), (), (), 0, 1.0, 0.0, 0, 0, 0.0, 0),
        lambda: Applied(1, (), (), (), 0, 1.0, 0.0, 1, 0, float("inf"), 0),
    ],
)
def test_messages_with_impossible_values_are_refused(make: object) -> None:
    with pytest.raises(ValueError, match="got"):
        make()  # type: ignore[operator]


def test_a_quorum_does_not_wait_for_members_that_settle() -> None:
    arrivals = Arrivals(range(4), 3)
    arrived(arrivals, 1)
    assert arrivals.quorum() is None
    arrivals.settling = {0, 2, 3}
    assert arrivals.quorum() is not None and arrivals.is_complete
    assert taken(arrivals) == [(1, 1)]
    arrivals.settling = {0, 1, 2, 3}
    assert arrivals.quorum() is None
