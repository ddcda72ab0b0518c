"""Tests the closed form of costs against the simulator: bytes and seconds of a round on links of given bandwidth."""

from __future__ import annotations

import asyncio

import pytest
import torch

import asyncdist as ad
from asyncdist.planning.costs import AverageAll, Job, Link, SelectiveAveraging, round_cost
from asyncdist.simulation import Link as SimulatedLink, Network, SimReport, simulate
from protocols import AsyncSelectiveAveragingPolicy, AverageAllPolicy

ROUND_COUNT = 3


def network(job: Job) -> Network:
    """Return the simulated network of a job whose ranks are on hosts of their own."""
    link = SimulatedLink(latency_s=job.link.latency_s, bandwidth_nbytes_per_s=1e15)
    bandwidth = job.link.bandwidth_nbytes_per_s
    return Network(link=link, cross_link=link, ranks_per_host=1, host_bandwidth_nbytes_per_s=bandwidth)


def constant_model(job: Job, value: float) -> torch.nn.Linear:
    model = torch.nn.Linear(job.param_count, 1, bias=False)
    torch.nn.init.constant_(model.weight, value)
    return model


def simulated(job: Job, *, seed: int, rounds: int = ROUND_COUNT) -> SimReport[float]:
    """Average ``rounds`` times over ranks on hosts of their own; each rank returns its seconds per average."""

    async def main(world: ad.World) -> float:
        model = constant_model(job, float(world.rank))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        async with AverageAllPolicy(model, optimizer, average_every=1) as policy:
            for _ in range(rounds):
                await policy.step()
            statistics = policy.statistics()
            assert statistics.average_count == rounds
            assert rounds == 0 or (model.weight == (world.size - 1) / 2).all()
            return statistics.seconds / max(1, rounds)

    return simulate(main, ranks=job.rank_count, seed=seed, network=network(job), strict=True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("params", "ranks", "bandwidth", "latency_s"),
    [
        (100_000, 2, 1e6, 1e-3),
        (100_000, 4, 50e6 / 8, 1e-3),
        (100_000, 8, 1e6, 2e-3),
        (30_000, 16, 1e6, 1e-4),
    ],
)
def test_an_average_of_all_takes_the_seconds_of_the_model(
    params: int, ranks: int, bandwidth: float, latency_s: float, seed: int
) -> None:
    """Without native collectives, the first one of up to 16 ranks averages, and its link is the bottleneck."""
    job = Job(
        param_count=params,
        rank_count=ranks,
        step_s=1.0,
        link=Link(bandwidth_nbytes_per_s=bandwidth, latency_s=latency_s),
    )
    cost = round_cost(job, AverageAll(every=1, is_sharded=False))
    report = simulated(job, seed=seed)
    assert max(report.results) == pytest.approx(cost.wait_s, rel=0.1)
    idle = simulated(job, seed=seed, rounds=0)
    nbytes = (report.byte_count - idle.byte_count) / ROUND_COUNT
    assert nbytes == pytest.approx(cost.sent_nbytes + cost.received_nbytes, rel=0.1), "all bytes cross that link"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [10, 15])
def test_a_selective_round_takes_the_seconds_of_the_model(ranks: int) -> None:
    """No rank waits, and the busiest ranks send and receive the modelled bytes."""
    job = Job(param_count=300_000, rank_count=ranks, step_s=0.02, link=Link(bandwidth_nbytes_per_s=1e6))
    every = 150
    cost = round_cost(job, SelectiveAveraging(every=every))
    assert cost.staleness_steps < every, "one round ends before the next one begins"

    async def main(world: ad.World, average_every: int) -> tuple[float, float, int, int, int]:
        model = constant_model(job, 1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seconds, staleness_steps = 0.0, 0
        async with AsyncSelectiveAveragingPolicy(
            model, optimizer, average_every=average_every, route="sharded", quorum=1.0, grace_s=100.0
        ) as policy:
            began_at = world.time()
            for _ in range(2 * every - 1):
                await asyncio.sleep(job.step_s)
                info = await policy.step(float(world.rank))
                seconds, staleness_steps = max(seconds, info.seconds), max(staleness_steps, info.staleness_steps)
            trained_s = world.time() - began_at
        counters = world.counters()
        return trained_s, seconds, staleness_steps, counters.sent_nbytes, counters.received_nbytes

    report = simulate(main, every, ranks=ranks, seed=0, network=network(job), strict=True)
    trained_s, seconds, staleness_steps, sent, received = map(max, zip(*report.results, strict=True))
    assert seconds == pytest.approx(cost.transfer_s, rel=0.1)
    assert staleness_steps == pytest.approx(cost.staleness_steps, rel=0.1)
    assert (sent, received) == pytest.approx((cost.sent_nbytes, cost.received_nbytes), rel=0.01)
    alone = simulate(main, 10**6, ranks=ranks, seed=0, network=network(job), strict=True)
    assert trained_s == pytest.approx(max(result[0] for result in alone.results), rel=0.01), "no rank waits"
