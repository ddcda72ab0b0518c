"""Tests DiLoCo between two real replicas of two ranks, under DDP and ``fully_shard``: bit-equal to plain torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import mpi, torchrun
from support.seeds import in_ci

SCRIPT = Path(__file__).parents[1] / "scripts" / "diloco_replicas.py"
TRANSPORTS = [pytest.param("mpi", marks=pytest.mark.mpi), pytest.param("torch", marks=pytest.mark.long)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_replicas_train_as_the_oracle_of_plain_torch(transport: str) -> None:
    start: Callable[..., Any] = mpi.run_ranks if transport == "mpi" else torchrun.run_ranks
    reports = start(4, SCRIPT, timeout_s=240).check().reports
    assert reports.keys() == {0, 1, 2, 3}
    # Regression: each policy beside torch.distributed unfroze them, and the end of each rank took 1.7 s longer.
    assert all(found["frozen_count"] > 10_000 for found in reports.values()), "what the launcher froze must stay frozen"
    for kind in ("ddp", "fully_shard"):
        for rank, found in reports.items():
            assert found[kind]["errors"] == found[kind]["anchor_errors"] == [0.0] * 20, (kind, rank)
            assert found[kind]["donors"] == [[0, 2]] * 5
        for first in (0, 2):
            sent = [reports[first + place][kind]["sent_nbytes"] for place in (0, 1)]
            assert sum(sent) == 5 * reports[0]["nbytes"] and min(sent) > 0, (
                "each rank of the replica must send its part"
            )
    for rank, found in reports.items():
        for kind in ("async ddp", "async fully_shard"):
            assert found[kind]["errors"] == found[kind]["anchor_errors"] == [0.0] * 20, (kind, rank)
            assert found[kind]["donors"] == [[0, 2]] * 5
            sent_nbytes = 5 * reports[0]["nbytes"] if rank in (0, 2) else 0
            assert found[kind]["sent_nbytes"] == sent_nbytes, "the replica's first rank must send all bytes"
        for kind in ("selective ddp", "selective fully_shard"):
            assert found[kind]["donors"] == [[0]] * 5, "the second replica's difference must have no weight"
            assert found[kind]["errors"] == [0.0] * 20, (kind, rank)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("kind", "killed"), in_ci([("diloco", 3), ("async", 1)], ("async", 1)))
def test_a_killed_rank_leaves_the_other_replica_to_continue(transport: str, kind: str, killed: int) -> None:
    """Rank 1 leads asynchronous DiLoCo after the kill, and its replica continues from its copies of the state.

    The killed rank's mate ends with an error of torch or of asyncdist, which must not end the job.
    """
    args, lost, left = ("killed", str(killed), kind), {killed, killed ^ 1}, 2 - killed // 2 * 2
    if transport == "mpi":
        result = mpi.run_ranks(4, SCRIPT, *args, timeout_s=240, survive=True).check()
    else:
        codes = [-9 if rank in lost else 0 for rank in range(4)]
        result = torchrun.run_ranks(4, SCRIPT, *args, timeout_s=240).check(*codes)
    assert result.reports.keys() == {0, 1, 2, 3} - lost
    for found in result.reports.values():
        assert found["killed"]["errors"] == [0.0] * 20
        assert found["killed"]["donors"] == [[0, 2]] * 2 + [[left]] * 3
    why = f"rank {killed ^ 1} ends, because rank {killed} of its replica is lost, and the other replicas continue"
    assert why in result.stderr
