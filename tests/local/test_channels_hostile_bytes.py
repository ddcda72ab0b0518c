"""Tests channels that receive unexpected frames: malformed bytes, other scopes and epochs, early messages."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from support.channels import TAG, Number, both, dropped
from support.facts import names
from support.local import NONCE, worlds, yields

from asyncdist import World, tags
from asyncdist.collectives.group_ledger import Freed
from asyncdist.errors import ClosedError
from asyncdist.messaging import wire
from asyncdist.messaging.channels import Channel
from asyncdist.messaging.demultiplexer import EARLY_FRAME_COUNT_MAX
from asyncdist.waits import A_CONDITION


def send_raw(world: World, frame: bytes, dest: int, tag: int = TAG) -> None:
    """Bytes that no channel of ours would send."""
    world.services.engine.watch(world.services.engine.transport.isend(frame, dest, tag), A_CONDITION)


def frame_for(channel: Channel[Any], message: Any, **changes: int) -> bytes:
    kind, payload = channel.codec.encode(message)
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


async def test_hostile_frames_are_counted_and_logged_once_per_peer(
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
    with caplog.at_level(logging.WARNING, "asyncdist.messaging.demultiplexer"):
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
    assert (await b.receive()).message == Number(3), "the channel must still work"


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


async def test_a_frame_with_an_epoch_is_dropped_by_a_channel_without(pair: list[World]) -> None:
    a, b = both(pair)
    send_raw(pair[0], frame_for(a, Number(1), epoch=1), 1)
    pair[1].services.engine.poll()
    assert b.receive_nowait() is None
    assert dropped(pair[1]) == {"no epochs": 1}


async def test_frame_that_uses_reserved_bits_of_its_route_is_dropped(pair: list[World]) -> None:
    """Regression: such a frame waited for a channel that no rank can open; a thousand of them stalled a tag forever."""
    a, b = both(pair)
    route = bytearray(wire.pack_route(0, NONCE, 0, a.scope))
    route[2] = 1
    send_raw(pair[0], bytes(wire.FrameWriter(bytes(route)).frame(0, 1, a.codec.encode(Number(1))[1])), 1)
    pair[1].services.engine.poll()
    assert b.receive_nowait() is None
    assert dropped(pair[1]) == {"reserved part of the route": 1}
    assert pair[1].services.leftovers() == []


async def test_earlier_epochs_messages_are_dropped_and_later_ones_wait(pair: list[World]) -> None:
    a, b = (world.services.open_channel(Number, tag=tags.CONTROL, scope=7, name="numbers", epoch=0) for world in pair)
    a.send_nowait(Number(1), 1)
    pair[1].services.engine.poll()
    assert b.is_ready
    b.enter_epoch(2)
    assert not b.is_ready, "a message of epoch 0 must be discarded"
    a.send_nowait(Number(2), 1)
    a.enter_epoch(3)
    a.send_nowait(Number(3), 1)
    pair[1].services.engine.poll()
    assert b.receive_nowait() is None
    assert dropped(pair[1]) == {"earlier epoch": 2}
    b.enter_epoch(3)
    assert (await b.receive()).message == Number(3)
    a.enter_epoch(4)
    a.send_nowait(Number(4), 1)
    pair[1].services.engine.poll()
    b.close()
    assert not pair[1].services.leftovers(), "a message of an epoch that was never entered must be discarded"


async def test_messages_of_an_earlier_epoch_can_be_answered(pair: list[World]) -> None:
    heard: list[Number] = []
    a = pair[0].services.open_channel(Number, tag=tags.CONTROL, scope=7, name="numbers", epoch=0)
    b = pair[1].services.open_channel(
        Number,
        tag=tags.CONTROL,
        scope=7,
        name="numbers",
        epoch=1,
        earlier_handler=lambda envelope: heard.append(envelope.message),
    )
    for value in (1, 2):
        a.send_nowait(Number(value), 1)
    pair[1].services.engine.poll()
    assert heard == [Number(1), Number(2)]
    assert not b.is_ready


async def test_a_scope_that_is_opened_again_keeps_later_epochs(pair: list[World]) -> None:
    """Regression: messages of an epoch that the receiver entered later were dropped as for a closed scope."""
    a, b = (world.services.open_channel(Number, tag=tags.CONTROL, scope=7, name="numbers", epoch=0) for world in pair)
    b.close()
    b = pair[1].services.open_channel(Number, tag=tags.CONTROL, scope=7, name="numbers", epoch=0)
    a.enter_epoch(2)
    a.send_nowait(Number(3), 1)
    pair[1].services.engine.poll()
    b.enter_epoch(2)
    envelope = b.receive_nowait()
    assert envelope is not None and envelope.message == Number(3)


async def test_a_closed_channel_also_answers_a_restarted_rank(pair: list[World]) -> None:
    """Regression: the new process's messages were dropped, because their numbers begin again."""
    answered: list[Number] = []
    a, b = both(pair)
    for sequence in (1, 2, 1):
        if not answered:
            b.close(afterwards=lambda envelope: answered.append(envelope.message))
        elif sequence == 1:
            pair[1].services.note_restarted(0, 1)
        send_raw(pair[0], frame_for(a, Number(sequence), sequence=sequence), 1)
        pair[1].services.engine.poll()
    assert answered == [Number(1), Number(2), Number(1)]


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
async def test_too_many_early_user_messages_stall_their_tag_loss_free(pair: list[World]) -> None:
    """This happens when a channel is closed and reopened while its sender continues."""
    count = 2 * EARLY_FRAME_COUNT_MAX + 5
    pair[1].channel(Number, tag=TAG).close()
    pair[0].channel(Number, tag=TAG).close()
    again = pair[0].channel(Number, tag=TAG)

    async def send_all() -> None:
        for i in range(count):
            await again.send(Number(i), 1)

    sending = asyncio.ensure_future(send_all())
    await yields(100)
    for _ in range(100):
        pair[1].services.engine.poll()
    assert names(pair[1].services.leftovers()[0], EARLY_FRAME_COUNT_MAX, f"tag {TAG}")
    late = pair[1].channel(Number, tag=TAG, capacity=2)
    for i in range(count):
        assert (await late.receive()).message == Number(i)
    await sending
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
    assert "unopened scopes" in caplog.text


@pytest.mark.parametrize("ranks", [((0, 5),), ((0, 1), (0, 1)), ((1, 0),)])
async def test_a_freed_group_of_ranks_that_no_world_has_is_not_kept(
    pair: list[World], ranks: tuple[tuple[int, int], ...]
) -> None:
    """Hundreds of groups are kept that this rank has not made yet, each with all that the message names."""
    pair[0].peers._system.send_nowait(Freed(ranks, 1, 0), 1)
    pair[1].services.engine.poll()
    assert dropped(pair[1]) == {"RemoteProtocolError": 1}
    assert not pair[1].peers.groups.ledger._early
