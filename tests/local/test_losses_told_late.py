"""Tests a lost rank of which its peers are notified at different times: each gets the reason, and none hangs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch
from support.seeds import seeds

import asyncdist as ad
from asyncdist import World
from asyncdist.errors import RankLostError
from asyncdist.simulation import Compute, Kill, Network, Uniform
from protocols import AverageAllPolicy


def test_step_names_the_lost_rank_and_not_one_that_left() -> None:
    async def main(world: World) -> int:
        model = torch.nn.Linear(64, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(RankLostError) as caught:
            async with AverageAllPolicy(model, optimizer, average_every=2) as policy:
                while True:
                    await policy.step()
        return int(caught.value.facts["rank"])

    for seed in (7, 9, 64, 76, 120, 129, *range(10, 20)):  # the first ones said ClosedError once
        lost, results = simulate_a_loss(main, 3, seed)
        assert [results[rank] for rank in range(3) if rank != lost] == [lost, lost], seed


@pytest.mark.parametrize("seed", seeds(10))
def test_all_axes_of_a_mesh_end_with_one_of_its_ranks(seed: int) -> None:
    async def main(world: World) -> tuple[int, ...]:
        mesh = await ad.new_mesh({"POP": 2, "DP": 2})
        with mesh, pytest.raises(RankLostError):
            while True:
                for axis in ("POP", "DP"):
                    await ad.psum(torch.ones(2), axis)
        with mesh:
            for axis in ("POP", "DP"):
                with pytest.raises(RankLostError):
                    await ad.psum(torch.ones(2), axis)
        group = await ad.surviving_group(timeout_s=20)
        smaller = await ad.new_mesh({"DP": 3}, group=group)
        assert await ad.psum(torch.ones(()), "DP", mesh=smaller) == 3
        return group.ranks

    lost, results = simulate_a_loss(main, 4, seed)
    live = tuple(rank for rank in range(4) if rank != lost)
    assert [results[rank] for rank in live] == [live] * 3


def test_a_mesh_goes_on_while_ranks_of_other_axes_return() -> None:
    async def main(world: World) -> None:
        mesh = await ad.new_mesh({"POP": 2, "DP": 2})
        with mesh:
            for _ in range(5 if world.rank < 2 else 10):
                await asyncio.sleep(0.01)
                assert await ad.psum(torch.ones(()), "DP") == 2

    ad.simulate(main, ranks=4, strict=True).value()


def simulate_a_loss(
    main: Callable[[World], Coroutine[Any, Any, object]], size: int, seed: int
) -> tuple[int, tuple[object, ...]]:
    """Kill a random rank at a random moment; each other rank is notified up to three seconds later.

    Returns:
        The lost rank, and all results.
    """
    rng = random.Random(seed)
    lost = rng.randrange(size)
    report = ad.simulate(
        main,
        ranks=size,
        seed=seed,
        faults=[Kill(rank=lost, at_s=rng.uniform(0.001, 0.01))],
        network=Network(loss_detection_s=Uniform(0, 3.0)),
        compute=Compute(step_s=Uniform(0, 1e-4)),
    )
    return lost, report.results
