"""Tests the report on a rank that does not end: its spawned tasks still run, or its main waits for peers."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import math
import os
import re
import signal
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.facts import names, naming

import asyncdist as ad
from asyncdist.messaging.engine import Engine
from asyncdist.runtime import hosting, run, stall_warnings
from asyncdist.runtime.failing import failure
from asyncdist.runtime.stall_warnings import EndWatch, StallWatch, WatchdogOptions
from asyncdist.simulation import Compute


@dataclass(frozen=True, slots=True)
class Note:
    number: int


async def listen(channel: ad.Channel[Note]) -> None:
    async for message, _, _ in channel:
        assert message.number == 3


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_task_that_reads_a_channel_for_ever_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """Regression: such a task kept the job from ending, silently."""

    async def main(world: ad.World) -> None:
        channel = world.channel(Note, tag=100)
        if world.rank == 0:
            world.spawn(listen(channel), name="listener")
            return
        give_up_at = world.time() + 100
        while not caplog.records and world.time() < give_up_at:
            await world.sleep(0.01)
        await world.sleep(0.3)  # long enough for a second warning
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        ad.run_local(main, ranks=2, watchdog_s=0.05)
    (said,) = warnings(caplog)
    assert said.startswith(
        "main of rank 0 has returned, but the tasks that it spawned keep the rank from ending; they have waited "
        "for 0.05 s: listener: a message on Note, tag 100, in listen ("
    )
    assert "test_waits.py:" in said and said.endswith("or close the channels that they read")


def test_a_closed_channel_ends_the_task_and_no_word_is_said(caplog: pytest.LogCaptureFixture) -> None:
    async def main(world: ad.World) -> None:
        channel = world.channel(Note, tag=100)
        world.spawn(listen(channel))
        channel.send_nowait(Note(3), dest=world.rank)
        await world.sleep(0.01)
        channel.close()

    ad.run_local(main, ranks=2)
    assert warnings(caplog) == []


# -- in virtual time --------------------------------------------------------------------------------------------------


async def never(world: ad.World, channel: ad.Channel[Note]) -> None:
    await channel.receive()


async def moves(world: ad.World, channel: ad.Channel[Note]) -> None:
    while True:
        await world.sleep(7)


async def computes(world: ad.World, channel: ad.Channel[Note]) -> None:
    for _ in range(100):
        await world.compute(lambda: None)


Work = Callable[[ad.World, "ad.Channel[Note]"], Coroutine[Any, Any, None]]


@pytest.mark.parametrize(
    ("works", "period_s", "count"),
    [
        ([never], 10.0, 1),
        ([never, never], 10.0, 1),
        ([moves], 10.0, 0),
        ([never, moves], 10.0, 0),
        ([never, computes], 10.0, 0),
        ([never], 200.0, 0),
        ([never], math.inf, 0),
        ([], 10.0, 0),
    ],
)
def test_only_a_rank_whose_tasks_all_wait_is_warned_of(
    works: list[Work], period_s: float, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def main(world: ad.World) -> None:
        channel = world.channel(Note, tag=100)
        tasks = [world.spawn(work(world, channel)) for work in works]
        watch = EndWatch(world, period_s)
        watch.begin()
        await world.sleep(100)
        watch.end()
        for task in tasks:
            task.cancel()

    ad.simulate(main, ranks=1, seed=3, compute=Compute(step_s=12.0)).value()
    assert len(warnings(caplog)) == count


def test_warning_shows_the_waits_of_a_collective_that_is_a_task(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The wait contains no line of the user's code that could be named, and another task does its work."""

    async def main(world: ad.World) -> None:
        if world.rank == 0:
            task = world.spawn(ad.barrier(), name="meeting")
            watch = EndWatch(world, 10.0)
            watch.begin()
            await world.sleep(25)
            watch.end()
            task.cancel()
        else:
            await world.sleep(40)

    ad.simulate(main, ranks=2, seed=3, strict=False).value()
    assert any("meeting: receive from 1, tag " in text for text in warnings(caplog))


