"""Tests the number of local steps of asynchronous DiLoCo."""

from __future__ import annotations

from hypothesis import given, strategies as st

from asyncdist.protocols.async_diloco.timing import Stopwatch, steps_at_speed

TIMES = st.floats(1e-6, 1e6)
SPEEDS = st.floats(1e-6, 1e6)


def test_local_steps_equal_the_notebooks() -> None:
    """Four workers of the notebook of Liu et al., with H = 20. There, the slowest makes at least 5 steps."""
    speeds = [1 / step_s for step_s in (0.58, 0.75, 1.51, 3.33)]
    assert [steps_at_speed(20, rank, dict(enumerate(speeds))) for rank in range(4)] == [20, 15, 7, 3]


@given(st.integers(1, 1000), SPEEDS, SPEEDS)
def test_a_slower_rank_makes_no_more_steps(steps: int, one: float, other: float) -> None:
    slow, fast = min(one, other), max(one, other)
    found = steps_at_speed(steps, 0, {0: slow, 1: fast})
    assert 1 <= found <= steps
    assert steps_at_speed(steps, 1, {0: slow, 1: fast}) == steps
    if found > 1:  # the rank is at most one step later than the fastest rank
        assert (found - 1e-6) / slow <= steps / fast <= (found + 1 + 1e-6) / slow


def test_a_rank_of_unknown_speed_makes_all_steps() -> None:
    assert steps_at_speed(20, 1, {}) == 20
    assert steps_at_speed(20, 1, {0: 3.0, 2: 1.0}) == 20
    assert steps_at_speed(20, 1, {1: 0.1}) == 20, "the fastest known rank must make all steps"
    assert steps_at_speed(20, 1, {0: 3.0, 1: 0.01}) == 1, "a rank must make at least one step"


def test_a_stopwatch_leaves_out_the_policys_waits() -> None:
    watch = Stopwatch()
    assert watch.take() == 0.0
    watch.on_step(10.0)  # the first step includes the start
    watch.on_resume(11.0)
    assert watch.take() == 0.0
    for begins, ends in ((11.0, 11.5), (20.0, 20.5), (30.0, 30.5)):
        watch.on_resume(begins)
        watch.on_step(ends)
    assert watch.take() == 2.0
    assert watch.take() == 0.0
    watch.on_resume(40.0)
    watch.on_step(44.0)
    assert watch.take() == 0.25
