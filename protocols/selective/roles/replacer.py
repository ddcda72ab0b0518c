"""Carries out a replacer's part in a round: asks the donors, averages what streams in, and applies it in a step."""

from __future__ import annotations

import logging
from collections.abc import Callable

from asyncdist import AsyncdistError
from asyncdist.messaging.services import Services
from asyncdist.protocols.applier import Applier, NewWeights
from asyncdist.protocols.options import Timing
from asyncdist.protocols.own_state import OwnState
from asyncdist.protocols.parameter_stream.server import SnapshotServer
from asyncdist.protocols.selective.member import Instructions, RoundMember
from asyncdist.protocols.selective.messages import Assign, Frozen
from asyncdist.protocols.selective.roles.exchange import Exchange
from asyncdist.protocols.selective.roles.exchange_buffers import ExchangeBuffers
from asyncdist.protocols.selective.roles.reducer import Reducer
from asyncdist.protocols.selective.roles.relay import Relay
from asyncdist.protocols.step_info import NOTHING, StepInfo

logger = logging.getLogger("protocols.selective.roles.replacer")


class Replacer:
    """Takes the averages of the rounds that name this rank a replacer, one after the other.

    Args:
        services: of this rank.
        member: decides; told how an exchange ends, and that an average is in place.
        carry_out: does what ``member`` answers.
        server: has the channel of the policy's parameter streams.
        buffers: the memory of exchanges.
        reducer: makes this rank's part of a mean, where it reduces.
        relay: shares what this rank fetches for its host.
        own: the model and its optimizer, and what of them is kept.
        applier: changes the weights.
        timing: collects the seconds that an application takes.

    Attributes:
        exchange: of the round under way; None where there is none.
        replacement_count: averages that have been applied.
    """

    def __init__(
        self,
        services: Services,
        member: RoundMember,
        carry_out: Callable[[Instructions], None],
        *,
        server: SnapshotServer,
        buffers: ExchangeBuffers,
        reducer: Reducer,
        relay: Relay,
        own: OwnState,
        applier: Applier,
        timing: Timing,
    ) -> None:
        self._services = services
        self._member = member
        self._carry_out = carry_out
        self._server = server
        self._buffers = buffers
        self._reducer = reducer
        self._relay = relay
        self._own = own
        self._applier = applier
        self._timing = timing
        self._given_up = NOTHING
        self._announced: tuple[NewWeights, int] | None = None
        self.exchange: Exchange | None = None
        self.replacement_count = 0

    def ask(self, round: int, coordinator: int, assign: Assign) -> None:
        """Begin an exchange, and ask the donors, or the reducers, that are known already."""
        roles = self._reducer, self._relay
        self.exchange = Exchange(self._services, self._server, self._buffers, *roles, round, coordinator)
        if assign.donors:
            self.exchange.ask_early(assign)

    def read(self, frozen: Frozen) -> None:
        """Average the snapshots of the donors of the frozen round, in a task."""
        exchange = self.exchange
        assert exchange is not None, "a round is frozen without an exchange"
        exchange.task = self._services.spawn_service(
            self._read(exchange, frozen), name=f"exchange of round {exchange.round}"
        )

    async def _read(self, exchange: Exchange, frozen: Frozen) -> None:
        """Average the donors' snapshots, in rank order, and tell the state machine how it ended."""
        try:
            receiver = await exchange.run(frozen)
            if not receiver.is_agreed:
                entry = self._own.unsound_entry(receiver.accumulator)
                self._fail(exchange, f"the donors differ in infinite values, as of {entry!r}")
            elif self._member.on_averaged(exchange.round):
                exchange.keep_average()
        except (AsyncdistError, TimeoutError) as error:
            self._fail(exchange, f"the stream from rank {exchange.donor} did not complete: {error}")
        finally:
            exchange.close()

    def _fail(self, exchange: Exchange, reason: str) -> None:
        exchange.task = None  # it is the caller, and ends by itself
        instructions = self._member.on_failed(exchange.round, reason)
        if instructions:
            logger.info("round %d: abandoned, %s", exchange.round, reason)
        self._carry_out(instructions)

    def discard(self, round: int, reason: str) -> None:
        """Free what the exchange holds. The next step says so, although the coordinator's ``End`` may come before."""
        exchange, self.exchange = self.exchange, None
        assert exchange is not None, f"round {round} is given up without an exchange"
        exchange.discard()
        self._given_up = StepInfo(
            round=round,
            abandoned=reason,
            nbytes=exchange.nbytes,
            coordinator=exchange.coordinator,
            route=exchange.route,
        )

    def take_given_up(self) -> StepInfo:
        """Return, once, the round that was given up since the last step."""
        given_up, self._given_up = self._given_up, NOTHING
        return given_up

    def apply(self, frozen: Frozen, iteration: int) -> StepInfo:
        """Put the new weights in place, and tell the user of them if the policy is to."""
        info = self.put_in_place(frozen, iteration)
        self.announce()
        return info

    def put_in_place(self, frozen: Frozen, iteration: int, trouble: str | None = None) -> StepInfo:
        """Put the new weights in place; ``trouble`` is as for :meth:`OwnState.take`."""
        exchange = self.exchange
        assert exchange is not None, "weights to be replaced without an exchange"
        began_at = self._services.time()
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
        info = self._applier.apply(new, iteration, self._services.time, trouble)
        if exchange.average is not None:
            exchange.average.release()
        self._timing.add("apply", self._services.time() - began_at)
        self.exchange = None
        self.replacement_count += 1
        self._carry_out(self._member.on_applied(iteration))
        self._announced = new, iteration
        return info

    def announce(self) -> None:
        """Tell the user of the weights that have been put in place, once, if the policy is to."""
        announced, self._announced = self._announced, None
        if announced is not None:
            self._applier.announce(*announced)

    def load(self, exchange: Exchange) -> None:
        """Put all that the only donor of ``exchange`` has given in place, and nothing of this rank's own remains."""
        assert exchange.average is not None, f"round {exchange.round} has brought no weights"
        self._own.load(exchange.average.buffers)
        exchange.average.release()
        self.exchange = None
