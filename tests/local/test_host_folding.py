"""Tests means in memory that ranks share: the bits equal those computed by messages, and the memory is freed.

The ranks here share one process, which maps its own memory as another process would. ``scripts/shared_means.py`` tests
the same between real processes, under mpirun and on torch.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import gc
import os
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from support.local import worlds
from support.seeds import seeds
from torch import nn

import asyncdist as ad
from asyncdist.collectives import collectives
from asyncdist.collectives.algorithms import shared_memory_reduce
from asyncdist.collectives.algorithms.ordered_reduce import BufferPool, fold_in_shares
from asyncdist.collectives.algorithms.reductions import MEAN
from asyncdist.collectives.algorithms.shared_memory_reduce import SharedFlatBuffers
from asyncdist.collectives.groups import Group
from asyncdist.host_memory import shared_memory
from asyncdist.host_memory.shared_memory import SharedMemory, find
from asyncdist.tensors.bucket import Bucket
from asyncdist.tensors.flat_state import accumulate_dtype
from asyncdist.tensors.means import mean_into
from protocols import AverageAllPolicy

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)


@asynccontextmanager
async def sharing(size: int) -> AsyncIterator[list[ad.World]]:
    """Worlds whose transport says that its ranks share memory."""
    async with worlds(size) as made:
        for world in made:
            transport = world.services.engine.transport
            transport.capabilities = dataclasses.replace(transport.capabilities, shares_memory=True)
        yield made


@pytest.fixture(autouse=True)
def everything_is_worth_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory_reduce, "SHARED_NBYTES_MIN", 0)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory_reduce, "PIECE_NBYTES", 192)
    monkeypatch.setattr(shared_memory_reduce, "_BLOCK_NBYTES", 48)


def numbers(seed: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers whose sum differs in its bits for each order of summation, with a few NaN and infinities.

    Complex numbers contain no infinities, since torch's result for them depends on their position in the vector.
    """
    generator = torch.Generator().manual_seed(seed)
    scale = 10.0 ** torch.randint(-3, 4, (count,), generator=generator)
    values = torch.randn(count, generator=generator, dtype=torch.float64) * scale
    for odd in (-0.0,) if dtype.is_complex else (float("nan"), float("inf"), -0.0):
        values[torch.rand(count, generator=generator) < 0.03] = odd
    return values.to(dtype)


def bits(tensor: torch.Tensor) -> bytes:
    """Those of all NaNs alike: torch's own, in float16, depend on the place in a vector."""
    tensor = torch.where(tensor.isnan(), torch.tensor(float("nan"), dtype=tensor.dtype), tensor)
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy())


