"""Tests that senders to a full mailbox wait without cost, in order, and are released by every end of the wait."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.channels import TAG, Number, both, dropped
from support.local import eventually, run, worlds, yields

from asyncdist import World, simulate
from asyncdist.errors import BusyError, RankLostError
from asyncdist.messaging import flow_control
from asyncdist.messaging.early_frames import EARLY_FRAME_COUNT_MAX
from asyncdist.recording.reader import read_recording
from asyncdist.simulation import replay
from asyncdist.transports.rank_sets import RankSet


async def send_numbers(channel: Any, count: int, dest: int = 1) -> None:
    for number in range(count):
        await channel.send(Number(number), dest)


def told(worlds: list[World]) -> Counter[str]:
    """Return the numbers of pauses and resumptions that the ranks have sent, by name."""
    counts: Counter[str] = Counter()
    for world in worlds:
        flow = world.services._demultiplexers[TAG].flow
        assert flow is not None

        def count(message: Any, rank: int, tell: Any = flow._tell) -> bool:
            counts[type(message).__name__] += 1
            return bool(tell(message, rank))

        flow._tell = count
    return counts


async def test_a_sender_to_a_full_mailbox_costs_nothing(pair: list[World]) -> None:
    a, b = both(pair, capacity=8)
    counts = told(pair)
    sending = asyncio.ensure_future(send_numbers(a, 500))
    await eventually(lambda: bool(pair[0].services._demultiplexers[TAG].flow.held))  # type: ignore[union-attr]
    await yields(100)
    sent = a.statistics().sent_count
    assert sent <= 4 * 64, "a sender yields after 64 messages, and the pause takes three iterations of the loop"
    before = pair[0].services.engine.statistics()
    await yields(1000)
    after = pair[0].services.engine.statistics()
    assert (after.pass_count, after.outstanding_count) == (before.pass_count, 0)
    assert (a.statistics().sent_count, counts) == (sent, {"Pause": 1})
    assert [(await b.receive()).message.value for _ in range(500)] == list(range(500))
    await sending
    assert counts["Pause"] == counts["Resume"] <= 500 // 4


async def test_a_prompt_reader_pauses_nobody(pair: list[World]) -> None:
    a, b = both(pair, capacity=1)
    counts = told(pair)
    receiving = asyncio.ensure_future(asyncio.wait_for(_receive(b, 200), 60))
    await yields(2)
    for number in range(200):
        await a.send(Number(number), 1)
        await yields(2)
    assert await receiving == list(range(200))
    assert not counts


async def _receive(channel: Any, count: int) -> list[int]:
    return [(await channel.receive()).message.value for _ in range(count)]


async def test_tasks_and_send_nowait_keep_their_order(pair: list[World]) -> None:
    a, b = both(pair, capacity=4)
    await _fill(pair, a)
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
    assert (await _receive(b, 4 + len(sent)))[4:] == sent
    await asyncio.gather(*tasks[1:])


async def _fill(pair: list[World], channel: Any) -> None:
    """Fill a mailbox of capacity 4, and wait until its sender is paused."""
    flow = pair[0].services._demultiplexers[TAG].flow
    assert flow is not None
    for number in range(-1, 3):
        channel.send_nowait(Number(number), 1)
    await eventually(lambda: 1 in flow.held)


async def test_send_nowait_is_busy_when_a_capacity_is_held(pair: list[World]) -> None:
    a, b = both(pair, capacity=4)
    await _fill(pair, a)
    for number in range(4):
        a.send_nowait(Number(number), 1)
    with pytest.raises(BusyError):
        a.send_nowait(Number(4), 1)
    await _receive(b, 2)
    await eventually(lambda: a.statistics().sending_count == 0)
    a.send_nowait(Number(4), 1)
    assert (await _receive(b, 7))[2:] == [0, 1, 2, 3, 4]


async def test_a_rank_that_fills_its_own_mailbox_is_not_paused(pair: list[World]) -> None:
    a, _ = both(pair, capacity=4)
    for number in range(200):
        await a.send(Number(number), 0)
        await yields(2)
    assert await _receive(a, 200) == list(range(200))


async def test_two_full_mailboxes_of_a_tag_resume_together(pair: list[World]) -> None:
    (a, b), (c, d) = both(pair, capacity=4), both(pair, capacity=4)
    counts = told(pair)
    flow = pair[1].services._demultiplexers[TAG].flow
    assert flow is not None
    tasks = [asyncio.ensure_future(send_numbers(channel, 100)) for channel in (a, c)]
    await eventually(lambda: counts["Pause"] == 1)
    await _receive(b, 4)  # the other mailbox fills
    await eventually(lambda: d.is_full or b.is_full)
    received = await asyncio.gather(_receive(b, 96), _receive(d, 100))
    assert received[1] == list(range(100))
    await asyncio.gather(*tasks)
    assert counts["Pause"] == counts["Resume"]
    assert not flow.paused


async def test_frames_of_an_unopened_channel_pause_their_sender(pair: list[World]) -> None:
    both(pair)
    a = pair[0].channel(Number, tag=TAG)  # the second channel, which rank 1 opens later
    sending = asyncio.ensure_future(send_numbers(a, 3 * EARLY_FRAME_COUNT_MAX))
    await eventually(lambda: bool(pair[0].services._demultiplexers[TAG].flow.held))  # type: ignore[union-attr]
    await yields(100)
    assert a.statistics().sent_count <= EARLY_FRAME_COUNT_MAX + 4 * 64
    b = pair[1].channel(Number, tag=TAG)
    assert await _receive(b, 3 * EARLY_FRAME_COUNT_MAX) == list(range(3 * EARLY_FRAME_COUNT_MAX))
    await sending


async def test_the_return_of_the_readers_main_releases_its_senders(pair: list[World]) -> None:
    a, _ = both(pair, capacity=4)
    await _fill(pair, a)
    sending = asyncio.ensure_future(a.send(Number(1), 1))
    await yields(3)
    assert not sending.done()
    pair[1].peers.leave()
    await sending
    await eventually(lambda: dropped(pair[1]) == {"main had returned": 1})


async def return_early(world: World) -> list[int]:
    """Rank 1 sends two mailboxes full of messages, and returns before rank 0 receives the first of them."""
    channel = world.channel(Number, tag=TAG, capacity=8)
    if world.rank:
        for number in range(16):
            channel.send_nowait(Number(number), 0)
            await world.sleep(0.001)
        flow = world.services._demultiplexers[TAG].flow
        assert flow is not None
        return [len(flow.held[0])]
    await eventually(lambda: 1 in world.services.gone)
    return await asyncio.wait_for(_receive(channel, 16), 60)


def test_held_messages_arrive_after_their_sender_has_returned() -> None:
    received, held = run(return_early, 2)
    assert received == list(range(16))
    assert held > [0], "nothing was held: the test tests nothing"


async def test_a_rank_that_sends_no_more_is_paused_only_once() -> None:
    async with worlds(3) as ranks:
        a, b, c = both(ranks, capacity=2)
        counts = told(ranks)
        flow = ranks[0].services._demultiplexers[TAG].flow
        assert flow is not None
        paused = []
        tell = flow._tell
        flow._tell = lambda message, rank: (paused.append(rank), tell(message, rank))[1]
        await b.send(Number(-1), 0)
        sending = asyncio.ensure_future(send_numbers(c, 100, dest=0))
        received = []
        for _ in range(101):
            await yields(20)
            received.append((await a.receive()).message.value)
        await sending
        assert sorted(received) == list(range(-1, 100))
        assert 20 < counts["Pause"] == counts["Resume"]
        assert paused.count(1) == 2, "one pause and one resumption"


async def test_a_full_queue_leaves_out_pauses_but_no_resumption(
    pair: list[World], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = both(pair, capacity=4)
    await _fill(pair, a)
    monkeypatch.setattr(flow_control, "SENDING_COUNT_MAX", 0)
    sending = asyncio.ensure_future(send_numbers(a, 100))
    assert (await _receive(b, 104))[4:] == list(range(100))
    await sending
    assert not pair[0].services._demultiplexers[TAG].flow.held  # type: ignore[union-attr]


async def test_a_pause_of_a_lost_rank_holds_nothing() -> None:
    async with worlds(2) as pair:
        a, b = both(pair, capacity=4)
        del a, b
        control = pair[1].services._flow_control
        assert control is not None
        control.tell(flow_control.Pause(TAG), 0)
        pair[0].services.engine.transport._hub.lose(1)  # type: ignore[attr-defined]
        await yields(20)
        assert not pair[0].services._demultiplexers[TAG].flow.held  # type: ignore[union-attr]


async def test_the_loss_of_the_reader_fails_the_held_messages() -> None:
    async with worlds(2) as pair:
        a, _ = both(pair, capacity=4)
        await _fill(pair, a)
        sending = asyncio.ensure_future(a.send(Number(1), 1))
        a.send_nowait(Number(2), 1)
        await yields(3)
        pair[0].services.engine.transport._hub.lose(1)  # type: ignore[attr-defined]
        pair[0].services.tell_gone(RankSet((1,)))
        with pytest.raises(RankLostError, match="rank 1"):
            await sending
        assert a.statistics().sending_count == 0


async def test_the_restart_of_the_reader_fails_the_held_messages(pair: list[World]) -> None:
    a, _ = both(pair, capacity=4)
    await _fill(pair, a)
    sending = asyncio.ensure_future(a.send(Number(1), 1))
    await yields(3)
    pair[0].services.note_restarted(1, 1)
    with pytest.raises(RankLostError, match="was restarted before it received the message"):
        await sending


async def test_a_restarted_sender_is_paused(pair: list[World]) -> None:
    a, b = both(pair, capacity=4)
    await a.send(Number(0), 1)
    assert await _receive(b, 1) == [0]
    pair[1].services.note_restarted(0, 1)
    sending = asyncio.ensure_future(send_numbers(a, 100))
    await eventually(lambda: bool(pair[0].services._demultiplexers[TAG].flow.held))  # type: ignore[union-attr]
    assert pair[1].services._demultiplexers[TAG].flow.paused == {0}  # type: ignore[union-attr]
    assert await _receive(b, 100) == list(range(100))
    await sending


async def overfill(world: World) -> list[int]:
    """Rank 0 receives slowly from all others, which send as fast as they can."""
    channel = world.channel(Number, tag=TAG, capacity=8)
    if world.rank:
        await send_numbers(channel, 60, dest=0)
        return []
    received = []
    for _ in range(60 * (world.size - 1)):
        await world.sleep(0.0005)
        envelope = await channel.receive()
        received.append(1000 * envelope.source + envelope.message.value)
    return received


def _is_in_order(received: list[int]) -> bool:
    return all([v for v in received if v // 1000 == rank] == [1000 * rank + n for n in range(60)] for rank in (1, 2))


def test_slow_readers_lose_nothing_in_a_strict_run() -> None:
    assert _is_in_order(run(overfill, 3)[0])


def test_a_replay_does_not_repeat_pauses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = []
    hold = flow_control.TagFlow.hold
    monkeypatch.setattr(flow_control.TagFlow, "hold", lambda self, rank: (held.append(rank), hold(self, rank))[1])
    recorded = simulate(overfill, ranks=3, seed=5, record=tmp_path)
    assert _is_in_order(recorded.results[0])
    assert held, "nobody was paused: the test tests nothing"
    count = len(held)
    assert replay(overfill, recording=read_recording(tmp_path)).report.results == recorded.results
    assert len(held) == count
