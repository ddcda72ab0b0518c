"""Tests streams whose sender writes directly into the receiver's memory, and their failures."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import math
import os
import types
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from support.local import NONCE, engines, eventually, yields

from asyncdist import tags
from asyncdist.collectives.groups import Group
from asyncdist.errors import ClosedError, RankLostError
from asyncdist.host_memory.cross_memory_attach import PeerProcess
from asyncdist.messaging import streams, user_streams
from asyncdist.messaging.channels import Envelope
from asyncdist.messaging.services import Services
from asyncdist.runtime.world import World

PIECE = 4096
MIN = 1000
SIZES = (0, 1, MIN - 1, MIN, PIECE, PIECE + 1, 7 * PIECE + 13)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIECE_NBYTES", "SHARED_PIECE_NBYTES", "CHUNK_NBYTES"):
        monkeypatch.setattr(user_streams, name, PIECE)
    monkeypatch.setattr(streams, "USER_CHUNK_NBYTES", PIECE)
    for name in ("ATTENTION_S", "ATTENTION_CPU_S"):
        monkeypatch.setattr(user_streams, name, math.inf)
    monkeypatch.setattr(user_streams, "WRITTEN_NBYTES_MIN", MIN)
    monkeypatch.setattr(user_streams, "_PAGE_NBYTES", 16)


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the sizes of the pieces that were written directly, in bytes."""
    found: list[int] = []
    write = PeerProcess.write

    def counted(self: PeerProcess, source: int, target: int, nbytes: int) -> None:
        write(self, source, target, nbytes)
        found.append(nbytes)

    monkeypatch.setattr(PeerProcess, "write", counted)
    return found


@asynccontextmanager
async def neighbours(share: float) -> AsyncIterator[list[World]]:
    """Open worlds on two ranks of this process that write the given share of each stream directly."""
    async with engines(2) as (_, made):
        worlds, loop = [], asyncio.get_running_loop()
        for rank, engine in enumerate(made):
            transport = engine.transport
            transport.capabilities = dataclasses.replace(transport.capabilities, written_share=share)
            group = Group((0, 1), rank, tags.COLLECTIVE_FIRST, None)
            worlds.append(World(Services(engine, loop, NONCE), loop, nonce=NONCE, group=group))
        yield worlds


def numbers(nbytes: int) -> torch.Tensor:
    return (torch.arange(nbytes) % 251).to(torch.uint8)


async def stream(sender: World, receiver: World, tensor: torch.Tensor) -> torch.Tensor:
    async with asyncio.timeout(60):
        room = torch.zeros_like(tensor)
        await asyncio.gather(receiver.receive_stream(room, sender.rank), sender.send_stream(tensor, receiver.rank))
    assert receiver.services.slots.taken_count == 0
    return room


async def acquaint(sender: World, receiver: World) -> None:
    """The first stream is sent: meanwhile they find each other."""
    await stream(sender, receiver, numbers(MIN))
    await eventually(lambda: sender.rank in receiver._streams._finders)


# --------------------------------------------------------------------------------------------------------- what arrives


async def test_memory_is_watched_once_if_its_finder_is_restarted() -> None:
    """Regression: each restart of the only finder added a listener."""
    async with neighbours(1.0) as (sender, receiver):
        counts = []
        for _ in range(3):
            await acquaint(sender, receiver)
            counts.append(len(receiver.services._gone_listeners))
            receiver._streams._on_returned(sender.rank)
            sender._streams._on_returned(receiver.rank)
        assert len(set(counts)) == 1


@pytest.mark.parametrize("share", [0.5, 1.0])
async def test_every_size_arrives_and_is_counted(share: float, writes: list[int]) -> None:
    async with neighbours(share) as (sender, receiver):
        await acquaint(sender, receiver)
        assert not writes
        for nbytes in SIZES:
            writes.clear()
            before = sender.services.slots.sent_nbytes, receiver.services.slots.received_nbytes
            assert torch.equal(await stream(sender, receiver, numbers(nbytes)), numbers(nbytes)), nbytes
            assert (
                sender.services.slots.sent_nbytes - before[0],
                receiver.services.slots.received_nbytes - before[1],
            ) == (nbytes,) * 2
            expected = 0 if nbytes < MIN else nbytes if share == 1 else nbytes // 2 // 16 * 16
            assert sum(writes) == expected
            assert max(writes, default=0) <= PIECE


