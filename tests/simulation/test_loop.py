"""Tests the loop of a simulated rank: timers, handlers, and the operations that it refuses with a reason."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

import asyncdist as ad
from asyncdist.runtime.failing.failure import all_others_in
from asyncdist.simulation import Compute, simulate
from asyncdist.simulation.scheduler import EndlessLoopError
from asyncdist.transports.rank_sets import RankSet


@dataclass(frozen=True, slots=True)
class Number:
    value: int


# -- timers -----------------------------------------------------------------------------------------------------------


def test_a_timeout_around_each_receive_leaves_no_timers_behind() -> None:
    """Regression: timers stayed in the heap until their time: 150,000 after a second of such messages."""
    pending: list[int] = []

    async def main(world: ad.World) -> None:
        channel = world.channel(Number, tag=5)
        scheduler = asyncio.get_running_loop()._scheduler  # type: ignore[attr-defined]
        for _ in range(1000):
            async with asyncio.timeout(60.0):
                if world.rank == 0:
                    await channel.send(Number(1), dest=1)
                await channel.receive()
                if world.rank == 1:
                    await channel.send(Number(1), dest=0)
            pending.append(scheduler.pending_count)

    simulate(main, ranks=2).value()
    assert max(pending) < 400, f"{max(pending)} events were pending at once"


def test_a_deadlocks_time_is_not_that_of_a_cancelled_timer() -> None:
    async def main(world: ad.World) -> None:
        async with asyncio.timeout(3600.0):
            await world.sleep(0.001)
        await world.channel(Number, tag=5).receive()

    with pytest.raises(ad.DeadlockError, match=r"\b0\.00\d+ s\b"):
        simulate(main, ranks=2)


def test_a_cancelled_timer_is_no_event() -> None:
    async def main(world: ad.World, count: int) -> None:
        loop = asyncio.get_running_loop()
        for timer in [loop.call_later(0.5, print) for _ in range(count)]:
            timer.cancel()
            timer.cancel()
        fired = loop.call_later(0.5, str)
        await world.sleep(1.0)
        fired.cancel()  # the callback has been called: nothing is left to cancel
        loop.call_later(0.5, str)
        await world.sleep(1.0)

    none, few, many = (simulate(main, count, ranks=1) for count in (0, 90, 1000))
    assert none.event_count == few.event_count == many.event_count
    assert none.virtual_time_s == pytest.approx(many.virtual_time_s)


def test_the_end_of_many_ranks_looks_at_each_of_them_once() -> None:
    """Regression: each message of the end built a set of all ranks, which took 30 s with 1,000 ranks."""
    size, own = 1000, 7
    looked_up = 0

    class Counting(set[int]):
        def __iter__(self) -> Iterator[int]:
            nonlocal looked_up
            looked_up += len(self)
            return super().__iter__()

    answered, left, lost = RankSet(), RankSet(), Counting()
    world: Any = SimpleNamespace(rank=own, size=size)
    transport: Any = SimpleNamespace(lost_ranks=lambda: lost)
    is_everybody = all_others_in(world, transport, answered, left)
    order = [(rank * 377) % size for rank in range(size)]
    for index, rank in enumerate(order):
        assert not is_everybody() or rank == own
        if rank != own:
            (answered, left, lost)[index % 3].add(rank)
    assert is_everybody()
    assert looked_up < 12 * size


# -- what asyncio lets one set ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_free", [True, False])
def test_a_loop_without_end_is_explained(is_free: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: many safe points without computing time were called a loop without waiting."""
    monkeypatch.setattr("asyncdist.simulation.rank_turns.TURN_COUNT_MAX", 1000)

    async def main(world: ad.World) -> None:
        while True:
            await (world.safe_point() if is_free else asyncio.sleep(0))

    with pytest.raises(EndlessLoopError) as caught:
        simulate(main, ranks=1, compute=Compute(step_s=0.0))
    assert ("step_s" in str(caught.value)) == is_free


def test_a_ranks_exception_handler_gets_its_own_exceptions(caplog: pytest.LogCaptureFixture) -> None:
    async def main(world: ad.World) -> list[str]:
        told: list[str] = []
        loop = asyncio.get_running_loop()
        assert loop.get_exception_handler() is None
        if world.rank == 0:
            loop.set_exception_handler(lambda loop, context: told.append(repr(context["exception"])))
        loop.call_soon(int, f"of rank {world.rank}")
        await world.sleep(0.1)
        return told

    results = simulate(main, ranks=2).results
    assert [len(told) for told in results] == [1, 0]
    assert "of rank 0" in results[0][0]
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["rank 1"]


def test_an_exception_handler_that_fails_is_told_of_itself(caplog: pytest.LogCaptureFixture) -> None:
    async def main(world: ad.World) -> None:
        loop = asyncio.get_running_loop()
        with pytest.raises(TypeError):
            loop.set_exception_handler(5)  # type: ignore[arg-type]

        def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            loop.default_exception_handler(context)
            raise ZeroDivisionError

        loop.set_exception_handler(handle)
        loop.call_soon(int, "x")
        await world.sleep(0.1)
        loop.set_exception_handler(None)

    with caplog.at_level(logging.ERROR):
        simulate(main, ranks=1).value()
    assert len(caplog.records) == 2
    assert "the exception handler failed" in caplog.records[1].getMessage()


def test_debug_mode_is_the_loops_own_and_changes_nothing_else() -> None:
    async def main(world: ad.World, debug: bool) -> bool:
        loop = asyncio.get_running_loop()
        loop.set_debug(debug)
        await ad.barrier()
        assert bool(getattr(loop.create_future(), "_source_traceback", None)) is debug
        return loop.get_debug()

    quiet, debugging = simulate(main, False, ranks=2), simulate(main, True, ranks=2)
    assert (quiet.results, debugging.results) == ((False, False), (True, True))
    assert quiet.trace_digest == debugging.trace_digest


def test_nothing_of_a_loop_ends_in_a_bare_not_implemented_error() -> None:
    """Each method works, or gives a reason for its refusal."""

    async def main(world: ad.World) -> list[str]:
        loop: Any = asyncio.get_running_loop()
        bare = [
            name
            for name, method in inspect.getmembers(asyncio.AbstractEventLoop, inspect.isfunction)
            if not name.startswith("_") and getattr(type(loop), name) is method
        ]
        with pytest.raises(ad.LocalProtocolError, match="a task factory cannot be set in a simulation: asyncio keeps"):
            loop.set_task_factory(lambda loop, coro: asyncio.Task(coro, loop=loop))
        loop.set_task_factory(None)
        assert loop.get_task_factory() is None
        for name in ("stop", "close", "run_forever"):
            with pytest.raises(ad.LocalProtocolError, match=rf"loop\.{name}\b"):
                getattr(loop, name)()
        with pytest.raises(ad.LocalProtocolError, match="pool"):
            loop.set_default_executor(None)
        await loop.shutdown_default_executor()
        return bare

    assert simulate(main, ranks=1).value() == []
