"""Whatever needs a rank that was killed says that it is lost, not that it has left, where the others go on."""

from __future__ import annotations

from typing import Any

import pytest
from scripts import lost_members
from support import torchrun

import asyncdist as ad
from asyncdist.simulation import Kill


def check(found: Any) -> None:
    assert found == dict.fromkeys(found, "RankLostError 0")
    assert len(found) == 16


@pytest.mark.parametrize("seed", range(5))
def test_simulated(seed: int) -> None:
    async def main(world: ad.World) -> dict[str, str]:
        return await lost_members.main(world, lambda: None)

    report = ad.simulate(main, ranks=3, seed=seed, faults=[Kill(rank=0, at_s=0.2)])
    for found in report.results[1:]:
        check(found)


def test_launched() -> None:
    reports = torchrun.run_ranks(3, "tests/scripts/lost_members.py", timeout_s=100).check(-9, 0, 0).reports
    check(reports[1])
    check(reports[2])
