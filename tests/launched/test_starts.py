"""Tests cancelled starts in separate processes; ``scripts/cancelled_starts.py`` contains the program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support import mpi, torchrun

SCRIPT = "tests/scripts/cancelled_starts.py"


@pytest.mark.parametrize(
    "start",
    [
        pytest.param(mpi.run_ranks, marks=pytest.mark.mpi, id="mpi"),
        pytest.param(torchrun.run_ranks, marks=pytest.mark.long, id="torch"),
    ],
)
def test_a_start_cancelled_when_all_are_present_leaves_no_rank(start: Callable[..., Any]) -> None:
    """Regression: the others stayed in MPI_Comm_create_group forever, or averaged without the rank, out of step."""
    if start is mpi.run_ranks:
        mpi.require_mpi()
    reports = start(2, SCRIPT, timeout_s=100).check().reports
    made = {
        "group": "Group",
        "mesh": "Mesh",
        "parallel_groups": "ParallelGroups",
        "roles": "DistributedContext",
        "selective": "str",
        "one_sided": "str",
    }
    averaged = [[[1.0, 1.0]], 2, [[2.0, 2.0]]]
    assert reports[0] == {"average_all": ["StepInfo", *averaged], **made}
    assert reports[1] == {"average_all": ["cancelled", *averaged], **dict.fromkeys(made, "cancelled")}


@pytest.mark.mpi
def test_tasks_of_a_rank_may_start_policies_whose_groups_overlap() -> None:
    """Regression: one rank was in MPI_Win_allocate of one group forever, and the other rank in the other group's."""
    mpi.require_mpi()
    reports = mpi.run_ranks(2, "tests/scripts/tasks_of_a_rank.py", timeout_s=100).check().reports
    for rank in range(2):
        assert reports[rank] == [[float(rank)] * 2] * 2 + [[0.5, 0.5]] * 2
