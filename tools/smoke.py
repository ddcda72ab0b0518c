"""Uses an installed asyncdist, of which no checkout is in the way: four ranks average, here and in a simulation."""

import importlib.metadata
import sys

import torch

import asyncdist as ad
from asyncdist import compiled
from asyncdist.integrations.pytorch import SelectiveAveraging
from protocols import AverageAllPolicy


async def main(world: ad.World) -> float:
    """Train one step, and average with all ranks."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, world.rank)
    async with AverageAllPolicy(model, torch.optim.SGD(model.parameters(), 0.1), average_every=1) as policy:
        await policy.step()
    return model.weight.item()


def train_alone() -> None:
    """Use the blocking form, as a plain loop does."""
    model = torch.nn.Linear(1, 1)
    with SelectiveAveraging(model, torch.optim.SGD(model.parameters(), 0.1), average_every=2) as averaging:
        for _ in range(4):
            averaging.step(loss=0.5)


if __name__ == "__main__":
    assert ad.run_local(main, ranks=4) == [1.5] * 4
    assert ad.simulate(main, ranks=4, seed=1).results == (1.5,) * 4
    train_alone()
    version = importlib.metadata.version("asyncdist")
    print(f"asyncdist {version} of {ad.__file__}, compiled: {compiled.describe()}, torch {torch.__version__}")
    if "--compiled" in sys.argv[1:]:
        assert compiled.describe() == "yes"
