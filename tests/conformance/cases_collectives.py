"""Cases for collectives and groups, against numpy and plain torch on every rank's known input."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support.facts import naming
from support.odd_tensors import ODD, not_dense, odd_tensors, same

import asyncdist as ad
from asyncdist.collectives.algorithms import in_pieces
from asyncdist.errors import LocalProtocolError, StartTimeoutError
from conformance.endpoint import CASE_TIMEOUT_S, Endpoint

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64)
DTYPES = (*FLOATS, *INTEGERS, torch.bool, torch.complex64, torch.complex128)
SHAPES = ((), (1,), (7,), (3, 5), (0,), (2, 0, 3), (40_000,))
#: One dtype of each width, and one dtype that is summed in another dtype.
SHAPED = (torch.uint8, torch.bfloat16, torch.float32, torch.complex128)


def combinations(dtypes: Sequence[torch.dtype]) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """Pair each dtype with one shape and each shape with some dtypes, because only a dtype's width affects messages."""
    each_dtype = [(dtype, (3, 5)) for dtype in dtypes]
    each_shape = itertools.product((dtype for dtype in SHAPED if dtype in dtypes), SHAPES)
    return list(dict.fromkeys([*each_dtype, *each_shape]))


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return small integers, so that every order of summation gives the same result in any dtype."""
    generator = np.random.default_rng(rank)
    high = 2 if dtype == torch.bool else 4
    return torch.from_numpy(generator.integers(0, high, shape)).to(dtype).reshape(shape)


def layouts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the same values in other memory layouts."""
    found = [tensor.clone()]
    if tensor.dim() == 2:
        found.append(tensor.t().contiguous().t())
        wide = torch.zeros(tensor.shape[0], 2 * tensor.shape[1], dtype=tensor.dtype)
        wide[:, ::2] = tensor
        found.append(wide[:, ::2])
    return found


async def case_broadcast(end: Endpoint) -> None:
    for dtype, shape in combinations(DTYPES):
        for root in (0, end.size - 1):
            for layout in layouts(values(end.rank, shape, dtype)):
                assert await ad.broadcast(layout, root) is layout
                assert torch.equal(layout, values(root, shape, dtype)), (dtype, shape, root)


async def case_gather(end: Endpoint) -> None:
    for dtype, shape in combinations(DTYPES):
        root = len(shape) % end.size
        mine = layouts(values(end.rank, shape, dtype))[-1]
        found = await ad.gather(mine, root)
        assert (found is None) == (end.rank != root)
        for rank, part in enumerate(found or []):
            assert part.dtype == dtype
            assert torch.equal(part, values(rank, shape, dtype)), (dtype, shape, rank)
        assert torch.equal(mine, values(end.rank, shape, dtype))


async def case_all_gather(end: Endpoint) -> None:
    for dtype, shape in combinations(DTYPES):
        found = await ad.all_gather(layouts(values(end.rank, shape, dtype))[-1])
        assert len(found) == end.size
        for rank, part in enumerate(found):
            assert part.dtype == dtype
            assert torch.equal(part, values(rank, shape, dtype)), (dtype, shape, rank)


async def case_all_to_all(end: Endpoint) -> None:
    for dtype, shape in combinations(DTYPES):
        mine = [layouts(values(10 * end.rank + peer, shape, dtype))[-1] for peer in range(end.size)]
        found = await ad.all_to_all(mine)
        for peer, part in enumerate(found):
            assert torch.equal(part, values(10 * peer + end.rank, shape, dtype)), (dtype, shape, peer)