def tensors_of(seed: int, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[torch.Tensor]:
    """Every second one lies column by column."""
    found = [numbers(seed + n, torch.Size(shape).numel(), dtype).view(shape) for n, shape in enumerate(shapes)]
    return [t.t().contiguous().t() if t.ndim == 2 and n % 2 else t for n, t in enumerate(found)]


def spread_of(tensors: Sequence[torch.Tensor], commons: SharedFlatBuffers) -> Bucket:
    wide = accumulate_dtype(tensors[0].dtype)
    flat = commons.new(sum(tensor.numel() for tensor in tensors), dtype=wide)
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    pairs = [(tensor, part.view(tensor.shape)) for tensor, part in zip(tensors, parts, strict=True)]
    return Bucket(flat, pairs, commons.memory_of(flat))


async def mean_of_all(
    made: Sequence[ad.World], spreads: Sequence[Bucket], groups: Sequence[Group] | None = None
) -> None:
    groups = [world.group for world in made] if groups is None else groups
    means = zip(made, spreads, groups, strict=True)
    await asyncio.gather(*(world.collectives.all_mean_bucket(spread, group) for world, spread, group in means))


shapes = st.lists(
    st.one_of(st.just(()), st.tuples(st.integers(0, 60)), st.tuples(st.integers(0, 12), st.integers(0, 12))),
    min_size=1,
    max_size=6,
)


@pytest.mark.slow
@pytest.mark.usefixtures("small_pieces")
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(size=st.integers(1, 6), shapes=shapes, dtype=st.sampled_from(DTYPES), seed=st.integers(0, 1 << 30))
def test_the_same_bits_as_by_messages(size: int, shapes: list[tuple[int, ...]], dtype: torch.dtype, seed: int) -> None:
    async def main() -> None:
        lines = [tensors_of(seed + 100 * rank, shapes, dtype) for rank in range(size)]
        by_messages = [[tensor.clone() for tensor in line] for line in lines]
        async with sharing(size) as made:
            spreads = [spread_of(line, SharedFlatBuffers(True)) for line in lines]
            is_shared = size > 1 and len(spreads[0].flat) > 0
            for _ in range(2):  # the second time in the memory of the first
                await mean_of_all(made, spreads)
                spreads = [spread_over(spread, line) for spread, line in zip(spreads, lines, strict=True)]
            assert all((spread.memory is not None) == (len(spread.flat) > 0) for spread in spreads)
            assert all(len(views_of(spread)) == is_shared * size for spread in spreads)
            if not is_shared:
                return
            for _ in range(2):
                rivals = [spread_of(line, SharedFlatBuffers(False)) for line in by_messages]
                await asyncio.gather(
                    *(
                        fold_in_shares(world.services.engine, BufferPool(), world.group, rival.flat, MEAN, rival)
                        for world, rival in zip(made, rivals, strict=True)
                    )
                )
            assert [[bits(t) for t in line] for line in lines] == [[bits(t) for t in line] for line in by_messages]
            assert all(world.services.leftovers() == [] for world in made)

    asyncio.run(main())


def spread_over(spread: Bucket, tensors: Sequence[torch.Tensor]) -> Bucket:
    """A new one, of the same flat tensor."""
    parts = torch.split(spread.flat, [tensor.numel() for tensor in tensors])
    pairs = [(tensor, part.view(tensor.shape)) for tensor, part in zip(tensors, parts, strict=True)]
    return Bucket(spread.flat, pairs, spread.memory)


def views_of(spread: Bucket) -> list[torch.Tensor]:
    """Return the views that belong to the only group."""
    found = [] if spread.memory is None else list(spread.memory.views.values())
    return (found[0][1] or []) if found else []


class Barrier:
    """Lets ranks continue in a random order, each until its next barrier."""

    def __init__(self, size: int, rng: random.Random) -> None:
        self._size = size
        self._rng = rng
        self._waiting: list[asyncio.Future[None]] = []

    async def __call__(self) -> None:
        self._waiting.append(asyncio.get_running_loop().create_future())
        mine = self._waiting[-1]
        if len(self._waiting) == self._size:
            waiting, self._waiting = self._waiting, []
            self._rng.shuffle(waiting)
            for each in waiting:
                each.set_result(None)
        await mine


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("seed", seeds(20))
async def test_no_rank_reads_too_early_and_none_writes_too_early(seed: int) -> None:
    """Each rank's memory is overwritten before the call, and again by the rank itself right after it.

    In twenty random orders: with any barrier removed, or one buffer instead of two, some of them fail.
    """
    rng = random.Random(seed)
    size, count = rng.randint(2, 4), rng.choice([20, 48, 96, 300])
    lines = [[numbers(rank, count, torch.float32)] for rank in range(size)]
    expected = MEAN([line[0].clone() for line in lines])
    spreads = [spread_of(line, SharedFlatBuffers(True)) for line in lines]
    memories = [spread.memory.tensor for spread in spreads if spread.memory is not None]
    barrier = Barrier(size, rng)

    async def take_part(rank: int) -> None:
        memories[rank].fill_(0xFF)
        group = Group(tuple(range(size)), rank, 4096, None)
        await shared_memory_reduce.fold_on_host(group, spreads[rank], memories, mean_into, barrier)
        memories[rank].fill_(0xFF)

    await asyncio.gather(*(take_part(rank) for rank in range(size)))
    assert [bits(line[0]) for line in lines] == [bits(expected)] * size


# ------------------------------------------------------------------------------------------------------------ agreement


async def counted_mean(made: Sequence[ad.World], spreads: Sequence[Bucket], monkeypatch: pytest.MonkeyPatch) -> int:
    """How many small all-gathers it took, on the first rank."""
    count = 0
    original = shared_memory_reduce.map_shared_buffers

    async def counting(memory: Any, group: Group, all_gather: Callable[[torch.Tensor], Any]) -> Any:
        def gather(card: torch.Tensor) -> Any:
            nonlocal count
            count += group.index == 0
            return all_gather(card)

        return await original(memory, group, gather)

    with monkeypatch.context() as patch:
        patch.setattr("asyncdist.collectives.collectives.map_shared_buffers", counting)
        await mean_of_all(made, spreads)
    return count


async def test_a_few_bytes_are_sent_without_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory_reduce, "SHARED_NBYTES_MIN", 80)
    async with sharing(2) as made:
        for count, gather_count in ((0, 0), (19, 0), (20, 2)):
            lines = [[numbers(rank, count, torch.float32)] for rank in range(2)]
            expected = MEAN([line[0].clone() for line in lines])
            spreads = [spread_of(line, SharedFlatBuffers(True)) for line in lines]
            assert [spread.memory is not None for spread in spreads] == [gather_count > 0] * 2
            assert await counted_mean(made, spreads, monkeypatch) == gather_count
            assert [bits(line[0]) for line in lines] == [bits(expected)] * 2


