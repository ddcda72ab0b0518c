"""Tests the internals of the snapshot exchange: several donors in one window, any order of events, abandonment."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from scripts.population import Mixed
from support.local import eventually, worlds, yields
from support.snapshot_exchange import BEST, DONORS, ROUND, WEIGHTS, Party

from asyncdist import World
from asyncdist.errors import RankLostError
from asyncdist.messaging.outbound_streams import OutboundStream
from asyncdist.messaging.streams import WINDOW_COUNT, StreamAborted
from asyncdist.tensors.flat_state import FlatState
from asyncdist.transports import matching
from protocols import parameter_stream
from protocols.parameter_stream.receive_layout import CACHED_COUNT_MAX
from protocols.parameter_stream.receiver import new_ring
from protocols.parameter_stream.server import SnapshotServer


@pytest.fixture(params=[0, 1 << 20], ids=["rendezvous", "eager"], autouse=True)
def eager_nbytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    nbytes: int = request.param
    monkeypatch.setattr(matching, "EAGER_NBYTES", nbytes)
    return nbytes


@pytest.fixture
def chunks_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    return lambda nbytes: monkeypatch.setattr(parameter_stream.messages, "CHUNK_NBYTES", nbytes)


@pytest.fixture(params=[64, 1 << 22], ids=["small chunks", "large chunks"])
def chunk_nbytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    nbytes: int = request.param
    monkeypatch.setattr(parameter_stream.messages, "CHUNK_NBYTES", nbytes)
    return nbytes


def silence(desk: SnapshotServer) -> None:
    """Stop delivering messages to this rank."""
    desk.channel.inbox.handler = lambda envelope: None


def watch_receives(world: World, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[memoryview]]:
    """The buffers of bulk receives that have not ended; none of them may overlap another one."""
    requests: list[tuple[Any, memoryview]] = []
    transport: Any = world.services.engine.transport
    irecv = transport.irecv

    def posted() -> list[memoryview]:
        return [buffer for request, buffer in requests if not (request.done or request.error)]

    def watched(buffer: memoryview, source: int, tag: int) -> Any:
        start = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
        for other in posted():
            first = torch.frombuffer(other, dtype=torch.uint8).data_ptr()
            assert start + len(buffer) <= first or first + len(other) <= start, "two receives must not share memory"
        request = irecv(buffer, source, tag)
        requests.append((request, buffer))
        return request

    monkeypatch.setattr(transport, "irecv", watched)
    return posted


def hold_grants(party: Party) -> list[Callable[[], None]]:
    """Hold the donors' grants back until the test releases them."""
    held: list[Callable[[], None]] = []
    for donor in DONORS:
        channel = party.desks[donor].channel
        handler = channel.inbox.handler
        assert handler is not None
        channel.inbox.handler = lambda envelope, handler=handler: held.append(partial(handler, envelope))  # type: ignore[misc]
    return held


async def test_sum_is_made_in_donor_order_for_any_order_of_answers(chunk_nbytes: int) -> None:
    """For a small state, all donors are asked at once and the last answers first; otherwise they are asked in turn."""
    async with worlds(6) as made:
        party = Party.of(made)
        held = hold_grants(party)
        intake, accumulator = party.intake()
        task = asyncio.ensure_future(intake.run(WEIGHTS, deadline=party.deadline()))
        asked_at_once = 0
        while not task.done():
            await yields(30)
            asked_at_once = max(asked_at_once, len(held))
            if held:
                held.pop()()
        await task
        assert asked_at_once == (1 if chunk_nbytes == 64 else len(DONORS))
        whole = sum(
            parameter_stream.messages.stream_nbytes(party.snapshots[rank], exact=rank == BEST) for rank in DONORS
        )
        assert intake.received_nbytes == made[0].services.slots.received_nbytes == whole
        party.check(accumulator)
        await party.is_over()


