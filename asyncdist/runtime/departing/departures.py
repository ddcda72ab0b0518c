"""Decides what a rank tells its neighbours in a tree about the ranks whose main has returned, so that all hear of it.

In a world of few ranks each rank tells all others that it leaves, and later that it has come to its end. In a larger
one it tells those with which it has exchanged messages, and this module brings it to all others, along the tree of
:mod:`asyncdist.runtime.departing.spanning_tree`. A rank stands at one of three stages: its main runs, has returned
(:data:`LEFT`), or the rank has come to its end (:data:`ENDED`).

- A rank that knows that all below it have reached a stage tells its parent at once. So the root finds out when all
  ranks have, and says so, down the tree. Where all end together, that is one message up and one down for each rank.
- Where some go on, the others' departures travel along the tree all the same, since a rank may wait for one that has
  left: many of them in one message, a moment later.
- A neighbour that comes new, since a rank between is lost, is told everything. So is a parent that has not answered for
  long, since a frame may be spoiled. Nothing changes where something is told twice.

:class:`Departures` is told what happens and returns what to send; it knows no loop and no time.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from asyncdist.collectives.agreement_messages import Losses, Runs
from asyncdist.errors import RemoteProtocolError
from asyncdist.runtime.departing.spanning_tree import SpanningTree


class Stage(enum.IntEnum):
    """How far a rank has come, or all ranks have."""

    IN_MAIN = 0
    LEFT = 1
    ENDED = 2


#: Departures in one message, which a frame has to hold.
_COUNT_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class Departure:
    """Says that the ranks from ``first`` to ``last`` have reached a stage.

    Attributes:
        first, last: the ranks.
        stage: the number of a :class:`Stage`.
        started: how many collectives each of them has started, by the group's tag.
        lost: ranks that they know to be lost.
        told: ranks that each of them tells by itself.
    """

    first: int
    last: int
    stage: int
    started: tuple[tuple[int, int], ...] = ()
    lost: Losses = ()
    told: Runs = ()

    def follows(self, other: Departure) -> bool:
        """Return whether both can be said as one."""
        return self.first == other.last + 1 and replace(self, first=other.first, last=other.last) == other


@dataclass(frozen=True, slots=True)
class Departed:
    """Tells a neighbour in the tree which ranks have left or ended.

    Attributes:
        departures: what the neighbour may not know yet.
        stage: the number of the stage that all ranks of the world have reached.
    """

    departures: tuple[Departure, ...]
    stage: int


@dataclass(frozen=True, slots=True)
class EndHeard:
    """Answers the message that says that all ranks have come to their end."""


class Departures:
    """Keeps what one rank knows of departures, and what its neighbours know of that.

    Args:
        size: the number of ranks.
        rank: this one.

    Attributes:
        stage: the stage that all ranks of the world have reached, as far as is known here.
    """

    def __init__(self, size: int, rank: int) -> None:
        self._size = size
        self._tree = SpanningTree(size, rank)
        self._known = dict.fromkeys((Stage.LEFT, Stage.ENDED), 0)  # sets of ranks: bit r is for rank r
        self._lost = 0
        self._log: list[tuple[int, Departure]] = []  # each with the rank that has told it
        self._told_count: dict[int, int] = dict.fromkeys(self._tree.neighbours, 0)  # how much of the log
        self._told_stage: dict[int, int] = dict.fromkeys(self._tree.neighbours, 0)
        self._have_heard: set[int] = set()
        self.stage = Stage.IN_MAIN

    @property
    def neighbours(self) -> tuple[int, ...]:
        """The ranks to which this one sends."""
        return self._tree.neighbours

    def add(self, departure: Departure, source: int) -> list[Departure]:
        """Take in what ``source`` says; return the part of it that was not known before.

        Raises:
            RemoteProtocolError: it names ranks that the world does not have, or no stage.
        """
        first, last = departure.first, departure.last
        if not 0 <= first <= last < self._size or departure.stage not in (Stage.LEFT, Stage.ENDED):
            raise RemoteProtocolError(f"{departure!r:.200} is no departure from a world of {self._size} ranks")
        stage = Stage(departure.stage)
        unknown = _ranks(first, last) & ~self._known[stage]
        new = [replace(departure, first=first, last=last) for first, last in _runs(unknown)]
        self._log += [(source, part) for part in new]
        self._known[Stage.LEFT] |= unknown
        self._known[stage] |= unknown
        return new

    def on_departed(self, message: Departed, source: int) -> list[Departure]:
        """Take in what a neighbour says; return what was not known before. Raises as :meth:`add`."""
        new = [part for departure in message.departures for part in self.add(departure, source)]
        if message.stage not in tuple(Stage):
            raise RemoteProtocolError(f"{message.stage} is no stage of a world's ranks")
        if self.stage == Stage.ENDED and message.stage < Stage.ENDED and source not in self._have_heard:
            self._told_stage[source] = 0  # it has sent again what it had told: this rank's answer was spoiled
        self.stage = max(self.stage, Stage(message.stage))
        return new

    def on_end_heard(self, source: int) -> None:
        """Note that a neighbour has heard that all ranks have come to their end."""
        self._have_heard.add(source)

    def on_lost(self, rank: int) -> None:
        """Note that a rank is lost: it is not waited for, and its neighbours become those of others."""
        self._lost |= 1 << rank
        self._tree.on_lost(rank)
        self._told_count = {neighbour: self._told_count.get(neighbour, 0) for neighbour in self.neighbours}
        self._told_stage = {neighbour: self._told_stage.get(neighbour, 0) for neighbour in self.neighbours}

    def tell_again(self) -> None:
        """Have :meth:`urgent` say again what neighbours have not answered."""
        parent = self._tree.parent
        if parent is not None and self._told_stage[parent] > self.stage:
            self._told_count[parent] = self._told_stage[parent] = 0
        if self.stage == Stage.ENDED:
            for child in self._tree.children:
                if child not in self._have_heard:
                    self._told_stage[child] = 0

    @property
    def is_answered(self) -> bool:
        """Whether this rank waits for no answer: all others go on, or all have ended."""
        parent = self._tree.parent
        return self.is_over if self.stage == Stage.ENDED else parent is None or self._told_stage[parent] <= self.stage

    def urgent(self) -> list[tuple[int, Departed]]:
        """Return what is to be sent at once, with the rank that each message is for."""
        parent = self._tree.parent
        reached = self._reached()
        if parent is None:
            self.stage = max(self.stage, reached)
        messages = []
        for neighbour in self.neighbours:
            stage = max(self.stage, reached) if neighbour == parent else self.stage
            if self._told_stage[neighbour] < stage:
                self._told_stage[neighbour] = stage
                messages += [(neighbour, message) for message in self._tell(neighbour) or [Departed((), self.stage)]]
        return messages

    def others(self) -> list[tuple[int, Departed]]:
        """Return what may be sent together with what comes in the next moments."""
        return [(neighbour, message) for neighbour in self.neighbours for message in self._tell(neighbour)]

    @property
    def has_more(self) -> bool:
        """Whether :meth:`others` may have something to say."""
        return self.stage < Stage.ENDED and any(count < len(self._log) for count in self._told_count.values())

    @property
    def is_over(self) -> bool:
        """Whether all ranks have come to their end, and those right below this one have heard so."""
        return self.stage == Stage.ENDED and self._have_heard.issuperset(self._tree.children)

    def _reached(self) -> Stage:
        """Return the stage that this rank and all those below it have reached."""
        everybody = _ranks(self._tree.first, self._tree.last)
        for stage in Stage.ENDED, Stage.LEFT:
            if not everybody & ~(self._known[stage] | self._lost):
                return stage
        return Stage.IN_MAIN

    def _tell(self, neighbour: int) -> list[Departed]:
        """Return the messages that tell a neighbour what it has not been told; none where that is nothing.

        Where all have ended, nobody needs to know more.
        """
        begin, self._told_count[neighbour] = self._told_count[neighbour], len(self._log)
        if self.stage == Stage.ENDED:
            return []
        departures = _merged(departure for source, departure in self._log[begin:] if source != neighbour)
        return [
            Departed(tuple(departures[first : first + _COUNT_MAX]), self.stage)
            for first in range(0, len(departures), _COUNT_MAX)
        ]


def _merged(departures: Iterable[Departure]) -> list[Departure]:
    """Say those as one that follow each other and are equal otherwise; leave out what a later stage says again."""
    merged: list[Departure] = []
    for departure in sorted(departures, key=lambda each: (each.first, -each.stage)):
        before = merged[-1] if merged else None
        if before is None:
            merged.append(departure)
        elif departure.last <= before.last and departure.stage <= before.stage:
            continue
        elif departure.follows(before):
            merged[-1] = replace(departure, first=before.first)
        else:
            merged.append(departure)
    return merged


def _ranks(first: int, last: int) -> int:
    """Return the ranks from ``first`` to ``last`` as a set of bits."""
    return (1 << last + 1) - (1 << first)


def _runs(ranks: int) -> Iterator[tuple[int, int]]:
    """Yield the first and the last of each run of consecutive ranks in a set of bits."""
    first = 0
    while ranks >> first:
        rest = ranks >> first
        first += (rest & -rest).bit_length() - 1
        rest = ranks >> first
        length = (~rest & (rest + 1)).bit_length() - 1
        yield first, first + length - 1
        first += length
