"""Tests replicas whose ranks each have a part of the model: an average is applied to all parts, or to none."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections import Counter
from typing import Any

import pytest
import torch

import asyncdist as ad
from asyncdist.simulation import Compute, Fault, Kill, Restart, simulate
from protocols import ReplicaAveragingPolicy, StepInfo
from protocols.metrics import NOT_MEASURED
from simulation import sharded_replica_scenarios as scenarios
from simulation.sharded_replica_scenarios import OfPlainShards, Part

SIZES = (4, 7)
OPTIONS: dict[str, Any] = {"replica_size": 2, "swap_every": 2, "average_every": 4, "replacement_ratio": 0.5}


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.long) for first in range(10, 60, 10))])
def test_seeds(first: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(first, first + 10):
        seen += scenarios.run(seed)[1].seen
    assert seen["applied"] > 30 and seen["calm populations"] > 1, seen


def train(parts: list[Part], steps: int = 40, **options: Any) -> Any:
    """Return a main whose ranks have ``parts``; the first replica is the worst."""

    async def main(world: ad.World) -> list[StepInfo]:
        model = parts[world.rank]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        infos = []
        async with OfPlainShards(model, optimizer, **{**OPTIONS, **options}) as policy:
            for _ in range(steps):
                info = await policy.step(float(world.rank))
                if info or info.abandoned:
                    infos.append(info)
        statistics = policy.statistics()
        assert statistics.replacement_count == sum(map(bool, infos)) and statistics.iteration == steps
        return infos

    return main


def parts_of(values: list[float]) -> list[Part]:
    parts = [Part(rank % 2, SIZES) for rank in range(len(values))]
    for part, value in zip(parts, values, strict=True):
        part.fill(value)
    return parts


def test_a_part_that_is_not_finite_keeps_its_replica_from_giving() -> None:
    """No other rank of the replica donates either."""
    parts = parts_of([1.0, 2.0, 3.0, 4.0, 5.0, float("nan")])
    results = simulate(train(parts, replacement_ratio=0.3), ranks=6, seed=3, strict=True).results
    donors = {info.donors for infos in results for info in infos if info}
    assert donors == {(2,)}, "the second replica must be the donor, as the third and better one is not finite"


def test_what_is_not_finite_on_one_rank_is_taken_whole_on_all() -> None:
    parts = parts_of([float("nan"), 2.0, 3.0, 4.0])
    results = simulate(train(parts, momentum=0.5), ranks=4, seed=3, strict=True).results
    recovered = [[info.recovered for info in infos if info] for infos in results]
    assert recovered[0] == recovered[1] and "'weight'" in recovered[0][0]
    assert parts[1].weight.tolist() == [4.0] * 7, (
        "the part must not keep its old weights, as the other part has lost them"
    )


def test_one_replica_alone_averages_nothing() -> None:
    results = simulate(train(parts_of([1.0, 2.0])), ranks=2, seed=1, strict=True).results
    assert list(results) == [[], []]


@pytest.mark.slow
@pytest.mark.long
def test_a_lost_rank_ends_its_replica_and_no_other() -> None:
    """The others average with each other; all ranks of the replica that was receiving from it abandon the round."""
    steps = 400
    parts = parts_of([float(rank) for rank in range(6)])
    train_all = train(parts, steps)

    async def main(world: ad.World) -> Any:
        try:
            return await train_all(world)
        except (ad.RankLostError, ad.RemoteError) as error:
            return repr(error)

    for seed in range(3):
        report = simulate(main, ranks=6, seed=seed, faults=[Kill(5, at_turn=900)])
        report.check_faults()
        results = report.results
        assert "RankLostError" in results[4], "the rank must fail, as the leader of its replica is lost"
        assert all(isinstance(each, list) for each in results[:4])


def test_a_restarted_replica_of_shards_is_refused() -> None:
    refusals = []

    async def main(world: ad.World) -> None:
        part = parts_of([1.0, 2.0])[world.rank % 2]
        policy = OfPlainShards(part, torch.optim.SGD(part.parameters(), lr=0.0), **OPTIONS)
        if world.incarnation:
            with pytest.raises(ad.LocalProtocolError, match="sharded model") as caught:
                await policy.__aenter__()
            refusals.append(str(caught.value))
            return
        with contextlib.suppress(ad.RankLostError):
            async with policy:
                for _ in range(40):
                    await world.sleep(0.01)
                    await policy.step(float(world.rank))
                return
        await world.sleep(100.0)

    faults: list[Fault] = [Kill(3, 0.05), Kill(2, 0.051), Restart(2, 0.1), Restart(3, 0.11)]
    simulate(main, ranks=4, faults=faults, until_s=1000.0)
    assert len(refusals) == 2 and "the other replicas continue" in refusals[0]


def test_fresh_weights_are_refused_and_ranks_out_of_order_too() -> None:
    (part,) = parts_of([1.0])
    optimizer = torch.optim.SGD(part.parameters(), lr=0.0)
    with pytest.raises(
        ValueError, match=r"averaging_strategy must be 'mean', .* if replicas are sharded, got 'reset_weights'"
    ):
        OfPlainShards(part, optimizer, averaging_strategy="reset_weights", model_builder=lambda: part, **OPTIONS)

    async def main(world: ad.World) -> None:
        group = await ad.new_group([0, 3, 2, 1])
        model = Part(group.index % 2, SIZES)
        policy = OfPlainShards(model, torch.optim.SGD(model.parameters(), lr=0.0), group=group, **OPTIONS)
        async with policy:
            pass

    with pytest.raises(ValueError, match=r"group must be ranks in ascending order .*, got \[0, 3, 2, 1\]"):
        ad.run_local(main, ranks=4)


def test_parts_of_different_sizes_are_refused_by_name() -> None:
    async def main(world: ad.World) -> None:
        model = Part(world.rank % 2, SIZES if world.rank < 2 else (4, 8))
        async with OfPlainShards(model, torch.optim.SGD(model.parameters(), lr=0.0), **OPTIONS):
            pass

    with pytest.raises(ad.DisagreementError, match=r"'weight' .*\(8,\) .*\(7,\)"):
        ad.run_local(main, ranks=4)


@pytest.mark.parametrize("kind", [OfPlainShards, ReplicaAveragingPolicy])
def test_a_due_step_without_a_measurement_reports_nothing(kind: type[ReplicaAveragingPolicy]) -> None:
    """Regression: sharded replicas reported NaN then, so the best replica ranked worst until its next measurement."""
    parts = parts_of([1.0, 1.0, 2.0, 2.0, 3.0, 3.0])

    async def main(world: ad.World) -> tuple[int, set[tuple[int, ...]]]:
        replica, due = world.rank // 2, itertools.count()
        model = parts[world.rank] if kind is OfPlainShards else Part(0, SIZES)
        donors = set()
        async with kind(model, torch.optim.SGD(model.parameters(), lr=0.0), **OPTIONS) as policy:
            for _ in range(60):
                donors.add((await policy.step(lambda: replica if next(due) % 3 == replica else NOT_MEASURED)).donors)
        return policy.statistics().report_count, donors

    results = simulate(main, ranks=6, seed=3, strict=True).results
    assert {count for count, _ in results[::2]} == {5}
    assert all((0,) not in donors for _, donors in results), "the best replica replaced its weights by the worst one's"


@pytest.mark.parametrize(("seed", "every", "ratio"), [(13, 4, 0.3), (25, 2, 0.6)])
def test_a_leader_takes_over_while_it_acts(seed: int, every: int, ratio: float) -> None:
    """Regression: followers repeated the round's end, which the takeover caused, before the leader's action."""

    async def main(world: ad.World) -> int:
        torch.manual_seed(world.rank)
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        draw = random.Random(f"{seed} {world.rank // 2}")
        options: dict[str, Any] = {"average_every": every, "replacement_ratio": ratio, "quorum": 0.5}
        policy = OfPlainShards(model, optimizer, replica_size=2, swap_every=2, start_timeout_s=1e3, **options)
        async with policy:
            for _ in range(150 if world.rank > 1 else 20):
                await policy.step(draw.random())
        return policy.statistics().epoch

    slow = Compute(step_s=0.1, factors={0: 10.0})
    report = simulate(main, ranks=6, seed=seed, until_s=1e4, compute=slow)
    assert max(report.results[2:]) > 0, "no leader took over"


def test_a_leader_that_left_in_a_cancelled_step_is_told_so() -> None:
    """The slow rank's swap ends later, in the background, and the leader then has no policy to report to."""

    async def main(world: ad.World) -> str:
        model = Part(world.rank % 2, SIZES)
        model.fill(float(world.rank))
        try:
            async with OfPlainShards(model, torch.optim.SGD(model.parameters(), lr=0.0), **OPTIONS) as policy:
                for number in range(40):
                    await world.sleep(5.0 if (world.rank, number) == (1, 11) else 0.01)
                    async with asyncio.timeout(1.0 if world.rank == 0 else None):
                        await policy.step(float(world.rank))
        except (TimeoutError, ad.RemoteError) as error:
            return str(error)
        return "trained"

    results = simulate(main, ranks=4, seed=1, until_s=300.0).results
    assert results[2:] == ("trained", "trained")
    assert results[1].endswith("ClosedError: this rank has left the policy"), results
