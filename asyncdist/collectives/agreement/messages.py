"""Messages of agreements, and the key that identifies an agreement.

A message contains the key as a string (:attr:`AgreementKey.text`), which takes fewer bytes than a map of fields. The
message's ``key`` property parses the string.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from asyncdist.errors import RemoteProtocolError
from asyncdist.messaging.wire import cached_for_ranks

#: Compressed list of numbers, such as ranks: the first and the last number of each run of consecutive numbers.
Runs: TypeAlias = tuple[tuple[int, int], ...]

#: Lost ranks, each with the number of restarts of its lost process.
Losses: TypeAlias = tuple[tuple[int, int], ...]

_ON_RANKS: Final = " on ranks "
_TIME: Final = ", time "
_SECOND: Final = ", their turn"


@dataclass(frozen=True, slots=True)
class AgreementKey:
    """Identity of one agreement, equal on all members.

    Attributes:
        subject: Name of the operation that the members start.
        occurrence: Number of this start of the operation by these ranks, from 1, or 0 in a key for all starts.
        is_second: Whether this is the second agreement of a start (:class:`asyncdist.collectives.agreed_start.Turns`).
    """

    subject: str
    ranks: Runs
    occurrence: int = 0
    is_second: bool = False

    def __hash__(self) -> int:
        # Only the first run of ranks is hashed. There may be thousands of runs, and each arriving message is looked up.
        return hash((self.subject, self.occurrence, self.ranks[:1]))

    def __str__(self) -> str:
        """Return the operation and the ranks, for example ``barrier on ranks 0,2,4-9``, equal for all its starts."""
        return f"{self.subject}{_ON_RANKS}{_in_words(self.ranks)}"

    @property
    def text(self) -> str:
        """The key as a string for messages, for example ``barrier on ranks 0-3, time 2``."""
        time = f"{_TIME}{self.occurrence}" if self.occurrence else ""
        return f"{self}{time}{_SECOND if self.is_second else ''}"

    @property
    def of_all_occurrences(self) -> AgreementKey:
        """Key for all starts of the operation by these ranks."""
        return AgreementKey(self.subject, self.ranks)

    def has_member(self, rank: int) -> bool:
        """Return whether ``rank`` is one of the members."""
        return is_in(rank, self.ranks)

    @property
    def count_of_members(self) -> int:
        """Number of members."""
        return sum(last - first + 1 for first, last in self.ranks)

    def members(self) -> set[int]:
        """Return the ranks of all members."""
        return {rank for first, last in self.ranks for rank in range(first, last + 1)}

    def check(self, size: int) -> None:
        """Raise RemoteProtocolError if a member is not a rank of a world of ``size`` ranks."""
        if not _has_room(self.ranks, size):
            raise RemoteProtocolError(
                f"the agreement {str(self)!r:.200} names ranks outside of this world of {size} ranks"
            )

    @classmethod
    def of(cls, subject: str, ranks: Sequence[int]) -> AgreementKey:
        """Return the key for all starts of the operation ``subject`` by ``ranks``."""
        return cls(subject, runs_of(tuple(ranks)))

    @classmethod
    def parse(cls, text: str) -> AgreementKey:
        """Return the key that a string from :attr:`text` describes. Raise RemoteProtocolError for other strings."""
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
        raise RemoteProtocolError(
            f"the name of an agreement must have the form 'SUBJECT on ranks RANKS', got {text!r:.200}"
        ) from error


@functools.lru_cache(64)
def _has_room(runs: Runs, size: int) -> bool:
    return all(0 <= first <= last < size for first, last in runs) and sum(b - a + 1 for a, b in runs) <= size


@dataclass(frozen=True, slots=True)
class Keyed:
    """Base class of messages that contain the key of an agreement, as the string ``subject``."""

    subject: str

    @property
    def key(self) -> AgreementKey:
        """Key of the agreement to which the message belongs."""
        return _parse(self.subject)


@dataclass(frozen=True, slots=True)
class Join(Keyed):
    """Notifies the leader that the sender, a member, is about to start the operation.

    Attributes:
        taken: Resource numbers, such as group tags, in use on the sender.
        marks: The sender's ``mark``, a number that may differ between members, or an empty tuple.
    """

    values: tuple[tuple[str, str], ...]
    taken: Runs
    marks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Objection(Keyed):
    """Notifies the leader of an error that prevents the operation's start.

    Attributes:
        kind: Class name of the exception, or empty if members are waiting for each other in different starts.
        absent: Ranks that the sender believes absent. If all of them join, the objection is invalid. Empty if it is
            always valid.
    """

    kind: str
    text: str
    absent: Runs = ()

    def is_void(self, present: Collection[int]) -> bool:
        """Return whether the objection is invalid, because all ranks in :attr:`absent` are ``present``."""
        count = sum(last - first + 1 for first, last in self.absent)
        return bool(self.absent) and count <= sum(is_in(rank, self.absent) for rank in present)


@dataclass(frozen=True, slots=True)
class Reminder(Keyed):
    """Reminds a missing member that the ranks ``present`` are waiting for it. Sent by the leader."""

    present: Runs


@dataclass(frozen=True, slots=True)
class Inquiry(Keyed):
    """Asks the leader to refuse the start, because the sender's timeout has passed."""

    waited_s: float


