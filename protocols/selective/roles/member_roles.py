"""Holds the roles of one member, and carries out what the state machine answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, assert_never

from asyncdist.messaging.services import Services
from asyncdist.protocols.applier import Applier
from asyncdist.protocols.journal import Journal
from asyncdist.protocols.options import Timing
from asyncdist.protocols.own_state import OwnState
from asyncdist.protocols.parameter_stream.parts import PartPool
from asyncdist.protocols.selective.joining.state_transfer import StateTransfer
from asyncdist.protocols.selective.leadership import Leadership
from asyncdist.protocols.selective.member import (
    AddUp,
    Apply,
    Ask,
    Discard,
    Give,
    Instructions,
    Read,
    Reduce,
    RefuseMeans,
    RefuseUpTo,
    RoundMember,
    StopReducing,
    TakeSnapshot,
    Tell,
    Withdraw,
)
from asyncdist.protocols.selective.messages import Assign, End, Frozen
from asyncdist.protocols.selective.roles.donor import Donor
from asyncdist.protocols.selective.roles.exchange_buffers import ExchangeBuffers
from asyncdist.protocols.selective.roles.member_channels import MemberChannels
from asyncdist.protocols.selective.roles.reducer import Reducer
from asyncdist.protocols.selective.roles.relay import Relay
from asyncdist.protocols.selective.roles.replacer import Replacer
from asyncdist.protocols.selective.round_events import PendingEvents, RoundEvents
from asyncdist.protocols.step_info import PolicyEvent
from asyncdist.tensors.flat_state import FlatState, SnapshotPool


class MemberRoles:
    """Gives, takes and reduces as :class:`RoundMember` says.

    Args:
        services: of this rank.
        member: decides.
        channels: carry the messages and the streams.
        leadership: returns who coordinates; called when there is something to tell.
        flat, own: the model's state, and what of it is given and kept.
        snapshots, buffers, parts: the memory of donors, replacers and reducers.
        applier: changes the weights.
        states, whole_state, on_event, timing: as for :class:`Donor`.
        journal: is told each state of the member.
        events: keep what ``on_event`` is told in the next step.

    Attributes:
        donor, replacer, reducer, relay: the roles.
    """

    def __init__(
        self,
        services: Services,
        member: RoundMember,
        channels: MemberChannels,
        leadership: Callable[[], Leadership],
        *,
        flat: FlatState,
        own: OwnState,
        snapshots: SnapshotPool,
        buffers: ExchangeBuffers,
        parts: PartPool,
        applier: Applier,
        states: StateTransfer,
        whole_state: Callable[[], Mapping[str, Any]],
        on_event: Callable[[PolicyEvent], None] | None,
        timing: Timing,
        journal: Journal,
        events: PendingEvents,
    ) -> None:
        self._services = services
        self._member = member
        self._states = states
        self._journal = journal
        self._events = RoundEvents(member, events)
        self._told_state = member.state
        self._channels = channels
        self._leadership = leadership
        server = channels.server
        self.donor = Donor(
            services,
            member,
            self.carry_out,
            flat=flat,
            own=own,
            snapshots=snapshots,
            server=server,
            states=states,
            whole_state=whole_state,
            on_event=on_event,
            timing=timing,
        )
        self.reducer = Reducer(services, server, parts, self.donor.snapshot_of)
        self.relay = Relay(services.rank, server)
        self.replacer = Replacer(
            services,
            member,
            self.carry_out,
            server=server,
            buffers=buffers,
            reducer=self.reducer,
            relay=self.relay,
            own=own,
            applier=applier,
            timing=timing,
        )

    def take(self, message: Assign | Frozen | End, round: int) -> None:
        """Hand a message of the coordinator to the state machine, and do what it answers."""
        match message:
            case Assign():
                for restarted in message.restarted:
                    self.admit(*restarted)
                instructions = self._member.on_assign(message, round)
                self._events.note(instructions, message, round)
            case Frozen():
                instructions = self._member.on_frozen(message, round)
            case End(reason):
                instructions = self._member.on_end(reason, round)
                self._events.note(instructions, reason=reason)
            case unknown:
                assert_never(unknown)
        self._do(instructions)

    def admit(self, rank: int, incarnation: int) -> None:
        """Exchange messages with a process that was started again, and has been admitted, if it still has its place."""
        if self._services.restarted.get(rank, 0) == incarnation:
            self._channels.admit(rank)
            self._states.admit(rank)

    def lose_coordinator(self, why: str) -> None:
        """End what a coordinator has begun that is gone, or is replaced, as ``why`` says."""
        instructions = self._member.on_coordinator_gone(why)
        self._events.note(instructions, reason=f"the coordinator {why}")
        self._do(instructions)

    def carry_out(self, instructions: Instructions) -> None:
        """Do what the state machine says, in that order."""
        self._events.note(instructions)
        self._do(instructions)

    def _do(self, instructions: Instructions) -> None:
        for instruction in instructions:
            match instruction:
                case Tell(message, round):
                    coordinator = self._leadership().coordinator
                    if coordinator is not None:
                        self._channels.tell(message, coordinator, round)
                case RefuseUpTo(round):
                    self._channels.server.end_rounds(round)
                case Give(round, _):
                    self.donor.give(round)
                case Withdraw():
                    self.donor.withdraw()
                case Ask(round, assign):
                    coordinator = self._leadership().coordinator
                    assert coordinator is not None, f"round {round} has no coordinator"
                    self.replacer.ask(round, coordinator, assign)
                case Reduce(round, assign):
                    if assign.part >= 0:
                        self.reducer.begin(round, assign)
                    self.relay.begin(round, assign)
                case AddUp(_, frozen):
                    self.reducer.add_up(frozen)
                case StopReducing():
                    self.reducer.stop()
                    self.relay.stop()
                case RefuseMeans(round):
                    self._channels.server.end_means(round)
                case Read(_, frozen):
                    self.replacer.read(frozen)
                case Discard(round, reason):
                    self.replacer.discard(round, reason)
                case TakeSnapshot() | Apply():
                    raise AssertionError(f"{instruction} outside step")
                case unknown:
                    assert_never(unknown)
        self.tell_state()

    def tell_state(self) -> None:
        """Tell what the member does now, if that has changed."""
        state = self._member.state
        if state is not self._told_state:
            self._told_state = state
            self._journal.note_role(self._member.round or self._member.last_round, state.name.lower())
