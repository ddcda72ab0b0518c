"""Trains with DiLoCo in four real processes, then simulates the same training, and compares the weights.

    asyncdist run -n 4 tools/benchmarks/worth/real.py

The ranks make the same number of steps, and DiLoCo's rounds wait for all ranks. The weights therefore do not depend on
timing, and must be equal bit for bit. The exit code is 1 if they are not.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import asyncdist as ad
from worth.learning import weights_of
from worth.methods import METHODS
from worth.settings import RANK_COUNT
from worth.tasks import TASKS

STEP_COUNT: Final = 160
METHOD: Final = "DiLoCo"
VALUE: Final = 0.7


async def train(world: ad.World, task: str, seed: int, step_count: int) -> tuple[float, str]:
    """Train for some steps, and return the quality and the digest of the common weights."""
    torch.set_num_threads(1)
    learner = TASKS[task].make(seed, world.rank, "iid", 1.0)
    async with METHODS[METHOD].make(learner, TASKS[task].average_every, VALUE) as policy:
        for _ in range(step_count):
            learner.gradients()
            learner.optimizer.step()
            await policy.step()
    weights = weights_of(learner.model)
    return TASKS[task].judge(seed).test(weights), hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]


def simulated(task: str, seed: int, step_count: int) -> list[tuple[float, str]]:
    """Return each rank's quality and digest in a simulation of the training."""
    return list(ad.simulate(train, task, seed, step_count, ranks=RANK_COUNT, seed=seed, strict=True).results)


async def main(world: ad.World) -> tuple[int, float, str]:
    """Train on this rank, and return its rank, its quality and its digest."""
    return world.rank, *await train(world, "gaussians", 0, STEP_COUNT)


if __name__ == "__main__":
    rank, *real = ad.run(main)
    if rank == 0:
        print(f"{RANK_COUNT} processes: test loss {real[0]:.4f}, weights {real[1]}")
        quality, digest = simulated("gaussians", 0, STEP_COUNT)[0]
        print(f"simulated:   test loss {quality:.4f}, weights {digest}")
        sys.exit(digest != real[1])
