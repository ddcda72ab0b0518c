"""Averages contributions of all members in numbered rounds, in the background, even if members are lost.

Each member contributes a fragment of its model, and continues to train. When all members have contributed to a round,
its leader decides which contributions are averaged (:mod:`protocols.exchange.ledger`), and the members exchange the
data (:mod:`protocols.exchange.rounds`). Messages and data move at safe points. If the kernel lets a peer
read the owner's memory, the owner sends no data.

The members, their leader, and the admission of restarted ranks are those of a
:class:`~protocols.joining.membership.Membership`. If the leader is lost, each member sends its standing to the next
one. Messages between two ranks arrive in order, so the new leader needs no other information. A newcomer receives the
means of all rounds that are in progress.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from asyncdist import Envelope, RankLostError, tags
from asyncdist.messaging.channels import Channel
from asyncdist.messaging.services import Services
from asyncdist.protocols.exchange.ledger import (
    Decide,
    Instruction,
    Ledger,
    Partners,
    Retire,
    TakeCensus,
    Verdict,
    Weighing,
    all_members,
    reported_weights,
)
from asyncdist.protocols.exchange.messages import (
    Captured,
    Census,
    Decided,
    ExchangeMessage,
    Hold,
    Merged,
    Retired,
)
from asyncdist.protocols.exchange.replicas.division import weighing_of
from asyncdist.protocols.exchange.rounds import Exchanged, MemberRound, RoundTransfers, has_merged
from asyncdist.protocols.joining.membership import Membership
from asyncdist.protocols.joining.replicas import SINGLE, Replicas
from asyncdist.protocols.joining.scopes import PolicyScopes
from asyncdist.protocols.parameter_stream.server import SnapshotServer
from asyncdist.waits import WaitId, WaitKind

logger = logging.getLogger("protocols.exchange")


class Exchange:
    """One member's side of all rounds of a policy, and the leader's if this member leads.

    Rounds are numbered from 1 over all fragments: round n is round ``(n - 1) // len(fragments)`` of fragment
    ``(n - 1) % len(fragments)``.

    Args:
        membership: Members of the policy, which the exchange opens.
        fragments: Fragments of the policy's model, which receive the means.
        is_overlapped: Whether the ranks train while data moves; equal on all members.
        weigh: Pure function by which a leader chooses the donors and their weights from the members' reports; equal on
            all members. By default all finite contributions count, with their reported weights.
        partners: Pure function by which a leader chooses whose contributions each member averages; equal on all
            members. By default all members share one mean.
        replicas: Replicas of the ranks. Only counterparts exchange data, and a replica is a donor as a whole.
    """

    def __init__(
        self,
        services: Services,
        scopes: PolicyScopes,
        membership: Membership,
        fragments: Sequence[Exchanged],
        *,
        is_overlapped: bool,
        weigh: Weighing = reported_weights,
        partners: Partners = all_members,
        replicas: Replicas = SINGLE,
    ) -> None:
        self._services = services
        self._membership = membership
        self._fragments = fragments
        self._is_overlapped = is_overlapped
        self._rounds: dict[int, MemberRound] = {}
        self._last_retired = 0
        self._early: list[tuple[int, int, ExchangeMessage]] = []  # messages to this rank before it leads
        self._orders: list[tuple[int, ExchangeMessage]] = []  # the leader's messages before this newcomer has a state
        self._is_closed = False
        self._weigh, self._partners = weighing_of(replicas, weigh), partners
        self._ledger = Ledger(membership.living, weigh=self._weigh, partners=partners) if membership.leads else None
        self._replicas = replicas
        self._counterparts = frozenset(replicas.counterparts(services.rank))
        self._server = SnapshotServer(services, scopes.to_members)
        self._transfers = RoundTransfers(
            services, self._server, fragments, is_overlapped=is_overlapped, merges_at_once=replicas.size == 1
        )
        self._channel: Channel[ExchangeMessage] = services.open_channel(
            ExchangeMessage, tag=tags.CONTROL, scope=scopes.to_members, name="exchange", handler=self._on_message
        )
        membership.open(self)

    # -- the policy's calls -----------------------------------------------------------------------------------------

    def new_encoded(self, fragment: int) -> list[Tensor]:
        """Return memory for the encoded vectors of a contribution to a fragment's next round."""
        return self._transfers.new_encoded(fragment)

    def note_applied(self, fragment: int) -> None:
        """Reuse the memory of a fragment's last mean, which was applied."""
        self._transfers.note_applied(fragment)

    def contribute(
        self, number: int, encoded: Sequence[Tensor], weight: float, norm: float, scores: tuple[float, ...] = ()
    ) -> None:
        """Offer this member's contribution to a round; its memory must not be changed afterwards."""
        own = self._round(number)
        own.contribution, own.weight, own.norm, own.scores = encoded, weight, norm, scores
        self._transfers.offer_contribution(own)
        self._tell_leader(Captured(weight, norm, scores), number)

    def has_merged(self, number: int) -> bool:
        """Return whether this member has the mean of a round."""
        return has_merged(self._fragments, number)

    async def merged(self, number: int) -> None:
        """Wait until this member has the mean of a round, or until its replica is broken.

        If all members wait in the same step, also wait until the others have received this member's slices. Otherwise
        this member would train for a step while they wait for the rest of a slice.
        """
        engine, members, wait = self._services.engine, self._membership, WaitId(WaitKind.ROUND_MEAN, number=number)
        if not self.has_merged(number):
            await engine.until(lambda: self.has_merged(number) or members.is_broken, wait)
        own = self._rounds.get(number)
        if own is not None and not self._is_overlapped and not own.has_sent:
            await engine.until(lambda: own.has_sent or members.is_broken, wait)

    async def settled(self, deadline: float | None = None) -> bool:
        """Wait until every member has the means of all rounds to which this member has contributed.

        If another rank of this rank's replica is lost, the other members no longer count this member.

        Returns:
            False if the deadline passed first.
        """
        gone, mates = self._services.gone, self._replicas.mates(self._services.rank)

        def is_over() -> bool:
            return not self._rounds or any(rank in gone for rank in mates)

        return await self._services.engine.until(is_over, WaitId(WaitKind.OWN_ROUND), deadline=deadline)

    def leave(self) -> None:
        """Take part in no further round. Contributions to rounds in progress are withdrawn."""
        if self._is_closed:
            return
        self._is_closed = True
        for own in self._rounds.values():
            self._transfers.stop(own)
            self._transfers.retire(own)
        self._membership.leave()
        self._channel.close()
        self._server.close()

    # -- newcomers --------------------------------------------------------------------------------------------------

    @property
    def holds_means(self) -> bool:
        """True if this member has the mean of a round that another member may lack.

        No newcomer may get this member's state then: if this member were lost, no member could give the mean to the
        others.
        """
        return any(own.has_merged for own in self._rounds.values())

    async def shared(self) -> None:
        """Wait until all members have the means that this member has."""
        await self._services.engine.until(lambda: not self.holds_means, WaitId(WaitKind.OWN_ROUND))

    async def settle(self, numbers: Sequence[int], progress: Sequence[int]) -> tuple[int, ...]:
        """Wait until this member has the means of some rounds, or until no member makes a step.

        See :meth:`Membership.settle`.
        """
        return await self._membership.settle(lambda: all(map(self.has_merged, numbers)), progress)

    def contribution_state(self, number: int) -> dict[str, Any]:
        """Return a copy of this member's contribution to a round whose mean it does not have."""
        own = self._rounds[number]
        encoded = [each.clone() for each in own.contribution]
        return {"encoded": encoded, "weight": own.weight, "norm": own.norm, "scores": own.scores}

    def members(self) -> tuple[int, ...]:
        """Return the living members, in the order in which they may lead."""
        return self._membership.members()

    def begin_joined(self, in_flight: Sequence[int]) -> None:
        """Take part as a member, after the leader's state was loaded.

        Args:
            in_flight: Rounds whose means this member receives, although it has not contributed to them.
        """
        for number in in_flight:
            self._round(number)  # is reported in a census
        self._membership.complete_joining()
        orders, self._orders = self._orders, []
        for order in orders:
            self._obey(*order)

    # -- changes of the members -------------------------------------------------------------------------------------

    def may_admit(self) -> bool:
        """Return whether no census is in progress."""
        return self._ledger is not None and self._ledger.can_admit

    def on_lost(self, rank: int) -> None:
        """As the leader, decide again the rounds that need the lost member."""
        if self._ledger is not None:
            self._carry_out(self._ledger.on_gone(rank))

    def on_new_leader(self) -> None:
        """Report this member's standing to the new leader, which takes a census."""
        if self._membership.leads:
            self._ledger = Ledger(self._membership.living, self._last_retired, self._weigh, self._partners)
            self._ledger.take_over()
        self._hold(0)
        if self._ledger is not None:  # otherwise yet another rank is lost before this one leads
            early, self._early = self._early, []
            for each in early:
                self._hear(*each)

    def on_reachable(self, rank: int) -> None:
        """Receive the means for which a restarted member is a source."""
        self._channel.admit(rank)
        self._server.channel.admit(rank)
        for own in list(self._rounds.values()):
            self._begin(own)

    def on_admitted(self, rank: int) -> None:
        """Send the verdicts of all rounds in progress to a newcomer, as the leader."""
        assert self._ledger is not None, "only a leader admits"
        self._carry_out(self._ledger.on_admitted(rank, self._services.rank))

    def on_settling(self) -> None:
        """Continue: rounds need no step of a member after its contribution."""

    # -- messages ---------------------------------------------------------------------------------------------------

    def _on_message(self, envelope: Envelope[ExchangeMessage]) -> None:
        message, source, number = envelope.message, envelope.source, envelope.round
        if source not in self._membership.known:
            logger.debug("rank %d, which is not a member, sent a %s", source, type(message).__name__)
        elif isinstance(message, Captured | Merged | Census):
            self._hear(source, number, message)
        elif source == self._membership.leader:
            if self._membership.is_joining:
                self._orders.append((number, message))
            else:
                self._obey(number, message)

    def _hear(self, source: int, number: int, message: ExchangeMessage) -> None:
        """Handle a member's message as the leader, or keep it until this rank notices that it leads."""
        ledger = self._ledger
        if ledger is None:
            self._early.append((source, number, message))
            return
        match message:
            case Captured(weight, norm, scores):
                self._carry_out(ledger.on_captured(source, number, weight, norm, scores))
            case Merged():
                self._carry_out(ledger.on_merged(source, number))
            case Census(census, standings, last_retired):
                self._carry_out(ledger.on_census(source, census, standings, last_retired))

    def _obey(self, number: int, message: ExchangeMessage) -> None:
        """Handle the leader's message as a member."""
        match message:
            case Decided(verdict) if number > self._last_retired:
                if number not in self._rounds and self.has_merged(number):  # part of the state that it received
                    self._tell_leader(Merged(), number)
                else:
                    self._take_verdict(self._round(number), verdict)
            case Hold(census):
                self._hold(census)
            case Retired():
                self._retire(number)

    # -- a member's actions -----------------------------------------------------------------------------------------

    def _round(self, number: int) -> MemberRound:
        found = self._rounds.get(number)
        if found is None:
            found = self._rounds[number] = MemberRound(number, (number - 1) % len(self._fragments))
        return found

    def _take_verdict(self, own: MemberRound, verdict: Verdict) -> None:
        if verdict.attempt <= own.attempt or not self._membership.known.issuperset((*verdict.donors, *verdict.sources)):
            return
        own.attempt = verdict.attempt
        if own.has_merged:
            if verdict.holder == self._services.rank:
                self._transfers.offer_mean(own, verdict)
            return
        if own.has_received:  # but not merged
            self._transfers.stop(own)
        own.verdict = verdict if self._replicas.size == 1 else verdict.among(self._counterparts)
        self._begin(own)

    def _begin(self, own: MemberRound) -> None:
        """Start to receive a round's mean, unless this rank is not connected yet to a source that was restarted."""
        verdict = own.verdict
        if verdict is None or own.has_merged or own.task is not None:
            return
        if all(map(self._membership.is_reachable, verdict.sources)):
            own.task = self._transfers.begin(own, verdict)
            own.task.add_done_callback(lambda task: self._on_merged(own))

    def _on_merged(self, own: MemberRound) -> None:
        if own.has_received and not self._is_closed:
            self._tell_leader(Merged(), own.number)

    def _hold(self, census: int) -> None:
        """Stop receiving means, and report this member's standing in each round."""
        for own in self._rounds.values():
            if not own.has_received:
                self._transfers.stop(own)
        standings = tuple(own.standing() for _, own in sorted(self._rounds.items()))
        self._tell_leader(Census(census, standings, self._last_retired), 0)

    def _retire(self, last: int) -> None:
        self._last_retired = max(self._last_retired, last)
        for number in sorted(number for number in self._rounds if number <= last):
            own = self._rounds.pop(number)
            if own.has_received and not own.has_merged:
                self._transfers.merge(own)
            elif not own.has_received:  # the leader must retire only rounds whose means all members have
                self._transfers.stop(own)
            self._transfers.retire(own)
        self._server.end_rounds(last)
        self._services.engine.recheck()

    # -- sending ----------------------------------------------------------------------------------------------------

    def _tell_leader(self, message: ExchangeMessage, number: int) -> None:
        leader = self._membership.leader
        if self._membership.leads:
            self._hear(leader, number, message)
        else:
            self._post(message, leader, number)

    def _carry_out(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Decide(number, verdict, dests):
                    self._send(Decided(verdict), dests, number)
                case TakeCensus(number):
                    self._send(Hold(number), sorted(self._membership.living), 0)
                case Retire(number):
                    self._send(Retired(), sorted(self._membership.living), number)

    def _send(self, message: ExchangeMessage, dests: Sequence[int], number: int) -> None:
        me = self._services.rank
        for dest in dests:
            if dest != me:
                self._post(message, dest, number)
        if me in dests:
            self._obey(number, message)

    def _post(self, message: ExchangeMessage, dest: int, number: int = 0) -> None:
        try:
            self._channel.send_nowait(message, dest, round=number)
        except RankLostError as error:  # the loss is handled when the world reports it
            logger.debug("a %s was not sent: %s", type(message).__name__, error)
