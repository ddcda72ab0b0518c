"""Receives the average of the donors' weights, from the donors or in parts, each from a *reducer*.

A reducer is a rank that has averaged one part of all snapshots. If it has failed, its part is requested from all
donors, which gives bitwise the same mean. A late reducer is awaited until the round's deadline, since requests to all
donors would make a slow network even slower.

The receiving ranks on one host share the parts of reducers on other hosts. One of them fetches a part. The others
request it from that rank or, if this fails, from the reducer. Each rank first receives the parts that it fetches for
others, so that no two ranks wait for each other.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping
from typing import Any

from asyncdist import AsyncdistError, RankLostError
from asyncdist.messaging.services import Services
from asyncdist.messaging.streams import InboundStream, StreamAborted
from asyncdist.protocols.parameter_stream.neighbours import PartReading
from asyncdist.protocols.parameter_stream.parts import Part
from asyncdist.protocols.parameter_stream.receive_layout import ChunkRing
from asyncdist.protocols.parameter_stream.receiver import SnapshotReceiver, ask_for_part, cancel_stream
from asyncdist.protocols.parameter_stream.server import SnapshotServer
from asyncdist.protocols.selective.messages import Assign, Frozen
from asyncdist.protocols.selective.roles.reducer import Reducer, Relay
from asyncdist.protocols.selective.roles.resources import Accumulator, ExchangeBuffers
from asyncdist.tensors.flat_state import FlatBuffers
from asyncdist.waits import WaitId, WaitKind

logger = logging.getLogger("protocols.selective.roles.exchange")


class MeanReceiver:
    """Receives an average in parts from the reducers, the ranks that have each averaged one part.

    Args:
        reducers: Ranks that each add up one part, in the order of the parts.
        sources: Rank from which each part is requested: the part's reducer, or the rank that fetches the part for this
            host, possibly this rank.

    Attributes:
        accumulator: Buffers that contain the mean after :meth:`run`.
        donor: Rank whose stream is awaited. If :meth:`run` raises, the rank that caused the failure.
        is_agreed: Whether all donors' snapshots have the same infinite values.
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
        self._streams: dict[int, InboundStream | PartReading] = {}  # by reducer: stream of its part
        self._from_donors: SnapshotReceiver | None = None  # receives a failed reducer's part from the donors
        self.donor = reducers[0]
        self.received_nbytes = self.read_nbytes = self.reasked_count = 0
        self.is_agreed = True

    def ask(self) -> None:
        """Request all parts of the average from other ranks. A rank that is lost or busy counts as failed."""
        for reducer in self._reducers:
            if reducer != self._services.rank:
                self._ask(reducer)

    def _ask(self, reducer: int) -> None:
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
        """Receive all parts into the accumulator, which then contains the mean.

        **Cancellation**: The reducers and donors are asked to stop. The accumulator remains in use until they have
        answered.

        Raises:
            AsyncdistError: A part could be received neither from its reducer nor from the donors.
            TimeoutError: The deadline has passed.
        """
        try:
            for reducer in sorted(self._reducers, key=lambda rank: self._turn_of(rank, frozen)):
                if not self._place_of(reducer).nbytes:  # empty part: there are more reducers than elements
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
        """Ask reducers and donors with unfinished streams to stop. A second call does nothing."""
        self._relay.refuse_rest(self._round)
        if self._from_donors is not None:
            self._from_donors.close()
        while self._streams:
            self._finish(next(iter(self._streams)))

    def _turn_of(self, reducer: int, frozen: Frozen) -> int:
        """Return the sort key by which parts are awaited. Parts of failed reducers are first."""
        if reducer == self._services.rank:
            return 3
        if self._source_of[reducer] != reducer:
            return 2
        return 1 if reducer in frozen.reducers else 0

    async def _is_received(self, reducer: int, frozen: Frozen, deadline: float) -> bool:
        """Wait for a part of the average from the rank that was asked for it. Return False if that rank has failed."""
        self.donor = source = self._source_of[reducer]
        try:
            return (source != reducer or reducer in frozen.reducers) and await self._receive(reducer, deadline)
        except (RankLostError, StreamAborted) as error:
            logger.info("round %d: %s; asking another rank", self._round, error)
            return False

    async def _receive(self, reducer: int, deadline: float) -> bool:
        """Wait for one part, and return whether it has arrived. Raise an error if its stream fails."""
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
            raise TimeoutError("this rank did not average its own part of the weights in time")
        mean = own.mean(number)
        if mean is not None:
            for dtype, tensor in self._place_of(self._services.rank).tensors.items():
                tensor.copy_(mean.tensors[dtype])
        return mean is not None

    async def _ask_donors(self, reducer: int, frozen: Frozen, deadline: float) -> None:
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


