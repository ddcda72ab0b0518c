"""Tests that process groups initialised by other frameworks work alongside a world and may end before it."""

from __future__ import annotations

import pytest
from support import torchrun


@pytest.mark.long
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


def test_accelerate_loaders_share_the_data_without_waits() -> None:
    """The loaders are prepared as docs/integrations.md says."""
    reports = torchrun.run_source(2, LOADERS, timeout_s=110).check().reports
    for one, other in zip(reports[0], reports[1], strict=True):
        assert sorted(one + other) == list(range(16))
    assert reports[0][0] != reports[0][1], "each epoch must have its own order"


SITTING = """
    import asyncio
    from dataclasses import dataclass
    import torch
    from torch import distributed as dist
    import asyncdist as ad
    from support.mpi import report

    @dataclass(frozen=True, slots=True)
    class Word:
        text: str

    async def main(world):
        dist.init_process_group("gloo")
        channel = world.channel(Word, tag=100)
        await ad.barrier()
        if world.rank == 0:
            sent = asyncio.create_task(channel.send(Word("x" * 50_000), dest=1))
            streamed = asyncio.create_task(world.send_stream(torch.ones(1 << 20), dest=1))
            done, _ = await asyncio.wait([sent, streamed], timeout=1.0)
            report(0, len(done))
            dist.barrier()  # the other one's
            await asyncio.gather(sent, streamed)
        else:
            dist.barrier()
            text = (await channel.receive()).message.text
            tensor = await world.receive_stream(torch.zeros(1 << 20), source=0)
            report(1, [len(text), tensor.sum().item()])
        dist.destroy_process_group()

    ad.run(main)
"""


def test_a_message_to_a_rank_in_a_torch_collective_waits() -> None:
    """The message waits forever if the sender awaits it before it enters the collective (docs/integrations.md)."""
    assert torchrun.run_source(2, SITTING).check().reports == {0: 0, 1: [50_000, float(1 << 20)]}
