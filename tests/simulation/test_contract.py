"""What a simulation may do and what it may not: docs/architecture.md, section 10.

Each freedom is shown to be used over some seeds; each prohibition has a test of its own, over many.
"""

from __future__ import annotations

import asyncio
import gc
import io
import itertools
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import threading
import types
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from scripts.population import Mixed, sgd
from tqdm import tqdm
from tqdm.contrib.concurrent import thread_map

import asyncdist as ad
from asyncdist.messaging.engine import yield_to_loop
from asyncdist.messaging.streams import StreamAborted
from asyncdist.simulation import (
    Compute,
    Delay,
    Exponential,
    Fault,
    Kill,
    Link,
    Network,
    Partition,
    SimReport,
    SlowLink,
    Stall,
    simulate,
)
from asyncdist.transports.base import ANY_SOURCE
from protocols import AsyncSelectiveAveragingPolicy, AverageAllPolicy

#: No two messages take the same time, and a later one often overtakes an earlier one where it may.
JUMPY = Link(latency_s=Exponential(1e-3), bandwidth_nbytes_per_s=1e8)
SEEDS = range(40)


@dataclass(frozen=True, slots=True)
class Number:
    value: int


def over_seeds(main: Callable[..., Any], *, ranks: int, rank: int = 0, **options: Any) -> Counter[Any]:
    """How often each value of ``rank`` came out."""
    found: Counter[Any] = Counter()
    for seed in SEEDS:
        report = simulate(main, ranks=ranks, seed=seed, **options)
        report.value()
        found[report.results[rank]] += 1
    return found


async def receive(world: ad.World, source: int, tag: int, nbytes: int = 8) -> tuple[bytes, int]:
    buffer = bytearray(nbytes)
    source, got = await world.services.engine.receive(buffer, source, tag)
    return bytes(buffer[:got]), source


# -- it may ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_it_reorders_across_sources() -> None:
    async def main(world: ad.World) -> tuple[int, ...] | None:
        if world.rank:
            await world.services.engine.send(b"x", 0, 1)
            return None
        return tuple([(await receive(world, ANY_SOURCE, 1))[1] for _ in range(3)])

    assert len(over_seeds(main, ranks=4)) == 6, "not all orders of three senders were seen"


def test_it_reorders_across_tags() -> None:
    async def main(world: ad.World) -> tuple[int, ...]:
        order: list[int] = []

        async def take(tag: int) -> None:
            await receive(world, 1, tag)
            order.append(tag)

        if world.rank:
            for tag in (1, 2, 3):
                await world.services.engine.send(b"x", 0, tag)
        else:
            await asyncio.gather(*map(take, (1, 2, 3)))
        return tuple(order)

    assert len(over_seeds(main, ranks=2, network=Network(link=JUMPY))) == 6


@pytest.mark.slow
def test_it_completes_requests_in_another_order_than_they_match() -> None:
    """Also within one source and tag: a small message is there before the large one ahead of it has been transferred.

    MPI allows that, and one seed of the conformance suite found that a stream's abort relied on the contrary.
    """

    async def main(world: ad.World) -> tuple[int, ...]:
        order: list[int] = []
        if world.rank:
            sends = [world.services.engine.send(bytes(size), 0, 1) for size in (100_000, 0)]
            await asyncio.gather(*sends)
        else:

            async def take(index: int) -> None:
                await receive(world, 1, 1, 100_000)
                order.append(index)

            await asyncio.gather(take(0), take(1))
        return tuple(order)

    assert set(over_seeds(main, ranks=2)) == {(1, 0)}
    assert set(over_seeds(main, ranks=2, network=Network(eager_nbytes=1 << 20))) == {(0, 1)}


def test_a_wildcard_receive_takes_any_of_the_senders_that_wait() -> None:
    async def main(world: ad.World) -> tuple[int, ...] | None:
        if world.rank:
            for i in range(2):
                await world.services.engine.send(bytes([i]), 0, 1)
            return None
        await world.sleep(1.0)  # by then all of them have arrived
        found = [await receive(world, ANY_SOURCE, 1) for _ in range(4)]
        for rank in (1, 2):
            assert [data for data, source in found if source == rank] == [b"\0", b"\1"]
        return tuple(source for _, source in found)

    assert len(over_seeds(main, ranks=3)) == 6, "not all ways to interleave two pairs were seen"


