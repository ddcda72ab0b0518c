"""Tests that senders to a full mailbox wait without cost, in order, and are released by every end of the wait."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.channels import TAG, Number, both, dropped
from support.local import eventually, run, worlds, yields

from asyncdist import World, simulate
from asyncdist.errors import BusyError, RankLostError
from asyncdist.messaging import flow_control
from asyncdist.messaging.demultiplexer import EARLY_FRAME_COUNT_MAX
from asyncdist.messaging.flow_control import TagFlow
from asyncdist.messaging.polling import SAFETY_PASS_COUNT, SAFETY_PERIOD_S
from asyncdist.recording.reader import read_recording
from asyncdist.simulation import Kill, Restart, replay
from asyncdist.transports.rank_sets import RankSet

WINDOW = 64
CREDIT_COUNT = WINDOW // 2


@pytest.fixture(autouse=True)
def window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the window small, so that few messages fill it."""
    monkeypatch.setattr(flow_control, "WINDOW", WINDOW)


def flow_of(world: World) -> TagFlow:
    flow = world.services._demultiplexers[TAG].flow
    assert flow is not None
    return flow


def holds_back(world: World) -> bool:
    """Return whether a rank holds messages back for other ranks."""
    return any(lane.held for lane in flow_of(world).lanes.values())


async def send_numbers(channel: Any, numbers: range, dest: int = 1) -> None:
    for number in numbers:
        await channel.send(Number(number), dest)


async def receive(channel: Any, count: int) -> list[int]:
    return [(await channel.receive()).message.value for _ in range(count)]


def count_credits(worlds: list[World]) -> Counter[tuple[int, int]]:
    """Return the numbers of credits that ranks have sent, by rank and receiver."""
    counts: Counter[tuple[int, int]] = Counter()
    for world in worlds:
        flow = flow_of(world)

        def count(tag: int, rank: int, own: int = world.rank, send: Any = flow._send_credit) -> None:
            counts[own, rank] += 1
            send(tag, rank)

        flow._send_credit = count
    return counts


async def fill(pair: list[World], channel: Any) -> None:
    """Use the whole window of rank 0."""
    for number in range(-WINDOW, 0):
        channel.send_nowait(Number(number), 1)
    await yields(20)
    assert flow_of(pair[0]).lane(1).room == 0


