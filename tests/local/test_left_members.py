"""Collectives that need a member which has returned: ClosedError that names it, on every transport, never a hang."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scripts import left_consumers, left_members
from support import mpi, torchrun

import asyncdist as ad

SCRIPT = "tests/scripts/left_members.py"
CONSUMERS_SCRIPT = "tests/scripts/left_consumers.py"
STARTS = pytest.mark.parametrize(
    "start",
    [pytest.param(mpi.run_ranks, marks=pytest.mark.mpi, id="mpi"), pytest.param(torchrun.run_ranks, id="torch")],
)
WAYS = pytest.mark.parametrize("way", ["left", "waiting"])


def check(results: Any, ranks: int = 3) -> None:
    for rank in range(1, ranks):
        assert results[rank] == dict.fromkeys(results[rank], "rank 0 has left"), rank
        assert len(results[rank]) == 13
    assert results[0] == {}


@WAYS
def test_local(way: str) -> None:
    check(ad.run_local(left_members.main, way, ranks=3, strict=True))


@WAYS
@pytest.mark.parametrize("seed", range(20))
def test_simulated(way: str, seed: int) -> None:
    check(ad.simulate(left_members.main, way, ranks=3, seed=seed, strict=True).results)


def test_collectives_that_were_cancelled_before_a_member_left_are_no_leftovers() -> None:
    assert ad.run_local(left_members.main, "cancelled", ranks=3, strict=True) == [{}] * 3
    for seed in range(10):
        ad.simulate(left_members.main, "cancelled", ranks=3, seed=seed, strict=True).value()


@STARTS
def test_collectives_that_were_cancelled_before_a_member_left_are_no_leftovers_launched(
    start: Callable[..., Any],
) -> None:
    """Each of the backend's own held the end for as long as it waits for requests, and failed a strict job."""
    if start is mpi.run_ranks:
        mpi.require_mpi()
    assert start(3, SCRIPT, "cancelled", timeout_s=120).check().stderr == ""


@WAYS
@STARTS
def test_launched(start: Callable[..., Any], way: str) -> None:
    """On MPI the last barrier of the rank that has left would else pair with the others' collectives."""
    if start is mpi.run_ranks:
        mpi.require_mpi()
    check(start(3, SCRIPT, way, timeout_s=120).check().reports)


@pytest.mark.parametrize("seed", range(20))
def test_what_a_member_has_begun_before_it_left_completes(seed: int) -> None:
    """Its part may arrive after it has gone; the others may enter long after."""

    async def main(world: ad.World) -> float:
        values = torch.full((100_000,), float(world.rank))
        if world.rank == 2:
            return float((await ad.broadcast(values, 2))[0])
        await world.sleep(0.5 * world.rank)
        return float((await ad.broadcast(values, 2))[-1])

    assert ad.simulate(main, ranks=4, seed=seed, strict=True).results == (2.0,) * 4
    assert ad.run_local(main, ranks=4, strict=True) == [2.0] * 4


@pytest.mark.parametrize("seed", range(20))
def test_who_stops_since_another_has_failed_has_not_left(seed: int) -> None:
    """What it says to the others may come before the failure itself."""

    async def main(world: ad.World) -> None:
        await ad.barrier()
        if world.rank == 1:
            raise ValueError("on purpose")
        try:
            while True:
                await ad.barrier()
        except ad.ClosedError:
            raise AssertionError("nobody has left") from None

    with pytest.raises(ValueError, match="on purpose"):
        ad.simulate(main, ranks=4, seed=seed).value()


TOLD = ["rank 0 has left and receives nothing more"] * 3


def check_consumers(results: Any, ends: str) -> None:
    """Producers are told, nothing of theirs is under way at the end, and the consumer says what it has not read."""
    assert list(results) == [[], TOLD, []]
    assert "request" not in ends
    unread = r"rank 0 ended with \d+ unread messages in Blob, tag 100; \d+ unread messages in Blob, tag 101"
    assert re.search(unread, ends), ends


def test_a_consumer_that_returns_leaves_no_producer_waiting(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "asyncdist"):
        check_consumers(ad.run_local(left_consumers.main, ranks=3), caplog.text)


@pytest.mark.parametrize("seed", range(10))
def test_a_consumer_that_returns_leaves_no_producer_waiting_simulated(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "asyncdist"):
        check_consumers(ad.simulate(left_consumers.main, ranks=3, seed=seed).results, caplog.text)


@STARTS
def test_a_consumer_that_returns_leaves_no_producer_waiting_launched(start: Callable[..., Any]) -> None:
    if start is mpi.run_ranks:
        mpi.require_mpi()
    result = start(3, CONSUMERS_SCRIPT, timeout_s=60).check()
    check_consumers([result.reports[rank] for rank in range(3)], result.stderr)
