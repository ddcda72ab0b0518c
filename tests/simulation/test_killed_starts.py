"""Tests that a policy starts on all living ranks, or on none, even if the deciding rank is killed."""

from __future__ import annotations

from collections import Counter
from typing import Final

import pytest

from simulation import killed_start_scenarios

#: Seeds whose ranks ended in different policies before members asked each other.
LEFT_APART: Final = (63, 85, 86, 98, 106, 113, 121, 137, 142, 150, 153, 157)


@pytest.mark.slow
def test_starts_that_left_ranks_apart_do_so_no_more() -> None:
    """This test runs the first of these seeds; the test below runs all of them, and others."""
    for seed in LEFT_APART[:4]:
        killed_start_scenarios.run(seed)


@pytest.mark.slow
@pytest.mark.long
def test_ranks_killed_in_a_start_leave_the_others_in_one_policy() -> None:
    """A few of many seeds; tools/soak runs more."""
    seen: Counter[str] = Counter()
    for seed in (*range(20), *LEFT_APART):
        seen += killed_start_scenarios.run(seed)
    assert seen["verdicts passed on"] > 5 and seen["verdicts lost"] > 5, seen
