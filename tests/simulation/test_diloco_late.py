"""Tests ``late="skip"``: no step waits for a straggler, and late means keep the progress since the capture."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

import asyncdist as ad
from asyncdist.simulation import Compute, SlowLink, simulate
from protocols import DiLoCoPolicy

STEP_S = 0.01


async def steps_in_ten_seconds(world: ad.World, late: str | None) -> int:
    """Return the number of steps of this rank in 10 s; rank 3 is 100 times slower. ``late`` None: without a policy."""
    model = torch.nn.Linear(40, 40)
    torch.nn.init.constant_(model.weight, 1.0)
    torch.nn.init.constant_(model.bias, 0.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    count = 0

    async def loop(policy: DiLoCoPolicy | None) -> None:
        nonlocal count
        end = world.time() + 10
        while world.time() < end:
            await asyncio.sleep(STEP_S * (100 if world.rank == 3 else 1))
            await (world.safe_point() if policy is None else policy.step())
            count += 1

    if late is None:
        await loop(None)
    else:
        options: Any = {"late": late, "drain_timeout_s": 1.0}
        async with DiLoCoPolicy(model, optimizer, average_every=10, **options) as policy:
            await loop(policy)
    return count


def test_no_step_waits_for_a_rank_that_is_100_times_slower() -> None:
    alone = simulate(steps_in_ten_seconds, None, ranks=4).results
    skipping = simulate(steps_in_ten_seconds, "skip", ranks=4).results
    waiting = simulate(steps_in_ten_seconds, "wait", ranks=4).results
    for rank in range(3):
        assert skipping[rank] >= 0.98 * alone[rank]
        assert waiting[rank] < 0.2 * alone[rank], (
            "without the option, the others must be slower, otherwise the test tests nothing"
        )


@pytest.mark.parametrize("outer", [None, torch.optim.SGD])
def test_a_late_mean_keeps_the_progress_since_the_capture(outer: Any) -> None:
    async def main(world: ad.World) -> tuple[float, float]:
        model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
        torch.nn.init.constant_(model.weight, 0.0)
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        options: Any = {"outer_optimizer": None if outer is None else lambda parameters: outer(parameters, lr=1.0)}
        progress = 0.0
        async with DiLoCoPolicy(model, optimizer, average_every=4, late="skip", **options) as policy:
            for step in range(4 if world.rank else 1000):
                await asyncio.sleep(0.5 if world.rank else 0.01)
                with torch.no_grad():
                    model.weight.add_(world.rank + 1.0)  # rank 0 captures 4, rank 1 captures 8: their mean is 6
                info = await policy.step()
                if info:
                    progress = float(step - 3)  # steps of rank 0 since its capture
                    break
        return model.weight.item(), progress

    weight, progress = simulate(main, ranks=2).results[0]
    assert progress > 10
    assert weight == 6.0 + progress


def test_fragments_of_unequal_sizes_are_captured_in_turn() -> None:
    async def main(_: ad.World) -> list[int]:
        model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Linear(1, 100_000))
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, 1.0)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        rounds = []
        options: Any = {"late": "skip", "fragments": 2, "fragment_pattern": [["0"], ["1"]], "drain_timeout_s": 1.0}
        async with DiLoCoPolicy(model, optimizer, average_every=10, **options) as policy:
            for _ in range(200):
                await asyncio.sleep(STEP_S)
                if info := await policy.step():
                    rounds.append(info.round)
            return rounds

    # On these links the large fragment takes between one and one and a half times as long as average_every steps.
    slow = [SlowLink(rank, 1 - rank, at_s=0.0, factor=1000) for rank in (0, 1)]
    for rounds in simulate(main, ranks=2, faults=slow, until_s=1000).results:
        assert len(rounds) > 25, "averaging must continue to the end"


@pytest.mark.parametrize("options", [{}, {"quorum": 2}], ids=["all", "quorum"])
def test_late_means_of_a_training_rank_arrive_soon(options: dict[str, Any]) -> None:
    """Regression: without overlap, each slice was sent in 32 chunks, 4 per step, so that a mean took 22 to 28 steps."""

    async def main(world: ad.World) -> list[int]:
        torch.manual_seed(0)
        model = torch.nn.Linear(1024, 1024)
        ages = []
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        async with DiLoCoPolicy(model, optimizer, average_every=20, late="skip", **options) as policy:
            for _ in range(70):
                info = await policy.step()
                if info:
                    ages.append(info.staleness_steps)
        return ages

    results = simulate(main, ranks=2, seed=1, compute=Compute(step_s=STEP_S), until_s=1000.0).results
    assert all(len(ages) == 3 and max(ages) <= 8 for ages in results), results
