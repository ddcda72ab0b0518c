"""Tests snapshots read from a donor's shared memory: they equal streamed snapshots, and are of the right round."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import weakref
from collections.abc import Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from support.local import eventually, worlds, yields
from support.snapshot_exchange import DONORS, ROUND, WEIGHTS, Party

from asyncdist.errors import RankLostError
from asyncdist.host_memory.cross_memory_attach import AttachToken, PeerProcess
from asyncdist.host_memory.shared_memory import SharedMemory
from asyncdist.messaging.streams import StreamAborted
from protocols.exchange.fetch import Fetch, as_buffers
from protocols.parameter_stream import messages, neighbours, receiver
from protocols.parameter_stream.messages import LocateRequest, Location
from protocols.parameter_stream.neighbours import TRIAL_COUNT
from protocols.parameter_stream.parts import Part
from protocols.parameter_stream.server import Offer


@pytest.fixture(autouse=True)
def small_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several pieces, in several windows."""
    monkeypatch.setattr(neighbours, "READ_NBYTES_MIN", 1)
    monkeypatch.setattr(receiver, "READ_NBYTES", 48)
    monkeypatch.setattr(messages, "CHUNK_NBYTES", 64)


@asynccontextmanager
async def parties() -> Any:
    """Return ranks of one process that can read each other's memory, as processes of one host can."""
    async with worlds(6) as made:
        for world in made:
            transport: Any = world.services.engine.transport
            transport.capabilities = dataclasses.replace(transport.capabilities, shares_memory=True)
        yield Party.of(made)


async def averaged(party: Party) -> receiver.SnapshotReceiver:
    """One round, which makes the right average."""
    intake, accumulator = party.intake(neighbours=party.desks[0].neighbours)
    await intake.run(WEIGHTS, deadline=party.deadline())
    party.check(accumulator)
    await party.is_over()
    return intake


def withdraw(party: Party, donor: int) -> None:
    """Withdraw a snapshot as a donor does at the end of a round, after which its memory is reused."""
    party.desks[donor].withdraw(party.offers[donor])
    for tensor in party.snapshots[donor].tensors.values():
        tensor.fill_(1)


async def test_first_round_is_streamed_and_later_ones_read_alike() -> None:
    async with parties() as party:
        assert (await averaged(party)).read_nbytes == 0
        for _ in range(3):
            sent = [desk.sent_nbytes for desk in party.desks]
            intake = await averaged(party)
            whole = sum(messages.stream_nbytes(party.snapshots[rank], exact=rank == intake.best) for rank in DONORS)
            assert intake.read_nbytes == intake.received_nbytes == whole
            assert [desk.sent_nbytes for desk in party.desks] == sent


async def test_first_round_of_introduced_ranks_is_read() -> None:
    async with parties() as party:
        for donor in DONORS:
            party.desks[donor].neighbours.introduce(range(6), nbytes=1)
        await eventually(lambda: party.desks[0].neighbours._readable == set(DONORS))
        intake = await averaged(party)
        assert intake.read_nbytes == intake.received_nbytes


async def test_whole_without_pieces_is_not_a_success() -> None:
    async with parties() as party:
        await averaged(party)
        reading = party.desks[0].neighbours.ask(1, 64, round=ROUND)
        assert reading is not None
        with pytest.raises(AssertionError, match="pieces"):
            await reading.whole()
        reading.finish()


async def test_other_hosts_and_small_models_are_not_introduced(monkeypatch: pytest.MonkeyPatch) -> None:
    async with parties() as party:
        party.worlds[1].services.hosts = (0, 1, 1, 3, 3, 3)
        party.desks[1].neighbours.introduce(range(6), nbytes=1)
        monkeypatch.setattr(neighbours, "READ_NBYTES_MIN", 2)
        party.desks[3].neighbours.introduce(range(6), nbytes=1)
        await eventually(lambda: party.desks[2].neighbours._readable == {1})
        assert not any(party.desks[rank].neighbours._readable for rank in (0, 1, 3, 4, 5))


async def test_introduction_that_cannot_be_read_counts_as_a_failure() -> None:
    async with parties() as party:
        party.desks[1].channel.send_nowait(Location(0, os.getpid(), 8, bytes(16), (8,)), 0)
        await eventually(lambda: party.desks[0].neighbours._failures[1] == 1)
        assert (await averaged(party)).read_nbytes == 0


