"""Tests ``average_models`` and ``average_gradients`` in shared memory, between real processes, in one job.

Runs on three ranks, under mpirun or on torch; ``test_host_folding.py`` starts it. Each check is an assertion here.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from support.mpi import report
from torch import nn

import asyncdist as ad
from asyncdist.collectives import collectives
from asyncdist.collectives.algorithms import shared_memory_reduce
from asyncdist.collectives.groups import Group
from asyncdist.errors import DisagreementError

_original_meet = collectives.map_shared_buffers


class Mixed(nn.Module):
    """A model with tied weights, several dtypes and layouts, integers, and enough elements for several pieces."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
            scale = 10.0 ** torch.randint(-3, 4, shape, generator=generator)
            return nn.Parameter((torch.randn(shape, generator=generator) * scale).to(dtype))

        self.many = nn.ParameterList([drawn(7, 3) for _ in range(20)])
        self.turned = nn.Parameter(drawn(40, 30).detach().t())
        self.tied = self.many[3]
        self.narrow = nn.ParameterList([drawn(101, dtype=dtype) for dtype in (torch.bfloat16, torch.float16)])
        self.wide = drawn(33, dtype=torch.float64)
        self.turning = drawn(5, dtype=torch.complex64)
        self.norm = nn.BatchNorm1d(4)
        self.norm.num_batches_tracked += seed
        for index, parameter in enumerate(self.parameters()):
            if index != seed % 7:
                parameter.grad = (parameter.detach() * 3).clone()


def bits(model: nn.Module) -> list[bytes]:
    tensors = [*model.state_dict().values(), *(p.grad for p in model.parameters() if p.grad is not None)]
    return [bytes(t.detach().contiguous().view(-1).view(torch.uint8).numpy()) for t in tensors]


@contextmanager
def watched() -> Iterator[list[bool]]:
    """Record whether each flat tensor was averaged in shared memory."""
    found: list[bool] = []

    async def map_shared_buffers(memory: object, group: Group, all_gather: Callable[..., object]) -> object:
        views = await _original_meet(memory, group, all_gather)  # type: ignore[arg-type]
        found.append(views is not None)
        return views

    collectives.map_shared_buffers = map_shared_buffers  # type: ignore[assignment]
    try:
        yield found
    finally:
        collectives.map_shared_buffers = _original_meet


@contextmanager
def without_memory() -> Iterator[None]:
    original = shared_memory_reduce.SharedMemory

    def refuse(nbytes: int) -> None:
        raise OSError(f"no {nbytes} bytes here")

    shared_memory_reduce.SharedMemory = refuse  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        shared_memory_reduce.SharedMemory = original  # type: ignore[misc]


@contextmanager
def apart() -> Iterator[None]:
    original = shared_memory_reduce.find

    def refuse(address: object) -> torch.Tensor:
        raise OSError(f"{address} is on another host")

    shared_memory_reduce.find = refuse  # type: ignore[assignment]
    try:
        yield
    finally:
        shared_memory_reduce.find = original


async def both(model: nn.Module, group: Group | None = None) -> list[bool]:
    with watched() as found:
        await ad.average_models(model, group)
        await ad.average_gradients(model, group)
    return found


async def the_same_bits(world: ad.World) -> None:
    """Compare the bits: in shared memory; if one rank has none; and if one rank does not find the others' memory."""
    models = [Mixed(world.rank) for _ in range(3)]
    assert set(await both(models[0])) == {True}
    if world.rank == 1:
        with without_memory():
            assert set(await both(models[1])) == {False}
    else:
        assert set(await both(models[1])) == {False}
    if world.rank == 2:
        with apart():
            assert set(await both(models[2])) == {False}
    else:
        assert set(await both(models[2])) == {False}
    assert bits(models[0]) == bits(models[1]) == bits(models[2])
    assert len({tuple(found) for found in await all_bits(models[0])}) == 1, "the mean must be equal on all ranks"
    for value in (10.0, 20.0):  # reuses the memory of the first call, whose old contents must not appear in the result
        with torch.no_grad():
            for parameter in models[0].parameters():
                parameter.fill_(value * world.rank)
        assert set(await both(models[0])) == {True}
        assert all(bool((parameter == value).all()) for parameter in models[0].parameters())


async def all_bits(model: nn.Module) -> list[list[int]]:
    found = await ad.gather_from_all_ranks(lambda: [hash_of(each) for each in bits(model)])
    return await ad.compute_and_broadcast(lambda: found or [])


