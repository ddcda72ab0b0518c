"""Tests when a blocking call runs the rank's loop, and when it relies on a loop that is already running."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator

import pytest

import asyncdist as ad
from asyncdist.messaging import engine
from asyncdist.runtime.stall_warnings import frames_of


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Have one entry for each time the loop was run, once nothing else is a reason to run it."""
    seen: list[int] = []
    run_forever = asyncio.SelectorEventLoop.run_forever

    def counted(loop: asyncio.AbstractEventLoop) -> None:
        seen.append(1)
        run_forever(loop)

    monkeypatch.setattr(asyncio.SelectorEventLoop, "run_forever", counted)
    yield seen


def set_turn_period(world: ad.blocking.World, seconds: float) -> None:
    """Set the period after which the loop runs even if no work is visible."""
    work = world.awaited.services.engine.loop_work
    assert work is not None
    work.turn_period_s = seconds


def settle(world: ad.blocking.World, turns: list[int]) -> None:
    """Wait until the tasks that opening the world has started are done."""
    set_turn_period(world, 1e9)
    world.sleep(0.01)
    for _ in range(3):
        world.safe_point()
    turns.clear()


def test_a_call_that_waits_for_nothing_turns_no_loop(turns: list[int]) -> None:
    with ad.blocking.open_world() as world:
        settle(world, turns)
        for _ in range(100):
            world.safe_point()
        assert not turns
        world.sleep(0.001)
        assert len(turns) == 1


def test_tasks_timers_threads_and_descriptors_have_their_turn(turns: list[int]) -> None:
    heard: list[str] = []

    async def task() -> None:
        for step in range(3):
            heard.append(f"task {step}")
            await asyncio.sleep(0)

    mine, other = socket.socketpair()
    with ad.blocking.open_world() as world, mine, other:
        settle(world, turns)
        loop = world.awaited.services.engine.loop
        world.awaited.spawn(task())
        for step in range(3):
            world.safe_point()
            assert heard == [f"task {each}" for each in range(step + 1)]
        settle(world, turns)
        heard.clear()
        loop.call_later(0.0, heard.append, "timer")
        world.safe_point()
        assert heard == ["timer"]
        world.safe_point()
        turns.clear()
        thread = threading.Thread(target=loop.call_soon_threadsafe, args=(heard.append, "thread"))
        thread.start()
        thread.join()
        world.safe_point()
        assert heard == ["timer", "thread"] and len(turns) == 1
        loop.add_writer(mine, heard.append, "descriptor")
        world.safe_point()
        world.safe_point()
        assert heard[2] == "descriptor"
        loop.remove_writer(mine)


def test_loop_gets_a_turn_after_a_while_without_being_asked(turns: list[int]) -> None:
    with ad.blocking.open_world() as world:
        settle(world, turns)
        set_turn_period(world, -1.0)
        world.safe_point()
        assert turns


def test_signal_ends_a_call_that_waits_for_nothing() -> None:
    seen: list[str] = []

    async def inside() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.sleep(0)
            seen.append("went on")
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise
        finally:
            await asyncio.sleep(0)
            seen.append("left")

    with pytest.raises(KeyboardInterrupt), ad.blocking.open_world() as world:
        world.call(inside)
    assert seen == ["cancelled", "left"]


def test_call_sees_the_same_task_before_and_after_waiting() -> None:
    tasks: list[object] = []

    async def inside() -> None:
        for delay_s in (0.0, 0.0, 0.0, 0.001):
            tasks.append((asyncio.current_task(), asyncio.get_running_loop(), ad.current_world()))
            await asyncio.sleep(delay_s)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await asyncio.sleep(60.0)
        with pytest.raises(ExceptionGroup):
            async with asyncio.TaskGroup() as group:
                group.create_task(failing())
                await asyncio.sleep(60.0)

    async def failing() -> None:
        raise ZeroDivisionError

    with ad.blocking.open_world() as world:
        world.call(inside)
        assert len(set(tasks)) == 1


def test_reports_show_the_awaited_call_begun_outside_the_loop() -> None:
    names: list[str] = []

    async def outer() -> None:
        await inner()

    async def inner() -> None:
        main = asyncio.current_task()
        assert main is not None
        asyncio.get_running_loop().call_later(0.001, look, main)
        await asyncio.sleep(0.002)

    def look(main: asyncio.Task[object]) -> None:
        names.extend(frame.f_code.co_name for frame in frames_of(main))

    with ad.blocking.open_world() as world:
        world.call(outer)
    assert names[-3:] == ["outer", "inner", "sleep"]


def test_safe_point_does_not_yield_if_the_loop_has_nothing_to_do(
    turns: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    yields: list[int] = []
    yield_to_loop = engine.yield_to_loop

    async def counted() -> None:
        yields.append(1)
        await yield_to_loop()

    with ad.blocking.open_world() as world:
        settle(world, turns)
        monkeypatch.setattr(engine, "yield_to_loop", counted)
        for _ in range(100):
            world.safe_point()
        assert not yields
        task = world.call(spawned, world.awaited)
        world.safe_point()
        assert yields and task.done()


async def spawned(world: ad.World) -> asyncio.Task[None]:
    async def returns() -> None:
        pass

    return world.spawn(returns())


def test_a_call_whose_loop_runs_yields_at_its_safe_points(turns: list[int]) -> None:
    """There are reasons for a turn that no look at the loop shows: it is to stop, or a cancellation waits."""

    async def cancels_itself(world: ad.World) -> None:
        await asyncio.sleep(0.001)  # the call continues in the loop
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await world.safe_point()
        pytest.fail("it was not cancelled")

    with ad.blocking.open_world() as world:
        settle(world, turns)
        with pytest.raises(asyncio.CancelledError):
            world.call(cancels_itself, world.awaited)
        world.safe_point()  # of another call


def test_task_with_constant_safe_points_delays_no_call(turns: list[int]) -> None:
    """Regression: such a task kept the loop from stopping until it polled its file descriptors."""
    counts = [0]

    async def spins(world: ad.World) -> None:
        while counts[0] < 100_000:
            counts[0] += 1
            await world.safe_point()

    async def uses_a_thread(world: ad.World) -> None:
        if not counts[0]:
            world.spawn(spins(world))
        await asyncio.get_running_loop().run_in_executor(None, time.sleep, 0.001)

    with ad.blocking.open_world() as world:
        settle(world, turns)
        for _ in range(5):
            world.call(uses_a_thread, world.awaited)
        assert 0 < counts[0] < 100_000
        counts[0] = 100_000
