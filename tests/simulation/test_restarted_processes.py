"""Tests what a killed and restarted rank shares with its former process: random states, groups, channels, servers."""

from __future__ import annotations

import gc
import os
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from support.simulated import check

import asyncdist as ad
from asyncdist.simulation import Kill, Network, Restart, simulate
from protocols import ReplayBuffer, serve_replay_buffer


def test_no_process_is_started_again_when_the_simulation_is_over() -> None:
    begun: list[tuple[int, int]] = []

    async def main(world: ad.World) -> None:
        begun.append((world.rank, world.incarnation))
        try:
            await world.sleep(0.1)
        finally:
            await world.sleep(0.0 if world.rank == 0 else 10.0)

    simulate(main, ranks=2, faults=[Kill(1, at_s=0.02), Restart(1, at_s=5.0)])
    gc.collect()
    assert sorted(begun) == [(0, 0), (1, 0)]


@pytest.mark.parametrize("inherited", [(), ("random", "numpy", "torch")])
def test_a_new_process_has_random_states_of_its_own(inherited: tuple[str, ...]) -> None:
    drawn: dict[tuple[int, int], tuple[float, ...]] = {}

    async def main(world: ad.World) -> None:
        key = world.rank, world.incarnation
        drawn[key] = random.random(), np.random.rand(), float(torch.rand(())), float(os.urandom(3)[0])
        assert torch.is_grad_enabled()
        if key == (1, 0):
            with torch.no_grad():
                await world.sleep(1.0)
        await world.sleep(0.1)

    faults = [Kill(1, at_s=0.02), Restart(1, at_s=0.03), Kill(1, at_s=0.05), Restart(1, at_s=0.06)]
    outside = (
        random.getstate()[1][:9],
        torch.get_rng_state()[:99].tolist(),
        np.random.get_state(legacy=False)["state"]["pos"],
    )
    for _ in range(2):
        once = dict(drawn)
        drawn.clear()
        check(simulate(main, ranks=2, seed=3, faults=faults, inherited_random=inherited))
    assert drawn == once, "the numbers must follow from the seed"
    assert drawn.keys() == {(0, 0), (1, 0), (1, 1), (1, 2)}
    assert len(set(drawn.values())) == 4
    assert (len({values[:3] for values in drawn.values()}) == 1) == bool(inherited)
    now = (
        random.getstate()[1][:9],
        torch.get_rng_state()[:99].tolist(),
        np.random.get_state(legacy=False)["state"]["pos"],
    )
    assert now == outside


def test_a_group_ends_with_a_member_and_a_new_one_has_its_heir() -> None:
    """The heir is the process that takes the lost member's rank."""

    async def main(world: ad.World) -> str:
        await world.sleep(0.1)
        try:
            await ad.barrier()
        except ad.RankLostError as error:
            ended = str(error)
        async with await world.new_group([0, 1, 2]) as group:
            await ad.barrier(group=group)
        return ended

    report = simulate(main, ranks=3, faults=[Kill(2, at_s=0.02), Restart(2, at_s=0.03)], network=Network())
    check(report)
    assert all(
        "is lost, has left or has never joined, which ends the group [0, 1, 2]" in text for text in report.results
    )


@dataclass(frozen=True)
class Word:
    number: int


def test_a_users_channel_and_stream_go_on_with_the_new_process() -> None:
    async def main(world: ad.World) -> Any:
        channel = world.channel(Word, tag=40)
        tensor = torch.empty(5000)
        if world.rank == 1:
            if not world.incarnation:
                await world.sleep(1.0)
            envelope = await channel.receive()
            await world.receive_stream(tensor, 0)
            return envelope.message.number, float(tensor.sum())
        for number in range(5):
            channel.send_nowait(Word(number), 1)
        try:
            await world.send_stream(torch.ones(5000), 1)
        except ad.RankLostError:
            lost = True
        while 1 in world.services.lost_ranks():
            await world.sleep(0.001)
        channel.send_nowait(Word(7), 1)
        await world.send_stream(torch.ones(5000), 1)
        return lost

    faults = [Kill(1, at_s=0.02), Restart(1, at_s=0.03)]
    report = simulate(main, ranks=2, faults=faults, network=Network(loss_detection_s=1e-4))
    check(report)
    assert report.results == (True, (7, 5000.0)), "messages sent to the former process must be lost with it"


@pytest.mark.parametrize("is_received", [False, True])
@pytest.mark.parametrize("back_at_s", [0.02001, 1.0])
def test_a_stream_to_a_rank_that_is_back_at_once_fails(back_at_s: float, is_received: bool) -> None:
    """Regression: the loss and the restart were noticed in one turn, and the sender waited forever."""

    async def main(world: ad.World) -> Any:
        if world.rank == 0:
            with pytest.raises(ad.RankLostError):
                await world.send_stream(torch.ones(10), 1)
            await world.sleep(3.0)
            if is_received:
                await world.send_stream(torch.ones(10), 1)
            return 1
        if not world.incarnation:
            await world.sleep(100.0)
        await world.sleep(0.5)
        return float((await world.receive_stream(torch.empty(10), 0)).sum()) if is_received else 10.0

    faults = [Kill(1, at_s=0.02), Restart(1, at_s=back_at_s)]
    report = simulate(main, ranks=2, seed=2, faults=faults)
    check(report)
    assert report.results == (1, 10.0)


def test_a_replay_buffer_serves_a_client_that_was_started_again() -> None:
    async def main(world: ad.World) -> Any:
        if world.rank == 0:
            statistics = await serve_replay_buffer([1, 2], capacity=100)
            return dict(statistics.added)
        async with ReplayBuffer(0) as buffer:
            if world.rank == 2 and not world.incarnation:
                await world.sleep(1.0)
            await buffer.add(torch.full((2, 3), float(world.rank)))
            if world.rank == 1:
                await world.sleep(0.1)
        return world.incarnation

    faults = [Kill(2, at_s=0.02), Restart(2, at_s=0.03)]
    report = simulate(main, ranks=3, faults=faults, network=Network(loss_detection_s=1e-4))
    check(report)
    assert report.results == ({1: 2, 2: 2}, 0, 1)
