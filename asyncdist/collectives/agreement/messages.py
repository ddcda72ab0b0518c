"""The key that identifies an agreement, and the messages of :mod:`asyncdist.collectives.agreement.agreements`.

A message carries its key as text (:attr:`AgreementKey.text`), since a string takes fewer bytes than a map of fields.
The ``key`` property of a message parses that text; nothing else reads it.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from asyncdist.errors import RemoteProtocolError

#: Ranks, or other numbers, in their order: the first and the last of each run without a gap, which is short also for
#: thousands of them.
Runs: TypeAlias = tuple[tuple[int, int], ...]

#: Ranks that are lost, each with the incarnation of the process that has died.
Losses: TypeAlias = tuple[tuple[int, int], ...]

_ON_RANKS: Final = " on ranks "
_TIME: Final = ", time "
_SECOND: Final = ", their turn"


@dataclass(frozen=True, slots=True)
class AgreementKey:
    """Identifies one agreement; equal on all of its ranks.

    Attributes:
        subject: names what the ranks start.
        ranks: the members, in their order.
        occurrence: attempt number of these ranks at this subject, counted from 1; 0 stands for all attempts.
        is_second: whether it is the attempt's second agreement (:mod:`asyncdist.collectives.start_turns`).
    """

    subject: str
    ranks: Runs
    occurrence: int = 0
    is_second: bool = False

    def __hash__(self) -> int:
        # The first run only: there may be thousands, and each message that arrives is looked up by its key.
        return hash((self.subject, self.occurrence, self.ranks[:1]))

    def __str__(self) -> str:
        """Return the subject and its ranks, ``barrier on ranks 0,2,4-9``, which is the same for all occurrences."""
        return f"{self.subject}{_ON_RANKS}{_in_words(self.ranks)}"

    @property
    def text(self) -> str:
        """The key as it travels in messages: ``barrier on ranks 0-3, time 2``."""
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
        """Return all members; :meth:`check` has seen that they are no more than the ranks of the world."""
        return {rank for first, last in self.ranks for rank in range(first, last + 1)}

    def check(self, size: int) -> None:
        """Refuse a key of ranks that a world of ``size`` ranks cannot have. Raises RemoteProtocolError."""
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
            RemoteProtocolError: a peer sent something else.
        """
        return _parse(text)


@functools.lru_cache(64)
def _in_words(runs: Runs) -> str:
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return ``rank 3``, or ``ranks 0,2,4-9``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {_in_words(runs_of(tuple(ranks)))}"


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
    """A message whose ``subject`` is the text of a key."""

    __slots__ = ()

    subject: str

    @property
    def key(self) -> AgreementKey:
        """The agreement that the message belongs to."""
        return _parse(self.subject)


@dataclass(frozen=True, slots=True)
class Join(Keyed):
    """Member to leader: this rank is about to start the agreement, with these values.

    Attributes:
        subject: the key's text.
        values: what must be equal on all ranks, by name.
        taken: numbers that are in use on this rank.
        marks: a number that is not compared, if this rank has one.
    """

    subject: str
    values: tuple[tuple[str, str], ...]
    taken: Runs
    marks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Objection(Keyed):
    """Member to leader: this rank cannot start, because of an exception that it raised.

    Attributes:
        subject: the key's text.
        kind: the exception's class; empty where members disagree.
        text: the exception's message.
        absent: where members disagree: it counts only while one of these has not come. Empty: it counts.
    """

    subject: str
    kind: str
    text: str
    absent: Runs = ()

    def is_void(self, present: Collection[int]) -> bool:
        """Return whether all ranks that are ``absent`` as far as the sender knows are ``present``."""
        count = sum(last - first + 1 for first, last in self.absent)
        return bool(self.absent) and count <= sum(is_in(rank, self.absent) for rank in present)


@dataclass(frozen=True, slots=True)
class Reminder(Keyed):
    """Leader to a missing member: other ranks are waiting for it.

    Attributes:
        subject: the text of the key for all occurrences.
        present: the ranks that have come.
    """

    subject: str
    present: Runs


@dataclass(frozen=True, slots=True)
class Inquiry(Keyed):
    """Member to leader: this rank's timeout has passed without a verdict, and it asks which ranks are missing.

    Attributes:
        subject: the key's text.
        waited_s: the timeout that has passed.
    """

    subject: str
    waited_s: float


