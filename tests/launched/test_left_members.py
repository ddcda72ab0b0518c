"""Tests members that leave before the others, in separate processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from scripts import left_consumers, left_members
from support import mpi, torchrun

SCRIPT = "tests/scripts/left_members.py"


CONSUMERS_SCRIPT = "tests/scripts/left_consumers.py"


STARTS = pytest.mark.parametrize(
    "start",
    [
        pytest.param(mpi.run_ranks, marks=pytest.mark.mpi, id="mpi"),
        pytest.param(torchrun.run_ranks, marks=pytest.mark.long, id="torch"),
    ],
)


WAYS = pytest.mark.parametrize("way", ["left", pytest.param("waiting", marks=pytest.mark.long)])


@STARTS
def test_cancelled_collectives_of_a_departed_rank_leave_nothing(
    start: Callable[..., Any],
) -> None:
    """Regression: each native collective delayed the end until the timeout of requests, and failed a strict job."""
    if start is mpi.run_ranks:
        mpi.require_mpi()
    assert start(3, SCRIPT, "cancelled", timeout_s=120).check().stderr == ""


@WAYS
@STARTS
def test_launched(start: Callable[..., Any], way: str) -> None:
    """On MPI, the last barrier of the rank that has left would otherwise match the others' collectives."""
    if start is mpi.run_ranks:
        mpi.require_mpi()
    left_members.check(start(3, SCRIPT, way, timeout_s=120).check().reports)


@STARTS
@pytest.mark.long
def test_a_consumer_that_returns_leaves_no_producer_waiting(start: Callable[..., Any]) -> None:
    if start is mpi.run_ranks:
        mpi.require_mpi()
    result = start(3, CONSUMERS_SCRIPT, timeout_s=60).check()
    left_consumers.check([result.reports[rank] for rank in range(3)], result.stderr)
