"""Tests the single warning about ranks that begin with different weights, whose mean is usually meaningless."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_optimizer import Lookahead
from support.seeds import in_ci
from torch import nn

import asyncdist as ad
from asyncdist.simulation import Fault, Join, Network, simulate
from protocols import (
    AsyncSelectiveAveragingPolicy,
    AverageAllPolicy,
    OneSidedSelectiveAveragingPolicy,
    ReplicaAveragingPolicy,
    coordinate,
)

UNEQUAL: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "all": (AverageAllPolicy, 2, {}),
    "selective": (AsyncSelectiveAveragingPolicy, 3, {}),
    "weighted": (AsyncSelectiveAveragingPolicy, 3, {"averaging_strategy": "weighted_mean"}),
    "momentum": (AsyncSelectiveAveragingPolicy, 2, {"momentum": 0.5}),
    "islands": (AsyncSelectiveAveragingPolicy, 6, {"islands": 2}),
    "one-sided": (OneSidedSelectiveAveragingPolicy, 4, {}),
    "replicas": (ReplicaAveragingPolicy, 6, {"replica_size": 2}),
    "large": (AsyncSelectiveAveragingPolicy, 40, {}),
}
WITHOUT_MEAN: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "best": (AsyncSelectiveAveragingPolicy, 3, {"averaging_strategy": "best_only"}),
    "fresh": (
        AsyncSelectiveAveragingPolicy,
        3,
        {"averaging_strategy": "reset_weights", "model_builder": lambda: made(0)[0]},
    ),
    "one donor": (AsyncSelectiveAveragingPolicy, 2, {}),
    "none replaced": (AsyncSelectiveAveragingPolicy, 3, {"replacement_ratio": 0.0}),
    "one-sided best": (OneSidedSelectiveAveragingPolicy, 4, {"averaging_strategy": "best_only"}),
    "one-sided donor": (OneSidedSelectiveAveragingPolicy, 4, {"donor_count": 1}),
}


def warnings_of(
    main: Callable[[ad.World], Any], ranks: int, caplog: pytest.LogCaptureFixture, faults: Sequence[Fault] = ()
) -> list[str]:
    """Return the warnings about first weights in a simulated job whose ranks all end normally."""
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        report = simulate(main, ranks=ranks, seed=1, faults=faults, network=Network(loss_detection_s=1e-4), until_s=1e4)
    assert not [result for result in report.results if isinstance(result, BaseException)], report.results
    return [text for record in caplog.records if "begin with different weights" in (text := record.getMessage())]


def made(seed: int, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, **options)


def begins(kind: Any, options: dict[str, Any], seed_of: Callable[[int], int]) -> Callable[[ad.World], Any]:
    async def main(world: ad.World) -> None:
        async with kind(*made(seed_of(world.rank)), average_every=5, **options) as policy:
            for _ in range(10):
                await policy.step(score=1.0)

    return main


@pytest.mark.parametrize("name", UNEQUAL)
def test_one_rank_warns_of_unequal_first_weights(name: str, caplog: pytest.LogCaptureFixture) -> None:
    kind, ranks, options = UNEQUAL[name]
    assert len(warnings_of(begins(kind, options, lambda rank: rank), ranks, caplog)) == 1
    assert not warnings_of(begins(kind, options, lambda _: 7), ranks, caplog)


@pytest.mark.parametrize("name", WITHOUT_MEAN)
def test_unequal_weights_are_no_matter_without_a_mean(name: str, caplog: pytest.LogCaptureFixture) -> None:
    kind, ranks, options = WITHOUT_MEAN[name]
    assert not warnings_of(begins(kind, options, lambda rank: rank), ranks, caplog)


@pytest.mark.parametrize("odd", in_ci([0, 20, 39], 39))
def test_one_unequal_rank_of_many_is_found(odd: int, caplog: pytest.LogCaptureFixture) -> None:
    main = begins(AsyncSelectiveAveragingPolicy, {}, lambda rank: int(rank == odd))
    assert len(warnings_of(main, 40, caplog)) == 1


def test_ranks_of_a_replica_may_differ(caplog: pytest.LogCaptureFixture) -> None:
    """The replica's first rank gives them its weights at the start."""
    main = begins(ReplicaAveragingPolicy, {"replica_size": 2}, lambda rank: rank % 2)
    assert not warnings_of(main, 6, caplog)


def test_a_member_warns_beside_a_reserved_coordinator(caplog: pytest.LogCaptureFixture) -> None:
    async def main(world: ad.World) -> None:
        if world.rank == 3:
            await coordinate([0, 1, 2])
            return
        group = await ad.new_group([0, 1, 2], world=world)
        options = {"group": group, "coordinator": 3}
        await begins(AsyncSelectiveAveragingPolicy, options, lambda rank: rank)(world)

    assert len(warnings_of(main, 4, caplog)) == 1


