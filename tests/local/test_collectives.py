"""Tests the internals of collectives that are made of messages. Values, dtypes and groups: ``conformance``."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import itertools
import weakref
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings, strategies as st
from support.local import worlds, yields

import asyncdist as ad
from asyncdist.collectives.algorithms import by_messages
from asyncdist.errors import AsyncdistError, ClosedError, LocalProtocolError, RankLostError, TruncationError
from asyncdist.transports.local import LocalTransport


async def test_sums_are_in_rank_order_in_any_order_of_arrival() -> None:
    """1e8, 1, -1e8 and 1 in float32: every order of summation gives another result."""
    parts = [1e8, 1.0, -1e8, 1.0]
    expected = torch.tensor(0.0)
    for part in parts:
        expected = expected + torch.tensor(part)
    for order in itertools.islice(itertools.permutations(range(4)), 0, 24, 5):
        async with worlds(4) as made:
            tensors = [torch.tensor([part]) for part in parts]
            tasks = []
            for rank in order:
                tasks.append(
                    asyncio.ensure_future(made[rank].collectives.all_reduce(tensors[rank], made[rank].group, "sum"))
                )
                await yields(4)
            await asyncio.gather(*tasks)
            assert {tensor.item() for tensor in tensors} == {expected.item()}


async def test_large_data_is_sent_in_pieces_of_limited_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: with MPI and ``--survive``, data of 2 GiB or more raised MPI_ERR_ARG."""
    monkeypatch.setattr(by_messages, "PIECE_NBYTES", 16)
    sizes: list[int] = []
    isend = LocalTransport.isend

    def noted(self: LocalTransport, data: Any, dest: int, tag: int) -> Any:
        sizes.append(memoryview(data).nbytes)
        return isend(self, data, dest, tag)

    monkeypatch.setattr(LocalTransport, "isend", noted)
    for count in (1, 2, 3, 4, 5, 8, 9):  # from 8 bytes to more than four pieces
        async with worlds(3) as made:

            async def main(world: ad.World, count: int) -> None:
                own = torch.arange(count, dtype=torch.float64) + 100 * world.rank
                all_of = [torch.arange(count, dtype=torch.float64) + 100 * rank for rank in range(3)]
                collectives, group = world.collectives, world.group
                assert (await collectives.broadcast(own.clone(), group, 2)).equal(all_of[2])
                gathered = await collectives.gather(own, group, 1)
                assert gathered is None or all(one.equal(two) for one, two in zip(gathered, all_of, strict=True))
                for one, two in zip(await collectives.all_gather(own, group), all_of, strict=True):
                    assert one.equal(two)
                assert (await collectives.all_reduce(own.clone(), group, "sum")).equal(torch.stack(all_of).sum(0))
                got = await collectives.all_to_all([own + rank for rank in range(3)], group)
                assert all(each.equal(part + world.rank) for each, part in zip(got, all_of, strict=True))
                parts = [own.view(torch.uint8)[: 8 * rank] for rank in range(3)]
                ragged = await collectives.gather_bytes(parts[world.rank], [len(part) for part in parts], group, 0)
                assert ragged is None or len(ragged) == sum(map(len, parts))

            await asyncio.gather(*(main(world, count) for world in made))
    assert max(sizes) == 16


async def test_unequal_sizes_of_large_data_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A size that is a multiple of the piece's size is told from a larger one by a mark at the end."""
    monkeypatch.setattr(by_messages, "PIECE_NBYTES", 16)
    for counts in ((2, 4), (4, 2), (1, 2), (2, 1)):
        async with worlds(2) as made:
            own = [torch.zeros(count, dtype=torch.float64) for count in counts]
            work = (each.collectives.broadcast(own[each.rank], each.group, 0) for each in made)
            _, error = await asyncio.gather(*work, return_exceptions=True)
            assert isinstance(error, LocalProtocolError | TruncationError), counts


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 5),
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=6),
    st.sampled_from(["sum", "min", "max", "prod"]),
    st.randoms(use_true_random=False),
)
def test_all_ranks_get_the_same_bits(size: int, numbers: list[float], op: str, draw: object) -> None:
    async def main(world: ad.World) -> list[int]:
        tensor = torch.tensor(numbers) * (world.rank + 1) / 3
        await ad.all_reduce(tensor, op)  # type: ignore[arg-type]
        return tensor.view(torch.int32).tolist()

    found = ad.run_local(main, ranks=size, strict=True)
    parts = torch.stack([torch.tensor(numbers) * (rank + 1) / 3 for rank in range(size)])
    total = parts[0].clone()
    combine = {"sum": torch.add, "min": torch.minimum, "max": torch.maximum, "prod": torch.mul}[op]
    for part in parts[1:]:
        total = combine(total, part)
    assert found == [total.view(torch.int32).tolist()] * size


