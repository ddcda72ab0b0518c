"""Keeps what one rank has said to the leaders of large agreements (:mod:`asyncdist.collectives.agreement.relays`).

It says so once more, to the leader itself, where its word may be lost or overtaken; and it takes one verdict of each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from asyncdist.collectives.agreement.messages import AgreementKey, Join, NotHere, RollCall, Verdict
from asyncdist.collectives.agreement.relays import Relays
from asyncdist.collectives.agreement.verdicts import POSTPONED, Absences
from asyncdist.transports.rank_sets import RankSet

#: Agreements of which a rank knows that it has heard their verdict.
_KEPT_COUNT_MAX: Final = 1024


class Comings:
    """Says that one rank comes to large agreements.

    Args:
        relays: of this rank.
        absences: the ranks that come to none.
        send: sends a message to another rank, also to one that has left, unless it is lost.
    """

    def __init__(self, relays: Relays, absences: Absences, send: Callable[[Any, int], None]) -> None:
        self._relays = relays
        self._absences = absences
        self._send = send
        self._open: dict[AgreementKey, tuple[Join, int]] = {}  # what this rank has said, with the leader; it waits
        self._direct: set[AgreementKey] = set()  # it has said so to the leader itself
        self._told: dict[AgreementKey, None] = {}  # it has heard their verdicts

    def come(self, join: Join, leader: int) -> None:
        """Say that this rank has come: along the tree, where nobody in it is gone."""
        key = join.key
        self._open[key] = join, leader
        if key in self._direct or self._absences.gone_from(key):
            self.say_directly(key, leader)
        else:
            self._relays.join(join, leader)

    def say_directly(self, key: AgreementKey, leader: int) -> bool:
        """Say it to the leader itself; returns False where it waits for no verdict of ``leader`` about ``key``."""
        join, its_leader = self._open.get(key, (None, -1))
        if join is None or its_leader != leader:
            return False
        self._direct.add(key)
        self._send(join, leader)
        return True

    def end(self, key: AgreementKey) -> None:
        """Note that this rank does not wait any more; it may come again to one that it has asked to come to later."""
        self._open.pop(key, None)
        if not key.is_second or key in self._told:
            self._direct.discard(key)

    def takes(self, verdict: Verdict) -> bool:
        """Return whether ``verdict`` is one that this rank has not heard."""
        if verdict.difference == POSTPONED:
            return True
        if verdict.key in self._told:
            return False
        self._open.pop(verdict.key, None)
        self._told[verdict.key] = None
        if len(self._told) > _KEPT_COUNT_MAX:
            del self._told[next(iter(self._told))]
        return True

    def on_roll_call(self, call: RollCall, source: int) -> None:
        """Answer a leader that asks whether this rank has come."""
        has_said = self.say_directly(call.key, source)
        if not has_said and call.key not in self._told and source not in self._absences.gone:
            self._send(NotHere(call.subject), source)

    def on_gone(self, ranks: RankSet) -> None:
        """Repeat to the leader what these ranks may have been told to pass on; or its answer to that."""
        for key, (_, leader) in list(self._open.items()):
            if any(map(key.has_member, ranks)):
                self.say_directly(key, leader)

    def on_withdrawn(self, source: int, key: AgreementKey) -> None:
        """Ask a leader that comes to no occurrence of ``key`` any more what it has decided."""
        for each, (_, leader) in list(self._open.items()):
            if leader == source and each.of_all_occurrences == key:
                self.say_directly(each, leader)
