"""Creates the events about a member's rounds for the user's ``on_event`` callback.

:class:`RoundEvents` derives the events from the instructions of the member's state machine. The events wait in
:class:`UserEvents` until the next step, which passes them to the callback in order.

Invariant: Each :class:`RoleAssigned` is followed by an :class:`AverageApplied`, :class:`RoundEnded` or
:class:`RoundAbandoned` of the same round before the next :class:`RoleAssigned`.
"""

from __future__ import annotations

from asyncdist.protocols.selective.member import DONOR_STATES, Discard, Instructions, RoundMember, SendToCoordinator
from asyncdist.protocols.selective.messages import DONOR, Applied, Assign, Decline
from asyncdist.protocols.step_info import RoleAssigned, RoundAbandoned, RoundEnded, UserEvents


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
        if assign is not None and not (assign.admits and assign.role != DONOR):  # a restarted rank makes no steps yet
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