async def test_unequal_shapes_raise_an_error_that_names_the_sizes() -> None:
    async with worlds(2) as made:
        for sizes in ((3, 5), (5, 3)):
            tasks = [
                asyncio.ensure_future(world.collectives.all_gather(torch.zeros(sizes[world.rank]), world.group))
                for world in made
            ]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION, timeout=60)
            errors = [task.exception() for task in done if task.exception() is not None]
            assert errors
            assert all(isinstance(error, LocalProtocolError | TruncationError) for error in errors)
            assert any("12" in str(error) and "20" in str(error) for error in errors)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            break


async def test_a_cancelled_collective_is_finished_in_the_background() -> None:
    async with worlds(2) as made:
        task = asyncio.ensure_future(made[0].collectives.all_reduce(torch.ones(50_000), made[0].group, "sum"))
        await yields(3)
        task.cancel()
        await asyncio.wait([task])
        assert made[0].services.task_count == 1
        other = torch.ones(50_000)
        await made[1].collectives.all_reduce(other, made[1].group, "sum")
        assert other.eq(2).all(), "the cancelled rank's contribution must be in the sum"
        await yields(10)
        assert made[0].services.task_count == 0
        assert made[0].services.leftovers() == made[1].services.leftovers() == []


async def test_small_collective_cannot_overtake_a_cancelled_large_one() -> None:
    """Its messages would land in the large one's buffers: both use the group's tag."""
    async with worlds(2) as made:
        large = [
            asyncio.ensure_future(world.collectives.all_reduce(torch.ones(100_000), world.group, "sum"))
            for world in made
        ]
        await yields(2)
        for task in large:
            task.cancel()
        await asyncio.wait(large)
        small = await asyncio.gather(
            *(world.collectives.all_gather(torch.tensor([world.rank]), world.group) for world in made)
        )
        assert [[part.item() for part in parts] for parts in small] == [[0, 1]] * 2
        for world in made:
            assert not world.collectives._newest


async def test_lost_rank_ends_the_collective_of_the_ranks_awaiting_it() -> None:
    async with worlds(2) as made:
        task = asyncio.ensure_future(made[0].collectives.barrier(made[0].group))
        await yields(5)
        made[0].services.engine.transport._hub.lose(1)  # type: ignore[attr-defined]
        with pytest.raises(RankLostError):
            async with asyncio.timeout(60):
                await task


async def test_results_share_no_memory_with_the_input() -> None:
    async with worlds(1) as [world]:
        mine = torch.zeros(3)
        for found in (
            (await world.collectives.all_gather(mine, world.group))[0],
            (await world.collectives.all_to_all([mine], world.group))[0],
            (await world.collectives.gather(mine, world.group, 0) or [])[0],
        ):
            found += 1
            assert mine.tolist() == [0, 0, 0]


@pytest.mark.slow
async def test_256_ranks_that_all_say_true_say_true() -> None:
    """In bytes they would add up to 0."""
    async with worlds(256) as ranks:
        said = [torch.tensor([True, world.rank == 7, False]) for world in ranks]
        found = await asyncio.gather(
            *(world.collectives.all_reduce(mine, world.group, "sum") for world, mine in zip(ranks, said, strict=True))
        )
    assert all(mine.tolist() == [True, True, False] for mine in found)


def test_one_rank_alone_reduces_to_itself() -> None:
    async def main(world: ad.World) -> None:
        tensor = torch.tensor([1.5, 2.5])
        for op in ("sum", "min", "max", "prod"):
            assert (await ad.all_reduce(tensor, op)).tolist() == [1.5, 2.5]  # type: ignore[arg-type]
        assert (await ad.broadcast(tensor)).tolist() == [1.5, 2.5]
        await ad.barrier()
        group = await ad.new_group([0])
        assert (await ad.all_reduce(tensor, group=group)).tolist() == [1.5, 2.5]

    ad.run_local(main, ranks=1, strict=True)


def test_after_the_failure_of_the_job_no_collective_starts() -> None:
    async def main(world: ad.World) -> None:
        world.services.engine.fail(RankLostError("rank 9 failed", rank=9))
        for collective in (ad.barrier(), ad.all_gather(torch.zeros(1)), ad.broadcast(torch.zeros(1))):
            with pytest.raises(AsyncdistError, match="rank 9 failed"):
                await collective

    with pytest.raises(RankLostError):
        ad.run_local(main, ranks=1)


