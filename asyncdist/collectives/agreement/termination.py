"""Ends agreements whose leader is lost. Either all living members receive its decision, or none does.

If a leader is lost while it sends its decision, some members may have received "go" and started. A member without the
decision therefore asks all others, as in the cooperative termination protocol of two-phase commit (Bernstein,
Hadzilacos, Goodman, "Concurrency Control and Recovery in Database Systems", 1987, section 7.4):

- A member that has received the decision sends it to the asking member.
- Any other member answers that it is undecided. It promises not to accept the decision from an absent rank, whose
  messages may still be in transit. Absent ranks are the leader, and all other ranks that are lost or have left.
- If all present members have promised, no member can receive the decision, and they start again without the leader. If
  another rank is lost before that, all members are asked again, with this rank among the absent ranks.

In a large group (:mod:`asyncdist.collectives.agreement.relays`), a rank stores a decision before it relays it. It does
not relay a decision that it has promised not to accept.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from asyncdist.collectives.agreement.messages import (
    AgreementKey,
    DecisionRequest,
    Meeting,
    Undecided,
    Verdict,
    is_in,
    runs_of,
)
from asyncdist.waits import WaitId, WaitKind

if TYPE_CHECKING:
    from asyncdist.messaging.engine import Engine

#: Maximum number of agreements whose decisions are stored. The same limit applies to stored promises.
_KEPT_COUNT_MAX: Final = 64


@dataclass(slots=True)
class _Asking:
    """A request for a lost leader's decision, with the absent ranks and the members that have not yet answered."""

    absent: Set[int] = frozenset()
    silent: set[int] = field(default_factory=set)


class Termination:
    """Asks other members for the decisions of lost leaders, and answers such requests of other members."""

    def __init__(self, engine: Engine, rank: int, send: Callable[[Any, int], None]) -> None:
        self._engine = engine
        self._rank = rank
        self._send = send
        self._open: set[AgreementKey] = set()  # agreements for whose decisions this rank is waiting
        self._received_verdicts: dict[AgreementKey, Verdict] = {}
        self._excluded: dict[AgreementKey, Set[int]] = {}  # ranks from which no decision is accepted, by agreement
        self._asking: dict[AgreementKey, _Asking] = {}

    def expect(self, key: AgreementKey) -> None:
        """Record that this rank is waiting for the decision of agreement ``key`` and must store it for others."""
        self._open.add(key)

    def stop_expecting(self, key: AgreementKey) -> None:
        """Record that this rank is no longer waiting for the decision of agreement ``key``."""
        self._open.discard(key)

    def excludes(self, key: AgreementKey, rank: int) -> bool:
        """Return whether this rank has promised not to accept the decision of agreement ``key`` from ``rank``."""
        return rank in self._excluded.get(key, ())

    def accepts(self, verdict: Verdict, source: int) -> bool:
        """Return whether ``verdict`` is new and may be accepted from ``source``.

        If this rank is waiting for the decision, also store it.
        """
        key = verdict.key
        if key in self._received_verdicts or self.excludes(key, source):
            return False
        if key in self._open:
            _keep(self._received_verdicts, key, verdict)
        return True

    def keep(self, verdict: Verdict) -> None:
        """Store a decision for members that ask for it later."""
        _keep(self._received_verdicts, verdict.key, verdict)

    def on_request(self, request: DecisionRequest, source: int) -> None:
        """Send ``source`` the decision or, without one, a promise not to accept it from the request's absent ranks."""
        key = request.key
        if key in self._received_verdicts:
            self._send(self._received_verdicts[key], source)
            return
        absent = {rank for rank in key.members() if is_in(rank, request.absent)}
        excluded = absent.union(self._excluded.get(key, ()))
        _keep(self._excluded, key, excluded)
        self._send(Undecided(key.text, runs_of(tuple(sorted(excluded)))), source)

    def on_undecided(self, answer: Undecided, source: int) -> None:
        """Record the promise of ``source``, unless it answers an earlier request that omits a rank now absent."""
        asking = self._asking.get(answer.key)
        if asking is not None and all(is_in(rank, answer.absent) for rank in asking.absent):
            asking.silent.discard(source)

    async def ask(
        self,
        meeting: Meeting,
        gone: Callable[[], tuple[int, ...]],
        is_decided: Callable[[], bool],
        on_late: Callable[[tuple[int, ...]], None],
        deadline: float | None,
    ) -> None:
        """Ask the other members for the decision on ``meeting``. Return when it has arrived or can no longer arrive.

        Args:
            on_late: Function called once, at the deadline, with the members that have not answered. The wait then
                continues.
        """
        key = meeting.key
        asking = self._asking[key] = _Asking()

        def absent() -> frozenset[int]:
            return frozenset(gone()).union(self._excluded.get(key, ()))

        def is_over() -> bool:
            return is_decided() or not asking.silent or absent() != asking.absent

        try:
            while not is_decided() and (asking.silent or absent() != asking.absent):
                if absent() != asking.absent:
                    asking.absent = absent()
                    asking.silent = set(meeting.ranks).difference(asking.absent, (self._rank,))
                    request = DecisionRequest(key.text, runs_of(tuple(sorted(asking.absent))))
                    for rank in sorted(asking.silent):
                        self._send(request, rank)
                what = WaitId(WaitKind.VERDICT_WITHOUT_LEADER, number=meeting.leader, name=key.text)
                if not await self._engine.until(is_over, what, deadline=deadline):
                    on_late(tuple(sorted(asking.silent)))
                    deadline = None
            if not is_decided():
                _keep(self._excluded, key, asking.absent)  # Messages of the absent ranks may still be in transit.
        finally:
            del self._asking[key]


def _keep(kept: dict[AgreementKey, Any], key: AgreementKey, value: object) -> None:
    kept.pop(key, None)
    kept[key] = value
    if len(kept) > _KEPT_COUNT_MAX:
        del kept[next(iter(kept))]
