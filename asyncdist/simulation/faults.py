"""Describes faults as data. A plan is a list of them, and each is counted when it fires.

A plan in which some fault did not fire fails its check: a test that meant to kill a donor and never did has tested
nothing.
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
    """The process of ``rank`` dies at ``at_s``, at its ``at_turn``-th turn, or at its ``at_message``-th send.

    That message is not sent, and a task that awaits it never resumes.
    """

    rank: int
    at_s: float | None = None
    at_turn: int | None = None
    at_message: int | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("at_s", "at_turn", "at_message") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"{self!r} must have exactly one of at_s, at_turn and at_message")
        _check(self, *given)


@dataclass(frozen=True, slots=True)
class Stall:
    """The process of ``rank`` stops at ``at_s`` for ``duration_s``, whether it computes or waits."""

    rank: int
    at_s: float
    duration_s: float

    def __post_init__(self) -> None:
        _check(self, "at_s", "duration_s")


@dataclass(frozen=True, slots=True)
class SlowRank:
    """From ``at_s`` on, ``rank`` takes ``factor`` times as long for computations and for its turns.

    A computation in progress ends unchanged. A turn, in which a rank receives messages and answers them, takes up to
    2 microseconds. A rank that only serves others is therefore slowed noticeably by factors of a few hundred.
    """

    rank: int
    at_s: float
    factor: float

    def __post_init__(self) -> None:
        _check(self, "at_s", "factor")


@dataclass(frozen=True, slots=True)
class SlowLink:
    """From ``at_s`` on, messages from ``source`` to ``dest`` take ``factor`` times as long."""

    source: int
    dest: int
    at_s: float
    factor: float

    def __post_init__(self) -> None:
        _check(self, "at_s", "factor")


@dataclass(frozen=True, slots=True)
class Partition:
    """From ``at_s`` to ``until_s``, messages between ``ranks`` and all others are held back; they arrive afterwards."""

    ranks: tuple[int, ...]
    at_s: float
    until_s: float

    def __post_init__(self) -> None:
        ranks: Any = self.ranks
        if not isinstance(ranks, Sequence):
            raise TypeError(f"{self!r}: ranks must be a tuple of ranks, got {ranks!r}")
        _check(self, "at_s", "until_s")
        if self.until_s < self.at_s:
            raise ValueError(f"{self!r}: until_s must be >= at_s")


@dataclass(frozen=True, slots=True)
class Delay:
    """Delays the ``number``-th message (from 1) from ``source`` to ``dest``, and later messages of its tag.

    ``source`` and ``dest`` may be the same rank: a coordinator's reports to itself are messages, too.
    """

    source: int
    dest: int
    number: int
    duration_s: float

    def __post_init__(self) -> None:
        _check(self, "number", "duration_s")


@dataclass(frozen=True, slots=True)
class Corrupt:
    """Changes one byte of the ``number``-th framed message (from 1) from ``source`` to ``dest``."""

    source: int
    dest: int
    number: int
    byte: int = 0

    def __post_init__(self) -> None:
        _check(self, "number")
        if type(self.byte) is not int:
            raise ValueError(f"{self!r}: byte must be an integer, got {self.byte!r}")


@dataclass(frozen=True, slots=True)
class Interrupt:
    """At ``at_s``, ``rank`` receives a signal: SIGTERM, as from a batch scheduler, or SIGINT, as from Ctrl-C.

    The first signal asks the rank to stop. Its current await is cancelled, its peers are notified, and the job ends as
    :func:`asyncdist.run` describes: the rank with ``SystemExit(143)`` or KeyboardInterrupt, the others with
    RankLostError. A second signal ends the process at once, like :class:`Kill`.
    """

    rank: int
    at_s: float
    signal: Literal["SIGTERM", "SIGINT"] = "SIGTERM"

    def __post_init__(self) -> None:
        _check(self, "at_s")
        if self.signal not in ("SIGTERM", "SIGINT"):
            raise ValueError(f"{self!r}: signal must be 'SIGTERM' or 'SIGINT', got {self.signal!r}")


@dataclass(frozen=True, slots=True)
class Restart:
    """At ``at_s``, a new process takes the place of the killed ``rank`` and runs ``main`` from its beginning.

    The fault fires only if the rank has died by then and some other rank has not ended. The new process has the next
    ``world.incarnation``; each peer learns of it at a time of its own. Its result is the rank's result.
    """

    rank: int
    at_s: float

    def __post_init__(self) -> None:
        _check(self, "at_s")


@dataclass(frozen=True, slots=True)
class Join:
    """The place of ``rank`` is empty when the world begins; its first process joins at ``at_s``.

    The other ranks regard the empty place as a lost rank. The process joins like a restarted one, with
    ``world.incarnation`` 1. It joins only if some other rank has not ended by then. :class:`Kill` and :class:`Restart`
    may follow.
    """

    rank: int
    at_s: float

    def __post_init__(self) -> None:
        _check(self, "at_s")


Fault: TypeAlias = Kill | Restart | Join | Interrupt | Stall | SlowRank | SlowLink | Partition | Delay | Corrupt


def _check(fault: Fault, *names: str) -> None:
    """Raise for numbers out of range, and convert integers of other types to int so that the plan can be printed."""
    for name in names:
        value, what = getattr(fault, name), f"{fault!r}: {name}"
        if name in ("at_turn", "at_message", "number"):
            object.__setattr__(fault, name, validation.count(what, value))
        else:
            check_number(what, value)


def check_plan(faults: Sequence[Fault], size: int) -> None:
    """Raise if a plan cannot be carried out on ``size`` ranks.

    Raises:
        TypeError: An entry is not a fault.
        ValueError: A rank does not exist or joins twice, a partition has an empty side, or all ranks join late.
    """
    given: Any = faults
    if not isinstance(given, Sequence):
        raise TypeError(f"faults must be a list of faults, got {faults!r}")
    for fault in faults:
        match fault:
            case Kill(rank) | Restart(rank) | Join(rank) | Interrupt(rank) | Stall(rank) | SlowRank(rank):
                check_ranks(repr(fault), [rank], size)
            case SlowLink(source, dest) | Delay(source, dest) | Corrupt(source, dest):
                check_ranks(repr(fault), [source, dest], size)
            case Partition(ranks):
                check_ranks(repr(fault), ranks, size)
                if not 0 < len(set(ranks)) < size:
                    raise ValueError(
                        f"{fault!r} of {size} ranks has an empty side; ranks must be some of them, but not all"
                    )
            case _:
                raise TypeError(f"faults must be a list of faults, got the entry {fault!r}")
    joins = [fault.rank for fault in faults if isinstance(fault, Join)]
    for fault in faults:
        if isinstance(fault, Join) and (joins.count(fault.rank) > 1 or len(joins) == size):
            why = "joins twice" if joins.count(fault.rank) > 1 else "leaves no rank at the beginning"
            raise ValueError(
                f"faults must have at most one Join per rank and none for some rank, but {fault!r} of {size} ranks "
                f"{why}"
            )
