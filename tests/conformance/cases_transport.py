"""Cases for the transports' contract: docs/architecture.md, section 3, and `asyncdist/transports/base.py`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import random
import zlib
from collections import Counter

import pytest
import torch

from asyncdist.errors import AsyncdistError, TruncationError
from asyncdist.transports.base import ANY_SOURCE, Request
from asyncdist.waits import A_CONDITION
from conformance.endpoint import Endpoint

EAGER = 65536
#: Sizes around every limit between eager and rendezvous messages of the known transports.
SIZES = (0, 1, 7, 200, 4095, 4096, 4097, EAGER - 1, EAGER, EAGER + 1, 300_000)
MIB = 1 << 20


def payload(*key: int, nbytes: int) -> bytes:
    """Return bytes that differ for every key, and begin with the key if it fits."""
    head = b"".join(part.to_bytes(4, "little") for part in key)
    seed = zlib.crc32(head)
    return (head + seed.to_bytes(4, "little") * (nbytes // 4 + 1))[:nbytes]


def pattern(rank: int, nbytes: int) -> torch.Tensor:
    return (torch.arange(nbytes // 4, dtype=torch.int32) * 7919 + rank * 104_729).view(torch.uint8)


async def case_fifo_per_source_and_tag(end: Endpoint) -> None:
    count = 200
    sizes = [random.Random(end.left).choice(SIZES) for _ in range(count)]

    async def send() -> None:
        draw = random.Random(end.rank)
        sends = [end.send(payload(end.rank, i, nbytes=draw.choice(SIZES)), end.right) for i in range(count)]
        for start in range(0, count, 10):
            await asyncio.gather(*sends[start : start + 10])

    async def receive() -> None:
        draw = random.Random(end.left)
        for i in range(count):
            data, source = await end.receive(max(SIZES), end.left)
            assert source == end.left
            assert data == payload(end.left, i, nbytes=draw.choice(SIZES)), f"message {i} of {sizes[i]} bytes"

    await asyncio.gather(send(), receive())


async def case_posted_receives_match_in_order(end: Endpoint) -> None:
    count, window = 96, 8
    sends = [asyncio.ensure_future(end.send(payload(i, nbytes=SIZES[i % 11]), end.right)) for i in range(count)]
    for start in range(0, count, window):
        found = await asyncio.gather(*(end.receive(max(SIZES), end.left) for _ in range(window)))
        assert [data for data, _ in found] == [
            payload(start + i, nbytes=SIZES[(start + i) % 11]) for i in range(window)
        ]
    await asyncio.gather(*sends)


async def case_tags_are_independent(end: Endpoint) -> None:
    sends = [
        asyncio.ensure_future(end.send(payload(tag, i, nbytes=SIZES[-1 - i % 3]), end.right, tag))
        for tag in (0, 1, 2)
        for i in range(6)
    ]
    for tag in (2, 0, 1):
        for i in range(6):
            data, _ = await end.receive(max(SIZES), end.left, tag)
            assert data == payload(tag, i, nbytes=SIZES[-1 - i % 3])
    await asyncio.gather(*sends)


async def case_the_smallest_and_the_largest_tag_work(end: Endpoint) -> None:
    assert end.transport.capabilities.tag_max >= 32767
    for tag in (0, 32767):
        await end.engine.send(payload(tag, end.rank, nbytes=9), end.right, tag)
    for tag in (32767, 0):
        buffer = bytearray(9)
        assert await end.engine.receive(buffer, end.left, tag) == (end.left, 9)
        assert buffer == payload(tag, end.left, nbytes=9)


async def case_any_source_names_the_sender_and_keeps_its_order(end: Endpoint) -> None:
    count = 60
    sends = [asyncio.ensure_future(end.send(payload(end.rank, i, nbytes=8 + i * 2000), 0)) for i in range(count)]
    if end.rank == 0:
        seen: Counter[int] = Counter()
        for _ in range(count * end.size):
            data, source = await end.receive(8 + count * 2000)
            assert data == payload(source, seen[source], nbytes=8 + seen[source] * 2000)
            seen[source] += 1
        assert seen == dict.fromkeys(range(end.size), count)
    await asyncio.gather(*sends)


async def case_nothing_is_lost_or_duplicated(end: Endpoint) -> None:
    count = 40
    draw = random.Random(end.rank)
    sends = []
    for i in range(count):
        for dest in draw.sample(range(end.size), end.size):
            sends.append(
                asyncio.ensure_future(end.send(payload(end.rank, dest, i, nbytes=12 + draw.choice(SIZES)), dest))
            )
            if draw.random() < 0.2:
                await end.yields(draw.randrange(4))
    seen = set()
    for _ in range(count * end.size):
        data, source = await end.receive(12 + max(SIZES))
        claimed, dest, index = (int.from_bytes(data[i : i + 4], "little") for i in (0, 4, 8))
        assert (claimed, dest) == (source, end.rank)
        assert data == payload(claimed, dest, index, nbytes=len(data))
        seen.add((source, index))
    assert seen == {(source, i) for source in range(end.size) for i in range(count)}
    await asyncio.gather(*sends)
    await end.barrier()
    task = asyncio.ensure_future(end.receive(12 + max(SIZES)))
    for _ in range(50):
        await end.world.progress()
    assert not task.done(), "a message arrived twice"
    task.cancel()
    await asyncio.wait([task])


async def case_a_message_larger_than_its_buffer_names_both_sizes(end: Endpoint) -> None:
    # Open MPI 5.0.11 writes past the buffer from 4 KiB on (see asyncdist/transports/mpi.py).
    largest = 3000 if end.transport.name == "mpi" else MIB
    for source in (end.left, ANY_SOURCE):
        for nbytes in (1000, largest):
            sending = asyncio.ensure_future(end.send(payload(nbytes, nbytes=nbytes), end.right))
            with pytest.raises(TruncationError) as caught:
                await end.receive(10, source)
            assert caught.value.buffer_nbytes == 10
            assert "10 bytes" in str(caught.value)
            assert caught.value.message_nbytes in (nbytes, None), (
                "message_nbytes must be the size, or None under MPICH, which does not report it"
            )
            assert (str(nbytes) if caught.value.message_nbytes else "more than") in str(caught.value)
            if "MPICH" not in end.transport.describe():
                assert caught.value.message_nbytes == nbytes
            await sending
            # The link continues to work, in order, on this tag as well.
            sends = [asyncio.ensure_future(end.send(payload(i, nbytes=i * 50_000), end.right)) for i in range(3)]
            for i in range(3):
                assert await end.receive(200_000, source) == (payload(i, nbytes=i * 50_000), end.left)
            await asyncio.gather(*sends)
            await end.barrier()


async def case_a_send_buffer_may_be_reused_after_completion(end: Endpoint) -> None:
    for nbytes in SIZES[1:]:
        buffer = bytearray(nbytes)

        async def send(buffer: bytearray = buffer, nbytes: int = nbytes) -> None:
            for i in range(8):
                buffer[:] = payload(end.rank, i, nbytes=nbytes)
                await end.send(buffer, end.right)
                buffer[:] = b"\xff" * nbytes

        async def receive(nbytes: int = nbytes) -> None:
            for i in range(8):
                await end.yields(3)  # sends are posted long before their receives
                assert await end.receive(nbytes, end.left) == (payload(end.left, i, nbytes=nbytes), end.left)

        await asyncio.gather(send(), receive())


async def case_receives_abandoned_before_the_message(end: Endpoint) -> None:
    for source in (end.left, ANY_SOURCE):
        for i in range(60):
            task = asyncio.ensure_future(end.receive(1 + i * 1000 % 70_000, source))
            await end.yields(i % 4)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                raise AssertionError(await task)
        await end.barrier()
        sends = [asyncio.ensure_future(end.send(payload(i, nbytes=i * 9000), end.right)) for i in range(10)]
        for i in range(10):
            assert await end.receive(100_000, source) == (payload(i, nbytes=i * 9000), end.left)
        await asyncio.gather(*sends)
        await end.barrier()


async def case_receives_abandoned_while_messages_come(end: Endpoint) -> None:
    count = 75
    draw = random.Random(100 + end.rank)

    async def send() -> None:
        for i in range(count):
            await end.send(payload(end.rank, i, nbytes=8 + 1400 * i), end.right)
            await end.yields(i % 3)

    async def receive() -> None:
        received = abandoned = 0
        while received < count:
            task = asyncio.ensure_future(end.receive(120_000 + draw.randrange(5), end.left))
            await end.yields(draw.randrange(5))
            task.cancel()
            await asyncio.wait([task])
            if task.cancelled():
                abandoned += 1
                continue
            data, source = task.result()
            assert source == end.left
            assert data == payload(end.left, received, nbytes=8 + 1400 * received), f"message {received}"
            received += 1
        assert abandoned, "no message was abandoned, so the case tests nothing"

    await asyncio.gather(send(), receive())


async def case_receives_whose_deadline_passes(end: Endpoint) -> None:
    timeouts = 0
    for timeout_s in (0, 0, 0.001, 0, 0.003):
        try:
            async with asyncio.timeout(timeout_s):
                await end.receive(10, end.left)
        except TimeoutError:
            timeouts += 1
    assert timeouts == 5
    await end.barrier()
    await end.send(b"late", end.right)
    assert await end.receive(10, end.left) == (b"late", end.left)


async def case_many_receives_abandoned_at_once(end: Endpoint) -> None:
    tasks = [asyncio.ensure_future(end.receive(100 + i, end.left)) for i in range(40)]
    await end.yields(2)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert all(task.cancelled() for task in tasks)
    await end.barrier()
    for i in range(50):
        await end.send(payload(i, nbytes=90), end.right)
    for i in range(50):
        assert await end.receive(90, end.left) == (payload(i, nbytes=90), end.left)


async def case_a_message_for_an_abandoned_receive_waits_for_the_next_one(end: Endpoint) -> None:
    """If several tasks wait for messages with one key, the first of them takes the message."""
    await end.barrier()
    sends = [asyncio.ensure_future(end.send(payload(i, nbytes=200_000), end.right)) for i in range(4)]
    first = asyncio.ensure_future(end.receive(250_000, end.left))
    await end.yields(1)
    first.cancel()
    rest = [asyncio.ensure_future(end.receive(200_000, end.left)) for _ in range(4)]
    await asyncio.wait([first])
    if first.cancelled():
        found = [(await task)[0] for task in rest]
    else:
        found = [first.result()[0], *[(await task)[0] for task in rest[:3]]]
        rest[3].cancel()
        await asyncio.wait([rest[3]])
    assert found == [payload(i, nbytes=200_000) for i in range(4)]
    await asyncio.gather(*sends)


async def case_sends_to_self(end: Endpoint) -> None:
    for nbytes in (0, 3, EAGER, 2 * MIB):
        data = payload(nbytes, end.rank, nbytes=nbytes)
        sending = asyncio.ensure_future(end.send(data, end.rank))
        assert await end.receive(nbytes, end.rank) == (data, end.rank)
        await sending
        receiving = asyncio.ensure_future(end.receive(nbytes, ANY_SOURCE))
        await end.yields(1)
        await end.send(data, end.rank)
        assert await receiving == (data, end.rank)


async def case_messages_of_zero_bytes(end: Endpoint) -> None:
    for room in (0, 1, 100):
        task = asyncio.ensure_future(end.receive(room, end.left))
        await end.yields(1)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
    await end.barrier()
    for _ in range(20):
        await end.send(b"", end.right)
    await end.send(b"end", end.right)
    for i in range(20):
        assert await end.receive(5 * (i % 2), end.left) == (b"", end.left)
    assert await end.receive(3, end.left) == (b"end", end.left)


async def case_an_empty_message_overtaken_by_cancellation(end: Endpoint) -> None:
    """The empty message of an abandoned receive arrives anyway, whether or not the receive has a buffer."""
    for i in range(60):
        room = i % 2
        await end.send(b"", end.right)
        task = asyncio.ensure_future(end.receive(room, end.left))
        await end.yields(i % 4)
        task.cancel()
        await asyncio.wait([task])
        if task.cancelled():
            assert await end.receive(1 - room, end.left) == (b"", end.left)
        await end.barrier()


async def case_large_messages_both_ways_at_once(end: Endpoint) -> None:
    for nbytes in (2 * MIB, 16 * MIB):  # more than any buffer on the way can store
        mine, buffer = pattern(end.rank, nbytes), torch.zeros(nbytes, dtype=torch.uint8)
        (source, got), _ = await asyncio.gather(
            end.engine.receive(buffer.numpy(), end.left, end.tag), end.engine.send(mine.numpy(), end.right, end.tag)
        )
        assert (source, got) == (end.left, nbytes)
        assert torch.equal(buffer, pattern(end.left, nbytes))


async def case_a_persistent_wildcard_receive(end: Endpoint) -> None:
    buffer = bytearray(100_000)
    inlet = end.transport.persistent_receive(buffer, end.tag)
    count, seen = 50, Counter[int]()
    sends = [
        asyncio.ensure_future(end.send(payload(end.rank, i, nbytes=8 + i * 1900), dest))
        for i in range(count)
        for dest in range(end.size)
    ]
    for _ in range(count * end.size):
        inlet.start()
        while not inlet.test():
            await end.world.safe_point()
        source = inlet.source
        assert bytes(buffer[: inlet.nbytes]) == payload(source, seen[source], nbytes=8 + seen[source] * 1900)
        seen[source] += 1
    assert seen == dict.fromkeys(range(end.size), count)
    await asyncio.gather(*sends)
    await end.barrier()
    for _ in range(3):  # cancelled, and posted again
        inlet.start()
        inlet.cancel()
        while not inlet.test():
            await end.world.safe_point()
        assert inlet.cancelled
    inlet.start()
    await end.barrier()
    await end.send(b"once more", end.right)
    while not inlet.test():
        await end.world.safe_point()
    assert not inlet.cancelled
    assert (inlet.source, bytes(buffer[: inlet.nbytes])) == (end.left, b"once more")


async def case_a_cancelled_receive_is_tested_to_its_end(end: Endpoint) -> None:
    buffer = bytearray(10)
    for source in (end.left, ANY_SOURCE):
        request = end.transport.irecv(buffer, source, end.tag)
        assert not request.test()
        request.cancel()
        while not request.test():
            await end.world.safe_point()
        assert request.cancelled
    await end.barrier()
    await end.send(b"after", end.right)
    assert await end.receive(10, end.left) == (b"after", end.left)


async def case_receives_cancelled_at_random_among_messages_of_all_sizes(end: Endpoint) -> None:
    """The order of posting alone decides which receive gets which message, even if some receives are cancelled."""
    count, window = 200, 6
    draw = random.Random(700 + end.rank)
    sizes = (4, 100, 20_000, 90_000, 200_000)
    posted: dict[int, tuple[Request, bytearray]] = {}
    contents: dict[int, bytes] = {}
    cancelled = []

    async def send() -> None:
        draw_size = random.Random(800 + end.rank)
        for i in range(count):
            await end.send(payload(end.rank, i, nbytes=draw_size.choice(sizes)), end.right)
            await asyncio.sleep(0.002 if i % 3 == 0 else 0)  # the receiver is sometimes ahead, and sometimes behind

    def on_done(place: int, error: AsyncdistError | None) -> None:
        assert error is None
        request, buffer = posted.pop(place)
        if request.cancelled:
            cancelled.append(place)
        else:
            contents[place] = bytes(buffer[: request.nbytes])

    async def receive() -> None:
        for place in itertools.count():
            if len(contents) == count:
                break
            buffer, source = bytearray(sizes[-1]), ANY_SOURCE if draw.random() < 0.03 else end.left
            request = end.transport.irecv(buffer, source, end.tag)
            posted[place] = request, buffer
            end.engine.watch(request, A_CONDITION, functools.partial(on_done, place))
            if posted and draw.random() < 0.15:
                posted[draw.choice(list(posted))][0].cancel()
            await end.engine.until(lambda: len(posted) < window or len(contents) == count)
            await end.yields(draw.randrange(4))
        for request, _ in list(posted.values()):
            request.cancel()
        end.engine.wake()
        await end.engine.until(lambda: not posted)

    await asyncio.gather(send(), receive())
    draw_size = random.Random(800 + end.left)
    expected = [payload(end.left, i, nbytes=draw_size.choice(sizes)) for i in range(count)]
    for i, place in enumerate(sorted(contents)):
        assert contents[place] == expected[i], f"message {i}"
    assert cancelled, "no request was cancelled, so the case tests nothing"


async def case_many_requests_at_once(end: Endpoint) -> None:
    count = 400
    buffers = {(peer, i): bytearray(8 + i * 100) for peer in range(end.size) for i in range(count // end.size)}
    done: Counter[str] = Counter()

    def on_done(kind: str, error: AsyncdistError | None) -> None:
        assert error is None
        done[kind] += 1

    for i in range(count // end.size):
        for peer in range(end.size):
            request = end.transport.irecv(buffers[peer, i], peer, end.tag)
            end.engine.watch(request, A_CONDITION, lambda error: on_done("receive", error))
    await end.barrier()
    for i in range(count // end.size):
        for peer in range(end.size):
            request = end.transport.isend(payload(end.rank, i, nbytes=8 + i * 100), peer, end.tag)
            end.engine.watch(request, A_CONDITION, lambda error: on_done("send", error))
    await end.engine.until(lambda: done["send"] == done["receive"] == len(buffers))
    for (peer, i), buffer in buffers.items():
        assert buffer == payload(peer, i, nbytes=8 + i * 100)


async def case_progress_without_the_driver(end: Endpoint) -> None:
    """A rank that only calls ``progress``, as training code does, completes its requests."""
    data, buffer = pattern(end.rank, MIB), bytearray(MIB)
    done: list[BaseException | None] = []
    end.engine.watch(end.transport.irecv(buffer, end.left, end.tag), A_CONDITION, done.append)
    end.engine.watch(end.transport.isend(data.numpy(), end.right, end.tag), A_CONDITION, done.append)
    while len(done) < 2:
        await end.world.progress(budget_s=0.001)
    assert done == [None, None]
    assert bytes(buffer) == bytes(pattern(end.left, MIB).numpy())
