"""Contains the programs of ``launched/test_policies.py``, which one job runs in turn; each rank reports.

No program depends on speed: it continues until the rank that it is about has seen enough and notifies the others.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from scripts.population import Mixed, State, Story, clone_state, equal_states, fill, flat_state, identity, sgd, values
from support.mpi import report
from torch import nn

import asyncdist as ad
from protocols import AsyncSelectiveAveragingPolicy, AverageAllPolicy, StepInfo

Report = dict[str, Any]
LIMIT_S = 90.0


@dataclass(frozen=True, slots=True)
class Stop:
    """Message to all other ranks: the program is complete."""


class Told:
    """Tracks whether the program continues. It ends for all ranks when every rank that it is about has seen enough."""

    def __init__(self, world: ad.World, about_count: int) -> None:
        self._world = world
        self._missing = about_count
        self._channel = world.channel(Stop, tag=40)
        self.over = False

    def __call__(self) -> bool:
        while not self.over and self._channel.receive_nowait() is not None:
            self._hear_one()
        return not self.over

    async def stop(self) -> None:
        for rank in range(self._world.size):
            if rank != self._world.rank:
                await self._channel.send(Stop(), rank)
        self._hear_one()

    def _hear_one(self) -> None:
        self._missing -= 1
        if not self._missing:
            self.over = True
            self._channel.close()


def plain(state: State) -> dict[str, list[float]]:
    return {name: tensor.tolist() for name, tensor in state.items()}


async def tell(
    world: ad.World,
    name: str,
    model: nn.Module,
    *,
    about: tuple[int, ...],
    count: int,
    metric: Callable[[], float],
    step: Callable[[], None] = lambda: None,
    leaves_at_once: int | None = None,
    story: Story | None = None,
    **options: Any,
) -> Report:
    """Train until each rank of ``about`` has been replaced ``count`` times."""
    goes_on = Told(world, len(about))
    infos: list[StepInfo] = []
    objects, start = identity(model), clone_state(model)
    if story is not None:
        options["on_event"] = story.listener(world.rank)
    began_at, steps = time.perf_counter(), 0
    async with AsyncSelectiveAveragingPolicy(
        model, sgd(model), **{"average_every": 3, "grace_s": 1.0, "name": name, **options}
    ) as policy:
        while goes_on():
            step()
            steps += 1
            if story is not None:
                story.before[world.rank] = flat_state(model)
            info = await policy.step(metric)
            if info:
                infos.append(info)
            if world.rank == leaves_at_once:
                break
            if info and world.rank in about and len(infos) == count:
                await goes_on.stop()
        if leaves_at_once is None:
            await ad.barrier()  # otherwise the ranks that leave last would continue to judge each other
    while goes_on():
        await world.safe_point()
    statistics = policy.statistics()
    assert identity(model) == objects
    return {
        "steps": steps,
        "seconds": time.perf_counter() - began_at,
        "replacements": len(infos),
        "donors": [info.donors for info in infos],
        "nbytes": [info.nbytes for info in infos],
        "unchanged": equal_states(clone_state(model), start),
        "sent_nbytes": statistics.sent_nbytes,
        "received_nbytes": statistics.received_nbytes,
        "read_nbytes": statistics.read_nbytes,
        "abandoned": dict(statistics.abandoned),
        "rounds": statistics.coordinator.rounds_decided if statistics.coordinator else None,
        "applied": dict(statistics.coordinator.applied) if statistics.coordinator else None,
        "nonfinite_reports": statistics.coordinator.nonfinite_report_count if statistics.coordinator else None,
    }


async def exactness(world: ad.World) -> Report:
    """Train with weights and metrics equal to the rank: the first rank gets the mean of the others, bit for bit."""
    model = Mixed(float(world.rank))
    seen = await tell(world, "exactness", model, about=(0,), count=3, metric=lambda: float(world.rank), quorum=1.0)
    return {
        **seen,
        "floating": sorted(values(model, floating=True)),
        "integers": sorted(values(model, floating=False)),
    }


async def diverged(world: ad.World) -> Report:
    """Train with a metric of NaN on the last rank."""
    model, last = Mixed(float(world.rank)), world.size - 1
    seen = await tell(
        world,
        "diverged",
        model,
        about=(last,),
        count=2,
        metric=lambda: math.nan if world.rank == last else float(world.rank),
        quorum=1.0,  # a slow machine must not cause decisions without some ranks
    )
    return {**seen, "floating": sorted(values(model, floating=True))}


async def large(world: ad.World) -> Report:
    """Train with 64 MiB and a counter, half of the ranks replaced, in one round: the bytes can be counted."""
    return await large_round(world, "direct")


async def sharded(world: ad.World) -> Report:
    """Do the same on the sharded route, on which each donor adds up one half."""
    return await large_round(world, "sharded")


async def large_round(world: ad.World, route: str) -> Report:
    model = fill(nn.Linear(4096, 4096, bias=False), float(world.rank))
    model.register_buffer("counter", torch.full((5,), world.rank))
    seen = await tell(
        world,
        f"large, {route}",
        model,
        about=(0, 1),
        count=1,
        route=route,
        metric=lambda: float(world.rank),
        replacement_ratio=0.5,
        threshold=0.5,
        cooldown=10**9,
    )
    weight = model.weight.detach()
    return {**seen, "low": float(weight.min()), "high": float(weight.max()), "counter": model.counter.tolist()}


async def near(world: ad.World) -> Report:
    """Train with snapshots of 2 MiB, which the replacer reads in the donors' memory from the second round on."""
    model = fill(nn.Linear(1024, 512, bias=False), float(world.rank))
    metric = float(world.rank)
    seen = await tell(world, "near", model, about=(0,), count=4, metric=lambda: metric, quorum=1.0)
    return {**seen, "weights": sorted(set(model.weight.flatten().tolist()))}


