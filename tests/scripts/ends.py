"""Contains ways in which a job can end; ``test_ends.py`` runs them: ``ends.py FOLDER WAY``.

A rank creates FOLDER/ready.RANK when it has reached the point at which the test acts.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import asyncdist as ad
from asyncdist import _version
from asyncdist.runtime import handshake
from protocols import AsyncSelectiveAveragingPolicy

faulthandler.enable()
FOLDER = Path(sys.argv[1])
#: Longer than any test waits: a rank that still runs then was not ended.
FOR_EVER_S = 300.0
#: Ways that call :func:`asyncdist.run` themselves, if they call it.
STARTS = (
    "before_run",
    "alone_in_the_handshake",
    "late_to_the_handshake",
    "held_in_the_handshake",
    "of_another_version",
)
LAUNCHED_AS = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or 0)


def ready(rank: int) -> None:
    maps = Path("/proc/self/maps")  # lists the memory that MPI shares with other ranks
    lines = maps.read_text().splitlines() if maps.exists() else []
    names = {line.split(maxsplit=5)[5] for line in lines if " /dev/shm/" in line and "(deleted)" not in line}
    (FOLDER / f"memory.{rank}").write_text("\n".join(sorted(names)))
    partial = FOLDER / f"partial.{rank}"
    partial.write_text(str(os.getpid()))
    partial.rename(FOLDER / f"ready.{rank}")


async def all_ready(world: ad.World) -> None:
    await ad.barrier()
    ready(world.rank)


async def all_past_any_await(world: ad.World) -> None:
    """Return when no rank awaits anything, so that none is notified of another's failure before its own."""
    await all_ready(world)
    block_until_all_are_ready(world.size)


def block_until_all_are_ready(size: int) -> None:
    while not all((FOLDER / f"ready.{rank}").exists() for rank in range(size)):
        time.sleep(0.001)


def make_policy(model: nn.Module, **options: Any) -> AsyncSelectiveAveragingPolicy:
    optimizer: Any = SimpleNamespace(
        param_groups=[{"params": [*model.parameters()]}], state={}
    )  # torch's own termination takes seconds
    return AsyncSelectiveAveragingPolicy(model, optimizer, average_every=2, grace_s=0.01, **options)


async def train(world: ad.World, at: Callable[[int], Coroutine[Any, Any, None]], *, width: int = 8) -> None:
    """Train forever, and call ``at(step)`` in each step."""
    model = nn.Linear(width, width)
    async with make_policy(model) as policy:
        step = 0
        while True:
            step += 1
            await at(step)
            await policy.step(float(world.rank))


def compute(seconds: float) -> None:
    time.sleep(seconds)


async def quietly(_step: int) -> None:
    compute(0.001)


async def raises(world: ad.World) -> None:
    async def at(step: int) -> None:
        if step == 30 and world.rank == 1:
            raise ValueError("boom-7")

    await train(world, at)


async def raises_at_length(world: ad.World) -> None:
    async def at(step: int) -> None:
        if step == 20 and world.rank == 1:
            raise ValueError("x" * 100_000)

    await train(world, at)


async def raises_everywhere(world: ad.World) -> None:
    await all_past_any_await(world)
    raise ValueError("boom-7")


async def misspells_everywhere(world: ad.World) -> None:
    await all_past_any_await(world)
    training_loss = 1.0
    print(trainin_loss, training_loss)  # type: ignore[name-defined]  # noqa: F821


async def takes_no_world() -> None:
    raise AssertionError


def is_no_coroutine_function(world: ad.World) -> None:
    raise AssertionError


async def raises_its_own_everywhere(world: ad.World) -> None:
    await all_past_any_await(world)
    raise ValueError(f"boom-{world.rank}")


async def raises_beside_a_blocked_peer(world: ad.World) -> None:
    await all_ready(world)
    if world.rank == 0:
        compute(FOR_EVER_S)
    raise ValueError("boom-7")


async def raises_before_a_policy_of_others(world: ad.World) -> None:
    if world.rank == 1:
        raise ValueError("boom-7")
    async with make_policy(nn.Linear(2, 2)):
        pass


async def average_without_end(world: ad.World, strike: Callable[[], None]) -> None:
    """Average 64 MiB again and again.

    Rank 2 leaves during one average, and ``strike`` is called on rank 1 in another one.
    """
    model = nn.Linear(4096, 4096)
    averaging = asyncio.ensure_future(ad.average_models(model))
    await world.safe_point()
    if world.rank == 2:
        averaging.cancel()
        return
    await averaging  # a rank that leaves does its part first
    try:
        await ad.average_models(model)
    except ad.ClosedError as error:
        assert error.rank == 2
        print("told of rank 2", flush=True)
    group = await ad.new_group([0, 1])
    await ad.average_models(model, group)

    async def wait_and_strike() -> None:
        await asyncio.sleep(0.01)
        strike()

    if world.rank == 1:
        world.spawn(wait_and_strike())
    while True:
        await ad.average_models(model, group)


async def killed_in_an_average(world: ad.World) -> None:
    await average_without_end(world, lambda: os.kill(os.getpid(), signal.SIGKILL))


async def raises_in_an_average(world: ad.World) -> None:
    def fail() -> None:
        raise ValueError("boom-7")

    await average_without_end(world, fail)


async def steps(world: ad.World) -> None:
    async def at(step: int) -> None:
        compute(0.002)
        if step == 20:
            ready(world.rank)

    await train(world, at)


