"""Channels from the inside: bounds, hostile frames, scopes, timeouts. Between ranks: ``conformance``."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from support.local import NONCE, worlds, yields

from asyncdist import World, tags
from asyncdist.errors import BusyError, ClosedError, LocalProtocolError, RankLostError, RemoteProtocolError
from asyncdist.messaging import wire
from asyncdist.messaging.channels import Channel
from asyncdist.messaging.early_frames import EARLY_FRAME_COUNT_MAX
from asyncdist.messaging.engine import Engine
from asyncdist.runtime.peers import Unheard

TAG = 77


@dataclass(frozen=True, slots=True)
class Number:
    value: int


@dataclass(frozen=True, slots=True)
class Word:
    text: str


@dataclass(frozen=True, slots=True)
class Blob:
    data: bytes


@pytest.fixture
async def pair() -> AsyncIterator[list[World]]:
    async with worlds(2) as made:
        yield made


def send_raw(world: World, frame: bytes, dest: int, tag: int = TAG) -> None:
    """Bytes that no channel of ours would send."""
    world.services.engine.watch(world.services.engine.transport.isend(frame, dest, tag), "raw")


def frame_for(channel: Channel[Any], message: Any, **changes: int) -> bytes:
    kind, payload = channel._codec.encode(message)
    return raw_frame(channel, payload, **{"kind": kind, **changes})


def raw_frame(
    channel: Channel[Any],
    payload: bytes,
    *,
    kind: int = 0,
    nonce: int = NONCE,
    epoch: int = 0,
    version: int = wire.VERSION,
    sequence: int = 1,
) -> bytes:
    route = bytes([version]) + wire.pack_route(kind, nonce, epoch, channel.scope)[1:]
    return bytes(wire.FrameWriter(route).frame(0, sequence, payload))


def dropped(world: World) -> dict[str, int]:
    return world.statistics().dropped


def both(pair: list[World], **options: Any) -> list[Channel[Number]]:
    return [world.channel(Number, tag=TAG, **options) for world in pair]


# -------------------------------------------------------------------------------------------------------------- basics


async def test_an_envelope_says_who_and_which_round(pair: list[World]) -> None:
    a, b = both(pair)
    await a.send(Number(5), 1, round=9)
    envelope = await b.receive()
    assert envelope == (Number(5), 0, 9)
    assert (envelope.message, envelope.source, envelope.round) == (Number(5), 0, 9)
    a.send_nowait(Number(6), 0)
    assert (await a.receive()).source == 0
    assert b.receive_nowait() is None


async def test_a_union_of_types_arrives_as_what_was_sent(pair: list[World]) -> None:
    a, b = (world.channel(Number | Word, tag=TAG, name="both") for world in pair)  # type: ignore[arg-type]
    await a.send(Word("x"), 1)
    await a.send(Number(1), 1)
    assert [(await b.receive()).message for _ in range(2)] == [Word("x"), Number(1)]
    with pytest.raises(LocalProtocolError, match="Number, Word, not Blob"):
        await a.send(Blob(b""), 1)


async def test_statistics_count_what_happened(pair: list[World]) -> None:
    a, b = both(pair)
    for i in range(5):
        a.send_nowait(Number(i), 1)
    pair[1].services.engine.poll()
    await b.receive()
    sent, received = a.statistics(), b.statistics()
    assert (sent.sent_count, sent.received_count, sent.waiting_count, sent.sending_count) == (5, 0, 0, 0)
    assert (received.sent_count, received.received_count, received.waiting_count) == (0, 1, 4)
    assert pair[0].statistics().sent_count == 5
    assert pair[1].statistics().received_count == 1
    for _ in range(4):
        await b.receive()
    a.close()
    b.close()
    assert pair[0].statistics().sent_count == 5, "closed channels count on"
    assert pair[1].statistics().received_count == 5


async def test_messages_taken_after_the_channel_was_closed_are_counted(pair: list[World]) -> None:
    a, b = both(pair)
    a.send_nowait(Number(1), 1)
    pair[1].services.engine.poll()
    b.close()
    assert (await b.receive()).message == Number(1)
    assert pair[1].statistics().received_count == 1


async def test_a_message_above_the_limit_names_both_numbers(pair: list[World]) -> None:
    a, b = (world.channel(Blob, tag=TAG) for world in pair)
    with pytest.raises(LocalProtocolError, match=rf"700\d\d.*{wire.PAYLOAD_NBYTES_MAX}"):
        await a.send(Blob(bytes(70_000)), 1)
    largest = Blob(bytes(wire.PAYLOAD_NBYTES_MAX - 9))
    sending = asyncio.ensure_future(a.send(largest, 1))
    assert (await b.receive()).message == largest
    await sending
    assert a.statistics().sent_count == 1


@pytest.mark.parametrize("dest", [-1, 2, 10**30])
async def test_a_rank_that_does_not_exist_is_refused(pair: list[World], dest: int) -> None:
    a, _ = both(pair)
    for send in (a.send_nowait, a.send):
        with pytest.raises(LocalProtocolError, match="ranks go from 0 to 1") as caught:
            result = send(Number(1), dest)
            if result is not None:
                await result
        assert caught.value.dest == dest
    assert a.statistics().sent_count == 0


async def test_send_nowait_is_busy_beyond_the_capacity(pair: list[World]) -> None:
    """Sends that do not complete, because nobody listens at the other end yet."""
    a = pair[0].channel(Blob, tag=TAG, capacity=3)
    blob = Blob(bytes(wire.PAYLOAD_NBYTES_MAX - 9))
    hub_limit = 65536
    assert hub_limit >= wire.FRAME_NBYTES_MAX
    for send in [pair[0].services.engine.transport.isend]:
        a._outbox.start_send = lambda buffer, dest, tag, send=send: send(buffer + bytes(100), dest, tag)  # rendezvous
    for _ in range(3):
        a.send_nowait(blob, 1)
    assert a.statistics().sending_count == 3
    with pytest.raises(BusyError, match="3 sends are under way"):
        a.send_nowait(blob, 1)
    sent = [asyncio.ensure_future(a.send(blob, 1)) for _ in range(2)]
    await yields(3)
    assert not any(task.done() for task in sent), "send waits instead"
    room = bytearray(wire.FRAME_NBYTES_MAX + 100)
    for _ in range(5):
        await pair[1].services.engine.receive(room, 0, TAG)
    await asyncio.gather(*sent)
    a.send_nowait(blob, 1)
    assert a.statistics().sending_count == 1
    await pair[1].services.engine.receive(room, 0, TAG)


# ------------------------------------------------------------------------------------------------------------ the tags


@pytest.mark.parametrize("tag", [-1, 32768, 10**9, 1.0, "7", None, True])
async def test_what_is_no_tag_is_refused(pair: list[World], tag: Any) -> None:
    with pytest.raises(LocalProtocolError, match="a tag is an int from 0 to 32767"):
        pair[0].channel(Number, tag=tag)


@pytest.mark.parametrize(
    "tag",
    [
        tags.METRIC,
        tags.CONTROL,
        tags.REPLAY,
        tags.COLLECTIVE_FIRST,
        tags.COLLECTIVE_LAST,
        tags.REPLAY + 1,
        tags.COLLECTIVE_FIRST - 1,
        tags.PARAM,
        tags.BULK_FIRST,
        tags.BULK_LAST,
    ],
)
async def test_reserved_tags_are_refused_and_say_for_what(pair: list[World], tag: int) -> None:
    with pytest.raises(LocalProtocolError, match="is reserved for"):
        pair[0].channel(Number, tag=tag)


async def test_every_tag_that_is_not_reserved_can_be_had(pair: list[World]) -> None:
    for tag in (0, 7000, tags.BULK_LAST + 1, 32767):
        pair[0].channel(Number, tag=tag)


async def test_two_owners_of_one_tag_collide_by_name(pair: list[World]) -> None:
    pair[0].channel(Number, tag=TAG, name="first")
    with pytest.raises(LocalProtocolError, match=r"'first'.*'second' must use another"):
        pair[0].channel(Number, tag=TAG, name="second")
    pair[0].channel(Number, tag=TAG, name="first")
    with pytest.raises(LocalProtocolError, match="is open already"):
        pair[0].services.open_channel(Number, tag=TAG, scope=5, name="x")
        pair[0].services.open_channel(Number, tag=TAG, scope=5, name="y")


async def test_a_tag_whose_channels_are_closed_is_free_for_another_type(pair: list[World]) -> None:
    """The peer may close it later: frames know their channel."""
    a, b = both(pair)
    await a.send(Number(1), 1)
    a.close()
    words = [pair[0].channel(Word, tag=TAG)]
    await words[0].send(Word("early"), 1)
    assert (await b.receive()).message == Number(1)
    with pytest.raises(LocalProtocolError, match="tag 77 belongs to channel 'Number'"):
        pair[1].channel(Word, tag=TAG)
    b.close()
    words.append(pair[1].channel(Word, tag=TAG))
    assert (await words[1].receive()).message == Word("early")
    with pytest.raises(LocalProtocolError, match="tag 77 belongs to channel 'Word'"):
        pair[0].channel(Number, tag=TAG)


async def test_only_tags_of_users_are_opened_for_a_sender_that_is_not_heard(pair: list[World]) -> None:
    pair[1].peers.leave()
    for tag in (tags.BULK_FIRST, tags.TAG_MAX + 1, -1):
        pair[0].peers._system.send_nowait(Unheard(tag), 1)
        pair[1].services.engine.poll()
        assert tag not in pair[1].services._demultiplexers
    pair[0].peers._system.send_nowait(Unheard(TAG), 1)
    pair[1].services.engine.poll()
    assert TAG in pair[1].services._demultiplexers


@pytest.mark.parametrize("capacity", [0, -1, 1.5, None, True])
async def test_a_capacity_below_one_is_refused(pair: list[World], capacity: Any) -> None:
    with pytest.raises(ValueError, match="capacity"):
        pair[0].channel(Number, tag=TAG, capacity=capacity)


# ------------------------------------------------------------------------------------------------------- hostile bytes


async def test_hostile_frames_are_counted_logged_once_per_peer_and_harm_nothing(
    pair: list[World], caplog: pytest.LogCaptureFixture
) -> None:
    a, b = both(pair)
    good = frame_for(a, Number(1))
    bad = [
        b"",
        b"x",
        b"\0" * 36,
        good[:-1],
        good + b"\0",
        b"\x02" + good[1:],
        bytes([*good[:-1], good[-1] ^ 1]),
        frame_for(a, Number(1), kind=9),
        frame_for(a, Number(1), nonce=NONCE ^ 1),
        frame_for(a, Number(1), version=wire.VERSION + 1),
        raw_frame(a, b"\x81\xa5value\xc0", sequence=1),
        raw_frame(a, b"no msgpack", sequence=2),
        bytes(wire.FRAME_NBYTES_MAX + 1),  # does not even fit
    ]
    with caplog.at_level(logging.WARNING, "asyncdist.messaging.channels"):
        for frame in bad:
            send_raw(pair[0], frame, 1)
            send_raw(pair[1], frame, 1)
        for _ in range(5):
            pair[1].services.engine.poll()
        assert sum(dropped(pair[1]).values()) == 2 * len(bad)
        assert [record.getMessage().split(":")[1].split("from ")[1] for record in caplog.records] == [
            "rank 0",
            "rank 1",
        ]
    assert b.receive_nowait() is None
    a._outbox.sequence = 10
    await a.send(Number(3), 1)
    assert (await b.receive()).message == Number(3), "the channel works on"


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=80), min_size=1, max_size=30), st.randoms(use_true_random=False))
def test_any_bytes_between_good_messages(frames: list[bytes], draw: random.Random) -> None:
    async def main() -> None:
        async with worlds(2) as pair:
            a, b = both(pair)
            for i, data in enumerate(frames):
                if draw.random() < 0.5:
                    good = bytearray(frame_for(a, Number(i), sequence=i + 1))
                    good[draw.randrange(len(good))] ^= 1 << draw.randrange(8)
                    data = bytes(good)
                send_raw(pair[0], data, 1)
                a._outbox.sequence = 1000 + i
                await a.send(Number(i), 1)
            for i in range(len(frames)):
                assert (await b.receive()).message == Number(i)
            assert sum(dropped(pair[1]).values()) == len(frames)

    asyncio.run(main())


async def test_odd_frames_of_a_long_job_are_counted_by_a_few_reasons(pair: list[World]) -> None:
    """A count for each number that a frame carries would grow without end; the last example of each is kept."""
    a, b = both(pair)
    count = 300
    for i in range(1, count + 1):
        for frame in (
            bytes(i % wire.HEADER_NBYTES),
            bytes(wire.HEADER_NBYTES + i),
            raw_frame(a, i.to_bytes(4, "big"), sequence=2 * i),
            frame_for(a, Number(i), sequence=i),
            frame_for(a, Number(i), kind=1 + i % 250),
            frame_for(a, Number(i), version=3 + i % 250),
            frame_for(a, Number(i), nonce=NONCE + i),
        ):
            send_raw(pair[0], frame, 1)
    for _ in range(count):
        pair[1].services.engine.poll()
    assert b.receive_nowait() is None
    reasons = ("too short", "CRC mismatch", "no message", "out of order", "unknown kind", "another version")
    assert dropped(pair[1]) == dict.fromkeys((*reasons, "another job"), count)
    examples = pair[1].statistics().drop_examples
    assert examples["out of order"] == f"tag {TAG}, rank 0: Number: sequence {count} after {2 * count}"
    assert examples["too short"].startswith(f"tag {TAG}, rank 0: {count % wire.HEADER_NBYTES} bytes")


async def test_a_frame_is_taken_once_and_in_order_only(pair: list[World]) -> None:
    a, b = both(pair)
    for sequence in (1, 2, 2, 1, 5, 4):
        send_raw(pair[0], frame_for(a, Number(sequence), sequence=sequence), 1)
    assert [(await b.receive()).message.value for _ in range(3)] == [1, 2, 5]
    pair[1].services.engine.poll()
    assert b.receive_nowait() is None
    assert sum(dropped(pair[1]).values()) == 3


async def test_frames_of_another_epoch_are_counted(pair: list[World]) -> None:
    a, b = both(pair)
    send_raw(pair[0], frame_for(a, Number(1), epoch=1), 1)
    pair[1].services.engine.poll()
    assert b.receive_nowait() is None
    assert dropped(pair[1]) == {"other epoch": 1}


async def test_frames_for_a_closed_scope_are_counted_and_forgotten(pair: list[World]) -> None:
    a, b = both(pair)
    b.close()
    for i in range(10):
        await a.send(Number(i), 1)
    pair[1].services.engine.poll()
    assert dropped(pair[1]) == {"closed scope": 10}
    assert pair[1].services.leftovers() == []
    with pytest.raises(ClosedError):
        await b.receive()
    with pytest.raises(ClosedError):
        b.receive_nowait()
    with pytest.raises(ClosedError):
        b.send_nowait(Number(1), 0)


@pytest.mark.slow
async def test_too_many_early_messages_of_a_user_stall_their_tag_and_none_is_lost(pair: list[World]) -> None:
    """As when a channel is closed, and opened again while its sender goes on."""
    count = 2 * EARLY_FRAME_COUNT_MAX + 5
    pair[1].channel(Number, tag=TAG).close()
    pair[0].channel(Number, tag=TAG).close()
    again = pair[0].channel(Number, tag=TAG)
    for i in range(count):
        await again.send(Number(i), 1)
    for _ in range(100):
        pair[1].services.engine.poll()
    assert f"{EARLY_FRAME_COUNT_MAX} messages on tag {TAG}" in pair[1].services.leftovers()[0]
    late = pair[1].channel(Number, tag=TAG, capacity=2)
    for i in range(count):
        assert (await late.receive()).message == Number(i)
    await again.send(Number(-1), 1)
    assert (await late.receive()).message == Number(-1)
    assert pair[1].services.leftovers() == []
    assert dropped(pair[1]) == {}


async def test_early_messages_of_two_channels_stall_until_one_is_open(pair: list[World]) -> None:
    for world in pair:
        world.channel(Number, tag=TAG).close()
    early = [pair[0].channel(Number, tag=TAG) for _ in range(2)]
    count = EARLY_FRAME_COUNT_MAX // 2 + 10
    for i in range(count):
        for channel in early:
            await channel.send(Number(i), 1)
    for _ in range(100):
        pair[1].services.engine.poll()
    for _ in early:
        late = pair[1].channel(Number, tag=TAG, capacity=2)
        assert [(await late.receive()).message.value for _ in range(count)] == [*range(count)]
    assert pair[1].services.leftovers() == []


async def test_too_many_early_messages_of_a_protocol_are_dropped(
    pair: list[World], caplog: pytest.LogCaptureFixture
) -> None:
    """Its tag carries other protocols, too, which must not wait."""
    early = pair[0].services.open_channel(Number, tag=TAG, scope=1, name="first")
    pair[1].services.open_channel(Number, tag=TAG, scope=2, name="second")
    for i in range(EARLY_FRAME_COUNT_MAX + 5):
        await early.send(Number(i), 1)
    for _ in range(40):
        pair[1].services.engine.poll()
    assert sum(dropped(pair[1]).values()) == 5
    assert "nobody has opened" in caplog.text


# ------------------------------------------------------------------------------------------------------------- leaving


async def test_after_main_has_returned_what_still_comes_is_dropped_and_counted(pair: list[World]) -> None:
    a, b = both(pair, capacity=2)
    await a.send(Number(0), 1)
    pair[1].services.engine.poll()
    pair[1].peers.leave()
    for i in range(5):
        await a.send(Number(i), 1)
    for _ in range(5):
        pair[1].services.engine.poll()
    assert dropped(pair[1]) == {"main had returned": 5}
    assert pair[1].services.leftovers() == [f"6 unread messages in Number, tag {TAG}"]
    b.close()


async def test_a_send_to_a_rank_that_has_left_is_refused_also_after_one_that_was_not(pair: list[World]) -> None:
    a, b = both(pair)
    await a.send(Number(0), 1)
    pair[1].peers.leave()
    await pair[0].services.engine.until(lambda: 1 in pair[0].services.left)
    for _ in range(2):
        with pytest.raises(ClosedError, match="rank 1 has left and receives nothing more") as caught:
            await a.send(Number(1), 1)
        assert (caught.value.dest, caught.value.tag) == (1, TAG)
        with pytest.raises(ClosedError, match="rank 1 has left"):
            a.send_nowait(Number(1), 1)
        await a.send(Number(2), 0)  # to itself
    await b.send(Number(3), 0)  # who has left may send
    assert [(await a.receive()).message.value for _ in range(3)] == [2, 2, 3]


async def test_a_protocol_may_send_to_a_rank_that_has_left(pair: list[World]) -> None:
    """A coordinator goes on when its rank's main has returned."""
    a, b = (world.services.open_channel(Number, tag=TAG, scope=5, name="protocol") for world in pair)
    pair[1].peers.leave()
    await pair[0].services.engine.until(lambda: 1 in pair[0].services.left)
    await a.send(Number(1), 1)
    assert (await b.receive()).message == Number(1)