def test_a_default_device_is_the_users() -> None:
    """Nothing of ours is made there. Meta stands for any: a read of its values fails."""

    async def main(world: ad.World) -> None:
        rank = torch.full((3,), float(world.rank), device="cpu")
        await ad.barrier()
        assert (await ad.all_reduce(rank.clone(), op="max")).tolist() == [2.0] * 3
        assert torch.stack(await ad.all_gather(rank)).tolist() == [[0.0] * 3, [1.0] * 3, [2.0] * 3]
        empty = torch.empty(0, device="cpu")
        assert [len(each) for each in await ad.all_gather(empty)] == [0] * 3
        assert (await ad.compute_and_broadcast(lambda: rank)).tolist() == [0.0] * 3
        assert (await ad.compute_and_broadcast(lambda: rank)).tolist() == [0.0] * 3
        assert (await ad.compute_and_broadcast(lambda: "x" * 5000)) == "x" * 5000
        model = torch.nn.Linear(3, 1, bias=False, device="cpu")
        for average in (ad.average_models, ad.average_gradients):
            with torch.no_grad():
                model.weight.fill_(float(world.rank))
            model.weight.grad = model.weight.detach().clone()
            await average(model)
            averaged = model.weight if average is ad.average_models else model.weight.grad
            assert averaged.tolist() == [[1.0] * 3]

    torch.set_default_device("meta")
    try:
        ad.run_local(main, ranks=3, strict=True)
    finally:
        torch.set_default_device(None)


class EndlessRequest:
    """A collective that a member never enters."""

    cancelled, source, nbytes = False, -1, 0

    def __init__(self, *buffers: object) -> None:
        self.buffers = buffers

    def test(self) -> bool:
        return False

    def cancel(self) -> None:
        raise AssertionError("no collective can be cancelled")


class EndlessGroup:
    """A backend's group in which a member is missing."""

    def __init__(self) -> None:
        self.requests: list[weakref.ref[EndlessRequest]] = []

    def all_reduce(self, *buffers: object) -> EndlessRequest:
        request = EndlessRequest(*buffers)
        self.requests.append(weakref.ref(request))
        return request


@pytest.mark.slow
@pytest.mark.parametrize(("count", "request_count"), [(8, 1), (2 << 20, 4)])
@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_unfinished_requests_of_a_leaver_keep_their_buffers(
    count: int, request_count: int, is_cancelled: bool
) -> None:
    """MPI may still write to the buffers. The rank's end does not wait for the requests, whoever left first."""
    async with worlds(2) as made:
        world, native = made[0], EndlessGroup()
        group = dataclasses.replace(world.group, native=native)
        task = asyncio.ensure_future(world.collectives.all_reduce(torch.zeros(count), group, "sum"))
        await yields(5)
        if is_cancelled:
            task.cancel()
            await asyncio.wait([task])
        assert len(world.services.engine.outstanding()) == 1
        made[1].peers.leave()
        await world.services.engine.until(lambda: 1 in world.services.left)
        await asyncio.wait([task])
        await world.services.engine.until(lambda: world.services.task_count == 0)
        assert is_cancelled or isinstance(task.exception(), ClosedError)
        del task
        gc.collect()
        assert [request() is not None for request in native.requests] == [True] * request_count
        assert world.services.leftovers() == []


def test_empty_tensor_in_a_gather_is_refused_with_its_rank() -> None:
    """Regression: an empty tensor was read as the notice of a lost rank, and the next message as that rank's number."""

    async def main(world: ad.World) -> None:
        gathering = ad.gather(torch.ones(0 if world.rank == 1 else 3), root=0)
        if world.rank == 0:
            with pytest.raises(ad.LocalProtocolError, match="rank 1 passes 0 and this rank passes 12"):
                await gathering
        else:
            await gathering

    ad.run_local(main, ranks=2)


@pytest.mark.parametrize("root", [numpy.int64(1), torch.tensor(1)])
def test_the_root_may_be_an_integer_of_any_type(root: Any, tmp_path: Path) -> None:
    """Regression: the recording of a gather with such a root ended the job."""

    async def collect(world: ad.World) -> list[object]:
        gathered = await ad.gather(torch.tensor(float(world.rank)), root=root)
        shared = await ad.broadcast(torch.tensor(float(world.rank)), root=root)
        return [gathered, shared.item()]

    results = ad.run_local(collect, ranks=2, record=tmp_path)
    assert results == [[None, 1.0], [[torch.tensor(0.0), torch.tensor(1.0)], 1.0]]


@pytest.mark.parametrize("root", [1.0, True, "1", None, 2])
async def test_another_root_is_refused(root: Any) -> None:
    async with worlds(2) as made:
        with pytest.raises(LocalProtocolError) as refused:
            await made[0].collectives.broadcast(torch.ones(1), made[0].group, root)
    assert refused.value.facts == {"root": root}
