"""Sends the messages with which one rank joins agreements (*joins*) of large groups, and filters repeated decisions.

Joins and decisions of large groups are relayed along a tree (:mod:`asyncdist.collectives.agreement.relays`). If a join
may have been lost on the way, the rank sends it again, directly to the leader. Copies of a decision may arrive on
several paths. Only the first copy is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from asyncdist.collectives.agreement.messages import AgreementKey, Join, NotHere, RollCall, Verdict
from asyncdist.collectives.agreement.relays import Relays
from asyncdist.collectives.agreement.verdicts import POSTPONED, Absences
from asyncdist.transports.rank_sets import RankSet

#: Maximum number of agreements that are remembered because their decision has arrived.
_KEPT_COUNT_MAX: Final = 1024


class JoinSender:
    """Sends one rank's join messages for agreements of large groups, and ignores repeated decisions."""

    def __init__(self, relays: Relays, absences: Absences, send: Callable[[Any, int], None]) -> None:
        self._relays = relays
        self._absences = absences
        self._send = send
        self._open: dict[AgreementKey, tuple[Join, int]] = {}  # this rank's joins without a decision, and their leaders
        self._direct: set[AgreementKey] = set()  # agreements whose join was also sent directly to the leader
        self._decided: dict[AgreementKey, None] = {}  # agreements whose decision has arrived

    def join(self, join: Join, leader: int) -> None:
        """Send the join message to the leader along the tree, or directly if a member is lost or has left."""
        key = join.key
        self._open[key] = join, leader
        if key in self._direct or self._absences.gone_members(key):
            self.send_directly(key, leader)
        else:
            self._relays.join(join, leader)

    def send_directly(self, key: AgreementKey, leader: int) -> bool:
        """Send this rank's join message directly to the leader.

        Return False if this rank awaits no decision from that leader.
        """
        join, its_leader = self._open.get(key, (None, -1))
        if join is None or its_leader != leader:
            return False
        self._direct.add(key)
        self._send(join, leader)
        return True

    def end(self, key: AgreementKey) -> None:
        """Stop waiting for the decision of agreement ``key``.

        This rank may join again if the agreement was postponed.
        """
        self._open.pop(key, None)
        if not key.is_second or key in self._decided:
            self._direct.discard(key)

    def is_first_copy(self, verdict: Verdict) -> bool:
        """Return whether ``verdict`` is the first copy of its decision that has arrived."""
        if verdict.difference == POSTPONED:
            return True
        if verdict.key in self._decided:
            return False
        self._open.pop(verdict.key, None)
        self._decided[verdict.key] = None
        if len(self._decided) > _KEPT_COUNT_MAX:
            del self._decided[next(iter(self._decided))]
        return True

    def on_roll_call(self, call: RollCall, source: int) -> None:
        """Answer a leader's question whether this rank has joined its agreement."""
        has_sent = self.send_directly(call.key, source)
        if not has_sent and call.key not in self._decided and source not in self._absences.gone:
            self._send(NotHere(call.subject), source)

    def on_gone(self, ranks: RankSet) -> None:
        """Repeat joins directly to their leaders if one of ``ranks`` may have failed to relay a message."""
        for key, (_, leader) in list(self._open.items()):
            if any(map(key.has_member, ranks)):
                self.send_directly(key, leader)

    def on_withdrawn(self, source: int, key: AgreementKey) -> None:
        """Repeat joins to ``source``, a leader that never starts operation ``key`` again.

        The leader answers each join with its decision.
        """
        for each, (_, leader) in list(self._open.items()):
            if leader == source and each.of_all_occurrences == key:
                self.send_directly(each, leader)
