"""What other frameworks initialise works beside a world, and may end before it."""

from __future__ import annotations

from support import torchrun


def test_accelerate() -> None:
    reports = torchrun.run_ranks(2, "tests/scripts/accelerated.py", timeout_s=110).check().reports
    assert reports == {rank: {"processes": 2, "rank": rank, "same": True} for rank in range(2)}
