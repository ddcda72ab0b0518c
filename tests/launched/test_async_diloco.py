"""Asynchronous DiLoCo between real processes: calm, with a killed leader, and with a restarted rank."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripts.async_diloco import JOBS
from simulation.diloco_scenarios import Oracle, Plan
from simulation.training_runs import Layers, weights_of
from support import mpi, torchrun, warm

TRANSPORTS = [pytest.param("mpi", marks=pytest.mark.mpi), pytest.param("torch", marks=pytest.mark.long)]
SCRIPT = Path(__file__).parents[1] / "scripts" / "async_diloco.py"


def compare(plan: Plan, reports: dict[int, Any]) -> dict[int, tuple[int, ...]]:
    """Compare all reported weights with DiLoCo's oracle, and return the donors of each version."""
    donors: dict[int, tuple[int, ...]] = {}
    for seen in reports.values():
        for version, ranks, _ in seen["applied"]:
            assert donors.setdefault(version, tuple(ranks)) == tuple(ranks), version
    oracle = Oracle(plan, donors, np.float64)
    shapes = [array.shape for array in weights_of(Layers())]
    for step in range(max(plan.steps)):
        oracle.step(step)
        for rank, seen in reports.items():
            found = seen["weights"].get(str(step), seen["weights"].get(step))
            for own, right, shape in zip(found or (), oracle.own[rank], shapes, strict=bool(found)):
                assert np.abs(np.array(own).reshape(shape) - right).max() < 1e-12, (rank, step)
    return donors


@pytest.mark.long
@pytest.mark.mpi
def test_a_quorum_of_all_real_ranks_has_dilocos_weights() -> None:
    donors = compare(JOBS["calm"].plan, mpi.run_ranks(4, SCRIPT, "calm", timeout_s=100).check().reports)
    assert donors == dict.fromkeys(range(1, 5), (0, 1, 2, 3))


@pytest.mark.parametrize(
    "transport", [pytest.param("mpi", marks=pytest.mark.mpi), pytest.param("torch", marks=pytest.mark.long)]
)
def test_the_others_continue_after_the_leader_was_killed(transport: str) -> None:
    if transport == "mpi":
        reports = mpi.run_ranks(4, SCRIPT, "killed", timeout_s=100, survive=True).check().reports
    else:
        reports = torchrun.run_ranks(4, SCRIPT, "killed", timeout_s=100).check(-9, 0, 0, 0).reports
    assert reports.keys() == {1, 2, 3}
    donors = compare(JOBS["killed"].plan, reports)
    assert donors[1] == (0, 1, 2, 3) and donors[max(donors)] == (1, 2, 3) and max(donors) == 8
    assert all(seen["statistics"]["lost"] == 0 for seen in reports.values()), (
        "a momentum was lost with its leader, so it was not mirrored"
    )


@pytest.mark.long
@pytest.mark.mpi
def test_no_real_rank_waits_while_the_leader_is_lost() -> None:
    reports = mpi.run_ranks(4, SCRIPT, "skipping", timeout_s=100, survive=True).check().reports
    assert reports.keys() == {1, 2, 3}
    for seen in reports.values():
        versions = [version for version, _, _ in seen["applied"]]
        assert versions == sorted(set(versions)) and len(versions) >= 4
        assert len(seen["weights"]) == 60 and seen["statistics"]["contributions"] >= 5


@pytest.mark.long
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_island_continues_after_its_server_was_killed(transport: str) -> None:
    if transport == "mpi":
        reports = mpi.run_ranks(4, SCRIPT, "islands", timeout_s=100, survive=True).check().reports
    else:
        reports = torchrun.run_ranks(4, SCRIPT, "islands", timeout_s=100).check(-9, 0, 0, 0).reports
    assert reports.keys() == {1, 2, 3}
    for rank, seen in reports.items():
        versions = [version for version, _, _ in seen["applied"]]
        assert versions == sorted(set(versions)) and len(versions) >= 8
        assert all(set(donors) <= ({0, 1} if rank == 1 else {2, 3}) for _, donors, _ in seen["applied"])
        assert len(seen["weights"]) == 80
    assert all(reports[rank]["statistics"]["merges"] >= 2 for rank in (1, 2)), (
        "both leaders must have merged contributions"
    )


def test_a_restarted_rank_takes_part_to_the_end() -> None:
    options = ["--transport", "torch", "-n", "4", "--restarts", "1"]
    program = warm.command(SCRIPT, ["restarted"], mpi.base_environment(), {})
    job = [sys.executable, "-m", "asyncdist", "run", *options, *program]
    reports = torchrun.run_jobs([(job, {})], 200.0).check().reports
    assert [reports[rank]["incarnation"] for rank in range(4)] == [0, 0, 1, 0]
    assert reports[2]["began_at"] >= 12
    donors = compare(JOBS["restarted"].plan, reports)
    assert donors[max(donors)] == (0, 1, 2, 3) and (0, 1, 3) in donors.values()
