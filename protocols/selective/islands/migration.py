"""Sends and receives the messages between a rank and the other islands (groups of ranks that average separately).

The coordinator of an island announces its best member, the emigrant, to the first live rank of another island. That
rank forwards the announcement to its own coordinator, which invites the emigrant. The emigrant may then be a donor in
the next round. No rank waits for an emigrant: if one of these messages is lost, no weights migrate until the next
emigrant is chosen.

Announcements also carry checksums of initial weights, so that the first island can log a warning if they differ.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Final, NamedTuple, TypeAlias

from asyncdist import World
from asyncdist.collectives.agreement.messages import first_two
from asyncdist.messaging.services import Services
from asyncdist.protocols.joining.dispatcher import IslandMessage, PolicyDispatcher
from asyncdist.protocols.joining.messages import Declined, Emigrant, Invitation
from asyncdist.protocols.joining.newcomers import digest_of
from asyncdist.protocols.joining.scopes import PolicyScopes
from asyncdist.protocols.misuse import warn_of_first_weights
from asyncdist.protocols.selective.islands.layout import Island, IslandOptions
from asyncdist.protocols.selective.islands.visit import Visits
from asyncdist.protocols.selective.roles.coordinator_tracking import CoordinatorView

logger = logging.getLogger("protocols.selective.islands.migration")

#: Maximum number of islands, drawn at random or along the ring, that are searched for a live rank.
_TARGET_COUNT_MAX: Final = 64


class GuestArrived(NamedTuple):
    """Instruction to the coordinator: invite a rank of another island to send its weights."""

    rank: int
    incarnation: int


class GuestLeft(NamedTuple):
    """Instruction to the coordinator: forget a rank of another island that has left the policy."""

    rank: int


#: Instruction to this island's coordinator if it runs on this rank.
GuestNews: TypeAlias = GuestArrived | GuestLeft


class Migration:
    """Sends and receives one rank's messages to other islands (groups of ranks that average separately).

    Args:
        draw: Random generator that chooses destination islands, or None for the ring.
    """

    def __init__(
        self,
        services: Services,
        island: Island,
        policy: int,
        digest: str,
        marks: tuple[int, ...],
        *,
        draw: random.Random | None,
        visits: Visits,
        coordinator_view: CoordinatorView,
    ) -> None:
        self._services = services
        self._island = island
        self._policy = policy
        self._digest = digest
        self._marks = marks
        self._draw = draw
        self._visits: Visits | None = visits
        self._coordinator_view = coordinator_view
        self._absent: dict[int, int] = {}  # ranks of other islands that have left the policy, and their restarts
        self._sent: tuple[Emigrant, int] | None = None  # newest announcement of a member's weights, and its receiver
        self._has_warned = False
        self.is_first = island.index == 0
        self._dispatcher = services.shared(PolicyDispatcher)

    @classmethod
    def open(
        cls,
        world: World,
        island: Island,
        options: IslandOptions,
        scopes: PolicyScopes,
        visits: Visits,
        coordinator_view: CoordinatorView,
    ) -> Migration:
        """Create the object from the island options and channel numbers of a policy."""
        return cls(
            world.services,
            island,
            scopes.between,
            digest_of((), scopes.values),
            scopes.marks,
            draw=world.generator(f"migration {scopes.between}") if options.migration == "random" else None,
            visits=visits,
            coordinator_view=coordinator_view,
        )

    def leave(self) -> None:
        """Decline all later invitations, because this rank leaves the policy. It may still coordinate its island."""
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

    def on_message(self, message: IslandMessage, source: int, *, is_serving: bool) -> GuestNews | None:
        """Handle a message from another island. Return an instruction for the coordinator if it runs on this rank."""
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
                return self._on_declined(source, is_serving)
        return None

    def _on_emigrant(self, emigrant: Emigrant, is_serving: bool) -> GuestArrived | None:
        """If this rank coordinates, return an instruction to invite the emigrant. Otherwise forward the message."""
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
            return GuestArrived(emigrant.rank, emigrant.incarnation)
        leader = self._coordinator_view.coordinator
        if leader not in (None, self._services.rank) and not emigrant.is_passed_on:
            self._dispatcher.send(replace(emigrant, is_passed_on=True), leader)
        return None

    def _note_marks(self, marks: tuple[int, ...], is_serving: bool) -> None:
        """Record other islands' checksums of initial weights. The first island logs a warning once if they differ."""
        known, self._marks = self._marks, first_two((self._marks, marks))
        if self.is_first and is_serving and len(known) < 2:
            warn_of_first_weights(self._marks)

    def _on_declined(self, source: int, is_serving: bool) -> GuestLeft | None:
        self._absent[source] = self._services.restarted.get(source, 0)
        if not is_serving:
            return None
        if self._sent is not None and self._sent[1] == source:
            self._send(self._sent[0])
        return GuestLeft(source)
