"""Tests ranks whose places are empty when the world begins, and that join later."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from support.seeds import seeds

import asyncdist as ad
from asyncdist.simulation import Fault, Join, Kill, Network, Restart, SimReport, Stall, Uniform, simulate
from protocols import AsyncSelectiveAveragingPolicy


async def _train(world: ad.World, steps: int, known: dict[int, list[int]]) -> tuple[int, int]:
    """Return this rank's incarnation, and the iteration with which it has begun to train."""
    known.setdefault(world.rank, sorted(rank for rank in range(world.size) if rank in world.services.gone))
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = AsyncSelectiveAveragingPolicy(model, optimizer, average_every=3, grace_s=0.001, start_timeout_s=5.0)
    async with policy:
        first = policy.iteration
        while policy.iteration < steps:
            await policy.step(float(world.rank))
    return world.incarnation, first


def _population(ranks: int, faults: list[Fault], seed: int = 0, steps: int = 150) -> tuple[SimReport, Any]:
    known: dict[int, list[int]] = {}
    network = Network(loss_detection_s=1e-4)
    report = simulate(
        _train, steps, known, ranks=ranks, seed=seed, faults=faults, network=network, until_s=1e4, strict=True
    )
    report.check_faults()
    for result in report.results:
        if isinstance(result, BaseException):
            raise result
    return report, known


@pytest.mark.parametrize("rank", range(3))
def test_a_rank_joins_those_that_run_and_takes_part(rank: int, caplog: pytest.LogCaptureFixture) -> None:
    """Even the lowest rank, which would coordinate, may join late.

    No rank reports a loss, because it was never there.
    """
    caplog.set_level(logging.WARNING)
    report, known = _population(3, [Join(rank, at_s=0.02)], seed=rank)
    others = [other for other in range(3) if other != rank]
    assert all(known[other] == [rank] for other in others), (
        "the other ranks must know from main's first line on that the rank is absent"
    )
    assert known[rank] == others, "the newcomer is connected to no rank yet, so all others must be absent"
    assert [report.results[other] for other in others] == [(0, 0)] * 2
    incarnation, first = report.results[rank]
    assert incarnation == 1 and first > 0, "the newcomer must continue with a member's iteration"
    kinds = [event.kind for event in report.trace]
    assert kinds.count("join") == 1 and "lost" not in kinds and "restart" not in kinds
    assert not caplog.records


def test_a_rank_is_alone_until_the_others_have_come() -> None:
    report, known = _population(4, [Join(rank, at_s=0.01 * rank) for rank in (1, 2, 3)])
    assert known[0] == [1, 2, 3]
    assert report.results[0] == (0, 0)
    firsts = [first for _, first in report.results[1:]]
    assert all(firsts) and firsts == sorted(firsts)


@pytest.mark.parametrize("seed", seeds(10))
def test_ranks_that_find_each_other_late_lose_nobody(seed: int) -> None:
    """If one of two newcomers finds the other first, the other is notified once, and not a second time."""

    async def stays(world: ad.World) -> None:
        await world.sleep(5.0)

    network = Network(loss_detection_s=Uniform(0.0, 1.0))
    faults = [Join(1, at_s=0.1), Join(2, at_s=0.1), Kill(0, at_s=0.15), Restart(0, at_s=0.2)]
    report = simulate(stays, ranks=3, seed=seed, network=network, faults=faults)
    met: set[tuple[int, int]] = set()
    for event in report.trace:
        pair = event.a, event.b  # the events name the affected ranks
        if event.kind == "met" and event.tag == 1:
            met.add(pair)
        assert event.kind != "lost" or pair not in met, event
    assert len(met) == 6


def test_what_waits_for_a_connection_arrives_in_order() -> None:
    count, tag = 20, 150

    async def talks(world: ad.World) -> list[int]:
        engine, other = world.services.engine, 3 - world.rank
        if not world.rank:
            await world.sleep(2.0)
            return []
        await engine.until(lambda: other not in engine.transport.lost_ranks())
        if world.rank == 1:
            for number in range(count):
                await engine.send(bytes([number]), other, tag)
            return []
        received = [bytearray(1) for _ in range(count)]
        for buffer in received:
            await engine.receive(buffer, other, tag)
        return [buffer[0] for buffer in received]

    # Rank 1 has met rank 2, and sends, before rank 2 has met it.
    faults = [Join(1, at_s=0.1), Join(2, at_s=0.2), Stall(2, at_s=0.2005, duration_s=1.0)]
    report = simulate(talks, ranks=3, network=Network(loss_detection_s=1e-3), faults=faults)
    assert report.results[2] == list(range(count))


def test_a_rank_that_has_joined_may_be_killed_and_come_again() -> None:
    report, _ = _population(3, [Join(2, at_s=0.02), Kill(2, at_s=0.05), Restart(2, at_s=0.06)])
    assert report.results[2][0] == 2
    assert [event.kind for event in report.trace if event.kind in ("join", "kill", "restart")] == [
        "join",
        "kill",
        "restart",
    ]


@pytest.mark.parametrize("fault", [Restart(1, at_s=0.01), Kill(1, at_s=0.01), Stall(1, at_s=0.0, duration_s=1.0)])
def test_nothing_happens_to_a_rank_before_it_has_come(fault: Fault) -> None:
    with pytest.raises(AssertionError, match=type(fault).__name__):
        _population(3, [Join(1, at_s=0.02), fault])


def test_a_rank_that_would_come_when_all_have_ended_does_not() -> None:
    with pytest.raises(AssertionError, match="Join"):
        _population(2, [Join(1, at_s=1000.0)])


@pytest.mark.parametrize(
    "faults, says",
    [
        ([Join(2, at_s=0.1)], "rank 2"),
        (
            [Join(1, at_s=0.1), Join(1, at_s=0.2)],
            r"at most one Join for each rank, got another Join: Join\(rank=1, at_s=0.1\)",
        ),
        ([Join(0, at_s=0.1), Join(1, at_s=0.2)], "must leave at least one of the 2 ranks without a Join"),
    ],
)
def test_plans_that_cannot_be_carried_out_are_refused(faults: list[Fault], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        simulate(_train, 1, {}, ranks=2, faults=faults)


def test_a_negative_time_is_refused() -> None:
    with pytest.raises(ValueError, match="at_s"):
        Join(0, at_s=-1.0)
