"""Runs a population for very long, with kills, stalls and slow ranks, and looks at whether its memory grows.

Everything that a rank opens and closes in the life of a long job is opened and closed once in each phase: policies of
each kind, groups, channels, a replay buffer. One rank after the other is slow, so the coordinator's task is handed on
and on, and one is stalled in each phase. In the first half of the run half of the ranks are killed, one after the
other, rank 0 first: a simulated rank that was killed stays away. In the second half equal things happen in all phases,
so what has been kept from one look to the next is kept for good.

A look comes at the end of a phase, when all ranks sleep. Objects and blocks of memory are counted, and do not depend on
the machine; of the resident memory this much is asked that it stays within a few MiB.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from unittest import mock

import torch
from torch import nn

import asyncdist as ad
from asyncdist.messaging import demultiplexer
from asyncdist.simulation import Compute, Kill, Stall, simulate
from protocols import (
    AsyncSelectiveAveragingPolicy,
    AverageAllPolicy,
    OneSidedSelectiveAveragingPolicy,
    ReplayBuffer,
    serve_replay_buffer,
)
from protocols.joining import board

RANK_COUNT: Final = 6
KILLED: Final = (0, 3, 1)
#: Of each phase, after the training with selective averaging: the other things, and waiting for each other.
REST_S: Final = 6.0
STEP_S: Final = 0.02
SLOW_STEP_S: Final = 0.7
SLOW_STEP_COUNT: Final = 3
#: By how much the last quarter's median may be above that of the third. A channel kept by each rank in each phase comes
#: to 240 objects and 1,100 blocks in 16 phases. The simulator forgets ended generators by the hundred.
GROWTH_MAX: Final = {"objects": 150, "blocks": 600, "resident_nbytes": 8 << 20}


@dataclass(frozen=True, slots=True)
class Note:
    """Any message of a user."""

    text: str


@dataclass(frozen=True, slots=True)
class Look:
    """What one look has found.

    Attributes:
        phase: from 0.
        steps: of all ranks together, since the beginning.
        blocks: of memory that Python has given out, for objects of any kind.
        objects: that the garbage collector knows.
        resident_nbytes: memory of the process.
    """

    phase: int
    steps: int
    blocks: int
    objects: int
    resident_nbytes: int


@dataclass(slots=True)
class Watch:
    """What the ranks share: the steps that they have made, and what was found at the ends of phases."""

    on_look: Callable[[Look], object] = lambda _: None
    steps: int = 0
    looks: list[Look] = field(default_factory=list)

    def look(self, phase: int) -> None:
        """Count what lives now, without the bounded caches of functions."""
        for cached in [each for each in gc.get_objects() if type(each) is functools._lru_cache_wrapper]:
            if cached.__module__.startswith(("asyncdist.", "protocols.")):
                cached.cache_clear()
        gc.collect()
        look = Look(phase, self.steps, sys.getallocatedblocks(), len(gc.get_objects()), _resident_nbytes())
        self.looks.append(look)
        self.on_look(look)


def _resident_nbytes() -> int:
    """Return the memory of this process; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    except FileNotFoundError:
        return 0


def run(
    phase_count: int, *, train_s: float = 2.0, seed: int = 0, on_look: Callable[[Look], object] = lambda _: None
) -> list[Look]:
    """Simulate so many phases, each with training for ``train_s``; return what was found at the end of each."""
    watch = Watch(on_look)
    phase_s = train_s + REST_S
    kill_every = max(1, (phase_count // 2 - 1) // len(KILLED))
    kills = [Kill(rank, phase_s * (1 + nth * kill_every) + 0.4 * train_s) for nth, rank in enumerate(KILLED)]
    # Of the ranks that live to the end, each in its turn.
    survivors = [rank for rank in range(RANK_COUNT) if rank not in KILLED]
    stalls = [
        Stall(survivors[phase % len(survivors)], phase_s * phase + 0.6 * train_s, 0.5) for phase in range(phase_count)
    ]
    with _early_bounds():
        report = simulate(
            _live,
            watch,
            phase_count,
            train_s,
            ranks=RANK_COUNT,
            seed=seed,
            faults=[*kills, *stalls],
            compute=Compute(step_s=STEP_S),
            strict=True,
        )
    report.value()
    report.check_faults()
    return watch.looks


@contextlib.contextmanager
def _early_bounds() -> Iterator[None]:
    """Let what is kept up to a bound reach it in a few phases: a run of weeks does."""
    bounds = ((demultiplexer, "ANSWERING_COUNT_MAX"), (demultiplexer, "CLOSED_SCOPE_COUNT_MAX"))
    with contextlib.ExitStack() as stack:
        for module, name in (*bounds, (board, "LEFT_COUNT_MAX")):
            stack.enter_context(mock.patch.object(module, name, 3))
        yield


def check_flat(looks: Sequence[Look]) -> None:
    """Raise AssertionError where memory has grown between the third and the last quarter of a run."""
    third, last = looks[len(looks) // 2 : len(looks) * 3 // 4], looks[len(looks) * 3 // 4 :]
    for what, allowed in GROWTH_MAX.items():
        before, after = (statistics.median(getattr(look, what) for look in part) for part in (third, last))
        assert after - before <= allowed, (
            f"{what} have grown from {before:,.0f} to {after:,.0f} in {len(last)} phases of a run of {len(looks)}; "
            f"allowed: {allowed:,.0f} more"
        )


async def _live(world: ad.World, watch: Watch, phase_count: int, train_s: float) -> None:
    model = nn.Linear(8, 8)
    for phase in range(phase_count):
        begins_at = phase * (train_s + REST_S)
        await asyncio.sleep(max(0.0, begins_at - world.time()))
        await _train(world, model, watch, phase, until_s=begins_at + train_s)
        if world.rank == world.size - 1:
            await asyncio.sleep(begins_at + train_s + 0.9 * REST_S - world.time())
            watch.look(phase)


def _compute() -> None:
    """Block the loop, as a long step of training does."""
    time.sleep(SLOW_STEP_S)


async def _train(world: ad.World, model: nn.Module, watch: Watch, phase: int, *, until_s: float) -> None:
    """Open, use and close one thing of each kind."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    group = await ad.surviving_group()
    async with AsyncSelectiveAveragingPolicy(
        model, optimizer, average_every=5, replacement_ratio=0.25, grace_s=0.05, group=group
    ) as selective:
        step = 0
        while world.time() < until_s:
            if step // SLOW_STEP_COUNT == world.rank:
                _compute()
            await selective.step(float((world.rank + phase) % world.size))
            step += 1
    watch.steps += step
    await group.free()
    group = await ad.surviving_group()
    async with AverageAllPolicy(model, optimizer, average_every=2, group=group) as together:
        for _ in range(4):
            await together.step()
    async with OneSidedSelectiveAveragingPolicy(model, optimizer, average_every=2, group=group) as one_sided:
        for _ in range(10):
            await one_sided.step(float(world.rank))
    watch.steps += 14
    channel = world.channel(Note, tag=100)
    await channel.send(Note(f"phase {phase}"), world.rank)
    await channel.receive()
    channel.close()
    server = group.ranks[-1]
    serving = world.spawn(serve_replay_buffer(group.ranks, capacity=50)) if world.rank == server else None
    async with ReplayBuffer(server) as buffer:
        await buffer.add(torch.full((5, 3), float(phase)))
        await buffer.sample(2)
    if serving is not None:
        await serving
    await group.free()
