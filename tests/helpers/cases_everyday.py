"""Cases for ``compute_and_broadcast`` and its relatives, with values of every type and exceptions on every rank."""

from __future__ import annotations

import asyncio
import math
from functools import partial
from typing import Any

import numpy as np
import torch
from support.facts import names
from support.values_of_all_types import LARGE, UNSUPPORTED, VALUES, same

import asyncdist as ad
from asyncdist.collectives import error_exchange
from asyncdist.errors import LocalProtocolError, RemoteError


class Trouble(ValueError):
    """An exception of these tests."""


def fail(text: str) -> Any:
    raise Trouble(text)


async def expect_failure(awaitable: Any, world: ad.World, failing: int, text: str) -> None:
    """Expect the exception itself on the failing rank, and a RemoteError with all details on the other ranks."""
    try:
        await awaitable
    except Trouble as error:
        assert world.rank == failing and str(error) == text
    except RemoteError as error:
        assert world.rank != failing
        assert (error.rank, error.kind.rpartition(".")[2], error.text) == (failing, "Trouble", text)
        assert f"rank {failing}" in str(error) and text in str(error)
    else:
        raise AssertionError("nothing was raised")


async def case_a_value_computed_on_one_rank_is_the_same_on_all(world: ad.World) -> None:
    for root in {0, world.size - 1}:
        for value in [VALUES, *LARGE, *VALUES[-8:]]:
            calls: list[int] = []

            def compute(value: Any = value, calls: list[int] = calls) -> Any:
                calls.append(world.rank)
                return value

            found = await ad.compute_and_broadcast(compute, root=root)
            assert same(found, value), (found, value)
            assert calls == [root] * (world.rank == root)


async def case_every_rank_s_value_arrives_unchanged(world: ad.World) -> None:
    root = world.size - 1
    for index in range(0, len(VALUES), 6):
        found = await ad.gather_from_all_ranks(
            partial(VALUES.__getitem__, (index + world.rank) % len(VALUES)), root=root
        )
        assert (found is None) == (world.rank != root)
        for rank, value in enumerate(found or []):
            assert same(value, VALUES[(index + rank) % len(VALUES)])


async def case_large_and_small_values_together(world: ad.World) -> None:
    """Some values fit into a frame, and some do not."""
    sizes = [0, 100_000, 3, error_exchange.INLINE_NBYTES - 3, error_exchange.INLINE_NBYTES, 1_000_000]

    def value_of(rank: int) -> bytes:
        return bytes([rank]) * sizes[rank % len(sizes)]

    found = await ad.gather_from_all_ranks(lambda: value_of(world.rank))
    assert found == ([value_of(rank) for rank in range(world.size)] if world.rank == 0 else None)


async def case_coroutine_functions(world: ad.World) -> None:
    async def own() -> int:
        await asyncio.sleep(0)
        return world.rank + 1

    async def product(values: list[int]) -> int:
        await asyncio.sleep(0)
        return math.prod(values)

    assert await ad.reduce_and_broadcast(own, product) == math.factorial(world.size)
    assert await ad.compute_and_broadcast(own) == 1
    found = await ad.gather_from_all_ranks(own)
    assert found == (list(range(1, world.size + 1)) if world.rank == 0 else None)


async def case_scalars_keep_their_type(world: ad.World) -> None:
    kinds: list[Any] = [2**60 + 1, 0.1, True, -(2**70), np.float32(0.1), np.int64(-5), torch.tensor(2.5), 1j]
    for index in range(len(kinds)):
        found = await ad.gather_scalar_from_all_ranks(
            partial(kinds.__getitem__, (index + world.rank) % len(kinds)), world.size
        )
        for rank, value in enumerate(found or []):
            assert same(value, kinds[(index + rank) % len(kinds)])
    try:
        await ad.gather_scalar_from_all_ranks(lambda: "text" if world.rank == world.size - 1 else 1)
    except TypeError as error:
        assert world.rank == world.size - 1 and "'text'" in str(error) and "numpy scalar" in str(error)
    except RemoteError as error:
        assert error.rank == world.size - 1 and error.kind == "TypeError"
    else:
        raise AssertionError("nothing was raised")


