"""Tests asynchronous PAPA against its formula in numpy, with slow ranks and with faults, and its limits."""

from __future__ import annotations

import asyncio
import functools
import json
import random
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from scripts.population import sgd
from support.seeds import in_ci, seeds
from torch import nn

import asyncdist as ad
from asyncdist.simulation import Kill, Network, Restart, SlowRank, simulate
from protocols import (
    AsyncPopulationAveragingPolicy,
    AverageApplied,
    OneSidedSelectiveAveragingPolicy,
    PolicyEvent,
    SnapshotTaken,
    StepInfo,
)
from simulation.simple_scenarios import Array, mean_of
from simulation.training_runs import (
    Layers,
    TrainingPlan,
    advance,
    check_steps,
    draw_compute,
    draw_faults,
    draw_network,
    draw_steps,
    entered,
    simulate_plan,
    weights_of,
)


@dataclass(frozen=True, kw_only=True)
class Plan(TrainingPlan):
    """One run with these options."""

    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Record:
    """Observations of the ranks: results of steps, weights before and after each step, snapshots, and averages."""

    infos: dict[int, list[StepInfo]] = field(default_factory=lambda: defaultdict(list))
    weights: dict[int, list[tuple[Array, Array]]] = field(default_factory=lambda: defaultdict(list))
    snapshots: dict[tuple[int, int], Array] = field(default_factory=dict)  # by rank and version
    applied: dict[int, list[tuple[int, AverageApplied]]] = field(default_factory=lambda: defaultdict(list))
    ended_at: dict[int, float] = field(default_factory=dict)
    without: set[int] = field(default_factory=set)

    def see(self, rank: int, event: PolicyEvent) -> None:
        if isinstance(event, SnapshotTaken):
            (state,) = event.state.values()
            self.snapshots[rank, event.round] = state.clone().numpy()
        elif isinstance(event, AverageApplied):
            self.applied[rank].append((len(self.infos[rank]), event))


def flat(model: nn.Module) -> Array:
    return np.concatenate([each.reshape(-1) for each in weights_of(model)])


async def train(world: ad.World, plan: Plan, record: Record) -> None:
    model, rank = Layers(plan.dtype), world.rank
    policy = AsyncPopulationAveragingPolicy(
        model, sgd(model), on_event=functools.partial(record.see, rank), **plan.options
    )
    async with entered(policy, model, plan, world) as start:
        if start != "started":
            record.without.add(rank)
            return
        # The process before a restart may have been killed in a step that has applied an average.
        record.applied[rank] = [each for each in record.applied[rank] if each[0] < len(record.infos[rank])]
        for step in range(policy.iteration, plan.steps[rank]):
            await advance(plan, model, rank, step)
            before = flat(model)
            info = await policy.step()
            record.weights[rank].append((before, flat(model)))
            record.infos[rank].append(info)
        record.ended_at[rank] = world.time()


def run(plan: Plan, seed: int = 0) -> Record:
    record = Record()
    simulate_plan(train, plan, plan, record, ranks=plan.ranks, seed=seed)
    check_steps(plan, record.infos, record.without)
    return record


def check(plan: Plan, record: Record, complete: range = range(0)) -> int:
    """Compare each step with the formula, and return the number of pulls.

    A rank draws its donors among all others in the steps ``complete``; otherwise some may not have begun, or have left.
    """
    count, pull = 0, plan.options.get("pull", 0.01)
    for rank, steps in record.weights.items():
        applied = dict(record.applied[rank])
        for step, (own, new) in enumerate(steps):
            if step not in applied:
                assert np.array_equal(own, new), f"rank {rank}, step {step}"
                continue
            count += 1
            event, info = applied[step], record.infos[rank][step]
            assert info and info.donors == event.donors and rank not in event.donors
            given = mean_of([record.snapshots[facts] for facts in zip(event.donors, event.versions, strict=True)])
            shares = [pull * others / (others + 1) for others in range(len(event.donors), plan.ranks)]
            shares = shares[-1:] if step in complete else shares
            errors = [np.abs((1 - share) * own + share * given - new).max() for share in shares]
            assert min(errors) < 1e-14, f"rank {rank}, step {step}: {errors}"
    return count


