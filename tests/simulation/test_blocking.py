"""Tests code that blocks: the rank is busy meanwhile, and arrived messages and due timers follow afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import asyncdist as ad
from asyncdist.simulation import Compute, Kill, Link, Network, simulate
from asyncdist.simulation.determinism.patched_clocks import EPOCH_S

STEADY = Network(link=Link(latency_s=0.1, bandwidth_nbytes_per_s=1e12), loss_detection_s=0.5, eager_nbytes=1000)
#: Duration of turns of the loop and transfers of a few bytes.
CLOSE_S = 1e-3


@dataclass(frozen=True, slots=True)
class Number:
    value: int


def test_nothing_of_a_rank_runs_while_it_blocks_and_others_go_on() -> None:
    async def main(world: ad.World) -> list[tuple[str, float]]:
        seen: list[tuple[str, float]] = []

        def note(what: str) -> None:
            seen.append((what, world.time()))

        async def tick() -> None:
            for _ in range(8):
                note("tick")
                await world.sleep(0.25)

        ticking = asyncio.create_task(tick())
        asyncio.get_running_loop().call_later(0.3, note, "timer")
        await world.sleep(0.1)
        if world.rank == 1:
            note("blocks")
            time.sleep(1.0)  # noqa: ASYNC251 that is the point
            note("has blocked")
        await ticking
        return seen

    steady, blocked = simulate(main, ranks=2, network=STEADY).results
    ticks = [0.25 * i for i in range(8)]
    assert [at for what, at in steady if what == "tick"] == pytest.approx(ticks, abs=CLOSE_S)
    expected = {"tick": [0.0, *[1.1 + 0.25 * i for i in range(7)]], "timer": [1.1], "blocks": [0.1]}
    for what, times in {**expected, "has blocked": [1.1]}.items():
        assert [at for name, at in blocked if name == what] == pytest.approx(times, abs=CLOSE_S), what


def test_a_rank_may_block_in_any_callback_any_number_of_times() -> None:
    async def main(world: ad.World) -> float:
        loop = asyncio.get_running_loop()
        for _ in range(3):
            loop.call_soon(time.sleep, 0.5)
        await asyncio.sleep(0)
        time.sleep(0.25)  # noqa: ASYNC251
        time.sleep(0.25)  # noqa: ASYNC251
        await world.safe_point()
        return world.time()

    report = simulate(main, ranks=1, compute=Compute(step_s=1.0))
    assert report.value() == pytest.approx(3.0, abs=CLOSE_S)


def test_clocks_tell_virtual_time() -> None:
    names = ("time", "monotonic", "perf_counter", "process_time", "thread_time")

    async def main(world: ad.World) -> None:
        await world.sleep(2.0)
        time.sleep(0.5)  # noqa: ASYNC251
        for name in names:
            start_s = EPOCH_S if name == "time" else 0.0
            assert getattr(time, name)() == start_s + world.time()
            assert getattr(time, f"{name}_ns")() == pytest.approx((start_s + world.time()) * 1e9, abs=1e3)
        assert world.time() == pytest.approx(2.5, abs=CLOSE_S)

    before = {name: getattr(time, name) for name in dir(time)}
    simulate(main, ranks=2).value()
    assert {name: getattr(time, name) for name in dir(time)} == before


def test_clocks_read_without_an_argument_tell_virtual_time() -> None:
    """Regression: these functions returned the machine's time, so names made of it differed between runs."""

    async def main(world: ad.World) -> list[object]:
        await world.sleep(3600.0)
        now_s = EPOCH_S + world.time()
        assert time.localtime() == time.localtime(None) == time.localtime(now_s)
        assert time.gmtime() == time.gmtime(now_s)
        assert time.ctime() == time.asctime() == time.asctime(time.localtime(now_s))
        assert time.strftime("%F %T") == time.strftime("%F %T", time.localtime(now_s))
        assert time.strftime("%F %T", time.gmtime(0.0)) == "1970-01-01 00:00:00"
        assert time.clock_gettime(time.CLOCK_REALTIME) == now_s
        assert time.clock_gettime_ns(time.CLOCK_MONOTONIC) == time.monotonic_ns()
        return [time.gmtime().tm_year, time.gmtime().tm_hour]

    before = {name: getattr(time, name) for name in dir(time)}
    assert simulate(main, ranks=2).results == ([2020, 1], [2020, 1])
    assert {name: getattr(time, name) for name in dir(time)} == before