def hash_of(data: bytes) -> int:
    return int.from_bytes(data[:7], "little") ^ sum(data) << 8


async def groups_in_turn(world: ad.World) -> None:
    """Average one model in overlapping groups: no rank writes memory that a member of another group reads."""
    pairs = [await ad.new_group(pair) if world.rank in pair else None for pair in ([0, 1], [1, 2])]
    model = nn.Linear(1 << 8, 1 << 8, bias=False)
    with torch.no_grad():
        model.weight.fill_(float(world.rank))
    expected = [0.0, 1.0, 2.0]
    with watched() as found:
        for _ in range(10):
            for pair, members in zip(pairs, ([0, 1], [1, 2]), strict=True):
                mean = sum(expected[rank] for rank in members) / 2
                expected = [mean if rank in members else expected[rank] for rank in range(3)]
                if pair is not None:
                    await ad.average_models(model, pair)
                    assert bool((model.weight == expected[world.rank]).all()), expected
    assert set(found) == {True}


async def cancelled(world: ad.World) -> None:
    """Cancel an average: the tensors are unchanged, and the next call works."""
    model = nn.Linear(300, 300)
    before = bits(model)
    task = asyncio.ensure_future(ad.average_models(model))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() and bits(model) == before
    with torch.no_grad():
        model.weight.fill_(float(world.rank))
    await ad.average_models(model)
    assert bool((model.weight == 1.0).all())


async def cancelled_anywhere(world: ad.World) -> None:
    """Cancel averages at random in overlapping groups: a rank that gives up keeps its values, and the others use these.

    The rank then writes other values into them at once, while the others still read.
    """
    choices, turns = random.Random(7), random.Random(world.rank)
    members = [(0, 1, 2), (0, 1), (1, 2), (0, 2)]
    groups = {ranks: await ad.new_group(ranks) for ranks in members if world.rank in ranks}
    models = [nn.Linear(count, 100, bias=False) for count in (100, 900)]
    cancelled_count = 0
    for number in range(60):
        ranks, model = choices.choice(members), choices.choice(models)
        quitter = choices.choice([*ranks, -1])
        if world.rank not in ranks:
            continue
        own, mean = 9.0 * number + world.rank, 9.0 * number + sum(ranks) / len(ranks)
        with torch.no_grad():
            model.weight.fill_(own)
        task = asyncio.ensure_future(ad.average_models(model, groups[ranks]))
        if world.rank == quitter:
            for _ in range(turns.choice([1, 3, 10, 30])):  # in the first turn, nothing can be complete
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
        else:
            await task
        cancelled_count += task.cancelled()
        assert bool((model.weight == (own if task.cancelled() else mean)).all()), (number, ranks, quitter)
        with torch.no_grad():
            model.weight.fill_(-1e6)
    assert cancelled_count > 0


async def another_model(world: ad.World) -> None:
    try:
        await ad.average_models(nn.Linear(3, 4 if world.rank == 1 else 3))
    except DisagreementError as error:
        assert "rank 1" in str(error)
    else:
        raise AssertionError("they differ")


async def nothing_is_left(world: ad.World) -> None:
    """Average models that are created, deleted, and become larger; no memory is left."""
    gc.collect()
    await ad.barrier()
    before = mapped_and_open()
    model = nn.Sequential(nn.Linear(100, 100))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert await both(model) == [True, True]
    assert mapped_and_open() == (before[0] + 2 * world.size, before[1] + 2)
    model.append(nn.Linear(10, 10))
    assert await both(model) == [True, True]
    del model, parameter
    gc.collect()
    assert mapped_and_open() == before


def mapped_and_open() -> tuple[int, int]:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:asyncdist-"), len(os.listdir("/proc/self/fd"))


STORIES = (the_same_bits, groups_in_turn, cancelled, cancelled_anywhere, another_model, nothing_is_left)


async def main(world: ad.World) -> None:
    shared_memory_reduce.SHARED_NBYTES_MIN = 0
    names_before = set(os.listdir("/dev/shm"))
    for story in STORIES:
        shared_memory_reduce.PIECE_NBYTES = 4096 if story is the_same_bits else 1 << 16
        await story(world)
        await ad.barrier()
    new = set(os.listdir("/dev/shm")) - names_before
    # Another job that starts meanwhile on this host has a folder of MPI's files.
    named = {name for name in new if "asyncdist" in name and not name.startswith("asyncdist-mpi-")}
    assert not named, named
    report(world.rank, [story.__name__ for story in STORIES])


if __name__ == "__main__":
    ad.run(main, transport=sys.argv[1], strict=True)
