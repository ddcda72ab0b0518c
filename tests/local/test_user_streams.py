"""Tests ``send_stream`` and ``receive_stream`` at the moment when a grant meets its tensor."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
import torch
from support.local import eventually, worlds, yields

from asyncdist import tags
from asyncdist.messaging import demultiplexer, streams
from asyncdist.runtime.world import World
from asyncdist.transports.matching import EAGER_NBYTES


@dataclass(frozen=True, slots=True)
class Greeting:
    number: int


COUNT = 40 * EAGER_NBYTES
VALUES = (torch.arange(COUNT) % 251).to(torch.uint8)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make chunks so small that there are more than can be in progress at once, and that each needs its receiver."""
    monkeypatch.setattr(streams, "USER_CHUNK_NBYTES", EAGER_NBYTES + 8)


async def grant_that_has_come(sender: World, receiver: World) -> tuple[asyncio.Task[None], asyncio.Task[torch.Tensor]]:
    """Return a send that a pass has just granted, before its task runs again, and its receive."""
    sending = asyncio.ensure_future(sender.send_stream(VALUES, 1))
    await yields(3)
    receiving = asyncio.ensure_future(receiver.receive_stream(torch.zeros(COUNT, dtype=torch.uint8), 0))
    await asyncio.sleep(0)  # the receiver has granted the stream, and the sender has not polled yet
    assert not sender.services.slots.sent_nbytes and not sender._streams._under_way
    sender.services.engine.poll()
    assert sender._streams._under_way, "the stream must start in the pass that receives the grant"
    return sending, receiving


async def test_a_grant_is_answered_in_the_pass_that_brings_it() -> None:
    async with worlds(2) as (sender, receiver):
        sending, receiving = await grant_that_has_come(sender, receiver)
        async with asyncio.timeout(60):
            await sending
            assert torch.equal(await receiving, VALUES)
        assert not sender._streams._under_way


async def test_send_cancelled_before_its_grant_arrived_answers_it() -> None:
    """Regression: the stream had begun but nothing sent it, and the receiver would have waited forever."""
    async with worlds(2) as (sender, receiver):
        sending, receiving = await grant_that_has_come(sender, receiver)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        async with asyncio.timeout(60):
            with pytest.raises(streams.StreamAborted):
                await receiving
        await eventually(lambda: receiver.services.slots.taken_count == 0 and sender.services.engine.is_idle)
        assert not sender._streams._under_way


async def test_many_grants_may_come_before_the_first_send(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: grants beyond the limit of early messages were dropped if a protocol used the tag, and all waited."""
    monkeypatch.setattr(demultiplexer, "EARLY_FRAME_COUNT_MAX", 8)
    async with worlds(2) as (sender, receiver), asyncio.timeout(60):
        sender.services.open_channel(Greeting, tag=tags.PARAM, scope=1, name="other")
        tensors = [torch.zeros(1) for _ in range(20)]
        receiving = asyncio.gather(*(receiver.receive_stream(tensor, 0) for tensor in tensors))
        await yields(50)
        await asyncio.gather(*(sender.send_stream(torch.full((1,), float(number)), 1) for number in range(20)))
        await receiving
    assert [tensor.item() for tensor in tensors] == list(range(20))


async def test_early_grants_leave_room_for_a_protocols_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: if the grants of streams filled the store of early messages, a protocol's message was dropped."""
    count = 8
    monkeypatch.setattr(demultiplexer, "EARLY_FRAME_COUNT_MAX", count)
    async with worlds(2) as (sender, receiver), asyncio.timeout(20):
        sender.services.open_channel(Greeting, tag=tags.PARAM, scope=2, name="first")
        tensors = [torch.zeros(1) for _ in range(count)]
        receiving = asyncio.gather(*(receiver.receive_stream(tensor, 0) for tensor in tensors))
        await yields(50)
        channel = receiver.services.open_channel(Greeting, tag=tags.PARAM, scope=1, name="other")
        await channel.send(Greeting(7), 0)
        await yields(50)
        opened = sender.services.open_channel(Greeting, tag=tags.PARAM, scope=1, name="other")
        assert (await opened.receive()).message == Greeting(7)
        await asyncio.gather(*(sender.send_stream(torch.ones(1), 1) for _ in range(count)))
        await receiving


async def test_empty_tensors_may_be_received_before_they_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: grants of empty tensors, which occupy no slot, were dropped beyond the number of slots."""
    monkeypatch.setattr(tags, "BULK_SLOT_COUNT", 4)
    async with worlds(2) as (sender, receiver), asyncio.timeout(20):
        await asyncio.gather(receiver.receive_stream(torch.zeros(1), 0), sender.send_stream(torch.ones(1), 1))
        for _ in range(9):
            await receiver.receive_stream(torch.empty(0), 0)
        last = torch.zeros(1)
        receiving = asyncio.ensure_future(receiver.receive_stream(last, 0))
        await yields(50)
        for _ in range(9):
            await sender.send_stream(torch.empty(0), 1)
        await sender.send_stream(torch.ones(1), 1)
        await receiving
        assert last.item() == 1.0


async def test_a_cancelled_receive_after_an_empty_tensor() -> None:
    """Regression: the cancellation removed the empty tensor's grant, and later receives were one tensor late."""
    async with worlds(2) as (sender, receiver), asyncio.timeout(60):
        await receiver.receive_stream(torch.empty(0), 0)
        cancelled = asyncio.ensure_future(receiver.receive_stream(torch.zeros(1), 0))
        await yields(3)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        await yields(50)
        await sender.send_stream(torch.empty(0), 1)
        for number in range(3):
            tensor, _ = await asyncio.gather(
                receiver.receive_stream(torch.zeros(1), 0), sender.send_stream(torch.full((1,), float(number)), 1)
            )
            assert tensor.item() == number


@pytest.mark.slow
async def test_thousand_waiting_chunks_are_taken_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: each arrival posted the next receive recursively, up to Python's recursion limit."""
    monkeypatch.setattr(streams, "USER_CHUNK_NBYTES", 1)
    async with worlds(2) as (sender, receiver), asyncio.timeout(60):
        tensors = torch.ones(2000, dtype=torch.uint8), torch.zeros(2000, dtype=torch.uint8)
        await asyncio.gather(sender.send_stream(tensors[0], 1), receiver.receive_stream(tensors[1], 0))
        assert torch.equal(*tensors)
