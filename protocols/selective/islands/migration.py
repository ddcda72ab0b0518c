"""Exchanges messages with other islands (groups of ranks that average separately), and sends weights to them.

The coordinator of an island announces its best member, the emigrant, to the first live rank of another island. That
rank forwards the announcement to its own coordinator, which invites the emigrant. The emigrant may then be a donor in
the next round. No rank waits for an emigrant: if one of these messages is lost, no weights migrate until the next
emigrant is chosen. Announcements also carry checksums of initial weights, so that the first island can log a warning if
they differ.

An invitation opens a :class:`Visit`, which has the state machine, channels and snapshots of a donor in the other
island. The visit remains open for later rounds.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from asyncdist import World
from asyncdist.collectives.agreement.messages import first_two
from asyncdist.messaging.services import Services
from asyncdist.protocols.joining.dispatcher import IslandMessage, PolicyDispatcher, digest_of
from asyncdist.protocols.joining.messages import Declined, Emigrant, Invitation
from asyncdist.protocols.joining.scopes import PolicyScopes
from asyncdist.protocols.journal import Journal
from asyncdist.protocols.misuse import warn_of_first_weights
from asyncdist.protocols.selective.islands.layout import Island, IslandOptions
from asyncdist.protocols.selective.member import RoundMember, State
from asyncdist.protocols.selective.messages import DONOR, Assign, End, Leave, PackedAssign
from asyncdist.protocols.selective.roles.member_channels import MemberChannels
from asyncdist.protocols.selective.roles.member_roles import MemberRoles
from asyncdist.protocols.selective.roles.resources import RoleResources
from asyncdist.protocols.selective.succession import CoordinatorView, ReportedCoordinator
from asyncdist.protocols.step_info import NOTHING, StepInfo

logger = logging.getLogger("protocols.selective.islands.migration")


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
        self.channels = MemberChannels(services, scopes)
        self._coordinator_view = ReportedCoordinator()
        self.member = RoundMember()
        self.roles = MemberRoles(
            services, self.member, self.channels, self._coordinator_view, resources, None, Journal(""), island=index
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
            self.roles.lose_coordinator("is replaced")
        if is_new:
            self.channels.enter_epoch(invitation.epoch)
        known.follow(invitation.epoch, coordinator)
        self.channels.admit(coordinator)
        if self._own.newest is not None:
            self.roles.carry_out((self.member.joined(self._own.newest, self._services.incarnation),))

    def close(self) -> None:
        """Stop sending weights to the other island, and close the channels."""
        self.roles.finish()
        self._services.off_gone(self._on_gone)
        self.channels.close()

    @property
    def is_quiet(self) -> bool:
        """True if the other island does not currently use this rank's weights."""
        return self.member.state is State.OUT or not self.roles.is_sending

    def _on_gone(self, rank: int) -> None:
        if rank == self._coordinator_view.coordinator:
            self._services.engine.loop.call_soon(self._lose_coordinator, rank)

    def _lose_coordinator(self, rank: int) -> None:
        """End this rank's role in the other island if ``rank``, which is lost or has stopped, coordinates it."""
        if rank == self._coordinator_view.coordinator:
            self._coordinator_view.follow(self._coordinator_view.epoch, None)
            self.roles.lose_coordinator("is gone")

    async def _listen(self) -> None:
        async for envelope in self.channels.control:
            if envelope.source != self._coordinator_view.coordinator:
                continue
            match envelope.message:
                case PackedAssign() as packed if (assign := packed.opened(self._services.rank)) and self._is_donor_role(
                    assign
                ):
                    self.roles.on_message(replace(assign, part=-1, sources=()), envelope.round)
                case End() as end:
                    self.roles.on_message(end, envelope.round)
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
        island, key = self._island, invitation.to_members
        if key not in self._visits:
            scopes = PolicyScopes(key, invitation.to_coordinator)
            index = island.index_of(coordinator)
            assert index != island.index, f"island {index} invites a rank of its own, {island}"
            self._visits[key] = Visit(self._services, scopes, island, index, self._own, self._resources)
        self._visits[key].on_invitation(invitation, coordinator)
        return True

    def on_step(self, iteration: int) -> None:
        """Copy the weights for each other island for which a copy is due."""
        for visit in self._visits.values():
            if visit.member.wants_step:
                visit.roles.step(iteration)

    def leave(self) -> None:
        """Start leaving all other islands, and decline later invitations."""
        self._is_leaving = True
        for visit in self._visits.values():
            visit.roles.leave()

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
        return sum(visit.roles.donor.snapshot_count for visit in self._visits.values())

    @property
    def sent_nbytes(self) -> int:
        """Number of bytes sent to other islands."""
        return sum(visit.channels.server.sent_nbytes for visit in self._visits.values())


