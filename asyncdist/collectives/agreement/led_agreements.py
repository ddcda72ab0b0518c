"""Collects the members' joins on an agreement's leader, decides whether all may start, and sends the decision.

If an agreement fails before all members have joined, its decision is stored for the missing members, which receive it
when they join. In a large group, whose joins are relayed along a tree (:mod:`asyncdist.collectives.agreement.relays`),
a join may be late. The leader therefore asks seemingly missing members directly before it refuses the start.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable
from typing import Any, Final

from asyncdist.collectives.agreement.absences import Absences
from asyncdist.collectives.agreement.messages import (
    AgreementKey,
    Gathered,
    Inquiry,
    Join,
    Meeting,
    NotHere,
    Objection,
    RollCall,
    Verdict,
    is_in,
)
from asyncdist.collectives.agreement.relays import Relays
from asyncdist.collectives.agreement.verdicts import (
    POSTPONED,
    LateDecisions,
    check_room,
    first_difference,
    judge,
)
from asyncdist.errors import BusyError
from asyncdist.transports.rank_sets import RankSet
from asyncdist.waits import WaitId, WaitKind

#: Seconds after the timeout that a large group's leader waits for the answers of seemingly missing members.
_ROLL_CALL_S: Final = 0.5


class LedAgreements:
    """Collects the members' join messages for the agreements that this rank leads, and sends the decisions.

    Args:
        send_anyway: Function that sends a message to another rank even if that rank has left the world.
        deliver: Function that handles a decision on this rank.
        has_joined: Function that returns whether this rank has joined an agreement.

    Attributes:
        joins: Received join messages of each undecided agreement, by member.
        over: Decisions of failed agreements that some members have not received.
        withdrawn: Operations that this rank never starts again, as keys for all their starts.
    """

    def __init__(
        self,
        rank: int,
        send: Callable[[Any, int], None],
        send_anyway: Callable[[Any, int], None],
        deliver: Callable[[Verdict], None],
        has_joined: Callable[[AgreementKey], bool],
        absences: Absences,
        relays: Relays,
    ) -> None:
        self._rank = rank
        self._send = send
        self._send_anyway = send_anyway
        self._deliver = deliver
        self._has_joined = has_joined
        self._absences = absences
        self.joins: dict[AgreementKey, dict[int, Join]] = {}
        self.over = LateDecisions()
        self.withdrawn: set[AgreementKey] = set()
        self._relays = relays
        self._has_left = False
        # The following attributes describe undecided agreements of large groups.
        self._direct: dict[AgreementKey, set[int]] = {}  # members whose relayed joins are ignored
        self._called: dict[AgreementKey, tuple[Inquiry, set[int]]] = {}  # members asked after the timeout
        # Objections that take effect when a member answers that it has not joined:
        self._doubted: dict[AgreementKey, tuple[Objection, int]] = {}

    def decide(self, meeting: Meeting, waited_s: float) -> tuple[Verdict, Join]:
        """Decide an agreement that this rank has joined.

        Return the decision and the first of the compared join messages.
        """
        key, ranks = meeting.key, meeting.ranks
        joins = self.joins.pop(key)
        missing = tuple(rank for rank in ranks if rank not in joins)
        compared = [rank for rank in ranks if rank in joins and joins[rank].values] or [self._rank]
        verdict = judge(joins, compared, missing, self._absences.of(meeting), self._absences.lost_to(key), waited_s)
        self._notify_others(joins, verdict)
        self._keep_for(missing, verdict)
        return verdict, joins[compared[0]]

    def on_join(self, join: Join, source: int) -> None:
        """Record that a member has joined an agreement that this rank leads or will lead."""
        key = join.key
        if source in self._absences.gone:
            # A member that has left the world is still waiting for the decision.
            if source not in self._absences.lost and self._relays.carry(key):
                over = self.over.decision_for(key, source) or self._decided(key)
                self._send_anyway(over or Verdict(key.text, gone=(source,)), source)
            return
        over = self.over.decision_for(key, source)
        if self._relays.carry(key):
            over = over or self._decided(key)
            if over is None:
                self._direct.setdefault(key, set()).add(source)
        elif key.of_all_occurrences in self.withdrawn:
            return  # The member has received, or will receive, this rank's stored decisions and its withdrawal.
        if over is None:
            check_room(self.joins, key)
            self.joins.setdefault(key, {})[source] = join
            self._refuse_if_one_is_gone(key)
            self._on_answer(key, source)
        else:
            self._send(over, source)  # The agreement has already failed without this member.

    def on_gathered(self, gathered: Gathered) -> None:
        """Record which members of a large group have joined an agreement.

        Raise RemoteProtocolError for an invalid message.
        """
        key = gathered.key
        ranks = self._relays.ranks_of(gathered) - self._absences.gone
        ranks -= {self._rank, *self._direct.get(key, ())}
        overs = [over for rank in ranks if (over := self.over.decision_for(key, rank)) is not None]
        over = overs[0] if overs else self._decided(key)
        if over is not None:
            self._relays.spread(over, self._rank, ranks)
        elif ranks:
            check_room(self.joins, key)
            join = Join(gathered.subject, gathered.values, gathered.taken, gathered.marks)
            self.joins.setdefault(key, {}).update(dict.fromkeys(ranks, join))
            self._refuse_if_one_is_gone(key)

    def on_not_here(self, answer: NotHere, source: int) -> None:
        """Handle a member's answer that it has not joined an agreement.

        If an objection says that this member is absent, the objection now takes effect.
        """
        key = answer.key
        self._on_answer(key, source)
        if key not in self._doubted or source in self.joins.get(key, ()):
            return
        objection, objector = self._doubted[key]
        if is_in(source, objection.absent) and not objection.is_void(self.joins.get(key, ())):
            self._refuse(objection, objector)

    def _decided(self, key: AgreementKey) -> Verdict | None:
        """Return the decision of a large group's agreement, or None if it is undecided.

        If this rank never starts the operation again, the decision is a refusal.
        """
        decision = self._relays.decisions.get((key, self._rank))
        if decision is None and (self._has_left or key.of_all_occurrences in self.withdrawn):
            return Verdict(key.text, gone=(self._rank,))
        return decision

    def on_inquiry(self, inquiry: Inquiry) -> None:
        """Refuse an agreement because a member's timeout has passed.

        In a large group, first ask the missing members.
        """
        joins = self.joins.get(inquiry.key, {})
        missing = tuple(sorted(inquiry.key.members() - joins.keys()))
        if not joins or not missing:
            return  # The decision is in transit.
        if self._relays.carry(inquiry.key):
            if inquiry.key not in self._called:
                self._called[inquiry.key] = inquiry, self._absences.may_join(inquiry.key, missing) - {self._rank}
                self._call(inquiry.key, missing)
                what = WaitId(WaitKind.ROLL_CALL, name=inquiry.key.text)
                self._relays.later(_ROLL_CALL_S, what, self._on_called, inquiry.key)
                self._on_answer(inquiry.key, self._rank)
            return
        self._refuse_without(missing, inquiry)

    def _on_answer(self, key: AgreementKey, source: int) -> None:
        if key in self._called:
            silent = self._called[key][1]
            silent.discard(source)
            if not silent:
                self._on_called(key)

    def _on_called(self, key: AgreementKey) -> None:
        """Refuse an agreement if some of the members that were asked whether they have joined are still missing."""
        if key in self._called:
            inquiry, _ = self._called.pop(key)
            joins = self.joins.get(key, {})
            missing = tuple(sorted(key.members() - joins.keys()))
            if joins and missing:
                self._refuse_without(missing, inquiry)

    def _call(self, key: AgreementKey, ranks: Iterable[int]) -> None:
        for rank in ranks:
            if rank != self._rank:
                self._send(RollCall(key.text), rank)

    def _refuse_without(self, missing: tuple[int, ...], inquiry: Inquiry) -> None:
        joins = self.joins.pop(inquiry.key)
        compared = [rank for rank in sorted(joins) if joins[rank].values] or sorted(joins)
        difference, _ = first_difference(joins, compared)
        verdict = Verdict(inquiry.subject, difference=difference, missing=missing, waited_s=inquiry.waited_s)
        self._keep_for(missing, verdict)
        self._announce(joins, verdict)

    def on_objection(self, objection: Objection, source: int) -> None:
        """Refuse an agreement because a member cannot start. The refusal is stored for members that join later."""
        key, joins = objection.key, self.joins.get(objection.key, {})
        if self.over.decision_for(key, source) is not None:
            return  # Another member has already objected.
        if objection.kind == POSTPONED:
            self._postpone(objection, source)
            return
        has_decided = source != self._rank and self._has_joined(key) and self._rank not in joins
        if has_decided or objection.is_void(joins):
            return  # The objection is no longer valid: the members that it reported as absent have joined.
        absent = [rank for rank in key.members() - joins.keys() if is_in(rank, objection.absent)]
        if absent and self._rank not in absent and self._relays.carry(key):
            self._doubted[key] = objection, source
            self._call(key, sorted(absent))
            return
        self._refuse(objection, source)

    def _refuse(self, objection: Objection, source: int) -> None:
        key, subject, joins = objection.key, objection.subject, self.joins.get(objection.key, {})
        if objection.kind:
            verdict = Verdict(subject, difference=objection.kind, refusal=objection.text, objector=source)
        else:
            verdict = Verdict(subject, difference="ranks", refusal=objection.text)
        self.joins.pop(key, None)
        self._keep_for(key.members() - joins.keys() - {source}, verdict)
        self._announce(joins, verdict)

    def on_gone(self, ranks: RankSet) -> None:
        """Remove the joins of ranks that have left or are lost, and refuse the agreements that are waiting for them."""
        self.over.on_gone(ranks)
        for key, joins in list(self.joins.items()):
            for rank in ranks & joins:
                del joins[rank]
            if not joins:
                del self.joins[key]
                self._direct.pop(key, None)
            self._refuse_if_one_is_gone(key)

    def leave(self) -> None:
        """Send the stored decisions to the members that may still join. Called before this rank leaves."""
        self._has_left = True
        self.send_stored()

    def send_stored(self, operation: AgreementKey | None = None) -> None:
        """Send the stored decisions on ``operation``, or on all operations, to the members that may still join."""
        for verdict, absent in self.over.take(operation):
            for rank in sorted(absent - {self._rank}):
                with contextlib.suppress(BusyError):
                    self._send(verdict, rank)

    def _postpone(self, objection: Objection, source: int) -> None:
        """Unless all members have joined, release ``source`` from an agreement.

        It will join the agreement again later.
        """
        key = objection.key
        joins = self.joins.get(key, {})
        if source in joins and len(joins) < len(key.members()):
            del joins[source]
            if not joins:
                del self.joins[key]
            postponed = Verdict(objection.subject, difference=POSTPONED, objector=source)
            if source == self._rank:
                self._deliver(postponed)
            else:
                self._send(postponed, source)

    def _announce(self, ranks: Collection[int], verdict: Verdict) -> None:
        self._notify_others(ranks, verdict)
        if self._rank in ranks:
            self._deliver(verdict)

    def _notify_others(self, ranks: Collection[int], verdict: Verdict) -> None:
        """Send a decision along the tree to members that joined along the tree, and directly to the other ``ranks``."""
        key, others = verdict.key, [rank for rank in ranks if rank != self._rank]
        if self._relays.carry(key):
            self._called.pop(key, None)
            self._doubted.pop(key, None)
            direct = self._direct.pop(key, set())
            self._relays.spread(verdict, self._rank, RankSet(set(others) - direct))
            others = [rank for rank in others if rank in direct]
        for rank in others:
            self._send(verdict, rank)

    def _keep_for(self, absent: Iterable[int], verdict: Verdict) -> None:
        self.over.keep(verdict, self._absences.may_join(verdict.key, absent))

    def _refuse_if_one_is_gone(self, key: AgreementKey) -> None:
        """Refuse an agreement that this rank leads but has not joined, if a member is gone and others are waiting.

        This rank may never join the agreement, because it may already have started again without the missing member.
        """
        joins = self.joins.get(key, {})
        if not joins or self._rank in joins:
            return
        gone = self._absences.gone_members(key)
        if gone:
            missing = tuple(sorted(key.members() - joins.keys()))
            all_lost = self._absences.lost_to(key)
            lost = tuple(rank for rank in gone if rank in all_lost)
            del self.joins[key]
            verdict = Verdict(key.text, missing=missing, gone=gone, lost=lost)
            self._keep_for(missing, verdict)
            self._announce(joins, verdict)
