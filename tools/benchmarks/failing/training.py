"""Trains ranks that fail: with selective averaging, alone, and all together.

Training with DiLoCo and its variants is in :mod:`failing.diloco`.
"""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

from harness import optimizer_of
from torch import nn

import asyncdist as ad
from failing.work import AVERAGE_EVERY, START_S, STEP_S, Job, Work
from protocols import AsyncSelectiveAveragingPolicy, AverageAllPolicy, AverageApplied, PolicyEvent, SnapshotTaken


async def until_start(world: ad.World) -> None:
    """Wait until training begins, on all ranks at once."""
    assert world.time() < START_S, f"the start took {world.time():g} s of virtual time"
    await asyncio.sleep(START_S - world.time())


async def train_selectively(world: ad.World, job: Job) -> None:
    """Run one process of a rank, with selective averaging."""
    work, student = job.begin(world)
    first = 0

    def note(event: PolicyEvent) -> None:
        if isinstance(event, SnapshotTaken):
            work.given = (event.round, event.iteration + 1 - first)
        elif isinstance(event, AverageApplied):
            work.kept = event.iteration + 1 - first
            for other in itertools.chain.from_iterable(job.lives[donor] for donor in event.donors):
                if other.given[0] == event.round:
                    other.kept = max(other.kept, other.given[1])

    policy = AsyncSelectiveAveragingPolicy(
        student.model, student.optimizer, average_every=AVERAGE_EVERY, replacement_ratio=0.25, on_event=note
    )
    try:
        async with policy:
            first = policy.iteration  # a new process continues its donor's count
            if not world.incarnation:
                await until_start(world)
            while world.time() < job.ends_at_s - STEP_S / 2:
                student.step()
                await policy.step(student.score())
                work.made += 1
            work.offered = student.score(), student.loss()
            await asyncio.sleep(max(0.0, job.ends_at_s - world.time()))
    except (ad.ClosedError, ad.RankLostError, ad.StartTimeoutError):
        if world.time() < job.ends_at_s:
            raise  # after the end, other ranks leave before this rank is admitted


async def train_alone(world: ad.World, job: Job) -> None:
    """Run one process of a rank that trains alone, with its own checkpoints."""
    work, student = job.begin(world)
    model, optimizer, place = student.model, student.optimizer, job.place / str(world.rank)
    alone = await ad.new_group([world.rank])
    if not world.incarnation:
        await until_start(world)
    elif any(earlier.kept for earlier in job.lives[world.rank]):
        await ad.load_population(place, model, optimizer, group=alone)
    while world.time() < job.ends_at_s - STEP_S / 2:
        await world.safe_point()
        work.made += 1
        if work.made % job.save_every == 0:
            made = work.made
            await ad.save_population(place, model, optimizer, keep=2, group=alone)
            work.kept = made
    await asyncio.sleep(max(0.0, job.ends_at_s - world.time()))


async def train_together(world: ad.World, works: list[Work], place: Path, save_every: int) -> None:
    """Run one rank of a job that ends when any rank dies."""
    work = works[world.rank]
    model = nn.Linear(4, 4)
    optimizer = optimizer_of(model)
    policy = AverageAllPolicy(model, optimizer, average_every=AVERAGE_EVERY)
    if work.kept:
        loaded = await ad.load_population(place, model, optimizer, policy=policy)
        work.made = work.kept = loaded.extra
    async with policy:
        await until_start(world)
        while True:
            await policy.step()
            work.made += 1
            if work.made % save_every == 0:
                made = work.made
                await ad.save_population(place, model, optimizer, policy=policy, extra=made, keep=2)
                work.kept = made