# ---------------------------------------------------------------------------------------------------------- being full


async def test_a_full_mailbox_stops_the_tag_and_receiving_resumes_it(pair: list[World]) -> None:
    a, b = both(pair, capacity=3)
    other_a, other_b = (world.channel(Word, tag=TAG + 1) for world in pair)
    for i in range(20):
        a.send_nowait(Number(i), 1)
    await other_a.send(Word("free"), 1)
    for _ in range(10):
        pair[1].services.engine.poll()
    assert b.statistics().waiting_count == 3
    assert (await other_b.receive()).message == Word("free")
    for i in range(20):
        assert (await b.receive()).message == Number(i)
        assert b.statistics().waiting_count <= 3
    assert b.receive_nowait() is None


async def test_closing_a_full_channel_frees_its_tag(pair: list[World]) -> None:
    a, b = both(pair, capacity=1)
    twin_a, twin_b = both(pair)
    for i in range(5):
        await a.send(Number(i), 1)
    await twin_a.send(Number(99), 1)
    pair[1].services.engine.poll()
    assert twin_b.receive_nowait() is None
    b.close()
    assert (await twin_b.receive()).message == Number(99)
    assert (await b.receive()).message == Number(0), "what had arrived can still be read"
    with pytest.raises(ClosedError):
        await b.receive()


