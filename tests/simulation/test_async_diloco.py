"""Tests asynchronous DiLoCo in virtual time against a numpy oracle, and against DiLoCo."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.seeds import in_ci
from torch import nn

import asyncdist as ad
from asyncdist.simulation import Compute, Link, Network, Uniform
from protocols import AsyncDiLoCoPolicy
from simulation import diloco_scenarios
from simulation.async_diloco_scenarios import OUTERS, Plan, check, run

PLANS = {
    "alone": Plan(steps=(30,) * 4),
    "float32": Plan(steps=(30,) * 4, dtype=torch.float32),
    "without momentum": Plan(steps=(30,) * 4, outer="plain"),
    "a quorum of two": Plan(steps=(30,) * 4, quorum=2),
    "all with grace": Plan(ranks=2, steps=(30,) * 2, quorum=1, grace_s=1.0),
    "wait": Plan(steps=(30,) * 4, late="wait", quorum=1),
    "slow network": Plan(
        steps=(30,) * 4, network=Network(link=Link(latency_s=Uniform(1e-3, 0.05), bandwidth_nbytes_per_s=1e4))
    ),
    "a slow rank": Plan(steps=(30, 30, 30, 10), compute=Compute(factors={3: 10.0})),
    "a slow leader": Plan(steps=(10, 30, 30, 30), compute=Compute(factors={0: 10.0})),
    "different ends": Plan(steps=(7, 30, 12, 21)),
}


@pytest.mark.parametrize("name", PLANS)
def test_weights_equal_the_oracles_bit_for_bit(name: str) -> None:
    plan = PLANS[name]
    _, record = run(plan)
    oracle = check(plan, record)
    assert len(oracle.anchors) > 10


def test_weights_by_tokens_are_those_of_the_oracle() -> None:
    plan = Plan(steps=(30,) * 4, quorum=3, grace_s=0.004, uses_tokens=True, outer="nesterov")
    _, record = run(plan)
    check(plan, record, 1e-12)
    assert len({len(donors) for donors in record.lineage}) > 1, "the grace period must have added donors"


def test_each_contribution_is_applied_exactly_once() -> None:
    """Without momentum, the anchor moves by lr times the sum of all differences, which are multiples of 1/64."""
    plan = Plan(steps=(40,) * 4, outer="plain")
    _, record = run(plan)
    oracle = check(plan, record)
    made = [life.statistics.contribution_count for life in record.lives.values() if life.statistics]
    assert len(oracle.applied) == sum(made) >= 40
    for place, first in enumerate(oracle.anchors[0]):
        moved = first - 0.25 * np.sum([difference[place] for difference in oracle.applied], axis=0)
        assert np.array_equal(moved, oracle.anchors[-1][place])


@pytest.mark.parametrize("outer", in_ci(["dyadic", "nesterov", "plain"], "dyadic", "nesterov"))
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.long)])
def test_a_quorum_of_all_equals_diloco_bit_for_bit(
    outer: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = (150,) * 4
    plan = Plan(steps=steps, outer=outer, quorum=4, late="wait", dtype=dtype)
    _, record = run(plan)
    monkeypatch.setitem(diloco_scenarios.OUTERS, f"async {outer}", OUTERS[outer])
    other = diloco_scenarios.Plan(steps=steps, outer=f"async {outer}", dtype=dtype)
    _, theirs = diloco_scenarios.run(other)
    for rank in range(4):
        mine = record.lives[rank, 0]
        assert [info.round for info in mine.infos if info] == list(range(1, 51))
        for step, (own, right) in enumerate(zip(mine.weights, theirs.weights[rank], strict=True)):
            assert all(map(np.array_equal, own, right)), (rank, step)
        for own_info, right_info in zip(mine.infos, theirs.infos[rank], strict=True):
            norms = own_info.outer_norm, right_info.outer_norm
            if any(norms):  # DiLoCo adds up the norms of slices
                assert norms[0] == pytest.approx(norms[1], rel=1e-6)
                assert own_info.cosine == pytest.approx(right_info.cosine, abs=1e-5)


def test_no_rank_waits_for_a_slow_one() -> None:
    """A rank that is 100 times slower, and leads, costs the others no step."""
    for slow in (0, 3):
        steps = tuple(3 if rank == slow else 300 for rank in range(4))
        _, record = run(Plan(steps=steps, compute=Compute(factors={slow: 100.0})))
        fast = [life.statistics for (rank, _), life in record.lives.items() if rank != slow]
        assert all(each is not None and each.waited_s < 0.01 * 300 * 0.01 for each in fast)


def test_a_model_may_have_only_empty_tensors() -> None:
    """Regression: the leader waited for bytes that it had not requested."""

    async def main(world: ad.World) -> int:
        model = nn.ParameterList([nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(0, 3))])
        async with AsyncDiLoCoPolicy(model, torch.optim.SGD(model.parameters(), lr=0.1), average_every=2) as policy:
            for _ in range(6):
                await policy.step()
        return policy.iteration

    assert ad.simulate(main, ranks=3, seed=1).results == (6, 6, 6)


def test_a_rank_that_has_saved_alone_is_awaited_again() -> None:
    """Regression: after lone calls of settle(), the leader made versions with too few contributions."""

    async def main(world: ad.World) -> list[tuple[int, ...]]:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.01), []
        async with AsyncDiLoCoPolicy(model, optimizer, average_every=5, late="wait", quorum=3) as policy:
            for step in range(60):
                await world.sleep((0.04, 0.02, 0.01)[world.rank])
                info = await policy.step()
                if info:
                    found.append(info.donors)
                if (world.rank, step) in ((0, 9), (0, 14), (1, 34)):
                    await policy.settle()
        return found

    _, *others = ad.simulate(main, ranks=3, seed=1).results
    assert all(donors in ((0, 1, 2), (1, 2)) for found in others for donors in found), others
