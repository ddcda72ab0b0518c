"""Tests that a real replica of two ranks joins DiLoCo again after one of its ranks was killed."""

from __future__ import annotations

import sys

import pytest
import torch
from scripts.rejoining_replicas import EVERY, KILLED_AT, SIZE, expected
from support import mpi, torchrun, warm


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["ddp", "fully_shard"])
@pytest.mark.parametrize("killed", [0, 3])
@pytest.mark.parametrize("policy", ["diloco", "async"])
def test_a_restarted_replica_trains_as_the_oracle(policy: str, killed: int, kind: str) -> None:
    """Rank 0 leads the policy. Both ranks of the killed rank's replica are restarted, and nothing else ends."""
    script = warm.command(
        "tests/scripts/rejoining_replicas.py", [str(killed), kind, policy], mpi.base_environment(), {}
    )
    job = [sys.executable, "-m", "asyncdist", "run", "--transport", "torch", "-n", "4", "--restarts", "1", *script]
    reports = torchrun.run_jobs([(job, {})], 240.0).check().reports
    lost = killed // SIZE
    assert {rank: found["incarnation"] for rank, found in reports.items()} == {
        rank: int(rank // SIZE == lost) for rank in range(4)
    }
    (joined_at,) = {found["joined_at"] for found in reports.values() if found["incarnation"]}
    assert joined_at % EVERY == 0, "a replica must join right after a round"
    (steps,) = {found["steps"] for found in reports.values()}
    donors = {number: tuple(ranks) for number, ranks in reports[SIZE * (1 - lost)]["donors"]}
    assert {len(ranks) for number, ranks in donors.items() if KILLED_AT < number * EVERY <= joined_at} == {1}
    assert {len(ranks) for number, ranks in donors.items() if number * EVERY > joined_at} == {2}
    whole = expected(donors, range(KILLED_AT, joined_at), lost, steps)
    for rank, found in reports.items():
        assert found["whole"] == reports[0]["whole"], rank
    for mine, right in zip(reports[0]["whole"], whole, strict=True):
        assert (torch.tensor(mine, dtype=torch.float64) - right).abs().max() < 1e-12


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("killed", [0, 3])
def test_a_restarted_replica_joins_selective_averaging(killed: int) -> None:
    """Replica 1 has the larger loss, so it adopts the weights of replica 0, before and after the restart."""
    script = warm.command(
        "tests/scripts/rejoining_replicas.py", [str(killed), "ddp", "selective"], mpi.base_environment(), {}
    )
    job = [sys.executable, "-m", "asyncdist", "run", "--transport", "torch", "-n", "4", "--restarts", "1", *script]
    reports = torchrun.run_jobs([(job, {})], 240.0).check().reports
    lost = killed // SIZE
    assert {rank: found["incarnation"] for rank, found in reports.items()} == {
        rank: int(rank // SIZE == lost) for rank in range(4)
    }
    (joined_at,) = {found["joined_at"] for found in reports.values() if found["incarnation"]}
    assert joined_at > KILLED_AT
    for first in (0, SIZE):
        assert reports[first]["whole"] == reports[first + 1]["whole"], "the ranks of a replica must stay equal"
    donors = [tuple(ranks) for _, ranks in reports[2]["donors"]]
    assert donors and set(donors) == {(0,)}
