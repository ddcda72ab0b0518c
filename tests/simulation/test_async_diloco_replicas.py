"""Tests asynchronous DiLoCo between replicas of several ranks against the oracle of as many single ranks."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.seeds import in_ci
from torch import Tensor, nn

import asyncdist as ad
from asyncdist.simulation import Kill, Network, Restart, simulate
from protocols import AsyncDiLoCoPolicy, StepInfo
from simulation import async_diloco_replica_scenarios as scenarios
from simulation.async_diloco_replica_scenarios import ReplicaPlan, check_replicas, run
from simulation.async_diloco_scenarios import Plan
from simulation.training_runs import weights_of


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.long) for first in range(10, 100, 10))])
def test_seeds(first: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(first, first + 10):
        try:
            seen += scenarios.seen_in(seed)[1]
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    assert seen["versions"] > 10 and seen["ranks that lost their replica"] and seen["new leaders"], seen


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "plan",
    [
        Plan(ranks=3, steps=(30,) * 3),
        Plan(ranks=2, steps=(30,) * 2, quorum=2, late="wait", uses_tokens=True),
        pytest.param(Plan(ranks=4, steps=(7, 30, 12, 21), dtype=torch.float32), marks=pytest.mark.long),
    ],
    ids=["plain", "wait by tokens", "different ends"],
)
def test_replicas_equal_the_oracle_of_single_ranks(plan: Plan, size: int) -> None:
    replicas = ReplicaPlan(plan=plan, size=size)
    _, seen = run(replicas)
    assert check_replicas(replicas, seen, 1e-12 if plan.uses_tokens else 0.0) >= 10
    donors = {donor for infos in seen.infos.values() for info in infos for donor in info.donors}
    assert donors == set(range(0, replicas.ranks, size)), "the donors must be the first ranks of the replicas"


@pytest.mark.parametrize("killed", in_ci([0, 1, 2, 3], 1, 2))
def test_a_lost_rank_ends_its_replica_and_no_other(killed: int) -> None:
    """Rank 1 belongs to the leader's replica, so the next replica leads after its loss, although rank 0 lives."""
    plan = Plan(ranks=3, steps=(30,) * 3, mirror_every=1, faults=(Kill(killed, at_s=0.155),))
    replicas = ReplicaPlan(plan=plan)
    report, seen = run(replicas)
    report.check_faults()
    assert check_replicas(replicas, seen) > 15
    assert set(seen.ended) == {killed ^ 1} and "RankLostError" in seen.ended[killed ^ 1]
    # the last versions are handed over to the next leader
    has_new_leader = any(0 < version < 15 for version in seen.record.outers)
    assert has_new_leader == (killed < 2)


class OfPlainShards(AsyncDiLoCoPolicy):
    """Accepts a plain module as one rank's part of a model."""

    def _holds_shards(self) -> bool:
        return True


