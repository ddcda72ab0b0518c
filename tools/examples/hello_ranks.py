"""Every rank says hello to rank 0, which prints who is there.

asyncdist run -n 4 tools/examples/hello_ranks.py
"""

from dataclasses import dataclass

import asyncdist as ad


@dataclass(frozen=True, slots=True)
class Hello:
    hostname: str


async def main(world: ad.World) -> None:
    hellos = world.channel(Hello, tag=100)
    await hellos.send(Hello(world.hostname), dest=0)
    if world.rank == 0:
        found = sorted([await hellos.receive() for _ in range(world.size)], key=lambda envelope: envelope.source)
        for envelope in found:
            print(f"rank {envelope.source} of {world.size} on {envelope.message.hostname}")


if __name__ == "__main__":
    ad.run(main)
