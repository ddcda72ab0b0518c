"""Tests replicas of several ranks, which average as one member each: bit-equal at every iteration, with every seed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import asyncdist as ad
from asyncdist.runtime.failing.replica_mates import ReplicaMates
from asyncdist.simulation import Kill, simulate
from protocols import AverageApplied, ReplicaAveragingPolicy, SnapshotTaken
from simulation.sharded_replica_scenarios import OfPlainShards

STEPS, EVERY = 65, 20


def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def bits(model: nn.Module) -> bytes:
    return b"".join(bytes(value.detach().numpy().tobytes()) for value in model.state_dict().values())


async def train(world: ad.World, size: int, **options: Any) -> list[tuple[bytes, bytes, Any]]:
    """Return each iteration's weights, the optimizer's state, and the step's result; replicas share gradients."""
    replica = world.rank // size
    model, optimizer = build(world.rank)
    mine = await ad.new_group(range(replica * size, replica * size + size))
    history = []
    policy = ReplicaAveragingPolicy(
        model, optimizer, replica_size=size, average_every=EVERY, replacement_ratio=0.5, **options
    )
    async with policy:
        assert policy.swap_every == options.get("swap_every", 2)
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(1000 * world.rank + step)
            inputs = torch.randn(8, 3, generator=generator)
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean() * (1 + replica)
            optimizer.zero_grad()
            loss.backward()
            await ad.average_gradients(model, mine)
            for norm in model.modules():  # as DDP copies buffers
                if isinstance(norm, nn.BatchNorm1d):
                    for buffer in norm.buffers():
                        await ad.broadcast(buffer, mine.ranks[0], group=mine)
            optimizer.step()
            info = await policy.step(-loss)
            velocity = [optimizer.state[p].get("momentum_buffer") for p in model.parameters()]
            known = b"".join(b"none" if v is None else v.numpy().tobytes() for v in velocity)
            history.append((bits(model), known, info))
    return history


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "options"),
    [
        pytest.param(2, {}, marks=pytest.mark.long),
        pytest.param(3, {"optimizer_state": "reset"}, marks=pytest.mark.long),
        (2, {"momentum": 0.25, "swap_every": 5}),
    ],
)
def test_ranks_of_a_replica_are_equal_at_every_iteration(size: int, options: dict[str, Any]) -> None:
    async def main(world: ad.World) -> Any:
        return await train(world, size, **options)

    applied = 0
    for seed in range(3):
        results = ad.simulate(main, ranks=2 * size, seed=seed).results
        for first in (0, size):
            histories = results[first : first + size]
            assert all(history == histories[0] for history in histories)
            applied += sum(bool(info) for *_, info in histories[0])
            for step, (*_, info) in enumerate(histories[0]):
                assert not info or (step + 1) % options.get("swap_every", 2) == 0
        assert results[0][-1][0] != results[size][-1][0], "the replicas must differ from each other"
    assert applied > 3


def test_what_cannot_be_divided_or_is_refused_is_told() -> None:
    def made(**options: Any) -> ReplicaAveragingPolicy:
        return ReplicaAveragingPolicy(*build(0), **{"replica_size": 2, "average_every": 10, **options})

    for options, told in (
        ({"replica_size": 1}, "replica_size must be an integer >= 2, got 1"),
        ({"swap_every": 3}, "swap_every must be a divisor of average_every=10, got 3"),
        ({"replacement_ratio": 2.0}, "replacement_ratio must be .*, got 2"),
    ):
        with pytest.raises(ValueError, match=told):
            made(**options)

    async def main(world: ad.World) -> None:
        async with made():
            pass

    with pytest.raises(ValueError, match=r"replica_size must be a divisor of the number of ranks \(3\), got 2"):
        ad.run_local(main, ranks=3)


def test_swap_every_of_numpy_becomes_an_int() -> None:
    """Regression: it could not be written to the ranks' start messages, which ended the job."""
    policy = ReplicaAveragingPolicy(*build(0), replica_size=2, average_every=10, swap_every=np.int64(5))
    assert type(policy.swap_every) is int and policy.swap_every == 5