async def case_a_reduction_is_computed_once_and_equal_everywhere(world: ad.World) -> None:
    draws = [np.random.default_rng(rank).random(5) for rank in range(world.size)]
    calls = []

    def reduce(values: list[Any]) -> Any:
        calls.append(values)
        return np.sum(values, axis=0)

    for root in range(world.size):
        calls.clear()
        found = await ad.reduce_and_broadcast(lambda: draws[world.rank], reduce, root=root)
        assert same(found, np.sum(draws, axis=0))
        assert len(calls) == (world.rank == root)


async def case_an_exception_reaches_every_rank(world: ad.World) -> None:
    last = world.size - 1
    for failing in {0, last}:
        for text in ("bad luck", "", "ä" * 5, "\ud800"):
            shown = text.encode(errors="backslashreplace").decode()
            fn = (lambda text=text: fail(text)) if world.rank == failing else (lambda: 1)
            if shown == text:
                await expect_failure(ad.compute_and_broadcast(fn, root=failing), world, failing, text)
                await expect_failure(ad.gather_from_all_ranks(fn, root=last), world, failing, text)
                await expect_failure(ad.gather_scalar_from_all_ranks(fn), world, failing, text)
                await expect_failure(ad.reduce_and_broadcast(fn, sum), world, failing, text)
        await expect_failure(
            ad.reduce_and_broadcast(lambda: 1, lambda _: fail("reducing"), root=failing), world, failing, "reducing"
        )
    assert await ad.compute_and_broadcast(lambda: "still in step") == "still in step"


async def case_of_several_failures_the_first_is_told(world: ad.World) -> None:
    try:
        await ad.gather_from_all_ranks(lambda: fail(f"rank {world.rank}") if world.rank else 1)
    except Trouble as error:
        assert str(error) == f"rank {world.rank}"
    except RemoteError as error:
        assert world.rank == 0 and error.rank == 1
    else:
        assert world.size == 1


async def case_a_long_text_is_cut_and_says_so(world: ad.World) -> None:
    try:
        await ad.compute_and_broadcast(lambda: fail("long" * 10_000))
    except Trouble as error:
        assert world.rank == 0 and len(str(error)) == 40_000
    except RemoteError as error:
        assert error.text.startswith("longlong") and error.text.endswith("(40000 characters)")


async def case_an_exception_whose_text_fails(world: ad.World) -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    def raise_it() -> None:
        raise Silent

    try:
        await ad.compute_and_broadcast(raise_it)
    except Silent:
        assert world.rank == 0
    except RemoteError as error:
        assert "RuntimeError" in error.text and error.kind.endswith("Silent")


async def case_types_that_cannot_travel(world: ad.World) -> None:
    for value, words in UNSUPPORTED:
        for call in (
            lambda value=value: ad.compute_and_broadcast(lambda: value),
            lambda value=value: ad.gather_from_all_ranks(lambda: value if world.rank == 0 else 1, root=world.size - 1),
        ):
            try:
                await call()
            except (TypeError, ValueError) as error:
                assert world.rank == 0 and words in str(error), error
            except RemoteError as error:
                assert world.rank != 0 and error.rank == 0 and words in error.text
            else:
                raise AssertionError(f"{value!r} travelled")


async def case_cancelling_the_computing_rank_frees_the_others(world: ad.World) -> None:
    async def endless() -> None:
        await asyncio.Event().wait()

    if world.rank == 0:
        task = asyncio.ensure_future(ad.compute_and_broadcast(endless))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
    else:
        try:
            await ad.compute_and_broadcast(endless)
        except RemoteError as error:
            assert error.kind.endswith("CancelledError")
    assert await ad.compute_and_broadcast(lambda: 7) == 7
    await ad.barrier()


