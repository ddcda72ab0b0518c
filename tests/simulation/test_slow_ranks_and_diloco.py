"""Tests the step rate of ranks when one rank is 100 times slower, by counting steps in equal virtual time.

The ranks compute: while they are busy, no message is handled. So a slow leader also answers slowly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import asyncdist as ad
from asyncdist.simulation import Compute, simulate
from protocols import AsyncDiLoCoPolicy, DiLoCoPolicy

RANKS, STEP_S, TIME_S, SLOWER = 4, 0.01, 10.0, 100.0
MAKE: dict[str, Callable[..., Any]] = {
    "none": lambda *_, **__: nullcontext(),
    "async": AsyncDiLoCoPolicy,
    "diloco, skip": functools.partial(DiLoCoPolicy, late="skip"),
    "diloco, wait": DiLoCoPolicy,
}


async def steps_and_averages(world: ad.World, name: str) -> tuple[int, int]:
    """Return the numbers of steps and of averages of this rank in a fixed time."""
    model = torch.nn.Linear(40, 40)
    torch.nn.init.constant_(model.weight, 1.0)
    torch.nn.init.constant_(model.bias, 0.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step_count = average_count = 0
    async with MAKE[name](model, optimizer, average_every=10, drain_timeout_s=1.0) as policy:
        end = world.time() + TIME_S
        while world.time() < end:
            info = await (policy.step() if policy else world.safe_point())
            step_count += 1
            average_count += bool(info)
    return step_count, average_count


def counts(name: str, slow: int) -> list[tuple[int, int]]:
    """Return each rank's numbers of steps and averages."""
    compute = Compute(step_s=STEP_S, factors={slow: SLOWER})
    return list(simulate(steps_and_averages, name, ranks=RANKS, compute=compute).results)


@pytest.mark.parametrize("slow", [0, 3], ids=["leader", "last"])
def test_no_rank_waits_for_one_that_is_100_times_slower(slow: int) -> None:
    others = [rank for rank in range(RANKS) if rank != slow]
    alone, skipping, waiting, asynchronous = (
        counts(name, slow) for name in ("none", "diloco, skip", "diloco, wait", "async")
    )
    for rank in others:
        assert alone[rank][0] >= 0.98 * TIME_S / STEP_S
        assert skipping[rank][0] >= 0.98 * alone[rank][0]
        assert asynchronous[rank][0] >= 0.98 * alone[rank][0]
        assert waiting[rank][0] < 0.2 * alone[rank][0], (
            "without the option, the others must be slower, otherwise the test tests nothing"
        )
        assert skipping[rank][1] <= 2 * alone[slow][0], "rounds must have the slow rank's pace"
        # A slow leader answers only at its own safe points; with a slow worker, each contribution is answered.
        assert asynchronous[rank][1] >= (0.9 * alone[rank][0] / 10 if slow else 1)
