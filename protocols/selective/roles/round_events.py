"""Passes a member's view of its rounds to ``on_event``: inside the next step, in the order of the events.

A member receives messages about a round between two steps. The events wait in :class:`UserEvents`, which each step
empties first. :class:`RoundEvents` derives the events from the instructions of the state machine.

Invariant: each :class:`RoleAssigned` is followed by one :class:`AverageApplied`, :class:`RoundEnded` or
:class:`RoundAbandoned` of that round before the next :class:`RoleAssigned`.
"""

from __future__ import annotations

from asyncdist.protocols.selective.member import GIVING_STATES, Discard, Instructions, RoundMember, Tell
from asyncdist.protocols.selective.messages import DONOR, Applied, Assign, Decline
from asyncdist.protocols.step_info import RoleAssigned, RoundAbandoned, RoundEnded, UserEvents


class RoundEvents:
    """Makes the events of one member's rounds.

    Args:
        member: The member.
        pending: Keeps the events.
        island: Number of the other island that the rounds belong to; -1 for this rank's own island.
    """

    def __init__(self, member: RoundMember, pending: UserEvents, island: int = -1) -> None:
        self._member = member
        self._pending = pending
        self._island = island
        self._role, self._round = "", 0  # of the newest RoleAssigned, until the event that ends it

    def note(self, instructions: Instructions, assign: Assign | None = None, round: int = 0, reason: str = "") -> None:
        """Make the events that follow from instructions of the member, which is already in its new state.

        Args:
            instructions: Instructions of the member.
            assign, round: The assignment that the instructions answer, if there is one.
            reason: Reason for the end of a donor's part, if the instructions answer that end.
        """
        declined: dict[int, str] = {}
        for told in instructions:
            if isinstance(told, Tell) and isinstance(told.message, Decline):
                declined[told.round] = told.message.reason
            elif isinstance(told, Tell) and isinstance(told.message, Applied) and told.round == self._round:
                self._role, self._round = "", 0  # the replacer makes that event
        if self._role == DONOR and not self._gives() and self._round not in declined:
            why = reason or (f"round {round} began" if round else "the policy ended")
            self._end(RoundEnded(self._round, why, self._island))
        for discard in instructions:
            if isinstance(discard, Discard):
                self._abandon(discard.round, discard.reason)
        if assign is not None and not (assign.admits and assign.role != DONOR):  # a newcomer does not step yet
            self._role, self._round = assign.role, round
            self._pending.add(RoleAssigned(round, assign.role, assign.donors, assign.replacers, self._island))
        for number, why in declined.items():
            self._abandon(number, why)

    def _gives(self) -> bool:
        return self._member.round == self._round and self._member.state in GIVING_STATES

    def _abandon(self, round: int, reason: str) -> None:
        if self._role and round == self._round:
            self._end(RoundAbandoned(round, reason, self._island))

    def _end(self, event: RoundEnded | RoundAbandoned) -> None:
        self._role, self._round = "", 0
        self._pending.add(event)
