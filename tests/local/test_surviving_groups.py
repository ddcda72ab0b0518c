"""Tests groups of the surviving ranks while other ranks are lost at random moments."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import torch
from support.facts import naming
from support.seeds import seeds

import asyncdist as ad
from asyncdist import World
from asyncdist.errors import ClosedError, RankLostError
from asyncdist.simulation import Compute, Kill, Network, Uniform


@pytest.mark.parametrize("seed", seeds(40))
def test_all_who_live_come_to_the_same_group(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.randint(2, 7)
    killed = rng.sample(range(size), rng.randint(1, size - 1))
    faults = [Kill(rank=rank, at_s=rng.uniform(0, 0.02)) for rank in killed]
    network = Network(loss_detection_s=rng.choice([0.0, Uniform(0, 0.05), Uniform(0, 3.0)]))
    report = ad.simulate(
        together, ranks=size, seed=seed, faults=faults, network=network, compute=Compute(step_s=Uniform(0, 1e-4))
    )
    live = tuple(rank for rank in range(size) if rank not in killed)
    assert [report.results[rank] for rank in live] == [live] * len(live)


async def together(world: World) -> tuple[int, ...]:
    """Make groups of the survivors and reduce in them until no more ranks are lost."""
    group = world.group
    ends_at = 10.0
    while world.time() < ends_at:
        try:
            async with asyncio.timeout(60):
                total = await ad.all_reduce(torch.ones(1), group=group)
                assert total == group.size
                await world.sleep(0.001 if world.time() < 0.1 else 0.5)
                flag = torch.tensor([float(world.time() >= ends_at)])
                if await ad.all_reduce(flag, group=group):
                    break
        except RankLostError:
            group = await ad.surviving_group(group)
    return group.ranks


def test_a_rank_that_has_left_is_not_among_them() -> None:
    async def main(world: World) -> tuple[int, ...]:
        if world.rank == 1:
            return ()
        with pytest.raises(ClosedError):
            await ad.barrier()
        return (await ad.surviving_group()).ranks

    assert ad.simulate(main, ranks=3, strict=True).results == ((0, 2), (), (0, 2))


def test_a_member_that_does_not_come_is_told() -> None:
    async def main(world: World) -> None:
        if world.rank:
            with pytest.raises(ad.StartTimeoutError, match="rank 0 did not join within 2"):
                await ad.surviving_group(timeout_s=2)
            with pytest.raises(ValueError, match=naming("timeout_s", -1)):
                await ad.surviving_group(timeout_s=-1)
        await world.sleep(5)

    ad.simulate(main, ranks=3, strict=True).value()


def test_what_is_no_group_is_refused() -> None:
    async def main(world: World) -> None:
        group: Any = [0]
        with pytest.raises(TypeError, match=naming("group", [0])):
            await ad.surviving_group(group)

    ad.simulate(main, ranks=1).value()


def test_tasks_that_lose_a_rank_get_no_other_tasks_group() -> None:
    """Regression: both tasks listed the same ranks, and each got the group that was requested first."""

    async def job(world: World, group: ad.Group, value: float) -> float:
        with pytest.raises(RankLostError):
            while True:
                await ad.barrier(group=group)
                await world.sleep(0.001)
        await world.sleep(0.01 * ((world.rank + value) % 2))
        survivors = await ad.surviving_group(group)
        return float(await ad.all_reduce(torch.tensor(value), group=survivors))

    async def main(world: World) -> list[float]:
        lists = ([0, 1, 2], [0, 1, 2], [0, 2, 1])
        groups = [await world.new_group(ranks) for ranks in lists]
        return await asyncio.gather(*(job(world, group, 10.0 + i) for i, group in enumerate(groups)))

    for seed in range(5):
        report = ad.simulate(main, ranks=3, seed=seed, faults=[Kill(rank=2, at_s=0.1)])
        assert report.results[:2] == ([20.0, 22.0, 24.0], [20.0, 22.0, 24.0])


def test_a_rank_is_told_of_a_loss_by_a_leader_that_has_not_come() -> None:
    """Regression: the rank waited for the leader, which had noticed the loss earlier and had continued."""

    async def main(world: World) -> float:
        if world.rank == 1:
            with pytest.raises(RankLostError, match="rank 2"):
                await world.new_group([0, 1, 2])
        return world.time() if world.rank == 1 else await world.sleep(30) or 0.0

    for at_s in (0.0, 0.5):
        report = ad.simulate(main, ranks=3, faults=[Kill(rank=2, at_s=at_s)])
        assert report.results[1] < 2


def test_member_that_dies_in_a_start_may_leave_some_a_group() -> None:
    """Some members then asked for the survivors of the new group, and others for survivors of the previous group."""

    async def main(world: World) -> tuple[int, ...]:
        if world.rank == 4:
            await world.sleep(10)
        group = world.group
        while True:
            try:
                await ad.barrier(group=group)
                await world.sleep(1)
                return group.ranks
            except RankLostError:
                group = await ad.surviving_group(group)

    for number in range(1, 8):  # the last of these messages belongs to the agreement on the turn
        faults = [Kill(rank=4, at_s=0.01), Kill(rank=0, at_message=number)]
        report = ad.simulate(main, ranks=5, seed=number, faults=faults, network=Network(loss_detection_s=0.01))
        assert report.results[1:4] == ((1, 2, 3),) * 3, number
