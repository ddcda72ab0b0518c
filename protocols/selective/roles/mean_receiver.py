"""Receives a replacer's average in a sharded round: a part of the mean from each reducer, in place.

If a reducer was left out, has failed or is gone, its part is requested from the donors, as on the direct route. That
costs more bytes and gives the same bits. A reducer that is only late is waited for until the round's deadline: if the
network is slow and all reducers are late, requesting everything from all donors would make it worse.

Replacers on the same host share the parts of reducers on other hosts: one of them fetches a part, and the others ask
that rank. If it fails, they ask the reducer. Each rank first receives the parts that it fetches itself, so that no two
ranks wait for each other.
"""

from __future__ import annotations

import logging

from asyncdist import AsyncdistError, RankLostError
from asyncdist.messaging.services import Services
from asyncdist.messaging.streams import InboundStream, StreamAborted
from asyncdist.protocols.parameter_stream.landing import ChunkRing
from asyncdist.protocols.parameter_stream.neighbours import PartReading
from asyncdist.protocols.parameter_stream.parts import Part
from asyncdist.protocols.parameter_stream.receiver import SnapshotReceiver, ask_for_part, cancel_stream
from asyncdist.protocols.parameter_stream.server import SnapshotServer
from asyncdist.protocols.selective.messages import Frozen
from asyncdist.protocols.selective.roles.exchange_buffers import Accumulator
from asyncdist.protocols.selective.roles.reducer import Reducer
from asyncdist.protocols.selective.roles.relay import Relay
from asyncdist.tensors.flat_state import FlatBuffers
from asyncdist.waits import WaitId, WaitKind

logger = logging.getLogger("protocols.selective.roles.mean_receiver")


