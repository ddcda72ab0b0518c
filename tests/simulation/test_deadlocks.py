"""Tests that deadlocks and endless loops end a simulation, and that the error names the waiting tasks."""

from __future__ import annotations

import asyncio
import re
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.seeds import seeds
from support.waits import waits_of_mains, waits_of_tasks

import asyncdist as ad
from asyncdist.messaging.engine import yield_to_loop
from asyncdist.simulation import (
    Compute,
    Kill,
    simulate,
)

SEEDS = range(40)


@dataclass(frozen=True, slots=True)
class Number:
    value: int


async def receive(world: ad.World, source: int, tag: int, nbytes: int = 8) -> tuple[bytes, int]:
    buffer = bytearray(nbytes)
    source, got = await world.services.engine.receive(buffer, source, tag)
    return bytes(buffer[:got]), source


# -- deadlocks ------------------------------------------------------------------------------------------------------


def deadlock_of(main: Callable[..., Any], *, ranks: int = 2, **options: Any) -> ad.DeadlockError:
    with pytest.raises(ad.DeadlockError) as caught:
        simulate(main, ranks=ranks, **options).value()
    return caught.value


def line_of(function: Callable[..., Any], text: str) -> str:
    """Return ``file:line`` of the only line of a function's source that contains ``text``."""
    import inspect

    lines, first = inspect.getsourcelines(function)
    found = [first + i for i, line in enumerate(lines) if text in line]
    assert len(found) == 1, f"{text!r} must be in one line, but is in {len(found)}"
    return f"{__file__}:{found[0]}"


async def everybody_waits(world: ad.World) -> None:
    channel = world.channel(Number, tag=5)
    event = asyncio.Event()

    async def on_channel() -> None:
        await channel.receive()

    async def on_rank_and_tag() -> None:
        await receive(world, 1 - world.rank, 77)

    async def on_stream_in() -> None:
        await world.receive_stream(torch.zeros(3), 1 - world.rank)

    async def on_collective() -> None:
        if world.rank == 0:
            await ad.barrier()

    async def on_event() -> None:
        await event.wait()

    async def on_future() -> None:
        await asyncio.get_running_loop().create_future()

    async def on_task() -> None:
        await helper

    async with asyncio.TaskGroup() as tasks:
        helper = tasks.create_task(event.wait(), name="helper")
        for function in (on_channel, on_rank_and_tag, on_stream_in, on_collective, on_event, on_future, on_task):
            tasks.create_task(function(), name=function.__name__)


def test_a_deadlock_lists_every_task_with_peer_tag_and_line() -> None:
    text = str(deadlock_of(everybody_waits, seed=3))
    assert "seed=3" in text
    lines = {}
    for line in text.splitlines()[1:]:
        who, _, what = line.strip().partition(": ")
        lines[who] = what
    for rank in (0, 1):
        assert "tag 5" in lines[f"rank {rank}, on_channel"] and "Number" in lines[f"rank {rank}, on_channel"]
        assert f"from {1 - rank}, tag 77" in lines[f"rank {rank}, on_rank_and_tag"]
        assert f"stream from rank {1 - rank}" in lines[f"rank {rank}, on_stream_in"]
        assert "Event.wait" in lines[f"rank {rank}, on_event"]
        assert line_of(everybody_waits, "await event.wait()") in lines[f"rank {rank}, on_event"]
        assert line_of(everybody_waits, "create_future()") in lines[f"rank {rank}, on_future"]
        assert "helper" in lines[f"rank {rank}, on_task"]
        assert "Event.wait" in lines[f"rank {rank}, helper"]
        assert line_of(everybody_waits, "async with asyncio.TaskGroup()") in lines[f"rank {rank}, main of rank {rank}"]
    assert "barrier" in lines["rank 0, on_collective"]
    assert line_of(everybody_waits, "await ad.barrier()") in lines["rank 0, on_collective"]
    assert "rank 1, on_collective" not in lines
    assert any("tag 7100" in what for what in lines.values()), "the report must name the collective's own receive"