#: Maximum number of islands, drawn at random or along the ring, that are searched for a live rank.
_TARGET_COUNT_MAX: Final = 64


class Migration:
    """Exchanges one rank's messages with other islands (groups of ranks that average separately).

    Args:
        coordinator_view: Object that knows this island's coordinator.
    """

    def __init__(
        self,
        world: World,
        island: Island,
        options: IslandOptions,
        scopes: PolicyScopes,
        visits: Visits,
        coordinator_view: CoordinatorView,
    ) -> None:
        self._services = world.services
        self._island = island
        self._policy = scopes.between
        self._digest = digest_of((), scopes.values)
        self._marks = scopes.marks
        is_random = options.migration == "random"
        self._draw = world.generator(f"migration {scopes.between}") if is_random else None  # None with migration="ring"
        self._visits: Visits | None = visits
        self._coordinator_view = coordinator_view
        self._absent: dict[int, int] = {}  # by rank of another island that has left: number of restarts
        self._sent: tuple[Emigrant, int] | None = None  # newest announcement of a member's weights, and the receiver
        self._has_warned = False
        self.is_first = island.index == 0
        self._dispatcher = self._services.shared(PolicyDispatcher)

    def leave(self) -> None:
        """Decline all later invitations, because this rank is leaving the policy. It may still coordinate."""
        self._visits = None

    # -- on the coordinating rank -----------------------------------------------------------------------------------

    def emigrate(self, rank: int, incarnation: int) -> None:
        """Announce a member of this island to another island, which may then request the member's weights."""
        self._send(Emigrant(self._policy, rank, incarnation, self._digest, marks=self._marks))

    def _send(self, emigrant: Emigrant) -> None:
        dest = next(self._dests(), None)
        self._sent = None if dest is None else (emigrant, dest)
        if dest is not None:
            self._dispatcher.send(emigrant, dest)

    def _dests(self) -> Iterator[int]:
        for index in self._targets():
            ranks = self._island.ranks_of(index)
            yield from (rank for rank in ranks if rank not in self._services.gone and not self._is_absent(rank))

    def _is_absent(self, rank: int) -> bool:
        return self._absent.get(rank) == self._services.restarted.get(rank, 0)

    def _targets(self) -> Iterator[int]:
        own, count = self._island.index, self._island.count
        for step in range(1, min(count, _TARGET_COUNT_MAX)):
            yield (own + (step if self._draw is None else self._draw.randrange(1, count))) % count

    def invite(self, rank: int, to_members: int, to_coordinator: int, epoch: int) -> None:
        """Invite a rank of another island to send its weights to this island."""
        self._dispatcher.send(Invitation(self._policy, to_members, to_coordinator, epoch), rank)

    # -- messages ---------------------------------------------------------------------------------------------------

    def on_message(self, message: IslandMessage, source: int, *, is_serving: bool) -> tuple[int, int | None] | None:
        """Handle a message from another island.

        Args:
            is_serving: Whether the coordinator of this island runs on this rank.

        Returns:
            Rank and incarnation of a guest that the coordinator must invite, or the rank of a guest that has left the
            policy and None. None if the coordinator has nothing to do.
        """
        if not self._island.is_in_other_island(source) and not isinstance(message, Emigrant):
            logger.debug("rank %d, which is not in another island, sent a %s", source, type(message).__name__)
            return None
        match message:
            case Emigrant():
                return self._on_emigrant(message, is_serving)
            case Invitation():
                if self._visits is None or not self._visits.on_invitation(message, source):
                    self._dispatcher.send(Declined(self._policy), source)
            case Declined():
                self._absent[source] = self._services.restarted.get(source, 0)
                if is_serving and self._sent is not None and self._sent[1] == source:
                    self._send(self._sent[0])
                return (source, None) if is_serving else None
        return None

    def _on_emigrant(self, emigrant: Emigrant, is_serving: bool) -> tuple[int, int] | None:
        """If this rank coordinates, return the emigrant's rank and incarnation. Otherwise forward the message."""
        if not self._island.is_in_other_island(emigrant.rank):
            return None
        if emigrant.digest != self._digest:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "rank %d of another island has a different model or options: its island's weights are not used",
                    emigrant.rank,
                )
            return None
        self._note_marks(emigrant.marks, is_serving)
        if is_serving:
            return emigrant.rank, emigrant.incarnation
        leader = self._coordinator_view.coordinator
        if leader not in (None, self._services.rank) and not emigrant.is_passed_on:
            self._dispatcher.send(replace(emigrant, is_passed_on=True), leader)
        return None

    def _note_marks(self, marks: tuple[int, ...], is_serving: bool) -> None:
        """Record other islands' checksums of initial weights. The first island warns once if the checksums differ."""
        known, self._marks = self._marks, first_two((self._marks, marks))
        if self.is_first and is_serving and len(known) < 2:
            warn_of_first_weights(self._marks)
