"""A bug that real ranks hardly ever show: rank 0 gives the first ticket to whoever asks first, and expects rank 1.

asyncdist sim tools/examples/simulated_bug.py --ranks 4 --explore 100
"""

from dataclasses import dataclass

import asyncdist as ad


@dataclass(frozen=True, slots=True)
class Wish:
    number: int


async def main(world: ad.World) -> None:
    wishes = world.channel(Wish, tag=100)
    if world.rank > 0:
        await world.safe_point()  # computing: simulated, it takes a time that is drawn
        await wishes.send(Wish(world.rank), dest=0)
        return
    sources = [(await wishes.receive()).source for _ in range(1, world.size)]
    assert sources[:1] in ([], [1]), f"rank {sources[0]} was first"


if __name__ == "__main__":
    ad.run(main)
