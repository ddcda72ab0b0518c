"""Tests real kills: a population on torch continues to average when its coordinators are killed."""

from __future__ import annotations

import re

import pytest
from scripts.lost_coordinators import KILLED_AFTER
from support import torchrun


@pytest.mark.long
def test_two_coordinators_are_killed_one_after_the_other() -> None:
    """Takeovers are tested in simulation/test_failover.py; here real processes die."""
    result = torchrun.run_ranks(4, "tests/scripts/lost_coordinators.py", timeout_s=100).check(-9, -9, 0, 0)
    found = [result.reports[rank] for rank in (2, 3)]
    (last,) = {each["coordinator"] for each in found}
    assert last in (2, 3), "rank 3 follows if rank 2 does not answer in time"
    assert [each["decided"] for each in found] == [last == 2, last == 3]
    rounds = found[0]["rounds"]
    assert rounds == sorted(set(rounds)) and max(rounds) > KILLED_AFTER[1] + 2, (
        "the worst rank must still be replaced in later rounds"
    )
    assert re.search(r"now the coordinator, .*\brank 1\b", result.stderr)
