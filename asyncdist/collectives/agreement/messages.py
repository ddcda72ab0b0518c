"""The key that identifies an agreement, and the messages of :mod:`asyncdist.collectives.agreement.agreements`.

A message carries its key as a string (:attr:`AgreementKey.text`), which takes fewer bytes than a map of fields. Only
the ``key`` property of a message parses the string.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from asyncdist.errors import RemoteProtocolError

#: Ranks, or other numbers, as runs: the first and the last of each sequence of consecutive numbers.
Runs: TypeAlias = tuple[tuple[int, int], ...]

#: Lost ranks, each with the incarnation of the lost process.
Losses: TypeAlias = tuple[tuple[int, int], ...]

_ON_RANKS: Final = " on ranks "
_TIME: Final = ", time "
_SECOND: Final = ", their turn"


@dataclass(frozen=True, slots=True)
class AgreementKey:
    """Identifies one agreement; equal on all of its ranks.

    Attributes:
        subject: Name of the operation that the ranks start.
        ranks: Members, as runs in their order.
        occurrence: Number of these ranks' attempt at this subject, counted from 1; 0 stands for all attempts.
        is_second: Whether it is the attempt's second agreement (:mod:`asyncdist.collectives.start_turns`).
    """

    subject: str
    ranks: Runs
    occurrence: int = 0
    is_second: bool = False

    def __hash__(self) -> int:
        # Hash only the first run: there may be thousands, and each arriving message is looked up by its key.
        return hash((self.subject, self.occurrence, self.ranks[:1]))

    def __str__(self) -> str:
        """Return the subject and the ranks, ``barrier on ranks 0,2,4-9``; equal for all occurrences."""
        return f"{self.subject}{_ON_RANKS}{_in_words(self.ranks)}"

    @property
    def text(self) -> str:
        """The key as a string for messages: ``barrier on ranks 0-3, time 2``."""
        time = f"{_TIME}{self.occurrence}" if self.occurrence else ""
        return f"{self}{time}{_SECOND if self.is_second else ''}"

    @property
    def of_all_occurrences(self) -> AgreementKey:
        """The key that all attempts have in common."""
        return AgreementKey(self.subject, self.ranks)

    def has_member(self, rank: int) -> bool:
        """Return whether ``rank`` is one of the members."""
        return is_in(rank, self.ranks)

    @property
    def count_of_members(self) -> int:
        """The number of members."""
        return sum(last - first + 1 for first, last in self.ranks)

    def members(self) -> set[int]:
        """Return all members; :meth:`check` bounds their number."""
        return {rank for first, last in self.ranks for rank in range(first, last + 1)}

    def check(self, size: int) -> None:
        """Raise RemoteProtocolError for a key with ranks outside of a world of ``size`` ranks."""
        if not _has_room(self.ranks, size):
            raise RemoteProtocolError(f"{str(self)!r:.200} names ranks that a world of {size} ranks does not have")

    @classmethod
    def of(cls, subject: str, ranks: Sequence[int]) -> AgreementKey:
        """Make the key for all occurrences."""
        return cls(subject, runs_of(tuple(ranks)))

    @classmethod
    def parse(cls, text: str) -> AgreementKey:
        """Make the key from its :attr:`text`.

        Raises:
            RemoteProtocolError: ``text`` is not a key.
        """
        return _parse(text)


@functools.lru_cache(64)
def _in_words(runs: Runs) -> str:
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


@functools.lru_cache(64)
def _parse(text: str) -> AgreementKey:
    first = text.removesuffix(_SECOND)
    subject, _, rest = first.rpartition(_ON_RANKS)
    ranks, _, occurrence = rest.partition(_TIME)
    runs = []
    try:
        for run in ranks.split(","):
            begin, _, end = run.partition("-")
            runs.append((int(begin), int(end or begin)))
        return AgreementKey(subject, tuple(runs), int(occurrence or 0), first != text)
    except ValueError as error:
        raise RemoteProtocolError(f"{text!r:.200} is not the key of an agreement") from error


@functools.lru_cache(64)
def _has_room(runs: Runs, size: int) -> bool:
    return all(0 <= first <= last < size for first, last in runs) and sum(b - a + 1 for a, b in runs) <= size


class Keyed:
    """A message whose ``subject`` is the string of a key."""

    __slots__ = ()

    subject: str

    @property
    def key(self) -> AgreementKey:
        """The agreement that the message belongs to."""
        return _parse(self.subject)


@dataclass(frozen=True, slots=True)
class Join(Keyed):
    """Member to leader: this rank joins the agreement.

    Attributes:
        subject: String of the key.
        values: Named values that must be equal on all ranks.
        taken: Numbers that are in use on this rank.
        marks: This rank's mark, a number that may differ; or empty.
    """

    subject: str
    values: tuple[tuple[str, str], ...]
    taken: Runs
    marks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Objection(Keyed):
    """Member to leader: an exception keeps this rank from starting.

    Attributes:
        subject: String of the key.
        kind: Class name of the exception; empty if members wait for each other in different starts.
        text: Message of the exception.
        absent: If not empty, the objection counts only while one of these ranks has not joined.
    """

    subject: str
    kind: str
    text: str
    absent: Runs = ()

    def is_void(self, present: Collection[int]) -> bool:
        """Return whether all ranks in :attr:`absent` are ``present``, so that the objection does not count."""
        count = sum(last - first + 1 for first, last in self.absent)
        return bool(self.absent) and count <= sum(is_in(rank, self.absent) for rank in present)


@dataclass(frozen=True, slots=True)
class Reminder(Keyed):
    """Leader to a missing member: other ranks are waiting for it.

    Attributes:
        subject: String of the key for all occurrences.
        present: Ranks that have joined.
    """

    subject: str
    present: Runs


@dataclass(frozen=True, slots=True)
class Inquiry(Keyed):
    """Member to leader: this rank's timeout has passed without a verdict; asks which ranks are missing.

    Attributes:
        subject: String of the key.
        waited_s: The timeout, in seconds.
    """

    subject: str
    waited_s: float


@dataclass(frozen=True, slots=True)
class Verdict(Keyed):
    """Leader to member: "go" with the agreed number, or the reason for a refusal.

    Attributes:
        subject: String of the key.
        difference: Name of the value that differs; for an objection, the class name of the exception.
        refusal: Description of the difference; for an objection, the message of the exception.
        missing: Ranks that have not joined in time.
        waited_s: Timeout of the rank whose timeout passed first, in seconds.
        gone: Ranks that have left or are lost, and will not join.
        lost: The lost ranks among ``gone``.
        agreed: Smallest number that no member has taken.
        objector: Rank that objected, or -1.
        marks: Up to two different marks of the members.
    """

    subject: str
    difference: str = ""
    refusal: str = ""
    missing: tuple[int, ...] = ()
    waited_s: float = 0.0
    gone: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    agreed: int = 0
    objector: int = -1
    marks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Raise for a negative number."""
        if self.agreed < 0:
            raise ValueError(f"agreed must be >= 0, got {self.agreed}")


