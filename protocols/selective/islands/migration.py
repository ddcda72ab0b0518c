"""Exchanges the messages between the islands of one policy, on one rank.

The coordinator of an island tells a rank of another island who is to give there, by default its coordinator. A rank
that does not coordinate passes it on, once. It invites the emigrant, which may be a donor of the
next round once it has answered. Nothing waits for that: where a message is lost no one gives, and the next emigrant
follows. A rank that has left the policy says so; its island's next rank is
told then, or a rank of the next island where all have left.

Emigrants also carry the marks of first weights, of which each island passes on its own and those that have arrived. So
the first island is notified when ranks of other islands have begun with other weights.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from asyncdist import World
from asyncdist.collectives.agreement.messages import first_two
from asyncdist.messaging.services import Services
from asyncdist.protocols.misuse import warn_of_first_weights
from asyncdist.protocols.selective.board import Board, Declined, IslandMessage
from asyncdist.protocols.selective.islands.layout import Island, IslandOptions
from asyncdist.protocols.selective.islands.messages import Emigrant, Invitation
from asyncdist.protocols.selective.joining.newcomers import digest_of

if TYPE_CHECKING:
    from asyncdist.protocols.selective.coordinator import Coordinator, PolicyScopes
    from asyncdist.protocols.selective.islands.visit import Visits

logger = logging.getLogger("protocols.selective.islands.migration")

#: So many islands are drawn, or looked at along the ring, for one whose ranks have not all gone.
_TARGET_COUNT_MAX: Final = 64


class Migration:
    """Sends the emigrants of an island where this rank coordinates it, and takes those of others.

    Args:
        services: of this rank.
        island: that this rank is in.
        policy: the number that the policies of all islands have in common.
        digest: of what the members of this island have agreed in.
        marks: with which these have marked their first weights.
        draw: chooses islands at random; None for the ring.
        on_invitation: takes, or declines, the word of another island's coordinator that this rank may be a donor there.

    Attributes:
        is_first: whether the island is the first one.
        serving: the coordinator that runs on this rank; None where none does.
        leader: returns the rank that coordinates this island, as far as is known.
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
        on_invitation: Callable[[Invitation, int], bool],
    ) -> None:
        self._services = services
        self._island = island
        self._policy = policy
        self._digest = digest
        self._marks = marks
        self._draw = draw
        self._on_invitation: Callable[[Invitation, int], bool] | None = on_invitation
        self._absent: set[int] = set()  # ranks of other islands that have left the policy
        self._sent: tuple[Emigrant, int] | None = None  # the newest one, and where it went
        self._has_warned = False
        self.is_first = island.index == 0
        self.serving: Coordinator | None = None
        self.leader: Callable[[], int | None] = lambda: None
        self._board = services.shared(Board)
        self._board.open(policy, self._on_message)

    @classmethod
    def open(
        cls,
        world: World,
        island: Island | None,
        options: IslandOptions,
        scopes: PolicyScopes,
        visits: Visits,
    ) -> Migration | None:
        """Begin to exchange messages with other islands; None without islands.

        Args:
            world, options, visits: of the policy.
            island: that this rank is in.
            scopes: of the policy there.
        """
        if island is None:
            return None
        visits.open(world.services, island)
        return cls(
            world.services,
            island,
            scopes.between,
            digest_of((), scopes.values),
            scopes.marks,
            draw=world.generator(f"migration {scopes.between}") if options.migration == "random" else None,
            on_invitation=visits.on_invitation,
        )

    def leave(self) -> None:
        """Give nothing to other islands any more: this rank leaves the policy. It may go on coordinating."""
        self._on_invitation = None

    def close(self) -> None:
        """Take nothing any more."""
        self._board.close(self._policy)

    # -- where this rank coordinates --------------------------------------------------------------------------------

    def emigrate(self, rank: int, incarnation: int) -> None:
        """Tell another island that a member of this one can give there."""
        self._send(Emigrant(self._policy, rank, incarnation, self._digest, marks=self._marks))

    def _send(self, emigrant: Emigrant) -> None:
        dest = next(self._dests(), None)
        self._sent = None if dest is None else (emigrant, dest)
        if dest is not None:
            self._board.send(emigrant, dest)

    def _dests(self) -> Iterator[int]:
        """Return the first rank that is there of each island that may be next."""
        for index in self._targets():
            ranks = self._island.ranks_of(index)
            yield from (rank for rank in ranks if rank not in self._services.gone and rank not in self._absent)

    def _targets(self) -> Iterator[int]:
        own, count = self._island.index, self._island.count
        for step in range(1, min(count, _TARGET_COUNT_MAX)):
            yield (own + (step if self._draw is None else self._draw.randrange(1, count))) % count

    def invite(self, rank: int, to_members: int, to_coordinator: int, epoch: int) -> None:
        """Ask a rank of another island to be a guest here; see :class:`Invitation`."""
        self._board.send(Invitation(self._policy, to_members, to_coordinator, epoch), rank)

    # -- news -------------------------------------------------------------------------------------------------------

    def _on_message(self, message: IslandMessage, source: int) -> None:
        if not self._island.is_elsewhere(source) and not isinstance(message, Emigrant):
            logger.debug("rank %d, which is in no other island, sent a %s", source, type(message).__name__)
            return
        match message:
            case Emigrant():
                self._on_emigrant(message)
            case Invitation():
                if self._on_invitation is None or not self._on_invitation(message, source):
                    self._board.send(Declined(self._policy), source)
            case Declined():
                self._on_declined(source)

    def _on_emigrant(self, emigrant: Emigrant) -> None:
        """Keep a guest where this rank coordinates, or pass it on to the rank that does."""
        if not self._island.is_elsewhere(emigrant.rank):
            return
        if emigrant.digest != self._digest:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "rank %d of another island has another model or other options: no weights are taken from there",
                    emigrant.rank,
                )
            return
        self._note_marks(emigrant.marks)
        leader = self.leader()
        if self.serving is not None:
            self.serving.note_guest(emigrant.rank, emigrant.incarnation)
        elif leader not in (None, self._services.rank) and not emigrant.is_passed_on:
            self._board.send(replace(emigrant, is_passed_on=True), leader)

    def _note_marks(self, marks: tuple[int, ...]) -> None:
        """Note the marks of other islands. The first island warns when they begin to differ from its own."""
        known, self._marks = self._marks, first_two((self._marks, marks))
        if self.is_first and self.serving is not None and len(known) < 2:
            warn_of_first_weights(self._marks)

    def _on_declined(self, source: int) -> None:
        """Note that a rank of another island has left the policy."""
        self._absent.add(source)
        if self.serving is not None:
            self.serving.note_left(source)
            if self._sent is not None and self._sent[1] == source:
                self._send(self._sent[0])
