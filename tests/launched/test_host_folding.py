"""Tests reductions in shared memory between processes; ``scripts/shared_means.py`` contains the programs."""

from __future__ import annotations

import os
import signal

import pytest
from support import mpi, torchrun

SCRIPT = "tests/scripts/shared_means.py"


STORIES = ["the_same_bits", "groups_in_turn", "cancelled", "cancelled_anywhere", "another_model", "nothing_is_left"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "transport", [pytest.param("mpi", marks=pytest.mark.mpi), pytest.param("torch", marks=pytest.mark.long)]
)
def test_between_processes(transport: str) -> None:
    if transport == "mpi":
        mpi.require_mpi()
    start = mpi.run_ranks if transport == "mpi" else torchrun.run_ranks
    result = start(3, SCRIPT, transport, timeout_s=240).check()
    assert result.reports == dict.fromkeys(range(3), STORIES)
    assert result.stderr == ""


@pytest.mark.timeout(200)
@pytest.mark.parametrize("turn", [pytest.param("fold_share", marks=pytest.mark.long), "store"])
def test_a_rank_that_is_killed_in_the_middle(turn: str) -> None:
    """The other ranks are notified of the loss, and their tensors are unchanged; no name of the memory remains."""
    source = f"""
        import os, signal
        import torch
        from support.mpi import report
        import asyncdist as ad
        from asyncdist.collectives.algorithms import shared_memory_reduce

        shared_memory_reduce.SHARED_NBYTES_MIN = 0
        original = shared_memory_reduce._Folding.{turn}

        def deadly(self, number):
            if ad.current_world().rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            original(self, number)

        async def main(world):
            model = torch.nn.Linear(100, 100)
            for value in (1.0, 2.0):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.fill_(value * world.rank)
                if value == 2.0:
                    shared_memory_reduce._Folding.{turn} = deadly
                errors = []
                for _ in range(2 if value == 2.0 else 1):
                    try:
                        await ad.average_models(model)
                    except ad.RankLostError as error:
                        errors.append(error.rank)
            same = all(bool((parameter == 2.0 * world.rank).all()) for parameter in model.parameters())
            report(world.rank, [errors, same])

        ad.run(main, transport="torch")
    """
    before = set(os.listdir("/dev/shm"))
    result = torchrun.run_source(3, source, timeout_s=150).check(0, -signal.SIGKILL, 0)
    for rank in (0, 2):
        errors, same = result.reports[rank]
        assert len(errors) == 2 and same, result.reports
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "asyncdist" in name}
