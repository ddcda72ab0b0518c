"""Averages the members' model fragments in numbered rounds, in the background, and survives the loss of members.

Each member contributes a fragment (a part) of its model, and continues to train. When all members have contributed to a
round, the leader decides which contributions are averaged (:mod:`protocols.exchange.ledger`). The members then exchange
the data (:mod:`protocols.exchange.rounds`) in calls that let messages move. If the kernel allows it, they read each
other's memory instead.

A :class:`~protocols.joining.membership.Membership` tracks the members and their leader, and admits restarted ranks. If
the leader is lost, each member reports the state of its rounds to the next leader. Messages between two ranks arrive in
order, so the new leader needs no other information. A restarted rank receives the means of all rounds in progress.

With a quorum, a round does not wait for late members. A late member moves its contribution to the fragment's next
round. A member is *behind* if no rank offers the next mean that it needs. After its next contribution, it requests the
fragment's newest state (:mod:`protocols.exchange.catch_up`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from asyncdist import Envelope
from asyncdist.messaging.services import Services
from asyncdist.protocols.exchange.catch_up import CatchUp
from asyncdist.protocols.exchange.fetch import Offers
from asyncdist.protocols.exchange.fragment import Fragment
from asyncdist.protocols.exchange.ledger import Partners, Quorum, Report, Weighing, all_members, reported_weights
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
    StateOffer,
    StateRequest,
    StateTaken,
    Verdict,
)
from asyncdist.protocols.exchange.replicas.division import weighing_of
from asyncdist.protocols.exchange.round_leader import MemberMessage, RoundLeader
from asyncdist.protocols.exchange.rounds import MemberRound, RoundTransfers, has_merged
from asyncdist.protocols.joining.membership import Membership
from asyncdist.protocols.joining.policy_channel import PolicyChannel
from asyncdist.protocols.joining.replica_layout import SINGLE, Replicas
from asyncdist.protocols.joining.scopes import PolicyScopes
from asyncdist.protocols.parameter_stream.server import SnapshotServer
from asyncdist.waits import WaitId, WaitKind

logger = logging.getLogger("protocols.exchange")


class Exchange:
    """Takes part in a policy's averaging rounds for one member, and decides the rounds if this member leads.

    Rounds are numbered from 1 over all fragments (separately averaged parts of the model). Round n is round ``(n - 1)
    // len(fragments)`` of fragment ``(n - 1) % len(fragments)``. The options from ``is_overlapped`` on must be equal on
    all members.

    Args:
        membership: Membership of the policy, opened by the constructor.
        fragments: Fragments of this member's model, which receive the means.
        is_overlapped: Whether a contribution's mean is applied in a later step.
        skips_late: Whether ranks continue to train without a mean that is late. With either option, ranks train during
            transfers.
        weigh: Pure function of the members' reports that returns the donors (members whose contributions are averaged)
            and their weights. By default, all finite contributions count, with their reported weights.
        partners: Pure function that chooses whose contributions each member averages. By default, all members share one
            mean.
        replicas: Replicas of the ranks. Only ranks with the same part of the model exchange data, and a replica is a
            donor as a whole or not at all.
        quorum: Condition for deciding a round without all members, or None to wait for all.
    """

    def __init__(
        self,
        services: Services,
        scopes: PolicyScopes,
        membership: Membership,
        fragments: Sequence[Fragment],
        *,
        is_overlapped: bool,
        skips_late: bool = False,
        weigh: Weighing = reported_weights,
        partners: Partners = all_members,
        replicas: Replicas = SINGLE,
        quorum: Quorum | None = None,
    ) -> None:
        self._services = services
        self._quorum = quorum
        self._membership = membership
        self._fragments = fragments
        self._is_overlapped = is_overlapped
        self._rounds: dict[int, MemberRound] = {}
        self._retired = [0] * len(fragments)  # by fragment: last retired round, whose mean is no longer offered
        self._holders = [-1] * len(fragments)  # by fragment: a member with the state after the last retired round
        self._is_paused = False  # whether this member has asked rounds not to wait for it
        self._is_ending = False  # whether this member will contribute to no further round
        self._unused: dict[int, list[Tensor]] = {}  # by fragment: memory for the next contribution
        self._is_released = True  # whether the leader permits this member to leave
        self._are_leaving = False  # whether another member was lost, has left, or is ending
        self._contributed: dict[int, int] = {}  # by fragment: round in which this member's newest contribution counts
        self._postponed: list[
            tuple[int, ExchangeMessage]
        ] = []  # messages that arrived before this newcomer had a state
        self._unread: list[Envelope[ExchangeMessage]] | None = []  # messages before the membership opened; then None
        self._is_closed = False
        self._round_leader = RoundLeader(self, services, membership, weighing_of(replicas, weigh), partners, quorum)
        self._replicas = replicas
        self._counterparts = frozenset(replicas.counterparts(services.rank))
        self._server = SnapshotServer(services, scopes.to_members)
        self._transfers = RoundTransfers(
            services,
            self._server,
            fragments,
            is_overlapped=is_overlapped or skips_late,
            merges_at_once=replicas.size == 1,
            keeps_means=quorum is None,  # with a quorum, a round's memory is freed even if a member lacks the mean
        )
        self._channel: PolicyChannel[ExchangeMessage] = PolicyChannel(
            services, ExchangeMessage, scope=scopes.to_members, name="exchange", listener=self
        )
        slice_nbytes = [each.layout.nbytes_of(part) for each in fragments for part in each.layout.slices]
        if not membership.is_joining:
            self._server.neighbours.introduce(sorted(self._counterparts), max(slice_nbytes, default=0))
        self._catch_up: CatchUp | None = None
        if quorum is not None:
            offers = Offers(services, scopes.to_coordinator, is_overlapped=is_overlapped or skips_late)
            self._catch_up = CatchUp(self, services, offers, fragments)
        self._round_leader.follow(self._retired)
        membership.open(self)
        if quorum is not None and not membership.is_joining:  # members that have loaded a checkpoint may be behind
            self._begin_leading()
        unread, self._unread = self._unread, None
        for envelope in unread:
            self.on_message(envelope)

    # -- the policy's calls -----------------------------------------------------------------------------------------

    def new_encoded(self, fragment: int) -> list[Tensor]:
        """Return memory for the encoded values of this member's next contribution to a model fragment.

        Until this contribution is made, further calls return the same memory, because a capture may have failed.
        """
        if fragment not in self._unused:
            self._unused[fragment] = self._transfers.new_encoded(fragment)
        return self._unused[fragment]

    def note_applied(self, fragment: int) -> None:
        """Allow the memory of a model fragment's last mean to be reused, because it was applied."""
        self._transfers.note_applied(fragment)

    def contribute(self, number: int, encoded: Sequence[Tensor], report: Report) -> None:
        """Offer ``encoded`` as this member's contribution to averaging round ``number``.

        The caller must not change these tensors afterwards.
        """
        own = self._round(number)
        own.contribution, own.report = encoded, report
        self._unused.pop(own.fragment, None)
        self._transfers.offer_contribution(own)
        self._contributed[own.fragment] = number
        self._is_paused = False
        self._send_to_leader(Captured(*report), number)
        self._request_missed(own.fragment)

    def next_open(self, fragment: int) -> int:
        """Return the first round of a model fragment that the leader has not decided, as far as this member knows."""
        count = len(self._fragments)
        decided = [each.number for each in self._rounds.values() if each.fragment == fragment and each.attempt]
        last = max(self._newest(fragment), self._retired[fragment], *decided, 0)
        return last + count if last else fragment + 1

    def last_contribution(self, fragment: int) -> int:
        """Return a model fragment's last round that counts a contribution from this member, or 0 before the first."""
        return self._contributed.get(fragment, 0)

    def _newest(self, fragment: int) -> int:
        """Return the last round whose mean this member has merged into a model fragment, or 0 before the first."""
        version, count = self._fragments[fragment].version, len(self._fragments)
        return (version - 1) * count + fragment + 1 if version else 0

    def latest(self, number: int) -> int:
        """Return the round in which the contribution to round ``number`` counts: a later round if it arrived late."""
        return max(number, self._contributed.get((number - 1) % len(self._fragments), number))

    def has_merged(self, number: int) -> bool:
        """Return whether this member has a round's mean, and knows in which round its own contribution counts."""
        own = self._rounds.get(number)
        return has_merged(self._fragments, number) and (self._quorum is None or own is None or own.is_known)

    async def merged(self, number: int) -> None:
        """Wait until this member has the mean of round ``number``, or of a later one if its contribution was late.

        Also return if another rank of this rank's replica is lost.

        If training does not overlap with transfers, also wait until the other members have received this member's
        slices of the mean. Otherwise they would wait for a slice while this member trains for a step.
        """
        engine, members, wait = self._services.engine, self._membership, WaitId(WaitKind.ROUND_MEAN, number=number)
        if not self.has_merged(self.latest(number)):
            await engine.until(lambda: self.has_merged(self.latest(number)) or members.is_broken, wait)
        own = self._rounds.get(self.latest(number))
        if own is not None and not self._is_overlapped and not own.has_sent:
            await engine.until(lambda: own.has_sent or members.is_broken, wait)

    def pause(self) -> None:
        """Ask the leader not to wait for this member until it contributes again. Do nothing without a quorum."""
        if self._quorum is not None:
            self._is_paused = True
            self._send_to_leader(Paused(), 0)

    def is_behind(self, fragment: int) -> bool:
        """Return whether this member lacks a mean of a model fragment that other members no longer offer."""
        return self._newest(fragment) < self._retired[fragment]

    async def settled(self, deadline: float | None = None) -> bool:
        """Wait until every member has the means of all rounds to which this member has contributed.

        With a quorum, do not wait for members that are behind, i.e. lack a mean that is no longer offered. If only such
        members would remain, wait until one of them has received the newest state. Also return if another rank of this
        rank's replica is lost, because the other members then no longer count this member.

        Returns:
            False if the deadline passed first.
        """
        gone, replica_ranks = self._services.gone, self._replicas.replica_ranks(self._services.rank)
        if self._quorum is not None and not self._membership.is_joining:
            self._is_ending, self._is_released = True, False
            self.send(Ending(), sorted(self._membership.living), 0)

        def is_over() -> bool:
            return (not self._rounds and self._is_released) or any(rank in gone for rank in replica_ranks)

        is_settled = await self._services.engine.until(is_over, WaitId(WaitKind.OWN_ROUND), deadline=deadline)
        if not is_settled:
            me = self._services.rank
            logger.warning("rank %d leaves after drain_timeout_s, and other ranks may lack the means of its rounds", me)
        return is_settled

    def leave(self) -> None:
        """Leave the exchange, and withdraw this member's contributions to unfinished rounds."""
        if self._is_closed:
            return
        self._is_closed = True
        self._round_leader.close()
        for own in self._rounds.values():
            self._transfers.stop(own)
            self._transfers.retire(own)
        self._membership.leave()
        self._channel.close()
        self._server.close()
        if self._catch_up is not None:
            self._catch_up.offers.close()
        self._services.engine.recheck()

    # -- newcomers --------------------------------------------------------------------------------------------------

    @property
    def holds_means(self) -> bool:
        """True if this member has the mean of a round that another member may lack.

        While this is True, this member must not send its state to a joining rank. The state contains the mean, and if
        this member were then lost, the other members could not obtain that mean.
        """
        return any(own.has_merged for own in self._rounds.values())

    async def shared(self) -> None:
        """Wait until all other members have every mean that this member has."""
        await self._services.engine.until(lambda: not self.holds_means, WaitId(WaitKind.OWN_ROUND))

    async def settle(self, numbers: Sequence[int], progress: Sequence[int]) -> tuple[int, ...]:
        """Wait until this member has the means of rounds ``numbers``, or until all members are waiting in this method.

        See :meth:`Membership.settle` for ``progress`` and the result.
        """
        return await self._membership.settle(lambda: all(map(self.has_merged, numbers)), progress)

    def contribution_state(self, number: int) -> dict[str, Any]:
        """Return a copy of this member's contribution to an unfinished round, for a checkpoint."""
        own = self._rounds[number]
        return {"encoded": [each.clone() for each in own.contribution], **own.report._asdict()}

    def members(self) -> tuple[int, ...]:
        """Return the living members in the order in which they may lead."""
        return self._membership.members()

    def begin_joined(self, in_flight: Sequence[int]) -> None:
        """Become a member after the leader's state was loaded.

        Args:
            in_flight: Rounds in progress to which this rank does not contribute, but whose means it receives.
        """
        for number in in_flight:
            own = self._round(number)  # the round now exists, so that a report to a new leader includes it
            self._contributed[own.fragment] = number
        self._membership.complete_joining()
        postponed, self._postponed = self._postponed, []
        for each in postponed:
            self._handle_from_leader(*each)

    # -- changes of the members -------------------------------------------------------------------------------------

    def may_admit(self) -> bool:
        """Return whether this leader can admit a restarted rank. False while members report to it after a loss."""
        return self._round_leader.can_admit

    def on_lost(self, rank: int) -> None:
        """If this member leads, decide again the rounds that need the lost member's data."""
        self._forget_lost()
        self._round_leader.on_lost(rank)

    def on_new_leader(self) -> None:
        """Report the state of this member's unfinished rounds to the new leader."""
        self._forget_lost()
        self._round_leader.follow(self._retired)
        self._begin_leading()

    def _begin_leading(self) -> None:
        """Report the state of this member's rounds to the leader. If this member leads, collect these reports."""
        self._round_leader.take_over()
        self._stop_and_report(0)
        if self._is_paused:
            self._send_to_leader(Paused(), 0)
        if self._is_ending:
            self.send(Ending(), sorted(self._membership.living), 0)
        self._round_leader.handle_early()

    def on_reachable(self, rank: int) -> None:
        """Open the channels to a restarted member, and start receiving the means that it provides."""
        self._channel.admit(rank)
        self._server.channel.admit(rank)
        if self._catch_up is not None:
            self._catch_up.offers.admit(rank)
        for own in list(self._rounds.values()):
            self._begin(own)

    def on_admitted(self, rank: int) -> None:
        """As the leader, send a newly joined rank the decisions on all rounds in progress."""
        self._round_leader.on_admitted(rank)

    def on_settling(self) -> None:
        """Do nothing, because a round can end without further training steps by its contributors."""

    # -- messages ---------------------------------------------------------------------------------------------------

    def on_message(self, envelope: Envelope[ExchangeMessage]) -> None:
        """Handle a message from another member."""
        message, source, number = envelope.message, envelope.source, envelope.round
        if self._unread is not None:
            self._unread.append(envelope)
        elif source not in self._membership.known:
            logger.debug("rank %d, which is not a member, sent a %s", source, type(message).__name__)
        elif isinstance(message, Captured | Merged | Paused | Ending | CensusReply):
            self._round_leader.handle(source, number, message)
            if isinstance(message, Ending):
                self._request_all_missed()
            self._round_leader.abdicate_if_slow()
        elif isinstance(message, StateRequest | StateOffer | StateTaken):
            if self._catch_up is not None:
                self._catch_up.on_message(source, number, message)
        elif source == self._membership.leader:
            if self._membership.is_joining:
                self._postponed.append((number, message))
            else:
                self._handle_from_leader(number, message)

    def _handle_from_leader(self, number: int, message: ExchangeMessage) -> None:
        match message:
            case Decided(verdict) if number > self._retired[(number - 1) % len(self._fragments)]:
                if number not in self._rounds and self.has_merged(number):  # this member's state includes the mean
                    self._send_to_leader(Merged(), number)
                else:
                    self._take_verdict(self._round(number), verdict)
            case CensusRequest(census):
                self._stop_and_report(census)
            case Retired(holder):
                self._retire(number, holder)
            case Ending():
                self._round_leader.handle(self._services.rank, number, message)
            case Released():
                self._is_released = True
                self._services.engine.recheck()

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
        if self._services.rank in verdict.late:
            self._move_contribution(own)
        is_over = self._quorum is not None and not own.has_merged and has_merged(self._fragments, own.number)
        if is_over and not own.contribution:
            self._drop(own)
            self._send_to_leader(Merged(), own.number)
            return
        if own.has_merged:
            if verdict.holder == self._services.rank:
                self._transfers.offer_mean(own, verdict)
            return
        if own.has_received:  # the mean was received but not merged
            self._transfers.stop(own)
        own.verdict = verdict if self._replicas.size == 1 else verdict.among(self._counterparts)
        self._begin(own)

    def _begin(self, own: MemberRound) -> None:
        """Start receiving the mean of a round that the leader has decided.

        Delay the start if this member lacks the fragment's earlier means, or is not connected to a restarted source.
        """
        verdict, index = own.verdict, (own.number - 1) // len(self._fragments)
        is_early = self._quorum is not None and index > self._fragments[own.fragment].version
        if verdict is None or own.has_merged or own.task is not None or is_early:
            return
        if all(map(self._membership.is_reachable, verdict.sources)):
            own.task = self._transfers.begin(own, verdict)
            own.task.add_done_callback(lambda task: self._on_merged(own))

    def _on_merged(self, own: MemberRound) -> None:
        if own.has_received and not self._is_closed:
            self._send_to_leader(Merged(), own.number)
            if self._quorum is not None:
                self._begin_next(own.fragment)

    def _begin_next(self, fragment: int) -> None:
        later = self._rounds.get(self._fragments[fragment].version * len(self._fragments) + fragment + 1)
        if later is not None:
            self._begin(later)

    def _move_contribution(self, own: MemberRound) -> None:
        if own.contribution:
            later = self._round(self.next_open(own.fragment))
            self._transfers.move_contribution(own, later)
            self._contributed[own.fragment] = later.number
            self._send_to_leader(Captured(*later.report), later.number)
            if self._is_paused:  # the leader takes each contribution as the end of a pause
                self._send_to_leader(Paused(), 0)

    def _stop_and_report(self, census: int) -> None:
        """Stop receiving means, and report the state of this member's unfinished rounds to the leader."""
        for own in self._rounds.values():
            if not own.has_received:
                self._transfers.stop(own)
        round_states = tuple(own.round_state() for _, own in sorted(self._rounds.items()))
        newest = tuple(map(self._newest, range(len(self._fragments))))
        self._send_to_leader(CensusReply(census, round_states, tuple(self._retired), newest), 0)

    def _retire(self, last: int, holder: int) -> None:
        """Free the memory of a model fragment's rounds up to ``last``.

        Request the newest state if a mean is missing.
        """
        count, fragment = len(self._fragments), (last - 1) % len(self._fragments)
        if self._quorum is None:
            self._retired = [last] * count
        self._retired[fragment], self._holders[fragment] = last, holder
        for number in sorted(self._rounds):
            if number > self._retired[(number - 1) % count]:
                continue
            own = self._rounds[number]
            if self._quorum is not None and not own.is_known:
                self._move_contribution(own)
            del self._rounds[number]
            if own.has_received and not own.has_merged:
                self._transfers.merge(own)
            elif not own.has_received:  # this member lacks the mean, which only a quorum allows
                self._transfers.stop(own)
            self._transfers.retire(own)
        self._server.end_rounds(min(self._retired))
        # If the holder itself lacks the state after the round, all members that had it are lost.
        if holder == self._services.rank and not has_merged(self._fragments, last):
            self._fragments[fragment].count_lost((last - 1) // count + 1)
            self._send_to_leader(Merged(), last)
        self._request_missed(fragment)
        self._services.engine.recheck()

    def _request_missed(self, fragment: int) -> None:
        """Request a model fragment's newest state if this member needs a mean that is no longer offered.

        If this member has no new contribution, request the state only if another member is leaving or gone. Otherwise
        this member would soon be behind again.
        """
        if self._catch_up is None or self._is_closed:
            return
        number, waiting = self._retired[fragment], self._contributed.get(fragment, 0)
        is_waiting = self._are_leaving or (waiting and not has_merged(self._fragments, waiting))
        if not number or has_merged(self._fragments, number) or not is_waiting:
            return
        holder = self._holders[fragment]
        if holder in self._membership.living:  # if the holder is lost, the leader will name another one
            self._catch_up.ask(number, holder)

    def note_caught_up(self, fragment: int) -> None:
        """Resume a model fragment's rounds after its newest state was received. Do nothing if no state has arrived."""
        newest = self._newest(fragment)
        if self._is_closed or not newest:
            return
        for own in [each for each in self._rounds.values() if each.fragment == fragment and each.number <= newest]:
            if not own.has_merged and not own.contribution:
                self._drop(own)
        self._send_to_leader(Merged(), newest)
        self._begin_next(fragment)
        self._request_missed(fragment)

    def _drop(self, own: MemberRound) -> None:
        """Forget a round to which this member has not contributed, and whose mean it does not need."""
        del self._rounds[own.number]
        self._transfers.stop(own)
        self._transfers.retire(own)

    def _forget_lost(self) -> None:
        if self._catch_up is not None:
            self._catch_up.on_lost(self._membership.living)
            self._request_all_missed()

    def _request_all_missed(self) -> None:
        """Request missing states even without a contribution, because departing members may have the newest states."""
        self._are_leaving = True
        for fragment in range(len(self._fragments)):
            self._request_missed(fragment)

    # -- sending ----------------------------------------------------------------------------------------------------

    def _send_to_leader(self, message: MemberMessage, number: int) -> None:
        leader = self._membership.leader
        if self._membership.leads:
            self._round_leader.handle(leader, number, message)
        else:
            self._channel.post(message, leader, number)

    def send(self, message: ExchangeMessage, dests: Sequence[int], number: int) -> None:
        """Send a message about a round to members, possibly including this one."""
        me = self._services.rank
        for dest in dests:
            if dest != me:
                self._channel.post(message, dest, number)
        if me in dests:
            self._handle_from_leader(number, message)
