"""Averages contributions of all members in numbered rounds, in the background, even if members are lost.

Each member contributes a fragment of its model, and continues to train. When all members have contributed to a round,
its leader decides which contributions are averaged (:mod:`protocols.exchange.ledger`), and the members exchange the
data (:mod:`protocols.exchange.rounds`). All messages and data move at safe points, or without the owner where the
kernel lets a peer read its memory.

The leader is the first member that is neither lost nor has left. If it is lost, each member sends its standing to the
next one. Messages between two ranks arrive in order, so the new leader needs no other information.

The leader admits restarted ranks inside its own ``step``, one at a time: it copies its whole state, and from then on
the newcomer is a member, which receives the means of all rounds that are in progress
(:mod:`protocols.exchange.admission`). The newcomer gets the state when all members count it as a member. If the leader
is lost, the next leader therefore knows every newcomer that has a state; the others ask again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from asyncdist import Envelope, RankLostError, tags
from asyncdist.messaging.channels import Channel
from asyncdist.messaging.services import Services
from asyncdist.protocols.exchange.ledger import (
    Decide,
    Instruction,
    Ledger,
    Retire,
    TakeCensus,
    Verdict,
    Weighing,
    reported_weights,
)
from asyncdist.protocols.exchange.messages import (
    Acquainted,
    Admitted,
    Captured,
    Census,
    Decided,
    ExchangeMessage,
    Hold,
    Left,
    Merged,
    Retired,
)
from asyncdist.protocols.exchange.rounds import Exchanged, MemberRound, RoundTransfers
from asyncdist.protocols.parameter_stream.server import SnapshotServer
from asyncdist.protocols.selective.scopes import PolicyScopes
from asyncdist.waits import WaitId, WaitKind

logger = logging.getLogger("protocols.exchange")


class Exchange:
    """One member's side of all rounds of a policy, and the leader's if this member leads.

    Rounds are numbered from 1 over all fragments: round n is round ``(n - 1) // len(fragments)`` of fragment
    ``(n - 1) % len(fragments)``.

    Args:
        members: Ranks that take part, in the order in which they may lead, including this rank.
        fragments: Fragments of the policy's model, which receive the means.
        is_overlapped: Whether the ranks train while data moves; equal on all members.
        known: All ranks that may become members; by default the members.
        admitted: Number of restarts of each member that was restarted.
        leader: Rank that has answered this newcomer's request for admission; None for a member from the start.
        weigh: Pure function by which a leader chooses the donors and their weights from the members' reports; equal on
            all members. By default all finite contributions count, with their reported weights.

    Attributes:
        leader: Rank of the current leader.
        admission: Number of the state that the leader offers to this newcomer; 0 before it is admitted.
    """

    def __init__(
        self,
        services: Services,
        scopes: PolicyScopes,
        members: Sequence[int],
        fragments: Sequence[Exchanged],
        *,
        is_overlapped: bool,
        known: Sequence[int] = (),
        admitted: Mapping[int, int] | None = None,
        leader: int | None = None,
        weigh: Weighing = reported_weights,
    ) -> None:
        self._services = services
        self._fragments = fragments
        self._order = list(members)  # members in the order in which they may lead; newcomers are the last
        self._living = set(members)
        self._admitted = dict(admitted or {})
        self._known = frozenset(known or members)
        self._rounds: dict[int, MemberRound] = {}
        self._last_retired = 0
        self._early: list[tuple[int, int, ExchangeMessage]] = []  # messages to this rank before it leads
        self._is_closed = False
        self.leader = self._order[0] if leader is None else leader
        self.admission = 0
        self._admission_count = 0
        self._newcomer: tuple[int, int] | None = None  # the newcomer that this leader admits now
        self._unacquainted: set[int] = set()  # members that do not count it as a member yet; then the newcomer itself
        self._on_admission_end: Callable[[], None] = lambda: None
        self._left: set[int] = set()
        self._is_joining = leader is not None
        self._weigh = weigh
        self._orders: list[tuple[int, ExchangeMessage]] = []  # the leader's messages before this newcomer has a state
        self._ledger = Ledger(members, weigh=weigh) if self.leader == services.rank else None
        self._server = SnapshotServer(services, scopes.to_members)
        self._transfers = RoundTransfers(services, self._server, fragments, is_overlapped=is_overlapped)
        self._channel: Channel[ExchangeMessage] = services.open_channel(
            ExchangeMessage, tag=tags.CONTROL, scope=scopes.to_members, name="exchange", handler=self._on_message
        )
        services.on_gone(self._on_gone, among=self._known)
        services.on_returned(self._on_returned)
        for rank in members:
            if rank in services.gone:
                self._on_gone(rank)

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
        own = self._rounds.get(number)
        return number <= self._last_retired if own is None else own.has_merged

    async def merged(self, number: int) -> None:
        """Wait until this member has the mean of a round."""
        if not self.has_merged(number):
            wait = WaitId(WaitKind.ROUND_MEAN, number=number)
            await self._services.engine.until(lambda: self.has_merged(number), wait)

    async def settled(self, deadline: float | None = None) -> bool:
        """Wait until every member has the means of all rounds to which this member has contributed.

        Returns:
            False if the deadline passed first.
        """
        wait = WaitId(WaitKind.OWN_ROUND)
        return await self._services.engine.until(lambda: not self._rounds, wait, deadline=deadline)

    def leave(self) -> None:
        """Take part in no further round. Contributions to rounds in progress are withdrawn."""
        if self._is_closed:
            return
        self._is_closed = True
        self._services.off_gone(self._on_gone)
        self._services.off_returned(self._on_returned)
        for own in self._rounds.values():
            self._transfers.stop(own)
            self._transfers.retire(own)
        if self._services.engine.failure is None:
            for rank in sorted(self._living - {self._services.rank}):
                self._post(Left(), rank)
        self._channel.close()
        self._server.close()

    # -- admission --------------------------------------------------------------------------------------------------

    @property
    def can_admit(self) -> bool:
        """True if this rank leads, and no census or admission is in progress."""
        is_busy = self._newcomer is not None or self._is_closed
        return self._ledger is not None and self._ledger.can_admit and not is_busy

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

    def members(self) -> tuple[int, ...]:
        """Return the living members in the order in which they may lead."""
        return tuple(rank for rank in self._order if rank in self._living)

    def dismiss(self, rank: int) -> None:
        """Count a member as lost, since it has asked for admission again."""
        self._note_gone(rank)

    def admit(self, newcomer: tuple[int, int], on_end: Callable[[], None]) -> int:
        """Admit a restarted rank with its incarnation, and return the number of the state to offer to it.

        Args:
            on_end: Function called when the newcomer has the state or is lost.
        """
        ledger, me, (rank, incarnation) = self._ledger, self._services.rank, newcomer
        assert ledger is not None and self.can_admit, "only a leader without a census or an admission admits"
        self._admission_count += 1
        self._order = [*self.members(), rank]
        self._living.add(rank)
        self._left.discard(rank)
        self._admitted[rank] = incarnation
        self._channel.admit(rank)
        self._server.channel.admit(rank)
        self._newcomer, self._on_admission_end = newcomer, on_end
        self._unacquainted = self._living - {me, rank}
        for member in sorted(self._unacquainted):
            self._post(self._admitted_message(newcomer), member, self._admission_count)
        self._carry_out(ledger.on_admitted(rank, me))
        self._note_acquainted(me)
        return self._admission_count

    def _note_acquainted(self, member: int) -> None:
        """Complete a part of the admission, as the leader, when the last member that it awaits has answered or left."""
        if self._newcomer is None:
            return
        rank, is_given = self._newcomer[0], self._newcomer[0] in self._unacquainted
        self._unacquainted.discard(member)
        if rank not in self._living or (is_given and not self._unacquainted):
            self._newcomer = None
            self._on_admission_end()
        elif not self._unacquainted:
            self._unacquainted = {rank}
            self._post(self._admitted_message(self._newcomer), rank, self._admission_count)

    def _admitted_message(self, newcomer: tuple[int, int]) -> Admitted:
        return Admitted(tuple((rank, self._admitted.get(rank, 0)) for rank in self.members()), newcomer)

    def begin_joined(self, in_flight: Sequence[int]) -> None:
        """Take part as a member, after the leader's state was loaded.

        Args:
            in_flight: Rounds whose means this member receives, although it has not contributed to them.
        """
        self._is_joining = False
        for number in in_flight:
            self._round(number)  # is reported in a census
        self._post(Acquainted((self._services.rank, self._services.incarnation)), self.leader)
        orders, self._orders = self._orders, []
        for order in orders:
            self._obey(*order)

    def _is_past(self, number: int) -> bool:
        """Return whether this rank's state contains a round's mean."""
        return (number - 1) // len(self._fragments) < self._fragments[(number - 1) % len(self._fragments)].version

    # -- events -----------------------------------------------------------------------------------------------------

    def _on_gone(self, rank: int) -> None:
        self._services.engine.loop.call_soon(self._note_gone, rank)

    def _note_gone(self, rank: int) -> None:
        """Handle a member that is lost or has left; a new leader takes a census."""
        if rank not in self._living or self._is_closed:
            return
        self._living.discard(rank)
        if rank != self.leader:
            if self._ledger is not None:
                self._carry_out(self._ledger.on_gone(rank))
                self._note_acquainted(rank)
            return
        if self._is_joining:  # the request for admission is repeated
            self._services.engine.recheck()
            return
        self.leader = next(each for each in self._order if each in self._living)
        logger.info("rank %d now leads the exchange, after rank %d", self.leader, rank)
        if self.leader == self._services.rank:
            self._ledger = Ledger(self._living, self._last_retired, self._weigh)
            self._ledger.take_over()
        self._hold(0)
        if self._ledger is not None:  # otherwise yet another rank is lost before this one leads
            early, self._early = self._early, []
            for each in early:
                self._hear(*each)

    def _on_message(self, envelope: Envelope[ExchangeMessage]) -> None:
        message, source, number = envelope.message, envelope.source, envelope.round
        if source not in self._known:
            logger.debug("rank %d, which is not a member, sent a %s", source, type(message).__name__)
        elif isinstance(message, Left):
            self._left.add(source)
            self._note_gone(source)
        elif isinstance(message, Acquainted):
            if message.newcomer == self._newcomer:
                self._note_acquainted(source)
        elif isinstance(message, Captured | Merged | Census):
            self._hear(source, number, message)
        elif source == self.leader:
            if self._is_joining and not isinstance(message, Admitted):
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
                if number not in self._rounds and self._is_past(number):  # part of the state that it received
                    self._tell_leader(Merged(), number)
                else:
                    self._take_verdict(self._round(number), verdict)
            case Hold(census):
                self._hold(census)
            case Retired():
                self._retire(number)
            case Admitted():
                self._note_admitted(number, message)

    # -- a member's actions -----------------------------------------------------------------------------------------

    def _round(self, number: int) -> MemberRound:
        found = self._rounds.get(number)
        if found is None:
            found = self._rounds[number] = MemberRound(number, (number - 1) % len(self._fragments))
        return found

    def _note_admitted(self, number: int, message: Admitted) -> None:
        """Record the members after an admission, possibly this rank's own."""
        rank, incarnation = message.newcomer
        self._order = [each for each, _ in message.order]
        self._admission_count = max(self._admission_count, number)
        if message.newcomer == (self._services.rank, self._services.incarnation):
            self.admission = number
            self._living = {each for each in self._order if each not in self._services.gone and each not in self._left}
            self._admitted.update(message.order)
            for each in self._living - {rank}:
                self._look_at(each)
            self._services.engine.recheck()
        else:
            self._admitted[rank] = incarnation
            self._left.discard(rank)
            self._look_at(rank)

    def _on_returned(self, rank: int) -> None:
        self._services.engine.loop.call_soon(self._look_at, rank)

    def _look_at(self, rank: int) -> None:
        """Count a restarted rank as a member if this rank is connected to the process that was admitted."""
        is_closed = self._is_closed or rank in self._left
        if rank in self._admitted and self._is_reachable(rank) and not is_closed:
            self._living.add(rank)
            self._channel.admit(rank)
            self._server.channel.admit(rank)
            if self.leader != self._services.rank:
                self._post(Acquainted((rank, self._admitted[rank])), self.leader)
            for own in list(self._rounds.values()):
                self._begin(own)

    def _is_reachable(self, rank: int) -> bool:
        services = self._services
        is_present = rank not in services.gone and services.restarted.get(rank, 0) == self._admitted.get(rank, 0)
        return rank == services.rank or is_present

    def _take_verdict(self, own: MemberRound, verdict: Verdict) -> None:
        if verdict.attempt <= own.attempt or not self._known.issuperset((*verdict.donors, *verdict.sources)):
            return
        own.attempt = verdict.attempt
        if own.has_merged:
            if verdict.holder == self._services.rank:
                self._transfers.offer_mean(own, verdict)
            return
        own.verdict = verdict
        self._begin(own)

    def _begin(self, own: MemberRound) -> None:
        """Start to receive a round's mean, unless this rank is not connected yet to a source that was restarted."""
        verdict = own.verdict
        if verdict is None or own.has_merged or own.task is not None:
            return
        if all(map(self._is_reachable, verdict.sources)):
            own.task = self._transfers.begin(own, verdict)
            own.task.add_done_callback(lambda task: self._on_merged(own))

    def _on_merged(self, own: MemberRound) -> None:
        if own.has_merged and not self._is_closed:
            self._tell_leader(Merged(), own.number)

    def _hold(self, census: int) -> None:
        """Stop receiving means, and report this member's standing in each round."""
        for own in self._rounds.values():
            if not own.has_merged:
                self._transfers.stop(own)
        standings = tuple(own.standing() for _, own in sorted(self._rounds.items()))
        self._tell_leader(Census(census, standings, self._last_retired), 0)

    def _retire(self, last: int) -> None:
        self._last_retired = max(self._last_retired, last)
        for number in [number for number in self._rounds if number <= last]:
            self._transfers.retire(self._rounds.pop(number))
        self._server.end_rounds(last)
        self._services.engine.recheck()

    # -- sending ----------------------------------------------------------------------------------------------------

    def _tell_leader(self, message: ExchangeMessage, number: int) -> None:
        if self.leader == self._services.rank:
            self._hear(self.leader, number, message)
        else:
            self._post(message, self.leader, number)

    def _carry_out(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Decide(number, verdict, dests):
                    self._send(Decided(verdict), dests, number)
                case TakeCensus(number):
                    self._send(Hold(number), sorted(self._living), 0)
                case Retire(number):
                    self._send(Retired(), sorted(self._living), number)

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
