"""Tests the engine's passes, over a transport whose requests complete when the test says so."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
from support.local import engines, eventually, yields
from support.scripted import CountingInlet, ScriptedRequest, ScriptedTransport, abandon

from asyncdist.errors import AsyncdistError, RankLostError
from asyncdist.messaging import engine as progress
from asyncdist.messaging.engine import PROGRESS_BUDGET_S, TALK_PASS_COUNT_MAX, Engine
from asyncdist.messaging.polling import (
    HOT_PASS_COUNT,
    SMALL_SEND_PASS_COUNT,
    WARM_PASS_COUNT,
    DriverState,
    Pollable,
)
from asyncdist.transports.base import ANY_SOURCE
from asyncdist.transports.mpi_requests import SMALL_NBYTES_MAX, SendRequest
from asyncdist.waits import A_CONDITION


class Bystander:
    """Another task of the rank: counts how often it runs."""

    def __init__(self) -> None:
        self.turns = 0
        self.task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        while True:
            await yields(1)
            self.turns += 1

    async def __aenter__(self) -> Bystander:
        await yields(2)
        self.turns = 0
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])


# ----------------------------------------------------------------------------------------------- conditions, deadlines


async def test_until_asks_again_after_a_completion_and_on_recheck(engine: Engine) -> None:
    asked, holds = [], False

    def condition() -> bool:
        asked.append(None)
        return holds

    task = asyncio.ensure_future(engine.until(condition))
    await yields(3)
    assert len(asked) == 1, "a pass must not test conditions that cannot have changed"
    engine.poll()
    await yields(3)
    assert len(asked) == 1, "a pass that completes nothing must not test conditions"
    request = ScriptedRequest()
    engine.watch(request, A_CONDITION)
    request.done = True
    engine.poll()
    assert len(asked) == 2
    holds = True
    engine.recheck()
    assert await task is True
    assert await engine.until(lambda: True, deadline=0.0) is True


async def test_until_raises_what_its_condition_raises(engine: Engine) -> None:
    def condition() -> bool:
        if broken:
            raise RankLostError("gone", rank=1)
        return False

    broken = False
    task = asyncio.ensure_future(engine.until(condition))
    other = asyncio.ensure_future(engine.until(lambda: broken))
    await yields(1)
    broken = True
    engine.recheck()
    with pytest.raises(RankLostError):
        await task
    assert await other is True


async def test_until_returns_false_at_its_deadline(engine: Engine) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + 0.02
    assert await engine.until(lambda: False, deadline=deadline) is False
    assert loop.time() >= deadline
    assert await engine.until(lambda: False, deadline=loop.time() - 1) is False


async def test_a_deadline_is_judged_after_what_arrived_during_a_gap(engine: Engine) -> None:
    """The loop was blocked past the deadline, and five messages had arrived when it resumed."""
    inlet = CountingInlet()
    engine.add_pollable(inlet)
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(engine.until(lambda: inlet.polls >= 5, deadline=loop.time() + 0.01))
    await yields(1)
    inlet.waiting = 5
    time.sleep(0.05)  # noqa: ASYNC251 training code blocks the loop
    assert await task is True


async def test_peer_that_never_stops_sending_cannot_delay_a_deadline(engine: Engine) -> None:
    class Flood(Pollable):
        def poll(self) -> int:
            return 1

    engine.add_pollable(Flood())
    async with asyncio.timeout(60):
        assert await engine.until(lambda: False, deadline=0.0) is False


async def test_a_cancelled_until_is_forgotten(engine: Engine) -> None:
    asked = []
    task = asyncio.ensure_future(engine.until(lambda: bool(asked.append(None))))
    await yields(1)
    task.cancel()
    await asyncio.wait([task])
    engine.recheck()
    assert len(asked) == 1


# ------------------------------------------------------------------------------------------------------------ failure


async def test_fail_wakes_every_kind_of_wait_now_and_later(engine: Engine, transport: ScriptedTransport) -> None:
    loop = asyncio.get_running_loop()
    error = RankLostError("rank 2 failed", rank=2)
    waits: list[Callable[[], Any]] = [
        lambda: engine.wait(ScriptedRequest(), A_CONDITION),
        lambda: engine.send(b"x", 1, 5),
        lambda: engine.receive(bytearray(1), 1, 5),
        lambda: engine.until(lambda: False),
        lambda: engine.until(lambda: False, deadline=loop.time() + 3600),
        lambda: engine.park(loop.create_future()),
    ]
    await abandon(engine, bytearray(1), tag=6)
    waits.append(lambda: engine.receive(bytearray(1), 1, 6))  # waits for a message of an abandoned receive
    tasks = [asyncio.ensure_future(make()) for make in waits]
    await yields(2)
    engine.fail(error)
    for task in tasks:
        with pytest.raises(RankLostError) as caught:
            await task
        assert caught.value is error
    assert engine.failure is error
    for make in waits:
        with pytest.raises(RankLostError):
            await make()
    assert len(engine.outstanding()) >= 4, "the engine must keep the requests alive"
    for _, request in transport.posted:
        request.done = True
    engine.poll()


# ---------------------------------------------------------------------------------------------------------- safe points


async def test_progress_yields_at_least_once_even_with_nothing_to_do(engine: Engine) -> None:
    async with Bystander() as other:
        await engine.safe_point(PROGRESS_BUDGET_S)
        assert other.turns >= 1
        before = other.turns
        await engine.safe_point(budget_s=0)
        assert other.turns > before


async def test_progress_goes_on_until_a_pass_completes_nothing(engine: Engine) -> None:
    inlet = CountingInlet()
    engine.add_pollable(inlet)
    async with Bystander() as other:
        inlet.waiting = 7
        await engine.safe_point(budget_s=60)
        assert (inlet.waiting, inlet.polls) == (0, 8)
        assert other.turns >= 7, "each pass must yield to other tasks"
        inlet.polls = 0
        await engine.safe_point(budget_s=60)
        assert inlet.polls == 1, "only one pass may happen while no message arrives"


async def test_progress_ends_when_the_budget_is_spent(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    class Clock:
        @staticmethod
        def perf_counter() -> float:
            return now

    class Busy(Pollable):
        polls = 0

        def poll(self) -> int:
            nonlocal now
            self.polls += 1
            now += 1.0
            return 1

    monkeypatch.setattr(progress, "time", Clock)
    inlet = Busy()
    engine.add_pollable(inlet)
    async with Bystander() as other:
        await engine.safe_point(budget_s=4.5)
        assert 5 <= inlet.polls <= 6
        assert other.turns >= 1
        inlet.polls = 0
        await engine.safe_point(budget_s=0)
        assert 1 <= inlet.polls <= 2


# ----------------------------------------------------------------------------------------------------------- the driver


async def test_the_driver_completes_what_is_awaited(engine: Engine) -> None:
    engine.start()
    request = ScriptedRequest()
    task = asyncio.ensure_future(engine.wait(request, A_CONDITION))
    await yields(5)
    request.done = True
    await task


async def test_the_driver_cools_down_and_a_wait_heats_it_again(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver polls for a number of idle passes, then sleeps briefly if the loop is idle, then uses a timer."""
    naps = 0

    def nap(seconds: float) -> None:
        nonlocal naps
        assert seconds < 0.001
        naps += 1

    monkeypatch.setattr(time, "sleep", nap)
    # otherwise a loaded machine would make every gap long
    monkeypatch.setattr("asyncdist.messaging.polling.ALONE_GAP_S", 3600.0)
    monkeypatch.setattr("asyncdist.messaging.polling.IDLE_PERIOD_S", 3600.0)
    engine.start()
    most = HOT_PASS_COUNT + WARM_PASS_COUNT + 5
    await yields(3 * most)
    passes = engine.statistics().pass_count
    assert HOT_PASS_COUNT <= passes <= most
    assert WARM_PASS_COUNT - 2 <= naps <= WARM_PASS_COUNT + 1
    await yields(50)
    assert engine.statistics().pass_count == passes, "an idle engine must not make a pass before its timer"
    engine.watch(ScriptedRequest(), A_CONDITION)
    await yields(20)
    assert engine.statistics().pass_count > passes + 10, "a new request must make the engine poll in every turn again"


