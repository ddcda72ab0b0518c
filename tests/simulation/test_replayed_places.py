"""Tests the order in which a replay delivers a rank's inputs: recorded facts, and choices made by them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import asyncdist as ad
from asyncdist import tags
from asyncdist.recording.reader import Recording, read_recording
from asyncdist.simulation import replay, simulate
from asyncdist.simulation.replay.admission import Admission
from asyncdist.simulation.replay.input_checks import PATIENCE_S
from asyncdist.simulation.replay.log import RankLog
from asyncdist.simulation.replay.pending_inputs import Mailbox
from asyncdist.simulation.replay.timers import Timers
from asyncdist.transports.base import ANY_SOURCE
from asyncdist.waits import WaitId, WaitKind
from simulation.edited_records import Word, keep_events, tell_no_sleeps, with_fields


@pytest.mark.parametrize("after_s", [-1.0, 0.01])
def test_a_wait_ended_by_its_deadline_follows_earlier_messages(tmp_path: Path, after_s: float) -> None:
    """The recorded consequences therefore come before the end of the wait, as in a replay."""

    async def main(world: ad.World) -> tuple[bool, int, int]:
        engine = world.services.engine
        drain, came, counts = engine.drain, asyncio.Event(), []

        async def drain_and_hear() -> None:
            await drain()
            counts.append(engine.woken_count)
            came.set()

        replaced: Any = engine
        replaced.drain, engine.woken_count = drain_and_hear, 0
        holds = await engine.until(came.is_set, deadline=engine.loop.time() + after_s)
        return holds, *counts, engine.woken_count

    assert ad.run_local(main, ranks=1, record=tmp_path) == [(True, 0, 1)]


def test_of_two_deadlines_of_one_name_the_earlier_one_passes() -> None:
    """Two policies of one class have such deadlines."""
    passed: list[str] = []
    reports, loop = WaitId(WaitKind.REPORTS), cast(Any, None)
    deadlines = Timers(loop)
    with (
        deadlines.waiting(reports, 2.0, lambda: passed.append("later")),
        deadlines.waiting(reports, 1.0, lambda: passed.append("earlier")),
    ):
        deadlines.fire(reports)
        deadlines.fire(reports)
    assert passed == ["earlier", "later"]


def test_the_last_messages_of_a_rank_keep_their_order() -> None:
    """The rank receives nothing more then, but others have sent in another order."""
    log = RankLog(tags={40}, is_over=True)
    mailbox = Mailbox()
    inputs: Any = SimpleNamespace(is_done=True, is_open=True, log=log, mailbox=mailbox)
    admission = Admission(inputs, lambda: None, lambda: None, lambda: None)
    mailbox.put(1, 40, b"1")
    mailbox.put(0, 40, b"0")
    admission.permit([(0, 40), (1, 40)])
    assert admission.next_key(ANY_SOURCE, 40) == (0, 40)


def test_a_message_comes_as_soon_as_the_wait_before_it_has_ended(tmp_path: Path) -> None:
    """This holds even if the rank was held for the previous message, and looked for the next one earlier."""
    is_late = False
    ends_at_s: list[float] = []

    async def main(world: ad.World) -> list[int]:
        channel = world.channel(Word, tag=40)
        if world.rank == 0:
            heard = [(await channel.receive()).message.number for _ in range(3)]
            ends_at_s.append(asyncio.get_running_loop().time())
            return heard
        if is_late == (world.rank == 2):
            await asyncio.sleep(0.01)
        if world.rank == 2:
            await channel.send(Word(0), 0)
        await channel.send(Word(world.rank), 0)
        return []

    recorded = simulate(main, ranks=3, seed=1, record=tmp_path)
    assert recorded.results[0] == [0, 2, 1]
    is_late = True
    recording = tell_no_sleeps(tmp_path)
    assert replay(main, recording=recording).report.results == recorded.results
    assert ends_at_s[1] < PATIENCE_S


def test_a_task_begun_in_a_safe_point_has_the_earlier_messages(tmp_path: Path) -> None:
    """The loop makes passes before tasks that are ready, so such a task did not have to wait."""
    order: list[str] = []

    async def main(world: ad.World) -> None:
        channel = world.channel(Word, tag=40)
        if world.rank == 1:
            await channel.send(Word(1), 0)
            return
        heard: list[object] = []

        def has_heard() -> bool:
            heard.extend(channel.receive_all())
            return bool(heard)

        async def take() -> None:
            await world.services.engine.until(has_heard)
            order.append("taken")

        await world.sleep(0.05)
        task = asyncio.create_task(take())
        await world.progress()
        order.append("point over")
        await world.progress()
        await task

    simulate(main, ranks=2, seed=1, record=tmp_path)
    of_rank_0 = read_recording(tmp_path).ranks[0]
    events = list(of_rank_0.events())
    word = next(event for event in events if event.kind == "received" and event.get("tag") == 40)
    point = next(event for event in events if event.kind == "safe_point")
    at, time_s = events.index(point), point.time_s
    begin = point._replace(fields=(False, 0, point.get("woken")))
    in_yield = with_fields(word, turn=1, woken=0)._replace(time_s=time_s)
    before = [event for event in events[:at] if event is not word]
    keep_events(of_rank_0, lambda event: False, *before, begin, in_yield, *events[at:])
    order.clear()
    replay(main, recording=read_recording(tmp_path))
    assert order == ["taken", "point over"]


def test_main_has_a_message_before_the_task_that_it_wakes(tmp_path: Path) -> None:
    """A pass of the loop delivered both before main's step, after which main did not have to wait."""
    order: list[str] = []

    async def main(world: ad.World) -> None:
        first, second = world.channel(Word, tag=40), world.channel(Word, tag=41)
        if world.rank == 1:
            await world.sleep(0.1)
            await first.send(Word(1), 0)
            await second.send(Word(2), 0)
            return

        async def listen() -> None:
            await first.receive()
            order.append("listener")

        listener = asyncio.create_task(listen())
        await world.progress()
        loop: Any = asyncio.get_running_loop()
        await loop.be_busy(0.5)
        await asyncio.sleep(0)
        await second.receive(timeout_s=1.0)
        order.append("main")
        await world.progress()
        await listener

    simulate(main, ranks=2, seed=1, record=tmp_path)
    replay(main, recording=read_recording(tmp_path))
    assert order == ["main", "listener"] * 2