def test_a_training_that_continues_is_not_warned_of(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """The training resumes with its policy, or with an optimizer whose state shows that it has made steps."""

    async def first(world: ad.World) -> None:
        model, optimizer = made(world.rank)
        async with AsyncSelectiveAveragingPolicy(model, optimizer, average_every=5) as policy:
            for _ in range(3):
                await policy.step(score=1.0)
            await ad.save_population(tmp_path, model, optimizer, policy=policy)

    async def resumed(world: ad.World) -> None:
        model, optimizer = made(0)
        policy = AsyncSelectiveAveragingPolicy(model, optimizer, average_every=5)
        await ad.load_population(tmp_path, model, optimizer, policy=policy)
        async with policy:
            await policy.step(score=1.0)

    async def resumed_without_policy(world: ad.World) -> None:
        model, optimizer = made(0)
        await ad.load_population(tmp_path, model, optimizer)
        async with AsyncSelectiveAveragingPolicy(model, optimizer, average_every=5) as policy:
            await policy.step(score=1.0)

    async def trained_before(world: ad.World) -> None:
        model, optimizer = made(world.rank, momentum=0.9)
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()
        async with AsyncSelectiveAveragingPolicy(model, optimizer, average_every=5) as policy:
            await policy.step(score=1.0)

    assert len(warnings_of(first, 3, caplog)) == 1
    assert not warnings_of(resumed, 3, caplog)
    assert not warnings_of(resumed_without_policy, 3, caplog)
    assert not warnings_of(trained_before, 3, caplog)


def test_a_model_of_an_earlier_policy_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """Regression: a second fit with a new optimizer caused the warning."""

    async def main(world: ad.World) -> None:
        model, optimizer = made(0)
        for seed in (world.rank, 7):
            async with AverageAllPolicy(model, optimizer, average_every=100) as policy:
                await policy.step()
                model.load_state_dict(made(seed)[0].state_dict())  # replaces the training
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    assert not warnings_of(main, 3, caplog)


@pytest.mark.parametrize("kind", ["adagrad", "lookahead"])
@pytest.mark.parametrize("has_stepped", [False, True])
def test_a_state_that_a_constructor_makes_is_no_training(
    kind: str, has_stepped: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: Adagrad's constructor creates state, so different first weights never caused a warning."""

    async def main(world: ad.World) -> None:
        torch.manual_seed(world.rank)
        model = nn.Linear(2, 1)
        optimizer: Any = torch.optim.Adagrad(model.parameters(), lr=0.1)
        if kind == "lookahead":
            optimizer = Lookahead(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        if has_stepped:
            model(torch.ones(4, 2)).sum().backward()
            optimizer.step()
        async with AsyncSelectiveAveragingPolicy(model, optimizer, average_every=5) as policy:
            await policy.step(score=1.0)

    assert len(warnings_of(main, 3, caplog)) == (not has_stepped)


@pytest.mark.parametrize(
    "seed_of",
    [
        lambda rank: rank // 2,
        lambda rank: int(rank == 3),
        pytest.param(lambda rank: int(rank > 3), marks=pytest.mark.long),
    ],
    ids=["each", "inside", "last"],
)
def test_islands_that_begin_with_other_weights_are_told_once(
    seed_of: Callable[[int], int], caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: only the ranks of the first island were compared."""

    async def main(world: ad.World) -> None:
        options: dict[str, Any] = {"islands": 3, "migrate_every": 1}
        async with AsyncSelectiveAveragingPolicy(*made(seed_of(world.rank)), average_every=5, **options) as policy:
            for step in range(200):
                await policy.step(score=float(step + world.rank))

    assert len(warnings_of(main, 6, caplog)) == 1


def test_a_rank_that_joins_late_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    async def main(world: ad.World) -> None:
        async with AsyncSelectiveAveragingPolicy(
            *made(world.incarnation), average_every=3, grace_s=0.001, start_timeout_s=5.0
        ) as policy:
            while policy.iteration < 150:
                await policy.step(score=1.0)

    assert not warnings_of(main, 4, caplog, [Join(3, at_s=0.02)])


def test_the_first_rank_that_is_there_warns(caplog: pytest.LogCaptureFixture) -> None:
    async def main(world: ad.World) -> None:
        async with AsyncSelectiveAveragingPolicy(*made(world.rank), average_every=3, start_timeout_s=5.0) as policy:
            while policy.iteration < 150:
                await policy.step(score=1.0)

    assert len(warnings_of(main, 4, caplog, [Join(0, at_s=0.02)])) == 1