@dataclass(frozen=True, slots=True)
class Verdict(Keyed):
    """Message with the leader's decision: "go" with the agreed number, or the reason for a refusal.

    Attributes:
        difference: Name of the value that differs, or class name of the exception that a member raised.
        refusal: Description of the difference, or message of the exception that a member raised.
        missing: Ranks that did not join in time.
        waited_s: First timeout that passed, in seconds.
        gone: Ranks that have left or are lost, and will not join.
        lost: Ranks in ``gone`` that are lost.
        agreed: Smallest resource number that no member uses.
        objector: Rank that objected, or -1.
        marks: Up to two different numbers that members passed as their ``mark``.
    """

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
        """Raise ValueError if the agreed number is negative."""
        if self.agreed < 0:
            raise ValueError(f"agreed must be >= 0, got {self.agreed}")


@dataclass(frozen=True, slots=True)
class DecisionRequest(Keyed):
    """Asks another member for the decision of a lost leader.

    Attributes:
        absent: The lost leader, and all other ranks from which the sender no longer accepts the decision.
    """

    absent: Runs


@dataclass(frozen=True, slots=True)
class Undecided(Keyed):
    """Answer to a :class:`DecisionRequest` from a member without the decision.

    The member promises not to accept the decision from the ranks ``absent``.
    """

    absent: Runs


@dataclass(frozen=True, slots=True)
class Gathered(Keyed):
    """Reports joined ranks in the sender's subtree to the sender's parent in a large group's tree.

    Attributes:
        ranks: Ranks that have joined, and that the sender has not reported before.
        values: Named values of these ranks. Ranks with a third different set of values are reported with the second
            set, because the leader needs only the first difference.
        taken: Resource numbers, such as group tags, that any of these ranks uses.
    """

    leader: int
    ranks: Runs
    values: tuple[tuple[str, str], ...]
    taken: Runs
    marks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Spread:
    """Relays a large group's decision down the tree, for the ``ranks`` in the receiver's subtree."""

    verdict: Verdict
    leader: int
    ranks: Runs

    @property
    def key(self) -> AgreementKey:
        """Key of the agreement to which the message belongs."""
        return self.verdict.key


@dataclass(frozen=True, slots=True)
class RollCall(Keyed):
    """Asks a seemingly missing member of a large group whether it has joined. Sent by the leader.

    A member whose join is still being relayed along the tree answers by sending its join to the leader directly.
    """


@dataclass(frozen=True, slots=True)
class NotHere(Keyed):
    """Answer to a :class:`RollCall` from a member that has not joined the agreement."""


@dataclass(frozen=True, slots=True)
class Withdraw(Keyed):
    """Notifies the other members that the sender will never start an operation again."""

    lost: Losses = ()


@dataclass(frozen=True, slots=True, eq=False)
class Meeting:
    """An agreement that this rank has requested, and must then either join or decline.

    Attributes:
        began_at: Time of the request, in seconds on the loop's clock.
        bound_to: Ranks that are not members, but whose loss ends the agreement.
        outlives_leader: Whether the operation continues if the leader is lost. If so, members accept the leader's
            decision from each other (:mod:`asyncdist.collectives.agreement.termination`).
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
    """Result of an agreement with the decision "go".

    Attributes:
        number: Smallest number that no member uses, for a new resource such as a group's tag.
        time: Number of this start, from 1, among all starts of the operation by these members, including failed ones.
            Equal on all ranks, so the operation can use it as its identifier.
        marks: Up to two different numbers that members passed as their ``mark``, equal on all ranks.
    """

    number: int
    values: Mapping[str, str]
    time: int = field(default=1, compare=False)
    marks: tuple[int, ...] = field(default=(), compare=False, repr=False)


@cached_for_ranks
def runs_of(ranks: tuple[int, ...]) -> Runs:
    """Compress a list of ranks to (first, last) pairs, one for each sequence of consecutive ranks."""
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    return tuple(runs)


def is_in(rank: int, runs: Runs) -> bool:
    """Return whether ``rank`` lies between the first and the last rank of one of the ``runs``."""
    return any(first <= rank <= last for first, last in runs)


def merged(taken: Iterable[Runs]) -> Runs:
    """Return the union of several sets of numbers, as (first, last) pairs in ascending order."""
    runs: list[tuple[int, int]] = []
    for first, last in sorted({run for each in taken for run in each}):
        if runs and first <= runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], max(last, runs[-1][1]))
        else:
            runs.append((first, last))
    return tuple(runs)


def first_two(marks: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """Return up to two different numbers of ``marks``: enough to know whether all of them are equal."""
    return tuple(sorted({mark for each in marks for mark in each})[:2])


def first_free(taken: Iterable[Runs]) -> int:
    """Return the smallest number >= 0 that none of the sets ``taken`` contains."""
    free = 0
    for first, last in sorted(run for runs in taken for run in runs):
        if first > free:
            break
        free = max(free, last + 1)
    return free
