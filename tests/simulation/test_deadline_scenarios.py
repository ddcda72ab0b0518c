"""Tests deadlines that pass unnoticed while a rank computes; ``deadline_scenarios.py`` describes the runs."""

from __future__ import annotations

import pytest

from asyncdist.simulation import explore
from simulation.deadline_scenarios import averages, run_averages, run_starts, starts

SEED_COUNT = 40


@pytest.mark.slow
def test_an_agreed_operation_starts_on_all_ranks_or_on_none() -> None:
    """Regression: a member that gave up before it saw the verdict left the others in a blocking call forever."""
    explore(starts, range(SEED_COUNT), processes=1, quiet=True).check()
    seen = [run_starts(seed)[1] for seed in range(5)]
    assert sum(made.made_count for made in seen) > 5
    assert sum(len(made.entered) for made in seen) > 5
    assert sum(made.late_count for made in seen) > 20


@pytest.mark.slow
def test_any_members_deadline_keeps_averages_in_step() -> None:
    """Regression: a member that was cancelled after "go" skipped the average, and the ranks were out of step."""
    explore(averages, range(SEED_COUNT), processes=1, quiet=True).check()
    assert sum(run_averages(seed)[1].late_count for seed in range(5)) > 20
