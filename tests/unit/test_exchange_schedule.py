"""Tests the steps at which DiLoCo's fragments are due: in turn, at equal distances, even after a warm-up."""

from __future__ import annotations

import itertools

import pytest

from asyncdist.protocols.exchange.schedule import Schedule

CASES = [
    (every, count, overlap, warmup)
    for every, warmup in itertools.product((1, 2, 3, 5, 8), (0, 1, 2, 7))
    for count in range(1, every + 1)
    for overlap in {0, every - 1}
]


@pytest.mark.parametrize(("every", "count", "overlap", "warmup"), CASES)
def test_fragments_are_due_in_turn_at_equal_distances(every: int, count: int, overlap: int, warmup: int) -> None:
    schedule = Schedule(every, count, overlap, warmup)
    due = [(step, fragment) for step in range(warmup + 4 * every) for fragment in schedule.due(step)]
    assert [fragment for _, fragment in due] == [place % count for place in range(len(due))], (
        "the fragments must take turns"
    )
    assert len(due) == (warmup + 4) * count
    for fragment in range(count):
        steps = [step for step, each in due if each == fragment and step >= warmup]
        for end in range(warmup + 4 * every):
            assert schedule.due_count(fragment, end) == sum(each == fragment and step < end for step, each in due)
        assert [later - earlier for earlier, later in itertools.pairwise(steps)] == [every] * 3
        assert steps[0] - warmup < every
    after = [step for step, _ in due if step >= warmup]
    gaps = [later - earlier for earlier, later in itertools.pairwise(after)]
    assert max(gaps, default=0) - min(gaps, default=0) <= 1
    assert after[-1] == warmup + 4 * every - 1, "the last round must be due in the last step"


@pytest.mark.parametrize(("every", "count", "overlap", "warmup"), CASES)
def test_a_mean_is_applied_before_its_fragment_is_due(every: int, count: int, overlap: int, warmup: int) -> None:
    schedule = Schedule(every, count, overlap, warmup)
    applied = {}
    for step in range(warmup + 3 * every):
        for fragment in schedule.due(step):
            assert applied.get(fragment, 0) <= step, f"fragment {fragment} is still in flight at step {step}"
            applied[fragment] = schedule.applied_at(step)
            assert applied[fragment] == step + (overlap if step >= warmup else 0)
