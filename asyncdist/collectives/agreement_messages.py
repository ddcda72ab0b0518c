"""What the ranks of an agreement say to each other: see :mod:`asyncdist.collectives.agreement`."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

#: Some ranks, or numbers, in their order, short also where there are thousands: the first and the last of those
#: without a gap.
Runs: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Join:
    """Member to leader: I am about to start ``subject`` and these are my values.

    Attributes:
        taken: numbers that are in use here.
    """

    subject: str
    values: tuple[tuple[str, str], ...]
    taken: Runs


@dataclass(frozen=True, slots=True)
class Objection:
    """Member to leader: I cannot start ``subject``, since here it raised this.

    Attributes:
        members: who was to start it.
        kind: the exception's class; empty where members disagree.
        text: what it says.
    """

    subject: str
    members: Runs
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Reminder:
    """Leader to a member that is missing: these wait for you.

    Attributes:
        subject: in which, without the time.
        members: all who are to start it.
        present: those who have come.
    """

    subject: str
    members: Runs
    present: Runs


@dataclass(frozen=True, slots=True)
class Inquiry:
    """Member to leader: my time, ``waited_s``, is up and you have not said anything. Who is missing?"""

    subject: str
    members: Runs
    waited_s: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Leader to member: go (with the agreed number), or why not.

    Attributes:
        difference: the name of what differs; of an objection, the exception's class.
        refusal: a sentence; of an objection, what the exception says.
        missing: who has not come in time.
        waited_s: for how long the one had waited whose time was up first.
        gone: who has left, or is lost, and will not come.
        lost: those of them that are lost.
        objector: the member who objected, -1 where nobody did.
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


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Member to member: I shall never start ``subject`` again."""

    subject: str


@functools.lru_cache(64)
def runs_of(ranks: tuple[int, ...]) -> Runs:
    """Ranks that follow each other as the first and the last of them."""
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    return tuple(runs)


def ranks_of(runs: Runs) -> set[int]:
    """All ranks of some runs."""
    return {rank for first, last in runs for rank in range(first, last + 1)}


def first_free(taken: Iterable[Runs]) -> int:
    """The smallest number, from 0, that is in none of them."""
    free = 0
    for first, last in sorted(run for runs in taken for run in runs):
        if first > free:
            break
        free = max(free, last + 1)
    return free