@pytest.mark.parametrize("metrics", [(math.inf, -math.inf), (1.5e308, 1.5e308)])
@pytest.mark.parametrize("kind", [OfPlainShards, ReplicaAveragingPolicy])
def test_extreme_metrics_end_no_job(kind: type[ReplicaAveragingPolicy], metrics: tuple[float, float]) -> None:
    """Regression: the exact sum of the metrics raised ValueError or OverflowError."""

    async def main(world: ad.World) -> tuple[int, ...]:
        model = nn.Linear(2, 2)
        donors: tuple[int, ...] = ()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        async with kind(model, optimizer, replica_size=2, average_every=5, averaging_strategy="best_only") as policy:
            for _ in range(40):
                info = await policy.step(loss=metrics[world.rank] if world.rank < 2 else 1.0)
                donors = info.donors or donors
        return donors

    results = ad.simulate(main, ranks=4).results
    assert results[0] == (2,), "the replica with the extreme metrics must rank worst"


def test_one_replica_alone_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """Regression: it trained without any average, and without a warning."""

    async def main(world: ad.World) -> None:
        async with ReplicaAveragingPolicy(*build(0), replica_size=2, average_every=2, name="few") as policy:
            for _ in range(4):
                await policy.step(1.0)
            if world.rank == 0:
                assert str(policy.statistics()).startswith("ReplicaAveragingPolicy 'few', rank 0\n")

    with caplog.at_level(logging.WARNING, "protocols.replica_averaging.policy"):
        ad.run_local(main, ranks=2)
        assert [record.getMessage() for record in caplog.records] == [
            "all 2 ranks are one replica, so nothing is averaged; two replicas need 4 ranks"
        ]
        caplog.clear()
        ad.run_local(main, ranks=4)
        assert not caplog.records


def test_a_mistake_of_one_rank_ends_the_job_with_its_words() -> None:
    async def main(world: ad.World) -> None:
        async with ReplicaAveragingPolicy(*build(0), replica_size=2, average_every=2) as policy:
            for _ in range(4):
                await policy.step("much" if world.rank == 0 else 1.0)  # type: ignore[arg-type]

    with pytest.raises(TypeError, match=r"metric must be .*, got 'much'"):
        ad.run_local(main, ranks=4)


async def asked(world: ad.World, resume_at: int, numbers: list[int]) -> tuple[list[int], int]:
    """Return the iterations at which a rank is asked for its metric, with a policy that resumes another one's state."""
    model, optimizer = build(world.rank // 2)
    options: dict[str, Any] = {"replica_size": 2, "average_every": 10, "swap_every": 5}
    found: list[int] = []
    number = 0

    def metric() -> float:
        found.append(number)
        return -float(world.rank)

    first = ReplicaAveragingPolicy(model, optimizer, **options)
    async with first:
        for number in range(resume_at):  # noqa: B007 metric() tells it
            await first.step(metric)
    second = ReplicaAveragingPolicy(model, optimizer, **options)
    second.load_state_dict(first.state_dict())
    async with second:
        for number in range(resume_at, 60) if not numbers else ():  # noqa: B007
            await second.step(metric)
        for number in numbers:
            await second(number, model, optimizer, metric)
    return found, second.iteration


@pytest.mark.parametrize("resume_at", [13, 15, 20])
def test_a_policy_that_goes_on_reports_at_the_same_iterations(resume_at: int) -> None:
    results = ad.simulate(asked, resume_at, [], ranks=4, seed=2).results
    assert list(results) == [([9, 19, 29, 39, 49, 59], 60)] * 4


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        (list(range(0, 100, 10)), list(range(10, 100, 10))),
        ([*range(21), *range(21), *range(7)], [9, 19, 9, 19]),
    ],
)
def test_script_iterations(numbers: list[int], expected: list[int]) -> None:
    results = ad.simulate(asked, 0, numbers, ranks=4, seed=2).results
    assert [found for found, _ in results] == [expected] * 4


def test_each_rank_reports_one_policy_with_its_replicas_role() -> None:
    """Regression: a leader reported two policies: its own, and the one of the leaders inside it."""
    told: dict[int, list[Any]] = {}

    async def main(world: ad.World) -> None:
        policy = ReplicaAveragingPolicy(*build(world.rank), replica_size=2, average_every=2, name="mine")
        async with policy:
            for step in range(10):
                await policy.step(float(step))
            told[world.rank] = [probe() for probe in world.services.progress_probes]
        told[world.rank].append(world.services.last_progress)

    ad.simulate(main, ranks=4, seed=0, strict=True)
    for rank, policies in told.items():
        assert [(each.policy, each.step) for each in policies] == [("mine", 10)] * 2
        assert all(bool(each.role) == (rank % 2 == 0) for each in policies)


