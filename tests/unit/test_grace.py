"""Tests the length of grace periods in training steps."""

from __future__ import annotations

from hypothesis import given, strategies as st

from asyncdist.protocols.async_diloco.timing import SyncTimes, grace_period

SECONDS = st.floats(0.0, 1e3)


def test_a_grace_period_is_a_share_of_the_time_left() -> None:
    assert grace_period(2, 1.5, 0.5, 0.5) == 0.9 * 2.0
    assert grace_period(2, 0.5, 0.75, 0.5) == 0.0, "no time may be left, as the quorum took too long"


@given(st.floats(0.0, 100.0), SECONDS, SECONDS, SECONDS)
def test_the_anchor_arrives_within_the_steps(steps: float, step_s: float, quorum_s: float, sync_s: float) -> None:
    found = grace_period(steps, step_s, quorum_s, sync_s)
    assert found == 0.0 or quorum_s + found + sync_s < steps * step_s * (1 + 1e-12)


def test_the_time_to_send_an_anchor_is_that_of_the_slowest_rank() -> None:
    times = SyncTimes()
    assert times.longest_s((0, 1)) == 0.0
    times.on_decided(1, (0, 1), 10.0)
    times.on_taken(1, 0, 10.5)
    times.on_taken(1, 1, 12.0)
    assert (times.longest_s((0,)), times.longest_s((0, 1)), times.longest_s((0, 1, 7))) == (0.5, 2.0, 2.0)
    times.on_decided(2, (1,), 20.0)
    times.on_taken(1, 1, 25.0)  # repeated for an earlier version
    assert times.longest_s((0, 1)) == 2.0
    times.on_taken(2, 1, 20.25)
    assert times.longest_s((0, 1)) == 0.5
    times.on_gone(0)
    assert times.longest_s((0, 1)) == 0.25
