"""Compares the simulator with reality: a coroutine gives equal weights in virtual time, in one process and under MPI.

The program's decisions do not depend on timing: metrics follow from ranks, every rank must have reported, and weights
do not change between the report and the last replacement. So every bit of the result can be compared.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from scripts.population import Mixed
from support.mpi import run_source
from support.seeds import in_ci

import asyncdist as ad
from asyncdist.simulation import (
    Compute,
    Delay,
    Exponential,
    Link,
    Network,
    Partition,
    SlowLink,
    SlowRank,
    Stall,
    simulate,
)
from protocols import AsyncSelectiveAveragingPolicy

STRATEGIES = ("mean", "weighted_mean", "best_only")
EVERY = 4


@dataclass(frozen=True, slots=True)
class Replaced:
    """Message to all ranks: the sender has its new weights."""


def train_step(model: Mixed, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    """Train with a seed for each step, because under ``run_local`` all ranks share torch's random state."""
    torch.manual_seed(1000 * rank + step)
    hidden = model.norm(model.embed(torch.randn(8, 3))) + model.head(torch.rand(8, 3))
    loss = model.wide(hidden.double()).square().mean() + torch.rand(())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    model.counts += torch.randint(5, (3,), dtype=torch.int32)
    model.flags[step % 2] = bool((rank + step) % 3)


def digest(model: Mixed) -> str:
    """Return a digest of every byte of the state."""
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist()))
    return found.hexdigest()


async def main(world: ad.World) -> list[str]:
    """For each averaging strategy: train, make one round in which half of the ranks are replaced, and train again."""
    torch.manual_seed(world.rank)
    model = Mixed()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    seen = [digest(model)]
    for number, strategy in enumerate(STRATEGIES):
        await average_once(world, model, optimizer, strategy, 100 * number)
        seen.append(digest(model))
    return seen


async def average_once(
    world: ad.World, model: Mixed, optimizer: torch.optim.Optimizer, strategy: Any, first_step: int
) -> None:
    replaced = world.channel(Replaced, tag=40)
    missing = world.size // 2  # the ranks with the lowest metrics, which are the lowest ranks
    async with AsyncSelectiveAveragingPolicy(
        model,
        optimizer,
        average_every=EVERY,
        replacement_ratio=0.5,
        averaging_strategy=strategy,
        momentum=0.25,
        threshold=0.0,  # one round
        cooldown=10**9,  # and no second round
        quorum=1.0,
        grace_s=60.0,  # slow ranks have roles, too
        round_timeout_s=60.0,
        name=strategy,
    ) as policy:
        for step in range(EVERY):
            train_step(model, optimizer, world.rank, first_step + step)
            assert not await policy.step(world.rank - world.size)
        await ad.barrier()
        while missing:  # no rank's weights change except by the round
            if await policy.step(world.rank - world.size):
                assert world.rank < world.size // 2
                for dest in range(world.size):
                    await replaced.send(Replaced(), dest)
            while replaced.receive_nowait() is not None:
                missing -= 1
            await world.sleep(0.002)  # ranks share cores
        await ad.barrier()
        for step in range(EVERY, EVERY + 2):
            train_step(model, optimizer, world.rank, first_step + step)
    replaced.close()


@functools.cache
def in_process(ranks: int) -> tuple[list[str], ...]:
    return tuple(ad.run_local(main, ranks=ranks, strict=True))


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_scenario_averages(ranks: int) -> None:
    """Without averages, equal weights would prove little."""
    digests = in_process(ranks)
    assert len({tuple(seen) for seen in digests}) == ranks
    assert len({entry for seen in digests for entry in seen}) == ranks * (1 + len(STRATEGIES))
    alone = ad.run_local(main, ranks=1)[0]
    assert alone[0] == digests[0][0]
    assert not set(alone[1:]) & {entry for seen in digests for entry in seen}, (
        "training alone gives the same weights, so the comparison proves nothing"
    )


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("seed", in_ci(range(5), 0, 1))
def test_simulated_weights_are_those_of_one_process(ranks: int, seed: int) -> None:
    report = simulate(main, ranks=ranks, seed=seed, strict=True)
    report.value()
    assert report.results == in_process(ranks)


@pytest.mark.parametrize("seed", range(3))
def test_also_in_bad_weather(seed: int) -> None:
    report = simulate(
        main,
        ranks=4,
        seed=seed,
        strict=True,
        network=Network(link=Link(latency_s=Exponential(1e-3), bandwidth_nbytes_per_s=1e6)),
        compute=Compute(step_s=Exponential(1e-3), factors={2: 10.0}),
        faults=[
            Stall(1, at_s=0.01, duration_s=0.5),
            SlowRank(3, at_s=0.02, factor=20.0),
            SlowLink(2, 0, at_s=0.0, factor=50.0),
            Partition((0, 1), at_s=0.03, until_s=0.6),
            Delay(3, 0, number=4, duration_s=0.3),
        ],
    )
    report.value()
    report.check_faults()
    assert report.results == in_process(4)


@pytest.mark.long
@pytest.mark.mpi
def test_weights_under_mpi_are_those_of_the_simulation() -> None:
    ranks = 4
    source = """
        import asyncdist as ad
        from launched.test_reality import main
        from support.mpi import report

        async def tell(world):
            report(world.rank, await main(world))

        ad.run(tell, transport="mpi", strict=True)
    """
    result = run_source(ranks, source).check()
    simulated = simulate(main, ranks=ranks, seed=1, strict=True)
    simulated.value()
    assert [result.reports[rank] for rank in range(ranks)] == list(simulated.results)
