"""Tests one rank that is a hundred times slower: the others step and average as without it, and it is named."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import asyncdist as ad
from asyncdist.simulation import simulate
from protocols import AsyncSelectiveAveragingPolicy, SelectiveStatistics

STEP_S = 0.05
EVERY = 5


@dataclass(frozen=True)
class Told:
    """The actions of a rank."""

    step_count: int
    statistics: SelectiveStatistics

    @property
    def round_count(self) -> int:
        """Return the number of rounds that ended while this rank coordinated."""
        return self.statistics.coordinator.rounds_ended if self.statistics.coordinator is not None else 0


def compute(step_s: float) -> None:
    """Block the loop, as training does."""
    time.sleep(step_s)


@cache
def population(slow_rank: int | None, factor: float, *, ranks: int = 4, duration_s: float = 30.0) -> tuple[Told, ...]:
    """Let ranks train, each with its own speed."""

    async def main(world: ad.World) -> Told:
        torch.manual_seed(world.rank)
        rng = random.Random(world.rank)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step_count = 0
        async with AsyncSelectiveAveragingPolicy(model, optimizer, average_every=EVERY) as policy:
            while world.time() < duration_s:
                compute(STEP_S * (factor if world.rank == slow_rank else 1.0) * rng.uniform(0.98, 1.02))
                await policy.step(rng.random())
                step_count += 1
        return Told(step_count, policy.statistics())

    results: tuple[Any, ...] = simulate(main, ranks=ranks, seed=6, strict=True).results
    assert all(isinstance(result, Told) for result in results), results
    return results


@pytest.mark.parametrize("slow_rank", [0, 3])
def test_a_straggler_is_named_and_delays_no_other_rank(slow_rank: int) -> None:
    """Rank 0 coordinates at first, and its first step alone takes a sixth of the time."""
    alone, found = population(None, 1.0), population(slow_rank, 100.0)
    for rank, told in enumerate(found):
        assert rank == slow_rank or told.step_count >= 0.98 * alone[rank].step_count
    assert sum(told.round_count for told in found) >= 0.8 * sum(told.round_count for told in alone)
    named = [s for told in found if told.statistics.coordinator for s in told.statistics.coordinator.stragglers]
    assert {straggler.rank for straggler in named} == {slow_rank}
    assert not [told for told in alone if told.statistics.coordinator and told.statistics.coordinator.stragglers]


def test_a_rank_that_is_slow_takes_averages_all_the_same() -> None:
    """The slow rank gets a role when a round that waits for it costs a tenth of the time."""
    alone, found = population(None, 1.0), population(3, 10.0)
    assert found[3].statistics.replacement_count + found[3].statistics.snapshot_count >= 1
    assert sum(told.round_count for told in found) >= 0.8 * sum(told.round_count for told in alone)


def test_a_rank_half_as_fast_takes_part_as_the_others_do() -> None:
    found = population(3, 2.0)
    roles = [told.statistics.replacement_count + told.statistics.snapshot_count for told in found]
    assert roles[3] >= 0.5 * min(roles[:3])
