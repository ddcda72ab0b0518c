"""Implements the replacer's role in a round: requests the donors' snapshots, averages them, and applies the average.

:class:`~protocols.selective.roles.member_roles.MemberRoles` calls the methods of :class:`Replacer` in this order:

1. :meth:`Replacer.ask`, when the coordinator assigns the role.
2. :meth:`Replacer.receive`, in a task, when the round's donors no longer change. Each snapshot arrives as a stream, or
   is read from the donor's memory (:class:`~protocols.parameter_stream.receiver.SnapshotReceiver`). On the sharded
   route, reducers send parts of the mean (:class:`~protocols.selective.roles.exchange.MeanReceiver`).
3. :meth:`Replacer.load_average` and :meth:`Replacer.announce`, in the next step.

If the round is abandoned, :meth:`Replacer.discard` is called instead of the remaining methods.
"""

from __future__ import annotations

from asyncdist import AsyncdistError
from asyncdist.messaging.services import Services
from asyncdist.protocols.applier import NewWeights
from asyncdist.protocols.joining.state_transfer import StateTransfer, state_nbytes_max, unpacked
from asyncdist.protocols.parameter_stream.server import SnapshotServer
from asyncdist.protocols.selective.messages import Assign, Frozen
from asyncdist.protocols.selective.roles.exchange import Exchange
from asyncdist.protocols.selective.roles.reducer import Reducer, Relay
from asyncdist.protocols.selective.roles.resources import RoleResources
from asyncdist.protocols.step_info import NOTHING, StepInfo


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
        self._services = services
        self._server = server
        self._resources = resources
        self._reducer = reducer
        self._relay = relay
        self._states = states
        self._abandoned_info = NOTHING
        self._unannounced: tuple[NewWeights, int, StepInfo] | None = None
        self.exchange: Exchange | None = None
        self.replacement_count = 0

    def ask(self, round: int, coordinator: int, assign: Assign) -> None:
        """Begin to receive an average: request the weights from the donors or reducers, if there are any."""
        roles = self._reducer, self._relay
        self.exchange = Exchange(self._services, self._server, self._resources.buffers, *roles, round, coordinator)
        self.exchange.takes_state = self._resources.adopter is not None and not assign.admits
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
        entry = self._resources.own.unsound_entry(receiver.accumulator)
        return f"the donors differ in infinite values, for example in {entry!r}"

    async def _receive_state(self, exchange: Exchange, frozen: Frozen) -> str:
        assert self._states is not None and len(frozen.donors) == 1, f"round {exchange.round} has {frozen}"
        nbytes_max = state_nbytes_max(self._resources.flat.nbytes)
        try:
            state = await self._states.take(
                frozen.donors[0], exchange.round, nbytes_max=nbytes_max, deadline=lambda: exchange.deadline
            )
            exchange.parts = unpacked(state)
        except (AsyncdistError, TimeoutError) as error:
            return f"the optimizer's state of rank {frozen.donors[0]} did not arrive: {error}"
        exchange.nbytes += state.numel()
        self._resources.buffers.received_nbytes += state.numel()
        return ""

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
        """Return the step result that reports a round abandoned since the last call, or ``NOTHING`` without one."""
        abandoned, self._abandoned_info = self._abandoned_info, NOTHING
        return abandoned

    def obstacle(self) -> str:
        """Return why the donor's optimizer state cannot be adopted with the weights now, or "" if it can."""
        exchange, adopter = self.exchange, self._resources.adopter
        if exchange is None or exchange.parts is None or adopter is None:
            return ""
        return adopter.obstacle(exchange.parts)

    def load_average(self, frozen: Frozen, iteration: int, nonfinite: str | None = None) -> StepInfo:
        """Load the new weights into this rank's model, and return the step's result.

        Args:
            nonfinite: Description of this rank's non-finite state, or "" if there is none. None to check the state now.
        """
        exchange, adopter = self.exchange, self._resources.adopter
        assert exchange is not None, "weights are to be applied without an exchange"
        began_at = self._services.time()
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
        info = self._resources.applier.apply(new, iteration, self._services, nonfinite)
        if adopter is not None and prepared is not None:
            info = adopter.adopt(prepared, info)
        if exchange.average is not None:
            exchange.average.release()
        self._resources.timing.add("apply", self._services.time() - began_at)
        self.exchange = None
        self.replacement_count += 1
        self._unannounced = new, iteration, info
        return info

    def announce(self) -> None:
        """Notify the user's ``on_event`` callback of the weights that :meth:`load_average` has applied, if any."""
        applied, self._unannounced = self._unannounced, None
        if applied is not None:
            self._resources.applier.announce(*applied)

    def load(self, exchange: Exchange) -> None:
        """Replace all of this rank's weights by a single rank's weights, whose optimizer's state was already loaded."""
        assert exchange.average is not None, f"round {exchange.round} has no weights"
        self._resources.own.load(exchange.average.buffers, has_new_state=True)
        exchange.average.release()
        self.exchange = None
