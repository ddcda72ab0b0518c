"""Tests that a safe point runs everything that its loop has to run, and no loop iteration if there is nothing."""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from support.local import worlds

import asyncdist as ad
from asyncdist.messaging import engine
from asyncdist.simulation import simulate
from asyncdist.transports.loop_work import LoopWork, find_work
from asyncdist.waits import WaitId, WaitKind


async def ready_callback(seen: list[str]) -> None:
    asyncio.get_running_loop().call_soon(seen.append, "ran")


async def ready_task(seen: list[str]) -> None:
    async def run() -> None:
        seen.append("ran")

    seen_tasks.add(asyncio.create_task(run()))


async def due_timer(seen: list[str]) -> None:
    asyncio.get_running_loop().call_later(0.001, seen.append, "ran")
    time.sleep(0.003)  # noqa: ASYNC251 - computes; uvloop's clock has steps of a millisecond


async def timer_after_many_cancelled(seen: list[str]) -> None:
    loop = asyncio.get_running_loop()
    for count in (150, 50):  # asyncio replaces its list when it removes the first ones, and keeps the others
        for timer in [loop.call_later(60.0, int) for _ in range(count)]:
            timer.cancel()
        await asyncio.sleep(0)
    await due_timer(seen)


async def ended_sleep(seen: list[str]) -> None:
    async def run() -> None:
        await asyncio.sleep(0.001)
        seen.append("ran")

    seen_tasks.add(asyncio.create_task(run()))
    await asyncio.sleep(0)
    time.sleep(0.003)  # noqa: ASYNC251 - computes


async def callback_of_a_thread(seen: list[str]) -> None:
    loop = asyncio.get_running_loop()
    thread = threading.Thread(target=loop.call_soon_threadsafe, args=(seen.append, "ran"))
    thread.start()
    thread.join()


async def readable_socket(seen: list[str]) -> None:
    own, other = socket.socketpair()
    loop = asyncio.get_running_loop()
    loop.add_reader(own, lambda: (seen.append("ran"), loop.remove_reader(own), own.close(), other.close()))
    await asyncio.sleep(0)
    other.send(b"x")


async def transport_with_data(seen: list[str]) -> None:
    class Told(asyncio.Protocol):
        def data_received(self, _: bytes) -> None:
            seen.append("ran")
            transport.close()
            other.close()

    own, other = socket.socketpair()
    transport, _ = await asyncio.get_running_loop().create_connection(Told, sock=own)
    other.send(b"x")


async def signal_handler(seen: list[str]) -> None:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR2, lambda: (seen.append("ran"), loop.remove_signal_handler(signal.SIGUSR2)))
    os.kill(os.getpid(), signal.SIGUSR2)


seen_tasks: set[asyncio.Task[Any]] = set()
CASES: list[Callable[[list[str]], Coroutine[Any, Any, None]]] = [
    ready_callback,
    ready_task,
    due_timer,
    timer_after_many_cancelled,
    ended_sleep,
    callback_of_a_thread,
    readable_socket,
    transport_with_data,
    signal_handler,
]


async def settled(world: ad.World) -> LoopWork:
    """Wait for the tasks of the start. From then on, only visible work makes a safe point yield."""
    work = world.services.engine.loop_work
    assert work is not None, "the loop must be of a known kind"
    for _ in range(200):  # also the driver's hot passes
        await world.safe_point()
    work.spin_s, work.turn_period_s = 0.0, 1e9
    return work


@pytest.fixture
def yields(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which every yield of a safe point adds an entry."""
    seen: list[int] = []
    yield_to_loop = engine.yield_to_loop

    def counted() -> Any:
        seen.append(1)
        return yield_to_loop()

    monkeypatch.setattr(engine, "yield_to_loop", counted)
    return seen


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_work_of_every_kind_runs_in_three_safe_points(loop: Any, yields: list[int]) -> None:
    async def main(world: ad.World) -> None:
        await settled(world)
        for case in CASES:
            for _ in range(5):  # the last case's transport is closed in a later iteration, and deleted with its cycle
                await asyncio.sleep(0)
            gc.collect()
            yields.clear()
            for _ in range(20):
                await world.safe_point()
            assert not yields, f"{case.__name__}: a safe point yielded although the loop had no work"
            seen: list[str] = []
            await case(seen)
            for _ in range(3):  # asyncio runs the callback of a timer, and then the woken task, in later iterations
                await world.safe_point()
            assert seen == ["ran"], case.__name__

    ad.run(main, loop=loop)


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_a_cancelled_main_is_stopped_by_its_next_safe_point(loop: Any) -> None:
    stopped: list[str] = []

    async def main(world: ad.World) -> None:
        await settled(world)
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        try:
            await world.safe_point()
        except asyncio.CancelledError:
            stopped.append("stopped")
            task.uncancel()

    ad.run(main, loop=loop)
    assert stopped == ["stopped"]


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_spinning_and_long_unseen_loops_get_turns(loop: Any, yields: list[int]) -> None:
    async def main(world: ad.World) -> None:
        work = await settled(world)
        work.spin_s = 1e9
        yields.clear()
        await world.safe_point()
        assert len(yields) == 1, "a task that polls without computing must release the lock for other threads"
        work.spin_s, work.turn_period_s = 0.0, -1.0
        await world.safe_point()
        assert len(yields) == 2, "a safe point must yield for events that it cannot see"

    ad.run(main, loop=loop)


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_a_step_that_finds_the_loop_due_lets_it_run(loop: Any, yields: list[int]) -> None:
    """Regression: the safe point asked again, when the loop was no longer due."""

    async def main(world: ad.World) -> None:
        work = await settled(world)
        work.turn_period_s = -1.0
        world.services.engine.try_safe_point()
        work.turn_period_s = 1e9
        yields.clear()
        await world.safe_point()
        assert len(yields) == 1
        await world.safe_point()
        assert len(yields) == 1

    ad.run(main, loop=loop)


def test_loops_of_other_kinds_always_run() -> None:
    """Regression: a loop with a selector of the user's own could not open a world."""

    class Delegating(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
        pass

    class Toolkit(asyncio.SelectorEventLoop):
        pass

    async def found() -> LoopWork | None:
        return find_work(asyncio.get_running_loop())

    made = [Toolkit(), asyncio.SelectorEventLoop(Delegating()), asyncio.SelectorEventLoop()]
    work = [loop.run_until_complete(found()) for loop in made]
    for loop in made:
        loop.close()
    assert work[:2] == [None, None] and work[2] is not None


def test_safe_points_of_simulated_ranks_always_yield(yields: list[int]) -> None:
    async def main(world: ad.World) -> None:
        yields.clear()
        await world.safe_point()
        assert len(yields) == 1

    simulate(main, ranks=1, seed=0)


async def test_a_timer_that_an_arrived_message_cancels_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: its call followed the polling pass that cancelled it, and raised KeyError in large agreements."""
    async with worlds(1) as made:
        engine, calls, fire = made[0].services.engine, list[str](), list[Callable[[], object]]()

        def hold(delay_s: float, call: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
            fire.append(functools.partial(call, *args))
            return asyncio.TimerHandle(delay_s, call, args, engine.loop)

        with monkeypatch.context() as patch:
            patch.setattr(engine.loop, "call_later", hold)
            kept, cancelled = (engine.call_later(1.0, WaitId(WaitKind.DEPARTURES), calls.append, n) for n in "ab")
            fire[0]()
            patch.setattr(engine, "poll", cancelled.cancel)
            fire[1]()
        assert calls == ["a"] and not kept.cancelled()
