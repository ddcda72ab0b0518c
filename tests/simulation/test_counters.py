"""Tests the counters (metrics) of ranks in a simulated population."""

from __future__ import annotations

import asyncio

import pytest
import torch

import asyncdist as ad
from asyncdist.live.counters import RankCounters
from asyncdist.runtime.story.collecting import Activity, collect, seconds_waited
from asyncdist.simulation import Kill
from protocols import AsyncSelectiveAveragingPolicy, SelectiveStatistics

NBYTES = 4 * (8 * 8 + 8)


async def train(world: ad.World, steps: int = 40) -> tuple[RankCounters, SelectiveStatistics, RankCounters]:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    async with AsyncSelectiveAveragingPolicy(model, optimizer, average_every=5, name="mine") as policy:
        for _ in range(steps):
            await policy.step(float(world.rank))
        told = world.counters(), policy.statistics()
    return (*told, world.counters())


def test_counters_are_those_of_the_policy_and_of_the_world() -> None:
    report = ad.simulate(train, ranks=4, seed=3)
    for rank, (told, statistics, at_end) in enumerate(report.results):
        (policy,) = told.policies
        assert (told.rank, told.size, told.incarnation, told.lost) == (rank, 4, 0, ())
        assert (policy.policy, policy.step, policy.metric) == ("mine", 40, float(rank))
        assert policy.replacement_count == statistics.replacement_count
        assert policy.abandoned_count == sum(statistics.abandoned.values())
        assert (policy.round or 0) <= statistics.last_round
        assert told.received_nbytes == statistics.received_nbytes
        assert told.sent_nbytes == statistics.sent_nbytes
        assert told.step == 40
        assert at_end.policies[0].step == 40, "the counters must include the last policy after it has ended"
        assert at_end.time_s >= told.time_s
        assert at_end.sent_count > 0
    worst = report.results[0][0].policies[0]
    assert worst.replacement_count > 0
    assert worst.round is not None
    assert worst.staleness_steps is not None
    assert worst.latest.startswith(f"round {worst.round}")
    assert report.results[0][0].received_nbytes >= worst.replacement_count * NBYTES
    assert {told.job for told, _, _ in report.results} == {report.results[0][0].job}


def test_losses_and_another_coordinator_are_counted() -> None:
    report = ad.simulate(train, 200, ranks=4, seed=5, faults=[Kill(0, 0.1)])
    for rank in (1, 2, 3):
        told = report.results[rank][0]
        assert told.lost == (0,)
        assert told.policies[0].coordinator in (1, 2, 3)


async def see_the_second_coordinator(world: ad.World) -> int | None:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    async with AsyncSelectiveAveragingPolicy(model, optimizer, average_every=5, name="mine") as policy:
        for _ in range(300):
            await policy.step(float(world.rank))
        main = asyncio.current_task()
        assert main is not None
        return collect(world, main, Activity(world)).policies[0].coordinator


@pytest.mark.slow
def test_a_coordinator_is_named_long_after_it_has_taken_over() -> None:
    """Regression: a report of waits named it only as long as the event was one of the last 256."""
    results = ad.simulate(see_the_second_coordinator, ranks=4, seed=5, faults=[Kill(0, 0.1)]).results
    (coordinator,) = set(results[1:])
    assert coordinator in (1, 2, 3)


async def wait_for_it(world: ad.World) -> tuple[float, float]:
    assert world.counters().waited_s == 0
    began_at = world.time()
    if world.rank == 1:
        await world.sleep(3.0)
    await ad.barrier()
    return world.counters().waited_s, world.time() - began_at


def test_waits_of_main_for_others_are_counted_and_sleeps_are_not() -> None:
    (waited, took), (waited_by_1, _) = ad.simulate(wait_for_it, ranks=2, seed=1).results
    assert took > 2.9
    assert waited == pytest.approx(took, abs=0.01)
    assert waited_by_1 < 0.1


async def ask_meanwhile(world: ad.World) -> float:
    """Request the counters for the first time while main waits, on loops whose clocks are far from 0."""
    await world.sleep(1000.0)
    asyncio.get_running_loop().call_later(1.0, world.counters)
    if world.rank == 1:
        await world.sleep(2.0)
    await ad.barrier()
    return world.counters().waited_s


def test_a_wait_that_began_before_anybody_asked_is_not_counted() -> None:
    assert max(ad.simulate(ask_meanwhile, ranks=2, seed=1).results) < 3.0


async def look_at_waits_of_main(world: ad.World) -> list[float]:
    found, main = list[float](), asyncio.current_task()
    assert main is not None
    loop = asyncio.get_running_loop()
    for after_s in (0.5, 3.5):
        loop.call_later(after_s, lambda: found.append(seconds_waited(main, world)))
    await world.sleep(1.0 if world.rank == 0 else 5.0)
    await ad.barrier()
    return found


def test_a_wait_of_main_has_an_age_and_a_sleep_has_none() -> None:
    first, second = ad.simulate(look_at_waits_of_main, ranks=2, seed=1).results
    assert first == [0.0, pytest.approx(2.5, abs=0.01)] and second == [0.0, 0.0]