@pytest.mark.slow
def test_a_send_is_eager_or_rendezvous() -> None:
    async def main(world: ad.World, nbytes: int) -> bool:
        """Whether a send completes before anybody receives it."""
        done = False
        if world.rank:
            sending = asyncio.ensure_future(world.services.engine.send(bytes(nbytes), 0, 1))
            await world.sleep(1.0)
            done = sending.done()
            await ad.barrier()
            await sending
        else:
            await ad.barrier()
            await receive(world, 1, 1, nbytes)
        return done

    def outcomes(nbytes: int, **options: Any) -> set[bool]:
        return {simulate(main, nbytes, ranks=2, seed=seed, **options).results[1] for seed in SEEDS}

    assert outcomes(1000) == {False, True}
    assert outcomes(256) == {True}, "what programs count on everywhere"
    assert outcomes(65537) == {False}
    assert outcomes(500, network=Network(eager_nbytes=500)) == {True}
    assert outcomes(501, network=Network(eager_nbytes=500)) == {False}
    assert outcomes(1, network=Network(eager_nbytes=0)) == {False}


def test_latency_bandwidth_and_hosts_are_what_they_were_said_to_be() -> None:
    async def main(world: ad.World, nbytes: int) -> float:
        if world.rank == 0:
            for dest in range(1, world.size):
                await world.services.engine.send(bytes(nbytes), dest, 1)
                await receive(world, dest, 2)
            return 0.0
        await receive(world, 0, 1, nbytes)
        arrived_at = world.time()
        await world.services.engine.send(b"", 0, 2)
        return arrived_at

    near = Link(latency_s=1.0, bandwidth_nbytes_per_s=1e6)
    far = Link(latency_s=10.0, bandwidth_nbytes_per_s=1e3)
    odd = Link(latency_s=100.0)
    network = Network(link=near, cross_link=far, links={(0, 3): odd}, ranks_per_host=2, eager_nbytes=4096)
    arrivals = simulate(main, 1000, ranks=4, network=network).results
    assert arrivals[1] == pytest.approx(1.001, abs=1e-4)
    assert arrivals[2] - arrivals[1] == pytest.approx(1.0 + 11.0, abs=1e-4)  # rank 1's answer, then across
    assert arrivals[3] - arrivals[2] == pytest.approx(10.0 + 100.0, abs=1e-4)


# -- it may not -----------------------------------------------------------------------------------------------------

TROUBLE: tuple[Fault, ...] = (
    Delay(1, 0, 7, 0.03),
    Delay(2, 0, 20, 0.002),
    SlowLink(1, 0, 0.004, 30.0),
    SlowLink(0, 2, 0.0, 5.0),
    Partition((0,), 0.001, 0.011),
    Partition((1, 2), 0.02, 0.025),
)


async def crowd(world: ad.World, seed: int, count: int, wildcard: bool) -> int:
    """Everybody sends ``count`` messages of all sizes on two tags to everybody; each must come once and in order."""
    draw = random.Random(f"{seed} {world.rank}")
    sends = []
    for i in range(count):
        for dest in range(world.size):
            for tag in (1, 2):
                data = bytes([world.rank, i, tag]) * draw.choice((1, 50, 2000, 30_000))
                sends.append(asyncio.ensure_future(world.services.engine.send(data, dest, tag)))
        if draw.random() < 0.3:
            await world.sleep(draw.random() * 1e-3)

    async def listen(tag: int, source: int, expected_count: int) -> int:
        seen = [0] * world.size
        for _ in range(expected_count):
            data, sender = await receive(world, source, tag, 90_000)
            assert data == bytes([sender, seen[sender], tag]) * (len(data) // 3), (
                f"from {sender}, tag {tag}: {list(data[:3])}, not number {seen[sender]}"
            )
            seen[sender] += 1
        return sum(seen)

    sources = [ANY_SOURCE] if wildcard else list(range(world.size))
    each = count * world.size // len(sources)
    counts = await asyncio.gather(*(listen(tag, source, each) for tag in (1, 2) for source in sources))
    await asyncio.gather(*sends)
    await ad.barrier()
    for tag in (1, 2):  # nothing comes twice
        late = asyncio.ensure_future(receive(world, ANY_SOURCE, tag, 90_000))
        await world.sleep(0.1)
        assert not late.done(), f"tag {tag}: a message arrived twice"
        late.cancel()
        await asyncio.wait([late])
    return sum(counts)