async def case_all_reduce(end: Endpoint) -> None:
    oracles: dict[Any, np.ufunc] = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}
    for (dtype, shape), (op, oracle) in itertools.product(combinations(FLOATS + INTEGERS), oracles.items()):
        parts = [values(rank, shape, dtype).double().numpy() for rank in range(end.size)]
        expected = torch.from_numpy(np.asarray(oracle.reduce(parts))).to(dtype)
        for layout in layouts(values(end.rank, shape, dtype)):
            assert await ad.all_reduce(layout, op) is layout
            assert same(layout, expected), (dtype, shape, op)
    for op, oracle in (
        ("sum", np.logical_or),
        ("max", np.logical_or),
        ("min", np.logical_and),
        ("prod", np.logical_and),
    ):
        parts = [values(rank, (9,), torch.bool).numpy() for rank in range(end.size)]
        found = await ad.all_reduce(values(end.rank, (9,), torch.bool), op)  # type: ignore[arg-type]
        assert found.tolist() == oracle.reduce(parts).tolist(), op
    for op, oracle in (("sum", np.add), ("prod", np.multiply)):
        parts = [values(rank, (9,), torch.complex64).numpy() + 1j for rank in range(end.size)]
        found = await ad.all_reduce(values(end.rank, (9,), torch.complex64) + 1j, op)  # type: ignore[arg-type]
        assert np.allclose(found.numpy(), oracle.reduce(parts)), op


async def case_all_reduce_of_halves_sums_in_float32(end: Endpoint) -> None:
    """Check float32 sums: 256 + 1/2 + 1/2 ... would round to 256 in bfloat16 at every step, but not at the end."""
    part = torch.tensor([256.0 if end.rank == 0 else 0.5 + 0.25], dtype=torch.bfloat16)
    expected = torch.tensor([256.0 + 0.75 * (end.size - 1)]).to(torch.bfloat16)
    assert torch.equal(await ad.all_reduce(part), expected)
    big = torch.tensor([60_000.0 if end.rank < 2 else 0.0], dtype=torch.float16)
    assert torch.isinf(await ad.all_reduce(big)).item() == (end.size > 1)


async def case_all_reduce_of_nan_and_of_zeros_of_both_signs(end: Endpoint) -> None:
    """All ranks get equal results: NaN if any rank has a NaN; -0 is less than +0.

    MPI does not define MPI_MIN and MPI_MAX for NaN: with MPICH the results differed between ranks.
    """
    cases = [(has_nan, 1) for has_nan in range(end.size)] + [(end.size - 1, 70_000)]
    for dtype, (has_nan, count) in itertools.product((*FLOATS[:4], FLOATS[5]), cases):
        numbers = torch.tensor([1.0, -1.5, 0.0 if end.rank == has_nan else -0.0, float(end.rank - 1)])
        numbers[0] = torch.nan if end.rank == has_nan else numbers[0]
        ranks = [float(rank - 1) for rank in range(end.size)]
        zeros = [0.0] if end.size == 1 else [-0.0, 0.0]
        for op, last, zero in (("min", min(ranks), zeros[0]), ("max", max(ranks), zeros[-1])):
            found = await ad.all_reduce(numbers.to(dtype).repeat(count), op)  # type: ignore[arg-type]
            nan, rest = found.view(-1, 4)[:, 0], found.view(-1, 4)[:, 1:]
            assert nan.isnan().all(), (dtype, op, has_nan)
            assert same(rest, torch.tensor([-1.5, zero, last]).to(dtype).repeat(count, 1)), (dtype, op, has_nan)
    infinite = torch.tensor([torch.inf, -torch.inf, torch.inf if end.rank else -torch.inf])
    assert (await ad.all_reduce(infinite.clone(), "max")).tolist()[:2] == [torch.inf, -torch.inf]
    total = await ad.all_reduce(infinite.clone())
    assert total[:2].tolist() == [torch.inf, -torch.inf]
    assert total[2].isnan() == (end.size > 1)


async def case_integers_wrap(end: Endpoint) -> None:
    """Sums of 1 and of 70 elements wrap around, although Open MPI's vector instructions would saturate."""
    tops = {torch.uint8: 200, torch.int8: 100, torch.uint16: 60_000, torch.int16: 30_000, torch.int64: 2**62}
    for (dtype, top), count in itertools.product(tops.items(), (1, 70)):
        numbers = [-top if rank == 2 and dtype.is_signed else top for rank in range(end.size)]
        found = await ad.all_reduce(torch.full((count,), numbers[end.rank], dtype=dtype))
        parts = np.array(numbers, torch.empty(0, dtype=dtype).numpy().dtype)
        assert found.tolist() == [np.add.reduce(parts, dtype=parts.dtype).item()] * count, dtype