async def streams(world: ad.World) -> None:
    """Stream 32 MiB back and forth between two ranks forever."""
    tensor = torch.zeros(8 << 20)
    other = 1 - world.rank
    count = 0
    while True:
        count += 1
        if world.rank == 0:
            await world.send_stream(tensor, other)
            await world.receive_stream(tensor, other)
        else:
            await world.receive_stream(tensor, other)
            await world.send_stream(tensor, other)
        if count == 3:
            ready(world.rank)


async def policy_streams(world: ad.World) -> None:
    """Stream 64 MiB from a donor to a replacer, round after round."""

    async def at(step: int) -> None:
        if step == 10:
            ready(world.rank)

    await train(world, at, width=4096)


async def policy_start(world: ad.World) -> None:
    """Rank 0 never creates the policy that the others wait for."""
    ready(world.rank)
    if world.rank == 0:
        await asyncio.sleep(FOR_EVER_S)
    async with make_policy(nn.Linear(2, 2), start_timeout_s=FOR_EVER_S):
        pass


async def blocked(world: ad.World) -> None:
    """All ranks are inside a blocking call, and do not react to the first signal."""
    await all_ready(world)
    began_at = time.monotonic()
    while time.monotonic() < began_at + FOR_EVER_S:
        compute(0.1)


async def exits(world: ad.World, code: int) -> None:
    """Rank 1 leaves by sys.exit at step 20, the others at step 200."""

    async def at(step: int) -> None:
        if step == (20 if world.rank == 1 else 200):
            sys.exit(code if world.rank == 1 else 0)

    await train(world, at)


async def raises_keyboard_interrupt(world: ad.World) -> None:
    async def at(step: int) -> None:
        if step == 20 and world.rank == 1:
            raise KeyboardInterrupt

    await train(world, at)


async def raises_cancelled(world: ad.World) -> None:
    async def at(step: int) -> None:
        if step == 20 and world.rank == 1:
            raise asyncio.CancelledError

    await train(world, at)


async def background_task_fails(world: ad.World) -> None:
    async def fail() -> None:
        for _ in range(20):
            await world.safe_point()
        raise ValueError("boom-7")

    if world.rank == 1:
        world.spawn(fail(), name="the one that fails")
    await train(world, quietly)


async def shards_fail(world: ad.World, *, behind: bool) -> None:
    """Fail in a population's function: in the last rank itself, or in one of its tasks while that function waits."""
    mesh = await ad.new_mesh({"POP": world.size})

    async def fail() -> None:
        raise ValueError("boom-7")

    async def function(row: torch.Tensor) -> torch.Tensor:
        if world.rank == world.size - 1:
            if not behind:
                await fail()
            world.spawn(fail(), name="the one that fails")
            await world.sleep(300.0)
        return row

    await ad.shmap_map(function, mesh, "POP", "POP")(torch.ones(world.size))


async def shards_fail_in_the_function(world: ad.World) -> None:
    await shards_fail(world, behind=False)


async def shards_fail_behind_it(world: ad.World) -> None:
    await shards_fail(world, behind=True)


async def returns_early(world: ad.World) -> int:
    """Rank 2 leaves at once. Rank 0 is replaced with rank 1's weights until it has seen this three times."""
    model = nn.Linear(4, 4)
    replaced = 0
    async with make_policy(model) as policy:
        if world.rank == 2:
            await policy.step(2.0)
            return 0
        while replaced < 3 and 0 not in world.services.left and 1 not in world.services.left:
            replaced += bool(await policy.step(float(world.rank)))
    return replaced


async def killed(world: ad.World) -> None:
    async def at(step: int) -> None:
        compute(0.002)
        if step == 20:
            ready(world.rank)
        if step == 30 and world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    await train(world, at)


def before_run() -> None:
    ready(LAUNCHED_AS)
    time.sleep(FOR_EVER_S)


def alone_in_the_handshake() -> None:
    """Rank 0 never arrives."""
    ready(LAUNCHED_AS)
    if LAUNCHED_AS == 0:
        time.sleep(FOR_EVER_S)
    ad.run(quiet_main)


def late_to_the_handshake() -> None:
    """Rank 0 arrives when the test lets it."""
    ready(LAUNCHED_AS)
    while LAUNCHED_AS == 0 and not (FOLDER / "go").exists():
        time.sleep(0.05)
    ad.run(quiet_main)


def held_in_the_handshake() -> None:
    """MPI has started on all ranks; rank 0 does not take part in the handshake."""
    original = handshake.complete_handshake

    async def hold(*arguments: Any) -> Any:
        ready(LAUNCHED_AS)
        if LAUNCHED_AS == 0:
            await asyncio.sleep(FOR_EVER_S)
        return await original(*arguments)

    handshake.complete_handshake = hold
    ad.run(quiet_main)


def of_another_version() -> None:
    """Rank 1 reports another version of asyncdist."""
    if LAUNCHED_AS == 1:
        _version.__version__ = "9.9.9"
    ad.run(quiet_main)


async def quiet_main(world: ad.World) -> None:
    await train(world, quietly)


def main() -> None:
    signal.alarm(round(FOR_EVER_S))  # a rank that trains forever outlives a killed test, but not for long
    way = sys.argv[2]
    if way in STARTS:
        globals()[way]()
    elif way.startswith("exits"):
        ad.run(exits, int(way.removeprefix("exits_")))
    else:
        value = ad.run(globals()[way], grace_s=1.0 if "blocked" in way else 20.0)
        print(f"value {LAUNCHED_AS}: {value}", flush=True)


if __name__ == "__main__":
    main()
