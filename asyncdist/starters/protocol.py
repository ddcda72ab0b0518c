"""A custom protocol: each rank has a number, and by gossip all ranks approximate the mean.

asyncdist sim gossip.py --ranks 8 --seed 1             one simulated run; the same seed gives the same run
asyncdist sim gossip.py --ranks 8 --explore 200        200 simulated runs, until one fails
asyncdist run -n 4 gossip.py                           real ranks
"""

from dataclasses import dataclass

import asyncdist as ad

ROUNDS = 40


@dataclass(frozen=True, slots=True)
class Half:
    """Carries half of the sender's number, and half of its weight, to a neighbour."""

    number: float
    weight: float


@dataclass(frozen=True, slots=True)
class Done:
    """Announces that the sender has finished. It arrives after all earlier messages of the sender."""


async def main(world: ad.World) -> float:
    """Run push-sum (Kempe, Dobra and Gehrke, 2003). Ranks send halves of their numbers, so that the sum is constant."""
    channel = world.channel(Half | Done, tag=40)
    others = [rank for rank in range(world.size) if rank != world.rank]
    draw = world.generator("neighbours")  # random generator, seeded by the simulation's seed
    number, weight, done_count = float(world.rank), 1.0, 0

    for step in range(ROUNDS):
        if others:
            number, weight = number / 2, weight / 2
            await channel.send(Half(number, weight), draw.choice(others))
        if step == ROUNDS - 1:
            for dest in others:
                await channel.send(Done(), dest)
        await ad.barrier()  # otherwise a fast rank would send everything before the others have begun
        while done_count < len(others):
            # In the last step, wait for all messages in progress; before that, take only messages that have arrived.
            envelope = await channel.receive() if step == ROUNDS - 1 else channel.receive_nowait()
            if envelope is None:
                break
            if isinstance(envelope.message, Half):
                number, weight = number + envelope.message.number, weight + envelope.message.weight
            else:
                done_count += 1

    total = await ad.reduce_and_broadcast(lambda: number, sum)
    assert abs(total - sum(range(world.size))) < 1e-9, f"the sum has become {total}"
    channel.close()
    mean = number / weight
    print(f"rank {world.rank}: {mean:.3f}")
    return mean


if __name__ == "__main__":
    ad.run(main)
