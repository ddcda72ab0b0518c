"""Lets this rank send its weights to other islands, in addition to its role in its own island.

A :class:`Visit` has the state machine, channels and snapshots of a donor in another island, which treats this rank like
any other donor. An invitation opens the visit. The visit then remains open for later rounds.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from asyncdist.messaging.services import Services
from asyncdist.protocols.joining.messages import Invitation
from asyncdist.protocols.joining.scopes import PolicyScopes
from asyncdist.protocols.journal import Journal
from asyncdist.protocols.selective.islands.layout import Island
from asyncdist.protocols.selective.member import RoundMember, State
from asyncdist.protocols.selective.messages import DONOR, Assign, End, Leave, PackedAssign
from asyncdist.protocols.selective.roles.coordinator_tracking import ReportedCoordinator
from asyncdist.protocols.selective.roles.member_channels import MemberChannels
from asyncdist.protocols.selective.roles.member_roles import MemberRoles
from asyncdist.protocols.selective.roles.resources import RoleResources
from asyncdist.protocols.step_info import NOTHING, StepInfo

logger = logging.getLogger("protocols.selective.islands.visit")


class Visit:
    """Lets this rank send its weights to one other island (group of ranks that averages separately)."""

    def __init__(
        self,
        services: Services,
        scopes: PolicyScopes,
        island: Island,
        index: int,
        own: RoundMember,
        resources: RoleResources,
    ) -> None:
        self._services = services
        self._known = island.ranks_of(index), island.population
        self._own = own
        self._channels = MemberChannels(services, scopes)
        self._coordinator_view = ReportedCoordinator()
        self._member = RoundMember()
        self._roles = MemberRoles(
            services, self._member, self._channels, self._coordinator_view, resources, None, Journal(""), island=index
        )
        services.on_gone(self._on_gone)
        services.spawn_service(self._listen(), name="visit to another island")

    def on_invitation(self, invitation: Invitation, coordinator: int) -> None:
        """Accept an invitation by sending this rank's newest report to the other island's coordinator."""
        known = self._coordinator_view
        if invitation.epoch < known.epoch or coordinator in self._services.gone:
            return
        is_new = invitation.epoch > known.epoch
        if is_new or coordinator != known.coordinator:
            self._roles.lose_coordinator("is replaced")
        if is_new:
            self._channels.enter_epoch(invitation.epoch)
        known.follow(invitation.epoch, coordinator)
        self._channels.admit(coordinator)
        if self._own.newest is not None:
            self._roles.carry_out((self._member.joined(self._own.newest, self._services.incarnation),))

    @property
    def wants_step(self) -> bool:
        """True if the next step must copy the weights for the other island."""
        return self._member.wants_step

    def on_step(self, iteration: int) -> None:
        """Copy the weights for the other island if a copy is due."""
        self._roles.step(iteration)

    def leave(self) -> None:
        """Start to leave the other island, but keep a finished copy of the weights until its round has ended."""
        self._roles.leave()

    def close(self) -> None:
        """Stop sending weights to the other island, and close the channels."""
        self._roles.finish()
        self._services.off_gone(self._on_gone)
        self._channels.close()

    @property
    def is_quiet(self) -> bool:
        """True if the other island does not currently use this rank's weights."""
        return self._member.state is State.OUT or not self._roles.is_sending

    @property
    def snapshot_count(self) -> int:
        """Number of copies of the weights that were sent to the other island."""
        return self._roles.donor.snapshot_count

    @property
    def sent_nbytes(self) -> int:
        """Number of bytes sent to the other island."""
        return self._channels.server.sent_nbytes

    def _on_gone(self, rank: int) -> None:
        if rank == self._coordinator_view.coordinator:
            self._services.engine.loop.call_soon(self._lose_coordinator, rank)

    def _lose_coordinator(self, rank: int) -> None:
        """End this rank's role in the other island if ``rank``, which is lost or has stopped, coordinates it."""
        if rank == self._coordinator_view.coordinator:
            self._coordinator_view.follow(self._coordinator_view.epoch, None)
            self._roles.lose_coordinator("is gone")

    async def _listen(self) -> None:
        async for envelope in self._channels.control:
            if envelope.source != self._coordinator_view.coordinator:
                continue
            match envelope.message:
                case PackedAssign() as packed if (assign := packed.opened(self._services.rank)) and self._is_donor_role(
                    assign
                ):
                    self._roles.on_message(replace(assign, part=-1, sources=()), envelope.round)
                case End() as end:
                    self._roles.on_message(end, envelope.round)
                case Leave():
                    self._lose_coordinator(envelope.source)
                case other:
                    logger.debug("a coordinator of another island sent a %s", type(other).__name__)

    def _is_donor_role(self, assign: Assign) -> bool:
        """Return whether the assigned role is that of a donor, and the assignment names only known ranks."""
        return assign.role == DONOR and not assign.admits and assign.is_among(*self._known)


class Visits:
    """Sends this rank's weights to the other islands that have invited it."""

    def __init__(self, services: Services, island: Island, own: RoundMember, resources: RoleResources) -> None:
        self._services = services
        self._island = island
        self._own = own
        self._resources = resources
        self._is_leaving = False
        self._visits: dict[int, Visit] = {}

    def located(self, info: StepInfo) -> StepInfo:
        """Return ``info`` with this rank's island and the donors from other islands filled in."""
        if info is NOTHING:
            return info
        members = self._island.ranks
        return replace(
            info, island=self._island.index, migrants=tuple(rank for rank in info.donors if rank not in members)
        )

    def on_invitation(self, invitation: Invitation, coordinator: int) -> bool:
        """Accept an invitation to send weights to another island. Return False if this rank is leaving."""
        if self._is_leaving:
            return False
        index = self._island.index_of(coordinator)
        visit = self._visits.get(invitation.to_members)
        if visit is None:
            visit = self._visits[invitation.to_members] = self._open_visit(index, invitation)
        visit.on_invitation(invitation, coordinator)
        return True

    def _open_visit(self, index: int, invitation: Invitation) -> Visit:
        island = self._island
        assert index != island.index, f"island {index} invites a rank of its own, {island}"
        scopes = PolicyScopes.of_numbers(invitation.to_members, invitation.to_coordinator)
        return Visit(self._services, scopes, island, index, self._own, self._resources)

    def on_step(self, iteration: int) -> None:
        """Copy the weights for each other island for which a copy is due."""
        for visit in self._visits.values():
            if visit.wants_step:
                visit.on_step(iteration)

    def leave(self) -> None:
        """Start to leave all other islands, and decline later invitations."""
        self._is_leaving = True
        for visit in self._visits.values():
            visit.leave()

    def close(self) -> None:
        """Stop sending weights to other islands, and close the channels."""
        for visit in self._visits.values():
            visit.close()

    @property
    def is_quiet(self) -> bool:
        """True if no other island currently uses this rank's weights."""
        return all(visit.is_quiet for visit in self._visits.values())

    @property
    def snapshot_count(self) -> int:
        """Number of copies of the weights that were sent to other islands."""
        return sum(visit.snapshot_count for visit in self._visits.values())

    @property
    def sent_nbytes(self) -> int:
        """Number of bytes sent to other islands."""
        return sum(visit.sent_nbytes for visit in self._visits.values())
