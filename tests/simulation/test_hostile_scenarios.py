"""A rank that sends well-formed messages which are not true makes no other rank crash, or hold more memory."""

from __future__ import annotations

from collections import Counter

import pytest

from simulation.hostile_scenarios import PROGRAMS, run_hostile


@pytest.mark.slow
def test_lies_of_a_rank_crash_no_other_one() -> None:
    """A few of many: see tools/soak."""
    sent: Counter[str] = Counter()
    ends: Counter[str] = Counter()
    for seed in range(20):
        seen = run_hostile(seed)
        sent += seen.sent
        ends += seen.ends
    assert len(sent) > 25, "lies of many types were told"
    assert ends["well"] > 5 and len(ends) > 3, "they did some harm, and not everywhere"
    assert len(PROGRAMS) == 6
