"""Scenarios with islands: populations that are drawn from one seed, and the properties that must hold.

``scenario(seed)`` draws the number and size of the islands, the options of their policies, the times at which ranks
leave, and the faults. It simulates the population and checks it: each average equals the mean of the snapshots that its
donors offered in that round of that island; no rank fails or hangs; and nothing is left over.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import pytest
import torch
from scripts.population import Roles
from support.steady_network import quiet
from torch import nn

import asyncdist as ad
from asyncdist.simulation import Compute, Fault, Kill, Partition, Restart, SimReport, Stall, simulate
from protocols import (
    AsyncSelectiveAveragingPolicy,
    AverageApplied,
    PolicyEvent,
    SelectiveStatistics,
    SnapshotTaken,
    StepInfo,
)

#: Numbers of ranks of an island, and of islands. In the last, largest worlds, notices of leaving ranks are sent along a
#: tree.
SIZES: Final = ((2, 3), (3, 4), (4, 2), (4, 4), (5, 3), (6, 3), (9, 2), (4, 6))
#: No scenario takes longer than this in virtual seconds, whatever fails in it.
VIRTUAL_TIME_MAX_S: Final = 1e4

#: Snapshots of a run: the value of all weights by island, round and rank.
Given = dict[tuple[int, int, int], float]
COMPUTE = Compute(step_s=0.01, overrun_probability=0.0)


@dataclass
class Ended:
    """The outcome of one rank."""

    value: float
    infos: list[StepInfo] = field(default_factory=list)
    applied: list[AverageApplied] = field(default_factory=list)
    statistics: SelectiveStatistics | None = None
    sent_count: int = 0

    @property
    def stats(self) -> SelectiveStatistics:
        assert self.statistics is not None
        return self.statistics

    @property
    def migrants(self) -> set[int]:
        return {rank for info in self.infos for rank in info.migrants}


async def train(world: ad.World, given: Given, steps: int, island: int, **options: Any) -> Ended:
    """Train a model whose weights are one number, at first the rank's number; the metric is this number, too."""
    model = nn.Linear(5, 3, bias=False)
    nn.init.constant_(model.weight, float(world.rank))
    ended = Ended(0.0)

    roles = Roles(world.rank)

    def listen(event: PolicyEvent) -> None:
        roles.see(event)
        if not isinstance(event, SnapshotTaken | AverageApplied):
            return
        value = float(event.state["float32"][0])
        assert (event.state["float32"] == value).all()
        if isinstance(event, SnapshotTaken):
            where = island if event.island < 0 else event.island
            assert (where, event.round, world.rank) not in given or world.incarnation
            given[where, event.round, world.rank] = value
        else:
            ended.applied.append(event)
            mean = sum(
                given[island, event.round, rank] * weight
                for rank, weight in zip(event.donors, event.weights, strict=True)
            ) / sum(event.weights)
            assert value == pytest.approx(mean, rel=1e-6)

    settings = {"average_every": 2, "replacement_ratio": 0.25, "migrate_every": 2, **options}
    policy = AsyncSelectiveAveragingPolicy(
        model, torch.optim.SGD(model.parameters(), lr=0.1), on_event=listen, **settings
    )
    async with policy:
        for _ in range(steps):
            info = await policy.step(float(model.weight.detach()[0, 0]))
            if info or info.abandoned:
                ended.infos.append(info)
                assert info.island == island
                assert set(info.migrants) == {
                    rank for rank in info.donors if rank not in _island_of(world, island, options)
                }
    ended.value, ended.statistics = float(model.weight.detach()[0, 0]), policy.statistics()
    ended.sent_count = world.statistics().sent_count
    return ended


def _island_of(world: ad.World, island: int, options: dict[str, Any]) -> range:
    size = options.get("island_size") or world.size // options["islands"]
    return range(island * size, (island + 1) * size)


