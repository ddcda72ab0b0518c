"""Gives this rank's weights to rounds of other islands, in which it is a donor beside its own island's rounds.

A :class:`Visit` has the state machine, the channels and the snapshots of a donor, in the scopes of the other island,
whose coordinator and replacers treat it as any donor. Its role in its own island goes on beside it. A visit is
opened by an invitation, before any rank there asks for a snapshot, and kept for further rounds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from asyncdist.messaging.services import Services
from asyncdist.protocols.options import Timing
from asyncdist.protocols.own_state import OwnState
from asyncdist.protocols.selective.coordinator import PolicyScopes
from asyncdist.protocols.selective.islands.layout import Island
from asyncdist.protocols.selective.islands.messages import Invitation
from asyncdist.protocols.selective.member import (
    Give,
    Instructions,
    RefuseUpTo,
    RoundMember,
    State,
    TakeSnapshot,
    Tell,
    Withdraw,
)
from asyncdist.protocols.selective.messages import DONOR, Assign, End, Leave, PackedAssign, Report
from asyncdist.protocols.selective.roles.donor import Donor
from asyncdist.protocols.selective.roles.member_channels import MemberChannels
from asyncdist.protocols.selective.round_events import PendingEvents, RoundEvents
from asyncdist.protocols.step_info import NOTHING, PolicyEvent, SnapshotTaken, StepInfo
from asyncdist.tensors.flat_state import FlatState, SnapshotPool

logger = logging.getLogger("protocols.selective.islands.visit")


class Visit:
    """Is a donor in one other island.

    Args:
        services: of this rank.
        scopes: of that island.
        is_sound: whether an assignment names ranks that may be in a round there.
        newest: returns this rank's newest report.
        on_assigned: called when the next step has something to do.
        make_donor: makes the role, given the state machine, what carries out its answers, and the channels.
        make_events: makes the events of its rounds, given the state machine.
    """

    def __init__(
        self,
        services: Services,
        scopes: PolicyScopes,
        is_sound: Callable[[Assign], bool],
        newest: Callable[[], Report | None],
        on_assigned: Callable[[], None],
        make_donor: Callable[[RoundMember, Callable[[Instructions], None], MemberChannels], Donor],
        make_events: Callable[[RoundMember], RoundEvents],
    ) -> None:
        self._services = services
        self._channels = MemberChannels(services, scopes)
        self._is_sound = is_sound
        self._newest = newest
        self._on_assigned = on_assigned
        self._coordinator: int | None = None
        self._epoch = 0
        self._member = RoundMember()
        self._events = make_events(self._member)
        self.donor = make_donor(self._member, self._carry_out, self._channels)
        services.on_gone(self._on_gone)
        services.spawn_service(self._listen(), name="visit to another island")

    def on_invitation(self, invitation: Invitation, coordinator: int) -> None:
        """Tell the coordinator that this rank is there, with its newest report."""
        if invitation.epoch < self._epoch or coordinator in self._services.gone:
            return
        if invitation.epoch > self._epoch or coordinator != self._coordinator:
            self._lose_coordinator("is replaced")
        if invitation.epoch > self._epoch:
            self._epoch = invitation.epoch
            self._channels.enter_epoch(self._epoch)
        self._coordinator = coordinator
        self._channels.admit(coordinator)
        newest = self._newest()
        if newest is not None:
            self._carry_out((self._member.joined(newest, self._services.incarnation),))

    @property
    def wants_step(self) -> bool:
        """Whether the next step has something to do."""
        return self._member.wants_step

    def on_step(self, iteration: int) -> None:
        """Take a snapshot, if one is due."""
        match self._member.on_step():
            case TakeSnapshot(round):
                self.donor.take_snapshot(round, iteration)

    def leave(self) -> None:
        """Begin to leave: what is on offer stays there until its round has ended."""
        self._carry_out(self._member.on_leave())

    def close(self) -> None:
        """Give nothing any more."""
        self._carry_out(self._member.on_left())
        self._services.off_gone(self._on_gone)
        self._channels.close()

    @property
    def is_quiet(self) -> bool:
        """Whether nothing of a round is left."""
        is_giving = self._member.state is State.LASTING or not self._channels.server.is_idle
        return self._member.state is State.OUT or not is_giving

    @property
    def sent_nbytes(self) -> int:
        """Bytes streamed to that island."""
        return self._channels.server.sent_nbytes

    def _on_gone(self, rank: int) -> None:
        if rank == self._coordinator:
            self._services.engine.loop.call_soon(self._lose, rank)

    def _lose(self, rank: int) -> None:
        """End the round of a coordinator that is gone; another one knows nothing of it."""
        if rank == self._coordinator:
            self._coordinator = None
            self._lose_coordinator("is gone")

    def _lose_coordinator(self, why: str) -> None:
        instructions = self._member.on_coordinator_gone(why)
        self._events.note(instructions, reason=f"the coordinator {why}")
        self._do(instructions)

    async def _listen(self) -> None:
        async for envelope in self._channels.control:
            if envelope.source != self._coordinator:
                continue
            match envelope.message:
                case PackedAssign() as told if (assign := told.opened(self._services.rank)) and self._is_given(assign):
                    for rank, incarnation in assign.restarted:
                        if self._services.restarted.get(rank, 0) == incarnation:
                            self._channels.admit(rank)
                    instructions = self._member.on_assign(replace(assign, part=-1), envelope.round)
                    self._events.note(instructions, assign, envelope.round)
                    self._do(instructions)
                    self._on_assigned()
                case End(reason):
                    instructions = self._member.on_end(reason, envelope.round)
                    self._events.note(instructions, reason=reason)
                    self._do(instructions)
                case Leave():
                    self._lose(envelope.source)
                case other:
                    logger.debug("a coordinator of another island sent a %s", type(other).__name__)

    def _is_given(self, assign: Assign) -> bool:
        """Return whether an assignment is one of a guest, which only gives."""
        return assign.role == DONOR and not assign.admits and self._is_sound(assign)

    def _carry_out(self, instructions: Instructions) -> None:
        self._events.note(instructions)
        self._do(instructions)

    def _do(self, instructions: Instructions) -> None:
        for instruction in instructions:
            match instruction:
                case Tell(message, round):
                    if self._coordinator is not None:
                        self._channels.tell(message, self._coordinator, round)
                case RefuseUpTo(round):
                    self._channels.server.end_rounds(round)
                case Give(round, _):
                    self.donor.give(round)
                case Withdraw():
                    self.donor.withdraw()
                case unknown:
                    raise AssertionError(f"{unknown} of a rank that only gives")


class Visits:
    """Holds the visits of one rank, by island; there are none before :meth:`open`.

    Args:
        flat, own, snapshots, on_event, timing: as for :class:`Donor`.
        events: keep what ``on_event`` is told in the next step.
        newest: returns this rank's newest report.

    Attributes:
        wants_step: whether the next step has something to do.
    """

    def __init__(
        self,
        flat: FlatState,
        own: OwnState,
        snapshots: SnapshotPool,
        on_event: Callable[[PolicyEvent], None] | None,
        events: PendingEvents,
        timing: Timing,
        newest: Callable[[], Report | None],
    ) -> None:
        self._newest = newest
        self._shared: dict[str, Any] = {"flat": flat, "own": own, "snapshots": snapshots, "timing": timing}
        self._on_event = on_event
        self._events = events
        self._services: Services
        self._island: Island | None = None
        self._is_leaving = False
        self._visits: dict[int, Visit] = {}
        self.wants_step = False

    def open(self, services: Services, island: Island) -> None:
        """Take invitations from now on, on a rank of that island."""
        self._services, self._island = services, island

    def located(self, info: StepInfo) -> StepInfo:
        """Say which island this rank is in, and which donors are in another one."""
        if self._island is None or info is NOTHING:
            return info
        members = self._island.ranks
        return replace(
            info, island=self._island.index, migrants=tuple(rank for rank in info.donors if rank not in members)
        )

    def on_invitation(self, invitation: Invitation, coordinator: int) -> bool:
        """Get ready to be a donor in another island; False where this rank leaves."""
        if self._is_leaving:
            return False
        assert self._island is not None, "an invitation where there are no islands"
        index = self._island.index_of(coordinator)
        visit = self._visits.get(invitation.to_members)
        if visit is None:
            visit = self._visits[invitation.to_members] = self._open_visit(index, invitation)
        visit.on_invitation(invitation, coordinator)
        return True

    def _open_visit(self, index: int, invitation: Invitation) -> Visit:
        island = self._island
        assert island is not None and index != island.index, f"an invitation of island {index} to {island}"
        hosts = island.ranks_of(index)

        def wake() -> None:
            self.wants_step = True

        return Visit(
            self._services,
            PolicyScopes.elsewhere(invitation.to_members, invitation.to_coordinator),
            is_sound=lambda assign: assign.is_among(hosts, island.population),
            newest=self._newest,
            on_assigned=wake,
            make_donor=self._make_donor_for(index),
            make_events=lambda member: RoundEvents(member, self._events, index),
        )

    def _make_donor_for(self, index: int) -> Callable[..., Donor]:
        on_event = self._on_event

        def tell(event: PolicyEvent) -> None:
            if on_event is not None and isinstance(event, SnapshotTaken):
                on_event(replace(event, island=index))

        def make(member: RoundMember, carry_out: Callable[[Instructions], None], channels: MemberChannels) -> Donor:
            return Donor(
                self._services,
                member,
                carry_out,
                server=channels.server,
                states=None,
                whole_state=dict,
                on_event=None if on_event is None else tell,
                **self._shared,
            )

        return make

    def on_step(self, iteration: int) -> None:
        """Take the snapshots that are due."""
        self.wants_step = False
        for visit in self._visits.values():
            if visit.wants_step:
                visit.on_step(iteration)

    def leave(self) -> None:
        """Begin to leave."""
        self._is_leaving = True
        for visit in self._visits.values():
            visit.leave()

    def close(self) -> None:
        """Give nothing any more."""
        for visit in self._visits.values():
            visit.close()

    @property
    def is_quiet(self) -> bool:
        """Whether nothing of a round elsewhere is left."""
        return all(visit.is_quiet for visit in self._visits.values())

    @property
    def population(self) -> Sequence[int]:
        """The ranks of all islands, of which donors may be; empty without islands."""
        return () if self._island is None else self._island.population

    @property
    def snapshot_count(self) -> int:
        """Snapshots that were given to other islands."""
        return sum(visit.donor.snapshot_count for visit in self._visits.values())

    @property
    def sent_nbytes(self) -> int:
        """Bytes streamed to other islands."""
        return sum(visit.sent_nbytes for visit in self._visits.values())
