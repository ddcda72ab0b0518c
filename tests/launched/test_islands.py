"""Tests islands in separate processes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
from scripts import islands
from support import hosts, mpi, torchrun

SCRIPT = "tests/scripts/islands.py"


@pytest.mark.long
@pytest.mark.parametrize(
    "start",
    [
        pytest.param(mpi.run_ranks, marks=pytest.mark.mpi, id="mpi"),
        pytest.param(torchrun.run_ranks, id="torch"),
    ],
)
def test_launched(start: Callable[..., Any]) -> None:
    """simulation/test_islands.py tests the details; here each rank is a process."""
    if start is mpi.run_ranks:
        mpi.require_mpi()
    islands.check(start(islands.RANKS, SCRIPT, timeout_s=200).check().reports)


@pytest.mark.mpi
@pytest.mark.long
def test_an_island_is_on_one_host() -> None:
    """The launcher assigns ranks to the hosts in turn."""
    mpi.require_mpi()
    if mpi.flavour() == "mpich":
        pytest.skip("these are options of Open MPI's mpirun")
    places = ["--host", "host1:2,host2:2", "--map-by", "node", "--allow-run-as-root", "--oversubscribe"]
    words = [
        "mpirun",
        *places,
        "-n",
        "4",
        "-x",
        "PYTHONPATH",
        "-x",
        mpi.REPORTS,
        sys.executable,
        mpi.ROOT / "tests" / "scripts" / "placed_islands.py",
    ]
    reports = hosts.run(2, words, PYTHONPATH=f"{mpi.ROOT}:{mpi.ROOT / 'tests'}").check().reports
    expected = [{"host": f"host{1 + rank % 2}", "island": [rank % 2, 2 + rank % 2]} for rank in range(4)]
    assert [reports[rank] for rank in range(4)] == expected
