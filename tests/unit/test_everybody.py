"""Tests the check that every other rank is lost or has answered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from asyncdist.runtime.failing.failure import all_others_in
from asyncdist.transports.rank_sets import RankSet


def test_a_rank_that_is_restarted_is_missing_again() -> None:
    """Regression: a rank that had been found counted forever, even if its new process had not answered."""
    answered, left, lost = RankSet(), RankSet(), set[int]()
    world: Any = SimpleNamespace(rank=0, size=5)
    transport: Any = SimpleNamespace(lost_ranks=lambda: frozenset(lost))
    is_complete = all_others_in(world, transport, answered, left)
    left |= (1, 2)
    answered.add(1)
    lost.add(4)
    assert not is_complete()
    left.remove(1)  # rank 1 is lost, and restarted
    answered.remove(1)
    answered |= (2, 3)
    assert not is_complete()
    answered.add(1)
    assert is_complete()
    lost.remove(4)
    assert not is_complete()
