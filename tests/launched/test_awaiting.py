"""Programs on MPI and torch await requests that they have started themselves."""

from __future__ import annotations

import pytest
from support import mpi, torchrun

LEFT = "unfinished requests (1 x an MPI request)"


@pytest.mark.mpi
@pytest.mark.slow
def test_mpi_requests_are_awaited_with_and_without_a_world() -> None:
    for lines in mpi.run_ranks(2, "tests/scripts/awaiting.py").check().reports.values():
        assert [LEFT in line for line in lines[:-1]] == [True] * (len(lines) - 1)
        assert "ended with requests of this program: 1 x an MPI request" in lines[-1]


WORKS = """
    import asyncio
    import torch, torch.distributed as dist
    import asyncdist as ad

    async def exchange(waits):
        rank, peer = dist.get_rank(), 1 - dist.get_rank()
        got = torch.zeros(2)
        receive = dist.irecv(got, peer)
        try:
            await asyncio.wait_for(waits.wait(receive), 0.01)
            raise AssertionError("nothing was sent yet")
        except TimeoutError:
            pass
        dist.barrier()
        await waits.wait([receive, dist.isend(torch.full((2,), float(rank)), peer)])
        assert got.tolist() == [peer] * 2
        await waits.wait(receive)  # a completed work needs no thread
        total = torch.ones(1)
        assert await waits.waitany([dist.all_reduce(total, async_op=True)]) == (0, None)
        assert total == 2

    async def alone():
        async with ad.progress() as progress:
            await exchange(progress)
            if dist.get_rank() == 0:
                receive = dist.irecv(torch.zeros(1), 1)
                dist.barrier()
                try:
                    await progress.wait(receive)
                except RuntimeError as error:
                    print("failed:", error)
            else:
                dist.barrier()

    dist.init_process_group("gloo")
    ad.run(exchange)
    asyncio.run(alone())
    if dist.get_rank() == 1:
        dist.destroy_process_group()
"""


@pytest.mark.slow
def test_gloo_works_are_awaited_with_and_without_a_world() -> None:
    result = torchrun.run_source(2, WORKS).check()
    assert "failed: " in result.stdout
    assert "closed by peer" in result.stdout
