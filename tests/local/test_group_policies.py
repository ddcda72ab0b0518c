"""Policies whose group is an agent group of the context, on every transport: each group averages for itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from scripts import group_policies
from support import mpi, torchrun

import asyncdist as ad

RANKS = group_policies.RANKS
SCRIPT = "tests/scripts/group_policies.py"


def check(results: Any) -> None:
    """Groups are ranks 0, 1 and 2, 3 with weights 1, 2 and 4, 8; rank 4 buffers."""
    for rank in range(4):
        mean, best = (1.5, 2.0) if rank < 2 else (6.0, 8.0)
        assert results[rank] == {"all": mean, "selective": best, "one-sided": best}, rank
    assert results[4] == {}


def test_local() -> None:
    check(ad.run_local(group_policies.main, ranks=RANKS, strict=True))


@pytest.mark.parametrize("seed", range(10))
def test_simulated(seed: int) -> None:
    check(ad.simulate(group_policies.main, ranks=RANKS, seed=seed, strict=True).results)


@pytest.mark.parametrize(
    "start",
    [pytest.param(mpi.run_ranks, marks=pytest.mark.mpi, id="mpi"), pytest.param(torchrun.run_ranks, id="torch")],
)
def test_launched(start: Callable[..., Any]) -> None:
    if start is mpi.run_ranks:
        mpi.require_mpi()
    check(start(RANKS, SCRIPT, timeout_s=200).check().reports)