def test_what_came_while_the_loop_was_blocked_is_taken_in_first(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The timer is checked right after a gap; the message that the task waits for has arrived during the gap."""
    looked = polled = 0
    poll = Engine.poll

    def counted(engine: Engine) -> int:
        nonlocal polled
        polled += 1
        return poll(engine)

    monkeypatch.setattr(Engine, "poll", counted)

    class Watch(EndWatch):
        def _check(self) -> None:
            nonlocal looked
            looked += 1
            before = polled
            super()._check()
            assert polled == before + 1

    async def main(world: ad.World) -> None:
        channel = world.channel(Note, tag=100)
        if world.rank == 0:
            await world.sleep(15)
            await channel.send(Note(1), dest=1)
            return
        task = world.spawn(never(world, channel))
        await asyncio.sleep(0)
        watch = Watch(world, 10.0)
        watch.begin()
        await world.safe_point()  # the rank computes for 20 s
        await task
        watch.end()

    ad.simulate(main, ranks=2, seed=3, compute=Compute(step_s=20.0)).value()
    assert looked == 1
    assert warnings(caplog) == []


# -- a main that waits ------------------------------------------------------------------------------------------------


async def receives(world: ad.World, channel: ad.Channel[Note]) -> None:
    await channel.receive()


async def meets(world: ad.World, channel: ad.Channel[Note]) -> None:
    await ad.barrier()


async def receives_a_stream(world: ad.World, channel: ad.Channel[Note]) -> None:
    await world.receive_stream(torch.zeros(4), 1)


async def averages(world: ad.World, channel: ad.Channel[Note]) -> None:
    await ad.all_reduce(torch.zeros(4))


async def asks_the_others(world: ad.World, channel: ad.Channel[Note]) -> None:
    await ad.compute_and_broadcast(lambda: torch.zeros(4))


async def gathers(world: ad.World, channel: ad.Channel[Note]) -> None:
    await asyncio.gather(channel.receive(), world.receive_stream(torch.zeros(4), 1))


async def awaits_a_task(world: ad.World, channel: ad.Channel[Note]) -> None:
    await world.spawn(never(world, channel))


async def awaits_a_group(world: ad.World, channel: ad.Channel[Note]) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(never(world, channel))
        group.create_task(meets(world, channel))


async def meets_again(world: ad.World, channel: ad.Channel[Note]) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.1):
            await ad.barrier()
    await ad.barrier()  # waits behind the collective that continues


async def meets_twice_at_once(world: ad.World, channel: ad.Channel[Note]) -> None:
    await asyncio.gather(ad.barrier(), ad.barrier())


async def starts_a_group(world: ad.World, channel: ad.Channel[Note]) -> None:
    await world.new_group([0, 1], timeout_s=1000)


async def awaits_a_task_twice(world: ad.World, channel: ad.Channel[Note]) -> None:
    task = asyncio.ensure_future(ad.barrier())

    async def wait() -> None:
        await task

    await asyncio.gather(wait(), wait())


async def gathers_and_sleeps(world: ad.World, channel: ad.Channel[Note]) -> None:
    await asyncio.gather(channel.receive(), world.sleep(1e9))


async def sleeps(world: ad.World, channel: ad.Channel[Note]) -> None:
    await world.sleep(1e9)


async def waits_with_a_timeout(world: ad.World, channel: ad.Channel[Note]) -> None:
    await asyncio.wait_for(channel.receive(), 1e9)


async def receives_with_a_timeout(world: ad.World, channel: ad.Channel[Note]) -> None:
    await channel.receive(timeout_s=1e9)


async def gathers_with_a_timeout(world: ad.World, channel: ad.Channel[Note]) -> None:
    await asyncio.gather(ad.barrier(), receives_with_a_timeout(world, channel))


async def receives_inside_a_timeout(world: ad.World, channel: ad.Channel[Note]) -> None:
    async with asyncio.timeout(1e9):  # nothing in the task refers to the timeout
        await channel.receive()


async def waits_for_the_first_of_two(world: ad.World, channel: ad.Channel[Note]) -> None:
    tasks = [asyncio.ensure_future(work(world, channel)) for work in (receives, own)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


async def own(world: ad.World, channel: ad.Channel[Note]) -> None:
    await asyncio.Event().wait()


async def awaits_a_task_of_its_own(world: ad.World, channel: ad.Channel[Note]) -> None:
    await world.spawn(own(world, channel))


async def computes(world: ad.World, channel: ad.Channel[Note]) -> None:
    await world.compute(time.sleep, 50)


async def sums(world: ad.World, channel: ad.Channel[Note]) -> None:
    await ad.average_gradients(torch.nn.Linear(2, 2))


async def sums_along_an_axis(world: ad.World, channel: ad.Channel[Note]) -> None:
    await ad.psum(torch.ones(2), "POP")


async def receives_again_and_again(world: ad.World, channel: ad.Channel[Note]) -> None:
    while True:
        await channel.receive()


@pytest.mark.parametrize(
    ("work", "period_s", "count"),
    [
        (receives, 10.0, 1),
        (meets, 10.0, 1),
        (receives_a_stream, 10.0, 1),
        (averages, 10.0, 1),
        (asks_the_others, 10.0, 1),
        (gathers, 10.0, 1),
        (awaits_a_group, 10.0, 1),
        (awaits_a_task, 10.0, 1),
        (awaits_a_task_twice, 10.0, 1),
        (meets_again, 10.0, 1),
        (meets_twice_at_once, 10.0, 1),
        (starts_a_group, 10.0, 0),
        (receives_with_a_timeout, 10.0, 0),
        (gathers_with_a_timeout, 10.0, 0),
        (receives_inside_a_timeout, 10.0, 1),
        (own, 10.0, 1),
        (awaits_a_task_of_its_own, 10.0, 1),
        (waits_for_the_first_of_two, 10.0, 1),
        (computes, 10.0, 0),
        (receives, 100.0, 0),
        (receives, math.inf, 0),
        (receives_again_and_again, 10.0, 0),
        (gathers_and_sleeps, 10.0, 0),
        (sleeps, 10.0, 0),
        (waits_with_a_timeout, 10.0, 0),
    ],
)
def test_only_a_main_that_waits_without_an_end_is_reported(
    work: Work, period_s: float, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def main(world: ad.World) -> None:
        channel = world.channel(Note, tag=100)
        if world.rank == 1:
            for number in range(19):
                await world.sleep(5)
                if work is receives_again_and_again:
                    await channel.send(Note(number), dest=0)
            return
        mine = asyncio.ensure_future(work(world, channel))
        watch = StallWatch(world, mine, WatchdogOptions(stall_s=period_s))
        await asyncio.sleep(0)
        watch.begin()
        await world.sleep(99)
        watch.end()
        mine.cancel()
        await asyncio.wait([mine])

    ad.simulate(main, ranks=2, seed=3, strict=False).value()
    said = [text for text in warnings(caplog) if "has waited for" in text]
    assert len(said) == count
    for text in said:
        assert names(text, "rank 0", "10 s") and "test_waits.py:" in text


@pytest.mark.parametrize(
    ("work", "told"),
    [
        (meets, "barrier, in meets"),
        (gathers, "asyncio.gather [a message on Note, tag 100; stream from rank 1, tag 8001], in gathers"),
        (
            awaits_a_group,
            "asyncio.TaskGroup [a message on Note, tag 100, in never; barrier, in meets], in awaits_a_group",
        ),
        (awaits_a_task, "task N [a message on Note, tag 100, in never], in awaits_a_task"),
        (
            waits_for_the_first_of_two,
            "asyncio.wait [a message on Note, tag 100, in receives; Event.wait, in own], in waits_for_the_first_of_two",
        ),
    ],
)
def test_a_wait_for_tasks_goes_on_to_what_these_wait_for(
    work: Work, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: main's line did not show the waits of its tasks, and a barrier was called all_gather."""

    async def main(world: ad.World) -> None:
        channel = world.channel(Note, tag=100)
        if world.rank == 0:
            watch = StallWatch(world, asyncio.ensure_future(work(world, channel)), WatchdogOptions(stall_s=10.0))
            await asyncio.sleep(0)
            watch.begin()
            await world.sleep(30)
            watch.end()
        await world.sleep(99)

    with contextlib.suppress(ad.DeadlockError):  # the awaited event never happens
        ad.simulate(main, ranks=2, seed=3, strict=False).value()
    (said,) = [text for text in warnings(caplog) if "has waited for" in text]
    said = re.sub(r" \([^ ]*test_waits.py:\d+\)", "", re.sub(r"task \d+", "task N", said))
    assert said == f"main of rank 0 has waited for 10 s: {told}"


@pytest.mark.parametrize(
    ("work", "count"),
    [(meets, 1), (averages, 1), (asks_the_others, 1), (sums, 1), (sums_along_an_axis, 1), (receives, 0), (own, 0)],
)
def test_by_default_a_stuck_collective_is_reported_but_no_server(
    work: Work, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def main(world: ad.World) -> None:
        channel = world.channel(Note, tag=100)
        mesh = await ad.new_mesh({"POP": 2})
        if world.rank == 1:
            await world.sleep(1000)
            raise RuntimeError("enough")
        watch = StallWatch(world, asyncio.current_task(), run.rank_options(10.0, None, False).watchdogs)
        watch.begin()
        with mesh:
            await work(world, channel)

    report = ad.simulate(main, ranks=2, seed=3, return_exceptions=True)
    assert isinstance(report.results[1], RuntimeError)
    said = [text for text in warnings(caplog) if "300 s" in text]
    assert len(said) == count


def test_the_user_of_a_job_says_how_long_a_main_may_wait(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """``asyncdist run --stall-s 0.05`` sets the variable; the program's own argument has priority."""

    async def main(world: ad.World) -> None:
        never = asyncio.Event()
        asyncio.get_running_loop().call_later(0.5, never.set)
        await never.wait()

    monkeypatch.setenv("ASYNCDIST_STALL_S", "0.05")
    ad.run(main, transport="local", stall_s=math.inf)
    assert warnings(caplog) == []
    # the wait is for nothing that a peer would send: there is only a warning
    ad.run(main, transport="local", stall_aborts=True)
    (said,) = warnings(caplog)
    assert names(said, "rank 0", "0.05 s", "Event.wait") and "test_waits.py:" in said
    for wrong in ("soon", "0", "-1", "nan"):
        monkeypatch.setenv("ASYNCDIST_STALL_S", wrong)
        with pytest.raises(ValueError, match=naming("ASYNCDIST_STALL_S", repr(wrong), 0)):
            ad.run(main, transport="local")


def test_ctrl_c_shows_for_each_rank_of_a_process_its_wait() -> None:
    async def main(world: ad.World) -> None:
        if world.rank == 0:
            asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        await world.channel(Note, tag=100).receive()

    with pytest.raises(KeyboardInterrupt) as caught:
        ad.run_local(main, ranks=2)
    first, second = caught.value.__notes__
    assert first.startswith("rank 0 was waiting for Event.wait, in test_ctrl_c")
    assert names(second, "rank 1", "Note", "tag 100")


def test_ctrl_c_shows_no_wait_for_a_rank_about_to_continue() -> None:
    """Regression: the line of Ctrl-C ended with "rank 0 was waiting for about to run"."""

    async def main(world: ad.World) -> None:
        if world.rank == 0:
            asyncio.get_running_loop().call_later(0.1, os.kill, os.getpid(), signal.SIGINT)
            while True:  # noqa: ASYNC110 it lets others run
                await asyncio.sleep(0)
        await world.channel(Note, tag=100).receive()

    with pytest.raises(KeyboardInterrupt) as caught:
        ad.run_local(main, ranks=2)
    (note,) = caught.value.__notes__
    assert names(note, "rank 1", "Note", "tag 100")


def test_ctrl_c_ends_a_main_that_waits_for_many_collectives(caplog: pytest.LogCaptureFixture) -> None:
    """Regression: each collective depends on the previous one, so that the first Ctrl-C raised RecursionError."""

    async def main(world: ad.World) -> None:
        if world.rank == 0:
            await asyncio.gather(*[ad.all_reduce(torch.ones(2)) for _ in range(1000)])
        while not warnings(caplog):  # noqa: ASYNC110 the log has no event
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()

    with pytest.raises(KeyboardInterrupt) as caught:
        ad.run_local(main, ranks=2, stall_s=0.3)
    assert names(caught.value.__notes__[0], "rank 0", "asyncio.gather", "996 more")
    assert names(warnings(caplog)[0], "rank 0", "asyncio.gather", "996 more")


def test_a_wait_that_cannot_be_described_delays_no_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: main was not cancelled, and no later wait of it was checked."""

    def fail(*_: object) -> None:
        raise RuntimeError("not describable")

    async def main(world: ad.World) -> None:
        if world.rank == 0:
            monkeypatch.setattr(hosting, "describe_wait", fail)
            monkeypatch.setattr(failure, "describe_wait", fail)
            monkeypatch.setattr(stall_warnings, "futures_awaited", fail)
            while len(warnings(caplog)) < 5:  # noqa: ASYNC110 the log has no event
                await asyncio.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()

    with pytest.raises(KeyboardInterrupt):
        ad.run_local(main, ranks=2, stall_s=0.02)
    said = warnings(caplog)
    assert (
        sum("cannot be described" in text for text in said) == 4
    )  # on each rank: its own signal, and the other rank's
    assert sum("cannot be examined" in text for text in said) > 4


def test_main_that_waits_forever_is_ended_if_requested() -> None:
    async def main(world: ad.World) -> None:
        channel = world.channel(Note, tag=100)
        if world.rank == 0:
            await channel.receive()
        else:
            await asyncio.sleep(1e9)

    said = r"0\.05 s: .*Note, tag 100, in .*main \(.*test_waits.py"
    with pytest.raises(ad.StallError, match=said) as caught:
        ad.run_local(main, ranks=2, stall_s=0.05, stall_aborts=True)
    assert caught.value.rank == 0


def test_a_stall_is_no_timeout_of_the_wait_itself() -> None:
    """Regression: a loop over receives took the stall error for their timeout, and never ended."""
    rounds = 0

    async def main(world: ad.World) -> None:
        nonlocal rounds
        channel = world.channel(Note, tag=100)
        while world.rank == 0:
            rounds += 1
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1000.0):
                    await channel.receive()
        await asyncio.sleep(1e9)

    with pytest.raises(ad.StallError):
        ad.run_local(main, ranks=2, stall_s=0.05, stall_aborts=True)
    assert rounds == 1


def test_a_main_whose_wait_ends_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    async def main(world: ad.World) -> int:
        channel = world.channel(Note, tag=100)
        if world.rank == 0:
            return (await channel.receive()).message.number
        while not warnings(caplog):
            await world.sleep(0.01)
        await channel.send(Note(7), dest=0)
        return 0

    assert ad.run_local(main, ranks=2, stall_s=0.05) == [7, 0]
    assert len(warnings(caplog)) == 1


@pytest.mark.skipif(importlib.util.find_spec("uvloop") is None, reason="uvloop is not installed")
def test_a_timeout_on_uvloop_wakes_its_task_once() -> None:
    """Regression: timers fire a fraction of a millisecond early, so the task waited again some hundred times."""
    counts: list[int] = []

    async def main(world: ad.World) -> None:
        engine = world.services.engine
        park = engine.park

        async def counted(*args: Any, **options: Any) -> None:
            counts[-1] += 1
            await park(*args, **options)

        engine.park = counted  # type: ignore[method-assign]
        channel = world.channel(Note, tag=40)
        for _ in range(50):
            counts.append(0)
            with pytest.raises(TimeoutError):
                await channel.receive(timeout_s=0.002)
            counts.append(0)
            assert not await engine.until(lambda: False, deadline=engine.loop.time() + 0.0017)

    ad.run(main, loop="uvloop")
    assert set(counts) == {1}