async def test_a_protocols_channel_fails_instead_and_names_the_peer(pair: list[World]) -> None:
    a, b = (world.services.open_channel(Number, tag=TAG, scope=1, name="p", capacity=4) for world in pair)
    waiting = asyncio.ensure_future(b.wait_mail())
    await yields(1)
    for i in range(5):
        a.send_nowait(Number(i), 1)
    pair[1].services.engine.poll()
    await waiting
    for receive in (b.receive, b.receive):
        with pytest.raises(RemoteProtocolError, match="rank 0 overflowed a mailbox of 4") as caught:
            await receive()
        assert (caught.value.rank, caught.value.tag) == (0, TAG)
    with pytest.raises(RemoteProtocolError):
        b.receive_nowait()


async def test_latest_wins_keeps_the_newest_of_each_source() -> None:
    async with worlds(3) as made:
        channels = [
            world.services.open_channel(Number, tag=TAG, scope=1, name="m", capacity=2, overflow="latest")
            for world in made
        ]
        for i in range(50):
            for rank in (0, 1, 2):
                channels[rank].send_nowait(Number(100 * rank + i), 2)
            made[2].services.engine.poll()
        found = {}
        while (envelope := channels[2].receive_nowait()) is not None:
            found[envelope.source] = envelope.message.value
        assert found == {0: 49, 1: 149, 2: 249}