async def straggler(world: ad.World) -> Report:
    """Rank 1 takes five times as long for a step, and is the worst."""
    pause_s = 0.02 if world.rank == 1 else 0.004
    return await tell(
        world,
        "straggler",
        Mixed(float(world.rank)),
        about=(1,),
        count=3,
        metric=lambda: 0.0 if world.rank == 1 else 1.0 + world.rank,
        step=lambda: time.sleep(pause_s),
        grace_s=0.05,
    )


async def leaver(world: ad.World) -> Report:
    """The last rank leaves after one step, and the others continue."""
    return await tell(
        world,
        "leaver",
        Mixed(float(world.rank)),
        about=(0,),
        count=3,
        metric=lambda: float(world.rank),
        leaves_at_once=world.size - 1,
    )


async def headless(world: ad.World) -> Report:
    """The coordinator's rank leaves after one step, and the others continue."""
    return await tell(
        world,
        "headless",
        Mixed(float(world.rank)),
        about=(1,),
        count=3,
        metric=lambda: float(world.rank),
        leaves_at_once=0,
    )


async def walk(world: ad.World) -> Report:
    """Train with random weights, metrics and pauses; the test gets everything that ``on_event`` received."""
    story, draw = Story(), random.Random(world.rank)
    torch.manual_seed(world.rank)
    model = Mixed(float(world.rank))

    def step() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
            model.counts += 1
        time.sleep(draw.choice([0.0, 0.0, 0.001, 0.004]))

    seen = await tell(
        world,
        "walk",
        model,
        about=(world.size - 1,),
        count=4,
        metric=lambda: draw.gauss(0.0, 1.0) - 0.5 * (world.rank == world.size - 1),
        step=step,
        story=story,
        replacement_ratio=0.5,
        averaging_strategy="weighted_mean",
        momentum=0.25,
        grace_s=0.01,
        route="sharded",
    )
    return {
        **seen,
        "snapshots": [[number, plain(state)] for (number, _), state in story.snapshots.items()],
        "applications": [
            [event.round, event.donors, event.weights, event.best, plain(event.state), plain(before or {})]
            for _, event, before in story.applications
        ],
    }


async def together(world: ad.World) -> Report:
    """Average all ranks four times; the last rank leaves after the third average."""
    model = Mixed(float(world.rank))
    floating, left = [], ""
    async with AverageAllPolicy(model, sgd(model), average_every=2) as policy:
        for step in range(6 if world.rank == world.size - 1 else 8):
            try:
                await policy.step()
            except ad.ClosedError as error:
                left = str(error)
                break
            if step % 2:
                floating.append(sorted(values(model, floating=True)))
    return {"floating": floating, "integers": sorted(values(model, floating=False)), "left": left}


async def missing(world: ad.World) -> Report:
    """The last rank does not create a policy, but exists."""
    if world.rank == world.size - 1:
        await ad.barrier()
        return {"error": ""}
    text = ""
    model = Mixed()
    try:
        async with AsyncSelectiveAveragingPolicy(model, sgd(model), average_every=1, start_timeout_s=0.2):
            pass
    except ad.StartTimeoutError as error:
        text = str(error)
    await ad.barrier()
    return {"error": text}


async def different(world: ad.World) -> Report:
    """The last rank has another model."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 4 + (world.rank == world.size - 1)))
    try:
        async with AsyncSelectiveAveragingPolicy(model, sgd(model), average_every=1):
            pass
    except ad.DisagreementError as error:
        return {"error": str(error)}
    return {"error": ""}


async def disagreeing(world: ad.World) -> Report:
    """The last rank's policy has another class, another name, another option."""
    makes: dict[str, Callable[..., Any]] = {
        "class": lambda odd, *of: (AverageAllPolicy if odd else AsyncSelectiveAveragingPolicy)(*of, average_every=2),
        "name": lambda odd, *of: AsyncSelectiveAveragingPolicy(*of, average_every=2, name="b" if odd else "a"),
        "option": lambda odd, *of: AsyncSelectiveAveragingPolicy(*of, average_every=3 if odd else 2),
    }
    told = {}
    for what, make in makes.items():
        model = Mixed()
        try:
            async with make(world.rank == world.size - 1, model, sgd(model)):
                raise AssertionError("it started")
        except ad.DisagreementError as error:
            told[what] = str(error)
    return told


async def main(world: ad.World) -> None:
    seen: dict[str, Report] = {}
    async with asyncio.timeout(LIMIT_S):
        stories = [exactness, diverged, walk, together, different, disagreeing]
        if world.size == 4:
            stories += [large, sharded, near, straggler, leaver, headless]
        for story in [*stories, missing]:
            began_at = time.perf_counter()
            seen[story.__name__] = await story(world)
            seen[story.__name__]["story_s"] = time.perf_counter() - began_at
            report(world.rank, seen)


if __name__ == "__main__":
    ad.run(main, strict=True)