def population(
    ranks: int,
    faults: Sequence[Fault] = (),
    *,
    seed: int = 1,
    steps: int | Sequence[int] = 80,
    strict: bool = True,
    **options: Any,
) -> SimReport[Any]:
    """Simulate ranks that make this number of steps, one number for all, or one for each."""
    size = options.get("island_size") or ranks // options["islands"]
    given: Given = {}

    async def main(world: ad.World) -> Ended:
        own_steps = steps if isinstance(steps, int) else steps[world.rank]
        return await train(world, given, own_steps, world.rank // size, **options)

    return simulate(
        main, ranks=ranks, seed=seed, faults=faults, compute=COMPUTE, strict=strict, until_s=VIRTUAL_TIME_MAX_S
    )


def drawn_faults(rng: random.Random, ranks: int) -> list[Fault]:
    kinds = rng.sample(["kill", "kill", "stall", "partition", "restart"], rng.randint(0, 3))
    faults: list[Fault] = []
    for kind in kinds:
        rank, at_s = rng.randrange(ranks), rng.uniform(0.05, 1.0)
        match kind:
            case "kill":
                faults.append(Kill(rank, at_s=at_s))
            case "restart":
                faults += [Kill(rank, at_s=at_s), Restart(rank, at_s=at_s + 0.3)]
            case "stall":
                faults.append(Stall(rank, at_s=at_s, duration_s=rng.uniform(0.1, 3.0)))
            case _:
                cut = tuple(rng.sample(range(ranks), rng.randint(1, ranks // 2)))
                faults.append(Partition(cut, at_s=at_s, until_s=at_s + rng.uniform(0.1, 3.0)))
    victims = Counter(fault.rank for fault in faults if isinstance(fault, Kill))
    return faults if not victims or max(victims.values()) == 1 else []


def came_too_late(error: BaseException) -> bool:
    """Return whether a rank was restarted when the others of its island had ended, or were lost."""
    return isinstance(error, ad.LateError) or "all other ranks of this policy are lost" in str(error)


def scenario(seed: int, faults: Sequence[Fault] | None = None) -> SimReport[Any]:
    """Run and check the scenario of ``seed``, with other faults if some are passed.

    Raises:
        AssertionError: A property that must always hold was violated.
        DeadlockError: Some rank waits forever.
    """
    rng = random.Random(f"islands {seed}")
    size, count = rng.choice(SIZES)
    options: dict[str, Any] = {
        "island_size": size,
        "migrate_every": rng.randint(1, 3),
        "migration": rng.choice(["ring", "random"]),
        "route": rng.choice(["direct", "sharded"]),
        "averaging_strategy": rng.choice(["mean", "weighted_mean", "best_only"]),
        "replacement_ratio": rng.choice([0.25, 0.5, 0.75]),
        "metric_mode": rng.choice(["max", "min"]),
    }
    drawn = drawn_faults(rng, size * count)
    steps = [rng.randint(40, 160)] * (size * count)
    if rng.random() < 0.5:  # the ranks leave at different times
        steps = [rng.randint(10, each) for each in steps]
    with quiet():
        report = population(size * count, drawn if faults is None else faults, seed=seed, steps=steps, **options)
    killed = {fault.rank for fault in report.faults if isinstance(fault, Kill)}
    for rank, result in enumerate(report.results):
        who = f"seed {seed}: rank {rank}"
        if result is None:
            assert rank in killed, f"{who} had not ended after {report.virtual_time_s} s"
        elif isinstance(result, BaseException) and not came_too_late(result):
            raise AssertionError(f"{who} failed: {result!r}") from result
        elif isinstance(result, Ended) and result.stats.coordinator is not None:
            strangers = set(result.stats.coordinator.reports) - set(
                range(rank // size * size, (rank // size + 1) * size)
            )
            assert not strangers, f"{who} coordinates {strangers}, which are in other islands"
    results = [None if isinstance(each, BaseException) else each for each in report.results]
    return replace(report, results=tuple(results))
