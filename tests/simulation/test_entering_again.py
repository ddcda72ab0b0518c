"""Tests that a policy with a loaded state can be entered again after its start has failed."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import asyncdist as ad
from asyncdist.simulation import simulate
from protocols import (
    AsyncDiLoCoPolicy,
    DiLoCoPolicy,
    GossipPolicy,
    PopulationAveragingPolicy,
    SparseAveragingPolicy,
)

EVERY = 4


def made(kind: type[Any], options: dict[str, Any], every: int = EVERY) -> tuple[nn.Linear, Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
    return model, kind(model, optimizer, average_every=every, start_timeout_s=1.0, **options)


async def train(replica: int, model: nn.Linear, policy: Any) -> None:
    for _ in range(2 * EVERY):
        with torch.no_grad():
            model.weight.mul_(0.9).add_(0.1 * (replica + 1))
        await policy.step()


async def save(world: ad.World, kind: type[Any], options: dict[str, Any]) -> tuple[Any, ...]:
    model, policy = made(kind, options)
    async with policy:
        await train(world.rank // options.get("replica_size", 1), model, policy)
        await policy.settle()
        return copy.deepcopy((model.state_dict(), policy.state_dict()))


async def resume(
    world: ad.World, kind: type[Any], options: dict[str, Any], saved: Sequence[Any], failure: str
) -> tuple[Any, ...]:
    model, policy = made(kind, options)
    weights, state = saved[world.rank]
    model.load_state_dict(weights)
    policy.load_state_dict(state)
    if failure == "late":  # each rank waits alone until its time has passed
        await world.sleep(3.0 * world.rank)
        with pytest.raises(ad.StartTimeoutError):
            await policy.__aenter__()
    if failure == "differs":
        first = made(kind, options, EVERY + 1)[1] if world.rank == 1 else policy
        with pytest.raises(ad.DisagreementError):
            await first.__aenter__()
    again = policy.state_dict()
    assert again.keys() == state.keys() and again["iteration"] == state["iteration"]
    await world.sleep(20.0 - world.time())
    async with policy:
        await train(world.rank // options.get("replica_size", 1), model, policy)
    counts = policy.statistics()
    return policy.iteration, counts.average_count, getattr(counts, "version", None), model.weight.tolist()


CASES: dict[str, tuple[type[Any], dict[str, Any], int]] = {
    "DiLoCo": (DiLoCoPolicy, {"late": "wait"}, 2),
    "skip": (DiLoCoPolicy, {"late": "skip", "fragments": 2, "fragment_pattern": "balanced"}, 2),
    "eager": (DiLoCoPolicy, {"eager": True}, 2),
    "PAPA": (PopulationAveragingPolicy, {"pull": 0.5}, 2),
    "EASGD": (PopulationAveragingPolicy, {"pull": 0.3, "center": True}, 2),
    "gossip": (GossipPolicy, {}, 2),
    "SPARTA": (SparseAveragingPolicy, {"fraction": 0.5}, 2),
    "async": (AsyncDiLoCoPolicy, {"late": "wait", "quorum": 2}, 2),
    "async replicas": (AsyncDiLoCoPolicy, {"late": "wait", "quorum": 2, "replica_size": 2}, 4),
}


@functools.cache
def saved_by(case: str) -> Sequence[Any]:
    kind, options, ranks = CASES[case]
    return simulate(save, kind, options, ranks=ranks, strict=True).results


@functools.cache
def resumed(case: str, failure: str) -> Sequence[Any]:
    kind, options, ranks = CASES[case]
    facts = kind, options, saved_by(case), failure
    return simulate(resume, *facts, ranks=ranks, strict=True, until_s=100.0).results


@pytest.mark.parametrize("failure", ["late", "differs"])
@pytest.mark.parametrize("case", CASES)
def test_a_loaded_state_outlives_a_failed_start(case: str, failure: str) -> None:
    """Regression: the failed start took the loaded state, so the next one began at round 1 and waited forever."""
    undisturbed = resumed(case, "")
    assert {each[0] for each in undisturbed} == {4 * EVERY}
    assert resumed(case, failure) == undisturbed
