"""A member returns, and the others call collectives that need it: each call raises ClosedError that names it.

The same file runs in four worlds; ``test_left_members.py`` starts it. With ``waiting``, the others are in the
collective before the leaver leaves. With ``cancelled``, they have abandoned each collective by then, and nothing of it
is left over at the end.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import torch
from support.mpi import report

import asyncdist as ad
from asyncdist.errors import ClosedError

LEAVER = 0


def calls(world: ad.World, group: ad.Group) -> dict[str, Callable[[], Awaitable[Any]]]:
    """Return the calls by name.

    The leaver is the root if there is one; reductions have 2 MiB if their pieces matter.
    """
    model = torch.nn.Linear(3, 3)
    small, large = torch.ones(3), torch.ones(1 << 19)
    return {
        "barrier": lambda: ad.barrier(group=group),
        "broadcast": lambda: ad.broadcast(small, LEAVER, group=group),
        "gather to it": lambda: ad.gather(small, LEAVER, group=group),
        "gather": lambda: ad.gather(small, group.ranks[-1], group=group),
        "all_gather": lambda: ad.all_gather(small, group=group),
        "all_reduce": lambda: ad.all_reduce(small, group=group),
        "all_reduce in pieces": lambda: ad.all_reduce(large, group=group),
        "all_to_all": lambda: ad.all_to_all([small] * group.size, group=group),
        "compute_and_broadcast": lambda: ad.compute_and_broadcast(lambda: 1, group=group),
        "gather_from_all_ranks": lambda: ad.gather_from_all_ranks(lambda: 1, group=group),
        "average_models": lambda: ad.average_models(model, group),
        "average_gradients": lambda: ad.average_gradients(model, group),
        "gather_distributed_data": lambda: ad.gather_distributed_data([1], training_group=group),
    }


async def cancel(calls: dict[str, Callable[[], Awaitable[Any]]]) -> None:
    """Call each collective, and cancel the call when it waits for the leaver."""
    for call in calls.values():
        task = asyncio.ensure_future(call())
        for _ in range(10):
            await asyncio.sleep(0)
        task.cancel()  # a small gather may already be complete on its member
        await asyncio.wait([task])


async def main(world: ad.World, way: str) -> dict[str, str]:
    """Return the outcome of each call."""
    found: dict[str, str] = {}
    names = list(calls(world, world.group))
    groups = {name: await ad.new_group(range(world.size)) for name in names}
    others = await ad.new_group(range(1, world.size)) if world.rank != LEAVER else None
    flag = torch.full((1,), 7.0)
    for group in groups.values():  # a collective in which the leaver has taken part completes, in any order of entry
        await ad.broadcast(flag, LEAVER, group=group)
    tasks = {name: calls(world, groups[name])[name] for name in names}
    if way == "cancelled":
        await cancel(tasks if world.rank != LEAVER else {})
        await ad.barrier()
        return {}
    if world.rank == LEAVER:
        if way == "waiting":
            await world.sleep(0.3)
        return {}
    if way == "left":
        await world.services.engine.until(lambda: LEAVER in world.services.gone)
    for name, call in tasks.items():
        try:
            await call()
            found[name] = "it came to an end"
        except ClosedError as error:
            found[name] = f"ClosedError {error.rank}"
        except Exception as error:
            found[name] = repr(error)
    await ad.barrier(group=others)  # the other ranks continue without the leaver
    assert flag == 7.0
    return found


def check(results: Any, ranks: int = 3) -> None:
    for rank in range(1, ranks):
        assert results[rank] == dict.fromkeys(results[rank], f"ClosedError {LEAVER}"), rank
        assert len(results[rank]) == 13
    assert results[0] == {}


async def reporting(world: ad.World, way: str) -> None:
    report(world.rank, await main(world, way))


if __name__ == "__main__":
    ad.run(reporting, sys.argv[1], strict=True)
