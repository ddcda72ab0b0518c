"""Describes faults as data. A plan is a list of them, and each is counted when it fires.

Each fault says what happens, to whom and when. A plan in which some fault did not fire fails its check: a test that
meant to kill a donor and never did has tested nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from asyncdist import validation
from asyncdist.simulation.distributions import check_number
from asyncdist.simulation.links import check_ranks


@dataclass(frozen=True, slots=True)
class Kill:
    """The process of ``rank`` dies: at ``at_s``, or at its ``at_turn``-th turn, or with its ``at_message``-th send.

    That message does not leave, and a task that awaits it never goes on.
    """

    rank: int
    at_s: float | None = None
    at_turn: int | None = None
    at_message: int | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("at_s", "at_turn", "at_message") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"{self!r}: give one of at_s, at_turn and at_message")
        _check(self, *given)


@dataclass(frozen=True, slots=True)
class Stall:
    """At ``at_s`` the process of ``rank`` stops for ``duration_s``, in a computation or while it waits."""

    rank: int
    at_s: float
    duration_s: float

    def __post_init__(self) -> None:
        _check(self, "at_s", "duration_s")


@dataclass(frozen=True, slots=True)
class SlowRank:
    """From ``at_s`` on ``rank`` takes ``factor`` times as long to compute, and for each of its turns.

    A computation that is under way ends as it would have. A turn, in which a rank takes in what has come and answers,
    takes up to 2 microseconds, so one that only serves others is slowed noticeably by factors of some hundreds.
    """

    rank: int
    at_s: float
    factor: float

    def __post_init__(self) -> None:
        _check(self, "at_s", "factor")


@dataclass(frozen=True, slots=True)
class SlowLink:
    """From ``at_s`` on messages from ``source`` to ``dest`` take ``factor`` times as long."""

    source: int
    dest: int
    at_s: float
    factor: float

    def __post_init__(self) -> None:
        _check(self, "at_s", "factor")


@dataclass(frozen=True, slots=True)
class Partition:
    """From ``at_s`` to ``until_s`` nothing passes between ``ranks`` and the others; what is sent arrives afterwards."""

    ranks: tuple[int, ...]
    at_s: float
    until_s: float

    def __post_init__(self) -> None:
        ranks: Any = self.ranks
        if not isinstance(ranks, Sequence):
            raise TypeError(f"{self!r}: ranks is {ranks!r}; allowed: a tuple of ranks")
        _check(self, "at_s", "until_s")
        if self.until_s < self.at_s:
            raise ValueError(f"{self!r}: until_s must not be before at_s")


@dataclass(frozen=True, slots=True)
class Delay:
    """The ``number``-th message (from 1) from ``source`` to ``dest`` takes longer; later ones of its tag wait too.

    The two may be one rank: a coordinator's reports to itself are messages.
    """

    source: int
    dest: int
    number: int
    duration_s: float

    def __post_init__(self) -> None:
        _check(self, "number", "duration_s")


@dataclass(frozen=True, slots=True)
class Corrupt:
    """One byte of the ``number``-th framed message (from 1) from ``source`` to ``dest`` is flipped on its way."""

    source: int
    dest: int
    number: int
    byte: int = 0

    def __post_init__(self) -> None:
        _check(self, "number")
        if type(self.byte) is not int:
            raise ValueError(f"{self!r}: byte is {self.byte!r}; allowed: a whole number")


@dataclass(frozen=True, slots=True)
class Interrupt:
    """At ``at_s`` ``rank`` gets a signal, as from a scheduler that takes its host back (SIGTERM) or by Ctrl-C (SIGINT).

    The first one asks it to stop: what it awaits is cancelled, its peers are told, and the job ends as
    :func:`asyncdist.run` says: the rank with ``SystemExit(143)`` or KeyboardInterrupt, the others with RankLostError.
    A second one ends its process at once, like :class:`Kill`.
    """

    rank: int
    at_s: float
    signal: Literal["SIGTERM", "SIGINT"] = "SIGTERM"

    def __post_init__(self) -> None:
        _check(self, "at_s")
        if self.signal not in ("SIGTERM", "SIGINT"):
            raise ValueError(f"{self!r}: signal is {self.signal!r}; allowed: 'SIGTERM', 'SIGINT'")


@dataclass(frozen=True, slots=True)
class Restart:
    """At ``at_s`` a new process takes the place of ``rank``, which a fault has killed; ``main`` begins there anew.

    It fires only if the rank has died by that moment, and some other rank has not ended. The new process has the next
    ``world.incarnation``; the others find out one by one. Its result is the rank's.
    """

    rank: int
    at_s: float

    def __post_init__(self) -> None:
        _check(self, "at_s")


@dataclass(frozen=True, slots=True)
class Join:
    """The place of ``rank`` is empty when the world begins, and at ``at_s`` its first process comes.

    The others know from the start that nobody is there: the rank is lost to them. It joins them as one that was started
    again, and its ``world.incarnation`` is 1: it was not there at the beginning. It comes only if some other rank has
    not ended by then. :class:`Kill` and :class:`Restart` may follow.
    """

    rank: int
    at_s: float

    def __post_init__(self) -> None:
        _check(self, "at_s")


Fault: TypeAlias = Kill | Restart | Join | Interrupt | Stall | SlowRank | SlowLink | Partition | Delay | Corrupt


def _check(fault: Fault, *names: str) -> None:
    """Refuse numbers out of range. Whole ones of another type become Python's: a plan is written down to repeat it."""
    for name in names:
        value, what = getattr(fault, name), f"{fault!r}: {name}"
        if name in ("at_turn", "at_message", "number"):
            object.__setattr__(fault, name, validation.count(what, value))
        else:
            check_number(what, value)


def check_plan(faults: Sequence[Fault], size: int) -> None:
    """Refuse a plan that cannot be carried out on ``size`` ranks.

    Raises:
        TypeError: an entry is not a fault.
        ValueError: a rank does not exist, one side of a partition is empty, or ranks join twice, or nobody.
    """
    given: Any = faults
    if not isinstance(given, Sequence):
        raise TypeError(f"faults is {faults!r}; allowed: a list of faults")
    for fault in faults:
        match fault:
            case Kill(rank) | Restart(rank) | Join(rank) | Interrupt(rank) | Stall(rank) | SlowRank(rank):
                check_ranks(repr(fault), [rank], size)
            case SlowLink(source, dest) | Delay(source, dest) | Corrupt(source, dest):
                check_ranks(repr(fault), [source, dest], size)
            case Partition(ranks):
                check_ranks(repr(fault), ranks, size)
                if not 0 < len(set(ranks)) < size:
                    raise ValueError(f"{fault!r} of {size} ranks parts nobody; allowed: some ranks, and not all")
            case _:
                raise TypeError(f"{fault!r} is no fault")
    joins = [fault.rank for fault in faults if isinstance(fault, Join)]
    for fault in faults:
        if isinstance(fault, Join) and (joins.count(fault.rank) > 1 or len(joins) == size):
            why = "joins twice" if joins.count(fault.rank) > 1 else "joins nobody: no rank is there at the beginning"
            raise ValueError(f"{fault!r} of {size} ranks {why}; allowed: one for each of some ranks, and not all")
