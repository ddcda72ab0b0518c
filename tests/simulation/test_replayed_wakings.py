"""Tests replays of tasks that continue without a message: after work in a thread, a sleep, or a timeout."""

from __future__ import annotations

import asyncio
import cProfile
import pstats
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncdist as ad
from asyncdist import waits
from asyncdist.recording.reader import RecordingError, read_recording
from asyncdist.simulation import Compute, DivergenceError, Network, Uniform, replay, simulate
from asyncdist.simulation.replay import replay as replayed_job
from asyncdist.waits import WaitKind
from simulation.edited_records import Word, edit_headers, keep_events, with_fields


def work(number: int) -> int:
    return number * 3


async def shares_work(world: ad.World, *, sleeps: bool) -> list[tuple[str, int, int]]:
    """Distribute numbers from rank 0; two tasks of each other rank request them, and compute in turn."""
    channel, story = world.channel(Word, tag=40), []
    if world.rank == 0:
        left, over_count = 30, 0
        while over_count < 2 * (world.size - 1):
            asked = await channel.receive()
            story.append(("asked", asked.source, asked.message.number))
            await channel.send(Word(left), asked.source)
            over_count += left == 0
            left -= left > 0
        return story
    numbers: asyncio.Queue[int] = asyncio.Queue()
    lock = asyncio.Lock()

    async def listen() -> None:
        while True:
            numbers.put_nowait((await channel.receive()).message.number)

    async def works(worker: int) -> None:
        draws = random.Random(10 * world.rank + worker)
        while True:
            await channel.send(Word(worker), 0)
            if (number := await numbers.get()) == 0:
                return
            async with lock:
                story.append(("computed", worker, await world.compute(work, number)))
            if sleeps:
                await asyncio.sleep(draws.random() / 100)
                story.append(("slept", worker, number))

    listener = asyncio.create_task(listen())
    await asyncio.gather(works(1), works(2))
    listener.cancel()
    return story