def test_a_message_taken_right_after_another_comes_at_once(tmp_path: Path) -> None:
    """Ranks on MPI test a tag more often than replayed ranks, and also receive messages for other tasks on it."""
    ends_at_s: list[float] = []

    async def main(world: ad.World) -> None:
        for_all = world.channel(Word, tag=40)
        if world.rank == 1:
            await world.sleep(0.1)
            await for_all.send(Word(1), 0)
            return
        pair = await ad.new_group([0, 2])
        for_pair = world.channel(Word, tag=40, group=pair)
        if world.rank == 2:
            await world.sleep(0.2)
            await for_pair.send(Word(2), 0)
        else:
            loop: Any = asyncio.get_running_loop()
            listener = asyncio.create_task(for_pair.receive())
            await asyncio.sleep(0)
            await loop.be_busy(0.5)
            await for_all.receive()
            await listener
            ends_at_s.append(loop.time())

    simulate(main, ranks=3, seed=1, record=tmp_path)
    of_rank_0 = read_recording(tmp_path).ranks[0]
    events = list(of_rank_0.events())
    first, second = (event for event in events if event.kind == "received" and event.get("tag") == 40)
    at = events.index(first) + 1
    by_task = with_fields(second, **{"pass": -1})._replace(time_s=first.time_s)
    after = [event for event in events[at:] if event is not second]
    keep_events(of_rank_0, lambda event: False, *events[:at], by_task, *after)
    replay(main, recording=read_recording(tmp_path))
    assert ends_at_s[1] < PATIENCE_S


def test_a_message_comes_after_the_recorded_number_of_waits(tmp_path: Path) -> None:
    """This holds even if an earlier wait held the rank for the message: the next input counts main's wait."""
    ends_at_s: list[float] = []

    async def main(world: ad.World) -> None:
        channel, other = world.channel(Word, tag=40), world.channel(Word, tag=41)
        if world.rank == 0:
            listener = asyncio.create_task(other.receive())
            await asyncio.sleep(0)
            assert [(await channel.receive()).message.number for _ in range(2)] == [1, 2]
            ends_at_s.append(asyncio.get_running_loop().time())
            listener.cancel()
            return
        for number in (1, 2):
            await world.sleep(0.1)
            await channel.send(Word(number), 0)

    simulate(main, ranks=2, seed=1, record=tmp_path)
    replay(main, recording=read_recording(tmp_path))
    assert ends_at_s[1] < PATIENCE_S


