"""Tells ``on_event`` what a member sees of its rounds: inside the next step, in the order in which it happened.

A member receives messages about a round between two steps. The events wait in :class:`UserEvents`, which each step
empties before it does anything itself. :class:`RoundEvents` makes the events, out of the instructions of the state
machine.

Invariant: each :class:`RoleAssigned` that is told is followed by one :class:`AverageApplied`, :class:`RoundEnded` or
:class:`RoundAbandoned` of that round before the next role is told of.
"""

from __future__ import annotations

from asyncdist.protocols.selective.member import GIVING_STATES, Discard, Instructions, RoundMember, Tell
from asyncdist.protocols.selective.messages import DONOR, Applied, Assign, Decline
from asyncdist.protocols.step_info import RoleAssigned, RoundAbandoned, RoundEnded, UserEvents


class RoundEvents:
    """Makes the events of one member's rounds.

    Args:
        member: that member.
        pending: keeps them.
        island: the other island whose rounds they are; -1 where it is this rank's own.
    """

    def __init__(self, member: RoundMember, pending: UserEvents, island: int = -1) -> None:
        self._member = member
        self._pending = pending
        self._island = island
        self._role, self._round = "", 0  # of the role that was told of, and has not come to its end

    def note(self, instructions: Instructions, assign: Assign | None = None, round: int = 0, reason: str = "") -> None:
        """Note what the member has answered; it is in its new state already.

        Args:
            instructions: of it.
            assign, round: the assignment that it has answered, if it was one.
            reason: of the end of a donor's part, where these are the answer to that.
        """
        declined: dict[int, str] = {}
        for told in instructions:
            if isinstance(told, Tell) and isinstance(told.message, Decline):
                declined[told.round] = told.message.reason
            elif isinstance(told, Tell) and isinstance(told.message, Applied) and told.round == self._round:
                self._role, self._round = "", 0  # the replacer tells of it
        if self._role == DONOR and not self._gives() and self._round not in declined:
            why = reason or (f"round {round} began" if round else "the policy ended")
            self._end(RoundEnded(self._round, why, self._island))
        for discard in instructions:
            if isinstance(discard, Discard):
                self._abandon(discard.round, discard.reason)
        if assign is not None and not (assign.admits and assign.role != DONOR):  # a newcomer makes no step yet
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