def test_a_stream_that_nobody_takes_is_a_deadlock() -> None:
    async def main(world: ad.World) -> None:
        if world.rank:
            await world.send_stream(torch.zeros(3), 0)
        else:
            await receive(world, 1, 3)

    waits = waits_of_mains(str(deadlock_of(main)))
    assert waits[1].startswith("rank 0 to receive a stream")
    assert "from 1, tag 3" in waits[0]


@pytest.mark.parametrize("seed", seeds(10))
def test_locks_taken_in_two_orders_deadlock_with_equal_texts(seed: int) -> None:
    async def main(world: ad.World) -> None:
        a, b = asyncio.Lock(), asyncio.Lock()

        async def take(first: asyncio.Lock, second: asyncio.Lock) -> None:
            async with first:
                await world.sleep(0.1)
                async with second:
                    pass

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(take(a, b))
            tasks.create_task(take(b, a))

    first, second = (str(deadlock_of(main, ranks=1, seed=seed)) for _ in range(2))
    assert first == second
    assert first.count("Lock.acquire") == 2


def test_a_rank_that_dies_does_not_hide_a_deadlock() -> None:
    async def main(world: ad.World) -> None:
        await world.channel(Number, tag=5).receive()

    text = str(deadlock_of(main, ranks=3, faults=[Kill(1, at_s=1.0)]))
    assert set(waits_of_mains(text)) == {0, 2}
    assert "rank 1" not in text, "the report must not name a dead rank"


def test_a_rank_that_ends_does_not_hide_a_deadlock() -> None:
    async def main(world: ad.World) -> None:
        if world.rank:
            await world.channel(Number, tag=5).receive()

    waits = waits_of_mains(str(deadlock_of(main)))
    assert "tag 5" in waits[1]
    assert waits[0].startswith("the other ranks to end")


def test_a_deadlock_lists_messages_for_channels_never_opened(caplog: pytest.LogCaptureFixture) -> None:
    async def main(world: ad.World) -> None:
        channel = world.channel(Number, tag=100, name="results" if world.rank else "result")
        await channel.send(Number(1), 1 - world.rank)
        await channel.receive()

    text = str(deadlock_of(main))
    for rank in range(2):
        assert re.search(rf"\brank {rank}: 1 .*\btag 100\b.*\brank {1 - rank}\b", text), text
    assert sum("awaiting result" in record.getMessage() for record in caplog.records) == 2, (
        "each rank must warn once, after 5 s"
    )


def test_a_timer_that_is_still_running_is_no_deadlock() -> None:
    async def main(world: ad.World) -> str:
        try:
            async with asyncio.timeout(1e6):
                await world.channel(Number, tag=5).receive()
        except TimeoutError:
            return f"gave up after {world.time():.0f} s"
        return "received"

    report = simulate(main, ranks=1)
    assert report.value() == "gave up after 1000000 s"


def test_a_task_that_loops_without_waiting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncdist.simulation.rank_turns.TURN_COUNT_MAX", 1000)

    async def main(world: ad.World) -> None:
        while world.rank == 1:
            await yield_to_loop()

    with pytest.raises(ad.LocalProtocolError, match="rank 1 took 1001 turns in a row"):
        simulate(main, ranks=2).value()


def test_each_task_of_a_looping_rank_is_named_with_its_line() -> None:
    """The rank's number alone would not suffice to find the loop."""

    async def wait_for(flag: list[int]) -> None:
        while not flag:  # noqa: ASYNC110
            await asyncio.sleep(0)

    async def main(world: ad.World) -> None:
        await world.sleep(1e-3)
        if world.rank == 1:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(wait_for([]), name="watcher")

    with pytest.raises(ad.LocalProtocolError) as caught:
        simulate(main, ranks=2).value()
    line = wait_for.__code__.co_firstlineno + 2
    assert caught.value.rank == 1
    waits = waits_of_tasks(str(caught.value))
    assert set(waits) == {(1, "main of rank 1"), (1, "watcher")}
    assert waits[1, "main of rank 1"].startswith("TaskGroup.__aexit__")
    assert (
        waits[1, "watcher"].startswith("sleep")
        and f"{wait_for.__qualname__} ({__file__}:{line})" in waits[1, "watcher"]
    )


