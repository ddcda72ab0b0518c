"""Faults as data: a plan is a list of them, and every one is counted when it fires.

Each fault says what happens, to whom and when. A plan in which some fault did not fire fails its check: a test that
meant to kill a donor and never did has tested nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from asyncdist.simulation.models import check_count, check_number, check_ranks


@dataclass(frozen=True, slots=True)
class Kill:
    """The process of ``rank`` dies: at ``at_s``, or at its ``at_turn``-th turn, or with its ``at_message``-th send.

    That message does not leave, and whoever awaits it goes no further.
    """

    rank: int
    at_s: float | None = None
    at_turn: int | None = None
    at_message: int | None = None


@dataclass(frozen=True, slots=True)
class Stall:
    """``rank`` computes ``duration_s`` longer, once, from its first safe point after ``at_s`` on."""

    rank: int
    at_s: float
    duration_s: float


@dataclass(frozen=True, slots=True)
class SlowRank:
    """From ``at_s`` on ``rank`` computes ``factor`` times as long."""

    rank: int
    at_s: float
    factor: float


@dataclass(frozen=True, slots=True)
class SlowLink:
    """From ``at_s`` on messages from ``source`` to ``dest`` take ``factor`` times as long."""

    source: int
    dest: int
    at_s: float
    factor: float


@dataclass(frozen=True, slots=True)
class Partition:
    """From ``at_s`` to ``until_s`` nothing passes between ``ranks`` and the others; what is sent arrives afterwards."""

    ranks: tuple[int, ...]
    at_s: float
    until_s: float


@dataclass(frozen=True, slots=True)
class Delay:
    """The ``number``-th message (from 1) from ``source`` to ``dest`` takes longer; later ones of its tag wait too."""

    source: int
    dest: int
    number: int
    duration_s: float


@dataclass(frozen=True, slots=True)
class Corrupt:
    """One byte of the ``number``-th framed message (from 1) from ``source`` to ``dest`` is flipped on its way."""

    source: int
    dest: int
    number: int
    byte: int = 0


Fault: TypeAlias = Kill | Stall | SlowRank | SlowLink | Partition | Delay | Corrupt


def check_plan(faults: Sequence[Fault], size: int) -> None:
    """Refuse a plan that cannot be carried out.

    Raises:
        TypeError: something in it is no fault.
        ValueError: a rank does not exist, or a number is out of range.
    """
    given: Any = faults
    if not isinstance(given, Sequence):
        raise TypeError(f"faults is {faults!r}; allowed: a list of faults")
    for fault in faults:
        match fault:
            case Kill(rank, at_s, at_turn, at_message):
                check_ranks(repr(fault), [rank], size)
                given = [value for value in (at_s, at_turn, at_message) if value is not None]
                if len(given) != 1:
                    raise ValueError(f"{fault!r}: give one of at_s, at_turn and at_message")
                if at_s is not None:
                    check_number(f"{fault!r}: at_s", at_s)
                else:
                    check_count(f"{fault!r}: {'at_turn' if at_turn is not None else 'at_message'}", given[0])
            case Stall(rank, at_s, duration_s):
                check_ranks(repr(fault), [rank], size)
                check_number(f"{fault!r}: at_s", at_s)
                check_number(f"{fault!r}: duration_s", duration_s)
            case SlowRank(rank, at_s, factor):
                check_ranks(repr(fault), [rank], size)
                check_number(f"{fault!r}: at_s", at_s)
                check_number(f"{fault!r}: factor", factor)
            case SlowLink(source, dest, at_s, factor):
                check_ranks(repr(fault), [source, dest], size)
                check_number(f"{fault!r}: at_s", at_s)
                check_number(f"{fault!r}: factor", factor)
            case Partition(ranks, at_s, until_s):
                if not isinstance(ranks, Sequence):
                    raise TypeError(f"{fault!r}: ranks is {ranks!r}; allowed: a tuple of ranks")
                check_ranks(repr(fault), ranks, size)
                check_number(f"{fault!r}: at_s", at_s)
                check_number(f"{fault!r}: until_s", until_s)
                if until_s < at_s:
                    raise ValueError(f"{fault!r}: until_s must not be before at_s")
            case Delay(source, dest, number, duration_s):
                check_ranks(repr(fault), [source, dest], size)
                check_count(f"{fault!r}: number", number)
                check_number(f"{fault!r}: duration_s", duration_s)
            case Corrupt(source, dest, number, byte):
                check_ranks(repr(fault), [source, dest], size)
                check_count(f"{fault!r}: number", number)
                if type(byte) is not int:
                    raise ValueError(f"{fault!r}: byte is {byte!r}; allowed: a whole number")
            case _:
                raise TypeError(f"{fault!r} is no fault")
