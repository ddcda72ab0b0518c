"""Receives the average of the donors' weights on a replacer, and applies it.

:class:`~protocols.selective.roles.member_roles.MemberRoles` calls the methods of :class:`Replacer` in this order:

1. :meth:`Replacer.ask`, when the coordinator assigns the role.
2. :meth:`Replacer.receive`, in a task, when the round's donors no longer change. Each snapshot arrives as a stream, or
   is read from the donor's memory (:class:`~protocols.parameter_stream.receiver.SnapshotReceiver`). On the sharded
   route, *reducers* send parts of the mean (:class:`MeanReceiver`).
3. :meth:`Replacer.load_average` and :meth:`Replacer.announce`, in the next step.

If the round is abandoned, :meth:`Replacer.discard` is called instead of the remaining methods.

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
from asyncdist.protocols.joining.state_transfer import StateTransfer, state_nbytes_max, unpacked
from asyncdist.protocols.own_state import NewWeights
from asyncdist.protocols.parameter_stream.neighbours import Reading
from asyncdist.protocols.parameter_stream.parts import Part
from asyncdist.protocols.parameter_stream.receiver import SnapshotReceiver, ask_for_part, cancel_stream
from asyncdist.protocols.parameter_stream.server import SnapshotServer
from asyncdist.protocols.selective.messages import Assign, Frozen
from asyncdist.protocols.selective.roles.reducer import Reducer, Relay
from asyncdist.protocols.selective.roles.resources import Accumulator, RoleResources
from asyncdist.protocols.step_info import NOTHING, StepInfo
from asyncdist.tensors.flat_state import FlatBuffers
from asyncdist.waits import WaitId, WaitKind

logger = logging.getLogger("protocols.selective.roles.exchange")


class MeanReceiver:
    """Receives an average in parts from the reducers, the ranks that have each averaged one part.

    Args:
        accumulator: Receives the mean.
        assign: Names the reducers, in the order of the parts, and the source of each part: its reducer, or the rank
            that fetches the part for this host, possibly this rank.

    Attributes:
        accumulator: Buffers that contain the mean after :meth:`run`.
        donor: Rank whose stream is awaited. If :meth:`run` raises, the rank that caused the failure.
        is_agreed: Whether all donors' snapshots have the same infinite values.
    """

    def __init__(self, replacer: Replacer, accumulator: Accumulator, assign: Assign, round: int) -> None:
        self._services = replacer.services
        self._server = replacer.server
        self._shared = accumulator
        self.accumulator = accumulator.buffers
        self._ring = replacer.resources.buffers.ring
        self._reducers = reducers = assign.reducers
        me, sources = self._services.rank, assign.sources or reducers
        self._source_of = {
            reducer: reducer if source == me else source for reducer, source in zip(reducers, sources, strict=True)
        }
        self._own = replacer.reducer
        self._relay = replacer.relay
        self._round = round
        self._streams: dict[int, InboundStream | Reading] = {}  # by reducer: stream of its part
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
        """Return the sort key for the order in which parts are awaited. Parts of failed reducers come first."""
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
            self.read_nbytes += stream.received_nbytes if isinstance(stream, Reading) else 0
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

    def __init__(self, replacer: Replacer, round: int, coordinator: int) -> None:
        self._replacer = replacer
        self._services = replacer.services
        self._buffers = replacer.resources.buffers
        self.round = round
        self.coordinator = coordinator
        self.assigned_at = self._services.time()
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
        self._accumulator, server = self._buffers.acquire(), self._replacer.server
        receiver = SnapshotReceiver(
            self._services,
            server.channel,
            self._accumulator.buffers,
            self._buffers.ring,
            donors=donors,
            best=best,
            round=self.round,
            neighbours=server.neighbours,
        )
        self._started, self._receiver, self.route = receiver, receiver, "direct"
        return receiver

    def _new_mean_receiver(self, assign: Assign) -> MeanReceiver:
        self._accumulator = self._buffers.acquire()
        receiver = MeanReceiver(self._replacer, self._accumulator, assign, self.round)
        self._started, self._receiver, self.route = receiver, receiver, "sharded"
        return receiver


class Replacer:
    """Receives averages of other ranks' weights, and loads them into this rank's model, one round at a time."""

    def __init__(
        self,
        services: Services,
        server: SnapshotServer,
        resources: RoleResources,
        reducer: Reducer,
        relay: Relay,
        states: StateTransfer | None,
    ) -> None:
        self.services = services
        self.server = server
        self.resources = resources
        self.reducer = reducer
        self.relay = relay
        self._states = states
        self._abandoned_info = NOTHING
        self._unannounced: tuple[NewWeights, int, StepInfo] | None = None
        self.exchange: Exchange | None = None
        self.replacement_count = 0

    def ask(self, round: int, coordinator: int, assign: Assign) -> None:
        """Start receiving an average: request the weights from the donors or reducers, if there are any."""
        self.exchange = Exchange(self, round, coordinator)
        self.exchange.takes_state = self.resources.adopter is not None and not assign.admits
        if assign.donors:
            self.exchange.ask_early(assign)

    async def receive(self, exchange: Exchange, frozen: Frozen) -> str:
        """Receive the average of the donors' snapshots. Return why it cannot be applied, or "" if it can."""
        try:
            receiver = await exchange.run(frozen)
        except (AsyncdistError, TimeoutError) as error:
            return f"the stream from rank {exchange.donor} did not complete: {error}"
        if receiver.is_agreed:
            return await self._receive_state(exchange, frozen) if exchange.takes_state else ""
        entry = self.resources.own.unsound_entry(receiver.accumulator)
        return f"the donors differ in infinite values, for example in {entry!r}"

    async def _receive_state(self, exchange: Exchange, frozen: Frozen) -> str:
        assert len(frozen.donors) == 1, f"round {exchange.round} has {frozen}"
        try:
            exchange.parts, nbytes = await self.take_parts(exchange, frozen.donors[0])
        except (AsyncdistError, TimeoutError) as error:
            return f"the optimizer's state of rank {frozen.donors[0]} did not arrive: {error}"
        exchange.nbytes += nbytes
        self.resources.buffers.received_nbytes += nbytes
        return ""

    async def take_parts(self, exchange: Exchange, donor: int) -> tuple[Mapping[str, Any], int]:
        """Receive the optimizer and policy state that ``donor`` offers in the exchange's round. Return it and its size.

        Raises:
            AsyncdistError, TimeoutError: The stream has failed (see :meth:`StateTransfer.take`), or the state is not
                valid.
        """
        assert self._states is not None, "a rank without a state transfer receives no state"
        limit = state_nbytes_max(self.resources.own.flat.nbytes)
        state = await self._states.take(donor, exchange.round, nbytes_max=limit, deadline=lambda: exchange.deadline)
        return unpacked(state), state.numel()

    def discard(self, round: int, reason: str) -> None:
        """Stop receiving a round's average, and free its memory. The next step reports ``reason`` to the user."""
        exchange, self.exchange = self.exchange, None
        assert exchange is not None, f"round {round} is abandoned without an exchange"
        exchange.discard()
        self._abandoned_info = StepInfo(
            round=round,
            abandoned=reason,
            nbytes=exchange.nbytes,
            coordinator=exchange.coordinator,
            route=exchange.route,
        )

    def take_abandoned(self) -> StepInfo:
        """Return the step result that reports a round abandoned since the last call; ``NOTHING`` if there is none."""
        abandoned, self._abandoned_info = self._abandoned_info, NOTHING
        return abandoned

    def obstacle(self) -> str:
        """Return why the donor's optimizer state cannot be adopted with the weights now, or "" if it can."""
        exchange, adopter = self.exchange, self.resources.adopter
        if exchange is None or exchange.parts is None or adopter is None:
            return ""
        return adopter.obstacle(exchange.parts)

    def load_average(self, frozen: Frozen, iteration: int, nonfinite: str | None = None) -> StepInfo:
        """Load the new weights into this rank's model, and return the step's result.

        Args:
            nonfinite: Description of this rank's non-finite state, or "" if there is none. None to check the state now.
        """
        exchange, adopter = self.exchange, self.resources.adopter
        assert exchange is not None, "weights are to be applied without an exchange"
        began_at = self.services.time()
        prepared = None
        if adopter is not None and exchange.parts is not None:
            prepared = adopter.prepare(exchange.parts, frozen.donors[0], exchange.round)
        new = NewWeights(
            round=exchange.round,
            donors=frozen.donors,
            weights=frozen.weights,
            iterations=frozen.iterations,
            best=frozen.best,
            average=None if exchange.average is None else exchange.average.buffers,
            began_at=exchange.assigned_at,
            nbytes=exchange.nbytes,
            coordinator=exchange.coordinator,
            route=exchange.route if frozen.donors else "",
        )
        info = self.resources.own.apply(new, iteration, self.services, nonfinite)
        if adopter is not None and prepared is not None:
            info = adopter.adopt(prepared, info)
        if exchange.average is not None:
            exchange.average.release()
        self.resources.own.note_time("apply", self.services.time() - began_at)
        self.exchange = None
        self.replacement_count += 1
        self._unannounced = new, iteration, info
        return info

    def announce(self) -> None:
        """Notify the user's ``on_event`` callback of the weights that :meth:`load_average` has applied, if any."""
        applied, self._unannounced = self._unannounced, None
        if applied is not None:
            self.resources.own.announce(*applied)

    def load(self, exchange: Exchange) -> None:
        """Replace all weights of this rank with those of one other rank, whose optimizer state was already loaded."""
        assert exchange.average is not None, f"round {exchange.round} has no weights"
        self.resources.own.load(exchange.average.buffers, has_new_state=True)
        exchange.average.release()
        self.exchange = None