@pytest.mark.parametrize("is_late", [False, True])
def test_messages_come_while_main_waits_for_a_tasks_result(tmp_path: Path, is_late: bool) -> None:
    """A report arrives in this way while the coordinator waits for the others to start, on MPI; and if it is late.

    The input that produces the result is not recorded there, and may be faster in the replay.
    """
    delays = {1: 0.01, 2: 0.0}

    async def main(world: ad.World) -> list[str]:
        engine, order = world.services.engine, []
        channel = world.services.open_channel(
            Word, tag=40, scope=0, name="words", handler=lambda _: order.append("heard")
        )
        if world.rank:
            await asyncio.sleep(delays[world.rank])
        if world.rank == 1:
            await engine.send(b"x", 0, tags.COLLECTIVE_LAST)
            return []
        if world.rank == 2:
            await channel.send(Word(1), 0)
            return []

        start = asyncio.create_task(engine.receive(bytearray(1), 1, tags.COLLECTIVE_LAST))
        await engine.settled_by(start, asyncio.shield(start))
        order.append("on")
        await world.progress()
        return order

    recorded = simulate(main, ranks=3, seed=1, record=tmp_path)
    assert recorded.results[0] == ["heard", "on"]
    keep_events(read_recording(tmp_path).ranks[0], lambda event: event.get("tag") != tags.COLLECTIVE_LAST)
    recording = read_recording(tmp_path)
    if is_late:
        delays.update({1: 0.0, 2: 0.01})
        recording = tell_no_sleeps(tmp_path)
    assert replay(main, recording=recording).report.results == recorded.results


def with_word_first(folder: Path, after: int, **place: int) -> Recording:
    """Return a recording in which rank 0 received its word after this number of its events."""
    of_rank_0 = read_recording(folder).ranks[0]
    events = list(of_rank_0.events())
    word = next(event for event in events if event.kind == "received" and event.get("tag") == 40)
    events.remove(word)
    moved = with_fields(word, **place)._replace(time_s=events[max(0, after - 1)].time_s)
    keep_events(of_rank_0, lambda _: False, *events[:after], moved, *events[after:])
    return read_recording(folder)


def test_a_task_does_not_wait_for_a_message_that_is_late(tmp_path: Path) -> None:
    """A pass had delivered it before the task's first step; otherwise other tasks would continue before it."""

    async def main(world: ad.World) -> list[str]:
        channel, order = world.channel(Word, tag=40), []

        async def hear() -> None:
            await channel.receive()
            order.append("heard")

        async def go_on() -> None:
            order.append("other")

        if world.rank == 1:
            await asyncio.sleep(0.01)
            await channel.send(Word(1), 0)
        else:
            await asyncio.gather(hear(), go_on())
        return order

    assert simulate(main, ranks=2, seed=1, record=tmp_path).results[0] == ["other", "heard"]
    recording = with_word_first(tmp_path, 0, woken=0, begun=0)
    assert replay(main, recording=recording).report.results[0] == ["heard", "other"]


def test_a_wait_ends_after_a_message_that_follows_a_send(tmp_path: Path) -> None:
    """The input that ends the wait is there at once, and the other task has not reached it yet."""

    async def main(world: ad.World) -> list[str]:
        engine, order, flags = world.services.engine, [], []
        channel = world.services.open_channel(
            Word, tag=40, scope=0, name="words", handler=lambda _: order.append("heard")
        )
        if world.rank == 1:
            await asyncio.sleep(0.01)
            await channel.send(Word(1), 0)
            return []

        async def end_wait() -> None:
            flags.append(True)
            engine.recheck()

        async def send() -> None:
            await asyncio.sleep(0)
            await engine.send(b"x", 1, 41)

        tasks = [asyncio.create_task(work) for work in (end_wait(), send())]
        await engine.until(lambda: bool(flags))
        order.append("on")
        await asyncio.gather(*tasks)
        await asyncio.sleep(0.1)
        return order

    assert simulate(main, ranks=2, seed=1, record=tmp_path).results[0] == ["on", "heard"]
    events = list(read_recording(tmp_path).ranks[0].events())
    sent = next(place for place, event in enumerate(events) if event.kind == "sent" and event.get("tag") == 41)
    recording = with_word_first(tmp_path, sent + 1, woken=0, begun=1)
    assert replay(main, recording=recording).report.results[0] == ["heard", "on"]


