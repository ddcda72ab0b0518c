"""Handles members' reports while this member leads an exchange, and sends the leader's decisions.

Only the leader has a :class:`~protocols.exchange.ledger.Ledger`. A member keeps reports that arrive before it is
notified that it leads.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol, TypeAlias

from asyncdist.messaging.services import Services
from asyncdist.protocols.exchange.ledger import (
    AwaitGrace,
    Decide,
    Instruction,
    Ledger,
    Partners,
    Quorum,
    Retire,
    TakeCensus,
    Weighing,
)
from asyncdist.protocols.exchange.messages import (
    Captured,
    CensusReply,
    CensusRequest,
    Decided,
    Ending,
    ExchangeMessage,
    Merged,
    Paused,
    Released,
    Retired,
    Verdict,
)
from asyncdist.protocols.joining.membership import Membership
from asyncdist.waits import WaitId, WaitKind

logger = logging.getLogger("protocols.exchange")

#: Messages from a member to its leader.
MemberMessage: TypeAlias = Captured | Merged | Paused | Ending | CensusReply


class Owner(Protocol):
    """Declares the methods of an exchange that its :class:`RoundLeader` and its `CatchUp` call."""

    def send(self, message: ExchangeMessage, dests: Sequence[int], number: int) -> None:
        """Send a message with a round number to some members, possibly including this one."""

    def last_contribution(self, fragment: int) -> int:
        """Return the last round of a fragment that counts a contribution from this member, or 0 before the first."""

    def note_caught_up(self, fragment: int) -> None:
        """Resume a model fragment's rounds after a request for its state has ended, with or without success."""