async def test_members_map_each_other_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member is mapped again only if its memory has changed."""
    async with sharing(3) as made:
        lines = [[torch.full((5,), float(rank))] for rank in range(3)]
        spreads = [spread_of(line, SharedFlatBuffers(True)) for line in lines]
        counts = []
        for round_ in range(5):
            if round_ == 3:
                spreads[1] = spread_of(lines[1], SharedFlatBuffers(True))
            counts.append(await counted_mean(made, spreads, monkeypatch))
            spreads = [spread_over(spread, line) for spread, line in zip(spreads, lines, strict=True)]
        assert counts == [2, 1, 1, 2, 1]
        assert [line[0].tolist() for line in lines] == [[1.0] * 5] * 3


def refuse_find(address: shared_memory.Address) -> torch.Tensor:
    raise PermissionError(f"not {address.path}")


@pytest.mark.parametrize("how", ["cannot be made", "cannot be found"])
async def test_where_one_member_cannot_all_use_messages(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And find that out once."""
    async with sharing(3) as made:
        lines = [[numbers(rank, 50, torch.float32)] for rank in range(3)]
        expected = MEAN([line[0].clone() for line in lines])
        spreads = [
            spread_of(line, SharedFlatBuffers(rank != 1 or how == "cannot be found")) for rank, line in enumerate(lines)
        ]
        calls = iter(range(100))
        refused = lambda address: refuse_find(address) if next(calls) == 3 else find(address)  # noqa: E731
        if how == "cannot be found":
            monkeypatch.setattr(shared_memory_reduce, "find", refused)
        counts = [await counted_mean(made, spreads, monkeypatch)]
        assert [bits(line[0]) for line in lines] == [bits(expected)] * 3
        spreads = [spread_over(spread, line) for spread, line in zip(spreads, lines, strict=True)]
        counts.append(await counted_mean(made, spreads, monkeypatch))
        assert counts == ([2, 1] if how == "cannot be found" else [1, 1])
        assert all(views_of(spread) == [] for spread in spreads)


# --------------------------------------------------------------------------------------------------------------- memory


def descriptor_count() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def mapped_count() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:asyncdist-")


@pytest.mark.slow
def test_memory_is_found_by_its_name_alone() -> None:
    """Elsewhere the same number may belong to anything."""
    before = descriptor_count()
    memory = SharedMemory(5000)
    memory.tensor[:] = 7
    found = find(memory.address)
    assert (len(found), int(found.sum()), found.data_ptr() == memory.tensor.data_ptr()) == (5000, 35_000, False)
    found[0] = 9
    assert memory.tensor[0] == 9
    assert descriptor_count() == before + 1, "only the owner may keep a descriptor open"
    for wrong in ({"token": bytes(16)}, {"descriptor": 0}, {"pid": 1 << 30}, {"nbytes": 4999}, {"nbytes": 5001}):
        with pytest.raises(OSError):
            find(dataclasses.replace(memory.address, **wrong))
    address = memory.address
    del memory
    with pytest.raises(OSError):
        find(address)
    assert (found[1], descriptor_count()) == (7, before), "a process must keep the memory that it has mapped"


def test_memory_can_be_neither_cut_nor_stretched() -> None:
    """A process that has mapped it would get SIGBUS."""
    memory = SharedMemory(10_000)
    for nbytes in (0, 9999, 20_000):
        with pytest.raises(PermissionError):
            os.truncate(memory.address.path, nbytes)
    assert os.stat(memory.address.path).st_blocks * 512 >= 10_000, "the pages must be allocated"


