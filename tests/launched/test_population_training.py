"""Tests population based training in real processes on MPI and on torch: each copy equals one snapshot."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripts.population_training import record_of
from simulation.population_training_scenarios import check_ledger
from support import mpi, torchrun

SCRIPT = Path(__file__).parents[1] / "scripts" / "population_training.py"


@pytest.mark.long
@pytest.mark.mpi
def test_real_ranks_copy_one_snapshot() -> None:
    reports = mpi.run_ranks(4, SCRIPT, "calm", timeout_s=100).check().reports
    assert check_ledger([record_of(found) for found in reports.values()]) >= 3


@pytest.mark.long
def test_a_population_outlives_its_coordinator() -> None:
    reports = torchrun.run_ranks(4, SCRIPT, "killed", timeout_s=100).check(-9, 0, 0, 0).reports
    records = [record_of(found) for found in reports.values()]
    assert len(records) == 3
    own = [each for record in records for each in record.copies if each.donor]
    snapshots = [record.snapshots for record in records]
    assert len(own) >= 3 and len(snapshots) == 3
    for record in records:
        record.copies[:] = [each for each in record.copies if each.donor]  # rank 0's ledger was lost with it
    assert check_ledger(records) == len(own)
