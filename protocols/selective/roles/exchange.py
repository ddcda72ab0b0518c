"""Receives the average of the donors' weights, from the donors or from ranks that have averaged one part each."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping
from typing import Any

from asyncdist import AsyncdistError
from asyncdist.messaging.services import Services
from asyncdist.protocols.parameter_stream.receiver import SnapshotReceiver
from asyncdist.protocols.parameter_stream.server import SnapshotServer
from asyncdist.protocols.selective.messages import Assign, Frozen
from asyncdist.protocols.selective.roles.exchange_buffers import Accumulator, ExchangeBuffers
from asyncdist.protocols.selective.roles.mean_receiver import MeanReceiver
from asyncdist.protocols.selective.roles.reducer import Reducer
from asyncdist.protocols.selective.roles.relay import Relay

logger = logging.getLogger("protocols.selective.roles.exchange")


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
