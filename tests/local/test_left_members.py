"""Tests collectives that need a member which has returned: ClosedError names it, on every transport."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

import pytest
import torch
from scripts import left_consumers, left_members
from support.seeds import seeds

import asyncdist as ad

WAYS = pytest.mark.parametrize("way", ["left", "waiting"])


@WAYS
def test_local(way: str) -> None:
    left_members.check(ad.run_local(left_members.main, way, ranks=3, strict=True))


@WAYS
@pytest.mark.parametrize("seed", seeds(20))
def test_simulated(way: str, seed: int) -> None:
    left_members.check(ad.simulate(left_members.main, way, ranks=3, seed=seed, strict=True).results)


@pytest.mark.slow
def test_collectives_cancelled_before_a_member_left_are_complete() -> None:
    assert ad.run_local(left_members.main, "cancelled", ranks=3, strict=True) == [{}] * 3
    for seed in range(10):
        ad.simulate(left_members.main, "cancelled", ranks=3, seed=seed, strict=True).value()


def test_what_a_member_has_begun_before_it_left_completes() -> None:
    """Its part may arrive after it has gone; the others may enter long after."""

    async def main(world: ad.World, delay_s: float) -> float:
        values = torch.full((100_000,), float(world.rank))
        if world.rank == 2:
            return float((await ad.broadcast(values, 2))[0])
        await world.sleep(delay_s * world.rank)
        return float((await ad.broadcast(values, 2))[-1])

    for seed in range(20):
        assert ad.simulate(main, 0.5, ranks=4, seed=seed, strict=True).results == (2.0,) * 4
    assert ad.run_local(main, 0.05, ranks=4, strict=True) == [2.0] * 4


@pytest.mark.parametrize("seed", seeds(20))
def test_who_stops_since_another_has_failed_has_not_left(seed: int) -> None:
    """A rank's end notice may arrive before the failure that caused its end."""

    async def main(world: ad.World) -> None:
        await ad.barrier()
        if world.rank == 1:
            raise ValueError("on purpose")
        try:
            while True:
                await ad.barrier()
        except ad.ClosedError:
            raise AssertionError("no rank has left") from None

    with pytest.raises(ValueError, match="on purpose"):
        ad.simulate(main, ranks=4, seed=seed).value()


def test_a_consumer_that_returns_leaves_no_producer_waiting(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "asyncdist"):
        left_consumers.check(ad.run_local(left_consumers.main, ranks=3), caplog.text)


@pytest.mark.parametrize("seed", seeds(10))
def test_consumer_that_returns_blocks_no_producer_simulated(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "asyncdist"):
        left_consumers.check(ad.simulate(left_consumers.main, ranks=3, seed=seed).results, caplog.text)


def test_data_of_a_collective_that_a_leaver_ends_is_not_leftover() -> None:
    """The root computes while the others send their parts and one of them leaves; it receives all of that at once."""

    async def main(world: ad.World) -> None:
        if world.rank == 0:
            asyncio.get_running_loop().call_later(1e-6, time.sleep, 0.1)
            with pytest.raises(ad.ClosedError, match="has left"):
                await ad.gather(torch.ones(1), 0)
        elif world.rank < 3:
            with contextlib.suppress(ad.ClosedError):
                await ad.gather(torch.ones(1), 0)

    for seed in range(20):
        assert ad.simulate(main, ranks=4, seed=seed, strict=True).results == (None,) * 4
