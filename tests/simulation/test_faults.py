"""Tests that every kind of fault happens as planned, has its effect, and is counted; and that nothing else happens."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import pytest
import torch
from scripts.population import Mixed, sgd
from support.steady_network import CLOSE_S, STEADY, Number, quiet, run

import asyncdist as ad
from asyncdist.messaging.wire import HEADER_NBYTES
from asyncdist.simulation import (
    Compute,
    Corrupt,
    Delay,
    Fault,
    Join,
    Kill,
    Link,
    Network,
    Partition,
    Restart,
    SlowLink,
    SlowRank,
    Stall,
    simulate,
)
from asyncdist.simulation.rank_turns import TURN_S
from protocols import AsyncSelectiveAveragingPolicy

# -- time -----------------------------------------------------------------------------------------------------------


async def ten_steps(world: ad.World) -> list[float]:
    """Return the time at which each of ten steps ended."""
    ends = []
    for _ in range(10):
        await world.safe_point()
        ends.append(world.time())
    return ends


def test_stall_and_slow_rank() -> None:
    steady = Compute(step_s=1.0)
    faults: list[Fault] = [Stall(1, at_s=2.5, duration_s=7.0), SlowRank(2, at_s=4.5, factor=3.0)]
    report = run(ten_steps, ranks=3, faults=faults, compute=steady)
    report.value()
    assert report.faults_fired == (1, 1)
    expected = [
        list(range(1, 11)),
        [1, 2, 10, 11, 12, 13, 14, 15, 16, 17],  # the step in progress at 2.5
        [1, 2, 3, 4, 5, 8, 11, 14, 17, 20],  # from the first step that begins after 4.5
    ]
    for result, times in zip(report.results, expected, strict=True):
        assert result == pytest.approx(times, abs=CLOSE_S)


@pytest.mark.parametrize("at_s", [0.0, 2.25])
def test_a_rank_that_only_waits_stalls_too(at_s: float) -> None:
    """Such a rank is a coordinator, or serves a replay buffer: it has no safe points."""
    report = run(arrivals, faults=[Stall(1, at_s=at_s, duration_s=2.5)])
    expected = {0.0: [2.5, 2.5, 3, 4, 5, 6], 2.25: [1, 2, 4.75, 4.75, 5, 6]}
    assert report.results[1] == pytest.approx(expected[at_s], abs=CLOSE_S)


@pytest.mark.parametrize("at_s", [0.0, 3.5])
def test_a_rank_that_only_waits_is_slow_to_take_in_what_comes(at_s: float) -> None:
    report = run(arrivals, faults=[SlowRank(1, at_s=at_s, factor=0.1 / TURN_S)])
    late_s = [at - 1 - i for i, at in enumerate(report.results[1])]
    for at, seconds in enumerate(late_s, 1):
        assert (0.002 < seconds < 0.9) if at > at_s else seconds < CLOSE_S, late_s
    assert report.faults_fired == (1,)
    slow = simulate(arrivals, ranks=2, network=STEADY, compute=Compute(factors={1: 0.1 / TURN_S}))
    assert all(0.002 < at - 1 - i < 0.9 for i, at in enumerate(slow.results[1])), slow.results


async def arrivals(world: ad.World) -> list[float]:
    """Send a message each second from rank 0 to every other rank; return the times of arrival on each rank."""
    channel = world.channel(Number, tag=5)
    if world.rank == 0:
        for i in range(6):
            for dest in range(1, world.size):
                channel.send_nowait(Number(i), dest)
            await world.sleep(1.0)
        return []
    times = []
    for i in range(6):
        assert (await channel.receive()).message.value == i
        times.append(world.time())
    return times


def test_without_faults_messages_take_their_time() -> None:
    assert run(arrivals, faults=[]).results[1] == pytest.approx([1, 2, 3, 4, 5, 6], abs=CLOSE_S)


def test_slow_link() -> None:
    report = run(arrivals, ranks=3, faults=[SlowLink(0, 2, at_s=2.5, factor=3.0)])
    report.value()
    assert report.results[1] == pytest.approx([1, 2, 3, 4, 5, 6], abs=CLOSE_S)
    assert report.results[2] == pytest.approx([1, 2, 3, 6, 7, 8], abs=CLOSE_S)
    assert report.faults_fired[0] >= 3


def test_delay_holds_back_one_message_and_those_behind_it() -> None:
    report = run(arrivals, ranks=3, faults=[Delay(0, 2, number=2, duration_s=2.5)])
    report.value()
    assert report.results[1] == pytest.approx([1, 2, 3, 4, 5, 6], abs=CLOSE_S)
    assert report.results[2] == pytest.approx([1, 4.5, 4.5, 4.5, 5, 6], abs=CLOSE_S)
    assert report.faults_fired == (1,)


@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 2)])
def test_a_partition_lets_nothing_through_and_heals(ranks: tuple[int, ...]) -> None:
    report = run(arrivals, ranks=3, faults=[Partition(ranks, at_s=1.5, until_s=5.25)])
    report.value()
    whole, cut = [1, 2, 3, 4, 5, 6], [1, 5.25, 5.25, 5.25, 5.25, 6]
    for rank in (1, 2):
        expected = cut if (rank in ranks) != (0 in ranks) else whole
        assert report.results[rank] == pytest.approx(expected, abs=CLOSE_S), f"rank {rank}"


def test_a_partition_that_delays_no_message_is_not_counted() -> None:
    """Regression: messages sent during a partition counted even if they would arrive after its end."""
    report = simulate(arrivals, ranks=2, network=STEADY, faults=[Partition((0,), at_s=0.2, until_s=0.5)])
    assert report.results[1] == pytest.approx([1, 2, 3, 4, 5, 6], abs=CLOSE_S)
    assert report.faults_fired == (0,)


def test_a_partition_stops_a_transfer_announced_before_it() -> None:
    async def main(world: ad.World) -> float:
        if world.rank == 0:
            await world.services.engine.send(bytes(100_000), 1, 5)
        else:
            await world.sleep(3.0)  # the announcement has arrived, and waits
            await world.services.engine.receive(bytearray(100_000), 0, 5)
        return world.time()

    report = run(main, faults=[Partition((0,), at_s=2.0, until_s=50.0)])
    report.value()
    assert report.results == (pytest.approx(50.0, abs=CLOSE_S), pytest.approx(50.0, abs=CLOSE_S))


# -- corruption -----------------------------------------------------------------------------------------------------


def test_a_flipped_byte_in_a_frame_is_caught_and_counted() -> None:
    async def main(world: ad.World) -> list[int]:
        channel = world.channel(Number, tag=5)
        if world.rank == 0:
            for i in range(4):
                await channel.send(Number(i), 1)
            return []
        await world.sleep(10.0)
        return [envelope.message.value for _ in range(4) if (envelope := channel.receive_nowait()) is not None]

    for byte in range(HEADER_NBYTES + 5):
        report = run(main, faults=[Corrupt(0, 1, number=2, byte=byte)])
        report.value()
        assert report.results[1] == [0, 2, 3], f"byte {byte}: only the damaged message may be lost"
        assert report.faults_fired == (1,)
        statistics = report.statistics
        assert statistics[0] is not None and statistics[1] is not None
        assert sum(statistics[1].dropped.values()) == 1, (
            f"byte {byte}: one frame must be dropped, got {statistics[1].dropped}"
        )
        assert not statistics[0].dropped


def test_only_frames_are_counted_for_corruption() -> None:
    """Bulk data and collectives have no CRC, so a flipped byte in them could not be noticed."""

    async def main(world: ad.World) -> list[int]:
        for _ in range(5):
            tensor = await ad.broadcast(torch.tensor([world.rank]), 0)
            assert tensor.item() == 0
        return await numbers(world)

    async def numbers(world: ad.World) -> list[int]:
        channel = world.channel(Number, tag=5)
        if world.rank == 0:
            await channel.send(Number(1), 1)
            await channel.send(Number(2), 1)
            return []
        return [(await channel.receive()).message.value]

    report = run(main, faults=[Corrupt(0, 1, number=1)])
    report.value()
    assert report.results[1] == [2]


@pytest.mark.slow
def test_corrupt_control_frames_of_a_policy_crash_no_rank() -> None:
    """Any frame after the start may be damaged: this may cost a round, but not a rank."""
    caught = 0

    async def main(world: ad.World) -> int:
        model = Mixed(float(world.rank))
        replaced = 0
        async with AsyncSelectiveAveragingPolicy(
            model, sgd(model), average_every=2, grace_s=0.01, round_timeout_s=0.05, drain_timeout_s=0.1
        ) as policy:
            for _ in range(100):
                replaced += bool(await policy.step(float(world.rank)))
        return replaced

    for number in range(3, 12):
        for source, dest in ((0, 1), (1, 0)):
            with quiet():
                report = simulate(main, ranks=3, seed=number, faults=[Corrupt(source, dest, number, byte=number)])
            report.value()
            report.check_faults()
            statistics = report.statistics[dest]
            assert statistics is not None
            caught += statistics.dropped.get("CRC mismatch", 0)
            assert report.results[0] > 0, "rank 0 is the worst, but was never replaced"
    assert caught == 18


def test_turns_take_less_than_what_the_clocks_here_are_read_to() -> None:
    assert TURN_S < CLOSE_S / 100


# -- what a plan adds up to -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("turned", [False, True])
def test_overlapping_partitions_hold_a_message_until_the_last(turned: bool) -> None:
    """The order in which the partitions end does not matter."""
    partitions: list[Fault] = [Partition((0,), at_s=0.5, until_s=5.25), Partition((1,), at_s=4.0, until_s=9.25)]
    report = run(arrivals, faults=partitions[::-1] if turned else partitions)
    assert report.results[1] == pytest.approx([9.25] * 6, abs=CLOSE_S)


def test_equal_faults_happen_both() -> None:
    report = run(arrivals, faults=[Delay(0, 1, number=2, duration_s=0.75)] * 2)
    assert report.results[1] == pytest.approx([1, 3.5, 3.5, 4, 5, 6], abs=CLOSE_S)
    assert report.faults_fired == (1, 1)
    corrupted = run(arrivals_but_one, faults=[Corrupt(0, 1, number=1, byte=30)] * 2)
    assert corrupted.results[1] == 1, "two equal Corrupt faults must restore the byte, so the message arrives"
    assert corrupted.faults_fired == (1, 1)
    with quiet():
        killed = simulate(sends_two, ranks=2, faults=[Kill(0, at_message=2)] * 2, network=STEADY, until_s=9.0)
    assert killed.faults_fired == (1, 0), "a rank may die only once"


async def arrivals_but_one(world: ad.World) -> int:
    """Send two frames from rank 0 to rank 1, and return how many rank 1 has dropped."""
    channel = world.channel(Number, tag=5)
    if world.rank == 0:
        channel.send_nowait(Number(1), 1)
        channel.send_nowait(Number(2), 1)
    else:
        assert (await channel.receive()).message.value == 2
    return sum(world.statistics().dropped.values())


async def sends_two(world: ad.World) -> None:
    channel = world.channel(Number, tag=5)
    if world.rank == 0:
        channel.send_nowait(Number(1), 1)
        channel.send_nowait(Number(2), 1)
    await world.sleep(1.0)


def test_a_fault_does_not_happen_to_a_message_that_never_leaves() -> None:
    """A rank that dies with a message sends no further message in the same callback."""

    async def main(world: ad.World) -> None:
        channel = world.channel(Number, tag=5)
        if world.rank == 1:
            for value in range(5):
                channel.send_nowait(Number(value), 0)
            await world.sleep(100.0)
        else:
            await world.sleep(10.0)

    faults = [Kill(1, at_message=2), Delay(1, 0, number=3, duration_s=1.0), Corrupt(1, 0, number=4)]
    with quiet():
        report = simulate(main, ranks=2, faults=faults, network=STEADY)
    assert report.faults_fired == (1, 0, 0)


# -- large messages -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_large_messages_of_one_link_share_its_bandwidth() -> None:
    nbytes = 10_000_000

    async def main(world: ad.World) -> float:
        if world.rank == 0:
            await asyncio.gather(*[world.services.engine.send(bytes(nbytes), 1, 5) for _ in range(10)])
        else:
            await asyncio.gather(*[world.services.engine.receive(bytearray(nbytes), 0, 5) for _ in range(10)])
        return world.time()

    network = Network(link=Link(latency_s=1e-6, bandwidth_nbytes_per_s=1e9))
    for end in simulate(main, ranks=2, network=network).results:
        assert end == pytest.approx(0.1, rel=0.01)


@pytest.mark.parametrize("is_posted", [True, False])
def test_a_large_message_waits_for_a_computing_receiver(is_posted: bool) -> None:
    """Its bytes are transferred only inside the receiver's calls. A small message leaves at once."""

    async def main(world: ad.World, nbytes: int) -> float:
        if world.rank == 0:
            await world.services.engine.send(bytes(nbytes), 1, 5)
        elif is_posted:
            receiving = asyncio.ensure_future(world.services.engine.receive(bytearray(nbytes), 0, 5))
            await asyncio.sleep(0)
            time.sleep(8.0)  # noqa: ASYNC251 that is the point
            await receiving
        else:
            time.sleep(8.0)  # noqa: ASYNC251
            await world.services.engine.receive(bytearray(nbytes), 0, 5)
        return world.time()

    small, large = (simulate(main, nbytes, ranks=2, network=STEADY).results for nbytes in (1000, 2000))
    assert small == pytest.approx((0.0, 8.0), abs=CLOSE_S)
    assert large == pytest.approx((10.0, 10.0), abs=CLOSE_S)


