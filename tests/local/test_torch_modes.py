"""Tests that ranks in one thread have separate grad mode, inference mode and autocast, like processes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import pytest
import torch

import asyncdist as ad
from asyncdist.tensors import torch_modes
from asyncdist.tensors.torch_modes import modes_now

MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "inference": torch.inference_mode,
    "no inference": lambda: torch.inference_mode(False),
    "autocast": lambda: torch.autocast("cpu"),
    "float16": lambda: torch.autocast("cpu", dtype=torch.float16),
    "no autocast": lambda: torch.autocast("cpu", enabled=False),
    "no cache": lambda: torch.autocast("cpu", cache_enabled=False),
}


def autocast_loses_gradients() -> bool:
    """Return whether autocast reuses a cast without gradients when gradients are recorded, as torch 2.8 does."""
    weight = torch.nn.Parameter(torch.ones(2, 2))
    with torch.autocast("cpu"):
        with torch.no_grad():
            weight @ weight
        return not (weight @ weight).requires_grad


def walk(seed: int) -> Iterator[Any]:
    """Enter and leave torch modes at random, and record the active modes before each step."""
    draw = random.Random(seed)
    weight = torch.nn.Parameter(torch.ones(2, 2))
    stacks: list[ExitStack] = []
    modes = list(MODES)
    has_lost_casts = autocast_loses_gradients()
    modes.remove(draw.choice(["autocast", "float16"]))  # torch's cache would mix the two dtypes
    for step in range(40):
        if has_lost_casts:
            torch.clear_autocast_cache()
        found = weight @ weight
        yield modes_now(), found.dtype, found.requires_grad, found.is_inference(), found.sum().item()
        if stacks and draw.random() < 0.5:
            stacks.pop().close()
        else:
            stacks.append(ExitStack())
            stacks[-1].enter_context(MODES[draw.choice(modes)]())
        if not stacks and step % 3 == 0:
            with torch.no_grad():
                weight += 1  # autocast's cached copy of the weight is outdated now
    while stacks:
        stacks.pop().close()
    yield modes_now()


async def walk_together(world: ad.World) -> list[Any]:
    seen = []
    for found in walk(world.rank):
        seen.append(found)
        await asyncio.sleep(0)
    return seen


def test_every_rank_sees_what_it_would_see_alone_on_one_loop() -> None:
    alone = [list(walk(rank)) for rank in range(8)]
    for loop in ("asyncio", "uvloop"):
        assert ad.run_local(walk_together, ranks=8, loop=loop) == alone  # type: ignore[arg-type]


@pytest.mark.parametrize("first", ["GPU 7", None])
@pytest.mark.parametrize("simulated", [False, True])
def test_every_rank_has_its_own_gpu(first: str | None, simulated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: after torch.cuda.set_device in each rank, all ranks made their tensors on the last rank's GPU."""
    current = [first]
    monkeypatch.setattr(torch_modes, "_HAS_CUDA", True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: current[0] is not None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "default_stream", "GPU {}".format)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: current.insert(0, stream))

    async def main(world: ad.World) -> list[str | None]:
        seen = [current[0]]
        for turn in range(3):
            current.insert(0, f"stream {turn} of GPU {world.rank}")
            await asyncio.sleep(0)
            seen.append(current[0])
        return seen

    found = list(ad.simulate(main, ranks=3).results) if simulated else ad.run_local(main, ranks=3)
    for rank, (before, *seen) in enumerate(found):
        assert before in ((first,) if first else (None, "GPU 0"))
        assert seen == [f"stream {turn} of GPU {rank}" for turn in range(3)]
    assert current[0] == (first or "GPU 0")


def test_every_simulated_rank_sees_what_it_would_see_alone() -> None:
    alone = [list(walk(rank)) for rank in range(8)]
    before = modes_now()
    for seed in range(5):
        assert list(ad.simulate(walk_together, ranks=8, seed=seed).results) == alone
        assert modes_now() == before


@pytest.mark.parametrize("name", ["no_grad", "inference", "autocast"])
def test_the_last_to_leave_leaves_nothing_behind(name: str) -> None:
    """Two ranks leave a mode in the order of entry, so the second restores what the first had set."""

    async def main(world: ad.World) -> None:
        for turn in range(2):
            if turn == world.rank:
                context = MODES[name]()
                context.__enter__()
            await ad.barrier()
        for turn in range(2):
            if turn == world.rank:
                context.__exit__(None, None, None)
            await ad.barrier()

    before = modes_now()
    ad.run_local(main, ranks=2)
    assert modes_now() == before
    ad.simulate(main, ranks=2).value()
    assert modes_now() == before


def test_tasks_have_their_ranks_modes_and_ranks_the_callers() -> None:
    async def ask() -> bool:
        await asyncio.sleep(0)
        return torch.is_grad_enabled()

    async def main(world: ad.World) -> list[bool]:
        began = torch.is_grad_enabled()
        with torch.set_grad_enabled(world.rank == 1):
            async with asyncio.TaskGroup() as tasks:
                mine = tasks.create_task(ask())
            return [began, mine.result(), *await asyncio.gather(ask(), world.spawn(ask()))]

    for caller in (True, False):
        with torch.set_grad_enabled(caller):
            assert ad.run_local(main, ranks=2) == [[caller, False, False, False], [caller, True, True, True]]
            assert torch.is_grad_enabled() == caller


def test_rank_without_grad_takes_no_gradients_from_a_trainer() -> None:
    """Rank 0 evaluates without gradients, and meanwhile waits for rank 1, which trains."""

    async def main(world: ad.World) -> float:
        weight = torch.nn.Parameter(torch.tensor(2.0))
        if world.rank == 0:
            with torch.inference_mode():
                await ad.broadcast(torch.zeros(1), 1)
                return float(weight * weight)
        for _ in range(3):
            (weight * weight).backward()
            await asyncio.sleep(0)
        await ad.broadcast(torch.ones(1), 1)
        assert weight.grad is not None
        return float(weight.grad)

    assert ad.run_local(main, ranks=2) == [4.0, 12.0]
