"""Three clients and a replay buffer on real ranks: small batches in messages, large ones and draws in streams."""

from __future__ import annotations

import asyncio

import torch
from support.mpi import report

import asyncdist as ad
from protocols import ReplayBuffer, serve_replay_buffer

SIZES = (1, 10, 89, 200)


async def main(world: ad.World) -> None:
    server = world.size - 1
    seen: set[tuple[int, int]] = set()
    if world.rank == server:
        statistics = await serve_replay_buffer(
            range(server), capacity=900, score=lambda batch: seen.update(map(tuple, batch["id"].tolist()))
        )
        report(server, {"added": [*statistics.added.values()], "size": statistics.size, "seen": len(seen)})
        return
    async with ReplayBuffer(server) as buffer:
        first = 0
        async with asyncio.TaskGroup() as tasks:
            for size in SIZES:  # 200 items of 4,016 bytes are 800 KiB
                numbers = torch.arange(first, first + size)
                ids = torch.stack([torch.full_like(numbers, world.rank), numbers], dim=1)
                tasks.create_task(buffer.add({"id": ids, "data": numbers[:, None].expand(-1, 1000).float()}))
                first += size
        sample = await buffer.sample(900)
        numbers, data = sample.batch["id"][:, 1], sample.batch["data"]
        assert data.shape == (900, 1000)
        assert torch.equal(data, numbers[:, None].expand(-1, 1000).float())
        assert set(sample.batch["id"][:, 0].tolist()) == {0, 1, 2}
    report(world.rank, "every item as it was sent")


if __name__ == "__main__":
    ad.run(main, strict=True)
