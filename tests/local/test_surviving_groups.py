"""Groups of the ranks that live, where others are lost at drawn moments."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch

import asyncdist as ad
from asyncdist import World
from asyncdist.errors import ClosedError, RankLostError
from asyncdist.simulation import Compute, Kill, Network, Uniform


@pytest.mark.parametrize("seed", range(40))
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
    """Until nobody is lost any more."""
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
            with pytest.raises(ad.StartTimeoutError, match="rank 0 did not come within 2"):
                await ad.surviving_group(timeout_s=2)
            with pytest.raises(ValueError, match="timeout_s is -1"):
                await ad.surviving_group(timeout_s=-1)
        await world.sleep(5)

    ad.simulate(main, ranks=3, strict=True).value()