def test_a_large_message_completes_after_the_receivers_compute() -> None:
    """The receiver computes at the moment when the message arrives."""

    async def main(world: ad.World) -> float:
        if world.rank == 0:
            await world.services.engine.send(bytes(2000), 1, 5)
        else:
            receiving = asyncio.ensure_future(world.services.engine.receive(bytearray(2000), 0, 5))
            await world.sleep(2.0)  # the message is in transit since 1 s
            time.sleep(6.0)  # noqa: ASYNC251
            await receiving
        return world.time()

    assert simulate(main, ranks=2, network=STEADY).results == pytest.approx((8.0, 8.0), abs=CLOSE_S)


def test_a_computing_sender_stops_large_messages_if_so_set() -> None:
    async def main(world: ad.World) -> float:
        if world.rank == 0:
            sending = asyncio.ensure_future(world.services.engine.send(bytes(2000), 1, 5))
            await asyncio.sleep(0)
            time.sleep(8.0)  # noqa: ASYNC251
            await sending
        else:
            await world.services.engine.receive(bytearray(2000), 0, 5)
        return world.time()

    ends = Counter(round(simulate(main, ranks=2, seed=seed, network=STEADY).results[1]) for seed in range(20))
    assert ends.keys() == {3, 10}


async def durations(world: ad.World) -> tuple[float, float]:
    """Return the mean virtual seconds of a turn, and of a step."""
    loop = asyncio.get_running_loop()
    began_at_s = loop.time()
    for _ in range(50):
        await asyncio.sleep(0)
    turned_at_s = loop.time()
    for _ in range(5):
        await world.safe_point()
    stepped_at_s = loop.time()
    await world.sleep(1.0)
    return (turned_at_s - began_at_s) / 50, (stepped_at_s - turned_at_s) / 5


@pytest.mark.parametrize("at_s", [0.0, 0.055])
@pytest.mark.parametrize("others", [(Kill(1, at_s=0.05), Restart(1, at_s=0.06)), (Join(1, at_s=0.06),)])
def test_a_slow_rank_is_slow_in_its_later_process(at_s: float, others: tuple[Fault, ...]) -> None:
    """Regression: a restarted rank had fast turns, and a rank that joined was not slow."""
    faults = [SlowRank(1, at_s=at_s, factor=100.0), *others]
    report = simulate(durations, ranks=2, faults=faults, compute=Compute(step_s=1e-3), return_exceptions=True)
    turn_s, step_s = report.results[1]
    assert 30 * TURN_S < turn_s < 100 * TURN_S and step_s == pytest.approx(0.1)
    assert report.faults_fired == (1,) * len(faults)
