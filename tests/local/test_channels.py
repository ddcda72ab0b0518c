"""Tests the internals of channels: bounds, tags, scopes, leaving, the end. Between ranks: ``conformance``."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest
from support.channels import TAG, Blob, Number, Word, both, dropped
from support.facts import names, naming
from support.local import worlds, yields

from asyncdist import World, tags
from asyncdist.errors import BusyError, ClosedError, LocalProtocolError, RemoteProtocolError
from asyncdist.messaging import wire
from asyncdist.messaging.engine import Engine
from asyncdist.runtime.peers import DropMessages

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
    with pytest.raises(LocalProtocolError, match="Number, Word, got Blob"):
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
    assert pair[0].statistics().sent_count == 5, "a closed channel must keep its counts"
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
        with pytest.raises(LocalProtocolError, match=naming(0, 1)) as caught:
            result = send(Number(1), dest)
            if result is not None:
                await result
        assert caught.value.dest == dest
    assert a.statistics().sent_count == 0


async def test_send_nowait_is_busy_beyond_the_capacity(pair: list[World]) -> None:
    """The sends do not complete, because the receiver's end is not open yet."""
    a = pair[0].channel(Blob, tag=TAG, capacity=3)
    blob = Blob(bytes(wire.PAYLOAD_NBYTES_MAX - 9))
    hub_limit = 65536
    assert hub_limit >= wire.FRAME_NBYTES_MAX
    transport: Any = pair[0].services.engine.transport
    isend = transport.isend
    transport.start_send = lambda buffer, dest, tag: isend(buffer + bytes(100), dest, tag)  # rendezvous
    for _ in range(3):
        a.send_nowait(blob, 1)
    assert a.statistics().sending_count == 3
    with pytest.raises(BusyError, match="3 sends"):
        a.send_nowait(blob, 1)
    sent = [asyncio.ensure_future(a.send(blob, 1)) for _ in range(2)]
    await yields(3)
    assert not any(task.done() for task in sent), "no send may fail, since send waits"
    room = bytearray(wire.FRAME_NBYTES_MAX + 100)
    for _ in range(5):
        await pair[1].services.engine.receive(room, 0, TAG)
    await asyncio.gather(*sent)
    a.send_nowait(blob, 1)
    assert a.statistics().sending_count == 1
    await pair[1].services.engine.receive(room, 0, TAG)


# ------------------------------------------------------------------------------------------------------------ the tags


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
async def test_reserved_tags_are_refused(pair: list[World], tag: int) -> None:
    with pytest.raises(LocalProtocolError, match=naming(tag)):
        pair[0].channel(Number, tag=tag)


async def test_every_tag_that_is_not_reserved_can_be_had(pair: list[World]) -> None:
    for tag in (0, 7000, tags.BULK_LAST + 1, 32767):
        assert pair[0].channel(Number, tag=tag).demultiplexer.tag == tag


async def test_two_owners_of_one_tag_collide_by_name(pair: list[World]) -> None:
    pair[0].channel(Number, tag=TAG, name="first")
    with pytest.raises(LocalProtocolError, match=r"in use already, got \d+ for .*'second', which .*'first'"):
        pair[0].channel(Number, tag=TAG, name="second")
    pair[0].channel(Number, tag=TAG, name="first")
    with pytest.raises(LocalProtocolError, match="is already open"):
        pair[0].services.open_channel(Number, tag=TAG, scope=5, name="x")
        pair[0].services.open_channel(Number, tag=TAG, scope=5, name="y")


async def test_tag_of_closed_channels_is_free_for_another_type(pair: list[World]) -> None:
    """The peer may close it later: frames know their channel."""
    a, b = both(pair)
    await a.send(Number(1), 1)
    a.close()
    words = [pair[0].channel(Word, tag=TAG)]
    await words[0].send(Word("early"), 1)
    assert (await b.receive()).message == Number(1)
    with pytest.raises(LocalProtocolError, match="'Number'"):
        pair[1].channel(Word, tag=TAG)
    b.close()
    words.append(pair[1].channel(Word, tag=TAG))
    assert (await words[1].receive()).message == Word("early")
    with pytest.raises(LocalProtocolError, match="'Word'"):
        pair[0].channel(Number, tag=TAG)


async def test_a_type_that_cannot_be_sent_leaves_its_tag_free(pair: list[World]) -> None:
    """Regression: the tag was taken by the channel that could not be opened, and the next such channel had no peer."""

    @dataclass(frozen=True)
    class Unsendable:
        values: list[int]

    with pytest.raises(TypeError, match="values"):
        pair[0].channel(Unsendable, tag=TAG, name="x")
    a, b = (world.channel(Number, tag=TAG, name="x") for world in pair)
    await a.send(Number(1), 1)
    async with asyncio.timeout(20):
        assert (await b.receive()).message == Number(1)


async def test_capacity_has_no_largest_value(pair: list[World]) -> None:
    """Regression: OverflowError, and the tag was taken, if the modules were compiled."""
    a, b = (world.channel(Number, tag=TAG, capacity=2**63) for world in pair)
    await a.send(Number(1), 1)
    assert (await b.receive()).message == Number(1)