def test_a_rank_that_leaves_its_replica_early_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Regression: the others waited forever in DDP for its gradients, and no rank reported this."""

    async def main(world: ad.World) -> None:
        async with ReplicaAveragingPolicy(*build(0), replica_size=2, average_every=10, swap_every=10) as policy:
            for _ in range(5):
                await policy.step(1.0)
            if world.rank == 1:
                return
            await world.sleep(60.0)  # rank 0 waits for the gradients of rank 1

    ad.simulate(main, ranks=4, seed=1, strict=True)
    told = [record.message for record in caplog.records if " 5 steps" in record.message]
    assert len(told) == 1, told
    assert "rank 1 has left its policy after 5 steps, and waits for rank 0 of its replica" in told[0]


@pytest.mark.parametrize("late", [0, 1])
def test_no_step_follows_a_cancelled_swap(late: int) -> None:
    """Regression: after a follower's cancelled step, DDP replicas had silently different weights."""

    async def main(world: ad.World) -> str:
        said = ""
        with contextlib.suppress(ad.AsyncdistError):
            async with ReplicaAveragingPolicy(*build(0), replica_size=2, average_every=1) as policy:
                await policy.step(1.0)
                if world.rank == late:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(0.01):  # the other rank of the replica makes no second step
                            await policy.step(1.0)
                    try:
                        await asyncio.wait_for(policy.step(1.0), 0.1)
                    except (ad.ClosedError, TimeoutError) as error:
                        said = repr(error)
                elif world.rank < 2:
                    await asyncio.sleep(1.0)
        return said

    assert "an earlier step was cancelled" in str(ad.simulate(main, ranks=4, until_s=300).results[late])


def test_numbers_of_steps_are_steps_and_not_swap_points() -> None:
    """Regression: the cooldown, staleness, iterations of events and the statistics counted swap points."""
    cooldown, swap_every = 40, 10
    events: list[Any] = []

    async def main(world: ad.World) -> tuple[list[tuple[int, int]], int]:
        model, optimizer = build(world.rank)
        applied = []
        policy = ReplicaAveragingPolicy(
            model,
            optimizer,
            replica_size=2,
            average_every=swap_every,
            swap_every=swap_every,
            threshold=1e9,
            cooldown=cooldown,
            on_event=events.append,
        )
        async with policy:
            for step in range(300):
                await world.sleep(0.01)
                info = await policy.step(float(world.rank))
                if info:
                    applied.append((step, info.staleness_steps))
        return applied, policy.statistics().iteration

    applied, iteration = ad.simulate(main, ranks=4, seed=1).results[0]
    averages = [event for event in events if isinstance(event, AverageApplied)]
    snapshots = [event for event in events if isinstance(event, SnapshotTaken)]
    steps = [step for step, _ in applied]
    assert iteration == 300
    assert len(steps) >= 4 and [event.iteration for event in averages] == steps
    assert all((event.iteration + 1) % swap_every == 0 for event in snapshots)
    gaps = [after - before for before, after in itertools.pairwise(steps)]
    assert all(cooldown - swap_every <= gap <= cooldown + 3 * swap_every for gap in gaps)
    assert {staleness for _, staleness in applied} <= {0, swap_every}


def test_a_rank_of_an_interrupted_policy_ends_with_its_replica() -> None:
    """The final evaluation of such a rank fails without its replica, which must not end the other replicas."""

    async def main(world: ad.World) -> frozenset[int]:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        async with ReplicaAveragingPolicy(model, optimizer, replica_size=2, average_every=1) as policy:
            with contextlib.suppress(ad.RankLostError):
                for _ in range(20):
                    await world.sleep(0.1)
                    await policy.step(loss=1.0)
        return world.services.shared(ReplicaMates).ranks

    assert simulate(main, ranks=4, seed=1, faults=[Kill(1, at_s=0.55)]).results[0] == {1}