OPTIONS: list[dict[str, Any]] = [
    {"average_every": 2, "pull": 0.25},
    {"average_every": 1, "pull": 1.0, "donor_count": 1},
    {"average_every": 3, "donor_count": 2},
]


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_each_pull_equals_the_formula(options: dict[str, Any]) -> None:
    plan = Plan(options=options, steps=(20,) * 4)
    record = run(plan)
    assert check(plan, record, range(5, 11)) >= 4 * (20 // options["average_every"] - 2)


def test_a_pull_of_all_donors_is_papa_with_older_snapshots() -> None:
    record = run(Plan(options={"average_every": 2, "pull": 0.5}, steps=(20,) * 4))
    for rank, events in record.applied.items():
        for step, event in [each for each in events if 5 <= each[0] <= 10]:
            assert event.donors == tuple(other for other in range(4) if other != rank)
            own, new = record.weights[rank][step]
            given = [record.snapshots[facts] for facts in zip(event.donors, event.versions, strict=True)]
            mean = mean_of([own, *given])
            np.testing.assert_allclose(new, own + 0.5 * (mean - own), rtol=0, atol=1e-14)
            assert 0 < record.infos[rank][step].staleness_steps <= 8


def draw_plan(seed: int) -> Plan:
    rng = random.Random(f"async papa {seed}")
    ranks = rng.randint(2, 5)
    options, steps = rng.choice(OPTIONS), draw_steps(rng, ranks, rng.randint(6, 20))
    network, compute, faults = draw_network(rng), draw_compute(rng, ranks), draw_faults(rng, ranks)
    kills = [fault for fault in faults if isinstance(fault, Kill) and rng.random() < 0.5]
    times_s = [(fault.at_s or 0.1) + rng.choice((1e-3, 0.02, 0.1)) for fault in kills]
    restarts = (Restart(fault.rank, at_s=at_s) for fault, at_s in zip(kills, times_s, strict=True))
    return Plan(
        ranks=ranks,
        options=options,
        steps=steps,
        network=network,
        compute=compute,
        faults=(*faults, *restarts),
    )


@pytest.mark.parametrize("seed", seeds(40))
def test_faults_change_nothing_but_the_donors(seed: int) -> None:
    plan = draw_plan(seed)
    check(plan, run(plan, seed))


@pytest.mark.slow
@pytest.mark.parametrize("factor", in_ci([10.0, 100.0], 100.0))
def test_a_slow_rank_does_not_slow_the_others(factor: float) -> None:
    """The others' rate of steps is at least 0.98 of the rate of a rank alone, and they are still pulled."""
    count = 200
    options = {"average_every": 5, "pull": 0.1}
    alone_s = run(Plan(options=options, ranks=1, steps=(count,))).ended_at[0]
    steps = (count, count, count, int(count / factor))
    plan = Plan(options=options, steps=steps, faults=(SlowRank(3, 0.0, factor),))
    record = run(plan)
    assert check(plan, record) > 0
    for rank in range(3):
        rate = alone_s * (1 + 0.2 * rank) / record.ended_at[rank]
        assert rate >= 0.98, f"rank {rank}: {rate}"
        assert len(record.applied[rank]) >= 5


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "donor_count", "pulls"), [(1, None, 39), (10, None, 27), (10, 1, 36)])
def test_a_rank_that_computes_delays_pulls_but_no_step(factor: int, donor_count: int | None, pulls: int) -> None:
    """Rank 3 answers readers only in its steps, which block its thread. The page has the numbers of pulls."""

    async def main(world: ad.World) -> tuple[int, float]:
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        is_slow = world.rank == 3
        async with AsyncPopulationAveragingPolicy(model, sgd(model), average_every=5, donor_count=donor_count) as own:
            begun_at = world.time()
            for _ in range(200 // factor if is_slow else 200):
                time.sleep(0.01 * factor if is_slow else 0.01)  # noqa: ASYNC251
                await own.step()
            return own.statistics().pull_count, world.time() - begun_at

    async def alone(world: ad.World) -> float:
        begun_at = world.time()
        for _ in range(200):
            time.sleep(0.01)  # noqa: ASYNC251
            await world.progress()
        return world.time() - begun_at

    results = simulate(main, ranks=4, network=Network(ranks_per_host=1)).results
    (alone_s,) = simulate(alone, ranks=1).results
    assert results[0][0] == pulls
    assert all(alone_s / seconds >= 0.98 for _, seconds in results[:3])


@pytest.mark.parametrize("pull", [0.5, 1])
def test_a_diverged_rank_takes_the_mean_of_the_others(pull: float) -> None:
    async def main(world: ad.World) -> tuple[list[float], int]:
        model = nn.Linear(2, 1, bias=False, dtype=torch.float64)
        nn.init.constant_(model.weight, float(world.rank))
        recovered = 0
        async with AsyncPopulationAveragingPolicy(model, sgd(model), average_every=2, pull=pull) as policy:
            for step in range(12):
                if world.rank == 1 and step == 5:
                    nn.init.constant_(model.weight, float("nan"))
                await asyncio.sleep(0.01)
                recovered += bool((await policy.step()).recovered)
        return model.weight.flatten().tolist(), recovered

    results = simulate(main, ranks=3).results
    assert [recovered for _, recovered in results] == [0, 1, 0]
    assert all(0 <= value <= 2 for weights, _ in results for value in weights)


def test_a_saved_policy_continues_its_draws() -> None:
    async def main(world: ad.World, saved: str) -> tuple[str, str]:
        model = nn.Linear(2, 1)
        policy = AsyncPopulationAveragingPolicy(model, sgd(model), average_every=1, donor_count=1)
        if saved:
            policy.load_state_dict(json.loads(saved))
        async with policy:
            begun = json.dumps(policy.state_dict())
            for _ in range(8):
                await asyncio.sleep(0.01)
                await policy.step()
            return begun, json.dumps(policy.state_dict())

    begun, ended = simulate(main, "", ranks=4).results[0]
    assert begun != ended
    assert simulate(main, ended, ranks=4, seed=1).results[0][0] == ended


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pull": 0.0}, r"^pull must be a number above 0 and at most 1, got 0.0$"),
        ({"pull": 1.5}, r"^pull must be a number above 0 and at most 1, got 1.5$"),
        ({"donor_count": 0}, r"^donor_count must be an integer >= 1 or None, got 0$"),
        ({"average_every": 0}, r"^average_every must be an integer >= 1, got 0$"),
        ({"center": True}, r"no option 'center': only PopulationAveragingPolicy"),
        ({"momentum": 0.9}, r"no option 'momentum': here pull is the share of the mean"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    model = nn.Linear(2, 1)
    with pytest.raises((TypeError, ValueError), match=message):
        AsyncPopulationAveragingPolicy(model, sgd(model), **options)


@pytest.mark.parametrize("kind", [AsyncPopulationAveragingPolicy, OneSidedSelectiveAveragingPolicy])
@pytest.mark.parametrize("ranks", [3, pytest.param(34, marks=[pytest.mark.slow, pytest.mark.long])])
def test_restarted_ranks_join_without_a_wait(kind: Any, ranks: int) -> None:
    """The first rank, which admits the others, is killed too. Others read the new process's snapshots."""
    versions: dict[int, set[int]] = defaultdict(set)
    begun_at: dict[int, tuple[int, list[Any]]] = {}
    waited_s: list[float] = []

    async def main(world: ad.World) -> int:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        loop: Any = asyncio.get_running_loop()
        is_pulled = kind is AsyncPopulationAveragingPolicy
        options = {} if is_pulled else {"age_range": (5, 10), "donor_count": ranks - 1}

        def see(event: PolicyEvent) -> None:
            if isinstance(event, AverageApplied):
                for donor, version in zip(event.donors, event.versions, strict=True):
                    versions[donor].add(version // 1_000_000)

        policy = kind(model, torch.optim.Adam(model.parameters(), lr=0.01), average_every=5, on_event=see, **options)
        async with policy:
            if world.incarnation:
                moments = [state["step"].item() for state in policy.optimizer.state.values()]
                begun_at[world.rank] = policy.iteration, moments
            while policy.iteration < 100:
                model(torch.ones(3)).sum().backward()
                policy.optimizer.step()
                await asyncio.sleep(0.01)
                began_s = world.time() - loop.busy_s
                await policy.step(**({} if is_pulled else {"score": float((policy.iteration + 2 * world.rank) % 7)}))
                waited_s.append(world.time() - loop.busy_s - began_s)
        return policy.iteration

    faults = [Kill(1, 0.3), Restart(1, 0.35), Kill(0, 0.5), Restart(0, 0.55)]
    assert simulate(main, ranks=ranks, seed=2, faults=faults, until_s=10.0).results == (100,) * ranks
    assert max(waited_s) < 1e-4
    assert {rank: 30 < begun < 60 for rank, (begun, _) in begun_at.items()} == {0: True, 1: True}
    assert all(moments == [begun] * 2 for begun, moments in begun_at.values()), (
        "the optimizer's state must have been loaded with the weights"
    )
    assert versions[0] == versions[1] == {0, 1}, "snapshots of both processes must have been averaged"
