"""Tests many groups that begin and end, in separate processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from scripts import many_groups
from support import mpi, torchrun


@pytest.mark.parametrize(
    ("start", "count"),
    [
        pytest.param(
            mpi.run_ranks, 150, marks=[pytest.mark.mpi, pytest.mark.long], id="mpi"
        ),  # each start makes a communicator
        pytest.param(torchrun.run_ranks, 950, marks=pytest.mark.long, id="torch"),
    ],
)
def test_more_groups_than_there_is_room_for_at_a_time(start: Callable[..., Any], count: int) -> None:
    """Regression: 899 groups can have a tag at a time, and no group could be made after the 899th.

    Each policy kept a communicator and a file descriptor.
    """
    if start is mpi.run_ranks:
        mpi.require_mpi()
    reports = start(2, many_groups.__file__, count, timeout_s=100).check().reports
    for rank in (0, 1):
        found = reports[rank]
        assert found["sums"] == [2]
        assert 1 <= found["tag count"] <= 3, (
            "at most three tags may be in use, as one rank may learn of a freed group later"
        )
        assert not found["waited"]
        assert "[0, 1]" in found["after it"]
        assert found["descriptors"] <= 2
