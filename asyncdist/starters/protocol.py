"""A protocol of one's own: each rank holds a number, and by gossip all of them come close to the mean.

asyncdist sim gossip.py --ranks 8 --seed 1             one simulated run; the same seed gives the same run
asyncdist sim gossip.py --ranks 8 --explore 200        200 of them, until one fails
asyncdist run -n 4 gossip.py                           real ranks
"""

from dataclasses import dataclass

import asyncdist as ad

ROUNDS = 40


@dataclass(frozen=True, slots=True)
class Half:
    """To a neighbour: half of the sender's number, and of its weight."""

    number: float
    weight: float


@dataclass(frozen=True, slots=True)
class Done:
    """To everybody: the sender sends no more. Messages of a rank arrive in their order, so all before have come."""


async def main(world: ad.World) -> float:
    """Push-sum (Kempe, Dobra and Gehrke, 2003): what is sent away is kept nowhere else, so the sums never change."""
    channel = world.channel(Half | Done, tag=40)
    others = [rank for rank in range(world.size) if rank != world.rank]
    draw = world.generator("neighbours")  # follows from the seed in a simulation
    number, weight, done_count = float(world.rank), 1.0, 0

    for step in range(ROUNDS):
        if others:
            number, weight = number / 2, weight / 2
            await channel.send(Half(number, weight), draw.choice(others))
        if step == ROUNDS - 1:
            for dest in others:
                await channel.send(Done(), dest)
        await world.safe_point()
        while done_count < len(others):
            # In the last step wait for all that is under way; before, take what has come.
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