@pytest.mark.slow
@pytest.mark.parametrize("wildcard", [False, True])
def test_it_never_overtakes_loses_or_duplicates_in_any_trouble(wildcard: bool) -> None:
    fired: Counter[int] = Counter()
    for seed in SEEDS:
        report = simulate(
            crowd, seed, 12, wildcard, ranks=3, seed=seed, network=Network(link=JUMPY), faults=TROUBLE, strict=True
        )
        report.value()
        assert report.results == (72, 72, 72), f"seed {seed}"
        fired.update(index for index, count in enumerate(report.faults_fired) if count)
    assert set(fired) == set(range(len(TROUBLE))), f"faults that never fired: {fired}"


@pytest.mark.parametrize(
    "fault",
    [Delay(1, 0, 1, 0.5), SlowLink(1, 0, 0.0, 1000.0), Partition((1,), 0.0, 0.5), Stall(1, 0.0, 0.5)],
    ids=lambda fault: type(fault).__name__,
)
def test_a_fault_holds_back_later_messages_of_its_source_and_tag_too(fault: Fault) -> None:
    async def main(world: ad.World) -> list[int]:
        channel = world.channel(Number, tag=5)
        if world.rank:
            for i in range(50):
                await channel.send(Number(i), 0)
                if i % 7 == 0:
                    await world.progress()
            return []
        return [(await channel.receive()).message.value for _ in range(50)]

    for seed in SEEDS:
        report = simulate(main, ranks=2, seed=seed, network=Network(link=JUMPY), faults=[fault], strict=True)
        report.check_faults()
        assert report.value() == list(range(50)), f"seed {seed}"


@pytest.mark.slow
def test_an_abort_that_completes_before_the_chunk_ahead_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by the conformance suite with seed 2.

    The slot was given back, and the receiver told, while a chunk was still landing in its tensor.
    """
    size = 100_000
    monkeypatch.setattr("asyncdist.messaging.streams.USER_CHUNK_NBYTES", size)
    overtaken = 0

    async def main(world: ad.World, cancel_at_s: float) -> bool:
        if world.rank:
            sending = asyncio.ensure_future(world.send_stream(torch.ones(12 * size, dtype=torch.uint8), 0))
            await world.sleep(cancel_at_s)
            sending.cancel()
            await asyncio.wait([sending])
            return sending.cancelled()
        tensor = torch.zeros(12 * size, dtype=torch.uint8)
        try:
            await world.receive_stream(tensor, 1)
        except StreamAborted as error:
            at_once = tensor.clone()
            await world.sleep(1.0)
            assert torch.equal(tensor, at_once), "written to after the receive had ended"
            assert tensor.count_nonzero() == error.received_nbytes, "a whole number of chunks"
            return True
        return False

    for seed in SEEDS:
        report = simulate(main, seed * 20e-6, ranks=2, seed=seed, network=Network(link=JUMPY), strict=True)
        report.value()
        overtaken += report.results == (True, True)
    assert overtaken >= 5, "hardly any stream was given up halfway"


@pytest.mark.slow
def test_seed_3_what_came_before_its_channel_was_opened_is_heard() -> None:
    """Found by the conformance suite on 3 ranks: its bell had rung before anybody listened, and did not ring again."""

    async def main(world: ad.World) -> int:
        if world.rank == 0:
            await world.sleep(1.0)
        first, second = (world.channel(Number, tag=5) for _ in range(2))
        if world.rank:
            for i in range(20):
                await second.send(Number(i), 0)
                await first.send(Number(i), 0)
            return 0
        return sum([(await channel.receive()).message.value for channel in (first, second) for _ in range(20)])

    for seed in SEEDS:
        assert simulate(main, ranks=2, seed=seed, strict=True).value() == 2 * sum(range(20))


@pytest.mark.parametrize("count", [63, 64, 65, 128, 500])
def test_more_messages_than_one_pass_takes_are_all_heard(count: int) -> None:
    async def main(world: ad.World, call: Callable[[ad.World], Awaitable[None]]) -> int:
        channel = world.channel(Number, tag=5)
        if world.rank:
            for i in range(count):
                await channel.send(Number(i), 0)
            return 0
        await call(world)  # all of them come while it computes
        handled = 0
        while handled < count:
            await world.services.engine.until(lambda: channel.is_ready)
            while channel.receive_nowait() is not None:
                handled += 1
        return handled

    for seed in range(5):
        for call in (by_safe_point, by_progress):
            assert simulate(main, call, ranks=2, seed=seed, compute=Compute(step_s=1.0)).value() == count


# -- deadlocks ------------------------------------------------------------------------------------------------------


def deadlock_of(main: Callable[..., Any], *, ranks: int = 2, **options: Any) -> ad.DeadlockError:
    with pytest.raises(ad.DeadlockError) as caught:
        simulate(main, ranks=ranks, **options)
    return caught.value


def line_of(function: Callable[..., Any], text: str) -> str:
    """``file:line`` of the only line of a function's source that holds ``text``."""
    import inspect

    lines, first = inspect.getsourcelines(function)
    found = [first + i for i, line in enumerate(lines) if text in line]
    assert len(found) == 1, f"{text!r} is in {len(found)} lines"
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
    assert any("receive from 1, tag 7100" in what for what in lines.values()), "the collective's own receive"


