"""Decides agreements from the members' joins, and keeps verdicts for late members; nothing here waits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from asyncdist.collectives.agreement.incarnations import Incarnations
from asyncdist.collectives.agreement.messages import AgreementKey, Join, Meeting, Verdict, first_free, first_two
from asyncdist.errors import (
    ClosedError,
    DisagreementError,
    RankLostError,
    RemoteProtocolError,
    StartTimeoutError,
    remote_error,
)
from asyncdist.transports.rank_sets import RankSet
from asyncdist.wording import ranks_in_words

#: The kind of a postponing rank's objection, and of the verdict that answers it.
POSTPONED: Final = "(postponed)"
#: Maximum number of agreements that a rank has messages for and has not joined; more cannot result from timing.
_KEPT_COUNT_MAX: Final = 4096


@dataclass(slots=True)
class _LateVerdict:
    """The verdict of an agreement that failed before all joined; ``absent`` are the members that do not know it."""

    verdict: Verdict
    absent: set[int]


class LateVerdicts:
    """Keeps the verdict of each failed agreement until every absent member has joined, or will never join."""

    def __init__(self) -> None:
        self._kept: dict[AgreementKey, _LateVerdict] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, verdict: Verdict, absent: set[int]) -> None:
        """Keep ``verdict`` for the members in ``absent``; with no such member it is dropped."""
        if absent:
            if len(self._kept) >= _KEPT_COUNT_MAX:  # forget the oldest, which is the least likely to be needed
                del self._kept[next(iter(self._kept))]
            self._kept[verdict.key] = _LateVerdict(verdict, absent)

    def hear(self, key: AgreementKey, rank: int) -> Verdict | None:
        """Return the verdict for ``rank``, which joins ``key`` now; None if the agreement has not failed."""
        late = self._kept.get(key)
        if late is None:
            return None
        self._expect_no_more(rank, [key])
        return late.verdict

    def on_withdrawn(self, rank: int, key: AgreementKey) -> None:
        """Note that ``rank`` has withdrawn from ``key``."""
        self._expect_no_more(rank, [kept for kept in self._kept if kept.of_all_occurrences == key])

    def on_gone(self, ranks: RankSet) -> None:
        """Note that ranks are gone, and join no further agreement."""
        for rank in ranks if self._kept else ():
            self._expect_no_more(rank, list(self._kept))

    def take_all(self) -> list[tuple[Verdict, set[int]]]:
        """Remove and return all verdicts, each with the members that do not know it."""
        kept = [(late.verdict, late.absent) for late in self._kept.values()]
        self._kept.clear()
        return kept

    def _expect_no_more(self, rank: int, keys: Iterable[AgreementKey]) -> None:
        for key in keys:
            late = self._kept[key]
            late.absent.discard(rank)
            if not late.absent:
                del self._kept[key]


def check_room(kept: Mapping[AgreementKey, object], key: AgreementKey) -> None:
    """Raise RemoteProtocolError if ``kept`` is full, which timing alone cannot explain."""
    if len(kept) >= _KEPT_COUNT_MAX and key not in kept:
        raise RemoteProtocolError(f"{str(key)!r:.200}: {_KEPT_COUNT_MAX} other agreements are still to come")


class Postponed(Exception):
    """The leader has released this rank, which is to meet again later: see :meth:`Agreements.postpone`."""


class Caller(Protocol):
    """Receives the progress of a start, and may abandon it; see ``collectives.agreed_start.Start``."""

    def on_asked(self) -> None:
        """Note that this rank has joined, or is about to join."""

    def on_time_up(self, error: StartTimeoutError) -> None:
        """Note that the leader has not answered in time. The wait continues, since the verdict may be "go"."""


class Absentees:
    """Finds the ranks because of which a meeting cannot succeed.

    Args:
        ranks: Members.
        bound_to: Ranks that are not members, but whose loss ends the meeting.
        left: All ranks that have left the world or are lost; a growing set.
        lost: All lost ranks; a growing set.
        withdrawn: Members that have withdrawn from the subject; a growing set.
        replaced: Returns the members that were lost and restarted.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        bound_to: Sequence[int],
        left: Collection[int],
        lost: set[int],
        withdrawn: set[int],
        replaced: Callable[[], Collection[int]] = tuple,
    ) -> None:
        self._ranks = ranks
        self._bound_to = bound_to
        self._left = left
        self._lost = lost
        self._withdrawn = withdrawn
        self._replaced = replaced

    def ranks(self) -> tuple[int, ...]:
        """Return the members that will not join, in the order of the group, and then lost ranks of ``bound_to``."""
        replaced = self._replaced()
        if not self._left and not self._withdrawn and not replaced:
            return ()
        absent = tuple(rank for rank in self._ranks if any(rank in s for s in (self._left, self._withdrawn, replaced)))
        return absent + self.lost_beside()

    def lost_beside(self) -> tuple[int, ...]:
        """Return the lost ranks of ``bound_to``."""
        return tuple(rank for rank in self._bound_to if rank in self._lost)


