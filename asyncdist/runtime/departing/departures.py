"""Decides a rank's messages to its neighbours in a tree about departures, so that all ranks learn of them.

In a small world each rank notifies all others that it leaves, and later that it has ended. In a larger world it
notifies the ranks with which it has exchanged messages, and this module notifies all others along the tree of
:mod:`asyncdist.runtime.departing.spanning_tree`. A rank is at one of four stages: its main runs; main has returned
(:data:`LEFT`); the rank has ended (:data:`ENDED`); it knows that all ranks have ended (:data:`HEARD`).

- A rank notifies its parent as soon as its whole subtree has reached a stage. The root thus learns when all ranks have
  reached it, and announces that down the tree. If all end together, each rank sends one message up and one down.
- If some ranks continue, departures still travel up to the root and down to all, since a rank may wait for one that has
  left. The root, and ranks near it, wait a while for more departures. The number of messages therefore grows with the
  time until all have left, not with the number of ranks.
- Ranks with equal announcements are stored and sent together, as a bitmap.
- A rank acknowledges that all have ended when its whole subtree knows it. After all acknowledgements, the root
  announces :data:`HEARD` down the tree, and only then may ranks exit. Until then, all living ranks are present to
  inform a rank whose ancestors are lost.
- A new neighbour (after a loss) is sent everything. So is a parent that has not answered for long, since a frame may
  have been corrupted. Repeated announcements have no effect.

:class:`Departures` takes events and returns messages; it knows no loop and no time.
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
    """The stage that a rank, or all ranks, have reached."""

    IN_MAIN = 0
    LEFT = 1
    ENDED = 2
    HEARD = 3


#: Maximum number of departures in one message, and of bytes in a bitmap, so that they fit into a frame.
_COUNT_MAX: Final = 64
_BITMAP_NBYTES_MAX: Final = 8192

#: Facts about a leaving rank: its numbers of started collectives, the losses it knows, and the ranks it notifies
#: itself.
_Account: TypeAlias = tuple[tuple[tuple[int, int], ...], Losses, Runs]


@dataclass(frozen=True, slots=True)
class Departure:
    """Announces that some ranks have reached a stage.

    Attributes:
        first: Rank of the lowest bit in the first byte of ``bitmap``.
        bitmap: Bit set of the ranks that have reached the stage.
        stage: Number of a :class:`Stage`.
        started: Number of collectives that each of them has started, by the group's tag.
        lost: Ranks that they know to be lost.
        told: Ranks that each of them notifies directly, and that may not expect it yet.
    """

    first: int
    bitmap: bytes
    stage: int
    started: tuple[tuple[int, int], ...] = ()
    lost: Losses = ()
    told: Runs = ()

    @classmethod
    def of(cls, rank: int, stage: Stage, *account: *_Account) -> Departure:
        """Make the departure of one rank."""
        return cls(rank, b"\x01", stage, *account)

    @property
    def ranks(self) -> RankSet:
        """The ranks that have reached the stage."""
        return RankSet.of_bits(int.from_bytes(self.bitmap, "little") << self.first)


@dataclass(frozen=True, slots=True)
class Departed:
    """To a neighbour in the tree: ranks that have left or ended.

    Attributes:
        departures: Departures that the neighbour may not know yet.
        stage: Number of the stage that all ranks of the world have reached.
    """

    departures: tuple[Departure, ...]
    stage: int


@dataclass(frozen=True, slots=True)
class EndHeard:
    """Acknowledges that all ranks have ended, once the sender's whole subtree knows it."""