class MeanReceiver:
    """Receives the parts of one mean.

    Args:
        services: Services of this rank.
        server: Has the channel of the policy's parameter streams, and the neighbours.
        accumulator: Receives the mean; its content is overwritten.
        ring: Memory for the chunks of donors that are asked after all.
        reducers: Ranks that each make a part, in the order of the parts.
        sources: For each part, the rank that this rank asks: the reducer, or the rank that fetches the part for this
            host, which may be this rank.
        own: Makes this rank's part, if it is a reducer.
        relay: Offers the parts that this rank fetches for its host.
        round: Number of the round, for the frames' headers.

    Attributes:
        accumulator: Buffers of the given accumulator.
        donor: Rank that is waited for; if :meth:`run` raises, the rank that caused it.
        received_nbytes: Number of bytes of complete parts.
        read_nbytes: Number of these bytes that were read in the reducers' memory.
        reasked_count: Number of parts that the donors were asked for.
        is_agreed: Whether the donors agree in their infinite values.
    """

    def __init__(
        self,
        services: Services,
        server: SnapshotServer,
        accumulator: Accumulator,
        ring: ChunkRing,
        *,
        reducers: tuple[int, ...],
        sources: tuple[int, ...],
        own: Reducer,
        relay: Relay,
        round: int,
    ) -> None:
        self._services = services
        self._server = server
        self._shared = accumulator
        self.accumulator = accumulator.buffers
        self._ring = ring
        self._reducers = reducers
        me = services.rank
        self._source_of = {
            reducer: reducer if source == me else source for reducer, source in zip(reducers, sources, strict=True)
        }
        self._own = own
        self._relay = relay
        self._round = round
        self._streams: dict[int, InboundStream | PartReading] = {}  # by reducer
        self._from_donors: SnapshotReceiver | None = None  # receives the part that the donors are asked for
        self.donor = reducers[0]
        self.received_nbytes = self.read_nbytes = self.reasked_count = 0
        self.is_agreed = True

    def ask(self) -> None:
        """Ask for the parts. A lost or busy rank counts as failed."""
        for reducer in self._reducers:
            if reducer != self._services.rank:
                self._ask(reducer)

    def _ask(self, reducer: int) -> None:
        """Ask for the part of one reducer."""
        source, part = self._source_of[reducer], self._part_of(reducer)
        try:
            stream = ask_for_part(
                self._services,
                self._server,
                source,
                self._place_of(reducer),
                part,
                sizes={},
                round=self._round,
                of_mean=True,
            )
        except AsyncdistError as error:
            logger.info("round %d: cannot ask rank %d for part %d, %s", self._round, source, part.number, error)
        else:
            if stream is not None:
                self._streams[reducer] = stream

    async def run(self, frozen: Frozen, *, deadline: float) -> None:
        """Receive all parts, so that the accumulator holds the mean.

        Args:
            frozen: The donors, and the remaining reducers.
            deadline: Time on the loop's clock by which all parts must have arrived.

        **Cancellation**: reducers and donors are asked to stop; the accumulator stays in use until they have answered.

        Raises:
            AsyncdistError, TimeoutError: See :meth:`SnapshotReceiver.run`.
        """
        try:
            for reducer in sorted(self._reducers, key=lambda rank: self._turn_of(rank, frozen)):
                if not self._place_of(reducer).nbytes:  # more reducers than elements
                    continue
                is_whole = await self._is_received(reducer, frozen, deadline)
                if not is_whole and self._source_of[reducer] != reducer:
                    self._finish(reducer)
                    self._source_of[reducer] = reducer
                    self._ask(reducer)
                    is_whole = await self._is_received(reducer, frozen, deadline)
                if not is_whole:
                    await self._ask_donors(reducer, frozen, deadline)
                if self.is_agreed:
                    self._relay.share(self._round, self._part_of(reducer), self._shared)
        finally:
            self.close()

    def close(self) -> None:
        """Ask the reducers and donors whose streams are incomplete to stop. A second call does nothing."""
        self._relay.refuse_rest(self._round)
        if self._from_donors is not None:
            self._from_donors.close()
        while self._streams:
            self._finish(next(iter(self._streams)))

    def _turn_of(self, reducer: int, frozen: Frozen) -> int:
        """Return the position at which a reducer's part is waited for: the parts of failed reducers are first."""
        if reducer == self._services.rank:
            return 3
        if self._source_of[reducer] != reducer:
            return 2
        return 1 if reducer in frozen.reducers else 0

    async def _is_received(self, reducer: int, frozen: Frozen, deadline: float) -> bool:
        """Wait for one part from the rank that was asked for it, and return whether it has arrived."""
        self.donor = source = self._source_of[reducer]
        try:
            return (source != reducer or reducer in frozen.reducers) and await self._receive(reducer, deadline)
        except (RankLostError, StreamAborted) as error:
            logger.info("round %d: %s; asking another rank", self._round, error)
            return False

    async def _receive(self, reducer: int, deadline: float) -> bool:
        """Wait for one part, and return whether it has arrived."""
        if reducer == self._services.rank:
            return await self._take_own(deadline)
        stream = self._streams.get(reducer)
        if stream is not None:
            await stream.whole(deadline=deadline)
            self.received_nbytes += stream.received_nbytes
            self.read_nbytes += stream.received_nbytes if isinstance(stream, PartReading) else 0
            self._finish(reducer)
        return stream is not None

    async def _take_own(self, deadline: float) -> bool:
        own, number = self._own, self._round
        if not await self._services.engine.until(
            lambda: own.is_settled(number), WaitId(WaitKind.OWN_PART, number=number), deadline=deadline
        ):
            raise TimeoutError("this rank did not add up its own part in time")
        mean = own.mean(number)
        if mean is not None:
            for dtype, tensor in self._place_of(self._services.rank).tensors.items():
                tensor.copy_(mean.tensors[dtype])
        return mean is not None

    async def _ask_donors(self, reducer: int, frozen: Frozen, deadline: float) -> None:
        """Make the part of a failed reducer from the donors' snapshots."""
        self._finish(reducer)
        part = self._part_of(reducer)
        self.reasked_count += 1
        self._from_donors = receiver = SnapshotReceiver(
            self._services,
            self._server.channel,
            self._place_of(reducer),
            self._ring,
            donors=frozen.donors,
            best=frozen.best,
            round=self._round,
            part=part,
        )
        for donor in frozen.donors:
            if donor in self._services.gone:
                self.donor = donor
                raise RankLostError(f"rank {donor} is gone", rank=donor)
        try:
            await receiver.run(frozen.weights, deadline=deadline)
        finally:
            self.donor = receiver.donor
            self.received_nbytes += receiver.received_nbytes
        self.is_agreed = self.is_agreed and receiver.is_agreed

    def _part_of(self, reducer: int) -> Part:
        return Part(self._reducers.index(reducer), len(self._reducers))

    def _place_of(self, reducer: int) -> FlatBuffers:
        return self._part_of(reducer).of(self.accumulator)

    def _finish(self, reducer: int) -> None:
        stream = self._streams.pop(reducer, None)
        if stream is not None:
            stream.finish(lambda stream: cancel_stream(self._services, self._server.channel, stream, self._round))