@dataclass(frozen=True, slots=True)
class Verdict(Keyed):
    """Leader to member: go, with the agreed number, or the reason against it.

    Attributes:
        subject: the key's text.
        difference: the name of the value that differs; of an objection, the exception's class.
        refusal: a sentence; of an objection, the exception's message.
        missing: the ranks that have not come in time.
        waited_s: the timeout of the rank whose timeout passed first.
        gone: the ranks that have left or are lost, and will not come.
        lost: those of ``gone`` that are lost.
        agreed: the smallest number that no member has taken.
        objector: the rank that objected, or -1.
        marks: up to two different numbers of those that members have marked themselves with.
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
        """Refuse a number that no leader of ours agrees on."""
        if self.agreed < 0:
            raise ValueError(f"the agreed number is {self.agreed}; allowed: 0 or more")


@dataclass(frozen=True, slots=True)
class DecisionRequest(Keyed):
    """Member to member: the leader is gone, and this rank has heard no verdict (see ``agreement.termination``).

    Attributes:
        subject: the key's text.
        absent: the leader, and all other ranks that the sender takes no verdict from any more.
    """

    subject: str
    absent: Runs


@dataclass(frozen=True, slots=True)
class Undecided(Keyed):
    """Member to member: this rank has heard no verdict, either, and takes none from these ranks any more.

    Attributes:
        subject: the key's text.
        absent: those of the request among them.
    """

    subject: str
    absent: Runs


@dataclass(frozen=True, slots=True)
class Gathered(Keyed):
    """Member to the one above it in the tree of a large agreement: these ranks, itself or below it, have come.

    Attributes:
        subject: the key's text.
        leader: the rank that decides.
        ranks: those that have come, and that no message of the sender has named before.
        values: what they said. Of the values that differ below the sender it names the first two, each for the first
            rank that said so; the rest may be named with the second, since their difference is never the first.
        taken: numbers that are in use on some of them.
        marks: up to two different numbers of those that some of them have marked themselves with.
    """

    subject: str
    leader: int
    ranks: Runs
    values: tuple[tuple[str, str], ...]
    taken: Runs
    marks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Spread(Keyed):
    """Member to one below it in the tree of a large agreement: the leader's verdict, for these ranks.

    Attributes:
        verdict: of the leader.
        leader: that rank.
        ranks: those that it is for, the receiver or below it.
    """

    verdict: Verdict
    leader: int
    ranks: Runs

    @property
    def subject(self) -> str:  # type: ignore[override]
        """The key's text."""
        return self.verdict.subject


@dataclass(frozen=True, slots=True)
class RollCall(Keyed):
    """Leader to a member of a large agreement: has this rank come? What it has said may be on its way in the tree.

    A rank that has come says to the leader itself what it has said in the tree.

    Attributes:
        subject: the key's text.
    """

    subject: str


@dataclass(frozen=True, slots=True)
class NotHere(Keyed):
    """Member to leader: this rank has not come to the agreement.

    Attributes:
        subject: the key's text.
    """

    subject: str


@dataclass(frozen=True, slots=True)
class Withdraw(Keyed):
    """Member to member: this rank will never start the subject again.

    Attributes:
        subject: the text of the key for all occurrences.
        lost: ranks that the sender knows to be lost, which may be why it withdraws.
    """

    subject: str
    lost: Losses = ()


@dataclass(frozen=True, slots=True, eq=False)
class Meeting:
    """One start of this rank, which must either come to it or stay away from it.

    Attributes:
        key: of the agreement.
        ranks: its members.
        leader: the rank that decides.
        began_at: when the start was asked for, on the loop's clock.
        bound_to: ranks that are not members, and whose loss ends it all the same.
        outlives_leader: whether what starts goes on without its leader; then a verdict that some members have heard
            counts for all (:mod:`asyncdist.collectives.agreement.termination`).
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
        number: the smallest number that no member has taken.
        values: the values that all members sent; on a leader that passed none, those of the first member.
        time: attempt number, counted from 1, failed attempts included; equal on all ranks, also when some of them did
            not hear of a failure. What starts must be numbered by it: a rank that missed a verdict would count one
            less than the rest.
        marks: up to two different numbers of those that members have marked themselves with; equal on all ranks.
    """

    number: int
    values: Mapping[str, str]
    time: int = field(default=1, compare=False)
    marks: tuple[int, ...] = field(default=(), compare=False, repr=False)


@functools.lru_cache(64)
def runs_of(ranks: tuple[int, ...]) -> Runs:
    """Write ranks as runs: the first and the last of those that follow each other."""
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
    """Return the numbers that are in one of ``taken``, in ascending order."""
    runs: list[tuple[int, int]] = []
    for first, last in sorted({run for each in taken for run in each}):
        if runs and first <= runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], max(last, runs[-1][1]))
        else:
            runs.append((first, last))
    return tuple(runs)


def first_two(marks: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the two smallest numbers that are in one of ``marks``, or fewer: enough to know whether they differ."""
    return tuple(sorted({mark for each in marks for mark in each})[:2])


def first_free(taken: Iterable[Runs]) -> int:
    """Return the smallest number, from 0, that is in none of ``taken``."""
    free = 0
    for first, last in sorted(run for runs in taken for run in runs):
        if first > free:
            break
        free = max(free, last + 1)
    return free
