"""Cases in which one rank fails while the others wait for it along an axis: all are notified, and continue."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from support import jax_table
from support.facts import naming

import asyncdist as ad
from conformance.cases_population import GRIDS
from conformance.endpoint import Endpoint


class Stumble(Exception):
    """An exception of these tests."""


def stumble(rank: int) -> None:
    raise Stumble(f"rank {rank} stumbles")


async def expect(end: Endpoint, failing: int, awaitable: Awaitable[Any], kind: type[Exception], words: str) -> None:
    """Expect the exception itself on the failing rank, and on the others a RemoteError with all its details."""
    with pytest.raises(kind if end.rank == failing else ad.RemoteError) as caught:
        await awaitable
    if end.rank == failing:
        assert words in str(caught.value)
    else:
        error: Any = caught.value
        assert (error.rank, error.kind.rpartition(".")[2]) == (failing, kind.__name__)
        assert words in error.text and str(error).count(error.text) == 1 and f"rank {failing} " in str(error)


async def check_in_step(end: Endpoint, mesh: ad.Mesh) -> None:
    """Check that a failure leaves nothing behind that affects the next operation along any axis."""
    for name, size in mesh.axes.items():
        assert (await ad.psum(torch.tensor([1]), name, mesh=mesh)).item() == size


#: A function of rows that ``shmap_map`` calls.
Inner = Callable[[torch.Tensor], Awaitable[torch.Tensor]]


def failing_ranks(end: Endpoint) -> Iterable[int]:
    """Return the rank that leads agreements, and a rank that does not."""
    return sorted({0, end.size - 1})


async def case_a_group_of_nobody(end: Endpoint) -> None:
    """An invalid group on one rank does not affect the other ranks, which make their own group."""
    nobody: tuple[Sequence[int], ...] = ([], (), range(0))
    for ranks in nobody:
        with pytest.raises(ad.LocalProtocolError, match=naming("ranks")):
            await ad.new_group(ranks)
    everybody = range(end.size)
    if end.rank == end.size - 1:
        with pytest.raises(ad.LocalProtocolError, match=naming("ranks")):
            await ad.new_group([])
    group = await ad.new_group(everybody)
    assert float(await ad.all_reduce(torch.tensor(1.0), group=group)) == end.size


async def case_a_wrong_grid_on_one_rank(end: Endpoint) -> None:
    for failing in failing_ranks(end):
        for axes, kind, words in (
            ({"POP": end.size + 1}, ValueError, f"{end.size + 1} "),
            ({"POP": 0}, ValueError, "'POP'"),
            ({3: 1}, TypeError, "an integer >= 1 as its size, got 3: 1"),
            ({}, ValueError, "axes "),
        ):
            chosen: Any = axes if end.rank == failing else {"POP": end.size}
            await expect(end, failing, ad.new_mesh(chosen), kind, words)
    await check_in_step(end, await ad.new_mesh({"POP": end.size}))


async def case_wrong_parallelisms_on_one_rank(end: Endpoint) -> None:
    for failing in failing_ranks(end):
        number = end.size + 1 if end.rank == failing else 1
        words = f"model_parallelism={end.size + 1}"
        await expect(end, failing, ad.new_parallel_groups(number), ValueError, words)
    if end.size > 1:
        numbers = (1, end.size) if end.rank == 0 else (end.size, 1)
        told = naming("model_parallelism", 1, "rank 0", end.size, "rank 1")
        with pytest.raises(ad.DisagreementError, match=told):
            await ad.new_parallel_groups(*numbers)
    groups = await ad.new_parallel_groups(end.size)
    assert groups.model.ranks == tuple(range(end.size)) and groups.data.ranks == (end.rank,)


async def case_a_function_of_shards_fails_on_one_rank(end: Endpoint) -> None:
    """The function fails in its call, before it or after it, with outputs along one axis or along both."""
    shape = GRIDS[end.size]
    grid = await ad.new_mesh({"POP": shape[0], "DP": shape[1]})
    line = await ad.new_mesh({"POP": end.size})
    rows = torch.ones(2 * end.size, 3)
    for failing in failing_ranks(end):
        fails = end.rank == failing

        def function(row: torch.Tensor, fails: bool = fails) -> Any:
            if fails:
                stumble(end.rank)
            return row.sum(), row

        def wrong_output(row: torch.Tensor, fails: bool = fails) -> Any:
            return ("text" if fails else row.sum()), row

        for run in (ad.shmap_map, ad.shmap_vmap):
            words = f"rank {failing} stumbles"
            await expect(end, failing, run(function, line, "POP", "POP")(rows), Stumble, words)
            await expect(end, failing, run(wrong_output, line, "POP", "POP")(rows), TypeError, "output[0]")
            odd = run(lambda row: row, line, "POP", "POP")(rows[1:] if fails and end.size > 1 else rows)
            if end.size > 1:
                await expect(end, failing, odd, ValueError, f" {2 * end.size - 1}")
            else:
                assert torch.equal(await odd, rows)
            await check_in_step(end, line)
            # With outputs along both axes, every rank shares an axis with a rank that does not get its outputs.
            for specs in (("POP", "DP"), ("DP", "POP")):
                with pytest.raises((Stumble, ad.RemoteError)) as caught:
                    await run(function, grid, "DP", specs)(rows)
                assert isinstance(caught.value, Stumble) == fails and words in str(caught.value)
                await check_in_step(end, grid)


async def case_collectives_in_a_function_that_fails_on_one_rank(end: Endpoint) -> None:
    """The ranks that wait in a collective are notified there, once, whatever they do with the error."""
    mesh = await ad.new_mesh({"POP": end.size})
    rows = torch.arange(3.0 * end.size)

    async def plainly(row: torch.Tensor) -> torch.Tensor:
        return await ad.psum(row, "POP")

    async def wrapped(row: torch.Tensor) -> torch.Tensor:
        try:
            return await ad.psum(row, "POP")
        except ad.RemoteError as error:
            raise Stumble(f"because {error}") from None

    async def in_a_task(row: torch.Tensor) -> torch.Tensor:
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(ad.psum(row, "POP"))
        return task.result()

    for failing in failing_ranks(end):
        for inner in (plainly, wrapped, in_a_task):

            async def function(row: torch.Tensor, failing: int = failing, inner: Inner = inner) -> torch.Tensor:
                if end.rank == failing and int(row) % 3 == 1:
                    stumble(failing)
                return await inner(row)

            with pytest.raises((Stumble, ad.RemoteError, ExceptionGroup)) as caught:
                await ad.shmap_map(function, mesh, "POP", "POP")(rows)
            error = caught.value.exceptions[0] if isinstance(caught.value, ExceptionGroup) else caught.value
            assert f"rank {failing} stumbles" in str(error)
            await check_in_step(end, mesh)


async def case_a_cancelled_function_of_shards(end: Endpoint) -> None:
    mesh = await ad.new_mesh({"POP": end.size})
    failing, begun = end.size - 1, asyncio.Event()

    async def function(row: torch.Tensor) -> torch.Tensor:
        begun.set()
        if end.rank == failing:
            await asyncio.Event().wait()
        return row

    task = asyncio.ensure_future(ad.shmap_map(function, mesh, "POP", "POP")(torch.ones(end.size)))
    await begun.wait()
    if end.rank == failing:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        with pytest.raises(ad.RemoteError, match=f"rank {failing} .*asyncio.exceptions.CancelledError"):
            await task
    await check_in_step(end, mesh)


async def case_a_loss_that_fails_on_one_rank(end: Endpoint) -> None:
    mesh = await ad.new_mesh({"DP": end.size})
    weight = torch.tensor([1.0, 2.0], requires_grad=True)

    def loss(params: torch.Tensor, failing: int, *, agent: Any = None) -> torch.Tensor:
        if end.rank == failing:
            stumble(failing)
        return (params**2).sum()

    descent = jax_table.Descent(0.5, 0.0)
    steps: list[Callable[[int], Awaitable[Any]]] = [
        lambda failing: ad.gradient_update(loss, descent, "DP")(torch.zeros(2), weight.detach(), failing)
    ]
    if end.size != 4 or end.world.transport_name not in (
        "mpi",
        "torch",
    ):  # see cases_population.case_torchs_optimizer_steps_along_an_axis
        in_place = ad.gradient_update(loss, torch.optim.SGD([weight], lr=0.5), "DP")
        steps.append(lambda failing: in_place(None, weight, failing))

    def detach(agent: dict[str, Any]) -> torch.Tensor:
        if end.rank == agent["failing"]:
            stumble(agent["failing"])
        return weight.detach()

    of_agent = ad.agent_gradient_update(
        lambda params: (params**2).sum(), descent, "DP", attach_fn=lambda _, params: params, detach_fn=detach
    )
    steps.append(lambda failing: of_agent(torch.zeros(2), {"failing": failing}))
    with mesh:
        for step in steps:
            for failing in failing_ranks(end):
                await expect(end, failing, step(failing), Stumble, f"rank {failing} stumbles")
                assert weight.tolist() == [1.0, 2.0]
            await check_in_step(end, mesh)
        # A second attempt fails elsewhere while the first failure is being handled: this is a different failure.
        try:
            await steps[0](0)
        except (Stumble, ad.RemoteError):
            await expect(end, end.size - 1, steps[0](end.size - 1), Stumble, f"rank {end.size - 1} stumbles")
        _, found, _ = await ad.gradient_update(loss, descent, "DP")(torch.zeros(2), weight.detach(), -1)
    assert found.tolist() == [0.0, 0.0]