@pytest.mark.slow
@pytest.mark.usefixtures("chunk_nbytes")
async def test_chunks_in_flight_fit_the_window_and_share_no_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The replacer is cancelled at each possible moment, or not at all."""
    endings = set()
    for moment in range(400):
        async with worlds(6) as made:
            party = Party.of(made)
            posted = watch_receives(made[0], monkeypatch)
            ring = new_ring()
            intake, accumulator = party.intake(ring)
            task = asyncio.ensure_future(intake.run(WEIGHTS, deadline=party.deadline()))
            for _ in range(moment):
                await yields(1)
                if task.done():
                    break
                assert sum(map(len, posted())) <= WINDOW_COUNT * parameter_stream.messages.CHUNK_NBYTES
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            endings.add(task.cancelled())
            await party.is_over()
            assert not posted()
            assert ring.nbytes <= WINDOW_COUNT * parameter_stream.messages.CHUNK_NBYTES
            again, accumulator = party.intake()
            await again.run(WEIGHTS, deadline=party.deadline())
            party.check(accumulator)
            await party.is_over()
        if False in endings:
            break
    assert endings == {True, False}


@pytest.mark.usefixtures("chunk_nbytes")
async def test_a_ring_and_an_accumulator_serve_round_after_round() -> None:
    async with worlds(6) as made:
        party = Party.of(made)
        ring = new_ring()
        accumulator = party.state.new_buffers(accumulate=True)
        for _ in range(3):
            for tensor in (*accumulator.tensors.values(), *map(ring.page, range(WINDOW_COUNT))):
                tensor.fill_(1)  # bytes of an earlier round in the buffer have no effect
            intake, _ = party.intake(ring, accumulator)
            await intake.run(WEIGHTS, deadline=party.deadline())
            party.check(accumulator)
            await party.is_over()


def test_ring_caches_small_states_as_long_as_their_accumulator(chunk_nbytes: int) -> None:
    state, ring = FlatState(Mixed(width=16)), new_ring()
    accumulator = state.new_buffers(accumulate=True)
    layout = ring.layout_of(accumulator)
    assert ring.layout_of(accumulator) is layout
    for offset in range(0, 100 * 16, 16):
        layout.donor_chunks(ring, 0, offset, first=False, exact=True)
    assert len(layout._cached) == (0 if chunk_nbytes == 64 else CACHED_COUNT_MAX)
    kept = weakref.ref(layout)
    del accumulator, layout
    assert kept() is None


async def test_abandoned_chunks_do_not_land_where_another_donor_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each donor sends three chunks into a window of four: the next donor uses the fourth, and answers first."""
    monkeypatch.setattr(parameter_stream.messages, "CHUNK_NBYTES", 384)
    async with worlds(6) as made:
        party = Party.of(made)
        held = hold_grants(party)
        posted = watch_receives(made[0], monkeypatch)
        intake, _ = party.intake()
        task = asyncio.ensure_future(intake.run(WEIGHTS, deadline=party.deadline()))
        await eventually(lambda: len(held) == 2)
        held.pop(0)()
        await eventually(lambda: intake.received_nbytes > 0 and len(held) == 2)
        assert len(posted()) == 4
        held.pop()()
        await eventually(lambda: len(posted()) == 3)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await eventually(lambda: len(posted()) == 3 and len(held) == 3)
        for let_in in held:
            let_in()
        await party.is_over()


@pytest.mark.slow
@pytest.mark.usefixtures("chunk_nbytes")
@pytest.mark.parametrize("donor", DONORS)
async def test_a_donor_that_gives_up_is_named_and_the_others_are_told(donor: int) -> None:
    async with worlds(6) as made:
        party = Party.of(made)
        party.desks[donor].withdraw(party.offers[donor])
        assert party.freed == [party.snapshots[donor]]
        intake, _ = party.intake()
        with pytest.raises(StreamAborted, match=f"rank {donor} aborted"):
            await intake.run(WEIGHTS, deadline=party.deadline())
        assert intake.donor == donor
        await party.is_over()


@pytest.mark.usefixtures("chunk_nbytes")
@pytest.mark.parametrize("donor", DONORS)
async def test_a_donor_that_is_lost_is_named_and_the_others_are_told(donor: int) -> None:
    for moment in (0, 5, 20):
        async with worlds(6) as made:
            party = Party.of(made)
            silence(party.desks[donor])  # the donor dies before it answers
            transport: Any = made[0].services.engine.transport
            intake, _ = party.intake()
            task = asyncio.ensure_future(intake.run(WEIGHTS, deadline=party.deadline()))
            await yields(moment)
            transport._hub.lose(donor)
            with pytest.raises(RankLostError):
                await task
            assert intake.donor == donor
            await eventually(lambda: not made[0].services.slots.unanswered_count)
            await eventually(lambda: made[0].services.engine.is_idle)


async def test_deadline_that_passes_names_the_awaited_donor(chunk_nbytes: int) -> None:
    async with worlds(6) as made:
        party = Party.of(made)
        held = hold_grants(party)
        intake, _ = party.intake()
        with pytest.raises(TimeoutError, match="from rank 1"):
            await intake.run(WEIGHTS, deadline=made[0].time())
        assert intake.donor == 1
        assert made[0].services.slots.discarding_count == (1 if chunk_nbytes == 64 else len(DONORS))
        # the number of grants and cancels
        await eventually(lambda: len(held) == (2 if chunk_nbytes == 64 else 2 * len(DONORS)))
        for let_in in held:
            let_in()
        await party.is_over()


