"""Tests worlds of many ranks: the costs of starts, ends, losses and failures, and the notices of them."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter

import pytest
from support.seeds import seeds
from support.steady_network import Number, quiet

import asyncdist as ad
from asyncdist.runtime.departing.departures import SpanningTree
from asyncdist.runtime.peers import FLAT_SIZE_MAX
from asyncdist.simulation import Corrupt, Fault, Kill, Partition, SimReport, Stall, simulate

SIZE = 2 * FLAT_SIZE_MAX + 8


def ends(report: SimReport) -> Counter[str]:
    """Return how often ranks have ended in each way: with a value, or with an error of some class."""
    return Counter(type(result).__name__ if isinstance(result, BaseException) else "value" for result in report.results)


@pytest.mark.parametrize("ranks", [2, 8, 16, 17, 64, 128])
def test_an_empty_main_costs_few_messages(ranks: int) -> None:
    async def main(world: ad.World) -> None:
        del world

    report = simulate(main, ranks=ranks, strict=True)
    assert report.message_count <= ranks * (4 * math.ceil(math.log2(ranks)) + 16)
    assert report.message_count <= 4 * ranks or ranks <= FLAT_SIZE_MAX


def test_ranks_that_wait_an_hour_for_another_send_few_messages() -> None:
    async def main(world: ad.World, seconds: float) -> None:
        await asyncio.sleep(0.001 * world.rank)
        if world.rank == 7:
            await asyncio.sleep(seconds)

    counts = [simulate(main, seconds, ranks=SIZE, strict=True).message_count for seconds in (100.0, 36_000.0)]
    assert counts[0] == counts[1] <= 13 * SIZE


@pytest.mark.slow
def test_ranks_that_leave_at_different_times_send_few_messages() -> None:
    async def main(world: ad.World) -> None:
        await asyncio.sleep(random.Random(world.rank).uniform(0.0, 10.0))

    counts = [simulate(main, ranks=ranks, seed=1, strict=True).message_count / ranks for ranks in (64, 192)]
    assert max(counts) <= 24, "a rank may send at most 24 messages; once it sent 51 and 91"
    assert counts[1] <= 1.2 * counts[0]


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(4))
def test_a_wait_for_a_departed_rank_fails_soon(seed: int) -> None:
    """The wait fails soon even if many other ranks left long ago."""

    async def main(world: ad.World) -> float:
        last = 1 + seed
        leave_at = 20.0 if world.rank == last else random.Random(world.rank).uniform(0.0, 19.0)
        if world.rank == 0 or world.rank > SIZE // 2:
            while last not in world.services.left:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        else:
            await asyncio.sleep(leave_at)
        return world.time()

    assert all(20.0 <= at < 20.0 + 3.5 for at in simulate(main, ranks=SIZE, seed=seed).results[SIZE // 2 + 1 :])


@pytest.mark.parametrize("seed", seeds(4))
def test_a_sender_to_a_departed_rank_is_notified_of_its_end(seed: int) -> None:
    async def main(world: ad.World) -> str:
        if world.rank == 3:
            await asyncio.sleep(1.0)
            return "left"
        if world.rank == 30:  # its message is damaged, so rank 3 never receives it
            await world.channel(Number, tag=5).send(Number(1), 3)
        try:
            await ad.barrier()
        except ad.ClosedError as error:
            return f"without {error.rank}"
        return "passed"

    with quiet():
        report = simulate(main, ranks=SIZE, seed=seed, faults=[Corrupt(30, 3, number=1)])
    report.check_faults()
    assert report.results[30] == "without 3"


@pytest.mark.parametrize("seed", seeds(6))
def test_a_wait_for_a_departed_stranger_fails(seed: int) -> None:
    """The waiting rank has never exchanged a message with the rank that has left."""

    async def main(world: ad.World) -> str:
        if world.rank == SIZE - 1:
            return "left"
        began = world.time()
        try:
            await ad.barrier()
        except ad.ClosedError as error:
            assert world.time() - began < 5.0
            return str(error)
        return "passed"

    report = simulate(main, ranks=SIZE, seed=seed, strict=True)
    assert set(report.results[:-1]) == {report.results[0]} and f"rank {SIZE - 1} has left" in str(report.results[0])


@pytest.mark.parametrize("seed", seeds(6))
def test_the_last_messages_arrive_before_the_end_notice(seed: int) -> None:
    async def main(world: ad.World) -> int:
        channel = world.channel(Number, tag=5)
        dest = random.Random(f"{seed} {world.rank}").randrange(SIZE)
        for value in range(3):
            await channel.send(Number(value), dest)
        if world.rank:
            return 0
        count = 0
        while len(world.services.left) < SIZE - 1:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        while channel.receive_nowait() is not None:
            count += 1
        return count

    dests = [random.Random(f"{seed} {rank}").randrange(SIZE) for rank in range(SIZE)]
    assert simulate(main, ranks=SIZE, seed=seed).results[0] == 3 * dests.count(0)


@pytest.mark.parametrize("seed", seeds(12))
def test_ranks_that_die_while_all_end_keep_nobody(seed: int) -> None:
    rng = random.Random(seed)
    killed = rng.sample(range(SIZE), rng.choice([1, 3, SIZE // 2]))
    if seed % 2:
        killed = sorted({0, 1, *killed})
    faults: list[Fault] = [Kill(rank, at_s=rng.uniform(0.0, 0.06)) for rank in killed]

    async def main(world: ad.World) -> None:
        await asyncio.sleep(0.001 * random.Random(f"{seed} {world.rank}").randrange(60))

    with quiet():
        report = simulate(main, ranks=SIZE, seed=seed, faults=faults)
    assert ends(report)["value"] >= SIZE - len(killed)


@pytest.mark.parametrize("number", range(1, 6))
def test_a_rank_that_dies_while_all_end_holds_no_rank_below_it(number: int) -> None:
    """Regression: rank 0 ended once the rank below it knew, so no rank was left to notify those further below."""
    passing = SpanningTree(SIZE, 0).children[0]

    async def main(world: ad.World) -> None:
        del world

    with quiet():
        report = simulate(main, ranks=SIZE, faults=[Kill(passing, at_message=number)])
    assert ends(report)["value"] >= SIZE - 1


@pytest.mark.parametrize("seed", seeds(12))
def test_frames_that_are_spoiled_while_all_end_are_sent_again(seed: int) -> None:
    rng = random.Random(seed)
    pairs = [(rank, parent) for rank in range(1, SIZE) if (parent := SpanningTree(SIZE, rank).parent) is not None]
    spoiled = [pair if rng.random() < 0.5 else pair[::-1] for pair in rng.sample(pairs, 3)]

    async def main(world: ad.World) -> None:
        await asyncio.sleep(0.001 * random.Random(f"{seed} {world.rank}").randrange(60))

    with quiet():
        report = simulate(main, ranks=SIZE, seed=seed, faults=[Corrupt(*pair, number=1) for pair in spoiled])
    report.check_faults()
    assert ends(report) == {"value": SIZE}


@pytest.mark.parametrize("seed", seeds(6))
def test_a_partition_or_stall_while_all_end_only_delays_them(seed: int) -> None:
    rng = random.Random(seed)
    faults: list[Fault] = [
        Partition(tuple(rng.sample(range(SIZE), SIZE // 3)), at_s=0.01, until_s=20.0),
        Stall(rng.randrange(SIZE), at_s=0.01, duration_s=30.0),
    ]

    async def main(world: ad.World) -> None:
        await asyncio.sleep(0.02)

    report = simulate(main, ranks=SIZE, seed=seed, faults=faults, strict=True)
    assert ends(report) == {"value": SIZE}


@pytest.mark.parametrize("seed", seeds(8))
def test_a_failure_reaches_ranks_below_a_computing_one(seed: int) -> None:
    rng = random.Random(seed)
    failing, busy = rng.sample(range(SIZE), 2)
    busy = 0 if seed % 2 and failing else busy
    heard_at: dict[int, float] = {}

    async def main(world: ad.World) -> None:
        try:
            await asyncio.sleep(1.0)
            if world.rank == failing:
                raise ZeroDivisionError("the cause")
            if world.rank == busy:
                time.sleep(20.0)  # noqa: ASYNC251 it computes
            await asyncio.sleep(1e6)
        finally:
            heard_at[world.rank] = world.time()

    report = simulate(main, ranks=SIZE, seed=seed, return_exceptions=True)
    assert ends(report) == {"ZeroDivisionError": 1, "RankLostError": SIZE - 1}
    assert all("the cause" in str(error) for error in report.results)
    assert max(at for rank, at in heard_at.items() if rank != busy) < 1.0 + 5.0


def test_where_all_fail_at_once_each_sends_few_messages() -> None:
    async def main(world: ad.World) -> None:
        await asyncio.sleep(0.1)
        raise ZeroDivisionError(f"on rank {world.rank}")

    for ranks in (40, 160):
        report = simulate(main, ranks=ranks, seed=3, return_exceptions=True)
        assert ends(report) == {"ZeroDivisionError": ranks}
        assert report.message_count <= ranks * (4 * math.ceil(math.log2(ranks)) + 16)
