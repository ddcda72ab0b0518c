"""Judges what the members of an agreement said, and knows who comes to none any more; nothing here waits.

Verdicts are kept for members that come late.
"""

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

#: What the objection of a rank says that comes later, and the verdict that answers it.
POSTPONED: Final = "(postponed)"
#: Agreements of which a rank keeps something that it has been told and not come to. More are no mistake of timing.
_KEPT_COUNT_MAX: Final = 4096


@dataclass(slots=True)
class _LateVerdict:
    """An agreement that failed before all members came; ``absent`` are the members that have not heard of it."""

    verdict: Verdict
    absent: set[int]


class LateVerdicts:
    """Keeps the verdict of each failed agreement until every absent member has come, or is known never to come."""

    def __init__(self) -> None:
        self._kept: dict[AgreementKey, _LateVerdict] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, verdict: Verdict, absent: set[int]) -> None:
        """Keep ``verdict`` for the members in ``absent``; with no such member it is dropped."""
        if absent:
            if len(self._kept) >= _KEPT_COUNT_MAX:  # the oldest is the one that is least likely to be asked for
                del self._kept[next(iter(self._kept))]
            self._kept[verdict.key] = _LateVerdict(verdict, absent)

    def hear(self, key: AgreementKey, rank: int) -> Verdict | None:
        """Return the verdict for ``rank``, which has come to ``key`` now; None where the agreement has not failed."""
        late = self._kept.get(key)
        if late is None:
            return None
        self._expect_no_more(rank, [key])
        return late.verdict

    def on_withdrawn(self, rank: int, key: AgreementKey) -> None:
        """Note that ``rank`` comes to no occurrence of ``key`` any more."""
        self._expect_no_more(rank, [kept for kept in self._kept if kept.of_all_occurrences == key])

    def on_gone(self, ranks: RankSet) -> None:
        """Note that ranks come to no agreement any more."""
        for rank in ranks if self._kept else ():
            self._expect_no_more(rank, list(self._kept))

    def take_all(self) -> list[tuple[Verdict, set[int]]]:
        """Return all verdicts with the members that have not heard them, and keep nothing."""
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
    """Refuse to keep something about one more agreement, where that is no mistake of timing any more."""
    if len(kept) >= _KEPT_COUNT_MAX and key not in kept:
        raise RemoteProtocolError(f"{str(key)!r:.200}: {_KEPT_COUNT_MAX} other agreements are still to come")


class Postponed(Exception):
    """This rank is to meet again, later: see :meth:`Agreements.postpone`."""


class Caller(Protocol):
    """Is told how far a start has come, and may give it up meanwhile; see ``collectives.agreed_start.Start``."""

    def on_asked(self) -> None:
        """This rank has told the leader that it has come, or is about to."""

    def on_time_up(self, error: StartTimeoutError) -> None:
        """The leader has not answered in time. This rank goes on waiting, since the answer may have been go."""


class Absentees:
    """Finds the ranks because of which a meeting cannot end well.

    Args:
        ranks: the members.
        bound_to: ranks whose loss ends it though they are no members.
        left: all ranks that have left the world or are lost; grows.
        lost: those of them that are lost; grows.
        withdrawn: the members that never come to this subject again; grows.
        replaced: returns the members that were lost, and in whose place there is a new process.
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
        """Return the members that will not come, in the order of the group, and then the lost ranks beside them."""
        replaced = self._replaced()
        if not self._left and not self._withdrawn and not replaced:
            return ()
        absent = tuple(rank for rank in self._ranks if any(rank in s for s in (self._left, self._withdrawn, replaced)))
        return absent + self.lost_beside()

    def lost_beside(self) -> tuple[int, ...]:
        """Return the lost ranks that are no members, and whose loss ends the meeting."""
        return tuple(rank for rank in self._bound_to if rank in self._lost)


class Absences:
    """Knows which ranks come to no agreement any more.

    Args:
        incarnations: of the ranks that have been started again.

    Attributes:
        gone: all ranks that have left the world or are lost.
        lost: those of them that are lost.
        withdrawn: the members that never come to a subject again, by its key for all occurrences.
    """

    def __init__(self, incarnations: Incarnations) -> None:
        self._incarnations = incarnations
        self.gone = RankSet()
        self.lost: set[int] = set()
        self.withdrawn: dict[AgreementKey, set[int]] = {}

    def of(self, meeting: Meeting) -> Absentees:
        """Return those of one meeting; it follows what comes to be known."""
        withdrawn = self.withdrawn.setdefault(meeting.key.of_all_occurrences, set())
        replaced = functools.partial(self._incarnations.replaced, meeting.key)
        return Absentees(meeting.ranks, meeting.bound_to, self.gone, self.lost, withdrawn, replaced)

    def lost_to(self, key: AgreementKey) -> set[int]:
        """Return the ranks that are lost, and the members in whose place there is another process."""
        return self.lost.union(self._incarnations.replaced(key))

    def gone_from(self, key: AgreementKey) -> tuple[int, ...]:
        """Return the members that have left or are lost to it, in ascending order."""
        return tuple(sorted({*filter(key.has_member, self.gone), *self._incarnations.replaced(key)}))

    def may_come(self, key: AgreementKey, ranks: Iterable[int]) -> set[int]:
        """Return those of ``ranks`` that may come yet."""
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
    """Decide about an agreement to which some members have come.

    Args:
        joins: what these members said, by rank.
        said: those of them whose values are compared, in the group's order; at least one.
        missing: the other members.
        gone: the members that will not come.
        lost: all ranks that are lost.
        waited_s: for how long they were waited for.
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
    """Compare what ``ranks`` said with what the first of them said.

    Returns:
        The name of the first value that differs, and a sentence about it; both empty when all are equal.
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
    """Raise the error that ``verdict`` stands for on ``rank``, unless it says go."""
    if verdict.objector >= 0:
        raise remote_error(verdict.objector, verdict.difference, verdict.refusal)
    if verdict.lost:
        are = "are" if len(verdict.lost) > 1 else "is"
        raise RankLostError(f"{verdict.key}: {_name(verdict.lost)} {are} lost", rank=verdict.lost[0])
    if verdict.gone:
        raise ClosedError(f"{verdict.key}: {_name(verdict.gone)} left", ranks=verdict.gone)
    if verdict.missing:
        raise _too_late_error(verdict, rank) if rank in verdict.missing else start_timeout_error(verdict)
    if verdict.refusal:
        raise DisagreementError(f"{verdict.key}: {verdict.refusal}", difference=verdict.difference)


def is_go(verdict: Verdict) -> bool:
    """Whether ``verdict`` lets the members start."""
    return not (verdict.refusal or verdict.missing or verdict.gone) and verdict.objector < 0


def start_timeout_error(verdict: Verdict) -> StartTimeoutError:
    """Make the error that names the missing ranks, and in ``difference`` the value in which the other ranks differ."""
    difference = {"difference": verdict.difference} if verdict.difference else {}
    return StartTimeoutError(
        f"{verdict.key}: {_name(verdict.missing)} did not come within {verdict.waited_s:g} s",
        missing=verdict.missing,
        **difference,
    )


def _too_late_error(verdict: Verdict, rank: int) -> StartTimeoutError:
    """Make the error of a rank that came after the others had given up."""
    return StartTimeoutError(
        f"{verdict.key}: rank {rank} came too late: the ranks that had come before gave up after {verdict.waited_s:g} "
        "s; allowed: another start, in which all ranks take part",
        missing=verdict.missing,
    )


def _name(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