async def case_giving_up_while_waiting_keeps_everybody_in_step(world: ad.World) -> None:
    """A rank that is cancelled still takes part in the collective; its next call in the group follows afterwards."""
    if world.rank == 0:
        await asyncio.sleep(0.02)
    task = asyncio.ensure_future(ad.reduce_and_broadcast(lambda: bytes(100_000), lambda values: sum(map(len, values))))
    await asyncio.sleep(0)
    if world.rank == world.size - 1 and world.rank > 0:
        task.cancel()
        await asyncio.wait([task])
    else:
        assert await task == 100_000 * world.size
    total = await ad.all_reduce(torch.full((400_000,), float(world.rank)))
    assert bool((total == sum(range(world.size))).all())
    assert await ad.compute_and_broadcast(lambda: "in step", root=world.size - 1) == "in step"


async def case_zero_first(world: ad.World) -> None:
    before = await ad.new_group(range(world.size))
    order: list[str] = []
    async with ad.zero_first(world.rank == 0):
        if world.rank == 0:
            await asyncio.sleep(0.005)
        order.append("block")
        entered_at = world.time()
    times = await ad.gather_from_all_ranks(lambda: entered_at, group=before)
    if times is not None:  # the ranks are on one host, and so share one clock
        assert all(times[0] <= time for time in times[1:])
    async with ad.zero_first(world.rank > 0 or world.size == 1):
        order.append("block")
    assert order == ["block", "block"]


async def case_zero_first_and_exceptions(world: ad.World) -> None:
    entered = False

    async def prepare() -> None:
        nonlocal entered
        async with ad.zero_first(world.rank == 0):
            entered = True
            if world.rank == 0:
                raise Trouble("no download")

    await expect_failure(prepare(), world, 0, "no download")
    assert entered == (world.rank == 0)

    async def use() -> None:
        async with ad.zero_first(world.rank == 0):
            if world.rank == world.size - 1:
                raise Trouble("its own affair")

    if world.size == 1 or world.rank == world.size - 1:
        await expect_failure(use(), world, world.rank, "its own affair")
    else:
        await use()
    await ad.barrier()


async def case_zero_first_without_a_main_rank(world: ad.World) -> None:
    try:
        async with ad.zero_first(False):
            raise AssertionError("entered")
    except LocalProtocolError as error:
        assert "False on all" in str(error)


async def case_zero_only(world: ad.World) -> None:
    done = []
    async with ad.zero_only() as is_main:
        assert is_main == (world.rank == 0)
        if is_main:
            await asyncio.sleep(0.005)
            done.append(world.time())
    left_at = world.time()
    main_at = await ad.compute_and_broadcast(lambda: done[0])
    assert left_at >= main_at  # the ranks are on one host, and so share one clock
    for root in range(world.size):
        async with ad.zero_only(root=root) as is_main:
            assert is_main == (world.rank == root)


async def case_zero_only_and_exceptions(world: ad.World) -> None:
    for failing in {0, world.size - 1}:

        async def block(failing: int = failing) -> None:
            async with ad.zero_only():
                if world.rank == failing:
                    raise Trouble("in the block")

        await expect_failure(block(), world, failing, "in the block")
    await ad.barrier()


async def case_who_am_i(world: ad.World) -> None:
    assert ad.is_distributed() == (world.size > 1)
    assert ad.is_main_process() == (world.rank == 0)
    group = await ad.new_group(list(reversed(range(world.size))))
    assert ad.is_main_process(group=group) == (world.rank == world.size - 1)


