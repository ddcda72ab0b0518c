"""Tests the internals of bulk streams: windows, answers, slots. Between ranks: ``conformance``."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Iterator

import msgspec
import pytest
import torch
from support.local import engines, eventually, worlds, yields

import asyncdist as ad
from asyncdist import tags
from asyncdist.errors import BusyError, ClosedError, RankLostError, RemoteProtocolError
from asyncdist.messaging import streams
from asyncdist.messaging.outbound_streams import OutboundStream
from asyncdist.messaging.streams import Cancel, Grant, InboundStream, Slots, StreamAborted
from asyncdist.tensors.byte_views import byte_view, split

#: Above the local transport's eager limit, so that a chunk waits for its receive.
CHUNK = 70_000


def chunks_of(count: int, nbytes: int = CHUNK) -> list[memoryview]:
    return [memoryview(bytes([i + 1]) * nbytes) for i in range(count)]


def rooms(count: int, nbytes: int = CHUNK) -> list[memoryview]:
    return [memoryview(bytearray(nbytes)) for _ in range(count)]


async def read(stream: InboundStream, **options: float) -> list[int]:
    return [index async for index in stream.chunks(**options)]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(streams, "USER_CHUNK_NBYTES", CHUNK)
    yield


# --------------------------------------------------------------------------------------------------------------- bytes


def test_byte_view_is_the_tensors_own_memory() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int64):
        tensor = torch.zeros(3, 5, dtype=dtype)
        view = byte_view(tensor)
        assert len(view) == tensor.numel() * tensor.element_size()
        view[:] = b"\x01" * len(view)
        assert tensor.any()
    assert len(byte_view(torch.zeros(0, 3))) == 0
    assert len(byte_view(torch.zeros(()))) == 4
    assert len(byte_view(torch.nn.Parameter(torch.zeros(2)))) == 8
    byte_view(torch.zeros(0))[:] = b""


def test_split_covers_everything_once() -> None:
    view = memoryview(bytes(range(100)))
    for nbytes in (1, 7, 99, 100, 101):
        parts = split(view, nbytes)
        assert b"".join(parts) == view
        assert all(len(part) == nbytes for part in parts[:-1])
    assert split(memoryview(b""), 5) == []


# ----------------------------------------------------------------------------------------------------- the two ends


async def test_the_window_bounds_what_is_posted_and_targets_may_repeat() -> None:
    """Eight chunks pass through two buffers: the caller reads each buffer before it is posted again."""
    async with engines(2) as (hub, made):
        slots = Slots(made[1])
        two = rooms(2)
        sending = None
        found = []
        with slots.inbound(0, [two[i % 2] for i in range(8)], lambda slot: None, window=2) as stream:
            sending = asyncio.ensure_future(OutboundStream(Slots(made[0]), chunks_of(8), 1, stream.slot).run())
            async for index in stream.chunks():
                assert len(hub.matchers[1]._posted.get(tags.BULK_FIRST + stream.slot, ())) <= 2
                found.append((index, bytes(two[index % 2][:2])))
        assert found == [(i, bytes([i + 1]) * 2) for i in range(8)]
        assert await sending is True
        assert stream.received_nbytes == slots.received_nbytes == 8 * CHUNK
        assert slots.taken_count == slots.sent_nbytes == 0
        assert made[0].outstanding() == made[1].outstanding() == ()


async def test_the_sender_has_no_more_under_way_than_its_window() -> None:
    async with engines(2) as (hub, made):
        stream = OutboundStream(Slots(made[0]), chunks_of(10), 1, 3)
        task = asyncio.ensure_future(stream.run())
        await yields(20)
        assert stream.under_way_count == len(hub.matchers[1]._unexpected[tags.BULK_FIRST + 3]) == streams.WINDOW_COUNT
        for room in rooms(10):
            await made[1].receive(room, 0, tags.BULK_FIRST + 3)
        assert await task is True
        assert stream.sent_nbytes == 10 * CHUNK


async def test_a_stopped_sender_answers_with_the_abort() -> None:
    async with engines(2) as (_, made):
        slots = Slots(made[1])
        with (
            pytest.raises(StreamAborted, match="rank 0 aborted its stream") as caught,
            slots.inbound(0, rooms(10), lambda slot: None) as stream,
        ):
            outbound = OutboundStream(Slots(made[0]), chunks_of(10), 1, stream.slot)
            sending = asyncio.ensure_future(outbound.run())
            async for index in stream.chunks():
                if index == 0:
                    outbound.stop()
        assert await sending is False
        assert caught.value.rank == 0
        assert caught.value.received_nbytes == stream.received_nbytes
        assert CHUNK <= stream.received_nbytes < 10 * CHUNK
        assert slots.received_nbytes == 0, "only bytes of complete streams may be counted"
        assert slots.taken_count == slots.discarding_count == 0
        await eventually(lambda: not made[1].outstanding())


@pytest.mark.parametrize("taken", [0, 1, 3, 5, 9])
async def test_a_receiver_that_gives_up_discards_until_the_answer(taken: int) -> None:
    """At any moment of cancellation, the slot is released and the next stream in it is complete."""
    async with engines(2) as (_, made):
        slots = Slots(made[1])
        told: list[int] = []

        async def give_up() -> None:
            with slots.inbound(0, rooms(10), cancel) as stream:
                inbound.append(stream)
                async for index in stream.chunks():
                    if index == taken:
                        raise ZeroDivisionError

        def cancel(slot: int) -> None:
            told.append(slot)
            outbound.stop()

        inbound: list[InboundStream] = []
        task = asyncio.ensure_future(give_up())
        await yields(1)
        outbound = OutboundStream(Slots(made[0]), chunks_of(10), 1, 0)
        sending = asyncio.ensure_future(outbound.run())
        with pytest.raises(ZeroDivisionError):
            await task
        complete = await sending
        await eventually(lambda: slots.taken_count == 0)
        assert told == ([] if taken == 9 else [0])
        assert complete is True if taken == 9 else complete in (True, False)
        assert slots.discarding_count == 0
        await eventually(lambda: not made[1].outstanding() and not made[0].outstanding())
        targets = rooms(6)
        with slots.inbound(0, targets, lambda slot: None) as stream:
            assert stream.slot == 0
            again = asyncio.ensure_future(OutboundStream(Slots(made[0]), chunks_of(6), 1, 0).run())
            assert await read(stream) == list(range(6))
        await again
        assert [bytes(target[:1]) for target in targets] == [bytes([i + 1]) for i in range(6)]


async def test_slots_are_taken_lowest_first_in_the_same_time_each() -> None:
    """Regression: the time for thousands of concurrent streams grew with the square of their number."""

    def duration(count: int) -> float:
        slots = Slots(made[0])
        began_at = time.process_time()
        assert [slots.take(1) for _ in range(count)] == [*range(count)]
        return time.process_time() - began_at

    async with engines(2) as (_, made):
        assert min(duration(4000) for _ in range(3)) < 40 * max(duration(400) for _ in range(3))
        slots = Slots(made[0])
        for _ in range(5):
            slots.take(1)
        for slot in (3, 1):
            slots.give_back(1, slot)
        assert slots.taken_count == slots.unanswered_count == 3
        assert [slots.take(1) for _ in range(3)] == [1, 3, 5]
        assert slots.take(0) == 0
        with pytest.raises(BusyError, match=f"all {tags.BULK_SLOT_COUNT} stream slots of rank 1 are in use"):
            for _ in range(tags.BULK_SLOT_COUNT):
                slots.take(1)


async def test_the_slot_stays_taken_until_the_answer_has_come() -> None:
    """A late chunk must never land in another stream's buffer."""
    async with engines(2) as (_, made):
        slots = Slots(made[1])
        with (
            pytest.raises(TimeoutError, match="in time"),
            slots.inbound(0, rooms(3), lambda slot: None) as stream,
        ):
            await read(stream, deadline=0.0)
        await yields(20)
        assert (slots.taken_count, slots.discarding_count) == (1, 1)
        with slots.inbound(0, rooms(1), lambda slot: None) as other:
            assert other.slot == 1
            await OutboundStream(Slots(made[0]), chunks_of(1), 1, 1).run()
            assert await read(other) == [0]
        await OutboundStream(Slots(made[0]), [], 1, stream.slot).abort()
        await eventually(lambda: slots.taken_count == 0)
        assert slots.discarding_count == 0