@pytest.mark.parametrize("others", [False, True])
async def test_a_pass_takes_less_while_another_task_waits(
    monkeypatch: pytest.MonkeyPatch, writes: list[int], others: bool
) -> None:
    monkeypatch.setattr(user_streams, "SHARED_PIECE_NBYTES", PIECE // 4)
    received: list[int] = []
    poll = streams.Pacer.poll
    monkeypatch.setattr(streams.Pacer, "poll", lambda self: (received.append(poll(self)), received[-1])[1])
    async with neighbours(0.5) as (sender, receiver):
        await acquaint(sender, receiver)
        waiting = [
            asyncio.ensure_future(world.services.engine.until(lambda: False)) for world in (sender, receiver) if others
        ]
        await yields(1)
        tensor = numbers(100 * PIECE)
        assert torch.equal(await stream(sender, receiver, tensor), tensor)
        for task in waiting:
            task.cancel()
    assert sum(received) > 40
    assert max(received) == (1 if others else streams.BURST_COUNT)
    assert max(writes) == (PIECE // 4 if others else PIECE)


@dataclasses.dataclass(frozen=True, slots=True)
class Note:
    pass


@pytest.mark.parametrize("is_written", [False, True], ids=["receiver", "sender"])
async def test_message_during_a_copy_waits_for_no_further_copy(
    monkeypatch: pytest.MonkeyPatch, is_written: bool
) -> None:
    """Regression: a pass delivered a message and then copied a chunk, before the task that awaited the message ran."""
    copied: list[int] = []
    noted_after: list[int] = []
    async with neighbours(0.5) as (sender, receiver), asyncio.timeout(60):
        channels = [world.channel(Note, tag=100) for world in (sender, receiver)]
        await acquaint(sender, receiver)
        owner, name = (PeerProcess, "write") if is_written else (streams.InboundStream, "post_one")
        copy = getattr(owner, name)

        def copy_and_send(self: Any, *args: int) -> Any:
            result = copy(self, *args)
            copied.append(1)
            if len(copied) % 5 == 0 and len(copied) <= 25:
                noted_after.append(len(copied))
                channels[is_written].send_nowait(Note(), 0 if is_written else 1)
            return result

        monkeypatch.setattr(owner, name, copy_and_send)

        async def receive_all() -> list[int]:
            counts = []
            for _ in range(5):
                await channels[not is_written].receive()
                counts.append(len(copied))
            return counts

        receiving = asyncio.ensure_future(receive_all())
        tensor = numbers(100 * PIECE)
        assert torch.equal(await stream(sender, receiver, tensor), tensor)
        assert await receiving == noted_after == [5, 10, 15, 20, 25]
        assert len(copied) > 40


@pytest.mark.parametrize("is_unreceived", [False, True])
async def test_core_is_yielded_before_a_copy_if_a_message_waits(
    monkeypatch: pytest.MonkeyPatch, is_unreceived: bool
) -> None:
    steps: list[str] = []
    write, post_one = PeerProcess.write, streams.InboundStream.post_one
    monkeypatch.setattr(PeerProcess, "write", lambda *args: (steps.append("write"), write(*args))[1])
    monkeypatch.setattr(streams.InboundStream, "post_one", lambda self: (steps.append("receive"), post_one(self))[1])
    monkeypatch.setattr(os, "sched_yield", lambda: steps.append("yield"))
    monkeypatch.setattr(streams, "BURST_COUNT", 1)
    async with neighbours(0.5) as (sender, receiver):
        await acquaint(sender, receiver)
        for world in (sender, receiver):
            monkeypatch.setattr(world.services.engine.transport, "is_sending", lambda: is_unreceived)
        steps.clear()
        await stream(sender, receiver, numbers(40 * PIECE))
        monkeypatch.undo()
    copies = [place for place, step in enumerate(steps) if step != "yield"]
    assert {steps[place] for place in copies} == {"write", "receive"}
    assert len(steps) - len(copies) == (len(copies) if is_unreceived else 0)
    assert not is_unreceived or all(steps[place - 1] == "yield" for place in copies)


@pytest.mark.parametrize(("seconds", "cpu_s", "is_over"), [(0.01, 0.0, False), (0.01, 0.002, True), (0.03, 0.0, True)])
async def test_preempted_sender_continues_to_write(
    monkeypatch: pytest.MonkeyPatch, writes: list[int], seconds: float, cpu_s: float, is_over: bool
) -> None:
    """A sender that has computed since its last piece, or was away for long, sends the rest as messages."""
    monkeypatch.setattr(user_streams, "ATTENTION_S", 0.02)
    monkeypatch.setattr(user_streams, "ATTENTION_CPU_S", 0.001)
    now = [0.0, 0.0]
    clock = types.SimpleNamespace(perf_counter=lambda: now[0], thread_time=lambda: now[1])
    monkeypatch.setattr(user_streams, "time", clock)
    async with neighbours(0.5) as (sender, receiver), asyncio.timeout(60):
        await acquaint(sender, receiver)
        room = torch.zeros(40 * PIECE, dtype=torch.uint8)
        sending, receiving = await under_way(sender, receiver, writes, room)
        written = sum(writes)
        now[:] = seconds, cpu_s
        await asyncio.gather(sending, receiving)
        assert torch.equal(room, numbers(40 * PIECE))
        assert sum(writes) == (written if is_over else 20 * PIECE)


@pytest.mark.parametrize("share", [0.5, 1.0])
async def test_unwritten_rest_has_the_chunks_of_the_grant(
    share: float, monkeypatch: pytest.MonkeyPatch, writes: list[int]
) -> None:
    """A rank that copies half of a stream copies the unwritten rest in chunks that are as small."""
    monkeypatch.setattr(streams, "USER_CHUNK_NBYTES", 4 * PIECE)
    sizes: list[int] = []
    async with neighbours(share) as (sender, receiver), asyncio.timeout(60):
        await acquaint(sender, receiver)
        transport = receiver.services.engine.transport
        irecv = transport.irecv
        monkeypatch.setattr(
            transport, "irecv", lambda buffer, *where: (sizes.append(len(buffer)), irecv(buffer, *where))[1]
        )
        room = torch.zeros(40 * PIECE, dtype=torch.uint8)
        sending, receiving = await under_way(sender, receiver, writes, room)
        monkeypatch.setattr(user_streams, "ATTENTION_S", -1.0)
        await asyncio.gather(sending, receiving)
        assert torch.equal(room, numbers(40 * PIECE))
        assert sum(sizes) + sum(writes) >= room.nbytes
        assert max(sizes) == (PIECE if share < 1 else 4 * PIECE)


async def test_receiver_may_begin_before_the_sender_opens_its_streams(writes: list[int]) -> None:
    """The receiver's offer waits while a policy has the tag open at the sender; answering it once raised an error."""
    async with neighbours(0.5) as (sender, receiver), asyncio.timeout(60):
        sender.services.open_channel(streams.Grant, tag=tags.PARAM, scope=1, name="of a policy")
        room = torch.zeros(MIN, dtype=torch.uint8)
        receiving = asyncio.ensure_future(receiver.receive_stream(room, sender.rank))
        await yields(100)
        await sender.send_stream(numbers(MIN), receiver.rank)
        assert torch.equal(await receiving, numbers(MIN))
        await eventually(lambda: sender.rank in receiver._streams._finders)
        assert torch.equal(await stream(sender, receiver, numbers(PIECE)), numbers(PIECE))
        assert writes


@pytest.mark.parametrize("share", [0.5, 1.0])
async def test_both_ways_at_once_and_several_of_a_pair(share: float, writes: list[int]) -> None:
    async with neighbours(share) as (one, other), asyncio.timeout(60):
        await acquaint(one, other)
        await acquaint(other, one)
        tensors = [numbers(nbytes) for nbytes in SIZES]
        rooms = [[torch.zeros_like(tensor) for tensor in tensors] for _ in range(2)]
        await asyncio.gather(
            *(one.receive_stream(room, 1) for room in rooms[0]),
            *(other.send_stream(tensor, 0) for tensor in tensors),
            *(one.send_stream(tensor, 1) for tensor in tensors),
            *(other.receive_stream(room, 0) for room in rooms[1]),
        )
        for received in rooms:
            assert all(map(torch.equal, received, tensors))
        if share == 1:
            assert sum(writes) == 2 * sum(nbytes for nbytes in SIZES if nbytes >= MIN)
        else:
            assert len(writes) >= 2, "at least the first chunk of each rank must be written directly"


async def test_one_pass_writes_one_piece_of_one_stream(writes: list[int]) -> None:
    """Direct writes are cut into pieces, so that they delay no deadline and no safe point."""
    async with neighbours(1.0) as (sender, receiver), asyncio.timeout(60):
        await acquaint(sender, receiver)
        tasks = []
        for _ in range(3):
            tasks.append(asyncio.ensure_future(sender.send_stream(numbers(4 * PIECE), 1)))
            tasks.append(asyncio.ensure_future(receiver.receive_stream(torch.zeros(4 * PIECE, dtype=torch.uint8), 0)))
        await yields(1)  # all writes are granted, and no rank has polled
        assert not writes
        assert sender.services.engine.poll() == 3, "the first poll must only handle the three grants"
        assert not writes
        for count in range(1, 6):
            assert sender.services.engine.poll() == 0
            assert writes == [PIECE] * count
        writer = sender._streams._writer
        assert writer is not None and sorted(len(one.tail.rest) for one in writer._senders) == [2 * PIECE] * 2 + [
            3 * PIECE
        ]
        await asyncio.gather(*tasks)


async def test_sender_that_writes_to_one_rank_lets_the_others_copy(writes: list[int]) -> None:
    async with neighbours(0.5) as (sender, receiver), asyncio.timeout(60):
        await acquaint(sender, receiver)
        tensors, rooms = [numbers(8 * PIECE)] * 2, [torch.zeros(8 * PIECE, dtype=torch.uint8) for _ in range(2)]
        await asyncio.gather(
            *(receiver.receive_stream(room, 0) for room in rooms), *(sender.send_stream(t, 1) for t in tensors)
        )
        assert all(map(torch.equal, rooms, tensors))
        assert sum(writes) == 4 * PIECE, (
            "the sender must write half of the first stream, and let the receiver copy the rest"
        )


@pytest.mark.parametrize("share", [0.5, 1.0])
async def test_sender_that_computes_sends_the_rest_at_its_safe_points(
    share: float, writes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages continue to move while the sender computes; direct writes do not."""
    async with neighbours(share) as (sender, receiver), asyncio.timeout(60):
        await acquaint(sender, receiver)
        tensor, room = numbers(40 * PIECE), torch.zeros(40 * PIECE, dtype=torch.uint8)
        before = sender.services.slots.sent_nbytes
        sending, receiving = await under_way(sender, receiver, writes, room)
        written = len(writes)
        monkeypatch.setattr(user_streams, "ATTENTION_S", -1.0)
        await asyncio.gather(sending, receiving)
        assert torch.equal(room, tensor)
        assert len(writes) == written
        assert sender.services.slots.sent_nbytes - before == tensor.nbytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.bool])
async def test_other_dtypes_and_shapes(dtype: torch.dtype, writes: list[int]) -> None:
    async with neighbours(1.0) as (sender, receiver):
        await acquaint(sender, receiver)
        tensor = torch.nn.Parameter(torch.rand(7, 11, 93).mul(2).to(dtype), requires_grad=dtype.is_floating_point)
        room = torch.zeros_like(tensor)
        await asyncio.gather(receiver.receive_stream(room, 0), sender.send_stream(tensor, 1))
        assert torch.equal(room, tensor)
        assert sum(writes) == tensor.nbytes


async def test_nothing_is_written_where_the_receiver_is_not_found(
    writes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A receiver on a different host is not found: no process has its id, or the process lacks the token."""

    def not_here(self: PeerProcess) -> None:
        raise OSError(errno.EPERM, "not here")

    monkeypatch.setattr(PeerProcess, "check", not_here)
    async with neighbours(1.0) as (sender, receiver):
        for _ in range(3):
            assert torch.equal(await stream(sender, receiver, numbers(PIECE)), numbers(PIECE))
            await yields(10)
        assert not writes
        assert not receiver._streams._finders


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("good_count", [0, 1, 3])
async def test_what_cannot_be_written_is_sent(
    share: float, good_count: int, writes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory of a device, say: the kernel copies none of it."""
    write = PeerProcess.write

    def write_some(self: PeerProcess, source: int, target: int, nbytes: int) -> None:
        if len(writes) >= good_count:
            raise OSError(errno.EFAULT, "Bad address")
        write(self, source, target, nbytes)

    async with neighbours(share) as (sender, receiver):
        await acquaint(sender, receiver)
        monkeypatch.setattr(PeerProcess, "write", write_some)
        tensor = numbers(9 * PIECE + 5)
        before = sender.services.slots.sent_nbytes
        assert torch.equal(await stream(sender, receiver, tensor), tensor)
        assert len(writes) == good_count
        assert sender.services.slots.sent_nbytes - before == tensor.nbytes
        monkeypatch.setattr(PeerProcess, "write", write)
        assert torch.equal(await stream(sender, receiver, tensor), tensor)


# ---------------------------------------------------------------------------------------------------------- given up


async def under_way(
    sender: World, receiver: World, writes: list[int], room: torch.Tensor
) -> tuple[asyncio.Task[None], asyncio.Task[torch.Tensor]]:
    """A stream that has been written in part."""
    writes.clear()
    sending = asyncio.ensure_future(sender.send_stream(numbers(room.nbytes), 1))
    await yields(3)
    receiving = asyncio.ensure_future(receiver.receive_stream(room, 0))
    await asyncio.sleep(0)
    sender.services.engine.poll()  # receives the grant
    sender.services.engine.poll()
    assert 0 < len(writes) < room.nbytes // PIECE
    return sending, receiving


async def test_a_sender_that_is_cancelled_writes_no_more(writes: list[int]) -> None:
    async with neighbours(1.0) as (sender, receiver), asyncio.timeout(60):
        await acquaint(sender, receiver)
        room = torch.zeros(20 * PIECE, dtype=torch.uint8)
        sending, receiving = await under_way(sender, receiver, writes, room)
        sending.cancel()
        with pytest.raises(streams.StreamAborted):
            await receiving
        assert sending.cancelled()
        written = len(writes)
        assert written < 20
        await eventually(lambda: sender.services.engine.is_idle)
        await yields(30)
        assert len(writes) == written
        assert torch.equal(room[: written * PIECE], numbers(written * PIECE))
        assert not room[written * PIECE :].any()
        assert torch.equal(await stream(sender, receiver, numbers(5 * PIECE)), numbers(5 * PIECE)), (
            "the next stream must arrive unchanged"
        )


async def test_cancelled_receiver_keeps_the_memory_until_answered(writes: list[int]) -> None:
    async with neighbours(1.0) as (sender, receiver), asyncio.timeout(60):
        await acquaint(sender, receiver)
        room = torch.zeros(20 * PIECE, dtype=torch.uint8)
        sending, receiving = await under_way(sender, receiver, writes, room)
        receiving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await receiving
        assert receiver.services.slots.taken_count == 1
        with pytest.raises(ClosedError):
            await sending
        await eventually(lambda: receiver.services.slots.taken_count == 0)
        written = len(writes)
        assert written < 20
        await yields(30)
        assert len(writes) == written
        assert torch.equal(await stream(sender, receiver, numbers(5 * PIECE)), numbers(5 * PIECE)), (
            "the next stream must arrive unchanged"
        )


async def test_other_tasks_have_their_turns_between_two_pieces(writes: list[int]) -> None:
    async with neighbours(1.0) as (sender, receiver):
        await acquaint(sender, receiver)
        seen = set()

        async def look() -> None:
            while len(writes) < 20:
                seen.add(len(writes))
                await asyncio.sleep(0)

        looking = asyncio.ensure_future(look())
        await stream(sender, receiver, numbers(20 * PIECE))
        await looking
        assert len(seen) > 15


# ------------------------------------------------------------------------------------------------- what a peer may say


async def test_a_sender_that_does_not_know_the_receiver_sends(writes: list[int]) -> None:
    async with neighbours(1.0) as (sender, receiver):
        await acquaint(sender, receiver)
        sender._streams._processes.clear()
        assert torch.equal(await stream(sender, receiver, numbers(5 * PIECE)), numbers(5 * PIECE))
        assert not writes


async def test_words_that_nobody_asked_for_change_nothing() -> None:
    async with neighbours(1.0) as (sender, _):
        sender._streams._on_message(Envelope(user_streams.AttachAccept(), 1, 0))
        sender._streams._on_message(Envelope(user_streams.AttachOffer(-5, -1, b"x"), 1, 0))
        assert not sender._streams._finders
        assert not sender._streams._processes


async def test_a_world_that_is_closed_is_not_written_to(writes: list[int]) -> None:
    async with neighbours(1.0) as (sender, receiver):
        await acquaint(sender, receiver)
        receiver.close()
        with pytest.raises(OSError, match="token"):
            sender._streams._processes[1].check()


async def test_one_that_is_lost_is_not_to_write_any_more() -> None:
    async with neighbours(1.0) as (sender, receiver):
        await acquaint(sender, receiver)
        await acquaint(receiver, sender)
        receiver.peers.mark_lost(0)
        with pytest.raises(OSError, match="token"):
            sender._streams._processes[1].check()
        receiver._streams._processes[0].check()


@pytest.mark.parametrize("is_given_up", [False, True])
async def test_memory_is_kept_where_a_lost_sender_may_still_write(is_given_up: bool, writes: list[int]) -> None:
    async with neighbours(1.0) as (sender, receiver), asyncio.timeout(60):
        await acquaint(sender, receiver)
        room = torch.zeros(20 * PIECE, dtype=torch.uint8)
        sending, receiving = await under_way(sender, receiver, writes, room)
        if is_given_up:
            receiving.cancel()
            await yields(1)
            assert receiver.services.slots.discarding_count == 1
        for operation in list(receiver.services.engine._operations):
            operation.finish(RankLostError("rank 0 is gone", rank=0))
            receiver.services.engine._operations.remove(operation)
        receiver.services.engine.recheck()
        with pytest.raises((RankLostError, asyncio.CancelledError)):
            await receiving
        assert receiver.services.slots.discarding_count == 0
        assert [view.nbytes for view in receiver.services.slots.kept] == [room.nbytes]
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


async def test_whole_stream_is_not_kept_if_its_sender_is_lost(
    writes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with neighbours(1.0) as (sender, receiver):
        await acquaint(sender, receiver)
        monkeypatch.setattr(receiver.services.engine.transport, "lost_ranks", lambda: frozenset({0}))
        assert torch.equal(await stream(sender, receiver, numbers(5 * PIECE)), numbers(5 * PIECE))
        assert not receiver.services.slots.kept
        assert sum(writes) == 5 * PIECE
