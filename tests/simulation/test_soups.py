"""Tests the choice of the model to deploy while ranks are killed, stalled and cancelled: none waits forever."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from helpers.cases_models import to_numpy
from helpers.cases_soups import distance, greedy, measured, model_with, running_mean, vector_of
from support.seeds import seeds

import asyncdist as ad
from asyncdist.errors import RankLostError, RemoteError
from asyncdist.simulation import Compute, Kill, Stall

RANKS = 5
#: Most of the time is spent on messages, so that a random moment may be in any exchange.
COMPUTE = Compute(step_s=0.0001)


async def choose(world: ad.World, retries: bool = True) -> tuple[str, tuple[int, ...], list[float]]:
    """Choose a model; after a loss, choose again among the remaining ranks. Return the choice and the weights."""
    model = model_with(vector_of(world.rank))

    async def loss(model: object) -> float:
        await world.sleep(0.001)
        return measured(model)  # type: ignore[arg-type]

    for _ in range(3):
        try:
            soup = await ad.best_of_population(model, loss=loss)
            return soup.kind, soup.members, to_numpy(model.weight).ravel().tolist()
        except RankLostError:
            assert np.array_equal(to_numpy(model.weight).ravel(), vector_of(world.rank))
            if not retries:
                raise
    raise AssertionError("three losses, with one kill")


def expected(ranks: list[int]) -> list[float]:
    """Return the weights of the best candidate of a second implementation."""
    vectors = [vector_of(rank) for rank in ranks]
    best, members = greedy(vectors, distance)
    order = sorted(range(len(ranks)), key=lambda index: distance(vectors[index]))
    if distance(running_mean([vectors[index] for index in order])) < best:
        members = order
    return running_mean([vectors[index] for index in members]).tolist()


@pytest.mark.parametrize("seed", seeds(20))
def test_ranks_that_live_choose_among_the_living(seed: int) -> None:
    """A rank is killed at a random moment, and another one is stalled. A rank that already had its choice keeps it."""
    draw = np.random.default_rng(seed)
    lost, slow = (int(rank) for rank in draw.choice(RANKS, 2, replace=False))
    kill = Kill(lost, at_s=float(draw.uniform(0.0001, 0.03)))
    stall = Stall(slow, at_s=float(draw.uniform(0.0001, 0.02)), duration_s=0.05)
    report = ad.simulate(choose, ranks=RANKS, seed=seed, faults=[kill, stall], compute=COMPUTE)
    found = {rank: result[2] for rank, result in enumerate(report.results) if result is not None}
    everyone, others = expected(list(range(RANKS))), expected([rank for rank in range(RANKS) if rank != lost])
    assert set(found) >= set(range(RANKS)) - {lost}
    assert all(weights in (everyone, others) for weights in found.values())


@pytest.mark.parametrize("moment", range(1, 12))
def test_a_cancelled_choice_is_told_to_all_and_changes_nothing(moment: int) -> None:
    async def main(world: ad.World) -> str:
        model = model_with(vector_of(world.rank))

        async def loss(model: object) -> float:
            await world.sleep(0.001)
            return measured(model)  # type: ignore[arg-type]

        call = asyncio.ensure_future(ad.best_of_population(model, loss=loss))
        try:
            await asyncio.wait_for(call, 0.0011 * moment if world.rank == 2 else None)
            outcome = "done"
        except (TimeoutError, RemoteError) as error:
            outcome = type(error).__name__
            assert np.array_equal(to_numpy(model.weight).ravel(), vector_of(world.rank)), outcome
        await ad.barrier()
        return outcome

    outcomes = ad.simulate(main, ranks=4, seed=moment, compute=COMPUTE, strict=True).results
    if outcomes[2] == "TimeoutError":
        assert set(outcomes[:2] + outcomes[3:]) in ({"RemoteError"}, {"done"}), outcomes
    else:
        assert set(outcomes) == {"done"}