async def test_what_can_be_read_and_what_cannot_make_one_average() -> None:
    """Readable and streamed snapshots make one average: rank 2 is on a different host, rank 5's memory cannot be read.

    Rank 5's memory is like memory that a device has pinned. After some useless offers, no more are requested.
    """
    async with parties() as party:
        asked: list[int] = []
        for donor in (2, 5):
            desk = party.desks[donor]

            def locate(location: Location, dest: int, round: int = 0, desk: Any = desk, donor: int = donor) -> None:
                asked.append(donor)
                odd = {"token": bytes(16)} if donor == 2 else {"tensors": (8,) * len(location.tensors)}
                desk.channel.send_nowait(dataclasses.replace(location, **odd), dest, round=round)  # type: ignore[arg-type]

            desk._locate = locate  # type: ignore[method-assign]
        for number in range(TRIAL_COUNT + 2):
            intake = await averaged(party)
            assert (0 < intake.read_nbytes < intake.received_nbytes) == (number > 0)
        assert sorted(asked) == [2] * TRIAL_COUNT + [5] * TRIAL_COUNT


async def test_donors_that_have_no_snapshot_yet_answer_when_they_have() -> None:
    async with parties() as party:
        await averaged(party)
        for donor in DONORS:
            party.desks[donor].withdraw(party.offers[donor])
            party.desks[donor]._ended_round = ROUND - 1  # the same round once more
        intake, accumulator = party.intake(neighbours=party.desks[0].neighbours)
        task = asyncio.ensure_future(intake.run(WEIGHTS, deadline=party.deadline()))
        for donor in reversed(DONORS):
            await yields(20)
            assert not task.done()
            party.offer(donor)
        await task
        party.check(accumulator)
        assert intake.read_nbytes == intake.received_nbytes


@pytest.mark.parametrize("donor", DONORS)
async def test_donor_withdrawing_at_any_moment_is_named_or_has_given(donor: int) -> None:
    endings = set()
    for moment in range(60):
        async with parties() as party:
            await averaged(party)
            intake, accumulator = party.intake(neighbours=party.desks[0].neighbours)
            before = {rank: dict(snapshot.by_name()) for rank, snapshot in party.snapshots.items()}
            kept = {rank: {name: tensor.clone() for name, tensor in of.items()} for rank, of in before.items()}
            task = asyncio.ensure_future(intake.run(WEIGHTS, deadline=party.deadline()))
            await yields(moment)
            withdraw(party, donor)
            try:
                await task
            except StreamAborted as error:
                assert error.facts["rank"] == donor == intake.donor
                endings.add("aborted")
            else:
                for name, tensor in before[donor].items():
                    tensor.copy_(kept[donor][name])
                party.check(accumulator)
                endings.add("read")
        if "read" in endings:
            break
    assert endings == {"aborted", "read"}


async def test_snapshots_withdrawn_during_a_read_are_streamed_instead() -> None:
    async with parties() as party:
        await averaged(party)
        of = party.desks[0].neighbours
        of.note_failure(3)
        assert (await averaged(party)).donor == 5 and 3 in of._readable
        intake = await averaged(party)
        assert intake.read_nbytes == intake.received_nbytes and not +of._failures


async def test_a_donor_that_is_lost_before_it_answers_is_named() -> None:
    async with parties() as party:
        await averaged(party)
        party.desks[3].channel.inbox.handler = lambda envelope: None
        intake, _ = party.intake(neighbours=party.desks[0].neighbours)
        task = asyncio.ensure_future(intake.run(WEIGHTS, deadline=party.deadline()))
        await yields(5)
        transport: Any = party.worlds[0].services.engine.transport
        transport._hub.lose(3)
        with pytest.raises(RankLostError):
            await task
        assert intake.donor == 3
        assert not party.desks[0].neighbours._asked


async def test_silent_donor_is_waited_for_until_the_deadline() -> None:
    async with parties() as party:
        await averaged(party)
        party.desks[1].channel.inbox.handler = lambda envelope: None
        intake, _ = party.intake(neighbours=party.desks[0].neighbours)
        with pytest.raises(TimeoutError, match="rank 1"):
            await intake.run(WEIGHTS, deadline=party.worlds[0].time())
        assert not party.desks[0].neighbours._asked


async def test_a_rank_that_was_started_again_is_found_out_anew() -> None:
    async with parties() as party:
        await averaged(party)
        party.desks[0]._forget(2)
        intake = await averaged(party)
        streamed = messages.stream_nbytes(party.snapshots[2], exact=False)
        assert intake.received_nbytes - intake.read_nbytes == streamed


async def test_small_snapshots_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "READ_NBYTES_MIN", 1 << 20)
    async with parties() as party:
        for _ in range(2):
            assert (await averaged(party)).read_nbytes == 0
        assert not party.desks[0].neighbours._last_slot


