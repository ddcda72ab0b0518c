"""Tests ranks that are killed or receive a signal, and how the other ranks are notified."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from scripts.population import Mixed, sgd
from support.steady_network import CLOSE_S, STEADY, Number, quiet, run

import asyncdist as ad
from asyncdist.messaging.engine import yield_to_loop
from asyncdist.simulation import (
    Exponential,
    Interrupt,
    Kill,
    Link,
    Network,
    Restart,
    Uniform,
    simulate,
)
from protocols import AsyncSelectiveAveragingPolicy, ReplayBuffer, serve_replay_buffer

# -- death ----------------------------------------------------------------------------------------------------------


def test_kill_at_a_time_and_what_the_peers_hear() -> None:
    """The dead rank runs nothing afterwards; only a receive from it fails, when its loss is detected."""
    ran: list[float] = []
    heard: list[tuple[str, float]] = []

    async def main(world: ad.World) -> None:
        if world.rank == 1:
            while True:
                ran.append(world.time())
                await world.sleep(0.25)
        if world.rank == 2:
            await world.sleep(100.0)
            await world.services.engine.send(b"x", 0, 6)
            await world.sleep(100.0)
            return

        async def take(source: int, tag: int) -> None:
            try:
                await world.services.engine.receive(bytearray(1), source, tag)
                heard.append((f"message from {source}", world.time()))
            except ad.RankLostError as error:
                heard.append((str(error.rank), world.time()))

        world.services.on_gone(lambda rank: heard.append((f"gone {rank}", world.time())))
        await asyncio.gather(take(1, 5), take(2, 6))

    report = run(main, ranks=3, faults=[Kill(1, at_s=10.1)])
    assert report.faults_fired == (1,)
    assert report.results[1] is None
    assert ran == pytest.approx([0.25 * i for i in range(41)], abs=CLOSE_S)
    assert sorted(what for what in heard if what[0] != "gone 2") == [  # this rank leaves at the end
        ("1", pytest.approx(10.6, abs=CLOSE_S)),
        ("gone 1", pytest.approx(10.6, abs=CLOSE_S)),
        ("message from 2", pytest.approx(101.0, abs=CLOSE_S)),
    ]


async def _wait_for_a_message(world: ad.World, ending: str) -> str:
    channel = world.channel(Number, tag=60)
    if world.rank:
        await asyncio.sleep(1.0 if ending == "returns" and world.rank == 2 else 100.0)
        return ""
    try:
        if ending == "iterates":
            async for _ in channel:
                pass
        await channel.receive()
    except ad.RankLostError as error:
        assert channel.receive_nowait() is None
        return f"{error.rank} at {world.time():.1f}: {error}"
    return ""


@pytest.mark.parametrize("ending", ["dies", "returns", "iterates"])
def test_a_receive_fails_when_no_possible_sender_is_left(ending: str) -> None:
    """Regression: the receive waited forever: a simulation deadlocked, and a real job of two ranks was silent."""
    faults = [Kill(1, at_s=0.5)] if ending == "returns" else [Kill(1, at_s=0.5), Kill(2, at_s=1.0)]
    report = ad.simulate(
        _wait_for_a_message, ending, ranks=3, faults=faults, network=Network(loss_detection_s=1e-4), strict=False
    )
    assert re.fullmatch(
        r"1 at 2\.0: Number: no rank is left that can send, because rank 1 is lost \[rank=1\]", report.results[0]
    ), report.results[0]


def test_a_receive_continues_while_a_sender_may_come_back() -> None:
    async def main(world: ad.World) -> int:
        channel = world.channel(Number, tag=60)
        if world.rank:
            if world.incarnation:
                await asyncio.sleep(0.1)
                await channel.send(Number(7), 0)
            else:
                await asyncio.sleep(100.0)
            return 0
        return (await channel.receive()).message.value

    report = ad.simulate(
        main,
        ranks=2,
        faults=[Kill(1, at_s=0.5), Restart(1, at_s=2.0)],
        network=Network(loss_detection_s=1e-4),
        strict=False,
    )
    assert report.results[0] == 7


def test_waiting_for_a_replay_buffer_of_a_killed_rank_fails() -> None:
    """Regression: a killed server raised ClosedError, like one that has left; a later client gets the same error."""
    told: dict[str, ad.RankLostError] = {}

    async def main(world: ad.World) -> None:
        if world.rank == 2:
            await serve_replay_buffer((0, 1), capacity=16)
            return
        with pytest.raises(ad.RankLostError) as caught:
            async with ReplayBuffer(2) as buffer:
                await buffer.sample(1)  # the buffer is empty
        told[f"rank {world.rank}"] = caught.value
        await world.sleep(50.0)
        with pytest.raises(ad.RankLostError) as caught:
            async with ReplayBuffer(2):
                pass
        told[f"rank {world.rank}, later"] = caught.value

    run(main, ranks=3, faults=[Kill(2, at_s=20.0)])
    assert {name: error.rank for name, error in told.items()} == dict.fromkeys(
        ("rank 0", "rank 1", "rank 0, later", "rank 1, later"), 2
    )
    assert all("'replay'" in str(error) for error in told.values())


@pytest.mark.parametrize("returns", [False, True])
def test_an_unreceived_stream_tells_how_its_receiver_ended(returns: bool) -> None:
    """The error says whether the receiver returned from main or died."""

    async def main(world: ad.World) -> None:
        if world.rank == 1:
            await asyncio.sleep(1.0 if returns else 5.0)
        else:
            await world.send_stream(torch.zeros(1 << 20), 1)

    faults = [] if returns else [Kill(rank=1, at_s=2.0)]
    report = simulate(main, ranks=2, network=STEADY, faults=faults, return_exceptions=True)
    assert isinstance(report.results[0], ad.RankLostError) and report.results[0].rank == 1
    assert report.results[0].args[0] == f"rank 1 {'left' if returns else 'was lost'} before it received the tensor"


def test_what_a_dead_rank_leaves_behind_runs_when_all_is_over() -> None:
    """Its ``finally`` blocks run then, so that they release real resources, without any peer."""
    story: list[str] = []

    async def main(world: ad.World) -> None:
        channel = world.channel(Number, tag=5)
        if world.rank == 1:
            try:
                await world.sleep(100.0)
                story.append("slept")
            finally:
                story.append("cleared away")
                channel.send_nowait(Number(1), 0)
        else:
            await world.sleep(50.0)
            assert channel.receive_nowait() is None
            story.append("rank 0 ends")

    report = run(main, faults=[Kill(1, at_s=1.0)])
    assert story == ["rank 0 ends", "cleared away"]
    assert not any(event.kind == "send" and event.a == 1 and event.time_s > 1.0 for event in report.trace)


def test_nobody_dies_while_things_are_cleared_away() -> None:
    story: list[int] = []

    async def main(world: ad.World) -> None:
        try:
            await world.sleep(100.0)
        finally:
            for _ in range(20):
                await yield_to_loop()
            story.append(world.rank)

    with pytest.raises(ad.TimeLimitError) as caught:
        simulate(main, ranks=2, faults=[Kill(0, at_turn=15), Kill(1, at_s=10.00001)], until_s=10.0).value()
    assert caught.value.report.faults_fired == (0, 0)
    assert sorted(story) == [0, 1]


@pytest.mark.parametrize("number", [1, 2, 5])
def test_kill_at_a_message(number: int) -> None:
    """The message and later messages are not sent, and the task that awaits the send does not continue."""
    sent: list[int] = []

    async def main(world: ad.World) -> list[int]:
        found = []
        if world.rank == 1:
            for i in range(10):
                await world.services.engine.send(bytes([i]), 0, 5)
                sent.append(i)
        else:
            try:
                while True:
                    buffer = bytearray(1)
                    await world.services.engine.receive(buffer, 1, 5)
                    found += buffer
            except ad.RankLostError as error:
                assert error.rank == 1
        await asyncio.sleep(0)
        return found

    network = replace(STEADY, loss_detection_s=5.0)
    with quiet():
        report = simulate(main, ranks=2, faults=[Kill(1, at_message=number)], network=network)
    report.check_faults()
    assert sent == list(range(number - 1))
    arrived = [event for event in report.trace if event.kind == "receive" and event.tag == 5]
    assert len(arrived) == number - 1


def test_kill_at_a_turn_can_strike_at_any_await() -> None:
    reached: Counter[int] = Counter()

    async def main(world: ad.World) -> None:
        for i in range(10):
            if world.rank == 1:
                reached[i] += 1
            await yield_to_loop()

    for turn in range(1, 30):
        before = sum(reached.values())
        with quiet():
            report = simulate(main, ranks=2, seed=turn, faults=[Kill(1, at_turn=turn)], network=STEADY)
        assert report.faults_fired == (1,) or turn > 11
        assert sum(reached.values()) - before <= max(0, turn)
    assert len(set(reached.values())) >= 10, f"the ranks died at too few different awaits: {reached}"


@pytest.mark.parametrize("nbytes", [10, 100_000])
@pytest.mark.parametrize("dies_at_s", [0.5, 1.5, 4.5])
def test_no_send_to_a_dead_rank_hangs(nbytes: int, dies_at_s: float) -> None:
    """The message may be eager or rendezvous, and in transit, arrived or being transferred when its receiver dies."""

    async def main(world: ad.World) -> str:
        if world.rank == 1:
            await world.sleep(3.0)
            await world.services.engine.receive(bytearray(nbytes), 0, 5)
            await world.sleep(100.0)
        try:
            await world.services.engine.send(bytes(nbytes), 1, 5)
        except ad.RankLostError as error:
            assert error.rank == 1
            return f"lost at {world.time():.1f}"
        return f"sent at {world.time():.1f}"

    told: list[str] = []

    async def tell(world: ad.World) -> None:
        told.append(await main(world))

    run(tell, faults=[Kill(1, at_s=dies_at_s)])
    assert told[0] == ("sent at 0.0" if nbytes == 10 else f"lost at {dies_at_s + 0.5:.1f}")


def test_a_transfer_that_its_sender_does_not_live_to_finish() -> None:
    async def main(world: ad.World) -> None:
        if world.rank == 1:
            await world.services.engine.send(bytes(100_000), 0, 5)
        else:
            with pytest.raises(ad.RankLostError) as caught:
                await world.services.engine.receive(bytearray(100_000), 1, 5)
            assert caught.value.rank == 1
            told.append(world.time())

    told: list[float] = []
    run(main, faults=[Kill(1, at_s=2.0)])  # announced at 1 s, transferred at 3 s
    assert told == [pytest.approx(3.0, abs=CLOSE_S)]


def test_what_had_left_before_the_death_arrives() -> None:
    async def main(world: ad.World) -> None:
        channel = world.channel(Number, tag=5)
        if world.rank == 1:
            await channel.send(Number(7), 0)
            await world.sleep(100.0)
        else:
            told.append(((await channel.receive()).message.value, world.time()))

    told: list[tuple[int, float]] = []
    run(main, faults=[Kill(1, at_s=0.5)])
    assert told == [(7, pytest.approx(1.0, abs=CLOSE_S))]


def test_a_collective_names_the_rank_that_died() -> None:
    """Regression: the error named the living rank that ended the collective, and not the dead one."""
    named: Counter[int] = Counter()

    async def main(world: ad.World) -> None:
        try:
            while True:
                await ad.barrier()
        except ad.RankLostError as error:
            named[error.rank] += 1

    network = Network(loss_detection_s=Uniform(0.0, 1e-3))
    for seed in range(20):
        with quiet():
            simulate(main, ranks=4, seed=seed, faults=[Kill(3, at_s=2e-4)], network=network).check_faults()
    assert named == {3: 60}


def test_a_loss_during_a_reduction_is_raised_as_a_loss() -> None:
    """Regression: rank 0 raised CancelledError if another rank was lost while rank 0 reduced the values."""

    async def slow_sum(values: list[int]) -> int:
        await asyncio.sleep(1.0)
        return sum(values)

    async def main(world: ad.World) -> int:
        with pytest.raises(ad.RankLostError, match="rank 2"):
            await ad.reduce_and_broadcast(lambda: world.rank, slow_sum)
        return world.rank

    assert simulate(main, ranks=3, faults=[Kill(2, at_s=0.5)]).results == (0, 1, None)


@pytest.mark.slow
def test_every_send_receive_and_stream_of_the_survivors_ends() -> None:
    """Each ends with its result or with RankLostError: no operation waits for a dead rank forever."""
    outcomes: Counter[str] = Counter()

    async def main(world: ad.World, seed: int) -> None:
        draw = random.Random(f"{seed} {world.rank}")

        async def attempt(peer: int, function: Any, *args: Any) -> None:
            await world.sleep(draw.random() * 3e-3)
            try:
                await function(*args)
                outcomes["done"] += 1
            except ad.RankLostError as error:
                assert error.rank == 1 == peer, f"with rank {peer}: {error}"
                outcomes["lost"] += 1

        work = []
        for peer in range(world.size):
            for _ in range(4):
                nbytes = draw.choice((1, 300, 5000, 90_000))
                work.append(attempt(peer, world.services.engine.send, bytes(nbytes), peer, 1))
                work.append(attempt(peer, world.services.engine.receive, bytearray(90_000), peer, 1))
            if peer != world.rank:
                work.append(attempt(peer, world.send_stream, torch.zeros(100_000), peer))
                work.append(attempt(peer, world.receive_stream, torch.zeros(100_000), peer))
        await asyncio.gather(*work)

    network = Network(
        link=Link(latency_s=Exponential(3e-4), bandwidth_nbytes_per_s=1e9), loss_detection_s=Uniform(0.0, 2e-3)
    )
    for seed in range(40):
        draw = random.Random(seed)
        kill = draw.choice([Kill(1, at_s=draw.random() * 5e-3), Kill(1, at_message=draw.randrange(1, 25))])
        with quiet():
            report = simulate(main, seed, ranks=4, seed=seed, faults=[kill], network=network)
        report.value()
        report.check_faults()
    assert outcomes["done"] > 500 and outcomes["lost"] > 100, outcomes


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.long)], ids=["coordinator", "member"])
def test_nobody_hangs_when_a_rank_of_a_policy_dies_at_any_turn(victim: int) -> None:
    """The rank is coordinator or member, in a round, between rounds or at the start: the others continue."""
    outcomes: Counter[str] = Counter()

    async def main(world: ad.World, steps: Counter[int]) -> str:
        model = Mixed(float(world.rank))
        async with AsyncSelectiveAveragingPolicy(
            model, sgd(model), average_every=2, start_timeout_s=5.0, grace_s=0.01, round_timeout_s=0.05
        ) as policy:
            for _ in range(20):
                outcomes["replaced"] += bool(await policy.step(float(world.rank)))
                steps[world.rank] += 1
        return "ended"

    for turn in range(1, 90, 2):
        steps: Counter[int] = Counter()
        with quiet():
            report = simulate(main, steps, ranks=4, seed=turn, faults=[Kill(victim, at_turn=turn)])
        outcomes["killed" if report.faults_fired[0] else "too late"] += 1
        for rank, result in enumerate(report.results):
            if rank == victim and report.faults_fired[0]:
                assert result is None
                continue
            if steps:
                assert result == "ended" and steps[rank] == 20, f"turn {turn}, rank {rank}: {result!r} after {steps}"
                outcomes["trained on"] += steps[victim] < 20
            else:  # a rank that dies before the start prevents the start of the others
                assert isinstance(result, ad.ClosedError | ad.RankLostError), f"turn {turn}, rank {rank}: {result!r}"
                assert f"rank {victim}" in str(result), f"turn {turn}, rank {rank}: {result}"
                outcomes["never began"] += 1
        assert report.virtual_time_s < 20.0
    assert outcomes["killed"] > 30 and outcomes["trained on"] > 50 and outcomes["replaced"] >= 5, outcomes


def test_a_rank_dies_once() -> None:
    async def main(world: ad.World) -> None:
        await world.sleep(10.0)

    with quiet():
        report = simulate(main, ranks=2, faults=[Kill(1, at_s=1.0), Kill(1, at_s=2.0), Kill(0, at_s=50.0)])
    assert report.faults_fired == (1, 0, 0)
    with pytest.raises(AssertionError) as caught:
        report.check_faults()
    assert "Kill(rank=1, at_s=2.0" in str(caught.value) and "Kill(rank=0, at_s=50.0" in str(caught.value)
    assert "at_s=1.0" not in str(caught.value) and "seed 0" in str(caught.value)


# -- signals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "ends"), [("SIGTERM", SystemExit), ("SIGINT", KeyboardInterrupt)])
def test_a_signal_cancels_main_and_ends_the_job(name: Any, ends: type[BaseException]) -> None:
    """Main may clean up and send its last messages; its peers stop at their waits."""
    story: list[str] = []

    async def main(world: ad.World) -> None:
        channel = world.channel(Number, tag=5)
        try:
            await channel.receive()
        except asyncio.CancelledError:
            story.append(f"rank {world.rank} cancelled")
            await channel.send(Number(7), 0)
            raise

    with quiet():
        report = simulate(main, ranks=2, faults=[Interrupt(1, at_s=1.5, signal=name)])
    report.check_faults()
    assert story == ["rank 1 cancelled"]
    assert any(event.kind == "send" and event.tag == 5 for event in report.trace)
    assert isinstance(report.results[0], ad.RankLostError) and report.results[0].rank == 1
    assert type(report.results[1]) is ends
    assert name != "SIGTERM" or report.results[1].code == 143
    assert report.virtual_time_s < 2.0
    report.check_ranks()  # the plan explains it
    with pytest.raises(ends):
        report.value()


def test_a_signal_waits_until_what_blocks_the_rank_is_over() -> None:
    async def main(world: ad.World) -> None:
        try:
            time.sleep(5.0)  # noqa: ASYNC251
            await world.sleep(100.0)
        finally:
            cancelled_at.append(world.time())

    cancelled_at: list[float] = []
    with quiet():
        simulate(main, ranks=1, faults=[Interrupt(0, at_s=1.0)]).check_faults()
    assert cancelled_at == pytest.approx([5.0], abs=CLOSE_S)


def test_a_signal_ends_a_rank_that_closes_what_main_has_left() -> None:
    """Regression: the rank never ended, while the others had, and the simulation deadlocked without a waiting task."""

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            await asyncio.sleep(1.0)

    async def main(world: ad.World) -> int:
        left.append(numbers())
        return await anext(left[-1])

    left: list[AsyncIterator[int]] = []
    report = simulate(main, ranks=2, faults=[Interrupt(1, at_s=0.5)])
    report.check_faults()
    assert report.results[0] == 1
    assert isinstance(report.results[1], SystemExit) and report.results[1].code == 143


def test_a_second_signal_ends_the_process() -> None:
    story: list[str] = []

    async def main(world: ad.World) -> None:
        try:
            await world.sleep(100.0)
        except asyncio.CancelledError:
            story.append(f"rank {world.rank} cancelled")
            if world.rank == 1:
                await asyncio.sleep(50.0)
                story.append("never")
            raise

    faults = [Interrupt(1, at_s=1.0), Interrupt(1, at_s=2.0), Interrupt(1, at_s=3.0)]
    with quiet():
        report = simulate(main, ranks=2, faults=faults)
    assert report.faults_fired == (1, 1, 0)
    assert report.results[1] is None
    assert story[0] == "rank 1 cancelled" and "never" not in story
