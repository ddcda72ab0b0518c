"""Ends an agreement whose leader is lost: either all members that live hear its verdict, or none of them ever does.

A leader tells its verdict to one member after the other. If it dies between two of them, those that have heard "go"
begin, and count on the others, who have heard nothing. So a member that has not heard asks all the others, as in the
cooperative termination protocol of two-phase commit (Bernstein, Hadzilacos, Goodman, "Concurrency Control and Recovery
in Database Systems", 1987, section 7.4):

- One that has heard the verdict passes it on, and the member that asks takes it.
- One that has not heard says so, and promises to take it from none of the ranks any more that the asking member counts
  as absent: the leader, and all others that are gone. Something that these have said may still be on its way.
- When all that are not absent have promised, the verdict is lost, and the members begin anew without the leader.

That is right, since none of them can hear the verdict after that. The first one to hear it would have to be told by a
rank that knows it; of those that are not absent none does, and the absent ones are not listened to. If another rank is
gone meanwhile, it may have passed the verdict on before, to a member that has already answered: so all are asked once
more, with that rank among the absent ones.

In a large agreement (:mod:`asyncdist.collectives.agreement.relays`) the one that tells a rank the verdict is the one
that passes it on: it keeps it before, and passes on none that it has promised not to take.

The promise holds for one agreement, whose key has the number of the attempt. A process that was started again is no
member of what was agreed on with the one before, and does not answer for it.
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

#: Agreements whose verdicts are kept for others that ask, and of those that this rank has promised something about.
_KEPT_COUNT_MAX: Final = 64


@dataclass(slots=True)
class _Asking:
    """What this rank has asked: without which ranks, and of whom it waits for the answer."""

    absent: Set[int] = frozenset()
    silent: set[int] = field(default_factory=set)


class Termination:
    """Passes verdicts on where their leader is lost.

    Args:
        engine: of this rank.
        rank: this rank.
        send: sends a message to another rank.
    """

    def __init__(self, engine: Engine, rank: int, send: Callable[[Any, int], None]) -> None:
        self._engine = engine
        self._rank = rank
        self._send = send
        self._open: set[AgreementKey] = set()  # this rank waits for their verdicts
        self._heard: dict[AgreementKey, Verdict] = {}
        self._excluded: dict[AgreementKey, Set[int]] = {}  # what it has promised
        self._asking: dict[AgreementKey, _Asking] = {}

    def expect(self, key: AgreementKey) -> None:
        """Keep the verdict of ``key``, for which this rank waits now, for others that ask for it."""
        self._open.add(key)

    def expect_no_more(self, key: AgreementKey) -> None:
        """Note that this rank does not wait for it any more."""
        self._open.discard(key)

    def excludes(self, key: AgreementKey, rank: int) -> bool:
        """Return whether this rank has promised to take no verdict about ``key`` from ``rank``."""
        return rank in self._excluded.get(key, ())

    def takes(self, verdict: Verdict, source: int) -> bool:
        """Return whether this rank may take ``verdict``, which ``source`` has sent; if so, it passes it on from now on.

        It takes no second one, nor what it has promised not to take.
        """
        key = verdict.key
        if key in self._heard or self.excludes(key, source):
            return False
        if key in self._open:
            _keep(self._heard, key, verdict)
        return True

    def keep(self, verdict: Verdict) -> None:
        """Keep a verdict for others that ask, before this rank passes it on to them by itself."""
        _keep(self._heard, verdict.key, verdict)

    def on_request(self, request: DecisionRequest, source: int) -> None:
        """Pass the verdict on, or promise not to take it from those that ``source`` counts as absent."""
        key = request.key
        if key in self._heard:
            self._send(self._heard[key], source)
            return
        absent = {rank for rank in key.members() if is_in(rank, request.absent)}
        excluded = absent.union(self._excluded.get(key, ()))
        _keep(self._excluded, key, excluded)
        self._send(Undecided(key.text, runs_of(tuple(sorted(excluded)))), source)

    def on_undecided(self, answer: Undecided, source: int) -> None:
        """Note what ``source`` has promised. An answer to an earlier question may lack an absent rank."""
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
        """Ask the others for the verdict of ``meeting``; returns when it has come, or none of them ever hears it.

        Args:
            meeting: whose leader is absent.
            gone: returns the members that are gone.
            is_told: returns whether the verdict has come.
            on_late: called once with those that have not answered by the deadline; the answer is waited for on.
            deadline: on the loop's clock, or None.
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
                _keep(self._excluded, key, asking.absent)  # what these have said may come yet
        finally:
            del self._asking[key]


def _keep(kept: dict[AgreementKey, Any], key: AgreementKey, value: object) -> None:
    """Keep something about the newest agreements."""
    kept.pop(key, None)
    kept[key] = value
    if len(kept) > _KEPT_COUNT_MAX:
        del kept[next(iter(kept))]
