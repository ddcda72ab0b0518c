"""What other frameworks initialise works beside a world, and may end before it."""

from __future__ import annotations

from support import torchrun


def test_accelerate() -> None:
    reports = torchrun.run_ranks(2, "tests/scripts/accelerated.py", timeout_s=110).check().reports
    assert reports == {rank: {"processes": 2, "rank": rank, "same": True} for rank in range(2)}


LOADERS = """
    import asyncio, torch
    import asyncdist as ad
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration
    from support.mpi import report

    async def main(world):
        torch.manual_seed(world.rank)
        shuffling = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=5)
        accelerator = Accelerator(cpu=True, rng_types=[], dataloader_config=shuffling)
        loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(16), batch_size=2, shuffle=True))
        if world.rank == 1:
            await ad.barrier()  # not before the other one has been through its two epochs
        seen = [[row for batch in loader for row in batch.tolist()] for epoch in range(2)]
        if world.rank == 0:
            await ad.barrier()
        report(world.rank, seen)

    ad.run(main)
"""


def test_loaders_of_accelerate_as_the_readme_prepares_them_wait_for_nobody_and_share_the_data() -> None:
    reports = torchrun.run_source(2, LOADERS, timeout_s=110).check().reports
    for one, other in zip(reports[0], reports[1], strict=True):
        assert sorted(one + other) == list(range(16))
    assert reports[0][0] != reports[0][1], "each epoch has an order of its own"
