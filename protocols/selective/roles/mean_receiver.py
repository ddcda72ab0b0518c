"""Receives a replacer's average in a sharded round: a part of the mean from each reducer, in place.

A part whose reducer was left out, has failed or is gone is asked of the donors themselves, as on the direct route. It
costs more bytes and has the same bits. A reducer that is only late is waited for until the round's deadline: where all
are late, since the network is, asking all donors for everything would make it worse.
"""

from __future__ import annotations

import logging

from asyncdist import AsyncdistError, RankLostError
from asyncdist.messaging.services import Services
from asyncdist.messaging.streams import InboundStream, StreamAborted
from asyncdist.tensors.flat_state import FlatBuffers
from protocols.parameter_stream.landing import ChunkRing
from protocols.parameter_stream.neighbours import PartReading
from protocols.parameter_stream.parts import Part
from protocols.parameter_stream.receiver import SnapshotReceiver, ask_for_part, cancel_stream
from protocols.parameter_stream.server import SnapshotServer
from protocols.selective.messages import Frozen
from protocols.selective.roles.reducer import Reducer

logger = logging.getLogger("protocols.selective.roles.mean_receiver")


class MeanReceiver:
    """Receives the parts of one mean.

    Args:
        services: of this rank.
        server: has the channel of the policy's parameter streams, and the neighbours.
        accumulator: flat tensors in the accumulation dtypes; what is in them is overwritten.
        ring: for chunks of donors that are asked after all.
        reducers: the ranks that each make a part, in the order of the parts.
        own: makes this rank's part, if it is one of them.
        round: goes into the frames' headers.

    Attributes:
        accumulator: as given.
        donor: who is waited for: when :meth:`run` raises, on account of this one.
        received_nbytes: of the parts that are whole.
        read_nbytes: of these, read in the reducers' memory.
        reasked_count: parts that the donors were asked for.
        is_agreed: whether the donors agree in their infinite values.
    """

    def __init__(
        self,
        services: Services,
        server: SnapshotServer,
        accumulator: FlatBuffers,
        ring: ChunkRing,
        *,
        reducers: tuple[int, ...],
        own: Reducer,
        round: int,
    ) -> None:
        self._services = services
        self._server = server
        self.accumulator = accumulator
        self._ring = ring
        self._reducers = reducers
        self._own = own
        self._round = round
        self._streams: dict[int, InboundStream | PartReading] = {}  # by reducer
        self._from_donors: SnapshotReceiver | None = None  # of the part that they are asked for
        self.donor = reducers[0]
        self.received_nbytes = self.read_nbytes = self.reasked_count = 0
        self.is_agreed = True

    def ask(self) -> None:
        """Ask the reducers for their parts. One that is lost or busy counts as one that has failed."""
        for reducer in self._reducers:
            if reducer == self._services.rank:
                continue
            part, into = self._part_of(reducer), self._place_of(reducer)
            try:
                stream = ask_for_part(
                    self._services,
                    self._server,
                    reducer,
                    into,
                    part,
                    sizes={},
                    round=self._round,
                    of_mean=True,
                )
            except AsyncdistError as error:
                logger.info("round %d: reducer %d cannot be asked, %s", self._round, reducer, error)
            else:
                if stream is not None:
                    self._streams[reducer] = stream

    async def run(self, frozen: Frozen, *, deadline: float) -> None:
        """Receive all parts: the accumulator holds the mean then.

        Args:
            frozen: the donors, and who still reduces.
            deadline: on the loop's clock, for all of it.

        **Cancellation**: reducers and donors are told to stop; the accumulator is in use until they have answered.

        Raises:
            AsyncdistError, TimeoutError: as :meth:`SnapshotReceiver.run`.
        """
        try:
            ranks = sorted(self._reducers, key=lambda rank: rank in frozen.reducers)  # first those that have failed
            for reducer in sorted(ranks, key=lambda rank: rank == self._services.rank):
                self.donor = reducer
                if not self._place_of(reducer).nbytes:  # more reducers than elements
                    continue
                try:
                    is_whole = reducer in frozen.reducers and await self._receive(reducer, deadline)
                except (RankLostError, StreamAborted) as error:
                    logger.info("round %d: %s; asking the donors", self._round, error)
                    is_whole = False
                if not is_whole:
                    await self._ask_donors(reducer, frozen, deadline)
        finally:
            self.close()

    def close(self) -> None:
        """Tell reducers and donors that have not answered to stop. A second call does nothing."""
        if self._from_donors is not None:
            self._from_donors.close()
        while self._streams:
            self._finish(next(iter(self._streams)))

    async def _receive(self, reducer: int, deadline: float) -> bool:
        """Wait for one part, and return whether it has come."""
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
            lambda: own.is_settled(number), f"its own part of round {number}", deadline=deadline
        ):
            raise TimeoutError("its own part was not added up in time")
        mean = own.mean(number)
        if mean is not None:
            for dtype, tensor in self._place_of(self._services.rank).tensors.items():
                tensor.copy_(mean.tensors[dtype])
        return mean is not None

    async def _ask_donors(self, reducer: int, frozen: Frozen, deadline: float) -> None:
        """Add up the part of a reducer that has failed."""
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
