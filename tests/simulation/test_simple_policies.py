"""Tests simple policies in the simulator: they equal their formulas in numpy, whatever happens to the ranks."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.seeds import in_ci, seeds
from torch import nn

import asyncdist as ad
from asyncdist.simulation import Kill, Restart, simulate
from protocols import DiLoCoPolicy, StepInfo
from simulation.simple_scenarios import POLICIES, Plan, Record, check, draw_plan, every_of, has_partners, module_of, run


def options_of(policy: str) -> dict[str, Any]:
    options: dict[str, Any] = module_of(policy).OPTIONS[0]
    return options


@pytest.mark.parametrize(
    ("policy", "dtype"),
    in_ci(
        itertools.product(POLICIES, [torch.float64, torch.float32]),
        *((policy, torch.float32 if policy == "GossipPolicy" else torch.float64) for policy in POLICIES),
    ),
    ids=str,
)
def test_fifty_rounds_equal_the_formula_to_the_bit(policy: str, dtype: torch.dtype) -> None:
    options = options_of(policy)
    plan = Plan(policy=policy, options=options, dtype=dtype, steps=(50 * every_of(policy, options),) * 4)
    assert check(plan, run(plan)[1], 0.0) == 50


@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_with_rounds_differs_from_one_without(policy: str) -> None:
    options = options_of(policy)
    results = [
        run(Plan(policy=policy, options={**options, "average_every": every}, steps=(12,) * 4))[1].weights
        for every in (2, 13)
    ]
    averaged, alone = (weights[1][-1] for weights in results)
    assert max(abs(one - two).max() for one, two in zip(averaged, alone, strict=True)) > 1e-3


@pytest.mark.parametrize("seed", seeds(80))
@pytest.mark.parametrize("policy", POLICIES)
def test_faults_change_nothing_but_the_donors(policy: str, seed: int) -> None:
    plan, record = drawn(policy, seed)
    check(plan, record, 1e-12)


@functools.cache
def drawn(policy: str, seed: int) -> tuple[Plan, Record]:
    plan = draw_plan(policy, seed)
    return plan, run(plan, seed)[1]


def test_the_seeds_contain_losses_and_rounds_without_the_lost() -> None:
    seen: Counter[str] = Counter()
    for policy in POLICIES:
        for seed in range(12):
            plan, record = drawn(policy, seed)
            donors, _ = ({}, {}) if has_partners(policy, plan.options) else record.donors(plan.killed)
            seen["lost"] += bool(plan.killed)
            seen["smaller"] += any(len(ranks) < plan.ranks for ranks in donors.values())
            seen["rounds"] += len(donors)
    assert seen["lost"] > 5 and seen["smaller"] > 3 and seen["rounds"] > 50, seen


@pytest.mark.parametrize("policy", POLICIES)
def test_a_restarted_rank_continues_with_the_leaders_state(policy: str) -> None:
    options = options_of(policy)

    async def main(world: ad.World) -> tuple[int, int, list[StepInfo]]:
        model = nn.Linear(3, 2, dtype=torch.float64)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1.0)
        infos = []
        async with POLICIES[policy](model, torch.optim.SGD(model.parameters(), 0.1), **options) as own:
            begun_at = own.iteration
            while own.iteration < 40:
                with torch.no_grad():
                    model.weight.add_(world.rank + 1.0)
                await asyncio.sleep(0.01)
                infos.append(await own.step())
        return world.incarnation, begun_at, infos

    faults = [Kill(1, at_s=0.1), Restart(1, at_s=0.15)]
    results = simulate(main, ranks=3, faults=faults, until_s=100.0).results
    assert [result[0] for result in results] == [0, 1, 0]
    assert 5 < results[1][1] < 40, "the newcomer must begin in the middle of the training"
    last = [infos[-1] for _, _, infos in results]
    assert {rank for info in last for rank in info.donors} == {0, 1, 2}, "all ranks must be donors in the end"
    assert any(1 not in info.donors for info in results[0][2] if info), "rank 1 must have missed a round"


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_a_saved_population_continues_to_the_bit(policy: str, tmp_path: Path) -> None:
    options = options_of(policy)

    async def main(world: ad.World, first: int, last: int) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        own = POLICIES[policy](model, optimizer, **options)
        if first:
            await ad.load_population(tmp_path, model, optimizer, policy=own)
        async with own:
            for step in range(first, last):
                x = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * step + world.rank))
                optimizer.zero_grad()
                (model(x) - x[:, :1]).square().mean().backward()
                optimizer.step()
                await own.step()
            if last == 9:
                await ad.save_population(tmp_path, model, optimizer, policy=own)
        return [tensor.tolist() for tensor in model.state_dict().values()]

    straight = simulate(main, 0, 20, ranks=3, seed=1, strict=True).results
    half = simulate(main, 0, 9, ranks=3, seed=1, strict=True).results
    resumed = simulate(main, 9, 20, ranks=3, seed=2, strict=True).results
    assert resumed == straight != half


@pytest.mark.parametrize("policy", POLICIES)
def test_a_state_counts_the_applied_rounds(policy: str) -> None:
    """Regression: the number of the last applied round remained 0."""

    async def main(world: ad.World) -> list[tuple[int, int]]:
        model = nn.Linear(3, 2)
        async with POLICIES[policy](model, torch.optim.SGD(model.parameters(), 0.1), average_every=1) as own:
            for _ in range(3):
                await own.step()
            state = own.state_dict()
        return [(each["version"], each["applied_version"]) for each in state["fragments"]]

    assert simulate(main, ranks=2, strict=True).results == ([(3, 3)],) * 2


@pytest.mark.parametrize("policy", POLICIES)
def test_a_rank_alone_trains_unchanged(policy: str) -> None:
    async def main(world: ad.World) -> list[bool]:
        model = nn.Linear(3, 2)
        before = [parameter.clone() for parameter in model.parameters()]
        async with POLICIES[policy](model, torch.optim.SGD(model.parameters(), 0.1), average_every=1) as own:
            assert not await own.step()
        return list(map(torch.equal, before, model.parameters()))

    assert simulate(main, ranks=1).results == ([True, True],)


@pytest.mark.parametrize(
    ("policy", "options"),
    [("PopulationAveragingPolicy", {"pull": 1}), ("SparseAveragingPolicy", {"fraction": 1})],
)
def test_a_whole_mean_is_local_sgd_to_the_bit(policy: str, options: dict[str, Any]) -> None:
    """A pull of 1 is local SGD, and so is a share of 1."""

    async def main(world: ad.World, is_local_sgd: bool) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        own: Any = POLICIES[policy](model, optimizer, average_every=2, **options)
        if is_local_sgd:
            own = DiLoCoPolicy(model, optimizer, average_every=2, outer_optimizer=None)
        async with own:
            for step in range(6):
                x = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * step + world.rank))
                optimizer.zero_grad()
                (model(x) - x[:, :1]).square().mean().backward()
                optimizer.step()
                await own.step()
        return [tensor.tolist() for tensor in model.state_dict().values()]

    assert simulate(main, False, ranks=3).results == simulate(main, True, ranks=3).results
