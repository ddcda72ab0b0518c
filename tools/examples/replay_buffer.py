"""Two ranks play; a third rank stores their experience, and returns samples to learn from.

asyncdist run -n 3 tools/examples/replay_buffer.py
"""

# mypy: ignore-errors

import torch

import asyncdist as ad
from protocols import ReplayBuffer, serve_replay_buffer


async def main(world: ad.World) -> float:
    ranks = await ad.initialize_distributed_compute(num_remote_buffers=1, num_agent_groups=1)
    if ranks.is_buffer_rank():
        statistics = await serve_replay_buffer(ranks.assigned_training_ranks, capacity=1_000)
        print(statistics)
        return 0.0
    ad.seed_all(0)
    reward = torch.zeros(())
    async with ReplayBuffer(ranks.assigned_buffer) as buffer:
        for _ in range(20):
            states = torch.randn(16, 4)
            await buffer.add({"state": states, "reward": states.sum(1)})
            sample = await buffer.sample(32, wait=False)  # fewer at the beginning
            reward = sample.batch["reward"].mean()
    return float(reward)


if __name__ == "__main__":
    ad.run(main)
