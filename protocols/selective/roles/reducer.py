"""Averages one part of the donors' snapshots on a *reducer*, and sends parts of the mean to the ranks that adopt it.

A reducer requests its part from all donors when it is assigned. When the donors no longer change, it adds up the parts
in rank order. The mean is therefore bitwise equal to a mean of whole snapshots. Each chunk of the mean is sent while
later chunks arrive. Parts that arrive early are buffered. Together, these buffers are smaller than one model. If a part
cannot be completed, or infinite values in it differ between donors, requests for its mean are refused. Each receiving
rank then requests the part from the donors.

Each part of the mean is sent to each host only once. One replacer requests it from the reducer. The other replacers on
the host request it from that replacer (:class:`Relay`) or, if it does not arrive there, from the reducer.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from asyncdist import AsyncdistError, RankLostError, RemoteProtocolError
from asyncdist.messaging.services import Services
from asyncdist.messaging.streams import InboundStream
from asyncdist.protocols.parameter_stream.messages import part_chunk_nbytes, stream_nbytes
from asyncdist.protocols.parameter_stream.neighbours import Reading
from asyncdist.protocols.parameter_stream.parts import Part, PartBuffers, PartPool, new_part
from asyncdist.protocols.parameter_stream.receiver import ask_for_part, cancel_stream
from asyncdist.protocols.parameter_stream.server import Offer, SnapshotServer
from asyncdist.protocols.selective.messages import Assign, Frozen
from asyncdist.protocols.selective.roles.donor import Donor
from asyncdist.protocols.selective.roles.resources import Accumulator
from asyncdist.tensors.flat_state import FlatBuffers
from asyncdist.tensors.means import weighted_mean_into

logger = logging.getLogger("protocols.selective.roles.reducer")


class Relay:
    """Lets other ranks on this host copy the parts of an average that this rank has fetched from other hosts."""

    def __init__(self, rank: int, server: SnapshotServer) -> None:
        self._rank = rank
        self._server = server
        self._round = 0
        self._fetched: set[Part] = set()  # parts that this rank must fetch and has not offered yet
        self._offers: list[Offer] = []
        self.shared_count = 0

    def begin(self, round: int, assign: Assign) -> None:
        """Determine which parts of the average this rank must fetch for its host.

        Requests for such a part wait until it arrives.
        """
        assert not self._offers, f"round {round} begins while this rank shares parts of another round"
        self._round = round
        self._fetched = {
            Part(number, len(assign.reducers))
            for number, source in enumerate(assign.sources)
            if source == self._rank != assign.reducers[number]
        }

    def share(self, round: int, part: Part, accumulator: Accumulator) -> None:
        """Offer a part that has arrived in ``accumulator`` if this rank fetches it for its host."""
        if round != self._round or part not in self._fetched:
            return
        self._fetched.remove(part)
        accumulator.hold()
        offer = Offer(round, part.of(accumulator.buffers), lambda _: accumulator.release(), mean_of=part)
        self._offers.append(self._server.offer(offer))
        self.shared_count += 1

    def refuse_rest(self, round: int) -> None:
        """Refuse requests for the parts of the average that will not arrive on this rank."""
        if round == self._round:
            for part in self._fetched:
                self._server.end_mean(round, part)
            self._fetched.clear()

    def stop(self) -> None:
        """Stop offering all parts of the average, and refuse further requests."""
        self.refuse_rest(self._round)
        while self._offers:
            self._server.withdraw(self._offers.pop())


@dataclass(slots=True, eq=False)
class _Sum:
    round: int
    assign: Assign
    part: Part
    buffers: PartBuffers
    asked: dict[int, InboundStream | Reading] = field(default_factory=dict)
    given: dict[int, FlatBuffers] = field(default_factory=dict)
    task: asyncio.Task[None] | None = None
    offer: Offer | None = None
    mean: FlatBuffers | None = None
    is_settled: bool = False


class Reducer:
    """Averages one part of the donors' snapshots for all ranks that adopt the mean, in rounds that assign it a part."""

    def __init__(self, services: Services, server: SnapshotServer, pool: PartPool, donor: Donor) -> None:
        self._services = services
        self._server = server
        self._pool = pool
        self._donor = donor
        self._sum: _Sum | None = None
        self.reduction_count = self.received_nbytes = self.read_nbytes = 0

    def begin(self, round: int, assign: Assign) -> None:
        """Request this rank's part of the snapshots from all donors.

        Failed requests are ignored until the round's donors no longer change.
        """
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
        """Start a task that averages this rank's part of the final donors' snapshots, and offers the mean."""
        state = self._sum
        assert state is not None, "a round is frozen without a reduction"
        state.task = self._services.spawn_service(
            self._add_up(state, frozen), name=f"part {state.part.number} of round {state.round}"
        )

    def stop(self) -> None:
        """Stop computing or sending the mean of this rank's part."""
        state, self._sum = self._sum, None
        if state is None:  # this rank only shares other reducers' parts
            return
        if state.task is not None and not state.is_settled:
            state.task.cancel()
        while state.asked:
            self._finish(state, next(iter(state.asked)))
        self._settle(state)
        if state.offer is not None:
            self._server.withdraw(state.offer)  # the server frees the memory after the last stream
        else:
            self._release()

    def is_settled(self, round: int) -> bool:
        """Return whether this rank's mean in ``round`` is complete or has failed. True if there is no such mean."""
        return self._sum is None or self._sum.round != round or self._sum.is_settled

    def mean(self, round: int) -> FlatBuffers | None:
        """Return this rank's part of the mean in ``round``, or None if it is not complete."""
        return self._sum.mean if self._sum is not None and self._sum.round == round else None

    async def _add_up(self, state: _Sum, frozen: Frozen) -> None:
        server, buffers = self._server, state.buffers
        made = Offer(state.round, buffers.mean, lambda _: self._release(), mean_of=state.part, ready_count=0)
        offer = state.offer = server.offer(made)
        try:
            if await self._make(state, frozen, offer):
                state.mean = buffers.mean
                self.reduction_count += 1
                server.mark_ready(offer, None)
        except AsyncdistError as error:
            logger.info("round %d: part %d was not averaged, %s", state.round, state.part.number, error)
        finally:
            if state.mean is None:
                server.withdraw(offer)
            self._settle(state)

    async def _make(self, state: _Sum, frozen: Frozen, offer: Offer) -> bool:
        """Compute the mean in chunks, in rank order. Return False if infinite values differ between donors.

        Each complete chunk of an averaged tensor is offered immediately. Tensors copied from the best donor are last.
        """
        into, nbytes = state.buffers.mean, 0
        given = {donor: await self._part_from(state, donor, exact=donor == frozen.best) for donor in frozen.donors}
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
                self._server.mark_ready(offer, (offer.ready_count or 0) + 1)
        exact = into.exact()
        await _arrival(state, frozen.best, nbytes + sum(tensor.nbytes for tensor in exact.values()))
        for dtype, tensor in exact.items():
            tensor.copy_(given[frozen.best].tensors[dtype])
        for donor in frozen.donors:
            self._finish(state, donor)
        return True

    async def _part_from(self, state: _Sum, donor: int, *, exact: bool) -> FlatBuffers:
        if donor == self._services.rank:
            snapshot = self._donor.snapshot_of(state.round)
            if snapshot is None:
                raise RemoteProtocolError(f"round {state.round} includes donor {donor}, which has no snapshot")
            return state.part.of(snapshot)
        if exact and donor != state.assign.best:  # the best donor was left out, so this donor sends the exact tensors
            self._finish(state, donor)
            tensors = state.buffers.mean.tensors
            self._ask(state, donor, new_part({dtype: len(tensors[dtype]) for dtype in tensors}), exact=True)
        if donor not in state.given:
            raise RankLostError(f"rank {donor} could not be asked for its part of the weights", rank=donor)
        stream = state.asked.get(donor)
        if isinstance(stream, Reading):
            await stream.whole()
        return state.given[donor]

    def _ask(self, state: _Sum, donor: int, into: FlatBuffers, *, exact: bool) -> None:
        """Request this rank's part of one donor's snapshot.

        Raises:
            RankLostError: The donor is lost.
            BusyError: The donor's queue is full.
        """
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
            self.read_nbytes += stream.received_nbytes if isinstance(stream, Reading) else 0
            channel = self._server.channel
            stream.finish(lambda stream: cancel_stream(self._services, channel, stream, state.round))

    def _settle(self, state: _Sum) -> None:
        """Record that the mean is complete or has failed, and wake the task that receives this rank's own average."""
        state.is_settled = True
        if state.offer is None:
            self._server.end_mean(state.round, state.part)
        self._services.engine.recheck()

    def _release(self) -> None:
        self._pool.release(is_clean=not self._services.slots.discarding_count)


async def _arrival(state: _Sum, donor: int, nbytes: int) -> None:
    stream = state.asked.get(donor)
    if isinstance(stream, InboundStream):
        while stream.received_nbytes < nbytes:
            await stream.arrival(stream.taken_count)
