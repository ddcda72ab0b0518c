"""Tests policies inside agent groups, in separate processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from scripts import group_policies
from support import mpi, torchrun

SCRIPT = "tests/scripts/group_policies.py"


@pytest.mark.long
@pytest.mark.parametrize(
    "start",
    [
        pytest.param(mpi.run_ranks, marks=pytest.mark.mpi, id="mpi"),
        pytest.param(torchrun.run_ranks, id="torch"),
    ],
)
def test_launched(start: Callable[..., Any]) -> None:
    """local/test_group_policies.py tests the same on one loop; here each rank is a process."""
    if start is mpi.run_ranks:
        mpi.require_mpi()
    group_policies.check(start(group_policies.RANKS, SCRIPT, timeout_s=200).check().reports)