class Absences:
    """Tracks the ranks that join no further agreement.

    Args:
        incarnations: Incarnations of restarted ranks.

    Attributes:
        gone: All ranks that have left the world or are lost.
        lost: All lost ranks.
        withdrawn: Members that have withdrawn from a subject, by its key for all occurrences.
    """

    def __init__(self, incarnations: Incarnations) -> None:
        self._incarnations = incarnations
        self.gone = RankSet()
        self.lost: set[int] = set()
        self.withdrawn: dict[AgreementKey, set[int]] = {}

    def of(self, meeting: Meeting) -> Absentees:
        """Return a view of the absent ranks of one meeting."""
        withdrawn = self.withdrawn.setdefault(meeting.key.of_all_occurrences, set())
        replaced = functools.partial(self._incarnations.replaced, meeting.key)
        return Absentees(meeting.ranks, meeting.bound_to, self.gone, self.lost, withdrawn, replaced)

    def lost_to(self, key: AgreementKey) -> set[int]:
        """Return the lost ranks, and the members of ``key`` that were restarted."""
        return self.lost.union(self._incarnations.replaced(key))

    def gone_from(self, key: AgreementKey) -> tuple[int, ...]:
        """Return the members of ``key`` that have left or are lost, in ascending order."""
        return tuple(sorted({*filter(key.has_member, self.gone), *self._incarnations.replaced(key)}))

    def may_come(self, key: AgreementKey, ranks: Iterable[int]) -> set[int]:
        """Return the ranks among ``ranks`` that may still join."""
        withdrawn = self.withdrawn.get(key.of_all_occurrences, ())
        return {rank for rank in ranks if rank not in self.gone and rank not in withdrawn}


def judge(
    joins: Mapping[int, Join],
    said: Sequence[int],
    missing: tuple[int, ...],
    gone: tuple[int, ...],
    lost: set[int],
    waited_s: float,
) -> Verdict:
    """Decide an agreement that some members have joined.

    Args:
        joins: Joins of these members by rank.
        said: Members whose values are compared, in the group's order; at least one.
        missing: Members that have not joined.
        gone: Members that will not join.
        lost: All lost ranks.
        waited_s: Seconds that the leader has waited.
    """
    name, refusal = first_difference(joins, said)
    return Verdict(
        subject=joins[said[0]].subject,
        difference=name,
        refusal="" if missing else refusal,
        missing=missing,
        waited_s=waited_s,
        gone=gone,
        lost=tuple(rank for rank in gone if rank in lost),
        agreed=first_free(entry.taken for entry in joins.values()),
        marks=first_two(entry.marks for entry in joins.values()),
    )


def first_difference(joins: Mapping[int, Join], ranks: Sequence[int]) -> tuple[str, str]:
    """Compare the values of ``ranks`` with those of the first of them.

    Returns:
        The name of the first value that differs, and its description; both empty if all values are equal.
    """
    first = ranks[0]
    expected = dict(joins[first].values)
    for rank in ranks[1:]:
        if joins[rank].values == joins[first].values:
            continue
        given = dict(joins[rank].values)
        for name in sorted(expected.keys() | given.keys()):
            mine, theirs = expected.get(name, "nothing"), given.get(name, "nothing")
            if mine != theirs:
                return name, f"{name} is {mine} on rank {first} and {theirs} on rank {rank}"
    return "", ""


def raise_refusal(verdict: Verdict, rank: int) -> None:
    """Raise the error of ``verdict`` on ``rank``, unless the verdict is "go"."""
    if verdict.objector >= 0:
        raise remote_error(verdict.objector, verdict.difference, verdict.refusal)
    if verdict.lost:
        are = "are" if len(verdict.lost) > 1 else "is"
        raise RankLostError(f"{verdict.key}: {ranks_in_words(verdict.lost)} {are} lost", rank=verdict.lost[0])
    if verdict.gone:
        raise ClosedError(f"{verdict.key}: {ranks_in_words(verdict.gone)} left", ranks=verdict.gone)
    if verdict.missing:
        raise _too_late_error(verdict, rank) if rank in verdict.missing else start_timeout_error(verdict)
    if verdict.refusal:
        raise DisagreementError(f"{verdict.key}: {verdict.refusal}", difference=verdict.difference)


def is_go(verdict: Verdict) -> bool:
    """Return whether ``verdict`` is "go"."""
    return not (verdict.refusal or verdict.missing or verdict.gone) and verdict.objector < 0


def start_timeout_error(verdict: Verdict) -> StartTimeoutError:
    """Make the error that names the missing ranks, and in ``difference`` the value in which the other ranks differ."""
    difference = {"difference": verdict.difference} if verdict.difference else {}
    return StartTimeoutError(
        f"{verdict.key}: {ranks_in_words(verdict.missing)} did not join within {verdict.waited_s:g} s",
        missing=verdict.missing,
        **difference,
    )


def _too_late_error(verdict: Verdict, rank: int) -> StartTimeoutError:
    """Make the error of a rank that joined after the others had given up."""
    return StartTimeoutError(
        f"{verdict.key}: rank {rank} joined too late, after the other ranks had given up after {verdict.waited_s:g} s; "
        "start again on all ranks",
        missing=verdict.missing,
    )