async def test_a_deadline_is_judged_after_what_has_arrived() -> None:
    async with engines(2) as (_, made):
        slots = Slots(made[1])
        made[1].stop()
        with slots.inbound(0, rooms(2, 10), lambda slot: None) as stream:
            await OutboundStream(Slots(made[0]), chunks_of(2, 10), 1, stream.slot).run()
            assert await read(stream, deadline=0.0) == [0, 1]


async def test_a_chunk_of_the_wrong_size_is_the_peers_fault() -> None:
    async with engines(2) as (_, made):
        slots = Slots(made[1])
        with (
            pytest.raises(RemoteProtocolError, match=f"must send a chunk of {CHUNK}"),
            slots.inbound(0, rooms(1), lambda slot: None) as stream,
        ):
            await OutboundStream(Slots(made[0]), chunks_of(1, 5), 1, stream.slot).run()
            await read(stream)
        assert slots.taken_count == 0, "the request must count as answered"


async def test_a_cancelled_sender_answers_with_the_abort() -> None:
    async with engines(2) as (_, made):
        slots = Slots(made[1])
        with pytest.raises(StreamAborted), slots.inbound(0, rooms(100), lambda slot: None) as stream:
            sending = asyncio.ensure_future(OutboundStream(Slots(made[0]), chunks_of(100), 1, stream.slot).run())
            async for index in stream.chunks():
                if index == 1:
                    sending.cancel()
        assert sending.cancelled()
        assert slots.taken_count == 0