@dataclass(frozen=True, slots=True)
class DecisionRequest(Keyed):
    """Member to member: the leader is gone; asks for its verdict (see ``agreement.termination``).

    Attributes:
        subject: String of the key.
        absent: The leader, and all other ranks from which the sender no longer accepts a verdict.
    """

    subject: str
    absent: Runs


@dataclass(frozen=True, slots=True)
class Undecided(Keyed):
    """Member to member: this rank does not know the verdict, and no longer accepts one from the absent ranks.

    Attributes:
        subject: String of the key.
        absent: Ranks from which it no longer accepts a verdict, including those of the request.
    """

    subject: str
    absent: Runs


@dataclass(frozen=True, slots=True)
class Gathered(Keyed):
    """Member to its parent in the tree of a large agreement: ranks of the sender's subtree have joined.

    Attributes:
        subject: String of the key.
        leader: Rank that decides.
        ranks: Ranks that have joined, and were not named by the sender before.
        values: Their values. If values differ, only the first two different ones are reported exactly; further ranks
            may be listed with the second, since a later difference is never the first.
        taken: Numbers that are in use on some of them.
        marks: Up to two different marks of them.
    """

    subject: str
    leader: int
    ranks: Runs
    values: tuple[tuple[str, str], ...]
    taken: Runs
    marks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Spread(Keyed):
    """Member to its child in the tree of a large agreement: the leader's verdict.

    Attributes:
        verdict: Verdict of the leader.
        leader: Rank of the leader.
        ranks: Ranks in the receiver's subtree for which the verdict is.
    """

    verdict: Verdict
    leader: int
    ranks: Runs

    @property
    def subject(self) -> str:  # type: ignore[override]
        """String of the key."""
        return self.verdict.subject