class Departures:
    """Tracks the departures that one rank knows, and which of them its neighbours know.

    Args:
        size: Number of ranks.
        rank: This rank.

    Attributes:
        stage: Stage that all ranks of the world have reached, as far as this rank knows.
    """

    def __init__(self, size: int, rank: int) -> None:
        self._size = size
        self._rank = rank
        self._tree = SpanningTree(size, rank)
        self._known = _Reached()
        self._announced = _Reached()  # departures for the ranks below: announced by the root
        self._accounts: dict[_Account, int] = {}  # facts, each with its ranks as a bit set; all in _known
        self._lost = 0
        self._told: dict[int, _Reached] = {neighbour: _Reached() for neighbour in self._tree.neighbours}
        self._told_stage: dict[int, int] = dict.fromkeys(self._tree.neighbours, 0)
        self._have_heard: set[int] = set()
        self._unanswered: set[int] = set()  # neighbours that wait for an acknowledgement that all have ended
        self.stage = Stage.IN_MAIN

    @property
    def neighbours(self) -> tuple[int, ...]:
        """The ranks to which this rank sends."""
        return self._tree.neighbours

    def add(self, departure: Departure, source: int) -> list[Departure]:
        """Add a departure reported by ``source``; return the new part of it.

        Raises:
            RemoteProtocolError: It names ranks outside of the world, or an invalid stage.
        """
        is_known_stage = departure.stage in (Stage.LEFT, Stage.ENDED)
        if not is_known_stage or not 0 <= departure.first < self._size or not 0 < self._extent(departure) <= self._size:
            raise RemoteProtocolError(f"{departure!r:.200} is not a valid departure in a world of {self._size} ranks")
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
        """Return the highest rank plus 1; 0 if there is none."""
        length = int.from_bytes(departure.bitmap, "little").bit_length()
        return length and departure.first + length

    def on_departed(self, message: Departed, source: int) -> list[Departure]:
        """Handle a neighbour's message; return the new departures. Raises as :meth:`add`."""
        new = [part for departure in message.departures for part in self.add(departure, source)]
        if message.stage not in tuple(Stage):
            raise RemoteProtocolError(f"{message.stage} is not a valid stage")
        if self.stage >= Stage.ENDED and message.stage < Stage.ENDED and source not in self._have_heard:
            self._told_stage[source] = 0  # a repeated message: this rank's answer was lost
        self.stage = max(self.stage, Stage(message.stage))
        if message.stage == Stage.ENDED:
            self._unanswered.add(source)
        elif message.stage == Stage.HEARD:
            self._told_stage[source] = Stage.HEARD
        return new

    def on_end_heard(self, source: int) -> None:
        """Note that a neighbour's whole subtree knows that all ranks have ended."""
        self._have_heard.add(source)
        if self.stage == Stage.HEARD:  # the neighbour does not know that, or has a new parent
            self._told_stage[source] = Stage.ENDED

    def take_answers(self) -> set[int]:
        """Return the ranks to which :class:`EndHeard` must be sent now, each once."""
        ranks: set[int] = set()
        if self._have_all_below_heard:
            ranks, self._unanswered = self._unanswered, ranks
        return ranks

    def on_lost(self, rank: int) -> None:
        """Note that a rank is lost: it is no longer waited for, and other ranks take over its neighbours."""
        self._lost |= 1 << rank
        self._tree.on_lost(rank)
        self._told = {neighbour: self._told.get(neighbour, _Reached()) for neighbour in self.neighbours}
        self._told_stage = {neighbour: self._told_stage.get(neighbour, 0) for neighbour in self.neighbours}

    def tell_again(self) -> None:
        """Make :meth:`urgent` repeat the messages that neighbours have not answered."""
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
        """Whether this rank waits for no answer: others still run, or all know that all have ended."""
        parent = self._tree.parent
        return self.is_over if self.stage >= Stage.ENDED else parent is None or self._told_stage[parent] <= self.stage

    def urgent(self) -> list[tuple[int, Departed]]:
        """Return the messages to send at once, each with its receiver."""
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
        """Return the messages that may wait to be sent together with later ones, each with its receiver."""
        parent = self._tree.parent
        if parent is not None:
            return [(parent, message) for message in self._tell(parent)]
        self._announced.add_all(self._known)
        return [(child, message) for child in self._tree.children for message in self._tell(child)]

    @property
    def has_more(self) -> bool:
        """Whether :meth:`others` may return messages."""
        parent = self._tree.parent
        told = self._announced if parent is None else self._told[parent]
        return self.stage < Stage.ENDED and self._known.has_more_than(told)

    @property
    def level(self) -> int:
        """The depth of this rank in a tree without losses."""
        return self._tree.level

    @property
    def is_over(self) -> bool:
        """Whether all ranks know that all have ended, and the children have been notified of that."""
        return self.stage == Stage.HEARD and all(self._told_stage[child] == self.stage for child in self._tree.children)

    @property
    def _have_all_below_heard(self) -> bool:
        """Whether this rank's whole subtree knows that all ranks have ended."""
        return self.stage >= Stage.ENDED and self._have_heard.issuperset(self._tree.children)

    def _reached(self) -> Stage:
        """Return the stage that this rank's whole subtree has reached."""
        if self._have_all_below_heard:
            return Stage.HEARD
        everybody = _ranks(self._tree.first, self._tree.last)
        for stage in Stage.ENDED, Stage.LEFT:
            if not everybody & ~(self._known.at(stage) | self._lost):
                return stage
        return Stage.IN_MAIN

    def _tell(self, neighbour: int) -> list[Departed]:
        """Return the messages with the departures that a neighbour has not been sent.

        If all ranks have ended, none are needed.
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
        """Forget whom ended ranks notify, once all neighbours know of their end: those notices have arrived.

        Most ranks then have equal facts, which keeps the state small.
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
    """The ranks that have left, and the ranks that have ended, as bit sets."""

    left: int = 0
    ended: int = 0

    def at(self, stage: Stage) -> int:
        """Return the ranks that have reached a stage."""
        return self.ended if stage == Stage.ENDED else self.left

    def add(self, ranks: int, stage: Stage) -> None:
        """Note that ranks have reached a stage."""
        self.left |= ranks
        if stage == Stage.ENDED:
            self.ended |= ranks

    def add_all(self, other: _Reached) -> None:
        """Add all ranks of another object."""
        self.left |= other.left
        self.ended |= other.ended

    def has_more_than(self, other: _Reached) -> bool:
        """Return whether this object has a rank that ``other`` lacks."""
        return bool(self.left & ~other.left | self.ended & ~other.ended)


def _departures(ranks: int, stage: Stage, account: _Account) -> Iterator[Departure]:
    """Yield the departures of ranks that have reached a stage: one, or several if one would be too large."""
    while ranks:
        first = (ranks & -ranks).bit_length() - 1
        piece = ranks >> first & (1 << 8 * _BITMAP_NBYTES_MAX) - 1
        yield Departure(first, piece.to_bytes((piece.bit_length() + 7) // 8, "little"), stage, *account)
        ranks &= ~(piece << first)


def _ranks(first: int, last: int) -> int:
    """Return the ranks from ``first`` to ``last`` as a bit set."""
    return (1 << last + 1) - (1 << first)