def test_a_wait_for_a_message_once_taken_unasked_is_ignored(tmp_path: Path) -> None:
    """The message is late in the replay, and the task waits for it: the next input does not count this wait."""
    counts: list[int] = []

    async def main(world: ad.World) -> None:
        channel = world.channel(Word, tag=40)
        if world.rank == 1:
            await asyncio.sleep(0.1)
            await channel.send(Word(1), 0)
        else:
            await channel.receive()
            counts.append(world.services.engine.woken_count)

    simulate(main, ranks=2, seed=1, record=tmp_path)
    of_rank_0 = read_recording(tmp_path).ranks[0]
    events = list(of_rank_0.events())
    (word,) = (event for event in events if event.kind == "received" and event.get("tag") == 40)
    events[events.index(word)] = with_fields(word, **{"pass": -1, "woken": 0, "begun": 0})
    keep_events(of_rank_0, lambda _: False, *events)
    replay(main, recording=read_recording(tmp_path))
    assert counts == [1, 0]


def test_a_task_with_a_late_message_continues_in_its_turn(tmp_path: Path) -> None:
    """In the recorded run the task received both in one step, the second one directly."""

    async def main(world: ad.World) -> list[str]:
        channel, order = world.channel(Word, tag=40), []
        if world.rank == 1:
            loop: Any = asyncio.get_running_loop()
            for _ in range(2):
                await loop.be_busy(0.1)
                await channel.send(Word(1), 0)
            return order

        async def hear() -> None:
            for _ in range(2):
                await channel.receive()
                order.append("heard")

        async def sleep() -> None:
            await asyncio.sleep(0.15)
            order.append("slept")

        await asyncio.gather(hear(), sleep())
        return order

    assert simulate(main, ranks=2, seed=1, record=tmp_path).results[0] == ["heard", "slept", "heard"]
    of_rank_0 = read_recording(tmp_path).ranks[0]
    events = list(of_rank_0.events())
    first, second = (event for event in events if event.kind == "received" and event.get("tag") == 40)
    (slept,) = (event for event in events if event.kind == "timer" and event.wait.kind == WaitKind.SLEEP)
    events = [event for event in events if event not in (second, slept)]
    at = events.index(first) + 1
    beside = with_fields(slept, woken=0, begun=first.get("begun"))._replace(time_s=first.time_s)
    by_task = with_fields(second, **{"pass": -1, "woken": 1, "begun": first.get("begun")})
    events[at:at] = [beside, by_task._replace(time_s=first.time_s)]
    keep_events(of_rank_0, lambda _: False, *events)
    assert replay(main, recording=read_recording(tmp_path)).report.results[0] == ["heard", "heard", "slept"]


def reader_of_clock(name: str, blank_count: int) -> Callable[[ad.World], float]:
    """Return a function ``name``, in a file of its own after blank lines, that reads the clock."""
    found: dict[str, Any] = {}
    exec("\n" * blank_count + f"def {name}(world):\n    return world.time()\n", found)
    reader: Callable[[ad.World], float] = found[name]
    return reader


@pytest.mark.parametrize(("names", "blank_count"), [("ab", 7), ("ba", 0)])
def test_clock_readings_belong_to_functions_not_to_lines(tmp_path: Path, names: str, blank_count: int) -> None:
    """Regression: an edit that moved a line changed the replay, and two files mixed up the times of equal lines."""

    async def main(world: ad.World, names: str, blank_count: int) -> dict[str, float]:
        return {name: reader_of_clock(name, blank_count)(world) for name in names}

    recorded = ad.run_local(main, "ab", 0, ranks=1, record=tmp_path)
    replayed = replay(main, names, blank_count, recording=read_recording(tmp_path))
    assert list(replayed.report.results) == recorded
