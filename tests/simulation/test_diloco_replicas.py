"""Tests DiLoCo between replicas of several ranks against plain DiLoCo of as many ranks as there are replicas."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts.population import sgd
from support.seeds import in_ci
from torch import nn

import asyncdist as ad
from asyncdist.simulation import Kill, SlowRank, simulate
from protocols import DiLoCoPolicy, SelectiveDiLoCoPolicy, StepInfo
from simulation import diloco_replica_scenarios as scenarios
from simulation.diloco_replica_scenarios import ReplicaPlan, check_replicas, run
from simulation.diloco_scenarios import Plan, exactly
from simulation.training_runs import Layers, weights_of


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.long) for first in range(8, 80, 8))])
def test_seeds(first: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(first, first + 8):
        seen += scenarios.seen_in(seed)[1]
    assert seen["rounds"] > 8 and seen["rounds without a lost replica"] and seen["ranks that lost their replica"], seen


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "plan",
    [
        Plan(outer="dyadic", ranks=2, warmup_steps=2),
        Plan(outer="dyadic", ranks=2, fragments=2, overlap_steps=2, mixing=0.5, every=4, uses_tokens=True),
        pytest.param(Plan(outer="none", ranks=4), marks=pytest.mark.long),
        Plan(outer="dyadic", ranks=4, selects=True, fragments=2, overlap_steps=1, mixing=0.5, every=4),
    ],
    ids=["plain", "streaming by tokens", "local SGD", "selective"],
)
def test_replicas_equal_single_ranks_to_the_bit(plan: Plan, size: int) -> None:
    replicas = ReplicaPlan(plan=plan, size=size)
    _, record, _ = run(replicas)
    rounds = check_replicas(replicas, record, exactly)
    assert len(rounds) >= 4 and (plan.selects or set(rounds.values()) == {tuple(range(plan.ranks))})
    assert not plan.selects or {len(donors) for donors in rounds.values()} >= {2, 3}, (
        "some rounds must have fewer donors"
    )
    single = run(ReplicaPlan(plan=plan, size=1))[1]
    for rank, infos in record.infos.items():
        for own, other in zip(infos, single.infos[rank // size], strict=True):
            assert own.donors == tuple(donor * size for donor in other.donors) and own.weights == other.weights
            for mine, theirs in ((own.outer_norm, other.outer_norm), (own.cosine, other.cosine)):
                assert mine == pytest.approx(theirs) if theirs is not None else mine is None


def test_all_ranks_of_a_replica_try_the_whole_difference() -> None:
    """Each rank has the anchor of a part only; the share of a trial step counts replicas instead of ranks.

    An error of the metric on rank 3 ends its replica, and rank 2 does not wait for it.
    """

    async def main(world: ad.World) -> tuple[list[list[float]], list[tuple[int, ...]], str]:
        model, seen, donors = Layers(), list[list[float]](), list[tuple[int, ...]]()

        def evaluate() -> float:
            seen.append([each.flatten()[0].item() for each in model.parameters()])
            if len(seen) == 4 and world.rank == 3:
                raise ZeroDivisionError
            return float(len(seen))

        options: dict[str, Any] = {"outer_optimizer": functools.partial(torch.optim.SGD, lr=1.0), "replica_size": 2}
        try:
            async with SelectiveDiLoCoPolicy(model, sgd(model), average_every=2, **options) as policy:
                for _ in range(4):
                    with torch.no_grad():
                        for parameter in model.parameters():
                            parameter.add_(1.0 + world.rank // 2)
                    info = await policy.step(score=evaluate)
                    donors += [info.donors] if info else []
        except (ZeroDivisionError, ad.RemoteError) as error:
            return seen, donors, type(error).__name__
        return seen, donors, ""

    first = [parameter.flatten()[0].item() for parameter in Layers().parameters()]
    results = simulate(main, ranks=4, seed=1).results
    for rank, (seen, donors, error) in enumerate(results):
        moved = (1.0 + rank // 2) * 2 / 2
        assert seen[:2] == [first, [each + moved for each in first]]
        assert donors == [(0, 2), (0,)][: 2 if rank < 2 else 1]
        assert error == ("", "", "RemoteError", "ZeroDivisionError")[rank]


def test_each_rank_sends_its_part_of_the_model() -> None:
    record = run(ReplicaPlan(plan=Plan(ranks=2), size=2))[1]
    whole = run(ReplicaPlan(plan=Plan(ranks=2), size=1))[1]
    parts = [[info.wire_nbytes for info in record.infos[rank] if info] for rank in (0, 1)]
    (nbytes,) = {info.wire_nbytes for info in whole.infos[0] if info}
    for one, two in zip(*parts, strict=True):
        assert one + two == nbytes and abs(one - two) <= nbytes // 4


def test_a_coded_mean_is_equal_on_all_ranks_of_a_replica() -> None:
    """With quantised differences and error feedback, all ranks of a replica must round in the same way."""
    plan = Plan(ranks=2, wire="int8", dtype=torch.float32, fragments=2, overlap_steps=1, mixing=0.25)
    record = run(ReplicaPlan(plan=plan, size=2))[1]
    exact = run(ReplicaPlan(plan=dataclasses.replace(plan, wire="float32"), size=2))[1]
    for first in (0, 2):
        for one, two, right in zip(*(record.weights[first + place] for place in (0, 1)), exact.weights[0], strict=True):
            assert all((mine == theirs).all() for mine, theirs in zip(one, two, strict=True))
            del right
    errors = [abs(a - b).max() for a, b in zip(record.weights[0][-1], exact.weights[0][-1], strict=True)]
    assert 0 < max(errors) < 0.05


@pytest.mark.parametrize("killed", in_ci([1, 2, 3], 1, 3))
def test_a_lost_rank_ends_its_replica_and_no_other(killed: int) -> None:
    """Rank 1 belongs to the leader's replica, so the next replica leads from then on."""
    plan = Plan(ranks=3, every=2, fragments=2, overlap_steps=1, faults=(Kill(killed, at_s=0.055),), steps=(14,) * 3)
    replicas = ReplicaPlan(plan=plan, size=2)
    report, record, ended = run(replicas)
    report.check_faults()
    rounds = check_replicas(replicas, record)
    left = tuple(each for each in range(3) if each != killed // 2)
    assert rounds[1] == (0, 1, 2) and rounds[max(rounds)] == left and max(rounds) >= 12
    assert set(ended) == {killed ^ 1} and "RankLostError" in ended[killed ^ 1]


class OfPlainShards(DiLoCoPolicy):
    """Accepts a plain module as one rank's part of a model."""

    def _holds_shards(self) -> bool:
        return True


class Part(nn.Module):
    """The part of the rank at ``place``. Parts have different sizes, and one part has no weight at all."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3 * place,), 8.0 * place))
        self.register_buffer("mean", torch.full((2,), 1.0))


def train_parts(values: list[float], steps: int = 6, **options: Any) -> Any:
    """Return a main in which each rank moves its part by its value in each step, on the first two of each two steps."""

    async def main(world: ad.World) -> tuple[list[StepInfo], Part]:
        model = Part(world.rank % 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
        given = {"average_every": 2, "replica_size": 2, "outer_optimizer": None, **options}
        infos = []
        async with OfPlainShards(model, optimizer, **given) as policy:
            for step in range(steps):
                with torch.no_grad():
                    model.weight += values[world.rank] if step < 2 else 1.0
                    model.mean += values[world.rank] if step < 2 else 0.0
                infos.append(await policy.step())
        return infos, model

    return main


def test_all_replicas_have_the_last_mean_of_a_leader_that_left() -> None:
    """Regression: another rank of its replica left first, and the others decided its last round again without it."""
    scenarios.scenario(520162)


def test_shards_of_different_sizes_average_with_counterparts() -> None:
    results = simulate(train_parts([0.0, 1.0, 2.0, 3.0], steps=2), ranks=4, seed=1, strict=True).results
    for rank, (infos, model) in enumerate(results):
        (info,) = [each for each in infos if each]
        assert info.donors == (0, 2)
        assert model.mean.tolist() == [1.0 + 2 * (1.0 + rank % 2)] * 2
        assert model.weight.tolist() == [8.0 + 2 * 2.0] * (3 * (rank % 2))


@pytest.mark.parametrize("outer", [None, torch.optim.SGD], ids=["weights", "differences"])
def test_a_part_that_is_not_finite_keeps_its_replica_from_giving(outer: Any) -> None:
    """The whole replica takes the others' mean, and no rank of it keeps a part of its own weights."""
    values = [0.0, 1.0, 2.0, 3.0, 4.0, math.nan]
    factory = None if outer is None else lambda parameters: outer(parameters, lr=1.0)
    main = train_parts(values, steps=2, outer_optimizer=factory, mixing=0.0 if outer is None else 0.5)
    results = simulate(main, ranks=6, seed=1, strict=True).results
    for rank, (infos, model) in enumerate(results):
        (info,) = [each for each in infos if each]
        assert info.donors == (0, 2)
        assert bool(info.recovered) == (rank in (4, 5)), "only both ranks of the third replica must recover"
        assert torch.isfinite(model.weight).all()
    assert "'weight'" in results[4][0][1].recovered and results[4][0][1].recovered == results[5][0][1].recovered
    expected = 8.0 + 2 * (1.0 + 3.0) / 2
    assert results[5][1].weight.tolist() == [expected] * 3


def test_a_late_mean_is_applied_in_one_step_by_the_whole_replica() -> None:
    """The ranks of a fast replica do not wait for a slow one, and agree on the step that applies the mean."""

    async def main(world: ad.World) -> list[tuple[int, int]]:
        model = Part(1)
        applied = []
        async with DiLoCoPolicy(
            model, sgd(model), average_every=2, replica_size=2, late="skip", drain_timeout_s=1.0
        ) as policy:
            for step in range(60):
                await asyncio.sleep(0.001 * (10 if world.rank >= 2 else 1))
                info = await policy.step()
                if info:
                    applied.append((step, info.round))
        return applied

    results = simulate(main, ranks=4, seed=3, faults=[SlowRank(3, 0.0, 3.0)]).results
    assert results[0] == results[1] and results[2] == results[3]
    assert len(results[0]) >= 2 and results[0] != results[2]


async def continued(world: ad.World, folder: Path, end: int) -> list[list[float]]:
    """Train to step ``end``, from a checkpoint if there is one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    policy = DiLoCoPolicy(
        model, optimizer, average_every=4, overlap_steps=3, fragments=1, replica_size=2, wire="int8", error_feedback=0.9
    )
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
    """The state contains a mean in flight, and each rank's residuals."""
    whole = ad.run_local(continued, tmp_path / "whole", 20, ranks=4)
    ad.run_local(continued, tmp_path / "halves", 10, ranks=4)
    assert ad.run_local(continued, tmp_path / "halves", 20, ranks=4) == whole