async def test_slot_is_reused_before_its_donor_has_seen_the_abort(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The donor is between two safe points; the replacer asks again, for other donors of the same round."""
    under_way: list[tuple[OutboundStream, asyncio.Event]] = []

    class SlowToTell(OutboundStream):
        def start(self) -> bool:
            super().start()
            return False

        async def run(self) -> bool:
            complete = await super().run()
            told = asyncio.Event()
            under_way.append((self, told))
            await told.wait()
            return complete

    monkeypatch.setattr(parameter_stream.server, "OutboundStream", SlowToTell)
    async with worlds(6) as made:
        party = Party.of(made)
        for _ in range(2):
            intake, accumulator = party.intake()
            await intake.run(WEIGHTS, deadline=party.deadline())
            party.check(accumulator)
        for donor in DONORS:
            party.desks[donor].withdraw(party.offers[donor])
        await eventually(lambda: len(under_way) == 2 * len(DONORS))
        assert {(stream.dest, stream.slot) for stream, _ in under_way} == {(0, 0)}
        for _, told in under_way[len(DONORS) :]:
            told.set()
        await yields(100)
        assert party.freed == [], "the buffer may still be read by each rank's first stream"
        for _, told in under_way[: len(DONORS)]:
            told.set()
        await eventually(lambda: len(party.freed) == len(DONORS))
        await party.is_over()
        assert [world.services.engine.failure for world in made] == [None] * len(made)


# -- asked before the donors are ready --------------------------------------------------------------------------------


async def test_early_request_is_answered_when_the_snapshot_exists(
    chunk_nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The donor accepts requests up to the window's size before its weights are known, and sends nothing until then."""
    async with worlds(6) as made:
        party = Party.of(made, late=True)
        posted = watch_receives(made[0], monkeypatch)
        intake, accumulator = party.intake()
        intake.ask()
        await yields(100)
        asked_count = 1 if chunk_nbytes == 64 else len(DONORS)
        assert sum(map(len, posted())) <= WINDOW_COUNT * parameter_stream.messages.CHUNK_NBYTES
        assert [len(party.desks[donor]._early) for donor in DONORS] == [1] * asked_count + [0] * (5 - asked_count)
        for donor in reversed(DONORS):
            party.offer(donor)
        await eventually(lambda: not posted())
        assert not any(party.desks[donor]._early for donor in DONORS)
        assert intake.received_nbytes == 0
        await intake.run(WEIGHTS, deadline=party.deadline())
        party.check(accumulator)
        await party.is_over()


@pytest.mark.usefixtures("chunk_nbytes")
@pytest.mark.parametrize("closes_first", [True, False])
async def test_what_was_asked_early_is_answered_when_the_round_is_over(closes_first: bool) -> None:
    """The replacer may give up first, or the donor may learn first that it has no snapshot: there is one abort."""
    async with worlds(6) as made:
        party = Party.of(made, late=True)
        intake, _ = party.intake()
        intake.ask()
        await yields(100)
        taken_count = made[0].services.slots.taken_count
        assert taken_count == sum(len(party.desks[donor]._early) for donor in DONORS) > 0
        for donor in DONORS:
            party.desks[donor].end_rounds(ROUND - 1)
        await yields(100)
        assert made[0].services.slots.taken_count == taken_count, "the slot must be kept until the round is over"
        if closes_first:
            intake.close()
        for donor in DONORS:
            party.desks[donor].end_rounds(ROUND)
        await yields(100)
        intake.close()
        assert not any(party.desks[donor]._early for donor in DONORS)
        await party.is_over()


@pytest.mark.usefixtures("chunk_nbytes")
async def test_failed_donor_is_named_when_the_early_request_is_used() -> None:
    async with worlds(6) as made:
        party = Party.of(made, late=True)
        intake, _ = party.intake()
        intake.ask()
        await yields(100)
        party.desks[1].end_rounds(ROUND)
        for donor in DONORS[1:]:
            party.offer(donor)
        with pytest.raises(StreamAborted, match="rank 1"):
            await intake.run(WEIGHTS, deadline=party.deadline())
        await party.is_over()


async def test_no_more_grants_wait_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameter_stream.server, "EARLY_COUNT_MAX", 2 / 6)  # for each of six ranks
    async with worlds(6) as made:
        party = Party.of(made, late=True)
        intakes = [party.intake()[0] for _ in range(3)]
        for intake in intakes:
            intake.ask()
        await yields(100)
        assert [len(party.desks[donor]._early) for donor in DONORS] == [2] * 5
        for donor in DONORS:
            party.offer(donor)
        for intake in intakes[:2]:
            await intake.run(WEIGHTS, deadline=party.deadline())
        with pytest.raises(StreamAborted, match="rank 1"):
            await intakes[2].run(WEIGHTS, deadline=party.deadline())
        await party.is_over()
