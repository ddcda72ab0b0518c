"""Tests hosts whose network interface limits the bytes per second of all their ranks together, in each direction."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.steady_network import Number

import asyncdist as ad
from asyncdist.simulation import Link, Network, simulate

#: Bytes per second, chosen so that the data of a test takes one second.
BANDWIDTH = 4e6
NUMEL = 1_000_000


def network(**options: Any) -> Network:
    link = Link(latency_s=1e-6, bandwidth_nbytes_per_s=1e12)
    return Network(**{"link": link, "cross_link": link, "host_bandwidth_nbytes_per_s": BANDWIDTH, **options})


async def fan_in(world: ad.World) -> None:
    """Send a tensor from each other rank to the first rank."""
    if world.rank:
        await world.send_stream(torch.ones(NUMEL), 0)
        return
    received = [torch.zeros(NUMEL) for _ in range(world.size - 1)]
    await asyncio.gather(*(world.receive_stream(each, source) for source, each in enumerate(received, 1)))
    assert all(bool((each == 1).all()) for each in received)


async def fan_out(world: ad.World) -> None:
    if world.rank:
        await world.receive_stream(torch.zeros(NUMEL), 0)
    else:
        await asyncio.gather(*(world.send_stream(torch.ones(NUMEL), dest) for dest in range(1, world.size)))


async def exchange(world: ad.World) -> None:
    """Send from each rank to the next one at the same time."""
    sent = world.send_stream(torch.ones(NUMEL), (world.rank + 1) % world.size)
    await asyncio.gather(sent, world.receive_stream(torch.zeros(NUMEL), (world.rank - 1) % world.size))


@pytest.mark.parametrize(
    ("main", "ranks", "ranks_per_host", "seconds"),
    [
        (fan_in, 2, 1, 1.0),
        (fan_in, 6, 1, 5.0),
        (fan_out, 6, 1, 5.0),
        (fan_in, 6, 3, 3.0),  # two of the five are on the host of the first rank
        (fan_in, 6, 6, 0.0),
        (exchange, 6, 1, 1.0),  # sent and received at the same time
        (exchange, 6, 2, 1.0),  # each host sends one tensor, and receives one
    ],
)
def test_what_goes_through_an_interface_takes_its_time(
    main: Any, ranks: int, ranks_per_host: int, seconds: float
) -> None:
    for seed in range(3):
        report = simulate(main, ranks=ranks, seed=seed, network=network(ranks_per_host=ranks_per_host), strict=True)
        assert report.value() is None
        assert seconds <= report.virtual_time_s < seconds * 1.02 + 0.02


def test_without_an_interface_each_link_has_its_own_bandwidth() -> None:
    link = Link(latency_s=1e-6, bandwidth_nbytes_per_s=BANDWIDTH)
    plain = Network(link=link, cross_link=link, ranks_per_host=1)
    assert simulate(fan_in, ranks=6, network=plain, strict=True).virtual_time_s < 1.1
    wide = network(ranks_per_host=1, cross_link=link, host_bandwidth_nbytes_per_s=100 * BANDWIDTH)
    assert simulate(fan_in, ranks=6, network=wide, strict=True).virtual_time_s < 1.1, (
        "a fast interface must not slow down the links"
    )


@dataclass(frozen=True, slots=True)
class Blob:
    """A message of some size."""

    data: bytes


@pytest.mark.parametrize("seed", range(5))
def test_small_messages_overtake_bytes_of_other_pairs_only(seed: int) -> None:
    """A rank's own messages stay in order, but another rank's short message does not wait for long ones."""

    async def main(world: ad.World) -> list[tuple[int, int, float]]:
        channel = world.channel(Blob, tag=5)
        if world.rank == 1:
            for size in (40_000, 10, 40_000, 10):
                channel.send_nowait(Blob(bytes(size)), 0)
        elif world.rank == 2:
            await asyncio.sleep(0.01)
            channel.send_nowait(Blob(bytes(20)), 0)
        if world.rank:
            return []
        found = [(await channel.receive(), world.time()) for _ in range(5)]
        return [(each.source, len(each.message.data), at) for each, at in found]

    eager = network(ranks_per_host=1, cross_link=Link(), eager_nbytes=1 << 20, host_bandwidth_nbytes_per_s=1e6)
    found = simulate(main, ranks=3, seed=seed, network=eager, strict=True).results[0]
    assert [size for source, size, _ in found if source == 1] == [40_000, 10, 40_000, 10]
    assert next(at for source, _, at in found if source == 2) < 0.02, (
        "the message must not wait until the other rank's 80 KB are sent"
    )


@pytest.mark.parametrize("seed", range(5))
def test_messages_of_a_rank_stay_in_order(seed: int) -> None:
    async def main(world: ad.World) -> list[int]:
        channel = world.channel(Number, tag=5)
        if world.rank:
            for value in range(50):
                channel.send_nowait(Number(value), 0)
            return []
        received = [await channel.receive() for _ in range(50 * (world.size - 1))]
        return [each.message.value for source in range(1, world.size) for each in received if each.source == source]

    slow = network(ranks_per_host=1, host_bandwidth_nbytes_per_s=1e5, cross_link=Link())
    assert simulate(main, ranks=4, seed=seed, network=slow, strict=True).results[0] == [*range(50)] * 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"host_bandwidth_nbytes_per_s": 0.0, "ranks_per_host": 1}, r"host_bandwidth_nbytes_per_s .*0\.0"),
        ({"host_bandwidth_nbytes_per_s": "1e9", "ranks_per_host": 1}, r"host_bandwidth_nbytes_per_s .*'1e9'"),
        (
            {"host_bandwidth_nbytes_per_s": 1e9},
            "ranks_per_host must be set with host_bandwidth_nbytes_per_s=1000000000.0",
        ),
    ],
)
def test_an_interface_that_cannot_be_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        Network(**options)


def test_messages_in_flight_at_a_restart_are_lost() -> None:
    """Regression: KeyError, which ``explore`` took for a failure of the scenario."""

    async def main(world: ad.World) -> int:
        notes = world.channel(Number, tag=40)
        if world.rank == 0:
            await world.sleep(0.001)
            for number in range(50):
                with contextlib.suppress(ad.RankLostError):
                    notes.send_nowait(Number(number), 1)
                await world.sleep(0.0005)
        await world.sleep(0.5)
        return world.incarnation

    link = Link(latency_s=0.005, bandwidth_nbytes_per_s=1e9)
    network = Network(ranks_per_host=1, cross_link=link, host_bandwidth_nbytes_per_s=1e9)
    faults = [ad.Kill(1, at_s=0.008), ad.Restart(1, at_s=0.010)]
    assert ad.simulate(main, ranks=3, network=network, faults=faults).results == (0, 1, 0)
