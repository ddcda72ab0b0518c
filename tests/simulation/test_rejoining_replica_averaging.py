"""Tests selective averaging of replicas that are lost, restarted, and join the running policy again."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import asyncdist as ad
from asyncdist.simulation import Fault, Kill, Restart, SlowLink, SlowRank, Stall, simulate
from protocols import ReplicaAveragingPolicy
from simulation.diloco_rejoining_scenarios import LIMIT_S, End, Plan, ended, losses, weights_of

STEPS = 60


@dataclass
class Life(End):
    """Observations of one process of a rank."""

    has_joined_momenta: bool = False
    states: dict[int, list[Tensor]] = field(default_factory=dict)  # by iteration: weights and momenta after it
    adopted: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by iteration: donors


Lives = dict[tuple[int, int], Life]


async def train(world: ad.World, plan: Plan, lives: Lives) -> None:
    """Train on one rank, and record each step."""
    life = lives.setdefault((world.rank, world.incarnation), Life())
    await ended(world, plan, life, _train(world, plan, life))


async def _train(world: ad.World, plan: Plan, life: Life) -> None:
    replica = world.rank // plan.size
    model = torch.nn.Linear(3, 3, dtype=torch.float64)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, float(replica))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)
    async with ReplicaAveragingPolicy(model, optimizer, replica_size=plan.size, **plan.options) as policy:
        life.joined_at = policy.iteration
        life.has_joined_momenta = len(optimizer.state) == 2
        while policy.iteration < STEPS:
            step = policy.iteration
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, -(replica + 1) * (step % 5 + 1) / 64)
            optimizer.step()
            await asyncio.sleep(0.01 * (1 + replica * 0.2))
            info = await policy.step(score=float(replica + step % 3))
            life.states[step] = [*weights_of(model), *(each["momentum_buffer"] for each in optimizer.state.values())]
            life.states[step] = [each.clone() for each in life.states[step]]
            if info:
                life.adopted[step] = info.donors
    life.has_ended = True


def draw_plan(seed: int) -> Plan:
    """Return a run with drawn options and faults, in which one replica is never lost."""
    rng = random.Random(f"replica averaging rejoining {seed}")
    every = rng.choice((2, 4, 6))
    options: dict[str, Any] = {
        "average_every": every,
        "swap_every": rng.choice([each for each in (1, 2, 3) if every % each == 0]),
        "replacement_ratio": rng.choice((0.3, 0.5)),
        "averaging_strategy": rng.choice(("mean", "weighted_mean", "best_only")),
        "drain_timeout_s": 60.0,
    }
    plan = Plan(replicas=rng.choice((2, 3)), size=rng.choice((2, 2, 3)), steps=STEPS, options=options)
    faults: list[Fault] = []
    safe = rng.randrange(plan.replicas)
    for replica in range(plan.replicas):
        at_s = 0.06
        for _ in range(0 if replica == safe else rng.choice((1, 1, 2))):
            lost, at_s = losses(rng, plan, replica, at_s + rng.uniform(0.0, 0.12), gaps=(0.0, 0.001))
            faults += lost
    for _ in range(rng.choice((0, 1, 2))):
        rank, other = rng.sample(range(plan.ranks), 2)
        slow = SlowLink(rank, other, 0.0, rng.choice((10.0, 100.0)))
        stall = Stall(rank, rng.uniform(0.0, 0.3), rng.choice((0.02, 0.2)))
        faults.append(rng.choice((slow, stall, SlowRank(rank, rng.uniform(0.0, 0.2), 10.0))))
    return Plan(replicas=plan.replicas, size=plan.size, steps=STEPS, options=options, faults=tuple(faults))


def run(seed: int) -> Counter[str]:
    """Simulate one run, check that the ranks of each replica do the same, and return the numbers of observations."""
    plan, lives, seen = draw_plan(seed), dict[tuple[int, int], Life](), Counter[str]()
    simulate(train, plan, lives, ranks=plan.ranks, seed=seed, faults=plan.faults, until_s=LIMIT_S)
    for (rank, incarnation), life in lives.items():
        first = rank // plan.size * plan.size
        for mate in range(first, first + plan.size):
            other = lives.get((mate, incarnation), Life())
            for step in life.states.keys() & other.states.keys():
                assert all(map(torch.equal, life.states[step], other.states[step])), (seed, rank, mate, step)
        has_joined = incarnation > 0 and life.joined_at is not None
        assert not (has_joined and life.joined_at) or life.has_joined_momenta, (seed, rank)
        seen["joined"] += has_joined
        seen["adopted after joining"] += has_joined and bool(life.adopted)
        seen["donors after joining"] += has_joined and any(
            first in donors for other in lives.values() for donors in other.adopted.values()
        )
    for first in range(0, plan.ranks, plan.size):
        last = max(incarnation for rank, incarnation in lives if rank // plan.size * plan.size == first)
        ends = [lives.get((mate, last), Life()) for mate in range(first, first + plan.size)]
        assert len({(life.joined_at, life.has_ended, life.is_late) for life in ends}) == 1, (seed, first, ends)
        assert all(life.has_ended or life.is_late for life in ends), (seed, first)
        seen["late"] += ends[0].is_late
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.long) for first in range(8, 88, 8))])
def test_seeds(first: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(first, first + 8):
        seen += run(seed)
    assert seen["joined"] > 8 and seen["adopted after joining"] > 4, seen


def test_a_replica_joins_at_the_iteration_of_a_resumed_job() -> None:
    """Regression: if the job was resumed with another ``swap_every``, the replica joined thousands of steps late."""

    def made(swap_every: int) -> ReplicaAveragingPolicy:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        return ReplicaAveragingPolicy(model, optimizer, replica_size=2, average_every=10, swap_every=swap_every)

    async def main(world: ad.World) -> tuple[int, int]:
        policy = made(10)
        if not world.incarnation:
            policy.load_state_dict({**made(1).state_dict(), "iteration": 400, "leader_iteration": 400})
        async with policy:
            first = policy.iteration
            while policy.iteration < 600:
                await world.sleep(0.001)
                await policy.step(float(world.rank))
        return world.incarnation, first

    faults = [*(Kill(rank, at_s=0.02) for rank in (2, 3)), *(Restart(rank, at_s=0.022) for rank in (2, 3))]
    results = simulate(main, ranks=4, seed=1, faults=faults, until_s=LIMIT_S).results
    assert results[:2] == ((0, 400), (0, 400))
    assert results[2] == results[3]
    assert results[2][0] == 1 and 400 < results[2][1] < 500, results[2]