def test_a_stream_that_nobody_takes_is_a_deadlock() -> None:
    async def main(world: ad.World) -> None:
        if world.rank:
            await world.send_stream(torch.zeros(3), 0)
        else:
            await receive(world, 1, 3)

    text = str(deadlock_of(main))
    assert "rank 1, main of rank 1: rank 0 to receive a stream" in text
    assert "rank 0, main of rank 0: receive from 1, tag 3" in text


@pytest.mark.parametrize("seed", range(10))
def test_a_lock_taken_in_two_orders_is_a_deadlock_in_the_same_words_each_time(seed: int) -> None:
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
    assert first.count("Lock.acquire, in ") == 2


def test_a_rank_that_dies_does_not_hide_a_deadlock() -> None:
    async def main(world: ad.World) -> None:
        await world.channel(Number, tag=5).receive()

    text = str(deadlock_of(main, ranks=3, faults=[Kill(1, at_s=1.0)]))
    assert "rank 0, main of rank 0: " in text and "rank 2, main of rank 2: " in text
    assert "rank 1" not in text, "a dead rank waits for nothing"


def test_a_rank_that_ends_does_not_hide_a_deadlock() -> None:
    async def main(world: ad.World) -> None:
        if world.rank:
            await world.channel(Number, tag=5).receive()

    text = str(deadlock_of(main))
    assert "rank 1, main of rank 1: " in text and "tag 5" in text
    assert "rank 0, main of rank 0: the other ranks to come to their end" in text


def test_a_deadlock_tells_of_messages_for_a_channel_that_was_never_opened(caplog: pytest.LogCaptureFixture) -> None:
    async def main(world: ad.World) -> None:
        channel = world.channel(Number, tag=100, name="results" if world.rank else "result")
        await channel.send(Number(1), 1 - world.rank)
        await channel.receive()

    text = str(deadlock_of(main))
    for rank in range(2):
        said = f"rank {rank}: 1 message on tag 100 waits for a channel that this rank has not opened, from rank"
        assert said in text, text
    assert sum("awaiting result" in record.getMessage() for record in caplog.records) == 2, "after 5 s, on each"


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


