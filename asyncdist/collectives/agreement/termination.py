"""Ends an agreement whose leader is lost: either all living members learn its verdict, or none of them ever does.

A leader sends its verdict to the members in turn. If it dies in between, the members that have received "go" begin, and
count on the others, which have received nothing. A member without the verdict therefore asks all others, as in the
cooperative termination protocol of two-phase commit (Bernstein, Hadzilacos, Goodman, "Concurrency Control and Recovery
in Database Systems", 1987, section 7.4):

- A member that knows the verdict passes it on.
- A member that does not know it answers so, and promises to accept it from none of the absent ranks: the leader, and
  all others that are gone. Messages of these ranks may still be on their way.
- If all members that are not absent have promised, the verdict is lost, and they start again without the leader.

After that, no member can learn the verdict: the first to learn it would need it from a rank that knows it, but no
present member knows it, and the absent ranks are ignored. If another rank is lost meanwhile, it may have passed the
verdict on to a member that has already answered. Therefore all members are asked again, with that rank among the
absent.

In a large agreement (:mod:`asyncdist.collectives.agreement.relays`) ranks relay the verdict. A rank keeps a verdict
before it relays it, and does not relay one that it has promised not to accept.

A promise holds for one agreement, whose key includes the number of the attempt. A restarted process is not a member of
agreements with its previous process, and does not answer for them.
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

#: Maximum number of agreements whose verdicts or promises are kept.
_KEPT_COUNT_MAX: Final = 64


@dataclass(slots=True)
class _Asking:
    """A question of this rank: the absent ranks, and the members whose answer is outstanding."""

    absent: Set[int] = frozenset()
    silent: set[int] = field(default_factory=set)


class Termination:
    """Passes on the verdicts of lost leaders.

    Args:
        engine: Engine of this rank.
        rank: This rank.
        send: Sends a message to another rank.
    """

    def __init__(self, engine: Engine, rank: int, send: Callable[[Any, int], None]) -> None:
        self._engine = engine
        self._rank = rank
        self._send = send
        self._open: set[AgreementKey] = set()  # agreements for whose verdicts this rank waits
        self._heard: dict[AgreementKey, Verdict] = {}
        self._excluded: dict[AgreementKey, Set[int]] = {}  # by agreement: the ranks from which it accepts no verdict
        self._asking: dict[AgreementKey, _Asking] = {}

    def expect(self, key: AgreementKey) -> None:
        """Note that this rank waits for the verdict of ``key``, so that it is kept for other members."""
        self._open.add(key)

    def expect_no_more(self, key: AgreementKey) -> None:
        """Note that this rank no longer waits for the verdict of ``key``."""
        self._open.discard(key)

    def excludes(self, key: AgreementKey, rank: int) -> bool:
        """Return whether this rank has promised to accept no verdict about ``key`` from ``rank``."""
        return rank in self._excluded.get(key, ())

    def takes(self, verdict: Verdict, source: int) -> bool:
        """Return whether this rank accepts ``verdict`` from ``source``; an accepted verdict is kept for others.

        A second verdict, or one excluded by a promise, is not accepted.
        """
        key = verdict.key
        if key in self._heard or self.excludes(key, source):
            return False
        if key in self._open:
            _keep(self._heard, key, verdict)
        return True

    def keep(self, verdict: Verdict) -> None:
        """Keep a verdict for members that ask for it."""
        _keep(self._heard, verdict.key, verdict)

    def on_request(self, request: DecisionRequest, source: int) -> None:
        """Pass the verdict on, or promise not to accept it from the ranks that ``source`` regards as absent."""
        key = request.key
        if key in self._heard:
            self._send(self._heard[key], source)
            return
        absent = {rank for rank in key.members() if is_in(rank, request.absent)}
        excluded = absent.union(self._excluded.get(key, ()))
        _keep(self._excluded, key, excluded)
        self._send(Undecided(key.text, runs_of(tuple(sorted(excluded)))), source)

    def on_undecided(self, answer: Undecided, source: int) -> None:
        """Note the promise of ``source``. An answer to an earlier question may lack an absent rank."""
        asking = self._asking.get(answer.key)
        if asking is not None and all(is_in(rank, answer.absent) for rank in asking.absent):
            asking.silent.discard(source)

    async def ask(
        self,
        meeting: Meeting,
        gone: Callable[[], tuple[int, ...]],
        is_told: Callable[[], bool],
        on_late: Callable[[tuple[int, ...]], None],
        deadline: float | None,
    ) -> None:
        """Ask the others for the verdict of ``meeting``; return when it has arrived, or can never arrive.

        Args:
            meeting: A meeting whose leader is absent.
            gone: Returns the members that are gone.
            is_told: Returns whether the verdict has arrived.
            on_late: Called once with the members that have not answered by the deadline; the wait continues.
            deadline: Time on the loop's clock, in seconds; or None.
        """
        key = meeting.key
        asking = self._asking[key] = _Asking()

        def absent() -> frozenset[int]:
            return frozenset(gone()).union(self._excluded.get(key, ()))

        def is_over() -> bool:
            return is_told() or not asking.silent or absent() != asking.absent

        try:
            while not is_told() and (asking.silent or absent() != asking.absent):
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
            if not is_told():
                _keep(self._excluded, key, asking.absent)  # their messages may still arrive
        finally:
            del self._asking[key]


def _keep(kept: dict[AgreementKey, Any], key: AgreementKey, value: object) -> None:
    """Store ``value`` under ``key``, and forget the oldest entries beyond the maximum."""
    kept.pop(key, None)
    kept[key] = value
    if len(kept) > _KEPT_COUNT_MAX:
        del kept[next(iter(kept))]
