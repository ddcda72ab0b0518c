"""Sends the newest state of a model fragment to a member that is behind, and receives it on that member.

A member is *behind* if it lacks the mean of a round and no member offers this mean any longer. The leader names a
holder, a member with the state after this round or a later one. On request, the holder copies the fragment's state into
one block of bytes, and offers it until the member has it. If the holder is lost, the leader names another one.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncdist import RemoteProtocolError
from asyncdist.messaging.services import Services
from asyncdist.protocols.exchange.fetch import Offers
from asyncdist.protocols.exchange.fragment import Fragment
from asyncdist.protocols.exchange.messages import StateOffer, StateRequest, StateTaken
from asyncdist.protocols.exchange.round_leader import Owner
from asyncdist.protocols.joining.state_transfer import packed, state_nbytes_max, unpacked
from asyncdist.tensors.byte_views import new_memory


class CatchUp:
    """Requests the newest states of model fragments from other members, and sends them to members that missed rounds.

    Attributes:
        offers: Offers for blocks of bytes, on a separate channel.
    """

    def __init__(self, owner: Owner, services: Services, offers: Offers, fragments: Sequence[Fragment]) -> None:
        self._owner = owner
        self._services = services
        self._fragments = fragments
        self.offers = offers
        self._asked: dict[int, int] = {}  # by fragment: rank whose requested state has not arrived

    def ask(self, number: int, holder: int) -> None:
        """Ask ``holder`` for a model fragment's state after round ``number``, unless such a request is pending."""
        fragment = (number - 1) % len(self._fragments)
        if fragment not in self._asked:
            self._asked[fragment] = holder
            self._owner.send(StateRequest(), [holder], number)

    def on_message(self, source: int, number: int, message: StateRequest | StateOffer | StateTaken) -> None:
        """Handle another member's request for a state, offer of a state, or confirmation."""
        fragment = (number - 1) % len(self._fragments)
        match message:
            case StateRequest():
                own = self._fragments[fragment]
                newest = (own.version - 1) * len(self._fragments) + fragment + 1
                block = packed(own.shared_state())
                self.offers.offer(newest, block, source)
                self._owner.send(StateOffer(block.numel()), [source], newest)
            case StateOffer(nbytes):
                self.offers.spawn(self._take(fragment, source, number, nbytes), f"state after round {number}")
            case StateTaken():
                self.offers.note_taken(source, number)

    def on_lost(self, living: set[int]) -> None:
        """Free the states that only lost members need, and forget requests to lost members."""
        self.offers.note_lost(living)
        self._asked = {fragment: holder for fragment, holder in self._asked.items() if holder in living}

    async def _take(self, fragment: int, source: int, number: int, nbytes: int) -> None:
        own = self._fragments[fragment]
        limit = state_nbytes_max(own.layout.unencoded_nbytes)
        if not 0 < nbytes <= limit:
            raise RemoteProtocolError(
                f"the state of rank {source} after round {number} must have from 1 to {limit} bytes, got {nbytes}",
                rank=source,
            )
        block = new_memory(nbytes)
        try:
            has_arrived = await self.offers.fetch(source, number, block, f"the state after round {number}")
            if has_arrived and own.version * len(self._fragments) < number:
                own.load_shared_state(unpacked(block))
        finally:  # if the state has not arrived, the next ask() requests it again
            self._asked.pop(fragment, None)
            self._owner.send(StateTaken(), [source], number)
        self._owner.note_caught_up(fragment)
        self._services.engine.recheck()
