"""Three clients and a prioritised replay buffer on real ranks: scores and priorities change, with few messages.

Each client checks its draws with numpy, and counts its own messages in transit.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import torch
from support.mpi import report

import asyncdist as ad
from protocols import ReplayBuffer, serve_replay_buffer

ALPHA, BETA, IN_FLIGHT = 0.5, 0.75, 4
#: Numbers of items of 12 bytes in one batch; the last batch is sent as a stream.
SIZES = (1, 2, 3, 20, 6000)
SMALL_COUNT = 200


class Slowly:
    """The server's score: the value in the batch, after a pause in which the server receives nothing."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, batch: Any) -> float:
        self.count += 1
        time.sleep(0.002 if self.count % 50 == 0 else 0.0)
        return float(batch["number"].double().sum()) + float(batch["rank"][0]) / 4


def batch_of(rank: int, numbers: np.ndarray[Any, Any]) -> dict[str, torch.Tensor]:
    return {
        "rank": torch.full((len(numbers),), rank),
        "number": torch.from_numpy(numbers.astype(np.int32)),
    }


async def check_scores(rank: int, buffer: ReplayBuffer) -> int:
    """Check that concurrent adds get the answers to their own batches; return their largest number."""
    assert buffer._channel is not None
    send, unanswered, most = buffer._channel.send_nowait, 0, 0

    def counting(message: Any, dest: int, **options: Any) -> None:
        nonlocal unanswered, most
        unanswered += type(message).__name__ == "Add"
        most = max(most, unanswered)
        send(message, dest, **options)

    async def add(first: int, size: int) -> None:
        nonlocal unanswered
        numbers = np.arange(first, first + size)
        answer = await buffer.add(batch_of(rank, numbers), priorities=np.ones(size))
        unanswered -= 1
        assert answer == float(numbers.sum()) + rank / 4, (answer, first, size)

    buffer._channel.send_nowait = counting  # type: ignore[method-assign]
    async with asyncio.TaskGroup() as tasks:
        for index, size in enumerate([*SIZES, *[1] * SMALL_COUNT]):
            tasks.create_task(add(1000 * index, size))
    buffer._channel.send_nowait = send  # type: ignore[method-assign]
    return most


async def check_priorities(rank: int, buffer: ReplayBuffer) -> list[int]:
    """Check the priorities. Only this client sends requests: items that it has seen keep the priority that it sets."""
    known: dict[int, tuple[int, int]] = {}
    while len(known) < 50:
        seen = await buffer.sample(50, beta=BETA)
        numbers = zip(seen.batch["rank"].tolist(), seen.batch["number"].tolist(), strict=True)
        known.update(zip(seen.ids.tolist(), numbers, strict=True))
    everything = (sum(SIZES) + SMALL_COUNT) * 3
    await buffer.update_priorities(np.arange(everything), np.zeros(everything))
    chosen = sorted(known)[:3]
    priorities = np.array([1.0, 4.0, 9.0])
    await buffer.update_priorities(chosen, priorities)
    drawn = await buffer.sample(6000, beta=BETA)
    for item, *found in zip(drawn.ids.tolist(), drawn.batch["rank"], drawn.batch["number"], strict=True):
        assert tuple(map(int, found)) == known[item]
    # Schaul et al. (2016): chances are priority^alpha divided by their sum, and weights (size * chance)^-beta divided
    # by the largest.
    chances = priorities**ALPHA / (priorities**ALPHA).sum()
    weights = (chances / chances.min()) ** -BETA
    counts = np.array([(drawn.ids == item).sum() for item in chosen])
    assert counts.sum() == 6000
    assert np.abs(counts / 6000 - chances).max() < 0.05  # more than seven standard deviations
    for item, weight in zip(chosen, weights, strict=True):
        np.testing.assert_allclose(drawn.weights[drawn.ids == item].numpy(), weight, rtol=1e-12)
    return chosen


async def main(world: ad.World) -> None:
    server = world.size - 1
    if world.rank == server:
        statistics = await serve_replay_buffer(
            range(server), capacity=30_000, prioritized=True, alpha=ALPHA, score=Slowly(), in_flight_max=IN_FLIGHT
        )
        added = [statistics.added[rank] for rank in range(server)]
        report(server, {"added": added, "stale": statistics.stale_update_count})
        return
    clients = await ad.new_group(range(server))
    async with ReplayBuffer(server) as buffer:
        most = await check_scores(world.rank, buffer)
        for rank in range(server):  # in turn
            await ad.barrier(group=clients)
            if rank == world.rank:
                chosen = await check_priorities(rank, buffer)
                await buffer.update_priorities(
                    np.arange(3 * (sum(SIZES) + SMALL_COUNT)), np.ones(3 * (sum(SIZES) + SMALL_COUNT))
                )
    report(world.rank, {"most": most, "chosen": len(chosen)})


if __name__ == "__main__":
    ad.run(main, strict=True)