async def test_a_sender_to_a_full_mailbox_costs_nothing(pair: list[World]) -> None:
    a, b = both(pair, capacity=8)
    counts = count_credits(pair)
    sending = asyncio.ensure_future(send_numbers(a, range(3 * WINDOW)))
    await eventually(lambda: holds_back(pair[0]))
    await yields(100)
    assert a.statistics().sent_count == WINDOW + 1
    before, began_s = pair[0].services.engine.statistics(), time.monotonic()
    await yields(1000)
    after = pair[0].services.engine.statistics()
    ticks = (time.monotonic() - began_s) // SAFETY_PERIOD_S + 1
    assert after.pass_count - before.pass_count <= ticks * SAFETY_PASS_COUNT
    assert after.outstanding_count == 0
    assert not counts
    assert await receive(b, 3 * WINDOW) == list(range(3 * WINDOW))
    await sending
    assert counts == {(1, 0): 3 * WINDOW // CREDIT_COUNT}


async def test_a_fast_sender_is_bounded_by_a_reader_that_reads(pair: list[World]) -> None:
    a, b = both(pair, capacity=8)
    sending = asyncio.ensure_future(send_numbers(a, range(5 * WINDOW)))
    for number in range(5 * WINDOW):
        await yields(1)
        assert (await b.receive()).message.value == number
        assert a.statistics().sent_count <= number + 1 + WINDOW + 8 + 1, (
            "at most the window, the mailbox and the held message may be sent"
        )
    await sending


async def test_tasks_and_send_nowait_keep_their_order(pair: list[World]) -> None:
    a, b = both(pair, capacity=4)
    await fill(pair, a)
    sent = [3, 4, 5, 6, 7, 8, 9]
    tasks = []
    for number in sent[:-1]:
        if number % 2:
            tasks.append(asyncio.ensure_future(a.send(Number(number), 1)))
            await yields(1)
        else:
            a.send_nowait(Number(number), 1)
    tasks[0].cancel()  # it is sent anyway
    await yields(2)
    a.send_nowait(Number(sent[-1]), 1)
    assert not any(task.done() for task in tasks[1:])
    assert (await receive(b, WINDOW + len(sent)))[WINDOW:] == sent
    await asyncio.gather(*tasks[1:])


async def test_send_nowait_is_busy_when_a_capacity_is_held(pair: list[World]) -> None:
    a, b = both(pair, capacity=4)
    await fill(pair, a)
    for number in range(4):
        a.send_nowait(Number(number), 1)
    with pytest.raises(BusyError):
        a.send_nowait(Number(4), 1)
    await receive(b, CREDIT_COUNT)
    await eventually(lambda: a.statistics().sending_count == 0)
    a.send_nowait(Number(4), 1)
    assert (await receive(b, WINDOW + 5 - CREDIT_COUNT))[-5:] == [0, 1, 2, 3, 4]


async def test_a_rank_that_fills_its_own_mailbox_is_not_limited(pair: list[World]) -> None:
    a, _ = both(pair, capacity=4)
    counts = count_credits(pair)
    count = 2 * WINDOW
    for number in range(count):
        await a.send(Number(number), 0)
    assert await receive(a, count) == list(range(count))
    assert not counts


async def test_the_channels_of_a_tag_share_a_window(pair: list[World]) -> None:
    (a, b), (c, d) = both(pair, capacity=4), both(pair, capacity=4)
    counts = count_credits(pair)
    tasks = [asyncio.ensure_future(send_numbers(channel, range(WINDOW))) for channel in (a, c)]
    await eventually(lambda: holds_back(pair[0]))
    assert a.statistics().sent_count + c.statistics().sent_count <= WINDOW + 2
    received = await asyncio.gather(receive(b, WINDOW), receive(d, WINDOW))
    assert received[0] == received[1] == list(range(WINDOW))
    await asyncio.gather(*tasks)
    assert counts == {(1, 0): 2 * WINDOW // CREDIT_COUNT}


async def test_each_sender_has_a_window() -> None:
    async with worlds(3) as ranks:
        a, b, c = both(ranks, capacity=2)
        counts = count_credits(ranks)
        sending = [asyncio.ensure_future(send_numbers(channel, range(2 * WINDOW), dest=0)) for channel in (b, c)]
        await eventually(lambda: all(holds_back(ranks[rank]) for rank in (1, 2)))
        assert [channel.statistics().sent_count for channel in (b, c)] == [WINDOW + 1] * 2
        received = await receive(a, 4 * WINDOW)
        await asyncio.gather(*sending)
        assert sorted(received) == sorted([*range(2 * WINDOW)] * 2)
        assert counts == {(0, 1): 2 * WINDOW // CREDIT_COUNT, (0, 2): 2 * WINDOW // CREDIT_COUNT}


async def test_frames_of_an_unopened_channel_stop_their_sender(pair: list[World]) -> None:
    both(pair)
    a = pair[0].channel(Number, tag=TAG)  # the second channel, which rank 1 opens later
    count = 4 * EARLY_FRAME_COUNT_MAX
    sending = asyncio.ensure_future(send_numbers(a, range(count)))
    await eventually(lambda: holds_back(pair[0]))
    await yields(100)
    assert a.statistics().sent_count <= EARLY_FRAME_COUNT_MAX + WINDOW + 1
    b = pair[1].channel(Number, tag=TAG)
    assert await receive(b, count) == list(range(count))
    await sending


async def test_the_return_of_the_readers_main_releases_its_senders(pair: list[World]) -> None:
    a, _ = both(pair, capacity=4)
    await fill(pair, a)
    sending = asyncio.ensure_future(a.send(Number(1), 1))
    await yields(3)
    assert not sending.done()
    pair[1].peers.leave()
    await sending
    await eventually(lambda: dropped(pair[1]) == {"main had returned": WINDOW + 1 - 4})


async def return_early(world: World) -> list[int]:
    """Rank 1 sends more than its window, and returns before rank 0 receives the first message."""
    channel = world.channel(Number, tag=TAG, capacity=8)
    if world.rank:
        for number in range(WINDOW + 8):
            channel.send_nowait(Number(number), 0)
        return [len(flow_of(world).lane(0).held or ())]
    await eventually(lambda: 1 in world.services.gone)
    return await asyncio.wait_for(receive(channel, WINDOW + 8), 60)


def test_held_messages_arrive_after_their_sender_has_returned() -> None:
    received, held = run(return_early, 2)
    assert received == list(range(WINDOW + 8))
    assert held == [8]


async def test_credits_of_a_lost_rank_change_nothing() -> None:
    async with worlds(2) as pair:
        a, _ = both(pair, capacity=4)
        await fill(pair, a)
        pair[0].services.notify_gone(RankSet((1,)))
        unlimited = flow_of(pair[0]).lane(1).room
        pair[1].services.send_credit(TAG, 0)
        await yields(20)
        assert flow_of(pair[0]).lane(1).room == unlimited > 1 << 61


async def test_the_loss_of_the_reader_fails_the_held_messages() -> None:
    async with worlds(2) as pair:
        a, _ = both(pair, capacity=4)
        await fill(pair, a)
        sending = asyncio.ensure_future(a.send(Number(1), 1))
        a.send_nowait(Number(2), 1)
        await yields(3)
        pair[0].services.engine.transport._hub.lose(1)  # type: ignore[attr-defined]
        pair[0].services.notify_gone(RankSet((1,)))
        with pytest.raises(RankLostError, match="rank 1"):
            await sending
        assert a.statistics().sending_count == 0


async def test_sends_that_fail_do_not_use_the_window() -> None:
    """Regression: the first send after the window's number of errors waited forever."""
    async with worlds(2) as pair:
        a, _ = both(pair, capacity=4)
        pair[0].services.engine.transport._hub.lose(1)  # type: ignore[attr-defined]
        for number in range(2 * WINDOW):
            with pytest.raises(RankLostError):
                await asyncio.wait_for(a.send(Number(number), 1), 60)


async def test_the_restart_of_the_reader_fails_the_held_messages(pair: list[World]) -> None:
    a, _ = both(pair, capacity=4)
    await fill(pair, a)
    sending = asyncio.ensure_future(a.send(Number(1), 1))
    await yields(3)
    pair[0].services.note_restarted(1, 1)
    with pytest.raises(RankLostError, match="was restarted before it received the message"):
        await sending
    assert flow_of(pair[0]).lane(1).room == WINDOW


async def test_the_messages_of_a_restarted_sender_are_counted_anew(pair: list[World]) -> None:
    a, b = both(pair, capacity=4)
    await send_numbers(a, range(CREDIT_COUNT - 1))
    assert await receive(b, CREDIT_COUNT - 1) == list(range(CREDIT_COUNT - 1))
    pair[1].services.note_restarted(0, 1)
    counts = count_credits(pair)
    sending = asyncio.ensure_future(send_numbers(a, range(CREDIT_COUNT)))
    assert await receive(b, CREDIT_COUNT - 1) == list(range(CREDIT_COUNT - 1))
    assert not counts
    assert await receive(b, 1) == [CREDIT_COUNT - 1]
    await sending
    assert counts == {(1, 0): 1}


async def overfill(world: World) -> list[int]:
    """Rank 0 receives slowly from all others, which send as fast as they can."""
    channel = world.channel(Number, tag=TAG, capacity=8)
    if world.rank:
        await send_numbers(channel, range(60), dest=0)
        return []
    received = []
    for _ in range(60 * (world.size - 1)):
        await world.sleep(0.0005)
        envelope = await channel.receive()
        received.append(1000 * envelope.source + envelope.message.value)
    return received


def is_in_order(received: list[int]) -> bool:
    return all([v for v in received if v // 1000 == rank] == [1000 * rank + n for n in range(60)] for rank in (1, 2))


def test_slow_readers_lose_nothing_in_a_strict_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow_control, "WINDOW", 8)
    assert is_in_order(run(overfill, 3)[0])


def test_a_replay_does_not_repeat_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow_control, "WINDOW", 8)
    rooms: list[int] = []
    on_credit = TagFlow.on_credit

    def note_room(self: TagFlow, rank: int) -> None:
        rooms.append(self.lane(rank).room)
        on_credit(self, rank)

    monkeypatch.setattr(TagFlow, "on_credit", note_room)
    recorded = simulate(overfill, ranks=3, seed=5, record=tmp_path)
    assert is_in_order(recorded.results[0])
    assert 0 in rooms, "no message was held, so the test tests nothing"
    rooms.clear()
    assert replay(overfill, recording=read_recording(tmp_path)).report.results == recorded.results
    assert min(rooms) > 1 << 61


async def send_until_lost(world: World) -> tuple[int, int] | None:
    """Rank 0 stops to receive, and is killed while the other ranks hold a message."""
    channel = world.channel(Number, tag=TAG, capacity=4)
    if world.rank == 0:
        await channel.receive()
        await world.sleep(10)
        return None
    for number in range(100):
        try:
            await channel.send(Number(number), 0)
        except RankLostError:
            held = flow_of(world).lane(0).room
            await world.sleep(0.002)
            return number, held
    return None


def test_a_replay_repeats_a_held_send_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the replay raised the error at the send, and diverged."""
    monkeypatch.setattr(flow_control, "WINDOW", 8)
    recorded = simulate(send_until_lost, ranks=3, seed=0, faults=[Kill(0, at_s=0.5)], record=tmp_path)
    numbers = [found[0] for found in recorded.results[1:] if found is not None]
    assert len(numbers) == 2 and all(8 <= number <= 12 for number in numbers)
    found = replay(send_until_lost, recording=read_recording(tmp_path)).report.results
    assert [each[0] for each in found[1:]] == numbers


async def stream_after_errors(world: World) -> int:
    """A restarted rank sends before it has connected to rank 0, and then more messages than a window."""
    channel = world.channel(Number, tag=TAG, capacity=4096)
    if world.rank == 0:
        return sum([(await channel.receive()).message.value for _ in range(3 * WINDOW)])
    if not world.incarnation:
        await world.sleep(100)
    for _ in range(2 * WINDOW):
        with contextlib.suppress(RankLostError):
            channel.send_nowait(Number(0), 0)
    while 0 in world.services.lost_ranks():
        await world.sleep(0.01)
    for _ in range(3 * WINDOW):
        await channel.send(Number(1), 0)
    return 0


def test_a_restarted_rank_has_a_whole_window_once_connected() -> None:
    """Regression: its sends before that used the window up, and it waited forever for credits."""
    report = simulate(stream_after_errors, ranks=2, seed=0, faults=[Kill(1, at_s=1.0), Restart(1, at_s=2.0)])
    assert report.results == (3 * WINDOW, 0)