class Exchange:
    """Receives the average of one round, from the donors or from reducers (ranks that each average one part).

    Attributes:
        task: Task that executes :meth:`run`. None until the round's donors no longer change.
        average: Complete average. None before it is complete, and in a round that builds fresh weights.
        takes_state: Whether this rank also takes over the only donor's optimizer and policy state.
        parts: Received optimizer and policy state, or None before it has arrived.
        deadline: Time by which all streams must be complete. Set by :meth:`run`.
        route: ``"direct"``, or ``"sharded"`` while there are reducers.
    """

    def __init__(
        self,
        services: Services,
        server: SnapshotServer,
        buffers: ExchangeBuffers,
        reducer: Reducer,
        relay: Relay,
        round: int,
        coordinator: int,
    ) -> None:
        self._services = services
        self._server = server
        self._buffers = buffers
        self._reducer = reducer
        self._relay = relay
        self.round = round
        self.coordinator = coordinator
        self.assigned_at = services.time()
        self.task: asyncio.Task[None] | None = None
        self.average: Accumulator | None = None
        self.takes_state = False
        self.parts: Mapping[str, Any] | None = None
        self.deadline = math.inf
        self.nbytes = 0
        self.route = "direct"
        self._accumulator: Accumulator | None = None
        self._receiver: SnapshotReceiver | MeanReceiver | None = None
        self._started: SnapshotReceiver | MeanReceiver | None = None

    @property
    def donor(self) -> int:
        """Rank whose weights were requested or awaited last, or -1 if none were requested."""
        return -1 if self._started is None else self._started.donor

    def ask_early(self, assign: Assign) -> None:
        """Request the snapshots while the round's donors can still change. :meth:`run` repeats failed requests."""
        receiver = (
            self._new_mean_receiver(assign)
            if assign.reducers
            else self._new_snapshot_receiver(assign.donors, assign.best)
        )
        try:
            receiver.ask()
        except AsyncdistError as error:
            logger.info("round %d: the early request failed, %s", self.round, error)
            self.close()

    async def run(self, frozen: Frozen) -> SnapshotReceiver | MeanReceiver:
        """Receive the average of the final donors, which ``frozen`` lists.

        Repeat all requests if the donors have changed since the early requests.

        Returns:
            The receiver, whose accumulator contains the average. :meth:`close` frees the accumulator unless
            :meth:`keep_average` was called.

        Raises:
            AsyncdistError, TimeoutError: A stream has failed. ``donor`` is the rank that caused the failure.
        """
        receiver = self._receiver
        self.deadline = self._services.time() + frozen.timeout_s
        if isinstance(receiver, MeanReceiver) and frozen.reducers:
            await receiver.run(frozen, deadline=self.deadline)
            return receiver
        if (
            not isinstance(receiver, SnapshotReceiver)
            or receiver.donors != frozen.donors
            or receiver.best != frozen.best
        ):
            self.close()
            receiver = self._new_snapshot_receiver(frozen.donors, frozen.best)
        await receiver.run(frozen.weights, deadline=self.deadline)
        return receiver

    def close(self) -> None:
        """Stop unfinished streams, and free the memory unless the average is kept. A second call does nothing."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()
            self.nbytes += receiver.received_nbytes
            self._buffers.received_nbytes += receiver.received_nbytes
            self._buffers.read_nbytes += receiver.read_nbytes
            if isinstance(receiver, MeanReceiver):
                self._buffers.reasked_count += receiver.reasked_count
            if self.average is not self._accumulator:
                self._release(self._accumulator)

    def discard(self) -> None:
        """Stop receiving the average and free its memory, because it will not be applied."""
        if self.task is not None and self.average is None and self.task is not asyncio.current_task():
            self.task.cancel()
        self.close()
        if self.average is not None:
            self._release(self.average)

    def _release(self, accumulator: Accumulator | None) -> None:
        assert accumulator is not None, f"round {self.round} has a receiver and no accumulator"
        self._buffers.release(accumulator, is_clean=not self._services.slots.discarding_count)

    def keep_average(self) -> None:
        """Mark the average as complete, so that :meth:`close` does not free the accumulator."""
        self.average = self._accumulator

    def _new_snapshot_receiver(self, donors: tuple[int, ...], best: int) -> SnapshotReceiver:
        self._accumulator = accumulator = self._buffers.acquire()
        receiver = SnapshotReceiver(
            self._services,
            self._server.channel,
            accumulator.buffers,
            self._buffers.ring,
            donors=donors,
            best=best,
            round=self.round,
            neighbours=self._server.neighbours,
        )
        self._started, self._receiver, self.route = receiver, receiver, "direct"
        return receiver

    def _new_mean_receiver(self, assign: Assign) -> MeanReceiver:
        self._accumulator = accumulator = self._buffers.acquire()
        receiver = MeanReceiver(
            self._services,
            self._server,
            accumulator,
            self._buffers.ring,
            reducers=assign.reducers,
            sources=assign.sources or assign.reducers,
            own=self._reducer,
            relay=self._relay,
            round=self.round,
        )
        self._started, self._receiver, self.route = receiver, receiver, "sharded"
        return receiver
