"""Tests that a computing simulated rank receives nothing meanwhile, and that each rank has its own context."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from scripts.population import Mixed, sgd
from support.seeds import seeds

import asyncdist as ad
from asyncdist.simulation import (
    Compute,
    Kill,
    Network,
    SimReport,
    simulate,
)
from protocols import AsyncSelectiveAveragingPolicy, AverageAllPolicy


@dataclass(frozen=True, slots=True)
class Number:
    value: int


# -- a rank that computes -------------------------------------------------------------------------------------------

STEP_S = 0.125  # exact in binary


async def by_safe_point(world: ad.World) -> None:
    await world.safe_point()


async def by_progress(world: ad.World) -> None:
    await world.progress()


@pytest.mark.parametrize("call", [by_safe_point, by_progress])
@pytest.mark.parametrize("seed", seeds(8))
def test_a_computing_rank_is_busy(call: Callable[[ad.World], Awaitable[None]], seed: int) -> None:
    """None of its tasks, timers, callbacks, message handlers or loss listeners run, whatever happens meanwhile."""
    windows: list[tuple[float, float]] = []
    ran: list[tuple[float, str]] = []
    kinds = {"sleeper", "timer", "callback", "receiver", "loss"}

    async def main(world: ad.World) -> None:
        channel = world.channel(Number, tag=5)
        loop = asyncio.get_running_loop()
        if world.rank == 1:
            for i in range(60):
                await channel.send(Number(i), 0)
                await world.sleep(0.01)
            return
        if world.rank == 2:
            await world.sleep(100.0)
            return

        def note(kind: str) -> None:
            ran.append((world.time(), kind))

        def tick() -> None:
            note("timer")
            loop.call_soon(note, "callback")
            nonlocal timer
            timer = loop.call_later(0.001, tick)

        async def sleeper() -> None:
            while True:
                await asyncio.sleep(0.003)
                note("sleeper")

        async def receiver() -> None:
            async for _ in channel:
                note("receiver")

        timer = loop.call_later(0.001, tick)
        world.services.on_gone(lambda rank: note("loss"))
        tasks = [asyncio.ensure_future(work()) for work in (sleeper, receiver)]
        for _ in range(5):
            await asyncio.sleep(0.02)
            began_at = world.time()
            await call(world)
            windows.append((began_at, began_at + STEP_S))
        timer.cancel()
        for task in tasks:
            task.cancel()

    network = Network(loss_detection_s=0.0)
    faults = [Kill(2, at_s=0.05)]
    simulate(main, ranks=3, seed=seed, compute=Compute(step_s=STEP_S), network=network, faults=faults).check_faults()
    assert {kind for _, kind in ran} == kinds
    inside = [(at, kind) for at, kind in ran for low, high in windows if low < at < high]
    assert not inside, f"ran during compute: {inside[:5]}"
    assert any(low < 0.05 < high for low, high in windows), "the killed rank must have died inside compute"


def test_after_computing_the_caller_goes_on_first() -> None:
    """In reality, too, the loop runs nothing until training code awaits again."""
    order: list[str] = []

    async def main(world: ad.World) -> None:
        asyncio.get_running_loop().call_later(STEP_S / 2, order.append, "timer")
        began_at = world.time()
        assert world.services.engine.virtual_clock is not None
        await world.services.engine.virtual_clock.before_safe_point()
        assert world.time() == began_at + STEP_S
        order.append("caller")
        await asyncio.sleep(0)
        order.append("caller again")

    simulate(main, ranks=1, compute=Compute(step_s=STEP_S)).value()
    assert order == ["caller", "timer", "caller again"]


def compute_counts(report: SimReport) -> Counter[int]:
    return Counter(event.a for event in report.trace if event.kind == "compute")


def test_each_call_of_user_code_is_charged_once() -> None:
    async def main(world: ad.World) -> float:
        began_at = world.time()
        for _ in range(3):
            await world.progress()
        for _ in range(4):
            await world.safe_point()
        return world.time() - began_at

    report = simulate(main, ranks=2, compute=Compute(step_s=STEP_S, factors={1: 2.0}))
    assert compute_counts(report) == {0: 7, 1: 7}
    assert report.results == (pytest.approx(7 * STEP_S, abs=1e-3), pytest.approx(14 * STEP_S, abs=1e-3))


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("kind", [AsyncSelectiveAveragingPolicy, AverageAllPolicy])
def test_each_step_of_a_policy_is_charged_once(kind: Any, ranks: int) -> None:
    """The policy's tasks, such as the coordinator's and the streams', are charged nothing."""

    async def main(world: ad.World) -> int:
        model = Mixed(float(world.rank))
        changes = 0
        async with kind(model, sgd(model), average_every=2) as policy:
            for _ in range(20):
                changes += bool(await policy.step(float(world.rank)))
        return changes

    report = simulate(main, ranks=ranks, compute=Compute(step_s=STEP_S), strict=True)
    report.value()
    assert compute_counts(report) == dict.fromkeys(range(ranks), 20)
    assert bool(sum(report.results)) == (ranks > 1), "averages must take place if there is more than one rank"


