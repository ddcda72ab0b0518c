"""Tests checkpoints of DiLoCo's policies that fewer or more ranks load, whose numbers differ from the saved ones."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import asyncdist as ad
from asyncdist.protocols.async_diloco.arrivals import Arrival
from asyncdist.protocols.async_diloco.server import Server
from asyncdist.simulation import simulate
from protocols import AsyncDiLoCoPolicy, DiLoCoPolicy

SAVED_COUNT = 3
SECONDS = 2.0


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    for place, parameter in enumerate(model.parameters()):
        nn.init.constant_(parameter, 10.0 * (place + 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.0)


async def train(policy: Any, step_s: float, world: ad.World) -> None:
    end_s = world.time() + SECONDS
    while world.time() < end_s:
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter += 0.01
        await asyncio.sleep(step_s)
        await policy.step()


async def save(world: ad.World, folder: Path) -> None:
    """Save contributions in flight, of ranks with different numbers of contributions."""
    policy = AsyncDiLoCoPolicy(*made(), average_every=2)
    async with policy:
        await train(policy, 0.01 * 3**world.rank, world)
        metric = float(world.rank)
        await ad.save_population(folder, policy.model, policy.optimizer, policy=policy, metric=metric)


async def resume(world: ad.World, folder: Path) -> tuple[int, int, int, int]:
    """Return the saved rank, its contributions so far and at the end, and the number of applied anchors."""
    policy = AsyncDiLoCoPolicy(*made(), average_every=2)
    found = await ad.load_population(folder, policy.model, policy.optimizer, policy=policy)
    async with policy:
        begun = policy._store.sequence
        await train(policy, 0.01 * 3**found.source, world)
    return found.source, begun, policy._store.sequence, policy.statistics().average_count


@pytest.mark.parametrize("ranks", [2, 5])
def test_each_contribution_of_other_ranks_is_applied_once(ranks: int, tmp_path: Path) -> None:
    """Regression: contributions were dropped if the saved rank with this number had higher contribution numbers."""
    simulate(save, tmp_path, ranks=SAVED_COUNT, seed=1, strict=True).value()
    applied: dict[int, list[int]] = defaultdict(list)
    make = Server._make_version

    async def making(self: Server, arrivals: Sequence[Arrival]) -> None:
        for each in arrivals:
            if math.isfinite(each.norm):
                applied[each.rank].append(each.sequence)
        await make(self, arrivals)

    with mock.patch.object(Server, "_make_version", making):
        results = simulate(resume, tmp_path, ranks=ranks, seed=2, strict=True).results
    continued: set[int] = set()  # saved ranks that some rank continues
    for rank, (source, begun, end, _) in enumerate(results):
        first = applied[rank][0]
        assert applied[rank] == list(range(first, end + 1)) and first in (begun, begun + 1)
        assert end - begun >= 3
        assert first == begun + 1 or source not in continued, "a copy must not apply the contribution in flight"
        continued.add(source)


def test_a_rank_alone_applies_the_contribution_under_way(tmp_path: Path) -> None:
    """Regression: it waited for the answer of a leader, and never contributed again."""
    simulate(save, tmp_path, ranks=SAVED_COUNT, seed=1, strict=True).value()
    [(source, begun, end, applied_count)] = simulate(resume, tmp_path, ranks=1, seed=2, strict=True).results
    assert source == SAVED_COUNT - 1 and end - begun >= 3
    assert applied_count == end - begun + 1


def test_a_state_that_another_rank_has_saved_is_refused() -> None:
    states: dict[int, Any] = {}

    async def main(world: ad.World, source: int) -> None:
        policy = AsyncDiLoCoPolicy(*made(), average_every=2)
        if states:
            policy.load_state_dict(states[source])
        async with policy:
            await train(policy, 0.1, world)
            states[world.rank] = policy.state_dict()
            await ad.barrier()

    simulate(main, 0, ranks=2, seed=1, strict=True).value()
    with pytest.raises(ValueError, match=r"by the rank that saved it, 0, or by load_population\(\), got it on rank 1"):
        simulate(main, 0, ranks=2, seed=1).value()


async def train_replicas(
    world: ad.World, folder: Path, metrics: Sequence[float], loads: bool
) -> tuple[int | None, list[float]]:
    """Train replicas of two ranks under DDP, in which each rank has the anchor of one layer."""
    policy, source = DiLoCoPolicy(*made(), average_every=2, replica_size=2), None
    if loads:
        source = (await ad.load_population(folder, policy.model, policy.optimizer, policy=policy)).source
    async with policy:
        for _ in range(6):
            with torch.no_grad():
                for parameter in policy.model.parameters():
                    parameter += 0.01
            await policy.step()
        if not loads:
            metric = metrics[world.rank]
            await ad.save_population(folder, policy.model, policy.optimizer, policy=policy, metric=metric)
    return source, [round(parameter.mean().item(), 3) for parameter in policy.model.parameters()]


@pytest.mark.parametrize(
    ("metrics", "sources"),
    [([0.0, 3.0, 1.0, 2.5], (2, 3)), ([0.0, 3.0, 0.0, 2.5], (0, 1)), ([0.0, 1.0, 2.0, 3.0], (0, 1, 2, 3, 2, 3))],
)
def test_replicas_are_loaded_as_a_whole(metrics: list[float], sources: tuple[int, ...], tmp_path: Path) -> None:
    """Regression: a replica was made of the best ranks of several, so its layers got other replicas' anchors."""
    weights = simulate(train_replicas, tmp_path, metrics, False, ranks=4, seed=1, strict=True).results[0][1]
    found = simulate(train_replicas, tmp_path, metrics, True, ranks=len(sources), seed=1, strict=True).results
    assert tuple(source for source, _ in found) == sources
    for _, [first, second] in found:
        assert first - weights[0] == pytest.approx(second - weights[1], abs=2e-3) and first > weights[0]


def test_a_state_of_another_place_in_a_replica_is_refused() -> None:
    states: dict[int, Any] = {}

    async def main(world: ad.World) -> None:
        policy = DiLoCoPolicy(*made(), average_every=2, replica_size=2)
        if states:
            policy.load_state_dict(states[world.rank ^ 1])
        async with policy:
            await policy.step()
            states[world.rank] = policy.state_dict()
            await ad.barrier()

    simulate(main, ranks=4, seed=1, strict=True).value()
    with pytest.raises(
        ValueError, match=r"rank 0 of a replica with 2 ranks, got a state of rank 1 of a replica with 2"
    ):
        simulate(main, ranks=4, seed=1).value()
