"""Runs a population for a very long time, with kills, stalls and slow ranks, and checks whether its memory grows.

In each phase, everything that a rank opens and closes in a long job is opened and closed once: policies of each kind,
groups, channels, a replay buffer. The ranks are slow in turn, so the coordinator's task is handed over again and again,
and one rank is stalled in each phase. In the first half of the run half of the ranks are killed in turn, rank 0 first;
a killed simulated rank does not return. In the second half all phases are equal, so memory that grows from one
measurement to the next is leaked.

A measurement takes place at the end of a phase, when all ranks sleep. Objects and blocks of memory are counted, which
does not depend on the machine; the resident memory must only stay within a few MiB.
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
from protocols.joining import dispatcher

RANK_COUNT: Final = 6
KILLED: Final = (0, 3, 1)
#: Times in each phase, after selective averaging: for the other operations, and for waiting for each other.
REST_S: Final = 6.0
STEP_S: Final = 0.02
SLOW_STEP_S: Final = 0.7
SLOW_STEP_COUNT: Final = 3
#: Largest growth of the last quarter's median over the third quarter's. A channel kept by each rank in each phase would
#: add 240 objects and 1,100 blocks in 16 phases. The simulator forgets ended generators by the hundred.
GROWTH_MAX: Final = {"objects": 150, "blocks": 600, "resident_nbytes": 8 << 20}


@dataclass(frozen=True, slots=True)
class Note:
    """Any message of a user."""

    text: str


@dataclass(frozen=True, slots=True)
class Look:
    """The results of one measurement.

    Attributes:
        phase: Number of the phase, from 0.
        steps: Number of steps of all ranks since the beginning.
        blocks: Number of blocks of memory that Python has allocated, for objects of any kind.
        objects: Number of objects that the garbage collector knows.
        resident_nbytes: Resident memory of the process in bytes.
    """

    phase: int
    steps: int
    blocks: int
    objects: int
    resident_nbytes: int


def _bounded_caches() -> list[functools._lru_cache_wrapper[object]]:
    """Return the bounded caches of asyncdist's functions. The garbage collector does not list frozen objects."""
    gc.unfreeze()
    caches = [each for each in gc.get_objects() if type(each) is functools._lru_cache_wrapper]
    gc.freeze()
    ours = [cache for cache in caches if cache.__module__.startswith(("asyncdist.", "protocols."))]
    return [cache for cache in ours if cache.cache_parameters()["maxsize"] is not None]


@dataclass(slots=True)
class Watch:
    """State shared by the ranks: the number of their steps, and the measurements at the ends of phases."""

    on_look: Callable[[Look], object] = lambda _: None
    steps: int = 0
    looks: list[Look] = field(default_factory=list)
    caches: Sequence[functools._lru_cache_wrapper[object]] = field(default_factory=_bounded_caches)

    def look(self, phase: int) -> None:
        """Count the living objects, without the bounded caches of functions."""
        for cache in self.caches:
            cache.cache_clear()
        gc.collect()
        look = Look(phase, self.steps, sys.getallocatedblocks(), len(gc.get_objects()), _resident_nbytes())
        self.looks.append(look)
        self.on_look(look)


def _resident_nbytes() -> int:
    """Return the resident memory of this process; 0 if the system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    except FileNotFoundError:
        return 0


def run(
    phase_count: int, *, train_s: float = 2.0, seed: int = 0, on_look: Callable[[Look], object] = lambda _: None
) -> list[Look]:
    """Simulate this number of phases, each with training for ``train_s``; return the measurements."""
    watch = Watch(on_look)
    phase_s = train_s + REST_S
    kill_every = max(1, (phase_count // 2 - 1) // len(KILLED))
    kills = [Kill(rank, phase_s * (1 + nth * kill_every) + 0.4 * train_s) for nth, rank in enumerate(KILLED)]
    # Ranks that live to the end, each in its turn.
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
    """Lower the bounds of bounded memory, so that a few phases reach them, as weeks of a real run would."""
    bounds = ((demultiplexer, "ANSWERING_COUNT_MAX"), (demultiplexer, "CLOSED_SCOPE_COUNT_MAX"))
    with contextlib.ExitStack() as stack:
        for module, name in (*bounds, (dispatcher, "LEFT_COUNT_MAX")):
            stack.enter_context(mock.patch.object(module, name, 3))
        yield


def check_flat(looks: Sequence[Look]) -> None:
    """Raise AssertionError if memory has grown between the third and the last quarter of a run."""
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