@dataclass(frozen=True, slots=True)
class RollCall(Keyed):
    """Leader to a member of a large agreement: have you joined? A join may still be on its way in the tree.

    A member that has joined repeats its join to the leader directly.

    Attributes:
        subject: String of the key.
    """

    subject: str


@dataclass(frozen=True, slots=True)
class NotHere(Keyed):
    """Member to leader: this rank has not joined the agreement.

    Attributes:
        subject: String of the key.
    """

    subject: str


@dataclass(frozen=True, slots=True)
class Withdraw(Keyed):
    """Member to member: this rank will never start the subject again.

    Attributes:
        subject: String of the key for all occurrences.
        lost: Ranks that the sender knows to be lost, which may be the reason.
    """

    subject: str
    lost: Losses = ()


@dataclass(frozen=True, slots=True, eq=False)
class Meeting:
    """One start of this rank, which must either join it or stay away from it.

    Attributes:
        key: Key of the agreement.
        ranks: Members.
        leader: Rank that decides.
        began_at: Time of the request for the start, on the loop's clock.
        bound_to: Ranks that are not members, but whose loss ends the agreement.
        outlives_leader: Whether the started operation continues without the leader. Then a verdict that some members
            know counts for all (:mod:`asyncdist.collectives.agreement.termination`).
    """

    key: AgreementKey
    ranks: tuple[int, ...]
    leader: int
    began_at: float
    bound_to: tuple[int, ...] = ()
    outlives_leader: bool = False

    def __str__(self) -> str:
        return repr(str(self.key))


@dataclass(frozen=True, slots=True)
class Agreed:
    """The result of an agreement.

    Attributes:
        number: Smallest number that no member has taken.
        values: Values that all members sent; on a leader that passed none, the values of the first member.
        time: Number of the attempt, counted from 1, including failed attempts. It is equal on all ranks, even if some
            of them missed the verdict of a failed attempt, and must be used to number the started operation.
        marks: Up to two different marks of the members; equal on all ranks.
    """

    number: int
    values: Mapping[str, str]
    time: int = field(default=1, compare=False)
    marks: tuple[int, ...] = field(default=(), compare=False, repr=False)


@functools.lru_cache(64)
def runs_of(ranks: tuple[int, ...]) -> Runs:
    """Convert ranks to runs: the first and the last of each sequence of consecutive ranks."""
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    return tuple(runs)


def is_in(rank: int, runs: Runs) -> bool:
    """Return whether ``rank`` is in one of the runs."""
    return any(first <= rank <= last for first, last in runs)


def merged(taken: Iterable[Runs]) -> Runs:
    """Return the union of ``taken``, in ascending order."""
    runs: list[tuple[int, int]] = []
    for first, last in sorted({run for each in taken for run in each}):
        if runs and first <= runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], max(last, runs[-1][1]))
        else:
            runs.append((first, last))
    return tuple(runs)


def first_two(marks: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the two smallest different numbers in ``marks``, or fewer: enough to know whether all are equal."""
    return tuple(sorted({mark for each in marks for mark in each})[:2])


def first_free(taken: Iterable[Runs]) -> int:
    """Return the smallest number >= 0 that is in none of ``taken``."""
    free = 0
    for first, last in sorted(run for runs in taken for run in runs):
        if first > free:
            break
        free = max(free, last + 1)
    return free
