"""Contains the programs of ``launched/test_one_sided.py``, which one job runs in turn; each rank reports.

No program depends on speed: it continues until the ranks that it is about have seen enough.
"""

from __future__ import annotations

import gc
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from scripts.one_sided import Ledger
from scripts.population import Mixed, State, clone_state, equal_states, flat_state, identity, sgd, values
from support.mpi import report

import asyncdist as ad
from asyncdist.collectives import one_sided
from asyncdist.collectives.one_sided import (
    OutdatedError,
    StreamedWindow,
    VersionedWindow,
    VersionRecord,
    open_versioned_window,
)
from protocols import OneSidedSelectiveAveragingPolicy

LIMIT_S = 90.0
#: Large enough for a copy to be overtaken by the writer.
SLOT_NBYTES = 4 << 20
CHUNK_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Done:
    """Message from rank to rank: the sender has seen enough."""


def touch(path: Path) -> None:
    path.touch()


class Everybody:
    """Tracks whether some rank has not seen enough yet; until then all ranks continue, as donors for that rank."""

    def __init__(self, world: ad.World) -> None:
        self._world = world
        self._channel = world.channel(Done, tag=43)
        self._missing = world.size
        self._told = False

    def goes_on(self, *, enough: bool) -> bool:
        if enough and not self._told:
            self._told = True
            for rank in range(self._world.size):
                self._channel.send_nowait(Done(), rank)
        while self._missing and self._channel.receive_nowait() is not None:
            self._missing -= 1
        if not self._missing:
            self._channel.close()
        return self._missing > 0


def wait_for(paths: list[Path]) -> bool:
    """Wait until all of these files exist. Blocks, as training does."""
    deadline = time.monotonic() + LIMIT_S
    while not all(path.exists() for path in paths):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def plain(state: State) -> dict[str, list[float]]:
    return {name: tensor.tolist() for name, tensor in state.items()}


async def walk(world: ad.World) -> dict[str, Any]:
    """Train with random weights in every step; the test recomputes everything that was published and applied."""
    generator = torch.Generator().manual_seed(world.rank)
    model, ledger = Mixed(float(world.rank)), Ledger()
    objects = identity(model)
    async with OneSidedSelectiveAveragingPolicy(
        model,
        sgd(model),
        average_every=2,
        age_range=(4, 9),
        donor_ratio=0.75,
        averaging_strategy="weighted_mean",
        momentum=0.25,
        on_event=ledger.listener(world.rank, model),
    ) as policy:
        everybody = Everybody(world)
        while everybody.goes_on(enough=policy.statistics().num_replacements >= 4):
            for parameter in model.parameters():
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
            ledger.before[world.rank] = flat_state(model)
            ledger.stepping.add(world.rank)
            await policy.step(float((world.rank * 7 + policy.iteration) % 5))
            ledger.stepping.discard(world.rank)
        kind = type(policy._exposure).__name__
        is_followed = isinstance(policy._exposure, StreamedWindow) and policy._exposure._is_followed
    assert identity(model) == objects
    await ad.barrier()
    return {
        "exposure": kind,
        "is followed": is_followed,
        "snapshots": [(version, plain(state)) for (_, version), state in ledger.snapshots.items()],
        "applied": [
            (
                e.event.round,
                e.event.donors,
                e.event.weights,
                e.event.best,
                e.event.versions,
                plain(e.state),
                plain(e.before or {}),
            )
            for e in ledger.applied
        ],
    }


async def apart(world: ad.World) -> dict[str, Any]:
    """Do the same as if the ranks were on several hosts: no memory is shared, and the owners answer."""
    with mock.patch.object(one_sided, "SharedMemory", side_effect=OSError("another host")):
        return await walk(world)


async def torn(world: ad.World) -> dict[str, Any]:
    """Rank 0 publishes all the time; the others copy its slots all the time, and never see two versions in one copy."""
    scope = world.services.next_scope(world.group.ranks, "torn")
    exposure = await open_versioned_window(
        world.services,
        world.agreements,
        world.group,
        SLOT_NBYTES,
        scope=scope,
        chunk_nbytes=CHUNK_NBYTES,
    )
    done = world.channel(Done, tag=41)
    counts = {"whole": 0, "torn": 0, "mixed": 0}
    if world.rank == 0:
        left = world.size - 1
        while left:
            for _ in range(5):
                _publish(exposure)
            await world.safe_point()
            while done.receive_nowait() is not None:
                left -= 1
    else:
        deadline = time.monotonic() + LIMIT_S
        while counts["whole"] + counts["torn"] < 300 or not counts["whole"]:
            record = await exposure.published_by(0)
            if record is not None:
                counts[await _copy(exposure, record)] += 1
            assert time.monotonic() < deadline, counts
            await world.safe_point()
        await done.send(Done(), 0)
    await ad.barrier()
    slots = []
    if world.rank:
        newest = await exposure.published_by(0)
        assert newest is not None
        before = VersionRecord(newest.version - 1, newest.iteration - 1, newest.metric)
        slots = [await _copy(exposure, record) for record in (newest, before)]
    await ad.barrier()
    await exposure.close(world.time() + 10.0)
    done.close()
    return {**counts, "both slots": slots}


def _publish(exposure: VersionedWindow) -> None:
    memory = exposure.begin()
    if memory is not None:
        memory.view(torch.int64).fill_(exposure.version + 1)
        exposure.publish(exposure.version + 1, 0.5)