class Part(nn.Module):
    """The part of the rank at ``place``. Parts have different sizes, and one part has no weight at all."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3 * place,), 8.0 * place))
        self.register_buffer("mean", torch.full((2,), 1.0))


def train_parts(values: list[float], size: int = 2, **options: Any) -> Any:
    """Return a main in which each rank moves its part by its value in each step."""

    async def main(world: ad.World) -> tuple[list[StepInfo], Part]:
        model = Part(world.rank % size)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
        given: dict[str, Any] = {"average_every": 2, "replica_size": size, "late": "wait", **options}
        infos = []
        async with OfPlainShards(model, optimizer, **given) as policy:
            for _ in range(2):
                with torch.no_grad():
                    model.weight += values[world.rank]
                    model.mean += values[world.rank]
                infos.append(await policy.step())
        return infos, model

    return main


@pytest.mark.parametrize("size", [2, 3])
def test_the_first_rank_contributes_the_shards_of_its_replica(size: int) -> None:
    options = {"quorum": 2, "outer_optimizer": lambda parameters: torch.optim.SGD(parameters, lr=1.0)}
    values = [float(rank) for rank in range(2 * size)]
    results = simulate(train_parts(values, size, **options), ranks=2 * size, seed=1, strict=True).results
    for rank, (infos, model) in enumerate(results):
        place = rank % size
        (info,) = [each for each in infos if each]
        assert info.donors == (0, size)
        assert bool(info.nbytes) == (place == 0), "only the first rank may receive the anchor"
        moved = 2 * (values[place] + values[size + place]) / 2
        assert model.mean.tolist() == [1.0 + moved] * 2
        assert model.weight.tolist() == [8.0 * place + moved] * (3 * place)


def test_a_part_that_is_not_finite_keeps_its_replica_from_giving() -> None:
    options = {"quorum": 3, "outer_optimizer": lambda parameters: torch.optim.SGD(parameters, lr=1.0)}
    results = simulate(train_parts([0.0, 1.0, 2.0, 3.0, 4.0, math.nan], **options), ranks=6, seed=1).results
    for rank, (infos, model) in enumerate(results):
        (info,) = [each for each in infos if each]
        assert info.donors == (0, 2)
        assert bool(info.recovered) == (rank in (4, 5)), "only both ranks of the third replica must recover"
        assert torch.isfinite(model.weight).all()
    assert results[5][1].weight.tolist() == [8.0 + 2 * (1.0 + 3.0) / 2] * 3


@pytest.mark.parametrize("lost", in_ci([0, 1], 0))
def test_restarted_shards_get_the_state_of_their_counterparts(lost: int) -> None:
    """Replica 0 leads. The momenta of the two parts differ, and only a part's own rank has them."""
    entries: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    made: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    async def main(world: ad.World) -> None:
        place = world.rank % 2
        model = Part(place + 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
        options: dict[str, Any] = {"average_every": 2, "replica_size": 2, "late": "wait", "quorum": 2}
        with contextlib.suppress(ad.RankLostError):
            async with OfPlainShards(model, optimizer, outer_optimizer=None, **options) as policy:
                if world.incarnation:
                    momentum = optimizer.state[model.weight]["momentum_buffer"].clone()
                    entries[world.rank, policy.iteration] = model.weight.detach().clone(), momentum
                while policy.iteration < 60:
                    model.weight.grad = torch.full_like(model.weight, float(policy.iteration + 10 * place))
                    optimizer.step()
                    await world.sleep(0.01)
                    await policy.step()
                    momentum = optimizer.state[model.weight]["momentum_buffer"].clone()
                    made[world.rank, policy.iteration] = model.weight.detach().clone(), momentum
                return
        await asyncio.sleep(10.0)

    first, second = 2 * lost, 2 * lost + 1
    faults = (Kill(second, 0.05), Kill(first, 0.051), Restart(first, 0.1), Restart(second, 0.13))
    simulate(main, ranks=4, faults=faults, until_s=100.0)
    assert {rank for rank, _ in entries} == {first, second}
    for (rank, iteration), (weight, momentum) in entries.items():
        expected = made[(rank + 2) % 4, iteration]
        assert iteration < 40 and torch.equal(weight, expected[0]) and torch.equal(momentum, expected[1]), rank
    for rank in range(4):
        assert torch.equal(made[rank, 60][0], made[(rank + 2) % 4, 60][0])


def test_both_ranks_of_a_restarted_replica_have_one_state() -> None:
    """Regression: the second rank got the state of the leader's weights with the common weights."""
    pytorch_optimizer = pytest.importorskip("pytorch_optimizer", reason="the test extra brings pytorch-optimizer")
    joined: dict[int, list[float]] = {}

    async def main(world: ad.World) -> None:
        torch.manual_seed(0)
        model = nn.Linear(4, 1, bias=False)
        optimizer: Any = pytorch_optimizer.Lookahead(torch.optim.SGD(model.parameters(), lr=0.05))
        draw = torch.Generator().manual_seed(world.rank // 2)
        async with AsyncDiLoCoPolicy(model, optimizer, average_every=8, replica_size=2, start_timeout_s=5.0) as policy:
            if world.incarnation:
                joined[world.rank] = optimizer.state[model.weight]["slow_params"].flatten().tolist()
            while policy.iteration < 60:
                inputs = torch.randn(8, 4, generator=draw)
                optimizer.zero_grad()
                (model(inputs) - inputs.sum(1, keepdim=True) * 3).square().mean().backward()
                optimizer.step()
                await policy.step()
                await world.sleep(0.001)

    faults = [Kill(2, at_s=0.04), Kill(3, at_s=0.0401), Restart(2, at_s=0.042), Restart(3, at_s=0.043)]
    simulate(main, ranks=4, seed=0, faults=faults, network=Network(loss_detection_s=1e-4), until_s=1e3)
    assert joined.keys() == {2, 3} and joined[2] == joined[3]


async def continued(world: ad.World, folder: Path, end: int) -> list[list[float]]:
    """Train to step ``end``, from a checkpoint if there is one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    options: dict[str, Any] = {"wire": "int8", "error_feedback": 0.9, "quorum": 2, "late": "wait"}
    policy = AsyncDiLoCoPolicy(model, optimizer, average_every=4, replica_size=2, **options)
    with contextlib.suppress(FileNotFoundError):
        await ad.load_population(folder, model, optimizer, policy=policy)
    async with policy:
        while policy.iteration < end:
            with torch.no_grad():
                for place, parameter in enumerate(model.parameters()):
                    parameter += (policy.iteration * 5 + place + world.rank // 2) % 7 / 16
            await policy.step()
        await ad.save_population(folder, model, optimizer, policy=policy)
    return [weights.tolist() for weights in weights_of(model)]


def test_a_saved_population_of_replicas_continues_to_the_bit(tmp_path: Path) -> None:
    whole = ad.run_local(continued, tmp_path / "whole", 20, ranks=4)
    ad.run_local(continued, tmp_path / "halves", 10, ranks=4)
    assert ad.run_local(continued, tmp_path / "halves", 20, ranks=4) == whole


def test_replicas_whose_ranks_train_apart_are_refused() -> None:
    async def main(world: ad.World) -> None:
        model = Part(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        async with AsyncDiLoCoPolicy(model, optimizer, average_every=2, replica_size=2) as policy:
            for _ in range(4):
                with torch.no_grad():
                    model.weight += world.rank
                await policy.step()

    with pytest.raises(ValueError, match=r"ranks 0, 1 differ.*DistributedDataParallel"):
        ad.run_local(main, ranks=2)


def test_a_quorum_counts_replicas() -> None:
    async def main(world: ad.World) -> None:
        model = Part(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        async with AsyncDiLoCoPolicy(model, optimizer, average_every=2, replica_size=2, quorum=3):
            assert world.size

    with pytest.raises(ValueError, match=r"quorum must be from 1 to the number of replicas \(2\), got 3"):
        ad.run_local(main, ranks=4)
