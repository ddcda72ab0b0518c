"""Cases for typed channels between ranks: order, bounds, cancellation, scopes."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from dataclasses import dataclass

import asyncdist as ad
from conformance.endpoint import Endpoint


@dataclass(frozen=True, slots=True)
class Number:
    value: int


@dataclass(frozen=True, slots=True)
class Blob:
    index: int
    data: bytes


async def case_messages_arrive_in_order_from_each_rank(end: Endpoint) -> None:
    channel: ad.Channel[Number | Blob] = end.world.channel(Number | Blob, tag=end.tag)  # type: ignore[arg-type]
    count = 300
    draw = random.Random(end.rank)

    async def send() -> None:
        for i in range(count):
            for dest in range(end.size):
                message = Number(i) if i % 3 else Blob(i, bytes([i % 256]) * draw.choice((0, 10, 4000, 60_000)))
                await channel.send(message, dest)

    async def receive() -> None:
        expected = [0] * end.size
        for _ in range(count * end.size):
            message, source, _ = await channel.receive()
            index = message.value if isinstance(message, Number) else message.index
            assert index == expected[source]
            assert isinstance(message, Number) == bool(index % 3)
            if isinstance(message, Blob):
                assert message.data == bytes([index % 256]) * len(message.data)
            expected[source] += 1
        assert expected == [count] * end.size

    await asyncio.gather(send(), receive())
    statistics = channel.statistics()
    assert statistics.sent_count == statistics.received_count == count * end.size
    assert statistics.waiting_count == 0
    await end.barrier()
    channel.close()


async def case_messages_move_at_safe_points(end: Endpoint) -> None:
    """A training rank receives a message at its next safe point, although no task waits for it and no timer polls."""
    channel = end.world.channel(Number, tag=end.tag)
    count = 50
    received: list[tuple[int, int]] = []
    for number in itertools.count():
        if number < count:
            channel.send_nowait(Number(number), end.right)
        elif len(received) == count and not channel.statistics().sending_count:
            break
        await end.world.safe_point()
        while (envelope := channel.receive_nowait()) is not None:
            received.append((envelope.source, envelope.message.value))
    assert received == [(end.left, number) for number in range(count)]
    await end.barrier()
    channel.close()


async def case_cancelled_receives_lose_nothing(end: Endpoint) -> None:
    channel = end.world.channel(Number, tag=end.tag)
    count = 1000
    draw = random.Random(end.rank)

    async def send() -> None:
        for i in range(count):
            await channel.send(Number(i), end.right)
            await end.yields(draw.randrange(3))

    async def receive() -> None:
        received = cancelled = 0
        while received < count:
            task = asyncio.ensure_future(channel.receive())
            await end.yields(draw.randrange(4))
            task.cancel()
            await asyncio.wait([task])
            if task.cancelled():
                cancelled += 1
            else:
                assert task.result().message.value == received
                received += 1
        assert cancelled, "no send was cancelled, so the case tests nothing"

    await asyncio.gather(send(), receive())
    await end.barrier()
    channel.close()


async def case_a_full_channel_stops_its_own_tag_only(end: Endpoint) -> None:
    narrow = end.world.channel(Number, tag=end.tag, capacity=4)
    other = end.world.channel(Number, tag=end.tag + 1, name="other")
    count = 200
    sending = [asyncio.ensure_future(narrow.send(Number(i), end.right)) for i in range(count)]
    for i in range(50):
        await other.send(Number(i), end.right)
        assert (await other.receive()).message == Number(i)
    assert narrow.statistics().waiting_count <= 4
    for i in range(count):
        assert (await narrow.receive()).message == Number(i)
    await asyncio.gather(*sending)
    await end.barrier()
    narrow.close()
    other.close()


async def case_a_channel_opened_late_gets_what_came_early(end: Endpoint) -> None:
    for listens in (False, True):
        tag = end.tag + listens
        # If another channel is open on the tag, early frames are received and kept; otherwise they wait in the
        # transport.
        other = end.world.channel(Number, tag=tag, name="twin") if listens else None
        channel = None if end.rank == 0 else end.world.channel(Number, tag=tag, name="twin")
        if channel is not None:
            for i in range(100):
                await channel.send(Number(i), 0)
        await end.barrier()
        for _ in range(5):
            await end.world.progress()
        if channel is None:
            channel = end.world.channel(Number, tag=tag, name="twin")
            expected = [0] * end.size
            for _ in range(100 * (end.size - 1)):
                message, source, _ = await channel.receive()
                assert message.value == expected[source]
                expected[source] += 1
        await end.barrier()
        channel.close()
        if other is not None:
            other.close()


async def case_scopes_apart_on_one_tag(end: Endpoint) -> None:
    """Two channels with one name, open in turn or at the same time, never receive each other's messages."""
    first = end.world.channel(Number, tag=end.tag, name="twin")
    second = end.world.channel(Number, tag=end.tag, name="twin")
    for i in range(20):
        await second.send(Number(1000 + i), end.right)
        await first.send(Number(i), end.right)
    for i in range(20):
        assert (await first.receive()).message == Number(i)
    await first.send(Number(99), end.right)
    await end.barrier()
    first.close()  # while a message is in it, or on its way
    for i in range(20):
        assert (await second.receive()).message == Number(1000 + i)
    await end.barrier()
    second.close()


async def case_a_message_that_came_during_compute_is_no_timeout(end: Endpoint) -> None:
    channel = end.world.channel(Number, tag=end.tag)
    for _ in range(3):
        receiving = asyncio.ensure_future(channel.receive(timeout_s=0.02))
        await end.yields(2)
        await channel.send(Number(end.rank), end.rank)
        time.sleep(0.05)  # noqa: ASYNC251 training code blocks the loop, longer than the deadline
        assert (await receiving).message == Number(end.rank)
    await end.barrier()
    channel.close()


async def case_several_receivers_share_the_messages(end: Endpoint) -> None:
    channel = end.world.channel(Number, tag=end.tag)
    count, found = 240, []

    async def work() -> None:
        while True:
            envelope = await channel.receive()
            if envelope.message.value < 0:
                return
            found.append(envelope.message.value)
            await end.yields(1)

    workers = [asyncio.ensure_future(work()) for _ in range(4)]
    for i in range(count):
        await channel.send(Number(i), end.right)
    for _ in workers:
        await channel.send(Number(-1), end.right)
    await asyncio.gather(*workers)
    assert sorted(found) == list(range(count))
    await end.barrier()
    channel.close()


async def case_iteration_ends_when_the_channel_closes(end: Endpoint) -> None:
    channel = end.world.channel(Number, tag=end.tag)
    for i in range(10):
        await channel.send(Number(i), end.right)
    found = []

    async def read() -> None:
        async for envelope in channel:
            found.append(envelope.message.value)  # noqa: PERF401 it is read before the iteration ends

    reading = asyncio.ensure_future(read())
    while len(found) < 10:
        await end.world.progress()
    await end.barrier()
    channel.close()
    await reading
    assert found == list(range(10))


async def case_ping_pong_leaves_other_tasks_alive(end: Endpoint) -> None:
    """A rank whose receive always finds a message immediately still lets its other tasks run."""
    channel = end.world.channel(Number, tag=end.tag)
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await end.yields(1)

    counting = asyncio.ensure_future(count_turns())
    await end.yields(1)
    for i in range(2000):
        await channel.send(Number(i), end.rank)
        assert (await channel.receive()).message == Number(i)
    counting.cancel()
    assert turns >= 20
    await end.barrier()
    channel.close()