async def case_two_groups_at_once_and_nobody_else(world: ad.World) -> None:
    """Even and odd ranks run different calls at their own pace; ranks are numbered as in the world."""
    parity = world.rank % 2
    ranks = list(range(parity, world.size, 2))
    group = await ad.new_group(ranks)
    for round_number in range(1 + 3 * parity):
        found = await ad.gather_from_all_ranks(lambda: world.rank, group=group, root=ranks[-1])
        assert found == (ranks if world.rank == ranks[-1] else None)
        value = await ad.compute_and_broadcast(partial(tuple, (parity, round_number)), root=ranks[-1], group=group)
        assert value == (parity, round_number)
        assert await ad.reduce_and_broadcast(lambda: world.rank, sum, group=group) == sum(ranks)
        async with ad.zero_only(group=group) as is_main, ad.zero_first(world.rank == ranks[0], group=group):
            assert is_main == (world.rank == ranks[0])
    await ad.barrier()


async def case_scalars_of_a_group_come_in_its_order(world: ad.World) -> None:
    """The scalars arrive at the root, with the group's size and failures; the rank outside the group takes no part."""
    members = all_but_one(world)
    if world.rank in members:
        group = await ad.new_group(members)
        for root in (None, members[-1]):
            found = await ad.gather_scalar_from_all_ranks(
                lambda: 2**60 + world.rank, len(members), root=root, group=group
            )
            is_root = world.rank == (members[0] if root is None else root)
            assert found == ([2**60 + rank for rank in members] if is_root else None)
        wrong = len(members) + 1  # the world's size, if it has more than one rank
        await refused(ad.gather_scalar_from_all_ranks(lambda: 1, wrong, group=group), ValueError, "world_size", wrong)
        last = members[-1]
        fn = (lambda: fail("no number")) if world.rank == last else (lambda: 1)
        await expect_failure(ad.gather_scalar_from_all_ranks(fn, group=group), world, last, "no number")
        assert await ad.compute_and_broadcast(lambda: "in step", group=group) == "in step"
    else:
        group = ad.Group.seen_from_outside(members)
        await refused(
            ad.gather_scalar_from_all_ranks(lambda: 1, group=group),
            LocalProtocolError,
            f"rank {world.rank}",
        )
    await ad.barrier()


def all_but_one(world: ad.World) -> list[int]:
    """Return a group in descending order, so that its root is not the world's, without one rank in the middle."""
    return [rank for rank in reversed(range(world.size)) if rank != world.size // 2 or world.size == 1]


async def case_outsiders_and_bad_arguments(world: ad.World) -> None:
    """Invalid arguments are refused on the calling rank before anything is sent."""
    outside = ad.Group.seen_from_outside([0])
    for call in (
        lambda: ad.compute_and_broadcast(lambda: 1, group=outside),
        lambda: ad.gather_from_all_ranks(lambda: 1, group=outside),
        lambda: ad.reduce_and_broadcast(lambda: 1, sum, group=outside),
        lambda: ad.barrier(group=outside),
        lambda: ad.zero_only(group=outside).__aenter__(),
        lambda: ad.zero_first(True, group=outside).__aenter__(),
    ):
        await refused(call(), LocalProtocolError, f"rank {world.rank}", [0])
    size = world.size
    wrong: list[Any] = [size, -1, 0.0, True, "0"]
    for root in wrong:
        await refused(ad.compute_and_broadcast(lambda: 1, root=root), LocalProtocolError, "root", repr(root))
    await refused(ad.gather_from_all_ranks(lambda: 1, size + 1), ValueError, "world_size", size + 1)
    await refused(ad.compute_and_broadcast(3), TypeError, "fn must be a function or coroutine function, got 3")  # type: ignore[call-overload]
    await refused(ad.reduce_and_broadcast(lambda: 1, None), TypeError, "fn2", None)  # type: ignore[call-overload]
    await refused(ad.zero_first(1).__aenter__(), TypeError, "is_main", 1, True, False)  # type: ignore[arg-type]
    await refused(ad.barrier(group=[0, 1]), TypeError, "group", [0, 1])  # type: ignore[arg-type]
    await ad.barrier()


async def refused(awaitable: Any, kind: type[Exception], *facts: object) -> None:
    try:
        await awaitable
    except kind as error:
        assert names(error, *facts), error
    else:
        raise AssertionError(f"{facts}: not refused")