async def test_a_handler_is_called_in_place_of_a_mailbox(pair: list[World]) -> None:
    heard: list[Any] = []
    a, b = (world.services.open_channel(Number, tag=TAG, scope=1, name="h", handler=heard.append) for world in pair)
    a.send_nowait(Number(1), 1, round=7)
    pair[1].services.engine.poll()
    assert heard == [(Number(1), 0, 7)]
    assert b.receive_nowait() is None
    assert b.statistics().received_count == 1


# ----------------------------------------------------------------------------------------------- timeouts, cancellation


async def test_a_receive_that_fails_does_not_keep_what_came_meanwhile(pair: list[World]) -> None:
    """As the wildcard receive of a tag does when it has met a large message whose sender dies."""
    sender, receiver = both(pair)
    await yields(5)
    demultiplexer = receiver.demultiplexer
    request: Any = demultiplexer.receiver.request
    request._matcher.withdraw(request)  # matched: nothing else goes into it
    sender.send_nowait(Number(1), 1)
    await yields(5)  # its bell has been heard
    request.error = RankLostError("rank 3 is gone", rank=3)
    assert demultiplexer.receiver.poll() == 0
    await yields(5)
    envelope = receiver.receive_nowait()
    assert envelope is not None and envelope.message == Number(1)


async def test_a_timeout_tells_of_messages_for_a_channel_that_is_not_open(pair: list[World]) -> None:
    """Two ranks that open one tag under different types waited for each other in silence."""
    numbers, words = pair[0].channel(Number, tag=TAG), pair[1].channel(Word, tag=TAG)
    for i in range(2):
        words.send_nowait(Word(str(i)), 0)
    with pytest.raises(TimeoutError) as caught:
        await numbers.receive(timeout_s=0.05)
    assert str(caught.value).startswith(
        "Number: no message for 0.05 s; 2 messages on tag 77 wait for a channel that this rank has not opened, from "
        "rank 1 ("
    )