def test_compute_takes_time_without_a_thread_and_frees_the_loop() -> None:
    thread = threading.get_ident()

    async def main(world: ad.World) -> None:
        model = Mixed()
        ticks: list[float] = []

        async def tick() -> None:
            while True:
                ticks.append(world.time())
                await asyncio.sleep(STEP_S / 10)

        ticking = asyncio.ensure_future(tick())
        began_at = world.time()
        with torch.no_grad():
            result = asyncio.ensure_future(world.compute(lambda a, b: (a + b, threading.get_ident()), 1, b=2))
            await asyncio.sleep(STEP_S / 2)
        async with AsyncSelectiveAveragingPolicy(model, sgd(model), average_every=1) as policy:
            with pytest.raises(ad.BusyError, match="compute"):
                await policy.step(0.0)
        with pytest.raises(ad.BusyError, match="compute"):
            await world.compute(int)
        assert await result == (3, thread)
        assert world.time() - began_at == pytest.approx(STEP_S, abs=1e-4)
        assert len(ticks) >= 9
        ticking.cancel()

    simulate(main, ranks=1, compute=Compute(step_s=STEP_S)).value()


def test_a_cancelled_compute_waits_for_its_function() -> None:
    async def main(world: ad.World) -> float:
        task = asyncio.ensure_future(world.compute(int))
        for _ in range(2):
            await asyncio.sleep(STEP_S / 4)
            task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        return world.time()

    assert simulate(main, ranks=1, compute=Compute(step_s=STEP_S)).value() == pytest.approx(STEP_S, abs=1e-4)


# -- what a rank has to itself --------------------------------------------------------------------------------------


def test_all_code_of_a_rank_knows_its_own_world() -> None:
    seen: Counter[tuple[str, int, int]] = Counter()

    async def main(world: ad.World) -> None:
        channel = world.channel(Number, tag=5)

        def note(kind: str) -> None:
            seen[kind, world.rank, ad.current_world().rank] += 1

        async def listen() -> None:
            async for _ in channel:
                note("task")

        if world.rank == 2:
            await world.sleep(100.0)
        world.services.on_gone(lambda rank: note("loss") if rank == 2 else None)
        asyncio.get_running_loop().call_later(0.1, note, "timer")
        listening = asyncio.ensure_future(listen())
        await channel.send(Number(1), 1 - world.rank)
        await world.sleep(10.0)
        note("main")
        channel.close()
        await listening

    simulate(main, ranks=3, faults=[Kill(2, at_s=1.0)]).check_faults()
    assert seen == {(kind, rank, rank): 1 for kind in ("task", "timer", "loss", "main") for rank in (0, 1)}


def test_a_rank_that_awaits_without_grad_leaves_it_to_the_others() -> None:
    async def main(world: ad.World) -> list[bool]:
        seen = [torch.is_grad_enabled()]
        await world.sleep(0.1 * world.rank)
        with torch.no_grad():
            await world.sleep(1.0)
            seen.append(torch.is_grad_enabled())
        await world.sleep(0.25)
        seen.append(torch.is_grad_enabled())
        return seen

    for mode in (True, False):
        with torch.set_grad_enabled(mode):
            assert simulate(main, ranks=4).results == ([True, False, True],) * 4
            assert torch.is_grad_enabled() == mode


def test_a_generator_that_is_left_runs_its_finally() -> None:
    story: list[str] = []

    async def count(world: ad.World) -> AsyncIterator[int]:
        try:
            for i in range(10):
                yield i
        finally:
            await world.sleep(1.0)
            story.append(f"closed on rank {ad.current_world().rank}")

    async def main(world: ad.World) -> None:
        async for number in count(world):
            if number == 3:
                break
        await world.sleep(10.0)
        story.append("end")

    simulate(main, ranks=1).value()
    assert story == ["closed on rank 0", "end"]