@pytest.mark.parametrize("round", [0.5, "1", -1, 2**32])
async def test_a_round_that_is_no_number_of_a_round_is_refused(pair: list[World], round: Any) -> None:
    """Regression: 0.5 was sent as 0 if the modules were compiled."""
    a, _ = both(pair)
    with pytest.raises(LocalProtocolError, match=naming("round", repr(round), "0", 2**32 - 1)):
        await a.send(Number(1), 1, round=round)


async def test_only_user_tags_are_opened_for_a_sender_without_receiver(pair: list[World]) -> None:
    pair[1].peers.leave()
    for tag in (tags.BULK_FIRST, tags.TAG_MAX + 1, -1):
        pair[0].peers._system.send_nowait(DropMessages(tag), 1)
        pair[1].services.engine.poll()
        assert tag not in pair[1].services._demultiplexers
    pair[0].peers._system.send_nowait(DropMessages(TAG), 1)
    pair[1].services.engine.poll()
    assert TAG in pair[1].services._demultiplexers


@pytest.mark.parametrize("capacity", [0, -1, 1.5, None, True])
async def test_a_capacity_below_one_is_refused(pair: list[World], capacity: Any) -> None:
    with pytest.raises(ValueError, match="capacity"):
        pair[0].channel(Number, tag=TAG, capacity=capacity)


# ------------------------------------------------------------------------------------------------------------- leaving


async def test_messages_after_mains_return_are_dropped_and_counted(pair: list[World]) -> None:
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


async def test_each_send_to_a_rank_that_has_left_is_refused(pair: list[World]) -> None:
    a, b = both(pair)
    await a.send(Number(0), 1)
    pair[1].peers.leave()
    await pair[0].services.engine.until(lambda: 1 in pair[0].services.left)
    for _ in range(2):
        with pytest.raises(ClosedError, match="rank 1 has left and no longer receives") as caught:
            await a.send(Number(1), 1)
        assert (caught.value.dest, caught.value.tag) == (1, TAG)
        with pytest.raises(ClosedError, match="rank 1"):
            a.send_nowait(Number(1), 1)
        await a.send(Number(2), 0)  # to itself
    await b.send(Number(3), 0)  # who has left may send
    assert [(await a.receive()).message.value for _ in range(3)] == [2, 2, 3]


async def test_a_protocol_may_send_to_a_rank_that_has_left(pair: list[World]) -> None:
    """A coordinator continues after its rank's main has returned."""
    a, b = (world.services.open_channel(Number, tag=TAG, scope=5, name="protocol") for world in pair)
    pair[1].peers.leave()
    await pair[0].services.engine.until(lambda: 1 in pair[0].services.left)
    await a.send(Number(1), 1)
    assert (await b.receive()).message == Number(1)


# ---------------------------------------------------------------------------------------------------------- being full


async def test_message_taken_via_another_channel_wakes_condition_waits(
    pair: list[World],
) -> None:
    ours, other = (
        [world.services.open_channel(Number, tag=TAG, scope=scope, name=f"p{scope}") for world in pair]
        for scope in (1, 2)
    )
    waiting = asyncio.ensure_future(pair[1].services.engine.until(lambda: other[1].is_ready))
    await yields(3)
    other[0].send_nowait(Number(7), 1)
    assert ours[1].inbox.take(1) is None, "a task may test for messages between two passes"
    assert other[1].is_ready
    await yields(2)
    assert waiting.done(), "the waiting task must see the message without another arrival"


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
    assert (await b.receive()).message == Number(0), "messages that had arrived must remain readable"
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
        with pytest.raises(
            RemoteProtocolError, match="rank 0 sent more messages than the mailbox's capacity of 4"
        ) as caught:
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


async def test_all_that_is_here_is_received_at_once(pair: list[World]) -> None:
    a, b = both(pair, capacity=3)
    assert b.receive_all() == []
    for i in range(5):
        a.send_nowait(Number(i), 1)
    for numbers in ([0, 1, 2], [3, 4]):  # the tag stalls when the mailbox is full, and resumes when it is empty
        pair[1].services.engine.poll()
        assert [envelope.message.value for envelope in b.receive_all()] == numbers
    assert (b.receive_all(), b.statistics().received_count) == ([], 5)
    a.send_nowait(Number(5), 1)
    pair[1].services.engine.poll()
    b.close()
    assert [envelope.message.value for envelope in b.receive_all()] == [5], (
        "messages that had arrived must remain readable"
    )
    with pytest.raises(ClosedError):
        b.receive_all()


async def test_a_handler_is_called_in_place_of_a_mailbox(pair: list[World]) -> None:
    heard: list[Any] = []
    a, b = (world.services.open_channel(Number, tag=TAG, scope=1, name="h", handler=heard.append) for world in pair)
    a.send_nowait(Number(1), 1, round=7)
    pair[1].services.engine.poll()
    assert heard == [(Number(1), 0, 7)]
    assert b.receive_nowait() is None
    assert b.statistics().received_count == 1


# ------------------------------------------------------------------------------------------------------------- the end


async def test_leftovers_name_the_unread_and_the_never_opened(pair: list[World]) -> None:
    a, _ = both(pair)
    twin = pair[0].channel(Number, tag=TAG)
    await a.send(Number(1), 1)
    await twin.send(Number(1), 1)
    pair[1].services.engine.poll()
    unread, early = pair[1].services.leftovers()
    assert names(unread, 1, "Number", f"tag {TAG}")
    assert early == f"1 messages on tag {TAG} for channels that were never opened"


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
