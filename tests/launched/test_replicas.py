"""Tests replicas under DDP, or sharded, which average as one member each, in processes: bit-equal to plain torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support import mpi, torchrun
from support.facts import names

SCRIPT = Path(__file__).parents[1] / "scripts" / "ddp_replicas.py"


@pytest.mark.timeout(300)
def test_two_replicas_of_two_ranks_under_ddp() -> None:
    reports = torchrun.run_ranks(4, SCRIPT, timeout_s=240).check().reports
    assert [reports[rank]["equal"] for rank in range(4)] == [True] * 4, (
        "the policy's weights must equal the weights averaged by hand"
    )
    for rank in range(4):
        own = [0, 1] if rank < 2 else [2, 3]
        assert "[0, 1, 2, 3]" in reports[rank]["refused"] and str(own) in reports[rank]["refused"]
    for first in (0, 2):
        assert reports[first]["digests"] == reports[first + 1]["digests"], (
            "all ranks of a replica must agree at every iteration"
        )
        assert reports[first]["applied"] == reports[first + 1]["applied"]
    taken = [(rank, step) for rank in (0, 2) for step in reports[rank]["applied"]]
    assert len(taken) >= 2 and all((step + 1) % 5 == 0 for _, step in taken)
    for rank, step in taken:  # one donor: its weights after an earlier swap, bit for bit
        assert reports[rank]["digests"][step] in reports[2 - rank]["digests"][: step + 50]
    # after a swap the two replicas are equal if one of them has just taken the other's weights
    before = slice(min(step for _, step in taken))
    trained_apart = list(zip(reports[0]["digests"][before], reports[2]["digests"][before], strict=True))
    assert trained_apart and all(own != other for own, other in trained_apart), (
        "the two replicas must differ while they train"
    )


@pytest.mark.mpi
@pytest.mark.timeout(300)
@pytest.mark.parametrize("run", [mpi.run_ranks, torchrun.run_ranks], ids=["mpi", "torch"])
@pytest.mark.long
def test_two_replicas_of_two_ranks_under_fully_shard(run: Any) -> None:
    reports = run(4, SCRIPT.parent / "sharded_replicas.py", timeout_s=240).check().reports
    taken = []
    for first in (0, 2):
        own, other = reports[first], reports[first + 1]
        assert own["digests"] == other["digests"], "all ranks of a replica must agree at every iteration"
        assert own["snapshots"] == other["snapshots"], "the parts of a snapshot must be of one iteration"
        assert [each["step"] for each in own["applied"]] == [each["step"] for each in other["applied"]]
        taken += own["applied"] + other["applied"]
    assert len(taken) >= 4 and all((each["step"] + 1) % 5 == 0 for each in taken)
    for each in taken:
        assert each["equal"], "the weights must equal, bit for bit, plain torch's average of the whole tensors"
        assert each["state_count"] == 0, "the optimizer's state must be cleared on all ranks of the replica"
    for rank, report in reports.items():
        shard_nbytes = report["shard_nbytes"]
        assert report["received_nbytes"] == shard_nbytes * report["replacement_count"], (
            "a rank must receive only its own shards"
        )
        assert report["sent_nbytes"] == shard_nbytes * report["snapshot_count"]
        assert report["buffers_nbytes"] <= shard_nbytes < report["whole_nbytes"]
        over_all, in_another_way = report["refused"]
        assert names(over_all, "got the ranks [0, 1, 2, 3]", "must be sharded over the 2 ranks of its replica")
        ranks = rf"here: rank {rank % 2 + 2}, there: rank {rank % 2}"
        assert re.match(rf"DisagreementError: .*'weight' .*\(4, 2\) .*\(2, 4\) .*{ranks}", in_another_way)
