"""Passes events to a member's state machine, and executes its instructions to send, receive or apply weights.

Events are messages from the coordinator, training steps, and the ends of copies and exchanges. The objects that execute
the instructions do not depend on the state machine. :class:`RoundEvents` derives the events for the user's ``on_event``
callback from the instructions. These events wait in :class:`UserEvents` until the next step.

Invariant: Each :class:`RoleAssigned` is followed by an :class:`AverageApplied`, :class:`RoundEnded` or
:class:`RoundAbandoned` of the same round before the next :class:`RoleAssigned`.
"""

from __future__ import annotations

import functools
import logging
from typing import assert_never

from asyncdist import AsyncdistError
from asyncdist.messaging.services import Services
from asyncdist.protocols.joining.state_transfer import StateTransfer
from asyncdist.protocols.journal import Journal
from asyncdist.protocols.selective.member import (
    DONOR_STATES,
    AddUp,
    Apply,
    Discard,
    EnterEpoch,
    Instruction,
    Instructions,
    OfferSnapshot,
    ReceiveAverage,
    Reduce,
    RefuseMeans,
    RefuseUpTo,
    RequestSnapshots,
    RoundMember,
    SendToCoordinator,
    State,
    StopReducing,
    TakeSnapshot,
    Withdraw,
)
from asyncdist.protocols.selective.messages import DONOR, Applied, Assign, Decline, End, Frozen
from asyncdist.protocols.selective.roles.donor import Copy, Donor
from asyncdist.protocols.selective.roles.exchange import Exchange, Replacer
from asyncdist.protocols.selective.roles.member_channels import MemberChannels
from asyncdist.protocols.selective.roles.reducer import Reducer, Relay
from asyncdist.protocols.selective.roles.resources import RoleResources
from asyncdist.protocols.selective.succession import CoordinatorView
from asyncdist.protocols.step_info import (
    CoordinatorChanged,
    RoleAssigned,
    RoundAbandoned,
    RoundEnded,
    StepInfo,
    UserEvents,
)
from asyncdist.waits import WaitId, WaitKind

logger = logging.getLogger("protocols.selective.roles.member_roles")


class RoundEvents:
    """Creates a member's events: a role was assigned, or the role's round has ended or was abandoned.

    Args:
        island: Number of the other island that assigns the roles, or -1 for this rank's own island.
    """

    def __init__(self, member: RoundMember, pending: UserEvents, island: int = -1) -> None:
        self._member = member
        self._pending = pending
        self._island = island
        self._role, self._round = "", 0  # role and round of the last RoleAssigned event, until the role ends

    def note(self, instructions: Instructions, assign: Assign | None = None, round: int = 0, reason: str = "") -> None:
        """Create the user's events for instructions that the member's state machine has returned.

        Args:
            assign, round: Assignment that has caused the instructions, if any, and its round.
            reason: Reason for the end of the round, if the end has caused the instructions.
        """
        declined: dict[int, str] = {}
        for instruction in instructions:
            match instruction:
                case SendToCoordinator(Decline(why_declined), declined_round):
                    declined[declined_round] = why_declined
                case SendToCoordinator(Applied(), self._round):
                    self._role, self._round = "", 0  # the replacer itself creates the AverageApplied event
        if self._role == DONOR and not self._is_donor() and self._round not in declined:
            why = reason or (f"round {round} began" if round else "the policy ended")
            self._end(RoundEnded(self._round, why, self._island))
        for discard in instructions:
            if isinstance(discard, Discard):
                self._abandon(discard.round, discard.reason)
        if assign is not None and not (assign.admits and assign.role != DONOR):  # a restarted rank takes no steps yet
            self._role, self._round = assign.role, round
            self._pending.add(RoleAssigned(round, assign.role, assign.donors, assign.replacers, self._island))
        for number, why in declined.items():
            self._abandon(number, why)

    def _is_donor(self) -> bool:
        return self._member.round == self._round and self._member.state in DONOR_STATES

    def _abandon(self, round: int, reason: str) -> None:
        if self._role and round == self._round:
            self._end(RoundAbandoned(round, reason, self._island))

    def _end(self, event: RoundEnded | RoundAbandoned) -> None:
        self._role, self._round = "", 0
        self._pending.add(event)


