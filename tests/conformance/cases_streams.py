"""Cases for ``send_stream`` and ``receive_stream``."""

from __future__ import annotations

import asyncio
import time

import pytest
import torch
from support.facts import naming
from support.odd_tensors import ODD, not_dense, odd_tensors, same

from asyncdist.errors import ClosedError, LocalProtocolError, RemoteProtocolError
from asyncdist.messaging.streams import WINDOW_COUNT, StreamAborted
from conformance.endpoint import Endpoint

#: Chunk size of these streams, which behave like streams with chunks of 16 MiB but take less memory and time.
CHUNK_NBYTES = 1 << 20
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)


def numbers(seed: int, count: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Return a block whose length is a multiple of no chunk's length, so that misplaced chunks differ."""
    generator = torch.Generator().manual_seed(seed)
    block = torch.randint(0, 2 if dtype == torch.bool else 120, (min(count, 65_521),), generator=generator).to(dtype)
    return block.repeat(count // max(1, len(block)) + 1)[:count]


async def exchange(end: Endpoint, tensor: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
    """Let every rank send to its right neighbour and receive from its left neighbour."""
    received, _ = await asyncio.gather(
        end.world.receive_stream(room, end.left), end.world.send_stream(tensor, end.right)
    )
    assert received is room
    return received


def free(end: Endpoint) -> None:
    assert end.world.services.slots.taken_count == end.world.services.slots.discarding_count == 0


async def case_every_size_around_the_chunk(end: Endpoint) -> None:
    chunk = CHUNK_NBYTES
    for nbytes in (0, 1, chunk - 1, chunk, chunk + 1, chunk * (WINDOW_COUNT + 3) + 5):
        sent = numbers(end.rank, nbytes)
        received = await exchange(end, sent, torch.zeros(nbytes, dtype=torch.uint8))
        assert torch.equal(received, numbers(end.left, nbytes)), nbytes
        assert torch.equal(sent, numbers(end.rank, nbytes))
        free(end)


async def case_every_dtype(end: Endpoint) -> None:
    for dtype in DTYPES:
        sent = numbers(end.rank, 1001, dtype).reshape(7, 11, 13)
        received = await exchange(end, sent, torch.zeros(7, 11, 13, dtype=dtype))
        assert torch.equal(received, numbers(end.left, 1001, dtype).reshape(7, 11, 13)), dtype
    scalar = await exchange(end, torch.tensor(end.rank + 0.5), torch.tensor(0.0))
    assert scalar.item() == end.left + 0.5
    parameter = torch.nn.Parameter(torch.full((3,), float(end.rank)))
    received = await exchange(end, parameter, torch.nn.Parameter(torch.zeros(3)))
    assert received.tolist() == [float(end.left)] * 3
    free(end)


async def case_contiguous_tensors_of_odd_layouts(end: Endpoint) -> None:
    """Tensors that torch calls contiguous are sent; other tensors raise an error that the caller can catch."""
    for name, sent in odd_tensors().items():
        if sent.is_contiguous() and not sent.is_conj() and not sent.is_neg():
            room = odd_tensors()[name]
            room.detach().zero_()
            assert same(await exchange(end, sent, room), ODD[name]), name
            continue
        for refused in (end.world.send_stream(sent, end.right), end.world.receive_stream(sent, end.left)):
            with pytest.raises(ValueError, match=r"must be contiguous, got shape|resolve_conj"):
                await refused
    for word, wrong in not_dense().items():
        with pytest.raises(TypeError, match=naming("tensor", word)):
            await end.world.send_stream(wrong, end.right)
    with pytest.raises(TypeError, match=naming("tensor", "list")):
        await end.world.send_stream([1.0], end.right)  # type: ignore[arg-type]
    free(end)


async def case_between_safe_points_of_ranks_that_compute(end: Endpoint) -> None:
    size = CHUNK_NBYTES * 6 + 17
    room = torch.zeros(size, dtype=torch.uint8)
    task = asyncio.ensure_future(exchange(end, numbers(end.rank, size), room))
    step = 0
    while not task.done():
        time.sleep(0.0005 * (1 + end.rank))  # noqa: ASYNC251 a step of training
        step += 1
        await end.world.progress()
    assert torch.equal(await task, numbers(end.left, size))
    assert step > 1
    free(end)


async def case_streams_of_one_pair_meet_in_order(end: Endpoint) -> None:
    sizes = [3, CHUNK_NBYTES + 3, 0, 200_000, 7]
    rooms = [torch.zeros(size, dtype=torch.uint8) for size in sizes]

    async def receive() -> None:
        for room in rooms:
            await end.world.receive_stream(room, end.left)

    async def send() -> None:
        for i, size in enumerate(sizes):
            await end.world.send_stream(numbers(10 * end.rank + i, size), end.right)

    await asyncio.gather(receive(), send())
    for i, room in enumerate(rooms):
        assert torch.equal(room, numbers(10 * end.left + i, sizes[i]))
    free(end)


async def case_several_at_once_with_everybody(end: Endpoint) -> None:
    size, count = CHUNK_NBYTES // 2, 3
    rooms = {(peer, i): torch.zeros(size + i, dtype=torch.uint8) for peer in range(end.size) for i in range(count)}
    receives = [end.world.receive_stream(room, peer) for (peer, _), room in rooms.items()]
    sends = [
        end.world.send_stream(numbers(100 * end.rank + 10 * peer + i, size + i), peer)
        for peer in range(end.size)
        for i in range(count)
    ]
    await asyncio.gather(*receives, *sends)
    for (peer, i), room in rooms.items():
        assert torch.equal(room, numbers(100 * peer + 10 * end.rank + i, size + i))
    free(end)


async def case_concurrent_sends_to_a_receiver_that_takes_one_at_a_time(end: Endpoint) -> None:
    """The slot of a finished stream is granted again before its sender has noticed the end of that stream."""
    size = CHUNK_NBYTES + 1
    sends = [
        asyncio.ensure_future(end.world.send_stream(numbers(10 * end.rank + i, size), end.right)) for i in range(4)
    ]
    for i in range(4):
        room = torch.zeros(size, dtype=torch.uint8)
        await end.world.receive_stream(room, end.left)
        assert torch.equal(room, numbers(10 * end.left + i, size))
    await asyncio.gather(*sends)
    free(end)


async def case_sizes_that_differ_are_refused_on_both_ends(end: Endpoint) -> None:
    big = CHUNK_NBYTES + 9
    for sent, expected in ((10, 11), (11, 10), (big, 5), (5, big), (0, 6)):
        receiving = asyncio.ensure_future(end.world.receive_stream(torch.zeros(expected, dtype=torch.uint8), end.left))
        with pytest.raises(LocalProtocolError, match=rf"{expected} bytes.* {sent}\b"):
            await end.world.send_stream(numbers(0, sent), end.right)
        with pytest.raises(RemoteProtocolError):
            await receiving
        received = await exchange(end, numbers(end.rank, 99), torch.zeros(99, dtype=torch.uint8))
        assert torch.equal(received, numbers(end.left, 99)), (sent, expected)
        free(end)


async def case_nothing_expected_but_something_sent(end: Endpoint) -> None:
    """A grant of zero bytes needs no answer; an abort as its answer would end the next stream on that slot."""
    receiving = asyncio.ensure_future(end.world.receive_stream(torch.zeros(0), end.left))
    with pytest.raises(LocalProtocolError, match="0 bytes"):
        await end.world.send_stream(numbers(0, 6), end.right)
    await asyncio.wait([receiving])
    await end.barrier()
    received = await exchange(end, numbers(end.rank, 99), torch.zeros(99, dtype=torch.uint8))
    assert torch.equal(received, numbers(end.left, 99))
    free(end)


async def case_a_receiver_that_gives_up(end: Endpoint) -> None:
    """The slot is released after the answer, and the next stream is complete."""
    size = CHUNK_NBYTES * 7
    for yields in (0, 1, 2, 5, 9, 30):
        room = torch.zeros(size, dtype=torch.uint8)
        sending = asyncio.ensure_future(end.world.send_stream(numbers(end.rank, size), end.right))
        receiving = asyncio.ensure_future(end.world.receive_stream(room, end.left))
        await end.yields(yields)
        receiving.cancel()
        # In the middle of a stream, the sender gets ClosedError; a send that never saw the grant waits for the next
        # receive.
        late = asyncio.ensure_future(end.world.receive_stream(room, end.left))
        await asyncio.wait([sending, receiving])
        assert receiving.cancelled() or receiving.exception() is None
        await asyncio.wait([sending])
        assert isinstance(sending.exception(), ClosedError | None)
        await end.barrier()
        late.cancel()
        await asyncio.wait([late])
        await end.engine.until(lambda: end.world.services.slots.taken_count == 0)
        await end.barrier()
        received = await exchange(end, numbers(end.rank + 50, size), room)
        assert torch.equal(received, numbers(end.left + 50, size))
        free(end)


async def case_a_sender_that_gives_up(end: Endpoint) -> None:
    """The receiver is notified at once, and the next stream is complete."""
    size = CHUNK_NBYTES * 7
    for yields in (1, 3, 6, 12, 40):
        room = torch.zeros(size, dtype=torch.uint8)
        receiving = asyncio.ensure_future(end.world.receive_stream(room, end.left))
        sending = asyncio.ensure_future(end.world.send_stream(numbers(end.rank, size), end.right))
        await end.yields(yields)
        sending.cancel()
        await asyncio.wait([sending])
        assert sending.cancelled() or sending.exception() is None
        # A send that is cancelled before its grant arrives has not happened: the receive meets the next send.
        again = asyncio.ensure_future(end.world.send_stream(numbers(end.rank, size), end.right))
        await asyncio.wait([receiving])
        if receiving.exception() is not None:
            assert isinstance(receiving.exception(), StreamAborted)
            await end.world.receive_stream(room, end.left)
        assert torch.equal(room, numbers(end.left, size))
        await end.barrier()
        again.cancel()  # if the first stream was complete, no rank waits for this one
        await asyncio.wait([again])
        await end.engine.until(lambda: end.world.services.slots.taken_count == 0)
        free(end)
        await end.barrier()


async def case_what_cannot_be_streamed_is_refused(end: Endpoint) -> None:
    wide = torch.zeros(4, 6)
    for bad in (wide.t(), wide[:, ::2]):
        with pytest.raises(ValueError, match="contiguous"):
            await end.world.send_stream(bad, end.right)
        with pytest.raises(ValueError, match="contiguous"):
            await end.world.receive_stream(bad, end.left)
    with pytest.raises(TypeError, match="meta"):
        await end.world.send_stream(torch.zeros(3, device="meta"), end.right)
    for rank in (-1, end.size, 0.0):
        with pytest.raises(LocalProtocolError, match=naming(rank)):
            await end.world.send_stream(wide, rank)  # type: ignore[arg-type]
        with pytest.raises(LocalProtocolError, match=naming(rank)):
            await end.world.receive_stream(wide, rank)  # type: ignore[arg-type]
    free(end)
