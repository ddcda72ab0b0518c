"""Replicas under DDP average as one member each, in processes, and to the bit as by hand with plain torch."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import torchrun

SCRIPT = Path(__file__).parents[1] / "scripts" / "ddp_replicas.py"


@pytest.mark.timeout(300)
def test_two_replicas_of_two_ranks_under_ddp() -> None:
    reports = torchrun.run_ranks(4, SCRIPT, timeout_s=240).check().reports
    assert [reports[rank]["equal"] for rank in range(4)] == [True] * 4, "as by hand"
    for first in (0, 2):
        assert reports[first]["digests"] == reports[first + 1]["digests"], "a replica is one model at every iteration"
        assert reports[first]["applied"] == reports[first + 1]["applied"]
    taken = [(rank, step) for rank in (0, 2) for step in reports[rank]["applied"]]
    assert len(taken) >= 2 and all((step + 1) % 5 == 0 for _, step in taken)
    for rank, step in taken:  # one donor: its weights of an earlier swap, to the bit
        assert reports[rank]["digests"][step] in reports[2 - rank]["digests"][: step + 50]
    assert reports[0]["digests"][-1] != reports[2]["digests"][-1], "two replicas are two models"
