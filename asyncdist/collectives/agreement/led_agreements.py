"""The leader's side of agreements: gathers the members that come to those that this rank leads, and decides.

:mod:`asyncdist.collectives.agreement.agreements` waits; nothing here does. A decision goes to all members that have
come. One that fails before all have is kept for the others, who hear it when they come.

In a large agreement most members are heard of, and told, along a tree (:mod:`asyncdist.collectives.agreement.relays`).
What is said there may come late. So the leader calls those that seem to be missing before it names them, or takes the
word of another one for it that they wait elsewhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable
from typing import Any, Final

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
    Absences,
    LateVerdicts,
    check_room,
    first_difference,
    judge,
)
from asyncdist.errors import BusyError
from asyncdist.transports.rank_sets import RankSet
from asyncdist.waits import WaitId, WaitKind

#: How long the leader of a large agreement waits for those that it calls, when time is up.
_ROLL_CALL_S: Final = 0.5


class LedAgreements:
    """Decides about the agreements that this rank leads.

    Args:
        rank: this rank.
        send: sends a message to another rank, unless that one is gone.
        send_anyway: sends one also to a rank that has left.
        deliver: takes a verdict that this rank gets from itself.
        has_come: whether this rank has come to an agreement, or gone on from it.
        absences: the ranks that come to none.
        relays: bring what members of large agreements say.

    Attributes:
        joins: the members that have come to each agreement that is not decided, with what they said.
        over: what has failed and not all members have heard of.
        withdrawn: large agreements, by their key for all occurrences, that this rank comes to no more.
    """

    def __init__(
        self,
        rank: int,
        send: Callable[[Any, int], None],
        send_anyway: Callable[[Any, int], None],
        deliver: Callable[[Verdict], None],
        has_come: Callable[[AgreementKey], bool],
        absences: Absences,
        relays: Relays,
    ) -> None:
        self._rank = rank
        self._send = send
        self._send_anyway = send_anyway
        self._deliver = deliver
        self._has_come = has_come
        self._absences = absences
        self.joins: dict[AgreementKey, dict[int, Join]] = {}
        self.over = LateVerdicts()
        self.withdrawn: set[AgreementKey] = set()
        self._relays = relays
        self._has_left = False
        # Of large agreements that are not decided:
        self._direct: dict[AgreementKey, set[int]] = {}  # members whose word counts only where they bring it themselves
        self._called: dict[AgreementKey, tuple[Inquiry, set[int]]] = {}  # time is up; those that are called
        self._doubted: dict[AgreementKey, tuple[Objection, int]] = {}  # counts once a rank says that it has not come

    def decide(self, meeting: Meeting, gone: tuple[int, ...], waited_s: float) -> tuple[Verdict, Join]:
        """Decide about a meeting to which this rank has come, and tell the other members that have.

        Args:
            meeting: of this rank.
            gone: the members that will not come.
            waited_s: for how long the others were waited for.

        Returns:
            The verdict, and what the first member said of those whose values were compared.
        """
        key, ranks = meeting.key, meeting.ranks
        joins = self.joins.pop(key)
        missing = tuple(rank for rank in ranks if rank not in joins)
        said = [rank for rank in ranks if rank in joins and joins[rank].values] or [self._rank]
        verdict = judge(joins, said, missing, gone, self._absences.lost_to(key), waited_s)
        self._tell_others(joins, verdict)
        self._keep_for(missing, verdict)
        return verdict, joins[said[0]]

    def on_join(self, join: Join, source: int) -> None:
        """Note that a member has come to a meeting that this rank leads, or will lead."""
        key = join.key
        if source in self._absences.gone:
            if source not in self._absences.lost and self._relays.carry(key):  # it has left, and still waits for this
                over = self.over.hear(key, source) or self._decided(key)
                self._send_anyway(over or Verdict(key.text, gone=(source,)), source)
            return
        over = self.over.hear(key, source)
        if self._relays.carry(key):
            over = over or self._decided(key)
            if over is None:
                self._direct.setdefault(key, set()).add(source)
        if over is None:
            check_room(self.joins, key)
            self.joins.setdefault(key, {})[source] = join
            self._refuse_if_one_is_gone(key)
            self._on_answer(key, source)
        else:
            self._send(over, source)  # it was decided without this member, which would wait for ever

    def on_gathered(self, gathered: Gathered) -> None:
        """Note that members have come to a large meeting that this rank leads. Raises RemoteProtocolError."""
        key = gathered.key
        ranks = RankSet.of_bits(self._relays.ranks_of(gathered)) - self._absences.gone
        ranks -= {self._rank, *self._direct.get(key, ())}
        overs = [over for rank in ranks if (over := self.over.hear(key, rank)) is not None]
        over = overs[0] if overs else self._decided(key)
        if over is not None:
            self._relays.spread(over, self._rank, ranks.bits)
        elif ranks:
            check_room(self.joins, key)
            join = Join(gathered.subject, gathered.values, gathered.taken, gathered.marks)
            self.joins.setdefault(key, {}).update(dict.fromkeys(ranks, join))
            self._refuse_if_one_is_gone(key)

    def on_not_here(self, answer: NotHere, source: int) -> None:
        """Take the word of a member that another one waits elsewhere for those that have not come: this one has not."""
        key = answer.key
        self._on_answer(key, source)
        if key not in self._doubted or source in self.joins.get(key, ()):
            return
        objection, objector = self._doubted[key]
        if is_in(source, objection.absent) and not objection.is_void(self.joins.get(key, ())):
            self._refuse(objection, objector)

    def _decided(self, key: AgreementKey) -> Verdict | None:
        """Return what is known of a large agreement that is over, or to which this rank does not come any more."""
        heard = self._relays.heard.get((key, self._rank))
        if heard is None and (self._has_left or key.of_all_occurrences in self.withdrawn):
            return Verdict(key.text, gone=(self._rank,))
        return heard

    def on_inquiry(self, inquiry: Inquiry) -> None:
        """Decide with the members that have come, since the timeout of one of them has passed; the others hear later.

        This also happens where this rank has come after that member, and would wait for longer.
        """
        joins = self.joins.get(inquiry.key, {})
        missing = tuple(sorted(inquiry.key.members() - joins.keys()))
        if not joins or not missing:
            return  # the verdict is under way
        if self._relays.carry(inquiry.key):
            if inquiry.key not in self._called:
                self._called[inquiry.key] = inquiry, self._absences.may_come(inquiry.key, missing) - {self._rank}
                self._call(inquiry.key, missing)
                what = WaitId(WaitKind.ROLL_CALL, name=inquiry.key.text)
                self._relays.later(_ROLL_CALL_S, what, self._on_called, inquiry.key)
                self._on_answer(inquiry.key, self._rank)
            return
        self._refuse_without(missing, inquiry)

    def _on_answer(self, key: AgreementKey, source: int) -> None:
        """Note that a rank has answered, where it was called; the last one ends the wait for them."""
        if key in self._called:
            silent = self._called[key][1]
            silent.discard(source)
            if not silent:
                self._on_called(key)

    def _on_called(self, key: AgreementKey) -> None:
        """Refuse an agreement whose time is up, unless all have come."""
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
        said = [rank for rank in sorted(joins) if joins[rank].values] or sorted(joins)
        difference, _ = first_difference(joins, said)
        verdict = Verdict(inquiry.subject, difference=difference, missing=missing, waited_s=inquiry.waited_s)
        self._keep_for(missing, verdict)
        self._tell(joins, verdict)

    def on_objection(self, objection: Objection, source: int) -> None:
        """Refuse what this rank leads, since a member cannot start it: those that have come hear now, others later."""
        key, joins = objection.key, self.joins.get(objection.key, {})
        if self.over.hear(key, source) is not None:
            return  # another member has objected first
        if objection.kind == POSTPONED:
            self._postpone(objection, source)
            return
        has_decided = source != self._rank and self._has_come(key) and self._rank not in joins
        if has_decided or objection.is_void(joins):
            return  # all had come, and the verdict is under way; or those that wait elsewhere have come here, too
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
        self._tell(joins, verdict)

    def on_gone(self, ranks: RankSet) -> None:
        """Note that ranks have left or are lost, and will come to no meeting any more."""
        self.over.on_gone(ranks)
        for key, joins in list(self.joins.items()):  # they gave up waiting
            for rank in ranks & joins:
                del joins[rank]
            if not joins:
                del self.joins[key]
                self._direct.pop(key, None)  # it will fail
            self._refuse_if_one_is_gone(key)

    def leave(self) -> None:
        """Send what has failed to those that may come to it yet, since this rank leads nothing any more."""
        self._has_left = True
        for verdict, absent in self.over.take_all():
            for rank in sorted(absent - {self._rank}):
                with contextlib.suppress(BusyError):
                    self._send(verdict, rank)

    def _postpone(self, objection: Objection, source: int) -> None:
        """Let ``source`` go, which comes again later, unless all have come: then the verdict is under way."""
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

    def _tell(self, ranks: Collection[int], verdict: Verdict) -> None:
        self._tell_others(ranks, verdict)
        if self._rank in ranks:
            self._deliver(verdict)

    def _tell_others(self, ranks: Collection[int], verdict: Verdict) -> None:
        """Tell others a decision; of a large agreement along the tree, but those directly that have spoken directly."""
        key, others = verdict.key, [rank for rank in ranks if rank != self._rank]
        if self._relays.carry(key):
            self._called.pop(key, None)
            self._doubted.pop(key, None)
            direct = self._direct.pop(key, set())
            self._relays.spread(verdict, self._rank, RankSet(set(others) - direct).bits)
            others = [rank for rank in others if rank in direct]
        for rank in others:
            self._send(verdict, rank)

    def _keep_for(self, absent: Iterable[int], verdict: Verdict) -> None:
        """Keep a verdict for those that have not come yet, and may."""
        self.over.keep(verdict, self._absences.may_come(verdict.key, absent))

    def _refuse_if_one_is_gone(self, key: AgreementKey) -> None:
        """Refuse a meeting of a rank that is gone, where others wait for this rank, which leads it and has not come.

        It may never come: when it has heard of a loss earlier than they, it asks for something else without that rank.
        """
        joins = self.joins.get(key, {})
        if not joins or self._rank in joins:
            return
        gone = self._absences.gone_from(key)
        if gone:
            missing = tuple(sorted(key.members() - joins.keys()))
            all_lost = self._absences.lost_to(key)
            lost = tuple(rank for rank in gone if rank in all_lost)
            del self.joins[key]
            verdict = Verdict(key.text, missing=missing, gone=gone, lost=lost)
            self._keep_for(missing, verdict)
            self._tell(joins, verdict)
