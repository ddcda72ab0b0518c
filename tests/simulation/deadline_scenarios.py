"""Scenarios in which an awaited event has happened, and the rank's deadline has passed, before the rank checks either.

Every rank computes, in another task, until just after its own deadlines (``Compute.overrun_probability``). It gives up
at every moment of a start or of an average, in particular between the verdict and its receipt. All ranks must carry
out their agreement.

- ``starts``: groups are made under deadlines: all members make a group, or no member does.
- ``averages``: synchronous averages under deadlines: every round has all members, in step, with equal weights.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from unittest import mock

import torch
from torch import nn

import asyncdist as ad
from asyncdist.collectives.group_ledger import GroupLedger
from asyncdist.simulation import Compute, Fault, LogNormal, SimReport, simulate
from protocols import AverageAllPolicy, AverageApplied, PolicyEvent

STEP_S: Final = 1e-3
#: No run takes longer in virtual seconds, unless a wait in it never ends.
LIMIT_S: Final = 20.0
COMPUTE: Final = Compute(step_s=LogNormal(STEP_S, 0.5), overrun_probability=0.1)
#: Deadlines in steps: from about the duration of an agreement to far longer.
_DEADLINES: Final = (3.0, 10.0, 30.0, 100.0, 300.0)


async def _train(world: ad.World) -> None:
    """Keep the rank busy most of the time."""
    while True:
        await world.safe_point()


async def _training(world: ad.World, work: Callable[[], Any]) -> Any:
    training = asyncio.create_task(_train(world))
    try:
        return await work()
    finally:
        training.cancel()


# -- groups -----------------------------------------------------------------------------------------------------------


@dataclass
class Made:
    """The ranks that have made the group with this tag, these members and this serial number."""

    entered: dict[tuple[int, tuple[int, ...], int], list[int]] = field(default_factory=dict)
    made_count: int = 0
    late_count: int = 0


async def _make_groups(world: ad.World, made: Made, seed: int) -> None:
    rng = random.Random(f"{seed} starts {world.rank}")
    members = tuple(range(world.size))

    async def work() -> None:
        for _ in range(10):
            try:
                async with asyncio.timeout(rng.choice(_DEADLINES) * STEP_S):
                    await world.new_group(members)
                made.made_count += 1
            except TimeoutError:
                made.late_count += 1
            except (ad.RemoteError, ad.StartTimeoutError):
                pass  # another member has given up
            except ad.ClosedError:
                return  # another member has made its last attempt

    await _training(world, work)


def starts(seed: int, faults: Sequence[Fault] | None = None) -> SimReport:
    """Run one seed; AssertionError if only some members have begun a group."""
    return run_starts(seed, faults)[0]


def run_starts(seed: int, faults: Sequence[Fault] | None = None) -> tuple[SimReport, Made]:
    """Run one seed, and return the observations."""
    made = Made()
    ranks = random.Random(f"{seed} starts").randint(2, 4)
    open_group = GroupLedger.open

    def watched(
        ledger: GroupLedger, members: tuple[int, ...], rank: int, tag: int, serial: int, *args: Any, **options: Any
    ) -> Any:
        made.entered.setdefault((tag, members, serial), []).append(rank)
        return open_group(ledger, members, rank, tag, serial, *args, **options)

    with mock.patch.object(GroupLedger, "open", watched):
        report = simulate(
            _make_groups, made, seed, ranks=ranks, seed=seed, compute=COMPUTE, faults=faults or (), until_s=LIMIT_S
        )
    for (tag, members, _), entered in made.entered.items():
        assert sorted(entered) == list(members), (
            f"seed {seed}: only {entered} of {members} joined the group of tag {tag}"
        )
    _check_ends(seed, report)
    return report, made


def _check_ends(seed: int, report: SimReport) -> None:
    for rank, result in enumerate(report.results):
        if isinstance(result, BaseException):
            raise AssertionError(f"seed {seed}: rank {rank} ended by {result!r}") from result
        assert result is not None or report.virtual_time_s < LIMIT_S, f"seed {seed}: rank {rank} waits forever"


# -- averages ---------------------------------------------------------------------------------------------------------


@dataclass
class Averaged:
    """The weights of each rank after each round."""

    weights: dict[int, dict[int, float]] = field(default_factory=dict)
    late_count: int = 0


_ROUND_COUNT: Final = 4
#: Number of steps with a deadline; later steps have none, so that the last rounds must take place.
_HASTY_COUNT: Final = 12


async def _average(world: ad.World, averaged: Averaged, seed: int) -> int:
    rng = random.Random(f"{seed} averages {world.rank}")
    model = nn.Linear(1, 1, bias=False)
    weight = model.weight.data
    weight.fill_(float(world.rank))
    applied_count = 0

    def on_event(event: PolicyEvent) -> None:
        nonlocal applied_count
        if isinstance(event, AverageApplied):
            applied_count += 1
            averaged.weights.setdefault(event.round, {})[world.rank] = weight.item()

    async def step(policy: AverageAllPolicy, number: int) -> None:
        try:
            async with asyncio.timeout(rng.choice(_DEADLINES) * STEP_S if number < _HASTY_COUNT else None):
                await policy.step()
        except TimeoutError:
            averaged.late_count += 1
        except ad.RemoteError:
            pass  # another member has given up

    async def work() -> int:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        async with AverageAllPolicy(model, optimizer, average_every=1, on_event=on_event) as policy:
            for number in itertools.count():
                if applied_count == _ROUND_COUNT:
                    break
                weight.add_(float(rng.randint(-3, 3)))
                await step(policy, number)
        return applied_count

    result: int = await _training(world, work)
    return result


def averages(seed: int, faults: Sequence[Fault] | None = None) -> SimReport:
    """Run one seed; AssertionError if a round lacks a member, or some rank waits forever."""
    return run_averages(seed, faults)[0]


def run_averages(seed: int, faults: Sequence[Fault] | None = None) -> tuple[SimReport, Averaged]:
    """Run one seed, and return the observations."""
    averaged = Averaged()
    ranks = random.Random(f"{seed} averages").randint(2, 4)
    report = simulate(
        _average, averaged, seed, ranks=ranks, seed=seed, compute=COMPUTE, faults=faults or (), until_s=LIMIT_S
    )
    for number, weights in averaged.weights.items():
        assert len(weights) == ranks, f"seed {seed}: only ranks {sorted(weights)} took part in average {number}"
        assert len(set(weights.values())) == 1, (
            f"seed {seed}: the ranks got different results of average {number}: {weights}"
        )
    _check_ends(seed, report)
    return report, averaged