def test_code_that_waits_by_reading_a_clock_waits_for_so_long() -> None:
    async def main(world: ad.World) -> float:
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:
            pass
        assert world.time() == pytest.approx(0.5, abs=CLOSE_S)
        return world.time()

    assert simulate(main, ranks=1).value() == pytest.approx(0.5, abs=CLOSE_S)


def test_a_wait_that_polls_the_loops_clock_takes_its_time() -> None:
    """Regression: the wait never ended, because only the clocks of the module time advanced."""

    async def main(world: ad.World) -> float:
        loop = asyncio.get_running_loop()
        while loop.time() < 60.0:
            pass
        return world.time()

    assert simulate(main, ranks=1).value() == pytest.approx(60.0, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("clock", ["time.monotonic", "loop.time", "world.time", "time.sleep"])
def test_code_that_sleeps_or_reads_a_clock_for_ever_is_named(clock: str) -> None:
    """A limit of virtual time, or of turns in a row, does not end code that never returns to its loop."""

    async def main(world: ad.World) -> None:
        loop = asyncio.get_running_loop()
        read = {
            "time.monotonic": time.monotonic,
            "loop.time": loop.time,
            "world.time": world.time,
            "time.sleep": lambda: time.sleep(0.001),
        }[clock]
        while world.rank == 1:
            read()
        await world.sleep(1.0)

    report = simulate(main, ranks=2, until_s=10_000.0, return_exceptions=True)
    error = report.results[1]
    assert isinstance(error, ad.LocalProtocolError)
    assert "rank 1 slept or read clocks 300000 times without an await" in str(error)
    first = main.__code__.co_firstlineno
    line = first + (6 if clock == "time.sleep" else 9)
    assert f"line {line} of {__file__}" in str(error)
    assert isinstance(report.results[0], ad.RankLostError)


def test_clocks_of_libraries_and_of_observers_are_the_machines() -> None:
    looked: list[float] = []

    async def main(world: ad.World) -> float:
        await world.sleep(1.0)
        return logging.makeLogRecord({}).created

    report = simulate(main, ranks=1, after_event=lambda: looked.append(time.time()))
    now = time.time()
    assert report.value() == pytest.approx(now, abs=600.0)
    assert looked == pytest.approx([now] * len(looked), abs=600.0)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), "long"])
def test_what_is_no_time_to_sleep_is_refused_as_ever(seconds: Any) -> None:
    async def main(world: ad.World) -> None:
        time.sleep(seconds)  # noqa: ASYNC251

    with pytest.raises((ValueError, OverflowError, TypeError)):
        simulate(main, ranks=1).value()


def test_what_is_sent_after_blocking_leaves_then() -> None:
    async def main(world: ad.World) -> list[float]:
        channel = world.channel(Number, tag=5)
        if world.rank == 0:
            channel.send_nowait(Number(0), 1)
            time.sleep(1.0)  # noqa: ASYNC251
            channel.send_nowait(Number(1), 1)
            return []
        found = []
        for value in range(2):
            assert (await channel.receive()).message.value == value
            found.append(world.time())
        return found

    assert simulate(main, ranks=2, network=STEADY).results[1] == pytest.approx([0.1, 1.1], abs=CLOSE_S)


@pytest.mark.parametrize("nbytes", [10, 100_000])
def test_a_rank_killed_while_it_blocks_sends_nothing_afterwards(nbytes: int) -> None:
    heard: list[str] = []

    async def main(world: ad.World) -> None:
        if world.rank == 1:
            time.sleep(1.0)  # noqa: ASYNC251
            await world.services.engine.send(bytes(nbytes), 0, 5)
            return
        with contextlib.suppress(ad.RankLostError):
            await world.services.engine.receive(bytearray(nbytes), 1, 5)
            heard.append("a message")

    logging.disable(logging.ERROR)
    try:
        simulate(main, ranks=2, network=STEADY, faults=[Kill(1, at_s=0.5)]).check_faults()
    finally:
        logging.disable(logging.NOTSET)
    assert not heard