def test_a_task_that_loops_without_waiting_is_named_instead_of_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncdist.simulation.turns.TURN_COUNT_MAX", 1000)

    async def main(world: ad.World) -> None:
        while world.rank == 1:
            await yield_to_loop()

    with pytest.raises(ad.LocalProtocolError, match="rank 1 took 1001 turns in a row"):
        simulate(main, ranks=2)


def test_the_tasks_of_a_rank_that_loops_are_named_each_with_its_line() -> None:
    """Which rank it was is not enough to find the loop."""

    async def wait_for(flag: list[int]) -> None:
        while not flag:  # noqa: ASYNC110
            await asyncio.sleep(0)

    async def main(world: ad.World) -> None:
        await world.sleep(1e-3)
        if world.rank == 1:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(wait_for([]), name="watcher")

    with pytest.raises(ad.LocalProtocolError, match=r"rank 1 took \d+ turns in a row") as caught:
        simulate(main, ranks=2)
    line = wait_for.__code__.co_firstlineno + 2
    assert caught.value.rank == 1
    told = str(caught.value).splitlines()[1:]
    assert told[0].startswith("  rank 1, main of rank 1: TaskGroup.__aexit__, in ")
    assert told[1:] == [f"  rank 1, watcher: sleep, in {wait_for.__qualname__} ({__file__}:{line}) [rank=1]"]


