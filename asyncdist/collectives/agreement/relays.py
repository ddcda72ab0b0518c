"""Relays messages of large groups along a tree: the members' *joins* up to the leader, and its decision down to them.

The leader is the root (:mod:`asyncdist.collectives.agreement.tree_shape`). A rank reports its subtree's joins to its
parent when the whole subtree has joined. If some ranks are late, it reports after a delay, which doubles each time.

All other messages are sent directly to the leader. The sender first repeats its join directly, so that the leader
receives both in order. A member also repeats its join directly if a rank that may have relayed its join or the decision
is lost or has left. The leader answers a direct join directly. It can do so even after its decision, because ranks
store the latest decisions. Copies of a decision may arrive on several paths. Only the first copy is used.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from asyncdist.collectives.agreement.absences import Absences
from asyncdist.collectives.agreement.messages import (
    AgreementKey,
    Gathered,
    Join,
    NotHere,
    RollCall,
    Runs,
    Spread,
    Verdict,
    first_two,
    merged,
    runs_of,
)
from asyncdist.collectives.agreement.tree_shape import DIRECT_COUNT_MAX, halves, path_to
from asyncdist.collectives.agreement.verdicts import POSTPONED
from asyncdist.errors import AsyncdistError, BusyError, RemoteProtocolError
from asyncdist.transports.rank_sets import RankSet
from asyncdist.waits import WaitId, WaitKind

if TYPE_CHECKING:
    from asyncdist.messaging.engine import Engine, Timer

logger = logging.getLogger(__name__)

#: Seconds, per level of its subtree, that a rank waits for late ranks before it reports the joined ranks. The delay
#: doubles with each report, up to the maximum.
_LATE_S: Final = 0.05
_LATE_MAX_S: Final = 30.0
#: Maximum number of stored decisions, of agreements with unreported joins, and of agreements that are remembered
#: because their decision has arrived.
_KEPT_COUNT_MAX: Final = 1024


@dataclass(frozen=True, slots=True)
class _TreePosition:
    """Position of one rank in the tree of an agreement.

    Attributes:
        parts: Pairs of a child's rank and the ranks in that child's subtree.
        everybody: All ranks in this rank's subtree, including this rank.
        levels: Number of tree levels below this rank.
    """

    parent: int
    parts: tuple[tuple[int, RankSet], ...]
    everybody: RankSet
    levels: int


@dataclass(slots=True)
class _SubtreeJoins:
    """Joins of one agreement that have arrived from this rank's subtree.

    Attributes:
        ranks: Ranks that have joined.
        ranks_by_values: Joined ranks not yet reported to the parent, for each set of named values.
        taken: Resource numbers, such as group tags, in use on unreported ranks.
        marks: Up to two different numbers that unreported ranks passed as their ``mark``.
        late_count: Number of reports sent to the parent.
    """

    ranks: RankSet = field(default_factory=RankSet)
    ranks_by_values: dict[tuple[tuple[str, str], ...], RankSet] = field(default_factory=dict)
    taken: Runs = ()
    marks: tuple[int, ...] = ()
    late_count: int = 0
    timer: Timer | None = None

    def stop_timer(self) -> None:
        """Cancel the timer, if any, after which the unreported joins are reported."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class Relays:
    """Relays, on one rank, the joins of the members of large groups, and the leaders' decisions.

    Attributes:
        decisions: Received decisions, by agreement and leader.
    """

    def __init__(self, engine: Engine, rank: int, send: Callable[[Any, int], None], gone: Collection[int]) -> None:
        self._engine = engine
        self._rank = rank
        self._send = send
        self._gone = gone
        self._is_on = not engine.transport.may_return  # A restarted rank could not relay for its previous process.
        self._subtree_joins: dict[tuple[AgreementKey, int], _SubtreeJoins] = {}
        self._has_left = False
        self.decisions: dict[tuple[AgreementKey, int], Verdict] = {}

    def carry(self, key: AgreementKey) -> bool:
        """Return whether the group of agreement ``key`` is so large that its messages are relayed along a tree."""
        return self._is_on and key.count_of_members > DIRECT_COUNT_MAX

    def join(self, join: Join, leader: int) -> None:
        """Record that this rank joins an agreement, and report this to its parent in the tree immediately or later."""
        self._note(join, leader, RankSet((self._rank,)))

    def on_gathered(self, gathered: Gathered) -> None:
        """Record that ranks in this rank's subtree have joined, and report this to its parent immediately or later."""
        self._note(gathered, gathered.leader, self.ranks_of(gathered))

    def ranks_of(self, message: Gathered | Spread) -> RankSet:
        """Return a message's ranks. Raise RemoteProtocolError if a rank is not in this rank's subtree."""
        position = self._position(message.key, message.leader)
        are_ranks = all(0 <= first <= last < self._engine.transport.size for first, last in message.ranks)
        ranks = RankSet()
        for first, last in message.ranks if are_ranks else ():
            ranks |= range(first, last + 1)
        if not ranks or ranks - position.everybody:
            raise RemoteProtocolError(
                f"the message {message!r:.200} names ranks that are not below rank {self._rank} in the tree"
            )
        return ranks

    def spread(self, verdict: Verdict, leader: int, ranks: RankSet) -> None:
        """Store a decision, and relay it to those of ``ranks`` that are below this rank in the tree."""
        key = verdict.key
        self.decisions[key, leader] = verdict
        if len(self.decisions) > _KEPT_COUNT_MAX:
            del self.decisions[next(iter(self.decisions))]
        position = self._position(key, leader)
        if leader != self._rank:
            self._pass_on(key, leader)  # The leader has not yet answered joins that arrived late.
            self._forget(key, leader)
        for child, part in position.parts:
            some = ranks & part
            if child in self._gone:
                for rank in some:
                    self._send(verdict, rank)
            elif some:
                self._send(Spread(verdict, leader, runs_of(tuple(some))), child)

    def later(self, delay_s: float, what: WaitId, call: Callable[..., None], *args: Any) -> None:
        """Call ``call(*args)``, which may send messages or deliver a decision, after ``delay_s`` seconds."""

        def run() -> None:
            with contextlib.suppress(AsyncdistError):  # Raised if the job has failed.
                call(*args)
            self._engine.recheck()

        self._engine.call_later(delay_s, what, run)

    def leave(self) -> None:
        """Report all joins to the parent now, and later joins without delay, because this rank is leaving."""
        self._has_left = True
        for key, leader in list(self._subtree_joins):
            self._pass_on(key, leader)
            self._forget(key, leader)

    def _note(self, message: Join | Gathered, leader: int, ranks: RankSet) -> None:
        key, values = message.key, message.values
        position = self._position(key, leader)
        joins = self._subtree_joins.setdefault((key, leader), _SubtreeJoins())
        joins.ranks |= ranks
        joins.ranks_by_values[values] = joins.ranks_by_values.get(values, RankSet()) | ranks
        joins.taken = merged((joins.taken, message.taken))
        joins.marks = first_two((joins.marks, message.marks))
        if joins.ranks == position.everybody or self._has_left or (key, leader) in self.decisions:
            self._pass_on(key, leader)
            self._forget(key, leader)
        elif joins.timer is None:
            delay_s = min(_LATE_S * position.levels * 2**joins.late_count, _LATE_MAX_S)
            joins.timer = self._engine.call_later(delay_s, _late(key), self._on_late, key, leader)
            if len(self._subtree_joins) > _KEPT_COUNT_MAX:
                oldest = next(iter(self._subtree_joins))
                self._on_late(*oldest)
                self._forget(*oldest)

    def _on_late(self, key: AgreementKey, leader: int) -> None:
        joins = self._subtree_joins[key, leader]
        joins.stop_timer()
        try:
            self._pass_on(key, leader)
        except BusyError:
            joins.timer = self._engine.call_later(_LATE_S, _late(key), self._on_late, key, leader)
        except AsyncdistError as error:  # Raised if the job has failed.
            logger.debug("%s: %s", key, error)

    def _pass_on(self, key: AgreementKey, leader: int) -> None:
        """Send the unreported joins to the parent, or to the leader if the parent is lost or has left."""
        joins = self._subtree_joins.get((key, leader))
        if joins is None or not joins.ranks_by_values:
            return
        parent = self._position(key, leader).parent
        for values, ranks in self._first_differing(joins.ranks_by_values, key, leader):
            message = Gathered(key.text, leader, runs_of(tuple(ranks)), values, joins.taken, joins.marks)
            self._send(message, leader if parent in self._gone else parent)
        joins.ranks_by_values, joins.taken, joins.marks = {}, (), ()
        joins.late_count += 1
        joins.stop_timer()

    @staticmethod
    def _first_differing(
        ranks_by_values: dict[tuple[tuple[str, str], ...], RankSet], key: AgreementKey, leader: int
    ) -> Iterator[tuple[tuple[tuple[str, str], ...], RankSet]]:
        """Yield up to three pairs of named values and the ranks that passed them.

        The pairs are for ranks without values, ranks with the first values, and all other ranks, which are reported
        with the second values (see :class:`Gathered`).
        """
        if () in ranks_by_values:
            yield (), ranks_by_values[()]
        differing = [(values, ranks) for values, ranks in ranks_by_values.items() if values]
        if len(differing) > 2:
            order = _order(key.ranks, leader)
            differing.sort(key=lambda each: min(map(order.__getitem__, each[1])))
            differing[1] = differing[1][0], functools.reduce(RankSet.__or__, (ranks for _, ranks in differing[1:]))
        yield from differing[:2]

    def _forget(self, key: AgreementKey, leader: int) -> None:
        joins = self._subtree_joins.pop((key, leader), None)
        if joins is not None:
            joins.stop_timer()

    def _position(self, key: AgreementKey, leader: int) -> _TreePosition:
        if self._rank not in _order(key.ranks, leader) or not 0 <= leader < self._engine.transport.size:
            raise RemoteProtocolError(f"rank {self._rank} is not a member of the agreement {str(key)!r:.200}")
        return _position(key.ranks, leader, self._rank)


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
        """Answer a leader that asks whether this rank has joined the leader's agreement."""
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


@functools.lru_cache(64)
def _late(key: AgreementKey) -> WaitId:
    return WaitId(WaitKind.GATHERED_MEMBERS, name=key.text)


@functools.lru_cache(64)  # In a simulation, all ranks of a group share the result.
def _order(runs: Runs, leader: int) -> Mapping[int, int]:
    """Return the position of each rank in the tree: first the leader, then the other members in the group's order."""
    ranks = (leader, *itertools.chain.from_iterable(range(first, last + 1) for first, last in runs))
    return {rank: position for position, rank in enumerate(dict.fromkeys(ranks))}


@functools.lru_cache(64)
def _in_order(runs: Runs, leader: int) -> tuple[int, ...]:
    return tuple(_order(runs, leader))


@functools.lru_cache(4096)
def _position(runs: Runs, leader: int, rank: int) -> _TreePosition:
    order = _in_order(runs, leader)
    position = _order(runs, leader)[rank]
    above, last = path_to(len(order), position)
    parts = tuple((order[first], RankSet(order[first : end + 1])) for first, end in halves(position, last))
    return _TreePosition(
        order[above[-1]] if above else rank,
        parts,
        RankSet(order[position : last + 1]),
        (last - position + 1).bit_length() - 1,
    )