def test_an_answer_and_its_deadline_may_meet_in_either_order() -> None:
    """A cancellation may arrive between the arrival of an answer and its receipt."""

    async def main(world: ad.World) -> str:
        channel = world.channel(Number, tag=5)
        if world.rank == 1:
            channel.send_nowait(Number(1), 0)
            return "sent"

        async def receive() -> str:
            try:
                async with asyncio.timeout(0.5):
                    await channel.receive()
            except TimeoutError:
                waiting = channel.receive_nowait()
                return "too late, and it is there" if waiting is not None else "too late"
            return "in time"

        receiving = asyncio.create_task(receive())
        await asyncio.sleep(0)
        time.sleep(1.0)  # noqa: ASYNC251
        return await receiving

    ends = Counter(simulate(main, ranks=2, seed=seed).results[0] for seed in range(40))
    assert ends["in time"] > 5 and ends["too late, and it is there"] > 5, ends


def test_a_run_with_blocking_code_repeats_to_the_digest() -> None:
    async def main(world: ad.World) -> float:
        for _ in range(5):
            time.sleep(1e-3 * (world.rank + 1))  # noqa: ASYNC251
            await ad.barrier()
        return time.monotonic()

    def run(seed: int) -> tuple[str, tuple[Any, ...]]:
        report = simulate(main, ranks=4, seed=seed)
        return report.trace_digest, report.results

    assert run(7) == run(7)
    assert run(7) != run(8)


# -- world.compute --------------------------------------------------------------------------------------------------


def test_the_loop_runs_before_and_after_a_computed_function() -> None:
    async def main(world: ad.World) -> str:
        order: list[str] = []
        computing = asyncio.create_task(world.compute(order.append, "compute"))
        await world.sleep(0.5)
        order.append("loop")
        await computing
        assert world.time() == pytest.approx(1.0, abs=CLOSE_S)
        return " ".join(order)

    compute = Compute(step_s=1.0)
    orders = Counter(simulate(main, ranks=1, seed=seed, compute=compute).value() for seed in range(40))
    assert orders.keys() == {"compute loop", "loop compute"}
    assert min(orders.values()) > 8, orders


def test_a_computed_function_that_blocks_does_not_hold_the_loop() -> None:
    async def main(world: ad.World) -> tuple[int, float]:
        tick_count = 0

        async def tick() -> None:
            nonlocal tick_count
            while True:
                await world.sleep(0.1)
                tick_count += 1

        ticking = asyncio.create_task(tick())
        await world.compute(time.sleep, 2.0)
        ticking.cancel()
        return tick_count, world.time()

    tick_count, ended_at = simulate(main, ranks=1, compute=Compute(step_s=1.0)).value()
    assert tick_count == pytest.approx(30, abs=1)
    assert ended_at == pytest.approx(3.0, abs=CLOSE_S)


def test_a_computed_function_has_its_callers_torch_modes_alone() -> None:
    """As in a thread, the function does not run in its caller's task."""

    async def main(world: ad.World) -> bool:
        with torch.no_grad():
            computing = asyncio.create_task(world.compute(torch.is_grad_enabled))
            await asyncio.sleep(0)
        assert torch.is_grad_enabled()
        enabled = await computing
        with pytest.raises(RuntimeError, match="world"):
            await world.compute(ad.current_world)
        return enabled

    assert simulate(main, ranks=1).value() is False


def test_a_rank_that_dies_first_never_runs_its_computed_function() -> None:
    ran: Counter[bool] = Counter()

    async def main(world: ad.World) -> None:
        if world.rank == 1:
            await world.compute(ran.update, [True])

    for seed in range(20):
        simulate(main, ranks=2, seed=seed, compute=Compute(step_s=1.0), faults=[Kill(1, at_s=0.5)]).check_faults()
    assert 2 < ran[True] < 18, ran


def test_an_agreed_axis_operation_ends_when_its_rank_returns() -> None:
    """Regression: the rank had declared that it takes no part, and then waited for the others forever."""

    async def main(world: ad.World) -> str:
        with await ad.new_mesh({"A": 2}):
            if world.rank == 1:
                summing = asyncio.create_task(ad.psum(torch.ones(1000), "A"))
                await world.sleep(1.0)
                time.sleep(4.0)  # noqa: ASYNC251 - meanwhile rank 0 comes, and says go
                summing.cancel()
                return "returned"
            await world.sleep(2.5)
            with pytest.raises(ad.ClosedError) as caught:
                await ad.psum(torch.ones(1000), "A")
            assert caught.value.rank == 1
            return "told"

    for hosts in (1, 2):
        report = simulate(main, ranks=2, network=Network(link=STEADY.link, ranks_per_host=hosts), until_s=30.0)
        assert report.results == ("told", "returned")
        assert report.virtual_time_s < 10.0