async def test_a_lost_sender_retires_its_slot() -> None:
    async with engines(2) as (hub, made):
        slots = Slots(made[1])
        with pytest.raises(RankLostError), slots.inbound(0, rooms(3), lambda slot: None) as stream:
            asyncio.get_running_loop().call_soon(hub.lose, 0)
            await read(stream)
        assert (slots.taken_count, slots.discarding_count) == (1, 0)
        await eventually(lambda: not made[1].outstanding())


async def test_a_lost_receiver_ends_the_senders_stream() -> None:
    async with engines(2) as (hub, made):
        sending = asyncio.ensure_future(OutboundStream(Slots(made[0]), chunks_of(10), 1, 0).run())
        await yields(5)
        hub.lose(1)
        with pytest.raises(RankLostError):
            await sending
        await eventually(lambda: not made[0].outstanding())


async def test_send_to_a_lost_receiver_is_not_counted_or_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with engines(2) as (_, made):
        tried = 0

        def start_send(*_: object) -> None:
            nonlocal tried
            tried += 1
            raise RankLostError("rank 1 is gone", rank=1)

        monkeypatch.setattr(made[0].transport, "start_send", start_send)
        stream = OutboundStream(Slots(made[0]), chunks_of(10), 1, 0)
        with pytest.raises(RankLostError, match="rank 1"):
            await stream.run()
        assert (tried, stream.sent_nbytes) == (1, 0)


async def test_slots_are_counted_per_sender_and_run_out() -> None:
    async with engines(2) as (_, made):
        slots = Slots(made[1])
        for expected in range(tags.BULK_SLOT_COUNT):
            assert slots.take(0) == expected
        with pytest.raises(BusyError, match="rank 0"):
            slots.take(0)
        assert slots.take(1) == 0
        slots.give_back(0, 77)
        assert slots.take(0) == 77


# ------------------------------------------------------------------------------------------------------------- worlds


def is_quiet(sender: ad.World, receiver: ad.World) -> bool:
    return not sender._streams._under_way and receiver.services.slots.taken_count == 0


@pytest.mark.usefixtures("small_chunks")
async def test_the_sender_learns_that_the_receiver_gave_up_mid_stream() -> None:
    outcomes = set()
    for moment in range(1, 12):
        async with worlds(2) as (a, b):
            sent = torch.arange(CHUNK * 20, dtype=torch.int32).to(torch.uint8)
            sending = asyncio.ensure_future(a.send_stream(sent, 1))
            receiving = asyncio.ensure_future(b.receive_stream(torch.zeros(CHUNK * 20, dtype=torch.uint8), 0))
            await yields(moment)
            receiving.cancel()
            await asyncio.wait([receiving])
            await eventually(functools.partial(is_quiet, a, b))
            await yields(3)
            if not sending.done():  # the sender has not seen the grant, so it waits for the next grant
                outcomes.add("waits")
            else:
                # no error: the sender had sent everything, and the receiver has discarded the rest
                error = sending.exception()
                assert error is None or (
                    isinstance(error, ClosedError) and "rank 1 cancelled its receive" in str(error)
                )
                outcomes.add("whole" if error is None else "closed")
                sending = asyncio.ensure_future(a.send_stream(sent, 1))
            room = torch.zeros(CHUNK * 20, dtype=torch.uint8)
            await b.receive_stream(room, 0)
            await sending
            assert torch.equal(room, sent)
            assert a.services.leftovers() == b.services.leftovers() == []
    assert "closed" in outcomes