@pytest.mark.parametrize("sleeps", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_tasks_that_compute_in_turn_go_on_in_the_same_order(tmp_path: Path, seed: int, sleeps: bool) -> None:
    async def main(world: ad.World) -> list[tuple[str, int, int]]:
        return await shares_work(world, sleeps=sleeps)

    compute = Compute(step_s=Uniform(0.001, 0.01))
    recorded = simulate(main, ranks=4, seed=seed, record=tmp_path, compute=compute)
    recording = read_recording(tmp_path)
    assert replay(main, recording=recording).report.results == recorded.results
    kinds = Counter(event.wait.kind for each in recording.ranks for event in each.events() if event.kind == "timer")
    assert kinds[WaitKind.COMPUTE] == 30
    assert (kinds[WaitKind.SLEEP] > 0) == sleeps


def test_a_replay_does_not_depend_on_the_texts_of_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a replay found its timers and deadlines by the wording of reports."""

    async def main(world: ad.World) -> tuple[list[int], list[tuple[str, int, int]], list[int] | None]:
        channel = world.channel(Word, tag=41)
        with pytest.raises(TimeoutError):
            await channel.receive(timeout_s=0.01)
        heard = await waits_or_gives_up(world)
        story = await shares_work(world, sleeps=True)
        group = await world.new_group([0, 1, 2])
        large = [torch.zeros(1000)]
        if world.rank == 0:
            await world.send_stream(large[0], 1)
        elif world.rank == 1:
            await world.receive_stream(large[0], 0)
        return heard, story, await ad.gather_from_all_ranks(lambda: world.rank, group=group)

    compute = Compute(step_s=Uniform(0.001, 0.01))
    recorded = simulate(main, ranks=3, seed=1, record=tmp_path, compute=compute, network=Network(eager_nbytes=0))
    assert not any(isinstance(result, BaseException) for result in recorded.results)
    recording = read_recording(tmp_path)
    events = (event for each in recording.ranks for event in each.events())
    kinds = {event.wait.kind for event in events if event.kind in ("timer", "deadline")}
    assert kinds >= {WaitKind.SLEEP, WaitKind.COMPUTE, WaitKind.MESSAGE, WaitKind.STREAM_LEFT, WaitKind.MESSAGE_LEFT}
    monkeypatch.setattr(waits, "_TEMPLATES", dict.fromkeys(WaitKind, "any wait"))
    assert replay(main, recording=recording).report.results == recorded.results


def test_an_engine_is_chosen_as_it_is_made_and_not_changed_later(tmp_path: Path) -> None:
    """Regression: a replay replaced methods of the engine and the world of a rank as its world opened."""

    async def main(world: ad.World) -> tuple[str, list[str]]:
        engine = world.services.engine
        replaced = [
            name for each in (engine, world) for name in vars(each) if callable(getattr(type(each), name, None))
        ]
        return type(engine).__name__, replaced

    assert ad.run_local(main, ranks=1) == [("Engine", [])]
    assert simulate(main, ranks=1, seed=1, record=tmp_path).results == (("RecordedEngine", []),)
    assert replay(main, recording=read_recording(tmp_path)).report.results == (("ReplayedEngine", []),)


def test_a_replay_refuses_a_recording_of_another_version(tmp_path: Path) -> None:
    async def main(world: ad.World) -> None:
        await asyncio.sleep(0.1)

    simulate(main, ranks=1, seed=1, record=tmp_path)
    recording = edit_headers(tmp_path, lambda header: header.update(asyncdist="9.9"))
    with pytest.raises(RecordingError, match=rf"by asyncdist 9\.9, but this is asyncdist {ad.__version__}\."):
        replay(main, recording=recording)


async def waits_or_gives_up(world: ad.World) -> list[int]:
    """Receive from the previous rank with a timeout that sometimes passes; a late word is received later."""
    channel, heard, draws = world.channel(Word, tag=40), [], random.Random(world.rank)
    for number in range(20):
        await asyncio.sleep(draws.random() / 100)
        channel.send_nowait(Word(number), (world.rank + 1) % world.size)
        try:
            async with asyncio.timeout(draws.random() / 200):
                heard.append((await channel.receive()).message.number)
        except TimeoutError:
            heard.append(-1)
    await ad.barrier()
    return heard


@pytest.mark.parametrize("seed", range(4))
def test_what_a_timeout_of_asyncio_cuts_off_is_cut_off_again(tmp_path: Path, seed: int) -> None:
    recorded = simulate(waits_or_gives_up, ranks=3, seed=seed, record=tmp_path)
    words = [word for heard in recorded.results for word in heard]
    assert 3 < words.count(-1) < len(words) - 3
    assert replay(waits_or_gives_up, recording=read_recording(tmp_path)).report.results == recorded.results


def test_a_cancelled_task_continues_when_its_thread_had_ended(tmp_path: Path) -> None:
    async def main(world: ad.World) -> list[str]:
        channel, story = world.channel(Word, tag=40), []

        async def works() -> None:
            try:
                await world.compute(work, 1)
            except asyncio.CancelledError:
                story.append("worker cancelled")
                raise

        if world.rank == 1:
            for number in range(3):
                await channel.send(Word(number), 0)
                await world.sleep(0.002)
            return story
        worker = asyncio.create_task(works())
        for _ in range(3):
            story.append(f"word {(await channel.receive()).message.number}")
            worker.cancel()
        await asyncio.wait([worker])
        return story

    recorded = simulate(main, ranks=2, seed=3, record=tmp_path, compute=Compute(step_s=Uniform(0.003, 0.003)))
    assert recorded.results[0] == ["word 0", "word 1", "worker cancelled", "word 2"]
    assert replay(main, recording=read_recording(tmp_path)).report.results == recorded.results


@pytest.mark.parametrize("shares_process", [False, True])
def test_tasks_of_a_failed_rank_continue_as_long_as_recorded(tmp_path: Path, shares_process: bool) -> None:
    """Before it ends, a process waits for the report of a lower rank with the same failure; simulated ranks do not."""
    ticks: list[int] = []

    async def main(world: ad.World) -> None:
        async def ticks_on() -> None:
            while world.services.engine.failure is None:
                ticks.append(world.rank)
                await asyncio.sleep(0.01)

        if world.rank == 1:
            task = asyncio.create_task(ticks_on())
            await asyncio.sleep(0)
            raise ValueError(f"as planned, beside {task.get_name()}")
        await world.channel(Word, tag=40).receive()

    simulate(main, ranks=2, seed=1, record=tmp_path, return_exceptions=True)
    assert ticks == [1]

    def change(header: dict[str, Any]) -> None:
        header["tells_sleeps"] = False
        header["capabilities"]["shares_process"] = shares_process

    replay(main, recording=edit_headers(tmp_path, change))
    assert (len(ticks) > 2) is not shares_process


def test_a_message_right_before_the_end_of_work_waits_for_it(tmp_path: Path) -> None:
    """The work takes longer in the replay; no task had continued between the two."""

    async def main(world: ad.World) -> list[str]:
        channel, order = world.channel(Word, tag=40), []
        if world.rank == 1:
            await asyncio.sleep(0.1)
            await channel.send(Word(1), 0)
            return order

        async def hear() -> None:
            await channel.receive()
            order.append("heard")
            for _ in range(5):
                await asyncio.sleep(0)
            order.append("done")

        async def compute() -> None:
            await world.compute(time.sleep, 0.2)
            order.append("computed")

        await asyncio.gather(hear(), compute())
        return order

    assert simulate(main, ranks=2, seed=1, record=tmp_path).results[0] == ["heard", "done", "computed"]
    of_rank_0 = read_recording(tmp_path).ranks[0]
    events = list(of_rank_0.events())
    (word,) = (event for event in events if event.kind == "received" and event.get("tag") == 40)
    (ended,) = (event for event in events if event.kind == "timer")
    place = {name: word.get(name) for name in ("woken", "begun")}
    events.remove(ended)
    events.insert(events.index(word) + 1, with_fields(ended, **place)._replace(time_s=word.time_s))
    keep_events(of_rank_0, lambda _: False, *events)
    recording = read_recording(tmp_path)
    assert replay(main, recording=recording).report.results[0] == ["heard", "computed", "done"]


async def yields_often(world: ad.World, count: int) -> None:
    await ad.barrier()
    if world.rank == 1:
        for _ in range(count):
            await asyncio.sleep(0)
    await ad.barrier()


def test_a_rank_that_yields_for_long_is_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the replay was reported as different after 200,000 events without a recorded input."""
    monkeypatch.setattr(replayed_job, "_IDLE_EVENT_COUNT", 1000)
    ad.run_local(yields_often, 20_000, ranks=2, record=tmp_path)
    assert replay(yields_often, 20_000, recording=read_recording(tmp_path)).report.results == (None, None)
    monkeypatch.setattr(replayed_job, "_YIELDS_PER_S", 1000)
    with pytest.raises(DivergenceError):
        replay(yields_often, 20_000, recording=read_recording(tmp_path))


async def receives_many(world: ad.World, count: int) -> None:
    channel = world.channel(Word, tag=7)
    for value in range(count):
        if world.rank == 0:
            await channel.send(Word(value), dest=1)
            await world.safe_point()
        else:
            await channel.receive()
    await ad.barrier()


@pytest.mark.slow
def test_the_cost_of_a_replay_is_linear_in_its_messages(tmp_path: Path) -> None:
    """Regression: each message was compared with all later messages up to the next safe point."""

    def call_count(count: int) -> int:
        simulate(receives_many, count, ranks=2, seed=1, record=tmp_path / str(count))
        recording, profile = read_recording(tmp_path / str(count)), cProfile.Profile()
        profile.runcall(replay, receives_many, count, recording=recording)
        return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]

    assert call_count(1200) < 5 * call_count(300)