async def loop_without_waiting(world: ad.World) -> None:
    while world.rank == 1:
        await yield_to_loop()


async def wait_for_ever(world: ad.World) -> None:
    await asyncio.Event().wait()


async def compute_for_ever(world: ad.World) -> None:
    while True:
        await world.safe_point()


@pytest.mark.parametrize("main", [loop_without_waiting, wait_for_ever, compute_for_ever])
def test_the_error_of_a_run_without_end_hides_simulator_frames(
    main: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error carries the run's report, and its traceback has no frame of the simulator."""
    monkeypatch.setattr("asyncdist.simulation.rank_turns.TURN_COUNT_MAX", 1000)
    with pytest.raises(ad.AsyncdistError) as caught:
        simulate(main, ranks=2, until_s=5.0).value()
    error: Any = caught.value
    assert len(error.report.results) == 2
    modules = [frame.f_globals["__name__"] for frame, _ in traceback.walk_tb(error.__traceback__)]
    assert set(modules) == {__name__, "asyncdist.simulation.simulate"}
    assert modules.count("asyncdist.simulation.simulate") == 2


@pytest.mark.slow
@pytest.mark.parametrize("loopers", [(0,), (1,), pytest.param((0, 1, 2), marks=pytest.mark.long)], ids=str)
@pytest.mark.parametrize("timed", [False, True])
def test_it_is_named_sooner_where_nothing_else_is_to_come(loopers: tuple[int, ...], timed: bool) -> None:
    """Regression: the error took a million turns, and most of a minute.

    A cancelled timer does not count as a future event.
    """
    turns: Counter[int] = Counter()

    async def main(world: ad.World) -> None:
        if timed:
            async with asyncio.timeout(1e6):
                await world.sleep(1e-3)
        while world.rank in loopers:
            turns[world.rank] += 1
            await asyncio.sleep(0)

    with pytest.raises(ad.LocalProtocolError, match=r"rank \d .*\d+ turns .*0\.\d+ s"):
        simulate(main, ranks=3).value()
    assert sum(turns.values()) < 201_000


@pytest.mark.parametrize("waits_for", ["a rank that computes", "a timer", "its own steps, which take no time"])
def test_a_loop_that_waits_for_what_will_come_is_not_named(waits_for: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncdist.simulation.rank_turns.IDLE_TURN_COUNT_MAX", 1000)

    turn_count = 0

    async def main(world: ad.World) -> None:
        nonlocal turn_count
        channel = world.channel(Number, tag=5)
        if waits_for == "its own steps, which take no time":
            for _ in range(5000):
                turn_count += 1
                await world.safe_point()
        elif world.rank == 0 and waits_for == "a timer":
            asyncio.get_running_loop().call_later(0.01, channel.send_nowait, Number(1), 0)
        elif world.rank == 1:
            await world.safe_point()
            await channel.send(Number(1), 0)
        while world.rank == 0 and not waits_for.startswith("its own") and channel.receive_nowait() is None:
            turn_count += 1
            await yield_to_loop()

    step_s = 0.0 if waits_for.startswith("its own") else 0.01
    simulate(main, ranks=2, compute=Compute(step_s=step_s), until_s=1.0).value()
    assert turn_count > 1000, "the loop was too short to be suspected"


def test_a_task_that_only_yields_lets_messages_arrive() -> None:
    async def main(world: ad.World) -> int:
        channel = world.channel(Number, tag=5)
        await channel.send(Number(7), 1 - world.rank)
        while (found := channel.receive_nowait()) is None:
            await yield_to_loop()
        return found.message.value

    for seed in SEEDS:
        assert simulate(main, ranks=2, seed=seed).results == (7, 7)