@pytest.mark.slow
@pytest.mark.parametrize(
    "step", ["memfd_create", *(pytest.param(each, marks=pytest.mark.long) for each in ("posix_fallocate", "fcntl"))]
)
def test_without_shared_memory_a_flat_tensor_is_ordinary(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = descriptor_count()

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(shared_memory.fcntl if step == "fcntl" else os, step, refuse)
    commons = SharedFlatBuffers(True)
    flat = commons.new(9, dtype=torch.float32)
    assert (flat.shape, flat.dtype, commons.memory_of(flat)) == ((9,), torch.float32, None)
    assert descriptor_count() == before


def test_another_system_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(OSError, match="this system has no anonymous files"):
        SharedMemory(1)


def test_a_flat_tensor_and_its_buffers() -> None:
    """The buffers take half the size of the tensor, and at most 64 MiB."""
    mib = 1 << 20
    for flat_mib, rooms_mib in ((1, 0.5), (64, 32), (65, 64), (4096, 64)):
        assert shared_memory_reduce._memory_nbytes(flat_mib * mib // 4, torch.float32) == (flat_mib + rooms_mib) * mib
    commons = SharedFlatBuffers(True)
    flats = [commons.new(10, dtype=dtype) for dtype in (torch.float32, torch.complex64, torch.int64)]
    assert [commons.memory_of(flat) is not None for flat in flats] == [True, True, False], (
        "tensors of integers must have no shared memory, as they are not averaged"
    )
    commons.keep(flats[:1])
    assert [commons.memory_of(flat) is not None for flat in flats] == [True, False, False]


@pytest.mark.slow
async def test_what_a_group_has_mapped_goes_with_the_group() -> None:
    """A model averaged in one new group after another maps no more memory than in one group."""
    async with sharing(2) as made:
        spreads = [spread_of([torch.ones(9)], SharedFlatBuffers(True)) for _ in range(2)]
        counts = []
        for _ in range(3):
            groups = await asyncio.gather(*(world.new_group([0, 1]) for world in made))
            await mean_of_all(made, spreads, groups)
            await asyncio.gather(*(group.free() for group in groups))
            del groups
            spreads = [spread_over(spread, [torch.ones(9)]) for spread in spreads]
            gc.collect()
            counts.append(mapped_count())
        assert counts == [2] * 3


@pytest.mark.slow
async def test_memory_goes_with_the_last_who_uses_it() -> None:
    async with sharing(2) as made:
        before = descriptor_count()
        spreads = [spread_of([torch.ones(9)], SharedFlatBuffers(True)) for _ in range(2)]
        await mean_of_all(made, spreads)
        assert (mapped_count(), descriptor_count()) == (4, before + 2)
        del spreads
        assert (descriptor_count(), mapped_count()) == (before, 0)


# ------------------------------------------------------------------------------------------------------ real processes


def test_the_policy_that_averages_all_does_so_in_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the policy sent every element as a message, even between processes of one host."""
    folded: list[int] = []
    fold_on_host = collectives.fold_on_host

    async def counted(group: Group, spread: Bucket, *rest: Any) -> None:
        folded.append(len(spread.flat))
        await fold_on_host(group, spread, *rest)

    monkeypatch.setattr(collectives, "fold_on_host", counted)

    async def main(world: ad.World, shares: bool) -> list[float]:
        transport = world.services.engine.transport
        transport.capabilities = dataclasses.replace(transport.capabilities, shares_memory=shares)
        model = nn.Linear(7, 3, bias=False)
        nn.init.constant_(model.weight, 0.1 * 3.0**world.rank)
        async with AverageAllPolicy(model, torch.optim.SGD(model.parameters(), lr=0.1), average_every=1) as policy:
            info = await policy.step()
        assert info.nbytes == 4 * 21
        return model.weight.unique().tolist()

    shared, sent = (ad.run_local(main, shares, ranks=3, strict=True) for shares in (True, False))
    assert shared == sent and len(shared[0]) == 1
    assert folded == [21] * 3


def test_changed_model_of_a_policy_is_refused_before_averaging() -> None:
    async def main(world: ad.World) -> None:
        model = nn.Sequential(nn.Linear(2, 2))
        async with AverageAllPolicy(model, torch.optim.SGD(model.parameters(), lr=0.1), average_every=1) as policy:
            await policy.step()
            model.append(nn.Linear(2, 2))
            before = [parameter.clone() for parameter in model.parameters()]
            with pytest.raises(ValueError, match=r"'1\.\w+'"):
                await policy.step()
            assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))

    assert ad.run_local(main, ranks=2, strict=True) == [None, None]


def test_first_average_of_a_policy_allocates_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[SharedMemory] = []

    def counted(nbytes: int) -> SharedMemory:
        made.append(SharedMemory(nbytes))
        return made[-1]

    monkeypatch.setattr(shared_memory_reduce, "SharedMemory", counted)

    async def main(world: ad.World) -> int:
        transport = world.services.engine.transport
        transport.capabilities = dataclasses.replace(transport.capabilities, shares_memory=True)
        model = nn.Linear(5, 3)
        nn.init.constant_(model.weight, float(world.rank))
        async with AverageAllPolicy(model, torch.optim.SGD(model.parameters(), lr=0.1), average_every=1) as policy:
            assert model.weight.unique().tolist() == [world.rank]
            await ad.barrier()
            count = len(made)
            await policy.step()
        assert model.weight.unique().tolist() == [0.5]
        return count

    assert ad.run_local(main, ranks=2, strict=True) == [2, 2]
    assert len(made) == 2