async def test_awaiting_beside_messages_for_a_channel_that_is_not_open_is_logged_once(
    pair: list[World], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncdist.messaging.early_frames.EARLY_PATIENCE_S", 0.01)
    numbers, _ = both(pair)
    second = pair[1].channel(Number, tag=TAG)
    second.send_nowait(Number(1), 0)
    await yields(20)
    assert not caplog.records, "nobody waits yet"
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await numbers.receive(timeout_s=0.1)
        second.send_nowait(Number(2), 0)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1, told
    assert told[0].startswith("awaiting Number for 0.01 s: 1 message on tag 77 waits for a channel that this rank has")
    opened = pair[0].channel(Number, tag=TAG)
    assert (await opened.receive()).message.value == 1
    assert pair[0].services.early_frames() == []


async def test_a_channel_that_is_opened_in_time_is_not_told_of(
    pair: list[World], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncdist.messaging.early_frames.EARLY_PATIENCE_S", 0.01)
    numbers, _ = both(pair)
    second = pair[1].channel(Number, tag=TAG)
    waiting = asyncio.ensure_future(numbers.receive(timeout_s=0.1))
    await yields(2)
    second.send_nowait(Number(1), 0)
    await pair[0].services.engine.until(lambda: len(pair[0].services.early_frames()) == 1)
    opened = pair[0].channel(Number, tag=TAG)
    with pytest.raises(TimeoutError, match=r"no message for 0\.1 s$"):
        await waiting
    assert (await opened.receive()).message.value == 1
    assert not caplog.records


async def test_receive_times_out_and_loses_nothing(pair: list[World]) -> None:
    a, b = both(pair)
    for timeout_s in (0, 0.01, -1):
        with pytest.raises(TimeoutError, match="no message for"):
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


async def test_a_timeout_counts_from_the_call_however_often_others_are_served(pair: list[World]) -> None:
    """A receiver whose wake-ups are spent on another one still gives up in time."""
    _, b = both(pair)
    loop = asyncio.get_running_loop()
    waiting = asyncio.ensure_future(b.receive(timeout_s=0.2))
    await yields(2)
    began_at = loop.time()
    while not waiting.done():
        for waiter in list(b.inbox.waiters):  # as if a message had come, and another task had taken it
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


# ------------------------------------------------------------------------------------------------------------- the end


async def test_leftovers_name_the_unread_and_the_never_opened(pair: list[World]) -> None:
    a, _ = both(pair)
    twin = pair[0].channel(Number, tag=TAG)
    await a.send(Number(1), 1)
    await twin.send(Number(1), 1)
    pair[1].services.engine.poll()
    assert pair[1].services.leftovers() == [
        f"1 unread messages in Number, tag {TAG}",
        f"1 messages on tag {TAG} for channels that were never opened",
    ]


async def test_closing_the_lanes_takes_every_receive_back() -> None:
    async with worlds(2) as made:
        both(made)
        for world in made:
            world.close()
        await made[0].services.engine.until(lambda: not made[0].services.engine.outstanding())
        assert made[0].services.engine.outstanding() == ()
        hub = made[0].services.engine.transport._hub  # type: ignore[attr-defined]
        assert not any(receives for matcher in hub.matchers for receives in matcher._posted.values())
        assert isinstance(made[0].services.engine, Engine)
