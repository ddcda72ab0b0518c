"""Tests simple policies in real processes on MPI and on torch, with and without kills, against their formulas."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripts.diloco import record_of
from scripts.simple_policies import CALM, KILLED
from simulation.simple_scenarios import check, every_of, has_partners
from support import mpi, torchrun

SCRIPT = Path(__file__).parents[1] / "scripts" / "simple_policies.py"
TRANSPORTS = [pytest.param("mpi", marks=pytest.mark.mpi), pytest.param("torch", marks=pytest.mark.long)]
#: Kills are tested for the first policy only; ``--all`` tests the others, which share the exchange.
NAMES = [pytest.param(name, marks=[pytest.mark.long] * bool(place)) for place, name in enumerate(KILLED)]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_real_ranks_have_the_weights_of_the_formula(transport: str) -> None:
    start: Callable[..., Any] = mpi.run_ranks if transport == "mpi" else torchrun.run_ranks
    reports = start(4, SCRIPT, "calm", timeout_s=100).check().reports
    for name, plan in CALM.items():
        record = record_of(plan, {rank: found[name] for rank, found in reports.items()})
        assert check(plan, record, 0.0) == 12 // every_of(name, plan.options)
        assert len(record.weights) == 4


@pytest.mark.long
@pytest.mark.parametrize("policy", NAMES)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_killed_ranks_leave_the_others_with_the_formula(transport: str, policy: str) -> None:
    """The leader of the exchange is killed, and later another rank."""
    if transport == "mpi":
        reports = mpi.run_ranks(4, SCRIPT, policy, timeout_s=100, survive=True).check().reports
    else:
        reports = torchrun.run_ranks(4, SCRIPT, policy, timeout_s=100).check(-9, 0, -9, 0).reports
    assert reports.keys() == {1, 3}
    plan = KILLED[policy]
    record = record_of(plan, {rank: found[policy] for rank, found in reports.items()})
    last = {rank: events[-1].donors for rank, events in record.applied.items()}
    assert set(last[1]) | set(last[3]) == {1, 3}
    if not has_partners(policy, plan.options):  # otherwise the killed ranks' own donors would be needed
        check(plan, record, 1e-12)
