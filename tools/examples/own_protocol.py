"""A protocol of one's own: gossip. After each step a rank pushes its weights to another one, which takes the mean.

asyncdist sim tools/examples/own_protocol.py --ranks 8 --seed 1
"""

import random
from dataclasses import dataclass

import torch

import asyncdist as ad


@dataclass(frozen=True, slots=True)
class Weights:
    values: tuple[float, ...]


async def main(world: ad.World) -> float:
    model = torch.full((2,), float(world.rank))
    channel = world.channel(Weights, tag=100)
    others = [rank for rank in range(world.size) if rank != world.rank]
    chance = random.Random(world.rank)
    for _ in range(40 if others else 0):
        channel.send_nowait(Weights(tuple(model.tolist())), chance.choice(others))
        await world.safe_point()  # messages move here
        while (envelope := channel.receive_nowait()) is not None:
            model = (model + torch.tensor(envelope.message.values)) / 2
    await ad.barrier()
    channel.close()
    return float(model[0])


if __name__ == "__main__":
    print(f"{ad.run(main):.3f}")
