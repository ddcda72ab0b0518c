"""Decides what a rank tells its neighbours in a tree about the ranks whose main has returned, so that all hear of it.

In a world of few ranks each rank tells all others that it leaves, and later that it has come to its end. In a larger
one it tells those with which it has exchanged messages, and this module brings it to all others, along the tree of
:mod:`asyncdist.runtime.departing.spanning_tree`. A rank stands at one of four stages: its main runs, has returned
(:data:`LEFT`), the rank has come to its end (:data:`ENDED`), or it has heard that all have (:data:`HEARD`).

- A rank that knows that all below it have reached a stage tells its parent at once. So the root finds out when all
  ranks have, and says so, down the tree. Where all end together, that is one message up and one down for each rank.
- Where some go on, the others' departures travel along the tree all the same, since a rank may wait for one that has
  left: up to the root, and from there down to all. The root, and the ranks near it, wait a while for more of them, so
  the number of messages grows with the time that it takes until all have left, and not with the number of ranks.
- Ranks of which the same is to be said are said together, as a bitmap, and kept so.
- A rank answers that all have ended when all below it have heard so. The root, when it has all answers, says that all
  have heard (:data:`HEARD`), down the tree, and only then ranks may go: until all have heard, those that live are there
  to tell one whose ranks above are lost, however many these are.
- A neighbour that comes new, since a rank between is lost, is told everything. So is a parent that has not answered for
  long, since a frame may be spoiled. Nothing changes where something is told twice.

:class:`Departures` is told what happens and returns what to send; it knows no loop and no time.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from asyncdist.collectives.agreement.messages import Losses, Runs
from asyncdist.errors import RemoteProtocolError
from asyncdist.runtime.departing.spanning_tree import SpanningTree
from asyncdist.transports.rank_sets import RankSet


class Stage(enum.IntEnum):
    """How far a rank has come, or all ranks have."""

    IN_MAIN = 0
    LEFT = 1
    ENDED = 2
    HEARD = 3


#: Departures in one message, and bytes of a bitmap in one of them: a frame has to hold them.
_COUNT_MAX: Final = 64
_BITMAP_NBYTES_MAX: Final = 8192

#: What is said of ranks that leave: how many collectives they have started, the losses they know, whom they tell.
_Account: TypeAlias = tuple[tuple[tuple[int, int], ...], Losses, Runs]


@dataclass(frozen=True, slots=True)
class Departure:
    """Says that some ranks have reached a stage.

    Attributes:
        first: the rank for which the lowest bit of the first byte of ``bitmap`` stands.
        bitmap: bits that are set for the ranks that have reached it, in ascending order.
        stage: the number of a :class:`Stage`.
        started: how many collectives each of them has started, by the group's tag.
        lost: ranks that they know to be lost.
        told: ranks that each of them tells by itself, and that may not know yet that they will hear from it.
    """

    first: int
    bitmap: bytes
    stage: int
    started: tuple[tuple[int, int], ...] = ()
    lost: Losses = ()
    told: Runs = ()

    @classmethod
    def of(cls, rank: int, stage: Stage, *account: *_Account) -> Departure:
        """Say it of one rank."""
        return cls(rank, b"\x01", stage, *account)

    @property
    def ranks(self) -> RankSet:
        """The ranks that have reached the stage."""
        return RankSet.of_bits(int.from_bytes(self.bitmap, "little") << self.first)


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
    """Answers the message that says that all ranks have come to their end, once all ranks below have heard it too."""


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
        self._rank = rank
        self._tree = SpanningTree(size, rank)
        self._known = _Reached()
        self._announced = _Reached()  # what the ranks below are to know: the root has said it, or is about to
        self._accounts: dict[_Account, int] = {}  # the ranks of which each is to be said; all of those in _known
        self._lost = 0
        self._told: dict[int, _Reached] = {neighbour: _Reached() for neighbour in self._tree.neighbours}
        self._told_stage: dict[int, int] = dict.fromkeys(self._tree.neighbours, 0)
        self._have_heard: set[int] = set()
        self._unanswered: set[int] = set()  # those that have said that all have ended
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
        is_known_stage = departure.stage in (Stage.LEFT, Stage.ENDED)
        if not is_known_stage or not 0 <= departure.first < self._size or not 0 < self._extent(departure) <= self._size:
            raise RemoteProtocolError(f"{departure!r:.200} is no departure from a world of {self._size} ranks")
        ranks, stage = departure.ranks.bits, Stage(departure.stage)
        account = departure.started, departure.lost, departure.told
        unknown, unaccounted = ranks & ~self._known.at(stage), ranks & ~self._known.left
        if unaccounted:
            self._accounts[account] = self._accounts.get(account, 0) | unaccounted
        self._known.add(ranks, stage)
        if source == self._tree.parent:
            self._told[source].add(ranks, stage)
        if source != self._rank and source not in self._tree.children:
            self._announced.add(ranks, stage)
        return list(_departures(unknown, stage, account))

    @staticmethod
    def _extent(departure: Departure) -> int:
        """Return the number after the highest rank; 0 where there is none."""
        length = int.from_bytes(departure.bitmap, "little").bit_length()
        return length and departure.first + length

    def on_departed(self, message: Departed, source: int) -> list[Departure]:
        """Take in what a neighbour says; return what was not known before. Raises as :meth:`add`."""
        new = [part for departure in message.departures for part in self.add(departure, source)]
        if message.stage not in tuple(Stage):
            raise RemoteProtocolError(f"{message.stage} is no stage of a world's ranks")
        if self.stage >= Stage.ENDED and message.stage < Stage.ENDED and source not in self._have_heard:
            self._told_stage[source] = 0  # it has sent again what it had told: this rank's answer was spoiled
        self.stage = max(self.stage, Stage(message.stage))
        if message.stage == Stage.ENDED:
            self._unanswered.add(source)
        elif message.stage == Stage.HEARD:
            self._told_stage[source] = Stage.HEARD
        return new

    def on_end_heard(self, source: int) -> None:
        """Note that a neighbour, and those below it, have heard that all ranks have come to their end."""
        self._have_heard.add(source)
        if self.stage == Stage.HEARD:  # it has not heard that, or says it to a new parent
            self._told_stage[source] = Stage.ENDED

    def take_answers(self) -> set[int]:
        """Return the ranks that :class:`EndHeard` is to be sent to now, each once."""
        ranks: set[int] = set()
        if self._have_all_below_heard:
            ranks, self._unanswered = self._unanswered, ranks
        return ranks

    def on_lost(self, rank: int) -> None:
        """Note that a rank is lost: it is not waited for, and its neighbours become those of others."""
        self._lost |= 1 << rank
        self._tree.on_lost(rank)
        self._told = {neighbour: self._told.get(neighbour, _Reached()) for neighbour in self.neighbours}
        self._told_stage = {neighbour: self._told_stage.get(neighbour, 0) for neighbour in self.neighbours}

    def tell_again(self) -> None:
        """Have :meth:`urgent` say again what neighbours have not answered."""
        parent = self._tree.parent
        if parent is not None and self._told_stage[parent] > self.stage:
            self._told[parent], self._told_stage[parent] = _Reached(), 0
        if self.stage == Stage.ENDED:
            if parent is not None:
                self._unanswered.add(parent)
            for child in self._tree.children:
                if child not in self._have_heard:
                    self._told_stage[child] = 0

    @property
    def is_answered(self) -> bool:
        """Whether this rank waits for no answer: all others go on, or all have heard that all have ended."""
        parent = self._tree.parent
        return self.is_over if self.stage >= Stage.ENDED else parent is None or self._told_stage[parent] <= self.stage

    def urgent(self) -> list[tuple[int, Departed]]:
        """Return what is to be sent at once, with the rank that each message is for."""
        parent = self._tree.parent
        reached = self._reached()
        if parent is None and reached > self.stage:
            self.stage = reached
            self._announced.add_all(self._known)
        messages = []
        for neighbour in self.neighbours:
            stage = min(max(self.stage, reached), Stage.ENDED) if neighbour == parent else self.stage
            told = self._tell(neighbour) if self._told_stage[neighbour] < stage or neighbour != parent else []
            if self._told_stage[neighbour] < stage:
                self._told_stage[neighbour] = stage
                told = told or [Departed((), self.stage)]
            messages += [(neighbour, message) for message in told]
        return messages

    def others(self) -> list[tuple[int, Departed]]:
        """Return what may be sent together with what comes in the next moments."""
        parent = self._tree.parent
        if parent is not None:
            return [(parent, message) for message in self._tell(parent)]
        self._announced.add_all(self._known)
        return [(child, message) for child in self._tree.children for message in self._tell(child)]

    @property
    def has_more(self) -> bool:
        """Whether :meth:`others` may have something to say."""
        parent = self._tree.parent
        told = self._announced if parent is None else self._told[parent]
        return self.stage < Stage.ENDED and self._known.has_more_than(told)

    @property
    def level(self) -> int:
        """The number of ranks above this one in a tree that has lost none."""
        return self._tree.level

    @property
    def is_over(self) -> bool:
        """Whether all ranks have heard that all have come to their end, and those right below have been told that."""
        return self.stage == Stage.HEARD and all(self._told_stage[child] == self.stage for child in self._tree.children)

    @property
    def _have_all_below_heard(self) -> bool:
        """Whether this rank and all those below it have heard that all ranks have come to their end."""
        return self.stage >= Stage.ENDED and self._have_heard.issuperset(self._tree.children)

    def _reached(self) -> Stage:
        """Return the stage that this rank and all those below it have reached."""
        if self._have_all_below_heard:
            return Stage.HEARD
        everybody = _ranks(self._tree.first, self._tree.last)
        for stage in Stage.ENDED, Stage.LEFT:
            if not everybody & ~(self._known.at(stage) | self._lost):
                return stage
        return Stage.IN_MAIN

    def _tell(self, neighbour: int) -> list[Departed]:
        """Return the messages that tell a neighbour what it has not been told; none where that is nothing.

        Where all have ended, nobody needs to know more.
        """
        known, told = self._known if neighbour == self._tree.parent else self._announced, self._told[neighbour]
        ended = known.ended & ~told.ended
        left = known.left & ~told.left & ~ended
        if self.stage >= Stage.ENDED or not ended | left:
            return []
        told.add_all(known)
        departures = [
            departure
            for account, ranks in self._accounts.items()
            for stage, some in ((Stage.LEFT, left), (Stage.ENDED, ended))
            for departure in _departures(ranks & some, stage, account)
        ]
        self._forget_whom_they_tell()
        return [
            Departed(tuple(departures[first : first + _COUNT_MAX]), self.stage)
            for first in range(0, len(departures), _COUNT_MAX)
        ]

    def _forget_whom_they_tell(self) -> None:
        """Forget it of ranks whose end all neighbours have been told: by then what they told has arrived.

        So the same is to be said of most ranks, and little is kept.
        """
        settled = self._known.ended
        for told in self._told.values():
            settled &= told.ended
        for account in [account for account, ranks in self._accounts.items() if account[2] and ranks & settled]:
            ranks, plain = self._accounts.pop(account), (*account[:2], ())
            self._accounts[plain] = self._accounts.get(plain, 0) | ranks & settled
            if ranks & ~settled:
                self._accounts[account] = ranks & ~settled


@dataclass(slots=True)
class _Reached:
    """The ranks that have left, and those of them that have ended, as sets of bits."""

    left: int = 0
    ended: int = 0

    def at(self, stage: Stage) -> int:
        """Return those that have reached a stage."""
        return self.ended if stage == Stage.ENDED else self.left

    def add(self, ranks: int, stage: Stage) -> None:
        """Note that ranks have reached a stage."""
        self.left |= ranks
        if stage == Stage.ENDED:
            self.ended |= ranks

    def add_all(self, other: _Reached) -> None:
        """Note what is noted there."""
        self.left |= other.left
        self.ended |= other.ended

    def has_more_than(self, other: _Reached) -> bool:
        """Return whether something is noted here that is not noted there."""
        return bool(self.left & ~other.left | self.ended & ~other.ended)


def _departures(ranks: int, stage: Stage, account: _Account) -> Iterator[Departure]:
    """Yield what says of ranks that they have reached a stage: one departure, or several where it would be large."""
    while ranks:
        first = (ranks & -ranks).bit_length() - 1
        piece = ranks >> first & (1 << 8 * _BITMAP_NBYTES_MAX) - 1
        yield Departure(first, piece.to_bytes((piece.bit_length() + 7) // 8, "little"), stage, *account)
        ranks &= ~(piece << first)


def _ranks(first: int, last: int) -> int:
    """Return the ranks from ``first`` to ``last`` as a set of bits."""
    return (1 << last + 1) - (1 << first)