async def case_dense_tensors_of_any_layout(end: Endpoint) -> None:
    for name, sent in odd_tensors().items():
        for found in (await ad.all_gather(sent), await ad.all_to_all([sent] * end.size), await ad.gather(sent, 1)):
            assert found is None or len(found) == end.size
            assert all(same(part, ODD[name]) for part in found or []), name
        if name == "expanded":
            with pytest.raises(ValueError, match="several elements in one place in memory"):
                await ad.all_reduce(sent)
            if end.rank != 1:
                with pytest.raises(ValueError, match="several elements in one place in memory"):
                    await ad.broadcast(sent, 1)
                sent = torch.zeros(sent.shape)
            assert await ad.broadcast(sent, 1) is sent  # the root's own tensor is only read
            assert same(sent, ODD[name])
            continue
        if end.rank != 1:
            sent.detach().zero_()
        assert await ad.broadcast(sent, 1) is sent
        assert same(sent, ODD[name]), name
        assert await ad.all_reduce(sent, "prod") is sent
        power = torch.stack([ODD[name].detach().to(torch.complex128)] * end.size).prod(0)
        # rounding to 8 bits would hide the differences of float32 products
        if not sent.is_floating_point() or sent.itemsize > 1:
            assert torch.allclose(sent.detach().to(torch.complex128), power, equal_nan=True) or "uint" in name, name


async def case_tensors_made_in_inference_mode_are_written_outside_it(end: Endpoint) -> None:
    """The transport must not matter: torch does not notice whether the backend has written into the tensors."""
    with torch.inference_mode():
        dense, transposed = torch.ones(3), torch.full((2, 3), float(end.rank)).t()
    assert (await ad.all_reduce(dense)).tolist() == [float(end.size)] * 3
    assert (await ad.broadcast(transposed, 1)).tolist() == [[1.0] * 2] * 3


async def case_what_is_no_dense_tensor_is_refused_here(end: Endpoint) -> None:
    """The caller can catch the error: it is not raised in a task behind the collective."""
    for word, wrong in not_dense().items():
        for refuse in (ad.broadcast, ad.gather, ad.all_gather, ad.all_reduce):
            with pytest.raises(TypeError, match=naming("tensor", word)):
                await refuse(wrong)
        with pytest.raises(TypeError, match=naming("tensors[0]", word)):
            await ad.all_to_all([wrong] * end.size)
    with pytest.raises(TypeError, match=naming("tensor", "list")):
        await ad.broadcast([1.0])  # type: ignore[arg-type]
    for op in ("min", "max"):
        with pytest.raises(TypeError, match="complex numbers have no order"):
            await ad.all_reduce(torch.ones(2, dtype=torch.complex64), op)
    with pytest.raises(TypeError, match=r"got torch\.uint4"):
        await ad.all_reduce(torch.empty(2, dtype=torch.uint4))  # type: ignore[attr-defined]
    assert (await ad.all_reduce(torch.ones(1))).item() == end.size


async def case_more_bytes_than_a_call_of_the_backend_takes(end: Endpoint) -> None:
    """MPI counts bytes in 32 bits.

    Here the limit is lowered to a thousand; ``test_conformance.py`` tests the real limit.
    """
    await end.barrier()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_pieces, "COUNT_NBYTES_MAX", 1000)
        for dtype, count in itertools.product((torch.uint8, torch.bfloat16, torch.float64), (1, 333, 500, 1000, 1777)):
            mine = values(end.rank, (count,), dtype)
            parts = [values(rank, (count,), dtype) for rank in range(end.size)]
            task = asyncio.ensure_future(ad.broadcast(mine.clone(), 1))
            await end.yields(1)
            task.cancel()  # the collective continues in the background, and the next one waits for its turn
            assert all(map(same, await ad.all_gather(mine), parts))
            assert same(await ad.broadcast(mine.clone(), 1), parts[1])
            gathered = await ad.gather(mine, 1)
            assert (gathered is None) == (end.rank != 1)
            assert all(map(same, gathered or [], parts))
            sent = [values(10 * end.rank + peer, (count,), dtype) for peer in range(end.size)]
            for rank, found in enumerate(await ad.all_to_all(sent)):
                assert same(found, values(10 * rank + end.rank, (count,), dtype))
        await end.barrier()


