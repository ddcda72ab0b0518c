"""Keeps one rank's joins of large agreements (:mod:`asyncdist.collectives.agreement.relays`).

A join is repeated directly to the leader if it may have been lost or overtaken in the tree. Of the verdicts of one
agreement, which may arrive on several paths, only the first is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from asyncdist.collectives.agreement.messages import AgreementKey, Join, NotHere, RollCall, Verdict
from asyncdist.collectives.agreement.relays import Relays
from asyncdist.collectives.agreement.verdicts import POSTPONED, Absences
from asyncdist.transports.rank_sets import RankSet

#: Maximum number of agreements of which a rank remembers that it has received the verdict.
_KEPT_COUNT_MAX: Final = 1024


class Comings:
    """Joins large agreements for one rank.

    Args:
        relays: Relays of this rank.
        absences: Ranks that join no agreement.
        send: Sends a message to another rank, even if it has left, unless it is lost.
    """

    def __init__(self, relays: Relays, absences: Absences, send: Callable[[Any, int], None]) -> None:
        self._relays = relays
        self._absences = absences
        self._send = send
        self._open: dict[AgreementKey, tuple[Join, int]] = {}  # undecided agreements: this rank's join, and the leader
        self._direct: set[AgreementKey] = set()  # agreements that it has also joined directly
        self._told: dict[AgreementKey, None] = {}  # agreements whose verdicts it has received

    def come(self, join: Join, leader: int) -> None:
        """Join an agreement: along the tree, or directly if a rank of the tree is gone."""
        key = join.key
        self._open[key] = join, leader
        if key in self._direct or self._absences.gone_from(key):
            self.say_directly(key, leader)
        else:
            self._relays.join(join, leader)

    def say_directly(self, key: AgreementKey, leader: int) -> bool:
        """Repeat the join to the leader; return False if this rank does not wait for its verdict about ``key``."""
        join, its_leader = self._open.get(key, (None, -1))
        if join is None or its_leader != leader:
            return False
        self._direct.add(key)
        self._send(join, leader)
        return True

    def end(self, key: AgreementKey) -> None:
        """Note that this rank no longer waits; it may join a postponed agreement again."""
        self._open.pop(key, None)
        if not key.is_second or key in self._told:
            self._direct.discard(key)

    def takes(self, verdict: Verdict) -> bool:
        """Return whether this rank has not received ``verdict`` before."""
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
        """Answer a leader that asks whether this rank has joined."""
        has_said = self.say_directly(call.key, source)
        if not has_said and call.key not in self._told and source not in self._absences.gone:
            self._send(NotHere(call.subject), source)

    def on_gone(self, ranks: RankSet) -> None:
        """Repeat joins to the leader if these ranks may have failed to pass on the join or the verdict."""
        for key, (_, leader) in list(self._open.items()):
            if any(map(key.has_member, ranks)):
                self.say_directly(key, leader)

    def on_withdrawn(self, source: int, key: AgreementKey) -> None:
        """Ask a leader that has withdrawn from ``key`` for its verdict."""
        for each, (_, leader) in list(self._open.items()):
            if leader == source and each.of_all_occurrences == key:
                self.say_directly(each, leader)
