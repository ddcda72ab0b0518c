"""Carries out a replacer's part in one round: asks the donors, or the reducers, and makes a mean of what streams in."""

from __future__ import annotations

import asyncio
import logging
import math

from asyncdist import AsyncdistError
from asyncdist.messaging.services import Services
from asyncdist.tensors.flat_state import FlatBuffers, FlatState, SnapshotPool
from protocols.parameter_stream.receiver import SnapshotReceiver, new_ring
from protocols.parameter_stream.server import SnapshotServer
from protocols.selective.messages import Assign, Frozen
from protocols.selective.roles.mean_receiver import MeanReceiver
from protocols.selective.roles.reducer import Reducer

logger = logging.getLogger("protocols.selective.roles.exchange")


class ExchangeBuffers:
    """Keeps the memory that exchanges use one after the other, and counts what they receive.

    Args:
        flat: the state of the policy's model.

    Attributes:
        accumulators: lends the buffers in which averages are made.
        ring: for chunks that cannot land in an accumulator.
        received_nbytes: by all exchanges, abandoned ones included.
        read_nbytes: of these, read in the donors' memory.
        reasked_count: parts of means that donors were asked for, since their reducer had failed.
    """

    def __init__(self, flat: FlatState) -> None:
        self._flat = flat
        self.accumulators = SnapshotPool(flat, accumulate=True)
        self.ring = new_ring()
        self.received_nbytes = self.read_nbytes = self.reasked_count = 0

    def release(self, accumulator: FlatBuffers, services: Services) -> None:
        """Take an accumulator back. While discarded chunks may still land in it, or in the ring, use new memory."""
        self.accumulators.release(accumulator)
        if services.slots.discarding_count:
            self.accumulators = SnapshotPool(self._flat, accumulate=True)
            self.ring = new_ring()


class Exchange:
    """Receives the snapshots of one round.

    Args:
        services: of this rank.
        server: has the channel of the policy's parameter streams, and the neighbours.
        buffers: the policy's.
        reducer: makes this rank's part of the mean, where it reduces.
        round: the round's number.
        coordinator: the rank that coordinates it.

    Attributes:
        round, coordinator: as given.
        assigned_at: when this rank was named a replacer, on the loop's clock.
        task: runs :meth:`run`; None before the round is frozen, and when the task ends by itself.
        average: the whole average; None until there is one, and where fresh weights are made.
        deadline: of all that it receives, set when the round is frozen.
        nbytes: received, counted when a stream has ended.
        route: ``"direct"``, or ``"sharded"`` while there are reducers.
    """

    def __init__(
        self,
        services: Services,
        server: SnapshotServer,
        buffers: ExchangeBuffers,
        reducer: Reducer,
        round: int,
        coordinator: int,
    ) -> None:
        self._services = services
        self._server = server
        self._buffers = buffers
        self._reducer = reducer
        self.round = round
        self.coordinator = coordinator
        self.assigned_at = services.time()
        self.task: asyncio.Task[None] | None = None
        self.average: FlatBuffers | None = None
        self.deadline = math.inf
        self.nbytes = 0
        self.route = "direct"
        self._receiver: SnapshotReceiver | MeanReceiver | None = None
        self._started: SnapshotReceiver | MeanReceiver | None = None

    @property
    def donor(self) -> int:
        """The rank that was asked or waited for last; -1 before any."""
        return -1 if self._started is None else self._started.donor

    def ask_early(self, assign: Assign) -> None:
        """Ask before all is ready. A donor that is lost or busy matters when the round is frozen."""
        receiver = self._receive_means(assign) if assign.reducers else self._receive(assign.donors, assign.best)
        try:
            receiver.ask()
        except AsyncdistError as error:
            logger.info("round %d: not asked early, %s", self.round, error)
            self.close()

    async def run(self, frozen: Frozen) -> SnapshotReceiver | MeanReceiver:
        """Receive what the frozen round says; ask the donors anew if they are not those that were asked early.

        Returns:
            The receiver, whose accumulator holds the average. :meth:`close` takes it back unless it is ``average``.

        Raises:
            AsyncdistError, TimeoutError: as :meth:`SnapshotReceiver.run`, on account of ``donor``.
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
            receiver = self._receive(frozen.donors, frozen.best)
        await receiver.run(frozen.weights, deadline=self.deadline)
        return receiver

    def close(self) -> None:
        """Stop the streams, if they are under way. A second call does nothing."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()
            self.nbytes += receiver.received_nbytes
            self._buffers.received_nbytes += receiver.received_nbytes
            self._buffers.read_nbytes += receiver.read_nbytes
            if isinstance(receiver, MeanReceiver):
                self._buffers.reasked_count += receiver.reasked_count
            if self.average is not receiver.accumulator:
                self._buffers.release(receiver.accumulator, self._services)

    def discard(self) -> None:
        """Stop the exchange and free its memory: its average will not be applied."""
        if self.task is not None and self.average is None:
            self.task.cancel()
        self.close()
        if self.average is not None:
            self._buffers.release(self.average, self._services)

    def _receive(self, donors: tuple[int, ...], best: int) -> SnapshotReceiver:
        accumulator = self._buffers.accumulators.acquire()
        ring = self._buffers.ring
        receiver = SnapshotReceiver(
            self._services,
            self._server.channel,
            accumulator,
            ring,
            donors=donors,
            best=best,
            round=self.round,
            neighbours=self._server.neighbours,
        )
        self._started, self._receiver, self.route = receiver, receiver, "direct"
        return receiver

    def _receive_means(self, assign: Assign) -> MeanReceiver:
        accumulator = self._buffers.accumulators.acquire()
        ring, own = self._buffers.ring, self._reducer
        receiver = MeanReceiver(
            self._services, self._server, accumulator, ring, reducers=assign.reducers, own=own, round=self.round
        )
        self._started, self._receiver, self.route = receiver, receiver, "sharded"
        return receiver
