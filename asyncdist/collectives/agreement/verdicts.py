"""Decides agreements from the members' joins, stores decisions for late members, and converts refusals to errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from asyncdist.collectives.agreement.messages import AgreementKey, Join, Verdict, first_free, first_two
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

#: Kind of the objection with which a rank asks to join later, and of the decision that releases this rank.
POSTPONED: Final = "(postponed)"
#: Maximum number of agreements that a rank has not joined but for which it stores messages.
_KEPT_COUNT_MAX: Final = 4096


class LateDecisions:
    """Stores the decision of each failed agreement until every absent member has joined or can no longer join."""

    def __init__(self) -> None:
        # Each decision, with the members that have not received it.
        self._kept: dict[AgreementKey, tuple[Verdict, set[int]]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, verdict: Verdict, absent: set[int]) -> None:
        """Store ``verdict`` for the members in ``absent``, if there are any."""
        if absent:
            if len(self._kept) >= _KEPT_COUNT_MAX:
                del self._kept[next(iter(self._kept))]
            self._kept[verdict.key] = verdict, absent

    def decision_for(self, key: AgreementKey, rank: int) -> Verdict | None:
        """Return the decision of agreement ``key`` for ``rank``, which has just joined, or None if undecided."""
        if key not in self._kept:
            return None
        verdict, _ = self._kept[key]
        self._expect_no_more(rank, [key])
        return verdict

    def on_withdrawn(self, rank: int, key: AgreementKey) -> None:
        """Stop storing decisions for ``rank``, which never starts operation ``key`` again."""
        self._expect_no_more(rank, [kept for kept in self._kept if kept.of_all_occurrences == key])

    def on_gone(self, ranks: RankSet) -> None:
        """Stop storing decisions for ``ranks``, which will join no further agreements."""
        for rank in ranks if self._kept else ():
            self._expect_no_more(rank, list(self._kept))

    def take(self, operation: AgreementKey | None = None) -> list[tuple[Verdict, set[int]]]:
        """Remove and return the decisions on ``operation``, or on all operations.

        Each decision is paired with the members that have not received it.
        """
        keys = [key for key in self._kept if operation in (None, key.of_all_occurrences)]
        return [self._kept.pop(key) for key in keys]

    def _expect_no_more(self, rank: int, keys: Iterable[AgreementKey]) -> None:
        for key in keys:
            _, absent = self._kept[key]
            absent.discard(rank)
            if not absent:
                del self._kept[key]


def check_room(kept: Mapping[AgreementKey, object], key: AgreementKey) -> None:
    """Raise RemoteProtocolError if ``kept`` has no room for agreement ``key``. Only faulty peers cause this."""
    if len(kept) >= _KEPT_COUNT_MAX and key not in kept:
        raise RemoteProtocolError(
            f"the agreement {str(key)!r:.200} exceeds the limit of {_KEPT_COUNT_MAX} unfinished agreements"
        )


class Postponed(Exception):
    """Raised if the leader has released this rank from an agreement at this rank's request.

    The rank must join again.
    """


def judge(
    joins: Mapping[int, Join],
    compared: Sequence[int],
    missing: tuple[int, ...],
    gone: tuple[int, ...],
    lost: set[int],
    waited_s: float,
) -> Verdict:
    """Return the leader's decision on an agreement that some members have joined.

    Args:
        compared: One or more members whose values are compared, in the group's order.
    """
    name, refusal = first_difference(joins, compared)
    return Verdict(
        subject=joins[compared[0]].subject,
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
    """Compare the named values of ``ranks``. Return the name and a description of the first difference.

    Both strings are empty if all values are equal.
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
    """Raise the error with which ``verdict`` refuses the start on ``rank``. Do nothing if the decision is "go"."""
    if verdict.objector >= 0:
        raise remote_error(verdict.objector, verdict.difference, verdict.refusal)
    if verdict.lost:
        are = "are" if len(verdict.lost) > 1 else "is"
        raise RankLostError(f"{verdict.key} failed: {ranks_in_words(verdict.lost)} {are} lost", rank=verdict.lost[0])
    if verdict.gone:
        raise ClosedError(f"{verdict.key} failed: {ranks_in_words(verdict.gone)} left the world", ranks=verdict.gone)
    if verdict.missing:
        raise _too_late_error(verdict, rank) if rank in verdict.missing else start_timeout_error(verdict)
    if verdict.refusal:
        raise DisagreementError(f"{verdict.key}: {verdict.refusal}", difference=verdict.difference)


def allows_start(verdict: Verdict) -> bool:
    """Return whether the decision ``verdict`` allows the members to start."""
    return not (verdict.refusal or verdict.missing or verdict.gone) and verdict.objector < 0


def start_timeout_error(verdict: Verdict) -> StartTimeoutError:
    """Return the error that names the missing ranks.

    Its ``difference`` names a value on which the other ranks differ.
    """
    difference = {"difference": verdict.difference} if verdict.difference else {}
    return StartTimeoutError(
        f"{verdict.key}: {ranks_in_words(verdict.missing)} did not join within {verdict.waited_s:g} s",
        missing=verdict.missing,
        **difference,
    )


def _too_late_error(verdict: Verdict, rank: int) -> StartTimeoutError:
    return StartTimeoutError(
        f"{verdict.key}: rank {rank} joined too late, because the other ranks waited only {verdict.waited_s:g} s; "
        "start again on all ranks",
        missing=verdict.missing,
    )