async def test_answers_that_nobody_asked_for_change_nothing() -> None:
    async with parties() as party:
        of = party.desks[0].neighbours
        token = AttachToken()
        for location in (Location(-1, token.pid, token.address, token.token, (1,)), Location(7), Location(-9)):
            party.desks[3].channel.send_nowait(location, 0, round=ROUND)
        intake, _ = party.intake(neighbours=of)
        intake.ask()
        party.desks[3].channel.send_nowait(Location(-1, token.pid, token.address, token.token, (1,)), 0)  # of rank 1
        await yields(50)
        assert of._readable == {1}
        intake.close()
        await eventually(lambda: not of._asked)


def test_a_request_with_the_number_of_a_stream_is_refused() -> None:
    with pytest.raises(ValueError, match="slot"):
        LocateRequest(0)


# -- the memory of a process ------------------------------------------------------------------------------------------


@pytest.fixture
def peer() -> Iterator[tuple[AttachToken, PeerProcess]]:
    token = AttachToken()
    yield token, PeerProcess(token.pid, token.address, token.token)


def test_what_is_read_is_what_lies_there(peer: tuple[AttachToken, PeerProcess]) -> None:
    there, here = torch.randn(100_000), torch.zeros(100_000)
    peer[1].read(there.data_ptr(), here.data_ptr(), here.nbytes)
    assert torch.equal(there, here)


def test_nothing_counts_as_read_once_the_token_is_taken_back(peer: tuple[AttachToken, PeerProcess]) -> None:
    token, process = peer
    there, here = torch.ones(10), torch.zeros(10)
    token.revoke()
    with pytest.raises(OSError, match="token"):
        process.read(there.data_ptr(), here.data_ptr(), here.nbytes)


def test_an_address_where_nothing_lies_is_an_error(peer: tuple[AttachToken, PeerProcess]) -> None:
    here = torch.zeros(10)
    with pytest.raises(OSError, match="Bad address"):
        peer[1].read(8, here.data_ptr(), here.nbytes)


async def test_a_part_in_shared_memory_is_used_where_it_is() -> None:
    """The part may be used until its donor withdraws it; a donor without shared memory gives a copy."""
    memory, mapped = SharedMemory(256), []
    memory.tensor.copy_(torch.arange(256, dtype=torch.uint8))
    async with parties() as party:
        for number, shared in enumerate((memory, memory, None), 1):
            buffers, part = as_buffers(memory.tensor[64:192]), Part(0, 1)
            made = Offer(number, buffers, lambda _: None, mean_of=part, memory=shared)
            offer = party.desks[1].offer(made, ends_earlier=False)
            into = torch.empty(128, dtype=torch.uint8)
            fetch = Fetch(party.worlds[0].services, party.desks[0], number, 1, into, part, 1)
            fetch.ask()
            found = await fetch.whole(in_place=True)
            assert torch.equal(found, memory.tensor[64:192])
            mapped.append(not fetch.is_whole)
            fetch.check()
            party.desks[1].withdraw(offer)
            if not fetch.is_whole:
                memory.tensor[64] += 1
                assert torch.equal(found, memory.tensor[64:192])
                with pytest.raises(StreamAborted):
                    fetch.check()
            fetch.close()
        assert mapped == [False, True, False]  # the first part is streamed


async def test_shared_memory_that_cannot_be_mapped_is_copied() -> None:
    memory = SharedMemory(256)
    async with parties() as party:
        of = party.desks[0].neighbours
        packed = memory.address.pack()
        wrong = dataclasses.replace(memory.address, token=bytes(16)).pack()
        assert of.memory_of(1, wrong) is None
        first = of.memory_of(1, packed)
        assert first is not None and of.memory_of(1, packed) is first
        others = [SharedMemory(64) for _ in range(8)]
        assert all(of.memory_of(1, other.address.pack()) is not None for other in others)
        assert of.memory_of(1, packed) is not first


async def test_a_closed_desk_unmaps_the_memory_of_others() -> None:
    """Regression: a closed policy of 4 MB kept up to 8 blocks per donor until 64 later policies had closed."""
    memory = SharedMemory(256)
    async with parties() as party:
        mapped = party.desks[0].neighbours.memory_of(1, memory.address.pack())
        assert mapped is not None
        reference = weakref.ref(mapped)
        del mapped
        party.desks[0].close()
        assert reference() is None


def test_an_address_of_shared_memory_has_its_size() -> None:
    with pytest.raises(ValueError, match="memory"):
        Location(-1, memory=b"short")
