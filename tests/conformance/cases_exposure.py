"""Cases for state that ranks expose, in one-sided memory or through the owner: `asyncdist/collectives/one_sided.py`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch

from asyncdist.collectives.groups import Group
from asyncdist.collectives.one_sided import OutdatedError, VersionedWindow, VersionRecord, open_versioned_window
from asyncdist.messaging.streams import WINDOW_COUNT
from conformance.endpoint import Endpoint

CHUNK_NBYTES = 128
#: More chunks than are in progress at once; the last chunk is shorter.
NBYTES = CHUNK_NBYTES * (WINDOW_COUNT + 2) + 40


@asynccontextmanager
async def exposed(end: Endpoint, *, nbytes: int = NBYTES, group: Group | None = None) -> AsyncIterator[VersionedWindow]:
    group = group or end.world.group
    scope = end.world.services.next_scope(group.ranks, "exposure of a case")
    exposure = await open_versioned_window(
        end.world.services,
        end.world.agreements,
        group,
        nbytes,
        scope=scope,
        chunk_nbytes=CHUNK_NBYTES,
    )
    try:
        yield exposure
    finally:
        await exposure.close(end.world.time() + 30.0)


def publish(exposure: VersionedWindow, *, metric: float = 1.0) -> bool:
    """Publish the next version, all of whose bytes are its number; return whether there was room for it."""
    memory = exposure.begin()
    if memory is None:
        return False
    version = exposure.version + 1
    memory.fill_(version % 251)
    assert exposure.publish(1000 + version, metric) == VersionRecord(version, 1000 + version, metric) or math.isnan(
        metric
    )
    return True


async def begun(end: Endpoint, exposure: VersionedWindow) -> torch.Tensor:
    """Return the memory for the next version, once the last chunk that a reader has received has left."""
    while (memory := exposure.begin()) is None:
        await end.world.safe_point()
    return memory


async def published(end: Endpoint, exposure: VersionedWindow, rank: int, version: int) -> VersionRecord:
    """Return the record of this version of ``rank`` once it is the newest known version."""
    while True:
        record = await exposure.published_by(rank)
        if record is not None and record.version >= version:
            return record
        await end.world.safe_point()


async def read(
    end: Endpoint, exposure: VersionedWindow, rank: int, record: VersionRecord, nbytes: int = NBYTES
) -> bytes:
    ring = [bytearray(CHUNK_NBYTES) for _ in range(WINDOW_COUNT)]
    sizes = [min(CHUNK_NBYTES, nbytes - start) for start in range(0, nbytes, CHUNK_NBYTES)]
    targets = [memoryview(ring[index % WINDOW_COUNT])[:size] for index, size in enumerate(sizes)]
    found: list[bytes] = []

    def take(index: int) -> None:
        assert index == len(found), "chunks must arrive in order"
        found.append(bytes(targets[index]))

    await exposure.read(rank, record, targets, take, deadline=end.world.time() + 60.0)
    return b"".join(found)


def content(version: int, nbytes: int = NBYTES) -> bytes:
    return bytes([version % 251]) * nbytes


async def case_the_two_newest_versions_are_there_and_older_ones_are_not(end: Endpoint) -> None:
    async with exposed(end) as exposure:
        for _ in range(3):
            assert publish(exposure)
        await end.barrier()
        if end.size > 1:
            newest = await published(end, exposure, end.left, 3)
            assert newest == VersionRecord(3, 1003, 1.0)
            assert await read(end, exposure, end.left, newest) == content(3)
            assert await read(end, exposure, end.left, newest, CHUNK_NBYTES + 8) == content(3, CHUNK_NBYTES + 8)
            with pytest.raises(OutdatedError, match=f"rank {end.left}"):
                await read(end, exposure, end.left, VersionRecord(1, 1001, 1.0))
            with pytest.raises(OutdatedError):
                await read(end, exposure, end.left, VersionRecord(9, 1009, 1.0))
        await end.barrier()
        assert exposure.version == 3


async def case_a_version_is_gone_when_the_next_but_one_is_begun(end: Endpoint) -> None:
    async with exposed(end) as exposure:
        assert publish(exposure) and publish(exposure)
        await end.barrier()
        before = VersionRecord(1, 1001, 1.0)
        if end.size > 1:
            await published(end, exposure, end.left, 2)
            assert await read(end, exposure, end.left, before) == content(1)
        await end.barrier()
        memory = await begun(end, exposure)
        memory.fill_(77)
        await end.barrier()
        if end.size > 1:
            with pytest.raises(OutdatedError):
                await read(end, exposure, end.left, before)
            newest = await published(end, exposure, end.left, 2)
            assert newest.version == 2, "an unfinished version must not be published"
            assert await read(end, exposure, end.left, newest) == content(2)
        await end.barrier()
        again = await begun(end, exposure)
        assert again.data_ptr() == memory.data_ptr()


async def case_versions_never_mix(end: Endpoint) -> None:
    """Each rank publishes all the time, and reads its neighbour all the time."""
    count, whole, outdated = 60, 0, 0
    async with exposed(end) as exposure:

        async def own() -> None:
            while exposure.version < count:
                publish(exposure)
                await end.world.safe_point()

        async def other() -> None:
            nonlocal whole, outdated
            last = 0
            while last < count:
                record = await published(end, exposure, end.left, 1)
                assert record.version >= last, "a reader must never see an older version after a newer one"
                try:
                    assert await read(end, exposure, end.left, record) == content(record.version)
                    whole += 1
                    last = record.version
                except OutdatedError:
                    outdated += 1
                await end.world.safe_point()

        await asyncio.gather(own(), *([other()] if end.size > 1 else []))
        await end.barrier()
    assert whole >= 1 or end.size == 1


async def case_a_record_says_nan_and_huge_numbers_exactly(end: Endpoint) -> None:
    async with exposed(end) as exposure:
        for metric in (math.nan, -math.inf, 1e308, 2.0**53 + 2, 5e-324):
            assert publish(exposure, metric=metric)
            await end.barrier()
            if end.size > 1:
                record = await published(end, exposure, end.left, exposure.version)
                assert record.metric == metric or (math.isnan(metric) and math.isnan(record.metric))
                assert await read(end, exposure, end.left, record) == content(record.version)
            await end.barrier()


async def case_who_has_left_exposes_nothing_and_the_others_go_on(end: Endpoint) -> None:
    async with exposed(end) as exposure:
        assert publish(exposure)
        record = await published(end, exposure, end.left, 1) if end.size > 1 else None
        await end.barrier()
        if end.rank == 0:
            await exposure.close(None)
            await exposure.close(None)
        await end.barrier()
        if record is None or end.rank == 0:
            pass
        elif end.left == 0:
            while await exposure.published_by(0) is not None:
                await end.world.safe_point()
            with pytest.raises(OutdatedError):
                await read(end, exposure, 0, record)
        else:
            assert await read(end, exposure, end.left, record) == content(1)
        await end.barrier()


async def case_a_group_of_some(end: Endpoint) -> None:
    """Ranks outside the group take no part, even in the opening. Several groups do not mix, and memory is reused."""
    ranks = [rank for rank in range(end.size) if rank % 2 == 0]
    if end.rank in ranks and len(ranks) > 1:
        group = await end.world.new_group(ranks)
        left = ranks[group.index - 1]
        for _ in range(3):
            async with exposed(end, group=group) as one, exposed(end, group=group, nbytes=CHUNK_NBYTES) as two:
                assert publish(one) and publish(two) and publish(two)
                first, second = await published(end, one, left, 1), await published(end, two, left, 2)
                assert await read(end, one, left, first) == content(1)
                assert await read(end, two, left, second, CHUNK_NBYTES) == content(2, CHUNK_NBYTES)
                await end.world.collectives.barrier(group)
    await end.barrier()


async def case_memory_has_the_size_that_was_asked_for(end: Endpoint) -> None:
    for nbytes in (1, 63, 64, 65, 100_000):
        async with exposed(end, nbytes=nbytes) as exposure:
            memory = exposure.begin()
            assert memory is not None
            assert (memory.dtype, memory.shape, memory.device.type) == (torch.uint8, (nbytes,), "cpu")
            assert not memory.any(), "the exposed memory must begin as zeros"
            memory = memory.fill_(255)
            exposure.publish(0, 0.0)
            other = exposure.begin()
            assert other is not None and not other.any(), "slots must not overlap"
            del memory, other
            await end.barrier()