async def test_driver_soon_idles_if_only_small_sends_are_outstanding(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receiver of a small message that MPI does not take at once has not looked for messages for a while."""
    monkeypatch.setattr("asyncdist.messaging.polling.IDLE_PERIOD_S", 3600.0)
    engine.start()
    for buffer in (bytearray(8), bytearray(SMALL_NBYTES_MAX)):
        engine.watch(SendRequest(ScriptedMpiRequest(), buffer, fail, 1), A_CONDITION)
    await yields(50)
    passes = engine.statistics().pass_count
    assert engine._state is DriverState.IDLE and passes <= SMALL_SEND_PASS_COUNT + 5
    engine.watch(SendRequest(ScriptedMpiRequest(), bytearray(SMALL_NBYTES_MAX + 1), fail, 1), A_CONDITION)
    await yields(50)
    assert engine.statistics().pass_count > passes + 30, "hot"


class ScriptedMpiRequest:
    """MPI request of a message that MPI does not take."""

    def Test(self) -> bool:  # noqa: N802
        return False


def fail(error: BaseException, status: Any, buffer: Any, peer: int) -> NoReturn:
    raise error


async def test_the_driver_takes_no_nap_while_other_tasks_run(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def nap(_: float) -> None:
        raise AssertionError("the driver slept while another task was ready")

    monkeypatch.setattr(time, "sleep", nap)
    monkeypatch.setattr("asyncdist.messaging.polling.ALONE_GAP_S", 0.0)
    engine.start()
    await yields(2 * (HOT_PASS_COUNT + WARM_PASS_COUNT))
    assert engine.statistics().pass_count >= HOT_PASS_COUNT


async def test_an_idle_driver_still_looks_by_the_clock(engine: Engine) -> None:
    engine.start()
    await yields(2 * (HOT_PASS_COUNT + WARM_PASS_COUNT))
    await eventually(lambda: engine._state is DriverState.IDLE)
    passes = engine.statistics().pass_count
    await eventually(lambda: engine.statistics().pass_count >= passes + 3)


async def test_driver_makes_no_pass_right_after_one_of_training_code(engine: Engine) -> None:
    engine.start()
    await yields(2)
    passes = engine.statistics().pass_count
    for _ in range(40):
        engine.poll()
        await yields(1)
    assert engine.statistics().pass_count <= passes + 42


async def test_transport_that_rings_is_not_polled_while_idle() -> None:
    transport = ScriptedTransport(wakes=True)
    engine = Engine(transport, asyncio.get_running_loop())  # type: ignore[arg-type]
    engine.start()
    await yields(20)
    passes = engine.statistics().pass_count
    assert passes <= 5
    await yields(50)
    assert engine.statistics().pass_count == passes
    for _ in range(3):
        transport.ring()
        await yields(10)
        assert engine.statistics().pass_count > passes, "the ring must wake the engine at once"
        passes = engine.statistics().pass_count
    engine.stop()
    transport.ring()
    await yields(10)
    assert engine.statistics().pass_count == passes, "a stopped engine must not make a pass"


async def test_ring_of_a_thread_causes_one_pass_in_the_next_loop_turn() -> None:
    transport = ScriptedTransport(wakes=True)
    transport.capabilities = dataclasses.replace(transport.capabilities, misses_wakes=False, rings_from_threads=True)
    engine = Engine(transport, asyncio.get_running_loop())  # type: ignore[arg-type]
    inlet = CountingInlet()
    engine.add_pollable(inlet)
    engine.start()
    await yields(10)
    for _ in range(3):
        polls, inlet.waiting = inlet.polls, 1
        ringing = threading.Thread(target=transport.ring)
        ringing.start()
        ringing.join()
        await yields(1)
        assert (inlet.polls, inlet.waiting) == (polls + 1, 0)
        await yields(10)
        assert inlet.polls == polls + 1, "the engine must sleep after one more poll"
    engine.stop()
    transport.ring()
    await yields(10)
    assert inlet.polls == polls + 1, "a stopped engine must not poll"


async def test_a_defect_met_by_the_driver_reaches_those_who_wait(engine: Engine) -> None:
    engine.start()
    request = ScriptedRequest()
    task = asyncio.ensure_future(engine.wait(request, A_CONDITION))
    await yields(2)
    request.error = ZeroDivisionError("a defect")
    with pytest.raises(ZeroDivisionError):
        async with asyncio.timeout(60):
            await task
    assert isinstance(engine.failure, ZeroDivisionError)


async def test_an_inlet_that_is_removed_is_polled_no_more(engine: Engine) -> None:
    inlet, other = CountingInlet(), CountingInlet()
    engine.add_pollable(inlet)
    engine.add_pollable(other)
    engine.poll()
    engine.remove_pollable(inlet)
    engine.poll()
    assert (inlet.polls, other.polls) == (1, 2)


# -------------------------------------------------------------------------------------------------------- a lost rank


async def outcome(task: asyncio.Task[Any]) -> Any:
    try:
        async with asyncio.timeout(60):
            return await task
    except AsyncdistError as error:
        return error


@pytest.mark.slow
async def test_unread_messages_of_one_tag_do_not_slow_the_others() -> None:
    async with engines(2) as (_, made):
        here, there = made[0].transport, made[1].transport

        def duration() -> float:
            began_at = time.process_time()
            for _ in range(200):
                request = there.irecv(bytearray(1), 0, 7)
                here.isend(b"!", 1, 7)
                assert request.test()
            return time.process_time() - began_at

        alone = max(duration() for _ in range(3))
        for _ in range(20_000):
            here.isend(b"!", 1, 9)
            there.irecv(bytearray(1), 0, 11)
        assert min(duration() for _ in range(3)) < 20 * alone, (
            "unrelated requests must not slow down the receive; once it took 250 times as long"
        )


async def test_lost_rank_fails_only_the_requests_that_involve_it() -> None:
    """LocalHub.lose: rank 2 of 3 dies while operations of every kind are in progress between all ranks."""
    big = 1 << 20
    async with engines(3) as (hub, made):
        receives = {
            (at, source): asyncio.ensure_future(made[at].receive(bytearray(8), source, 1))
            for at in range(3)
            for source in range(3)
        }
        sends = {
            (at, dest): asyncio.ensure_future(made[at].send(bytes(big), dest, 2))
            for at in range(3)
            for dest in range(3)
        }
        wildcard = asyncio.ensure_future(made[0].receive(bytearray(8), ANY_SOURCE, 3))
        await made[2].send(b"sent before", 0, 4)  # sent eagerly, so the message has left
        await yields(5)
        hub.lose(2)
        await yields(5)
        for pair, task in [*receives.items(), *sends.items()]:
            if 2 in pair:
                error = await outcome(task)
                assert isinstance(error, RankLostError), pair
                assert error.rank == 2
            else:
                assert not task.done(), pair
        assert not wildcard.done(), "another rank may still send, so the receive must remain pending"
        assert made[0].transport.lost_ranks() == {2}
        # New requests fail too, but messages that the rank sent before it died are received.
        for operation in (made[0].send(b"x", 2, 5), made[1].receive(bytearray(1), 2, 5)):
            assert isinstance(await outcome(asyncio.ensure_future(operation)), RankLostError)
        buffer = bytearray(11)
        assert await made[0].receive(buffer, 2, 4) == (2, 11)
        assert buffer == b"sent before"
        # The living ranks finish their requests.
        for at, source in ((0, 1), (1, 0), (0, 0), (1, 1)):
            await made[source].send(b"alive", at, 1)
            assert await receives[at, source] == (source, 5)
            room = bytearray(big)
            assert await made[at].receive(room, source, 2) == (source, big)
            await sends[source, at]
        await made[1].send(b"to any", 0, 3)
        assert await wildcard == (1, 6)
        assert made[0].outstanding() == made[1].outstanding() == ()


async def test_peers_that_never_stop_talking_do_not_hold_a_safe_point(engine: Engine) -> None:
    class Chatter(Pollable):
        polls = 0

        def poll(self) -> int:
            self.polls += 1
            return 1

    chatter = Chatter()
    engine.stop()  # only progress polls
    engine.add_pollable(chatter)
    await engine.safe_point(budget_s=60.0)
    assert chatter.polls == 1 + TALK_PASS_COUNT_MAX
