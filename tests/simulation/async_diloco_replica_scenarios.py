"""Simulates asynchronous DiLoCo between replicas of several ranks, and compares all ranks with the oracle of replicas.

The ranks of a replica make equal training steps, as under DDP. The oracle of :mod:`simulation.async_diloco_scenarios`
knows replicas instead of ranks.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from scripts.population import sgd
from support.tokens import tokens_for

import asyncdist as ad
from asyncdist.simulation import Compute, Kill, SimReport
from protocols import AsyncDiLoCoPolicy, StepInfo
from simulation.async_diloco_scenarios import Life, Plan, Record, check, draw_plan, noted_steps
from simulation.training_runs import Arrays, Layers, advance, draw_faults, simulate_plan, weights_of


@dataclass(frozen=True, kw_only=True)
class ReplicaPlan:
    """One run of replicas; ``plan`` describes the replicas as if each were one rank, except the faults."""

    plan: Plan
    size: int = 2

    @property
    def ranks(self) -> int:
        return self.plan.ranks * self.size

    @property
    def lost(self) -> set[int]:
        """Replicas that may be lost."""
        return {rank // self.size for rank in self.plan.killed}

    @property
    def of_replicas(self) -> Plan:
        """The plan for the oracle."""
        return replace(self.plan, faults=tuple(Kill(replica, at_s=0.0) for replica in sorted(self.lost)))


@dataclass
class Seen:
    """The record of the first ranks with replicas instead of ranks, and the steps of all ranks.

    Attributes:
        ended: Error with which a rank has ended, by rank.
    """

    record: Record
    infos: dict[int, list[StepInfo]] = field(default_factory=lambda: defaultdict(list))
    weights: dict[int, list[Arrays]] = field(default_factory=lambda: defaultdict(list))
    ended: dict[int, str] = field(default_factory=dict)


async def train(world: ad.World, replicas: ReplicaPlan, seen: Seen) -> None:
    """Train on one rank, and record each step."""
    plan, rank, replica = replicas.plan, world.rank, world.rank // replicas.size
    model, is_first = Layers(plan.dtype), rank % replicas.size == 0
    policy = AsyncDiLoCoPolicy(model, sgd(model), replica_size=replicas.size, **plan.options)
    try:
        async with policy:
            if is_first:
                life = seen.record.lives[replica, 0] = Life((0, weights_of(model)), store=policy._store)
                life.infos, life.weights = seen.infos[rank], seen.weights[rank]
            for step in range(plan.steps[replica]):
                await advance(plan, model, replica, step)
                info = await policy.step(tokens=tokens_for(policy, replica + 1))
                seen.infos[rank].append(info)
                seen.weights[rank].append(weights_of(model))
            before = weights_of(model)
        assert all(map(np.array_equal, before, weights_of(model))), "weights may only change inside step()"
    except (ad.RankLostError, ad.RemoteError, ad.ClosedError) as error:
        assert plan.killed, error
        seen.ended[rank] = repr(error)
        return
    if is_first:
        seen.record.lives[replica, 0].statistics = policy.statistics()


def run(replicas: ReplicaPlan, seed: int = 0) -> tuple[SimReport[Any], Seen]:
    """Simulate replicas, and check that each contribution of a whole replica is applied exactly once."""
    plan = replace(replicas.plan, steps=replicas.plan.steps or (18,) * replicas.plan.ranks)
    replicas, seen = replace(replicas, plan=plan), Seen(Record(replicas.size, replicas.lost))
    with noted_steps(seen.record):
        report = simulate_plan(train, plan, replicas, seen, ranks=replicas.ranks, seed=seed)
    sound = [rank for rank in range(replicas.ranks) if rank // replicas.size not in replicas.lost]
    has_started = all(seen.infos[rank] for rank in sound)  # a loss may end the start on some ranks alone
    for rank in sound:
        is_whole = len(seen.infos[rank]) == plan.steps[rank // replicas.size]
        assert is_whole or not has_started, f"rank {rank} ended before its last step: {seen.ended.get(rank)}"
    record = seen.record
    if has_started:
        check_applied_once(replicas, record)
    else:
        record.lives.clear()
        record.lineage.clear()
    return report, seen


def check_applied_once(replicas: ReplicaPlan, record: Record) -> None:
    """Check that each contribution of a replica that was not lost is applied exactly once, and no other one twice."""
    counts = Counter(each for donors in record.lineage for each in donors)
    assert not counts or max(counts.values()) == 1, (
        f"contributions were applied more than once: {counts.most_common(3)}"
    )
    for (replica, _), life in record.lives.items():
        if replica not in replicas.lost:
            first, last = life.sequences
            missing = [each for each in range(first + 1, last + 1) if (replica, each) not in counts]
            lost = [each for each in missing if (replica, each) not in record.left]
            assert not lost, f"replica {replica}: contributions {lost} of {last} were not applied"


def check_replicas(replicas: ReplicaPlan, seen: Seen, tolerance: float = 0.0) -> int:
    """Compare all ranks with the oracle and with their mates; return the number of versions."""
    plan = replicas.of_replicas
    check(replace(plan, steps=plan.steps or (18,) * plan.ranks), seen.record, tolerance)
    for first in range(0, replicas.ranks, replicas.size):
        ranks = range(first, first + replicas.size)
        for step, together in enumerate(zip(*(seen.weights[rank] for rank in ranks), strict=False)):
            for other in together[1:]:
                assert all(map(np.array_equal, together[0], other)), (
                    f"the ranks of the replica of rank {first} have different weights in step {step}"
                )
        for step, said in enumerate(zip(*(seen.infos[rank] for rank in ranks), strict=False)):
            facts = {(info.round, info.donors, info.weights, info.outer_norm, info.staleness_versions) for info in said}
            assert len(facts) == 1, (
                f"the ranks of the replica of rank {first} report different facts in step {step}: {facts}"
            )
    return len(seen.record.lineage)


def draw(seed: int) -> ReplicaPlan:
    """Return a run with drawn options, network and faults. The last replica is not killed."""
    rng = random.Random(f"async diloco replicas {seed}")
    size, plan = rng.choice((2, 2, 3)), draw_plan(seed)
    count = min(plan.ranks, 3)
    drawn = draw_faults(rng, count * size)
    faults = tuple(each for each in drawn if not isinstance(each, Kill) or each.rank < (count - 1) * size)
    quorum, steps = min(plan.quorum, count), plan.steps[:count]
    own = replace(plan, ranks=count, steps=steps, quorum=quorum, compute=Compute(), faults=faults)
    return ReplicaPlan(plan=own, size=size)


def scenario(seed: int, faults: Sequence[Any] | None = None) -> SimReport[Any]:
    """Run one seed; AssertionError if a weight differs, a contribution is lost or applied twice, or a rank is stuck."""
    return seen_in(seed, faults)[0]


def seen_in(seed: int, faults: Sequence[Any] | None = None) -> tuple[SimReport[Any], Counter[str]]:
    """Run one seed, and return its counts for the test of coverage."""
    replicas = draw(seed)
    if faults is not None:
        replicas = replace(replicas, plan=replace(replicas.plan, faults=tuple(faults)))
    report, seen = run(replicas, seed)
    counts = Counter[str]()
    counts["versions"] += check_replicas(replicas, seen, 1e-9)
    counts["ranks that lost their replica"] += len(seen.ended)
    counts["new leaders"] += len(seen.record.outers) > 1
    return report, counts
