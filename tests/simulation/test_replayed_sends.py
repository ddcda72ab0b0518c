"""Tests replays of a rank's actions after one of its sends has completed, which takes no time in a replay."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from support.seeds import in_ci

import asyncdist as ad
from asyncdist.recording.reader import read_recording
from asyncdist.simulation import Compute, Link, LogNormal, Network, Uniform, replay, simulate
from asyncdist.simulation.replay.input_checks import PATIENCE_S
from asyncdist.waits import WaitId, WaitKind
from protocols import OneSidedSelectiveAveragingPolicy, ReplayBuffer, serve_replay_buffer
from simulation.edited_records import Word, keep_events, with_fields

#: A network in which each message waits for its receiver.
RENDEZVOUS = Network(eager_nbytes=0)
SLOW = Network(eager_nbytes=0, link=Link(latency_s=LogNormal(0.003, 1.0)), links={(0, 1): Link(latency_s=0.3)})


async def is_left_by_a_send(world: ad.World, order: list[str], *, is_stream: bool) -> None:
    """On rank 0, a task sends to rank 1, which is late; meanwhile another task receives from rank 2."""
    channel, large = world.channel(Word, tag=40), torch.zeros(10)

    async def send() -> None:
        await (world.send_stream(large, 1) if is_stream else channel.send(Word(0), 1))
        order.append("sent")

    if world.rank == 0:
        sender = asyncio.create_task(send())
        await channel.receive()
        order.append("received")
        await sender
    elif world.rank == 1:
        loop: Any = asyncio.get_running_loop()
        await loop.be_busy(0.0 if is_stream else 0.5)
        await (world.receive_stream(large, 0) if is_stream else channel.receive())
    else:
        await world.sleep(0.4 if is_stream else 0.1)
        await channel.send(Word(2), 0)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_task_goes_on_after_a_send_when_it_did(tmp_path: Path, is_stream: bool) -> None:
    order: list[str] = []

    async def main(world: ad.World) -> None:
        await is_left_by_a_send(world, order, is_stream=is_stream)

    simulate(main, ranks=3, seed=1, record=tmp_path, network=SLOW)
    assert order == ["received", "sent"]
    replay(main, recording=read_recording(tmp_path))
    assert order == ["received", "sent"] * 2


def test_tasks_woken_by_one_pass_continue_in_order_of_waiting(tmp_path: Path) -> None:
    """The last part of a stream left in the pass that received a message, for which a task waited later."""
    order: list[str] = []

    async def main(world: ad.World) -> None:
        channel, large = world.channel(Word, tag=40), torch.zeros(10)
        if world.rank == 1:
            await world.receive_stream(large, 0)
            await world.sleep(0.8)
            await channel.send(Word(1), 0)
            return

        async def send() -> None:
            await world.send_stream(large, 1)
            order.append("sent")

        sender = asyncio.create_task(send())
        await world.sleep(0.1)
        await world.services.engine.until(lambda: channel.is_ready)
        order.append("received")
        await sender

    simulate(main, ranks=2, seed=1, record=tmp_path, network=SLOW)
    of_rank_0 = read_recording(tmp_path).ranks[0]
    events = list(of_rank_0.events())
    end = next(each for each in events if each.kind == "timer" and each.wait.kind == WaitKind.STREAM_LEFT)
    word = next(event for event in events if event.kind == "received" and event.get("tag") == 40)
    waits = {name: word.get(name) for name in ("woken", "begun")}
    events.remove(end)
    events.insert(events.index(word) + 1, with_fields(end, **waits)._replace(time_s=word.time_s))
    keep_events(of_rank_0, lambda event: False, *events)
    order.clear()
    replay(main, recording=read_recording(tmp_path))
    assert order == ["sent", "received"]


def test_a_send_that_a_timeout_cut_off_is_cut_off_again(tmp_path: Path) -> None:
    async def main(world: ad.World) -> str:
        channel = world.channel(Word, tag=40)
        if world.rank == 1:
            loop: Any = asyncio.get_running_loop()
            await loop.be_busy(0.5)
            await channel.receive()
            return ""
        try:
            async with asyncio.timeout(0.1):
                await channel.send(Word(1), 1)
        except TimeoutError:
            return "cut off"
        return "sent"

    recorded = simulate(main, ranks=2, seed=1, record=tmp_path, network=RENDEZVOUS)
    assert recorded.results[0] == "cut off"
    assert replay(main, recording=read_recording(tmp_path)).report.results == recorded.results


async def share_a_buffer(world: ad.World) -> list[list[int]]:
    """Add and draw in two tasks of each client; a draw depends on the stored items, and on all earlier draws."""
    if world.rank == world.size - 1:
        await serve_replay_buffer(range(world.size - 1), capacity=500)
        return []
    drawn: list[list[int]] = []
    async with ReplayBuffer(world.size - 1) as buffer:

        async def add() -> None:
            for _ in range(10):
                await buffer.add(torch.randn(random.choice((1, 3)), 400))
                await asyncio.sleep(random.random() / 100)

        async def draw() -> None:
            for _ in range(10):
                with contextlib.suppress(ad.BusyError):
                    sample = await buffer.sample(random.choice((4, 32)), wait=False)
                    drawn.append(sample.ids.tolist())

        await asyncio.gather(add(), draw())
    return drawn


@pytest.mark.parametrize("seed", range(2))
def test_a_replay_buffer_draws_what_it_drew(tmp_path: Path, seed: int) -> None:
    """While a stream of items is in progress, the next draw waits; then it precedes inputs that arrived meanwhile."""
    compute = Compute(step_s=Uniform(0.001, 0.01))
    recorded = simulate(share_a_buffer, ranks=4, seed=seed, record=tmp_path, network=SLOW, compute=compute)
    assert replay(share_a_buffer, recording=read_recording(tmp_path)).report.results == recorded.results


async def average_one_sided(world: ad.World) -> float:
    torch.manual_seed(world.rank)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    async with OneSidedSelectiveAveragingPolicy(
        model, optimizer, average_every=1, replacement_mode="worst_ratio"
    ) as policy:
        for _ in range(40):
            await policy.step(random.random())
    return model.weight.sum().item()


@pytest.mark.parametrize("seed", in_ci(range(4), 0, 1))
def test_ranks_that_average_one_sided_read_what_they_read(tmp_path: Path, seed: int) -> None:
    compute = Compute(step_s=Uniform(0.001, 0.01))
    recorded = simulate(average_one_sided, ranks=4, seed=seed, record=tmp_path, network=RENDEZVOUS, compute=compute)
    replayed = replay(average_one_sided, recording=read_recording(tmp_path))
    assert replayed.report.results == recorded.results
    assert replayed.decision_count > 100


def test_a_number_that_timing_decides_is_the_recorded_one(tmp_path: Path) -> None:
    numbers = iter(range(10))

    async def main(world: ad.World) -> list[int]:
        one, other = (WaitId(WaitKind.WRITTEN_NBYTES, peer=0, number=slot) for slot in range(2))
        return [world.services.engine.measured(what, next(numbers)) for what in (one, other, one)]

    recorded = simulate(main, ranks=1, seed=1, record=tmp_path)
    assert recorded.results == ([0, 1, 2],)
    assert replay(main, recording=read_recording(tmp_path)).report.results == recorded.results


def test_what_a_task_took_by_itself_after_a_send_comes_at_once(tmp_path: Path) -> None:
    """The task waits for it earlier in the replay, because its send takes no time there."""
    ends_at_s: list[float] = []

    async def main(world: ad.World) -> None:
        engine = world.services.engine

        async def talk() -> None:
            await engine.send(bytes(1000), 1, 7500)
            await engine.receive(bytearray(8), 1, 7500)
            ends_at_s.append(asyncio.get_running_loop().time())

        if world.rank == 0:
            task = asyncio.create_task(talk())
            await asyncio.sleep(0.1)
            await asyncio.sleep(0.1)
            await task
        else:
            await engine.send(bytes(8), 0, 7500)
            await asyncio.sleep(0.3)
            await engine.receive(bytearray(1000), 0, 7500)

    simulate(main, ranks=2, seed=1, record=tmp_path, network=Network(eager_nbytes=100))
    events = read_recording(tmp_path).ranks[0].events()
    assert [event.get("pass") for event in events if event.get("tag") == 7500 and event.kind == "received"] == [-1]
    replay(main, recording=read_recording(tmp_path))
    assert ends_at_s[1] < PATIENCE_S
