"""Tests DiLoCo in real processes: four ranks on MPI and on torch, with and without kills, against the oracle."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripts.diloco import (
    BLOCKING,
    CALM,
    EAGER,
    KILLED,
    LATE,
    LATE_COUNT,
    QUORUM,
    QUORUM_PLAN,
    QUORUM_WAIT,
    SELECTIVE_KILLED,
    record_of,
)
from simulation import eager_scenarios
from simulation.diloco_quorum_scenarios import Log, Oracle
from simulation.diloco_scenarios import Plan, Record, check, exactly, run, within
from support import mpi, torchrun

from protocols import Contributed

SCRIPT = Path(__file__).parents[1] / "scripts" / "diloco.py"
TRANSPORTS = [pytest.param("mpi", marks=pytest.mark.mpi), pytest.param("torch", marks=pytest.mark.long)]


def records(reports: Any, plans: dict[str, Plan]) -> dict[str, Record]:
    return {
        name: record_of(plan, {rank: found[name] for rank, found in reports.items()}) for name, plan in plans.items()
    }


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_real_ranks_have_the_weights_of_the_simulator(transport: str) -> None:
    start: Callable[..., Any] = mpi.run_ranks if transport == "mpi" else torchrun.run_ranks
    reports = start(4, SCRIPT, "calm", timeout_s=100).check().reports
    check_eager(reports)
    check_late([reports[rank][LATE] for rank in range(4)])
    check_quorum({rank: Log.of_json(reports[rank][QUORUM]) for rank in range(4)})
    for name, record in records(reports, CALM).items():
        simulated = run(CALM[name])[1]
        for rank in range(4):
            for mine, theirs in zip(record.weights[rank], simulated.weights[rank], strict=True):
                assert all(map(np.array_equal, mine, theirs)), (name, rank)
        if CALM[name].wire == "float32":
            check(CALM[name], record, within)


def check_eager(reports: Any) -> None:
    """Check that eager ranks have the simulator's weights in each step, and equal weights at the end."""
    for name, plan in EAGER.items():
        _, lives = eager_scenarios.run(plan)
        for rank in range(4):
            simulated = [[array.tolist() for array in weights] for weights in lives[rank, 0].weights]
            assert reports[rank][name] == simulated, (name, rank)
        assert len({str(reports[rank]["eager radial"][-1]) for rank in range(4)}) == 1


def check_late(steps: list[int]) -> None:
    """Check that with ``late="skip"`` fast ranks did not wait: a waiting rank would average in every second step."""
    assert all(count > 2 * 2 * LATE_COUNT for count in steps[:-1]), steps


def check_quorum(logs: dict[int, Log]) -> None:
    """Check that each difference counts once, in the donors' means, although one rank was late for many rounds."""
    oracle = Oracle(QUORUM_PLAN, logs)
    assert logs[0].late[3] >= QUORUM_WAIT - 5, "each fragment must have a round in every second step"
    counted = [number for number, (donors, _) in oracle.donors.items() if 3 in donors]
    made = sum(isinstance(event, Contributed) for _, *events in logs[3].events for event in events)
    assert len(counted) == made >= 8


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_killed_ranks_leave_the_others_with_the_oracles_weights(transport: str) -> None:
    """The leader of the exchange is killed, and later another rank."""
    if transport == "mpi":
        reports = mpi.run_ranks(4, SCRIPT, "killed", timeout_s=100, survive=True).check().reports
    else:
        reports = torchrun.run_ranks(4, SCRIPT, "killed", timeout_s=100).check(-9, 0, -9, 0).reports
    assert reports.keys() == {1, 3}
    plan = KILLED["killed"]
    record = records(reports, KILLED)["killed"]
    check(plan, record, within)
    donors, _ = record.donors(set())
    assert donors[1] == (0, 1, 2, 3) and donors[max(donors)] == (1, 3) and max(donors) >= 14


@pytest.mark.long
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_killed_ranks_leave_the_others_with_the_chosen_donors(transport: str) -> None:
    """The leader, which chooses the donors of selective DiLoCo, is killed, and later another rank."""
    if transport == "mpi":
        reports = mpi.run_ranks(4, SCRIPT, "selective", timeout_s=100, survive=True).check().reports
    else:
        reports = torchrun.run_ranks(4, SCRIPT, "selective", timeout_s=100).check(-9, 0, -9, 0).reports
    assert reports.keys() == {1, 3}
    plan = SELECTIVE_KILLED["selective killed"]
    record = records(reports, SELECTIVE_KILLED)["selective killed"]
    check(plan, record, within)
    donors, _ = record.donors(set())
    assert len(donors) == 8 and {len(ranks) for ranks in donors.values()} >= {1, 2}


@pytest.mark.mpi
def test_blocking_code_trains_as_the_oracle() -> None:
    reports = mpi.run_ranks(2, SCRIPT, "blocking", timeout_s=100).check().reports
    plan = dataclasses.replace(BLOCKING, ranks=2)
    record = records(reports, {"blocking": plan})["blocking"]
    every = dict.fromkeys(range(1, 5), (0, 1))
    record.donors = lambda killed: (every, {})  # type: ignore[method-assign]
    check(plan, record, exactly)
