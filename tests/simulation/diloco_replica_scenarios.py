"""Simulates DiLoCo between replicas of several ranks, and compares each rank's weights with the oracle of plain DiLoCo.

The ranks of a replica make equal training steps, as under DDP. The oracle knows replicas instead of ranks: see
:mod:`simulation.diloco_scenarios`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scripts.population import sgd

import asyncdist as ad
from asyncdist.simulation import Compute, Kill, SimReport
from protocols import DiLoCoPolicy, SelectiveDiLoCoPolicy
from simulation.diloco_scenarios import (
    Plan,
    Record,
    check,
    draw_plan,
    draw_selective_plan,
    gain,
    stepped,
    within,
)
from simulation.training_runs import Layers, advance, draw_faults, simulate_plan, weights_of, with_faults


@dataclass(frozen=True, kw_only=True)
class ReplicaPlan:
    """One run of replicas; ``plan`` describes the replicas as if each were one rank, except the faults."""

    plan: Plan
    size: int = 2
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return self.plan.ranks * self.size

    @property
    def lost(self) -> set[int]:
        """Replicas that may be lost."""
        return {rank // self.size for rank in self.plan.killed}


def scores_of(rank: int, size: int) -> Iterator[float]:
    """Yield the scores of a rank's evaluations: the mean gain of the ranks of a replica is the replica's gain."""
    offset = (rank % size - (size - 1) / 2) / 8
    for number in itertools.count(1):
        yield 1.0 + offset
        yield 1.0 + 2 * offset + gain(rank // size, number)


async def train(world: ad.World, replicas: ReplicaPlan, record: Record, ended: dict[int, str]) -> None:
    """Train on one rank, and record each step."""
    plan, size, rank = replicas.plan, replicas.size, world.rank
    replica = rank // size
    model = Layers(plan.dtype)
    options = {**plan.options, "replica_size": size, **replicas.options}
    kind = SelectiveDiLoCoPolicy if plan.selects else DiLoCoPolicy
    policy = kind(model, sgd(model), on_event=functools.partial(record.see, rank), **options)
    scores = scores_of(rank, size)
    try:
        async with policy:
            for step in range(plan.steps[replica]):
                await advance(plan, model, replica, step)
                info = await stepped(policy, replica, scores)
                record.infos[rank].append(info)
                record.weights[rank].append(weights_of(model))
            before = weights_of(model)
        assert all(map(np.array_equal, before, weights_of(model))), "weights may only change inside step()"
    except (ad.RankLostError, ad.RemoteError, ad.ClosedError) as error:
        assert plan.killed, error
        ended[rank] = repr(error)


def run(replicas: ReplicaPlan, seed: int = 0) -> tuple[SimReport[Any], Record, dict[int, str]]:
    """Simulate replicas. A rank may end with an error only if a rank of its replica was killed, or at the start."""
    plan = replicas.plan
    plan = dataclasses.replace(plan, steps=plan.steps or (12,) * plan.ranks)
    replicas = dataclasses.replace(replicas, plan=plan)
    record, ended = Record(), dict[int, str]()
    report = simulate_plan(train, plan, replicas, record, ended, ranks=replicas.ranks, seed=seed)
    sound = [rank for rank in range(replicas.ranks) if rank // replicas.size not in replicas.lost]
    has_started = all(record.infos[rank] for rank in sound)  # a loss may end the start on some ranks alone
    for rank in range(replicas.ranks):
        is_whole = len(record.infos[rank]) == plan.steps[rank // replicas.size]
        assert is_whole or rank // replicas.size in replicas.lost or not has_started, (
            f"rank {rank} ended before its last step: {ended.get(rank)}"
        )
    return report, record, ended


def of_index(replicas: ReplicaPlan, record: Record, index: int) -> Record:
    """Return the record of the ranks with one index in their replicas, with replicas instead of ranks."""
    found = Record()
    for rank in range(index, replicas.ranks, replicas.size):
        replica = rank // replicas.size
        found.weights[replica] = record.weights[rank]
        found.applied[replica] = [
            dataclasses.replace(event, donors=tuple(donor // replicas.size for donor in event.donors))
            for event in record.applied[rank]
        ]
    return found


def check_replicas(
    replicas: ReplicaPlan, record: Record, tolerance: Callable[[Any], float] = within
) -> dict[int, tuple[int, ...]]:
    """Compare all ranks with the oracle, and return the donors of each round, which are equal for all parts."""
    if not any(record.infos.values()):
        return {}
    lost = set(replicas.lost)
    if lost:  # a loss may have ended the start of another replica
        lost |= {rank // replicas.size for rank in range(replicas.ranks) if not record.infos[rank]}
    kills = tuple(Kill(replica, at_s=0.0) for replica in sorted(lost))
    plan = dataclasses.replace(replicas.plan, faults=kills, dies_at={})
    whole: dict[int, tuple[int, ...]] = {}
    for index in range(replicas.size):
        own = of_index(replicas, record, index)
        check(plan, own, tolerance)
        for number, donors in own.donors(lost)[0].items():
            assert whole.setdefault(number, donors) == donors, (
                f"round {number}: the donors are {donors} here, {whole[number]} on another rank"
            )
    for first in range(0, replicas.ranks, replicas.size):
        weights = [record.weights[first + place] for place in range(replicas.size)]
        infos = [record.infos[first + place] for place in range(replicas.size)]
        for step, together in enumerate(zip(*weights, strict=False)):
            for other in together[1:]:
                assert all(map(np.array_equal, together[0], other)), (
                    f"the ranks of the replica of rank {first} have different weights in step {step}"
                )
        for step, said in enumerate(zip(*infos, strict=False)):
            facts = {(info.round, info.donors, info.weights, info.outer_norm, info.cosine) for info in said}
            assert len(facts) == 1, (
                f"the ranks of the replica of rank {first} report different facts in step {step}: {facts}"
            )
    return whole


def draw(seed: int) -> ReplicaPlan:
    """Return a run with drawn options, network and faults; every third selects. The last replica is not killed."""
    rng = random.Random(f"diloco replicas {seed}")
    size, plan = rng.choice((2, 2, 3)), draw_plan(seed) if seed % 3 else draw_selective_plan(seed)
    count = min(plan.ranks, 3)
    drawn = draw_faults(rng, count * size)
    faults = tuple(each for each in drawn if not isinstance(each, Kill) or each.rank < (count - 1) * size)
    own = dataclasses.replace(plan, ranks=count, steps=plan.steps[:count], compute=Compute(), faults=faults)
    return ReplicaPlan(plan=own, size=size)


def scenario(seed: int, faults: Sequence[Any] | None = None) -> SimReport[Any]:
    """Run one seed; AssertionError if a weight differs, or a rank is stuck."""
    return seen_in(seed, faults)[0]


def seen_in(seed: int, faults: Sequence[Any] | None = None) -> tuple[SimReport[Any], Counter[str]]:
    """Run one seed, and return its counts for the test of coverage."""
    replicas = draw(seed)
    replicas = dataclasses.replace(replicas, plan=with_faults(replicas.plan, faults))
    report, record, ended = run(replicas, seed)
    rounds = check_replicas(replicas, record)
    seen = Counter[str]()
    seen["rounds"] += len(rounds)
    seen["rounds without a lost replica"] += sum(len(donors) < replicas.plan.ranks for donors in rounds.values())
    seen["ranks that lost their replica"] += len(ended)
    return report, seen