async def _copy(exposure: VersionedWindow, record: VersionRecord) -> str:
    buffer = torch.empty(SLOT_NBYTES, dtype=torch.uint8)
    view = memoryview(buffer.numpy())
    targets = [view[start : start + CHUNK_NBYTES] for start in range(0, SLOT_NBYTES, CHUNK_NBYTES)]
    try:
        await exposure.read(0, record, targets, lambda index: None, deadline=float("inf"))
    except OutdatedError:
        return "torn"
    return "whole" if bool((buffer.view(torch.int64) == record.version).all()) else "mixed"


async def asleep(world: ad.World, folder: str) -> dict[str, Any]:
    """The last rank computes and never enters MPI until the others have read its memory, which needs no help of it."""
    scope = world.services.next_scope(world.group.ranks, "asleep")
    exposure = await open_versioned_window(
        world.services,
        world.agreements,
        world.group,
        SLOT_NBYTES,
        scope=scope,
        chunk_nbytes=CHUNK_NBYTES,
    )
    _publish(exposure)
    await ad.barrier()
    owner, helped = world.size - 1, False
    if world.rank == owner:
        helped = not wait_for([Path(folder, f"read by {rank}") for rank in range(owner)])
    else:
        record = await exposure.published_by(owner)
        assert record is not None
        target = memoryview(bytearray(CHUNK_NBYTES))
        await exposure.read(owner, record, [target], lambda index: None, deadline=float("inf"))
        touch(Path(folder, f"read by {world.rank}"))
    await ad.barrier()
    await exposure.close(None)
    return {"helped": helped}


def mapped_count() -> int:
    """Return the number of shared memories that this process maps."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("/memfd:asyncdist-")


async def again(world: ad.World) -> dict[str, Any]:
    """Run one policy after another: memory that all ranks have left is freed, even if its group was freed earlier."""
    before, counts = mapped_count(), []  # the doorbells are mapped throughout
    for i in range(4):
        model = Mixed(float(world.rank))
        group = await ad.new_group(range(world.size)) if i < 3 else world.group
        async with OneSidedSelectiveAveragingPolicy(
            model, sgd(model), average_every=1, age_range=(2, 2), group=group
        ) as policy:
            everybody = Everybody(world)
            while everybody.goes_on(enough=policy.statistics().num_replacements > 0):
                await policy.step(1.0)
        if i < 3:
            await group.free()
        await ad.barrier()
        counts.append(mapped_count() - before)
        await ad.barrier()
    return {"mapped": counts}


async def group(world: ad.World) -> dict[str, Any]:
    """Run a policy on some ranks: the others are unaffected, and averages contain only the policy's ranks."""
    model = Mixed(float(world.rank))
    start, seen = clone_state(model), []
    ranks = [world.size - 1, 0]
    if world.rank in ranks:
        async with OneSidedSelectiveAveragingPolicy(
            model,
            sgd(model),
            average_every=2,
            replacement_mode="threshold",
            threshold_metric=0.5,
            donor_count=5,
            group=await ad.new_group(ranks),
        ) as policy:
            while len(seen) < 3 and (world.rank == 0 or policy.iteration < 20):
                info = await policy.step(float(world.rank))
                seen += [info.donors] if info else []
            await world.collectives.barrier(policy._group)
    await ad.barrier()
    return {
        "donors": seen,
        "floating": sorted(values(model, floating=True)),
        "same": equal_states(clone_state(model), start),
    }


async def leaver(world: ad.World) -> dict[str, Any]:
    """The last rank leaves and returns from main; its memory remains as long as another rank may read it."""
    model = Mixed(float(world.rank))
    seen: list[tuple[int, ...]] = []
    async with OneSidedSelectiveAveragingPolicy(
        model, sgd(model), average_every=2, age_range=(5, 5), donor_ratio=1.0
    ) as policy:
        if world.rank == world.size - 1:
            for _ in range(10):
                await policy.step(1.0)
        else:
            last = tuple(rank for rank in range(world.size - 1) if rank != world.rank)
            deadline = time.monotonic() + LIMIT_S
            while seen[-2:] != [last, last]:
                info = await policy.step(1.0)
                seen += [info.donors] if info else []
                assert time.monotonic() < deadline, seen
            await _meet(world, world.size - 1)
    return {"donors": seen}


async def _meet(world: ad.World, count: int) -> None:
    """Enter a barrier of the first ``count`` ranks, whose policy must live until all have seen enough."""
    channel = world.channel(Done, tag=42)
    for rank in range(count):
        if rank != world.rank:
            await channel.send(Done(), rank)
    for _ in range(count - 1):
        await channel.receive(timeout_s=LIMIT_S)
    channel.close()


async def main(world: ad.World, folder: str) -> None:
    told: dict[str, Any] = {}
    shares_memory = world.transport_name == "mpi"
    for story in (walk, apart, torn, again, group) if shares_memory else (walk, group):
        told[story.__name__] = await story(world)
        report(world.rank, told)
    if shares_memory:
        told["asleep"] = await asleep(world, folder)
        report(world.rank, told)
    told["leaver"] = await leaver(world)
    report(world.rank, told)


if __name__ == "__main__":
    ad.run(main, sys.argv[1], strict=True)
