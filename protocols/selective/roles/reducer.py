"""Carries out a reducer's part in a sharded round: adds up one part of the donors' snapshots, for all replacers.

A reducer asks each donor for that part as soon as it is assigned, and each donor sends it in the step that takes its
snapshot. After the freeze the parts are added in rank order, so the mean has the same bits as a replacer's own mean
would have. The sum is made chunk by chunk, and each finished chunk is sent while later chunks arrive: between hosts,
both directions of the network are then in use. The mean is offered until the round ends, even if this rank has applied
its own average.

All donors send at once, so that each of their links is always in use, but the sum runs in rank order: early parts wait
in their own memory. That is one part for each donor, in total less than one state for any number of ranks. (With a
window, as on the direct route, all reducers would ask the same few donors at a time.)

If a part cannot be made or completed, it is refused, and each replacer asks the donors for the whole part. The same
applies to a part whose donors differ in infinite values: the replacers find the difference and report it.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from asyncdist import AsyncdistError, RankLostError, RemoteProtocolError
from asyncdist.messaging.services import Services
from asyncdist.messaging.streams import InboundStream
from asyncdist.protocols.parameter_stream.messages import part_chunk_nbytes, stream_nbytes
from asyncdist.protocols.parameter_stream.neighbours import PartReading
from asyncdist.protocols.parameter_stream.parts import Part, PartBuffers, PartPool, new_part
from asyncdist.protocols.parameter_stream.receiver import ask_for_part, cancel_stream
from asyncdist.protocols.parameter_stream.server import Offer, SnapshotServer
from asyncdist.protocols.selective.messages import Assign, Frozen
from asyncdist.protocols.selective.roles.donor import Donor
from asyncdist.tensors.flat_state import FlatBuffers
from asyncdist.tensors.means import weighted_mean_into

logger = logging.getLogger("protocols.selective.roles.reducer")


@dataclass(slots=True, eq=False)
class _Sum:
    """Holds a reducer's state in one round.

    Attributes:
        asked: Streams that are not finished, by donor.
        given: Memory that each donor's part is received into.
        mean: The mean, once it is complete.
        is_settled: Whether the mean is complete, or has failed.
    """

    round: int
    assign: Assign
    part: Part
    buffers: PartBuffers
    asked: dict[int, InboundStream | PartReading] = field(default_factory=dict)
    given: dict[int, FlatBuffers] = field(default_factory=dict)
    task: asyncio.Task[None] | None = None
    offer: Offer | None = None
    mean: FlatBuffers | None = None
    is_settled: bool = False


class Reducer:
    """Makes the mean of one part in each round that names this rank a reducer.

    Args:
        services: Services of this rank.
        server: Offers the means, and has the channel of the policy's parameter streams.
        pool: Lends the memory.
        donor: Has this rank's snapshot, if it gives one.

    Attributes:
        reduction_count: Number of means that have been offered.
        received_nbytes: Number of bytes of parts received.
        read_nbytes: Number of these bytes that were read in the donors' memory.
    """

    def __init__(self, services: Services, server: SnapshotServer, pool: PartPool, donor: Donor) -> None:
        self._services = services
        self._server = server
        self._pool = pool
        self._donor = donor
        self._sum: _Sum | None = None
        self.reduction_count = self.received_nbytes = self.read_nbytes = 0

    def begin(self, round: int, assign: Assign) -> None:
        """Ask the donors for their part. A lost or busy donor matters only at the freeze."""
        assert self._sum is None, f"round {round} begins while this rank reduces in another one"
        others = [donor for donor in assign.donors if donor != self._services.rank]
        part = Part(assign.part, len(assign.reducers))
        self._sum = state = _Sum(round, assign, part, self._pool.acquire(part, len(others)))
        for donor, into in zip(others, state.buffers.given, strict=True):
            try:
                self._ask(state, donor, into, exact=donor == assign.best)
            except AsyncdistError as error:
                logger.info("round %d: the early request to rank %d failed, %s", round, donor, error)

    def add_up(self, frozen: Frozen) -> None:
        """Start a task that makes the mean of the frozen round's donors, and offers it."""
        state = self._sum
        assert state is not None, "a round is frozen without a reduction"
        state.task = self._services.spawn_service(
            self._add_up(state, frozen), name=f"part {state.part.number} of round {state.round}"
        )

    def stop(self) -> None:
        """Withdraw the mean, or stop making it."""
        state, self._sum = self._sum, None
        if state is None:  # this rank only shares parts of other reducers
            return
        if state.task is not None and not state.is_settled:
            state.task.cancel()
        while state.asked:
            self._finish(state, next(iter(state.asked)))
        self._settle(state)
        if state.offer is not None:
            self._server.withdraw(state.offer)  # releases the memory when its last stream has ended
        else:
            self._release()

    def is_settled(self, round: int) -> bool:
        """Return whether this rank's part of that round is complete, or has failed."""
        return self._sum is None or self._sum.round != round or self._sum.is_settled

    def mean(self, round: int) -> FlatBuffers | None:
        """Return this rank's part of the mean; None if it cannot be made."""
        return self._sum.mean if self._sum is not None and self._sum.round == round else None

    async def _add_up(self, state: _Sum, frozen: Frozen) -> None:
        server, buffers = self._server, state.buffers
        offer = state.offer = server.offer(
            state.round, buffers.mean, lambda _: self._release(), mean_of=state.part, ready_count=0
        )
        try:
            if await self._make(state, frozen, offer):
                state.mean = buffers.mean
                self.reduction_count += 1
                server.grow(offer, None)
        except AsyncdistError as error:
            logger.info("round %d: part %d is not added up, %s", state.round, state.part.number, error)
        finally:
            if state.mean is None:
                server.withdraw(offer)
            self._settle(state)

    async def _make(self, state: _Sum, frozen: Frozen, offer: Offer) -> bool:
        """Add up in rank order, one chunk of the mean at a time; return whether the donors agree in infinities.

        The last chunks are not offered yet, since the mean may still turn out to be incomplete.
        """
        into, nbytes = state.buffers.mean, 0
        given = {donor: await self._given(state, donor, exact=donor == frozen.best) for donor in frozen.donors}
        chunk_nbytes = part_chunk_nbytes(stream_nbytes(into, exact=True))
        for dtype, tensor in into.averaged().items():
            count = chunk_nbytes // tensor.itemsize
            for stretch in (slice(first, first + count) for first in range(0, len(tensor), count)):
                nbytes += len(tensor[stretch]) * dtype.itemsize
                for donor in frozen.donors:
                    await _arrival(state, donor, nbytes)
                parts = [given[donor].tensors[dtype][stretch] for donor in frozen.donors]
                if not weighted_mean_into(tensor[stretch], parts, frozen.weights):
                    return False
                self._server.grow(offer, (offer.ready_count or 0) + 1)
        exact = into.exact()
        await _arrival(state, frozen.best, nbytes + sum(tensor.nbytes for tensor in exact.values()))
        for dtype, tensor in exact.items():
            tensor.copy_(given[frozen.best].tensors[dtype])
        for donor in frozen.donors:
            self._finish(state, donor)
        return True

    async def _given(self, state: _Sum, donor: int, *, exact: bool) -> FlatBuffers:
        """Return the memory that holds, or is receiving, one donor's part. Parts in donors' memory are read here."""
        if donor == self._services.rank:
            snapshot = self._donor.snapshot_of(state.round)
            if snapshot is None:
                raise RemoteProtocolError(f"round {state.round} is frozen with donor {donor}, which has no snapshot")
            return state.part.of(snapshot)
        if exact and donor != state.assign.best:  # the earlier best donor was left out; exact tensors may still arrive
            self._finish(state, donor)
            tensors = state.buffers.mean.tensors
            self._ask(state, donor, new_part({dtype: len(tensors[dtype]) for dtype in tensors}), exact=True)
        if donor not in state.given:
            raise RankLostError(f"rank {donor} could not be asked for its part", rank=donor)
        stream = state.asked.get(donor)
        if isinstance(stream, PartReading):
            await stream.whole()
        return state.given[donor]

    def _ask(self, state: _Sum, donor: int, into: FlatBuffers, *, exact: bool) -> None:
        """Ask one donor for its part. Raises RankLostError or BusyError as :func:`ask_for_part`."""
        stream = ask_for_part(
            self._services,
            self._server,
            donor,
            into,
            state.part,
            sizes=self._pool.sizes,
            round=state.round,
            exact=exact,
        )
        if stream is not None:
            state.asked[donor] = stream
        state.given[donor] = into

    def _finish(self, state: _Sum, donor: int) -> None:
        stream = state.asked.pop(donor, None)
        if stream is not None:
            self.received_nbytes += stream.received_nbytes
            self.read_nbytes += stream.received_nbytes if isinstance(stream, PartReading) else 0
            channel = self._server.channel
            stream.finish(lambda stream: cancel_stream(self._services, channel, stream, state.round))

    def _settle(self, state: _Sum) -> None:
        """Notify the waiters for the mean: this rank's own exchange, and replacers whose requests must be refused."""
        state.is_settled = True
        if state.offer is None:
            self._server.end_mean(state.round, state.part)
        self._services.engine.recheck()

    def _release(self) -> None:
        self._pool.release(is_clean=not self._services.slots.discarding_count)


async def _arrival(state: _Sum, donor: int, nbytes: int) -> None:
    """Wait for the first ``nbytes`` of a donor's stream; the averaged tensors precede the exact ones."""
    stream = state.asked.get(donor)
    if isinstance(stream, InboundStream):
        while stream.received_nbytes < nbytes:
            await stream.arrival(stream.taken_count)
