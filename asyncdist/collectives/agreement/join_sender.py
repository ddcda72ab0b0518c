"""Sends one rank's messages that it joins an agreement (*joins*) in large groups, and accepts the decisions.

Joins and decisions of large groups are relayed along a tree (:mod:`asyncdist.collectives.agreement.relays`). If a join
may have been lost there, the rank repeats it directly to the leader. Copies of a decision may arrive on several paths.
Only the first copy is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from asyncdist.collectives.agreement.messages import AgreementKey, Join, NotHere, RollCall, Verdict
from asyncdist.collectives.agreement.relays import Relays
from asyncdist.collectives.agreement.verdicts import POSTPONED, Absences
from asyncdist.transports.rank_sets import RankSet

#: Maximum number of agreements whose decisions are remembered as received.
_KEPT_COUNT_MAX: Final = 1024


class JoinSender:
    """Sends the messages with which one rank joins agreements of large groups, and ignores repeated decisions."""

    def __init__(self, relays: Relays, absences: Absences, send: Callable[[Any, int], None]) -> None:
        self._relays = relays
        self._absences = absences
        self._send = send
        self._open: dict[AgreementKey, tuple[Join, int]] = {}  # this rank's joins without a decision, and their leaders
        self._direct: set[AgreementKey] = set()  # agreements whose join was also sent directly to the leader
        self._told: dict[AgreementKey, None] = {}  # agreements whose decision has arrived

    def join(self, join: Join, leader: int) -> None:
        """Send the message ``join`` to the leader along the tree, or directly if a member is lost or has left."""
        key = join.key
        self._open[key] = join, leader
        if key in self._direct or self._absences.gone_from(key):
            self.send_directly(key, leader)
        else:
            self._relays.join(join, leader)

    def send_directly(self, key: AgreementKey, leader: int) -> bool:
        """Send this rank's join message directly to the leader. Return False if this rank awaits no decision."""
        join, its_leader = self._open.get(key, (None, -1))
        if join is None or its_leader != leader:
            return False
        self._direct.add(key)
        self._send(join, leader)
        return True

    def end(self, key: AgreementKey) -> None:
        """Stop waiting for the decision of agreement ``key``. This rank may join a postponed agreement again."""
        self._open.pop(key, None)
        if not key.is_second or key in self._told:
            self._direct.discard(key)

    def takes(self, verdict: Verdict) -> bool:
        """Return whether ``verdict`` is the first copy of its decision that has arrived."""
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
        """Answer a leader that asks whether this rank has joined its agreement."""
        has_said = self.send_directly(call.key, source)
        if not has_said and call.key not in self._told and source not in self._absences.gone:
            self._send(NotHere(call.subject), source)

    def on_gone(self, ranks: RankSet) -> None:
        """Repeat joins to their leaders if one of ``ranks`` may have failed to relay a join or a decision."""
        for key, (_, leader) in list(self._open.items()):
            if any(map(key.has_member, ranks)):
                self.send_directly(key, leader)

    def on_withdrawn(self, source: int, key: AgreementKey) -> None:
        """Repeat joins to ``source``, a leader that never starts operation ``key`` again, to request its decision."""
        for each, (_, leader) in list(self._open.items()):
            if leader == source and each.of_all_occurrences == key:
                self.send_directly(each, leader)