async def case_parameters_that_require_grad(end: Endpoint) -> None:
    parameter = torch.nn.Parameter(torch.full((4,), float(end.rank)))
    await ad.all_reduce(parameter)
    assert parameter.tolist() == [sum(range(end.size))] * 4
    strided = torch.nn.Parameter(torch.full((4, 6), float(end.rank)).t())
    await ad.broadcast(strided, 1)
    assert strided.tolist() == [[1.0] * 4] * 6
    assert parameter.requires_grad
    assert parameter.is_leaf


async def case_a_large_tensor_while_ranks_compute(end: Endpoint) -> None:
    tensor = torch.arange(1 << 20, dtype=torch.float32) + end.rank
    task = asyncio.ensure_future(ad.all_reduce(tensor))
    while not task.done():
        time.sleep(0.0005 * (1 + end.rank))  # noqa: ASYNC251 a step of training
        await end.world.progress()
    expected = torch.arange(1 << 20, dtype=torch.float32) * end.size + sum(range(end.size))
    assert torch.equal(await task, expected)


async def case_a_barrier_waits_for_the_last(end: Endpoint) -> None:
    for last in range(end.size):
        if end.rank == last:
            await end.yields(50)
            for dest in range(end.size):
                if dest != last:
                    await end.send(b"now", dest)
            await ad.barrier()
        else:
            said = asyncio.ensure_future(end.receive(3, last))
            await ad.barrier()
            assert await said == (b"now", last)
        await end.barrier()


async def case_a_barrier_does_not_let_anyone_through_early(end: Endpoint) -> None:
    last = end.size - 1
    if end.rank == last:
        for rank in range(last):
            await end.receive(1, rank)
        await ad.barrier()
    else:
        task = asyncio.ensure_future(ad.barrier())
        for _ in range(30):
            await end.world.progress()
        assert not task.done()
        await end.send(b"!", last)
        await task


async def case_repeated_many_times(end: Endpoint) -> None:
    for i in range(150):
        found = await ad.all_reduce(torch.tensor([float(end.rank + i)]))
        assert found.item() == sum(range(end.size)) + i * end.size
    for i in range(50):
        found = await ad.broadcast(torch.tensor([float(end.rank * 1000 + i)]), i % end.size)
        assert found.item() == i % end.size * 1000 + i


async def case_groups_of_every_subset_in_any_order(end: Endpoint) -> None:
    for count in range(1, end.size + 1):
        for ranks in list(itertools.permutations(range(end.size), count))[:8]:
            if end.rank not in ranks:
                continue
            group = await ad.new_group(ranks)
            assert (group.ranks, group.index, group.size) == (ranks, ranks.index(end.rank), count)
            found = await ad.all_gather(torch.tensor([end.rank, 7]), group=group)
            assert [part.tolist() for part in found] == [[rank, 7] for rank in ranks]
            root = ranks[-1]
            tensor = await ad.broadcast(torch.tensor([float(end.rank)]), root, group=group)
            assert tensor.item() == root
            gathered = await ad.gather(torch.tensor(end.rank), root, group=group)
            assert (gathered is not None) == (end.rank == root)
            if gathered is not None:
                assert [part.item() for part in gathered] == list(ranks)
            total = await ad.all_reduce(torch.tensor([end.rank + 1]), "prod", group=group)
            assert total.item() == int(np.prod([rank + 1 for rank in ranks]))
            parts = await ad.all_to_all([torch.tensor([end.rank, peer]) for peer in ranks], group=group)
            assert [part.tolist() for part in parts] == [[peer, end.rank] for peer in ranks]
            empty = await ad.all_gather(torch.zeros(0), group=group)
            assert [tuple(part.shape) for part in empty] == [(0,)] * count
            await ad.barrier(group=group)


