"""Three ranks train and two buffer: each item reaches the trainer's own buffer rank once, and returns from it only."""

from __future__ import annotations

import torch
from support.mpi import report

import asyncdist as ad
from protocols import ReplayBuffer, serve_replay_buffer

#: Items of 24 bytes; the last batches are sent as streams.
SIZES = (1, 10, 89, 10_000)


async def main(world: ad.World) -> None:
    ranks = await ad.initialize_distributed_compute(num_remote_buffers=2)
    if ranks.is_buffer_rank():
        assert ranks.assigned_training_ranks is not None
        seen: set[tuple[int, int]] = set()
        statistics = await serve_replay_buffer(
            ranks.assigned_training_ranks,
            capacity=100_000,
            score=lambda batch: seen.update(map(tuple, batch[:, :2].tolist())),
        )
        report(world.rank, {"added": sorted(statistics.added.items()), "seen": len(seen), "size": statistics.size})
        return
    assert ranks.assigned_buffer is not None and ranks.agent_group is not None
    async with ReplayBuffer(ranks.assigned_buffer) as buffer:
        first = 0
        for size in SIZES:
            numbers = torch.arange(first, first + size)
            await buffer.add(torch.stack([torch.full_like(numbers, world.rank), numbers, numbers * numbers], dim=1))
            first += size
        await ad.barrier(group=ranks.agent_group)  # from now on the buffers contain all items
        drawn = (await buffer.sample(5_000)).batch
        assert torch.equal(drawn[:, 2], drawn[:, 1] ** 2)
    report(world.rank, {"buffer": ranks.assigned_buffer, "drawn of": sorted(set(drawn[:, 0].tolist()))})


if __name__ == "__main__":
    ad.run(main, strict=True)
