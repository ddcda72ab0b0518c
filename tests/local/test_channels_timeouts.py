"""Tests receiving from channels: timeouts, cancellation, and receivers that wait in turn."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import pytest
from support.channels import TAG, Number, Word, both
from support.local import yields

from asyncdist import World
from asyncdist.errors import ClosedError, RankLostError


async def test_a_receive_that_fails_does_not_keep_what_came_meanwhile(pair: list[World]) -> None:
    """A wildcard receive fails in this way if the sender of a large message dies in the middle of it."""
    sender, receiver = both(pair)
    await yields(5)
    demultiplexer = receiver.demultiplexer
    request: Any = demultiplexer.receiver.request
    request._matcher.withdraw(request)  # matched: nothing else goes into it
    sender.send_nowait(Number(1), 1)
    await yields(5)  # its wake-up has been processed
    request.error = RankLostError("rank 3 is gone", rank=3)
    assert demultiplexer.receiver.poll() == 0
    await yields(5)
    envelope = receiver.receive_nowait()
    assert envelope is not None and envelope.message == Number(1)


async def test_timeout_reports_messages_for_a_channel_that_is_not_open(pair: list[World]) -> None:
    """Regression: two ranks that opened one tag with different message types waited for each other silently."""
    numbers, words = pair[0].channel(Number, tag=TAG), pair[1].channel(Word, tag=TAG)
    for i in range(2):
        words.send_nowait(Word(str(i)), 0)
    with pytest.raises(TimeoutError) as caught:
        await numbers.receive(timeout_s=0.05)
    assert str(caught.value).startswith(
        "Number: no message arrived for 0.05 s; 2 messages on tag 77 wait for a channel that this rank has not opened, "
        "from rank 1 ("
    )


async def test_waiting_with_messages_for_an_unopened_channel_logs_once(
    pair: list[World], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncdist.messaging.demultiplexer.EARLY_PATIENCE_S", 0.01)
    numbers, _ = both(pair)
    second = pair[1].channel(Number, tag=TAG)
    second.send_nowait(Number(1), 0)
    await yields(20)
    assert not caplog.records, "no task waits yet, so nothing may be logged"
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await numbers.receive(timeout_s=0.1)
        second.send_nowait(Number(2), 0)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1, told
    assert told[0].startswith("awaiting Number for 0.01 s: 1 message on tag 77 ")
    opened = pair[0].channel(Number, tag=TAG)
    assert (await opened.receive()).message.value == 1
    assert pair[0].services.early_frames() == []


async def test_a_channel_that_is_opened_in_time_is_not_told_of(
    pair: list[World], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncdist.messaging.demultiplexer.EARLY_PATIENCE_S", 0.01)
    numbers, _ = both(pair)
    second = pair[1].channel(Number, tag=TAG)
    waiting = asyncio.ensure_future(numbers.receive(timeout_s=0.1))
    await yields(2)
    second.send_nowait(Number(1), 0)
    await pair[0].services.engine.until(lambda: len(pair[0].services.early_frames()) == 1)
    opened = pair[0].channel(Number, tag=TAG)
    with pytest.raises(TimeoutError, match=r"0\.1 s$"):
        await waiting
    assert (await opened.receive()).message.value == 1
    assert not caplog.records


async def test_receive_times_out_and_loses_nothing(pair: list[World]) -> None:
    a, b = both(pair)
    for timeout_s in (0, 0.01, -1):
        with pytest.raises(TimeoutError):
            await b.receive(timeout_s=timeout_s)
    await a.send(Number(1), 1)
    assert (await b.receive(timeout_s=0)).message == Number(1)
    waiting = asyncio.ensure_future(b.receive(timeout_s=60))
    await yields(5)
    await a.send(Number(2), 1)
    assert (await waiting).message == Number(2)


async def test_a_message_that_lies_there_after_a_gap_is_no_timeout(pair: list[World]) -> None:
    a, b = both(pair)
    waiting = asyncio.ensure_future(b.receive(timeout_s=0.01))
    await yields(2)
    a.send_nowait(Number(1), 1)
    time.sleep(0.03)  # noqa: ASYNC251 training code blocks the loop
    assert (await waiting).message == Number(1)


async def test_timeout_counts_from_the_call_while_others_are_served(pair: list[World]) -> None:
    """A receiver whose wake-ups are spent on another one still gives up in time."""
    _, b = both(pair)
    loop = asyncio.get_running_loop()
    waiting = asyncio.ensure_future(b.receive(timeout_s=0.2))
    await yields(2)
    began_at = loop.time()
    while not waiting.done():
        for waiter in list(b.inbox.waiters):  # as if a message had arrived and a different task had received it
            if not waiter.done():
                waiter.set_result(None)
        b.inbox.waiters.clear()
        await asyncio.sleep(0.02)
        assert loop.time() - began_at < 60
    with pytest.raises(TimeoutError):
        await waiting


async def test_a_cancelled_receiver_passes_its_message_on(pair: list[World]) -> None:
    a, b = both(pair)
    first, second = (asyncio.ensure_future(b.receive()) for _ in range(2))
    await yields(3)
    a.send_nowait(Number(1), 1)
    pair[1].services.engine.poll()  # the first one's wake-up; it has not run yet
    first.cancel()
    assert (await second).message == Number(1)
    assert first.cancelled()


async def test_waiting_receivers_are_served_in_turn(pair: list[World]) -> None:
    a, b = both(pair)
    tasks = [asyncio.ensure_future(b.receive()) for _ in range(5)]
    await yields(3)
    for i in range(5):
        await a.send(Number(i), 1)
    assert [(await task).message.value for task in tasks] == [0, 1, 2, 3, 4]


async def test_close_wakes_every_receiver(pair: list[World]) -> None:
    _, b = both(pair)
    tasks = [asyncio.ensure_future(b.receive()) for _ in range(3)]
    tasks.append(asyncio.ensure_future(b.receive(timeout_s=60)))
    await yields(3)
    b.close()
    b.close()
    for task in tasks:
        with pytest.raises(ClosedError):
            await task


async def test_the_failure_of_the_job_wakes_every_receiver(pair: list[World]) -> None:
    _, b = both(pair)
    tasks = [asyncio.ensure_future(b.receive()), asyncio.ensure_future(b.receive(timeout_s=60))]
    await yields(3)
    pair[1].services.engine.fail(RankLostError("rank 0 failed", rank=0))
    for task in tasks:
        with pytest.raises(RankLostError):
            await task
    with pytest.raises(RankLostError):
        await b.receive()


@pytest.mark.parametrize("to_self", [True, False])
async def test_a_receiver_that_always_finds_a_message_lets_others_run(pair: list[World], to_self: bool) -> None:
    a, b = both(pair)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await yields(1)

    counting = asyncio.ensure_future(count())
    for i in range(500):
        if to_self:
            b.send_nowait(Number(i), 1)
        else:
            a.send_nowait(Number(i), 1)
        assert (await b.receive()).message == Number(i)
    assert turns >= 5
    for i in range(500):
        a.send_nowait(Number(i), 1)
    turns = 0
    for _ in range(500):
        await b.receive()
    assert turns >= 5
    counting.cancel()


async def test_a_thousand_random_cancellations_lose_nothing(pair: list[World]) -> None:
    a, b = both(pair)
    draw = random.Random(7)
    found: list[int] = []
    sent = cancelled = 0
    while cancelled < 1000:
        tasks = [asyncio.ensure_future(b.receive()) for _ in range(draw.randrange(1, 4))]
        await yields(draw.randrange(3))
        for _ in range(draw.randrange(3)):
            a.send_nowait(Number(sent), 1)
            sent += 1
        if draw.random() < 0.5:
            pair[1].services.engine.poll()
        await yields(draw.randrange(3))
        for task in draw.sample(tasks, len(tasks)):
            task.cancel()
        await asyncio.wait(tasks)
        cancelled += sum(task.cancelled() for task in tasks)
        found += [task.result().message.value for task in tasks if not task.cancelled()]
    while len(found) < sent:
        found.append((await b.receive(timeout_s=60)).message.value)
    assert sorted(found) == list(range(sent))
    assert sent > 300