@pytest.mark.parametrize("slot", [-5000, -1, tags.BULK_SLOT_COUNT, 2**63 - 1])
def test_a_slot_that_no_rank_has_is_no_message(slot: int) -> None:
    for kind in (Grant, Cancel):
        fields = {"slot": slot} if kind is Cancel else {"slot": slot, "nbytes": 10, "chunk_nbytes": 10}
        with pytest.raises(msgspec.ValidationError, match=f"slot must be from 0 to 4095, got {slot}"):
            msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=kind)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"nbytes": -1}, "sizes of a grant must be >= 0 and consistent"),
        ({"chunk_nbytes": 0}, "chunks"),
        ({"nbytes": 2**62, "chunk_nbytes": 1}, "at most 1048576 chunks, got"),
        ({"written_nbytes": 11}, "sizes of a grant must be >= 0 and consistent"),
        ({"written_nbytes": -1}, "sizes of a grant must be >= 0 and consistent"),
        ({"written_nbytes": 5, "address": -1}, "sizes of a grant must be >= 0 and consistent"),
    ],
)
def test_a_grant_that_nobody_makes_is_no_message(changes: dict[str, int], words: str) -> None:
    sound = {"slot": 0, "nbytes": 10, "chunk_nbytes": 10}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sound), type=Grant) == Grant(**sound)
    with pytest.raises(msgspec.ValidationError, match=words):
        msgspec.msgpack.decode(msgspec.msgpack.encode({**sound, **changes}), type=Grant)


async def test_more_grants_than_slots_are_dropped_and_counted() -> None:
    async with worlds(2) as (a, b):
        b._streams  # noqa: B018 opens the channel
        for _ in range(tags.BULK_SLOT_COUNT + 3):
            a._streams._channel.send_nowait(Grant(0, 10, 10), 1)
            b.services.engine.poll()
        assert sum(b.statistics().dropped.values()) == 3
        assert len(b._streams._grants[0]) == tags.BULK_SLOT_COUNT
        b._streams._grants[0].clear()


async def test_old_stream_does_not_take_the_cancel_of_a_new_one() -> None:
    """The receiver has received everything, granted the slot again and given up, before the old sender has noticed."""
    async with worlds(2) as (a, b):
        a._streams._under_way[1, 0] = old = OutboundStream(a.services.slots, chunks_of(1), 1, 0)
        receiving = asyncio.ensure_future(b.receive_stream(torch.zeros(5), 0))
        await yields(5)
        receiving.cancel()
        await asyncio.wait([receiving])
        await eventually(lambda: b.services.slots.taken_count == 0)
        assert not old.is_stopping
        assert not a._streams._grants[1]


def test_a_receiver_whose_sender_has_left_gets_an_error() -> None:
    """Regression: it got the same error as if the sender had cancelled."""

    async def main(world: ad.World) -> str:
        if world.rank == 0:
            for nbytes in (10, 10, 0):
                with pytest.raises(RankLostError, match="rank 1 left") as caught:
                    await world.receive_stream(torch.zeros(nbytes), 1)
                assert caught.value.rank == 1
            return "told"
        return "left"

    assert ad.run_local(main, ranks=2, strict=True) == ["told", "left"]


def test_a_sender_whose_receiver_has_left_gets_an_error() -> None:
    async def main(world: ad.World) -> None:
        if world.rank == 0:
            with pytest.raises(RankLostError, match="rank 1 left") as caught:
                await world.send_stream(torch.zeros(10), 1)
            assert caught.value.rank == 1

    ad.run_local(main, ranks=2, strict=True)


def test_statistics_count_the_bytes() -> None:
    async def main(world: ad.World) -> tuple[int, int]:
        if world.rank == 0:
            await world.send_stream(torch.zeros(1000), 1)
        else:
            await world.receive_stream(torch.zeros(1000), 0)
        return world.statistics().stream_sent_nbytes, world.statistics().stream_received_nbytes

    assert ad.run_local(main, ranks=2, strict=True) == [(4000, 0), (0, 4000)]


async def test_stream_whose_first_chunks_arrive_while_posting_is_whole() -> None:
    async with engines(2) as (_, made):
        slots, targets = Slots(made[1]), rooms(10)
        sending = asyncio.ensure_future(OutboundStream(Slots(made[0]), chunks_of(10), 1, slot=0).run())
        await yields(3)
        async with asyncio.timeout(20):
            with slots.inbound(0, targets, lambda slot: None) as stream:
                assert stream.slot == 0
                await stream.whole()
        assert await sending
        assert [bytes(target) for target in targets] == [bytes(chunk) for chunk in chunks_of(10)]
        assert slots.taken_count == 0