class RoundLeader:
    """Handles members' reports and decides rounds while this member leads, and abdicates if it is slow.

    Args:
        weigh, partners, quorum: Arguments of :class:`~protocols.exchange.ledger.Ledger`.
    """

    def __init__(
        self,
        owner: Owner,
        services: Services,
        membership: Membership,
        weigh: Weighing,
        partners: Partners,
        quorum: Quorum | None,
    ) -> None:
        self._owner = owner
        self._services = services
        self._membership = membership
        self._weigh, self._partners, self._quorum = weigh, partners, quorum
        self._ledger: Ledger | None = None  # decides the rounds; None if this member does not lead
        self._early: list[tuple[int, int, MemberMessage]] = []  # messages that arrived before this rank led
        self._unreleased: set[int] = set()  # ending members that wait for permission to leave
        self._is_slow = False  # whether this leader delays rounds and must abdicate
        # For each member that has left: the last round that this leader decides without a warning about the member.
        self._last_unwarned: dict[int, int | None] = {}  # None after the warning
        self._is_closed = False

    def follow(self, retired: Sequence[int]) -> None:
        """Start or stop leading, depending on the membership's current leader.

        Args:
            retired: Last round of each fragment whose mean is no longer offered, as known to this member.
        """
        leads, self._ledger = self._membership.leads, None
        if leads:
            members = self._membership.living
            self._ledger = Ledger(members, retired, self._weigh, self._partners, quorum=self._quorum)
        self._unreleased.clear()

    def take_over(self) -> None:
        """If this member leads, start collecting the members' reports on their rounds."""
        if self._ledger is not None:
            self._ledger.take_over()

    def handle_early(self) -> None:
        """If this member now leads, handle the messages that arrived before."""
        if self._ledger is not None:  # otherwise keep the messages until this member leads
            early, self._early = self._early, []
            for each in early:
                self.handle(*each)

    def close(self) -> None:
        """Stop deciding rounds, because this member leaves."""
        self._is_closed = True

    # -- events -----------------------------------------------------------------------------------------------------

    @property
    def can_admit(self) -> bool:
        """True if this member leads, and does not wait for members' reports after a loss."""
        return self._ledger is not None and self._ledger.can_admit

    def on_admitted(self, rank: int) -> None:
        """Send a newly joined rank the decisions on all rounds in progress."""
        assert self._ledger is not None, "only a leader admits"
        self._carry_out(self._ledger.on_admitted(rank, self._services.rank))

    def on_lost(self, rank: int) -> None:
        """If this member leads, decide again the rounds that need the lost member's data."""
        if self._ledger is not None:
            self._carry_out(self._ledger.on_gone(rank))
            self._release(self._ledger)

    def handle(self, source: int, number: int, message: MemberMessage) -> None:
        """Handle a member's message, or keep it until this rank leads."""
        ledger = self._ledger
        if ledger is None:
            if isinstance(message, CensusReply):  # the sender's earlier messages were for a former leader
                self._early = [each for each in self._early if each[0] != source]
            self._early.append((source, number, message))
            return
        match message:
            case Captured(weight, norm, scores):
                self._carry_out(ledger.on_captured(source, number, weight, norm, scores))
            case Merged():
                self._carry_out(ledger.on_merged(source, number))
            case Paused():
                self._carry_out(ledger.on_paused(source))
            case Ending():
                self._unreleased.add(source)
                self._carry_out(ledger.on_ending(source))
            case CensusReply(census, round_states, retired, newest) if len(retired) == len(ledger.retired):
                self._carry_out(ledger.on_census(source, census, round_states, retired, newest))
            case CensusReply():
                logger.warning("rank %d sent invalid round_states: %.300r", source, message)
        self._release(ledger)

    def abdicate_if_slow(self) -> None:
        """Let the next member lead if this leader has contributed to too few of the last rounds."""
        if self._is_slow:
            self._is_slow = False
            self._membership.abdicate()

    # -- decisions --------------------------------------------------------------------------------------------------

    def _release(self, ledger: Ledger) -> None:
        """Allow ending members to leave when no other member needs them."""
        if self._unreleased:
            released = self._unreleased & ledger.released()
            self._unreleased -= released
            self._owner.send(Released(), sorted(released), 0)

    def _carry_out(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Decide(number, verdict, dests):
                    self._is_slow = self._is_slow or self._delays_rounds(number, verdict)
                    self._warn_of_departed(number)
                    self._owner.send(Decided(verdict), dests, number)
                case TakeCensus(number):
                    self._owner.send(CensusRequest(number), sorted(self._membership.living), 0)
                case Retire(number, holder):
                    self._owner.send(Retired(holder), sorted(self._membership.living), number)
                case AwaitGrace(number, grace):
                    self._services.spawn_service(self._await_grace(number, grace), name=f"grace of round {number}")

    def _warn_of_departed(self, number: int) -> None:
        """Warn once of each member that has left, if the others continue to average without it.

        Ranks that train for equal times may leave up to a round apart, which causes no warning. If rounds do not wait
        for all members, slow ranks may continue long after the others have taken all their steps.
        """
        if self._ledger is None or self._quorum is not None:
            return
        unwarned = [rank for rank in self._membership.departed if self._last_unwarned.get(rank, 0) is not None]
        members = sorted(self._membership.living)
        if not unwarned or len(members) < 2 or self._partners(number, self._services.rank, members) is not None:
            return
        for rank in sorted(unwarned):
            last = self._last_unwarned.setdefault(rank, number + len(self._ledger.retired) - 1)
            if last is not None and number > last:
                self._last_unwarned[rank] = None
                logger.warning("rank %d has left this policy; the others continue to average without it", rank)

    def _delays_rounds(self, number: int, verdict: Verdict) -> bool:
        """Return whether this leader contributes to so few rounds that another member should lead."""
        if self._quorum is None or self._ledger is None or self._services.rank not in verdict.late:
            return False
        count = len(self._ledger.retired)
        last = self._owner.last_contribution((number - 1) % count)
        return self._quorum.must_abdicate((number - last) // count, len(self._membership.living))

    async def _await_grace(self, number: int, grace: int) -> None:
        assert self._quorum is not None, "only a quorum has a grace period"
        ledger, deadline = self._ledger, self._services.time() + self._quorum.grace_s

        def is_over() -> bool:
            is_former = ledger is not self._ledger  # this rank has abdicated in the meantime
            return self._is_closed or ledger is None or is_former or not ledger.is_in_grace(number, grace)

        await self._services.engine.until(is_over, WaitId(WaitKind.CONTRIBUTIONS), deadline=deadline)
        if ledger is not None and not is_over():
            self._carry_out(ledger.on_grace_over(number, grace))
