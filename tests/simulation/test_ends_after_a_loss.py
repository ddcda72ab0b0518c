"""Tests the ends of the documented programs if a rank is killed at any time, and restarted or not."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.seeds import seeds

import asyncdist as ad
from asyncdist.simulation import Compute, Fault, Kill, Network, Restart, Uniform, simulate
from protocols import AsyncDiLoCoPolicy, DiLoCoPolicy
from simulation.diloco_scenarios import Layers

RANKS, STEPS, STEP_S = 4, 40, 0.01
KINDS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "local SGD": (DiLoCoPolicy, {"outer_optimizer": None}),
    "DiLoCo": (DiLoCoPolicy, {}),
    "overlap": (DiLoCoPolicy, {"overlap_steps": 4, "fragments": 2}),
    "eager": (DiLoCoPolicy, {"eager": True}),
    "asynchronous": (AsyncDiLoCoPolicy, {}),
}


async def train(world: ad.World, kind: str) -> tuple[int, list[float]]:
    """Train, and return the incarnation and the common weights at the end."""
    model = Layers(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    make, options = KINDS[kind]
    has_anchor = kind in ("DiLoCo", "overlap", "eager")
    async with make(model, optimizer, average_every=6, **options) as policy:
        while policy.iteration < STEPS:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_((world.rank + 1) * (policy.iteration + 1) / 64)
            await world.sleep(STEP_S * (1 + 0.1 * world.rank))
            await policy.step()
        if has_anchor:
            await policy.settle()
            async with policy.anchor_weights():
                return world.incarnation, flat(model)
    await ad.average_models(model, await ad.surviving_group())
    return world.incarnation, flat(model)


def flat(model: torch.nn.Module) -> list[float]:
    return torch.nn.utils.parameters_to_vector(model.parameters()).tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", seeds(30))
def test_a_job_ends_rightly_whenever_a_rank_is_killed(seed: int, kind: str) -> None:
    """Regression: the others waited 60 s for a restarted rank, which waited to be admitted, and then failed."""
    rng = random.Random(seed)
    last = STEPS * STEP_S * (1 + 0.1 * (RANKS - 1))
    rank, at_s = rng.randrange(RANKS), rng.uniform(0.1, 1.1) * last
    faults: list[Fault] = [Kill(rank, at_s=at_s)]
    if seed % 3:
        faults.append(Restart(rank, at_s=at_s + rng.uniform(0.01, 0.1)))
    network = Network(loss_detection_s=rng.choice([0.0, 0.01, Uniform(0, 0.05)]))
    report = simulate(
        train, kind, ranks=RANKS, seed=seed, faults=faults, network=network, compute=Compute(step_s=Uniform(0.0, 1e-4))
    )
    found = {each: result for each, result in enumerate(report.results) if isinstance(result, tuple)}
    assert found.keys() >= set(range(RANKS)) - {rank}, report.results
    is_common = kind in ("DiLoCo", "overlap", "eager")
    weights = [own for incarnation, own in found.values() if is_common or not incarnation]
    assert all(own == weights[0] for own in weights)
    assert report.virtual_time_s < last + 30.0, "ranks must not wait for a rank that restarts too late"
