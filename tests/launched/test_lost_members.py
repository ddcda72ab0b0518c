"""Tests that operations that need a killed rank report its loss, not its departure, in a job that continues."""

from __future__ import annotations

from typing import Any

import pytest
from scripts import lost_members
from support import torchrun
from support.endings import lost_ranks

import asyncdist as ad
from asyncdist.simulation import Kill


def check(found: Any) -> None:
    assert found == dict.fromkeys(found, "RankLostError 0")
    assert len(found) == 18


@pytest.mark.parametrize("seed", range(5))
def test_simulated(seed: int) -> None:
    async def main(world: ad.World) -> dict[str, str]:
        return await lost_members.main(world, lambda: None)

    report = ad.simulate(main, ranks=3, seed=seed, faults=[Kill(rank=0, at_s=0.2)])
    for found in report.results[1:]:
        check(found)


@pytest.mark.long
def test_launched() -> None:
    """This repeats the test above with a real kill; test_torch.py has such a test for messages and streams."""
    reports = torchrun.run_ranks(3, "tests/scripts/lost_members.py", timeout_s=100).check(-9, 0, 0).reports
    check(reports[1])
    check(reports[2])


#: Rank 0 waits with its own tasks until rank 1 is lost, or does not start.
LOSING = """
import contextlib, os, signal
import asyncdist as ad

async def main(world):
    with contextlib.suppress(ad.RankLostError):  # rank 1 may end while the others are still in the barrier
        await ad.barrier()
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while 1 not in world.services.lost_ranks():
        await world.sleep(0.01)

ad.run(main)
"""


def test_a_lost_rank_is_named_once_without_a_launcher() -> None:
    """Regression: under srun, and in pods, a job continued without the rank, and no output said so."""
    ended = torchrun.run_source(3, LOSING).check(0, -9, 0)
    assert ended.stderr.count("its process or its host has ended") == 1, ended.output()
    assert lost_ranks(ended.stderr) == [1], ended.output()


def test_a_launcher_that_names_it_is_left_to_do_that() -> None:
    ended = torchrun.run_torchrun(2, LOSING)
    assert not lost_ranks(ended.stderr) and "Signal 9 (SIGKILL)" in ended.stderr, ended.output()