@pytest.mark.slow
@pytest.mark.parametrize("loopers", [(0,), (1,), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("timed", [False, True])
def test_it_is_named_sooner_where_nothing_else_is_to_come(loopers: tuple[int, ...], timed: bool) -> None:
    """It took a million turns, and the better part of a minute. A timer that was cancelled will not come either."""
    turns: Counter[int] = Counter()

    async def main(world: ad.World) -> None:
        if timed:
            async with asyncio.timeout(1e6):
                await world.sleep(1e-3)
        while world.rank in loopers:
            turns[world.rank] += 1
            await asyncio.sleep(0)

    with pytest.raises(ad.LocalProtocolError, match=r"rank \d took \d+ turns in a row until 0\.\d+ s of virtual time"):
        simulate(main, ranks=3)
    assert sum(turns.values()) < 201_000


@pytest.mark.parametrize("waits_for", ["a rank that computes", "a timer", "its own steps, which take no time"])
def test_a_loop_that_waits_for_what_will_come_is_not_named(waits_for: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncdist.simulation.turns.IDLE_TURN_COUNT_MAX", 1000)

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
    assert turn_count > 1000, "it did not loop for long enough to be suspected"


def test_a_task_that_only_yields_lets_messages_arrive() -> None:
    async def main(world: ad.World) -> int:
        channel = world.channel(Number, tag=5)
        await channel.send(Number(7), 1 - world.rank)
        while (found := channel.receive_nowait()) is None:
            await yield_to_loop()
        return found.message.value

    for seed in SEEDS:
        assert simulate(main, ranks=2, seed=seed).results == (7, 7)


# -- a rank that computes -------------------------------------------------------------------------------------------

STEP_S = 0.125  # exact in binary


async def by_safe_point(world: ad.World) -> None:
    await world.safe_point()


async def by_progress(world: ad.World) -> None:
    await world.progress()


@pytest.mark.parametrize("call", [by_safe_point, by_progress])
@pytest.mark.parametrize("seed", range(8))
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
    assert any(low < 0.05 < high for low, high in windows), "nobody died during compute"


def test_after_computing_the_caller_goes_on_first() -> None:
    """As in reality, where the loop gets to run nothing until training code awaits again."""
    order: list[str] = []

    async def main(world: ad.World) -> None:
        asyncio.get_running_loop().call_later(STEP_S / 2, order.append, "timer")
        began_at = world.time()
        assert world.virtual_clock is not None
        await world.virtual_clock.before_safe_point()
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
    """Its tasks, the coordinator's and the streams' included, are charged nothing."""

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
    assert bool(sum(report.results)) == (ranks > 1), "nothing was averaged"


def test_compute_starts_no_thread_and_takes_time_while_the_loop_lives() -> None:
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
        with pytest.raises(ad.BusyError, match="one compute at a time"):
            await world.compute(int)
        assert await result == (3, thread)
        assert world.time() - began_at == pytest.approx(STEP_S, abs=1e-4)
        assert len(ticks) >= 9
        ticking.cancel()

    simulate(main, ranks=1, compute=Compute(step_s=STEP_S)).value()


def test_a_cancelled_compute_waits_for_its_function_as_for_a_thread() -> None:
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


# -- what a simulated rank has not ----------------------------------------------------------------------------------


async def in_executor() -> None:
    await asyncio.get_running_loop().run_in_executor(None, int)


async def in_thread() -> None:
    await asyncio.to_thread(int)


async def from_another_thread() -> None:
    asyncio.get_running_loop().call_soon_threadsafe(int)


async def connect() -> None:
    await asyncio.open_connection("localhost", 1)


async def serve() -> None:
    await asyncio.start_server(lambda reader, writer: None, "localhost", 0)


async def use_socket() -> None:
    with socket.socket() as end:
        await asyncio.get_running_loop().sock_connect(end, ("localhost", 1))


async def start_thread() -> None:
    threading.Thread(target=int).start()


async def start_timer() -> None:
    threading.Timer(0.0, int).start()


async def use_pool() -> None:
    with ThreadPoolExecutor() as pool:
        pool.submit(int)


async def open_connection() -> None:
    socket.create_connection(("127.0.0.1", 9), timeout=60)


async def watch_descriptor() -> None:
    asyncio.get_running_loop().add_reader(0, int)


async def start_process() -> None:
    await asyncio.create_subprocess_exec("true")


async def start_shell() -> None:
    await asyncio.create_subprocess_shell("true")


async def handle_signal() -> None:
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, int)


async def use_process_pool() -> None:
    with ProcessPoolExecutor() as pool:
        pool.submit(int)


async def use_spawning_pool() -> None:
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        pool.submit(int)


async def use_multiprocessing_pool() -> None:
    with multiprocessing.Pool(1) as pool:
        pool.map(abs, [1])


async def fork_process() -> None:
    multiprocessing.get_context("fork").Process(target=int).start()


async def spawn_process() -> None:
    torch.multiprocessing.get_context("spawn").Process(target=int).start()


async def spawn_torch_processes() -> None:
    torch.multiprocessing.spawn(int)


async def fork_by_hand() -> None:
    if os.fork() == 0:
        os._exit(0)


async def run_program() -> None:
    subprocess.run(["true"], check=True)  # noqa: ASYNC221


async def run_shell() -> None:
    os.system("true")  # noqa: ASYNC221


async def make_loop() -> None:
    asyncio.new_event_loop()


@pytest.mark.parametrize(
    "use",
    [
        in_executor,
        in_thread,
        from_another_thread,
        connect,
        serve,
        use_socket,
        start_thread,
        start_timer,
        use_pool,
        open_connection,
        watch_descriptor,
        start_process,
        start_shell,
        handle_signal,
        use_process_pool,
        use_spawning_pool,
        use_multiprocessing_pool,
        fork_process,
        spawn_process,
        spawn_torch_processes,
        fork_by_hand,
        run_program,
        run_shell,
        make_loop,
    ],
)
@pytest.mark.filterwarnings("error")
def test_the_world_outside_is_refused(use: Callable[[], Awaitable[None]]) -> None:
    """Before anything of it exists: no process, and nothing that complains when it is thrown away."""

    async def main(world: ad.World) -> None:
        await use()

    with pytest.raises(ad.LocalProtocolError, match=r"refused in a simulation: .*world\.compute"):
        simulate(main, ranks=1).value()
    gc.collect()
    assert multiprocessing.active_children() == []


def test_the_text_of_a_refusal_follows_from_the_seed() -> None:
    """It travels to the peers, so it is in the digest; threads are numbered by the process, not by the run."""

    async def main(world: ad.World) -> None:
        threading.Thread(target=int).start()

    first = simulate(main, ranks=2)
    for _ in range(10):
        threading.Thread(target=int)
    assert simulate(main, ranks=2).trace_digest == first.trace_digest


@pytest.mark.workers
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_the_workers_of_a_data_loader_are_let_through() -> None:
    """Their batches come in the order of the sampler, which draws from the rank's own random state."""

    async def main(world: ad.World) -> list[list[int]]:
        loader = torch.utils.data.DataLoader(range(32), batch_size=4, num_workers=2, shuffle=True)
        batches = []
        for batch in loader:
            batches.append(batch.tolist())
            await world.safe_point()
        return batches

    first, second = (simulate(main, ranks=2, seed=3) for _ in range(2))
    first.value()
    assert first.results == second.results and first.trace_digest == second.trace_digest
    assert first.results[0] != first.results[1]
    assert all(sorted(itertools.chain(*batches)) == list(range(32)) for batches in first.results)
    assert multiprocessing.active_children() == []


def test_threads_and_sockets_are_refused_on_the_simulations_own_thread_and_for_its_time_alone() -> None:
    asked, answered = threading.Event(), threading.Event()
    seen: list[object] = []

    def another() -> None:
        asked.wait(60)
        with socket.socket() as end:
            inner = threading.Thread(target=seen.append, args=(end.fileno() >= 0,))
            inner.start()
            inner.join()
        answered.set()

    async def main(world: ad.World) -> None:
        asked.set()
        assert answered.wait(60)

    names = threading.Thread.start, socket.socket.__init__
    beside = threading.Thread(target=another)
    beside.start()
    simulate(main, ranks=1).value()
    beside.join()
    assert seen == [True]
    assert (threading.Thread.start, socket.socket.__init__) == names


def test_threads_of_torch_and_numpy_are_theirs() -> None:
    async def main(world: ad.World) -> list[int]:
        loader = torch.utils.data.DataLoader(range(8), batch_size=4, num_workers=0, pin_memory=False)
        own = types.ModuleType("torch._of_its_own")
        exec("import threading\ndef start(target):\n    threading.Thread(target=target).start()", own.__dict__)
        started = threading.Event()
        own.start(started.set)
        assert started.wait(60)
        return [int(batch.sum()) for batch in loader]

    assert simulate(main, ranks=1).value() == [6, 22]


def test_an_interrupt_while_a_simulation_is_cleared_away_leaves_nothing_replaced() -> None:
    """A second Ctrl-C, say: the functions of random asked the rank that had run last from then on."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    async def main(world: ad.World) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            asyncio.get_running_loop().call_soon(interrupt)
            await asyncio.sleep(1.0)

    before = random.random, torch.get_rng_state().tolist()
    with pytest.raises(KeyboardInterrupt):
        simulate(main, ranks=2)
    assert (random.random, torch.get_rng_state().tolist()) == before


@pytest.mark.filterwarnings("error::tqdm.TqdmMonitorWarning")
def test_progress_bars_have_the_thread_that_looks_after_them_and_their_pools_are_refused() -> None:
    """Without it tqdm warned in each simulation, and had none in the process for ever after."""
    tqdm.monitor, interval = None, tqdm.monitor_interval

    async def main(world: ad.World) -> int:
        return sum(tqdm(range(4), file=io.StringIO()))

    async def pooled(world: ad.World) -> list[int]:
        pooled: list[int] = thread_map(int, range(4), file=io.StringIO())
        return pooled

    assert simulate(main, ranks=2).value() == 6
    assert tqdm.monitor is not None and tqdm.monitor_interval == interval
    tqdm.monitor.exit()
    tqdm.monitor = None
    with pytest.raises(ad.LocalProtocolError, match="starting a thread is refused in a simulation"):
        simulate(pooled, ranks=1).value()


def test_what_is_called_after_each_event_runs_in_no_loop_and_each_rank_in_its_own() -> None:
    """Between two turns of one rank asyncio is not told of the end of the first: whoever looks must not see it."""
    seen: set[object] = set()

    async def main(world: ad.World) -> None:
        for _ in range(5):
            await world.safe_point()
            assert asyncio.get_running_loop() is world.services.engine.loop

    ad.simulate(main, ranks=3, seed=1, after_event=lambda: seen.add(asyncio._get_running_loop())).value()
    assert seen == {None}
    assert asyncio._get_running_loop() is None
