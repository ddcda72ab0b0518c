"""The leader's side of agreements: gathers the members that come to those that this rank leads, and decides.

:mod:`asyncdist.collectives.agreement.agreements` waits; nothing here does. A decision goes to all members that have
come. One that fails before all have is kept for the others, who hear it when they come.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

from asyncdist.collectives.agreement.messages import AgreementKey, Inquiry, Join, Meeting, Objection, Verdict
from asyncdist.collectives.agreement.verdicts import POSTPONED, Absences, LateVerdicts, check_room, judge
from asyncdist.errors import BusyError
from asyncdist.transports.rank_sets import RankSet


class LedAgreements:
    """Decides about the agreements that this rank leads.

    Args:
        rank: this rank.
        send: sends a message to another rank.
        deliver: takes a verdict that this rank gets from itself.
        has_come: whether this rank has come to an agreement, or gone on from it.
        absences: the ranks that come to none.

    Attributes:
        joins: the members that have come to each agreement that is not decided, with what they said.
        over: what has failed and not all members have heard of.
    """

    def __init__(
        self,
        rank: int,
        send: Callable[[Any, int], None],
        deliver: Callable[[Verdict], None],
        has_come: Callable[[AgreementKey], bool],
        absences: Absences,
    ) -> None:
        self._rank = rank
        self._send = send
        self._deliver = deliver
        self._has_come = has_come
        self._absences = absences
        self.joins: dict[AgreementKey, dict[int, Join]] = {}
        self.over = LateVerdicts()

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
        for rank in joins:
            if rank != self._rank:
                self._send(verdict, rank)
        self._keep_for(missing, verdict)
        return verdict, joins[said[0]]

    def on_join(self, join: Join, source: int) -> None:
        """Note that a member has come to a meeting that this rank leads, or will lead."""
        if source in self._absences.gone:
            return  # lost since it sent this
        over = self.over.hear(join.key, source)
        if over is None:
            check_room(self.joins, join.key)
            self.joins.setdefault(join.key, {})[source] = join
            self._refuse_if_one_is_gone(join.key)
        else:
            self._send(over, source)  # it was decided without this member, which would wait for ever

    def on_inquiry(self, inquiry: Inquiry) -> None:
        """Decide with the members that have come, since the timeout of one of them has passed; the others hear later.

        This also happens where this rank has come after that member, and would wait for longer.
        """
        joins = self.joins.get(inquiry.key, {})
        missing = tuple(sorted(inquiry.key.members() - joins.keys()))
        if not joins or not missing:
            return  # the verdict is under way
        verdict = Verdict(inquiry.subject, missing=missing, waited_s=inquiry.waited_s)
        del self.joins[inquiry.key]
        self._keep_for(missing, verdict)
        self._tell(joins, verdict)

    def on_objection(self, objection: Objection, source: int) -> None:
        """Refuse what this rank leads, since a member cannot start it: those that have come hear now, others later."""
        key, subject, joins = objection.key, objection.subject, self.joins.get(objection.key, {})
        if self.over.hear(key, source) is not None:
            return  # another member has objected first
        if objection.kind == POSTPONED:
            self._postpone(objection, source)
            return
        has_decided = source != self._rank and self._has_come(key) and self._rank not in joins
        if has_decided or objection.is_void(joins):
            return  # all had come, and the verdict is under way; or those that wait elsewhere have come here, too
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
            self._refuse_if_one_is_gone(key)

    def leave(self) -> None:
        """Send what has failed to those that may come to it yet, since this rank answers nobody any more."""
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
            self._tell([source], Verdict(objection.subject, difference=POSTPONED, objector=source))

    def _tell(self, ranks: Iterable[int], verdict: Verdict) -> None:
        for rank in ranks:
            if rank == self._rank:
                self._deliver(verdict)
            else:
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