async def case_overlapping_groups_at_the_same_time(end: Endpoint) -> None:
    pairs = [(i, (i + 1) % end.size) for i in range(end.size)] if end.size > 2 else [(0, 1)]
    mine = {pair: await ad.new_group(sorted(pair)) for pair in pairs if end.rank in pair}

    async def work(pair: tuple[int, int]) -> None:
        for i in range(30):
            tensor = torch.full((1 + i * 700,), float(end.rank + i))
            await ad.all_reduce(tensor, group=mine[pair])
            assert tensor.eq(sum(pair) + 2 * i).all()

    async def everybody() -> None:
        for i in range(30):
            found = await ad.all_gather(torch.tensor([end.rank, i]))
            assert [part.tolist() for part in found] == [[rank, i] for rank in range(end.size)]

    await asyncio.gather(everybody(), *map(work, mine))


async def case_a_cancelled_collective_leaves_the_group_usable(end: Endpoint) -> None:
    """The group stays usable even if the next collective is small and overtakes the cancelled one."""
    for nbytes in (8, 400_000):
        for yields in (0, 1, 2, 4):
            for i in range(3):
                task = asyncio.ensure_future(ad.all_reduce(torch.ones(nbytes // 4)))
                # at least one iteration: a task that has not begun has not entered the collective
                await end.yields(1 + yields + i + end.rank)
                task.cancel()
                await asyncio.wait([task])
                found = await ad.all_gather(torch.tensor([end.rank]))
                assert [part.item() for part in found] == list(range(end.size))
                total = await ad.all_reduce(torch.full((nbytes // 8,), float(end.rank)))
                assert total.eq(sum(range(end.size))).all()
            await end.barrier()
    await ad.barrier()


async def case_wrong_arguments_are_refused_before_anything_is_sent(end: Endpoint) -> None:
    tensor = torch.zeros(3)
    with pytest.raises(LocalProtocolError, match=r"op must be one of .*got 'mean'"):
        await ad.all_reduce(tensor, "mean")  # type: ignore[arg-type]
    with pytest.raises(LocalProtocolError, match=rf"root must be .*got {end.size}"):
        await ad.broadcast(tensor, end.size)
    with pytest.raises(LocalProtocolError, match=naming("root", -1)):
        await ad.gather(tensor, -1)
    with pytest.raises(LocalProtocolError, match="one tensor for each of the"):
        await ad.all_to_all([tensor] * (end.size + 1))
    with pytest.raises(LocalProtocolError, match="equal shape and dtype"):
        await ad.all_to_all([tensor] * (end.size - 1) + [torch.zeros(4)])
    for ranks in ([], [end.rank, end.rank], [end.rank, end.size], [-1, end.rank], [end.rank, True]):
        with pytest.raises(LocalProtocolError):
            await ad.new_group(ranks)
    with pytest.raises(LocalProtocolError, match="ranks must include this rank"):
        await ad.new_group([end.left])
    assert (await ad.all_reduce(torch.ones(1))).item() == end.size


async def case_a_group_that_some_do_not_join_names_them(end: Endpoint) -> None:
    ranks = range(end.size)
    absent = end.size - 1
    # the leader's time begins when the other ranks have arrived: they may be slow, but they are not missing
    if end.rank == 0:
        joins = end.world.agreements.led.joins
        await end.engine.until(lambda: end.size == 2 or [len(come) for come in joins.values()] == [end.size - 2])
    if end.rank != absent:
        with pytest.raises(StartTimeoutError) as caught:
            await end.world.new_group(ranks, timeout_s=0.1 if end.rank == 0 else CASE_TIMEOUT_S)
        assert caught.value.missing == (absent,)
        assert f"rank {absent}" in str(caught.value)
    await end.barrier()
    # The absent rank now counts the starts of this list differently; a list that no rank has used works.
    group = await ad.new_group(list(reversed(ranks)))
    assert len(await ad.all_gather(torch.zeros(1), group=group)) == end.size
    if end.rank == absent:  # the absent rank is notified that it is late, and counts like the others from then on
        with pytest.raises(StartTimeoutError, match=f"rank {absent}"):
            await ad.new_group(ranks)
    group = await ad.new_group(ranks)
    assert len(await ad.all_gather(torch.zeros(1), group=group)) == end.size