class MemberRoles:
    """Sends, receives and applies weights in a member's averaging rounds, as its state machine instructs.

    Args:
        states: Sends the optimizer and policy state to restarted ranks. None if this rank never sends it.
        island: Number of the other island that this rank sends weights to, or -1 in this rank's own island.
        holds_copies: Whether a complete copy waits for :meth:`conclude`, because other ranks copy other shards of the
            model.
    """

    def __init__(
        self,
        services: Services,
        member: RoundMember,
        channels: MemberChannels,
        coordinator_view: CoordinatorView,
        resources: RoleResources,
        states: StateTransfer | None,
        journal: Journal,
        *,
        island: int = -1,
        holds_copies: bool = False,
    ) -> None:
        self._services = services
        self.member = member
        self.channels = channels
        self._coordinator_view = coordinator_view
        self._states = states
        self._journal = journal
        self._user_events = resources.own.events
        self._round_events = RoundEvents(member, resources.own.events, island)
        self._noted_state = member.state
        self._holds_copies = holds_copies
        self._held: Copy | None = None
        server = channels.server
        self.donor = Donor(services, server, resources, states, island=island)
        self.reducer = Reducer(services, server, resources.parts, self.donor)
        self.relay = Relay(services.rank, server)
        self.replacer = Replacer(services, server, resources, self.reducer, self.relay, states)

    # -- the coordinator --------------------------------------------------------------------------------------------

    def on_message(self, message: Assign | Frozen | End, round: int) -> None:
        """Pass a coordinator's message about an averaging round to the state machine, and execute its instructions."""
        match message:
            case Assign():
                for restarted in message.restarted:
                    self.admit(*restarted)
                self.carry_out(self.member.on_assign(message, round), message, round)
            case Frozen():
                self.carry_out(self.member.on_frozen(message, round))
            case End(reason):
                self.carry_out(self.member.on_end(reason, round), reason=reason)
            case unknown:
                assert_never(unknown)

    def admit(self, rank: int, incarnation: int) -> None:
        """Allow messages to a restarted rank, unless it has been restarted again since its admission."""
        if self._services.restarted.get(rank, 0) == incarnation:
            self.channels.admit(rank)
            if self._states is not None:
                self._states.admit(rank)

    def lose_coordinator(self, why: str) -> None:
        """End all roles, because the coordinator was lost or replaced.

        Args:
            why: Reason for reports, such as "is gone".
        """
        self.carry_out(self.member.on_coordinator_gone(why), reason=f"the coordinator {why}")

    def follow(self, epoch: int, rank: int) -> None:
        """End all roles assigned by the previous coordinator, and accept roles from the new coordinator, ``rank``."""
        self._journal.note_coordinator(epoch, rank)
        self._user_events.add(CoordinatorChanged(rank, epoch))
        self.lose_coordinator("is replaced")
        self.carry_out(self.member.on_epoch(epoch, self._services.incarnation))

    def rejoin(self) -> None:
        """Send this member's state to the coordinator, which has asked for it."""
        self.carry_out(self.member.on_rejoin(self._services.incarnation))

    # -- steps ------------------------------------------------------------------------------------------------------

    def step(self, iteration: int) -> StepInfo:
        """In a training step, copy the weights or load an average if either is due, and return the step's result."""
        abandoned = self.replacer.take_abandoned()  # reported unless this step applies the average of a later round
        match self.member.on_step():
            case TakeSnapshot() as due:
                self.take_snapshot(due, iteration)
            case Apply() as due:
                if obstacle := self.replacer.obstacle():
                    self.abandon(self.member.round, obstacle)
                    return self.replacer.take_abandoned()
                info = self.apply(due, iteration)
                self.replacer.announce()
                return info
        return abandoned

    def take_snapshot(self, due: TakeSnapshot, iteration: int) -> None:
        """Start copying this rank's weights. Raise ValueError if the model has changed since the policy was created."""
        try:
            copy = self.donor.copy(due.round, iteration, with_state=due.round == self.member.admitting)
        except ValueError:
            self.carry_out(self.member.on_copied(due.round, iteration, fault="its model has changed"))
            raise
        if copy.under_way is None:
            self._on_copied(copy)
        else:
            waits = WaitId(WaitKind.ROUND_SNAPSHOT, number=copy.round)
            self._services.engine.watch(copy.under_way, waits, functools.partial(self._on_copied, copy))

    def apply(self, due: Apply, iteration: int, nonfinite: str | None = None) -> StepInfo:
        """Load the new weights into the model. The user's event follows in :meth:`Replacer.announce`.

        Args:
            nonfinite: Description of this rank's non-finite state, or "" if there is none. None to check the state now.
        """
        info = self.replacer.load_average(due.frozen, iteration, nonfinite)
        self.carry_out(self.member.on_applied(iteration))
        return info

    # -- ends of copies and exchanges -------------------------------------------------------------------------------

    def _on_copied(self, copy: Copy, _: AsyncdistError | None = None) -> None:
        if self._holds_copies:
            self._held = copy
            self._services.engine.recheck()
        else:
            self._end_copy(copy)

    async def fault_of_copy(self) -> str:
        """Wait until the copy of this rank's weights is complete. Return why it cannot be sent, or "" if it can."""
        await self._services.engine.until(lambda: self._held is not None, WaitId(WaitKind.COPY_OF_WEIGHTS))
        assert self._held is not None, "no copy is held"
        return self.donor.fault_of(self._held)

    def conclude(self, fault: str) -> None:
        """Offer the finished copy of the weights to other ranks, or drop it if a shard of the model cannot be sent.

        Args:
            fault: Reason why a shard cannot be sent, or "" if all shards can.
        """
        held, self._held = self._held, None
        if held is not None:
            self._end_copy(held, fault)

    def _end_copy(self, copy: Copy, fault: str | None = None) -> None:
        """Offer a finished copy of the weights, or drop it if its round has ended or the copy cannot be sent.

        Args:
            fault: Reason why the copy cannot be sent, or "" if it can. None to check its values now.
        """
        is_wanted = self.member.awaits_copy(copy.round)
        if fault is None:
            fault = self.donor.fault_of(copy) if is_wanted else ""
        is_offered = is_wanted and not fault
        if is_offered:
            self.donor.keep(copy)
        else:
            self.donor.drop(copy)
        points = copy.state_safe_points
        self.carry_out(self.member.on_copied(copy.round, copy.iteration, fault=fault, state_safe_points=points))
        if is_offered:  # called last, since the user's callback may raise
            self.donor.announce(copy)

    async def _take_average(self, exchange: Exchange, frozen: Frozen) -> None:
        """Receive the average of a round. The next step applies it, unless the round has been abandoned meanwhile."""
        try:
            fault = await self.replacer.receive(exchange, frozen)
            if fault:
                instructions = self.member.on_failed(exchange.round, fault)
                if instructions:
                    logger.info("round %d: abandoned, %s", exchange.round, fault)
                self.carry_out(instructions)
            elif self.member.on_averaged(exchange.round):
                exchange.keep_average()
        finally:
            exchange.close()

    def abandon(self, round: int, reason: str) -> None:
        """Abandon the average of ``round``, whether complete or not, for ``reason``."""
        self.carry_out(self.member.on_failed(round, reason))

    def take_whole_state(self, exchange: Exchange, iteration: int) -> None:
        """Load the received weights on a restarted rank that adopts another member's whole state."""
        self.member.on_step()
        self.replacer.load(exchange)
        self.carry_out(self.member.on_applied(iteration))

    # -- leaving ----------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Start leaving the policy, but keep a finished copy of the weights available until its round has ended."""
        self.carry_out(self.member.on_leave())

    def finish(self) -> None:
        """End all roles in averaging rounds, because this rank has left the policy."""
        self.carry_out(self.member.on_left())

    @property
    def is_sending(self) -> bool:
        """True if this rank is still sending its weights, or is leaving while they can still be requested."""
        return self.member.state is State.LASTING or not self.channels.server.is_idle

    # -- instructions -----------------------------------------------------------------------------------------------

    def carry_out(
        self, instructions: Instructions, assign: Assign | None = None, round: int = 0, reason: str = ""
    ) -> None:
        """Execute the instructions of the state machine in order, and store the user's events that they imply.

        Args:
            assign, round, reason: Cause of the instructions; see :meth:`RoundEvents.note`.
        """
        self._round_events.note(instructions, assign, round, reason)
        for instruction in instructions:
            self._execute(instruction)
        state = self.member.state
        if state is not self._noted_state:
            self._noted_state = state
            self._journal.note_role(self.member.round or self.member.last_round, state.name.lower())

    def _execute(self, instruction: Instruction) -> None:
        match instruction:
            case SendToCoordinator(message, round):
                coordinator = self._coordinator_view.coordinator
                if coordinator is not None:
                    self.channels.send_to_coordinator(message, coordinator, round)
            case EnterEpoch(epoch):
                self.channels.enter_epoch(epoch)
            case RefuseUpTo(round):
                self.channels.server.end_rounds(round)
            case RefuseMeans(round):
                self.channels.server.end_means(round)
            case OfferSnapshot(round, _):
                self.donor.open_offer(round)
            case Withdraw():
                self.donor.withdraw()
            case RequestSnapshots(round, assign):
                coordinator = self._coordinator_view.coordinator  # None on a follower if the coordinator was lost
                self.replacer.ask(round, -1 if coordinator is None else coordinator, assign)
            case ReceiveAverage(round, frozen):
                exchange = self.replacer.exchange
                assert exchange is not None, f"round {round} is frozen without an exchange"
                name = f"exchange of round {round}"
                exchange.task = self._services.spawn_service(self._take_average(exchange, frozen), name=name)
            case Discard(round, reason):
                self.replacer.discard(round, reason)
            case Reduce(round, assign):
                if assign.part >= 0:
                    self.reducer.begin(round, assign)
                self.relay.begin(round, assign)
            case AddUp(_, frozen):
                self.reducer.add_up(frozen)
            case StopReducing():
                self.reducer.stop()
                self.relay.stop()
            case unknown:
                assert_never(unknown)
