"""Decides which announcements a rank must send to its neighbours in a tree when ranks leave or end.

In a small world, each rank notifies all others when its ``main`` returns, and when it has ended. In a larger world, it
notifies only the ranks with which it has exchanged messages. The remaining ranks are notified along the tree of
:class:`SpanningTree`, with the announcements that this module selects.

- A rank notifies its parent as soon as its whole subtree has reached a stage. When all ranks have reached the stage,
  the root announces this down the tree.
- If some ranks continue, the departures of the others are combined into bitmaps. They are sent with a delay up to the
  root, and down to all ranks.
- After all ranks have ended, each rank acknowledges this to its parent as soon as its whole subtree knows it. Then the
  root announces the stage ``HEARD``, and only then may ranks exit. A rank whose ancestors are lost can thus still be
  notified by any living rank.
- A rank that becomes a neighbour after a loss is sent all announcements. Announcements are also repeated to a parent
  that has not answered for a long time, because a message may have been corrupted. Repeated announcements have no
  effect.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from asyncdist.collectives.agreement.messages import Losses, Runs
from asyncdist.collectives.agreement.tree_shape import halves, path_to
from asyncdist.errors import RemoteProtocolError
from asyncdist.messaging.wire import PAYLOAD_NBYTES_MAX
from asyncdist.transports.rank_sets import RankSet


class Stage(enum.IntEnum):
    """Stages of a rank's end: ``main`` runs, it returned, the rank ended, all ranks know that all have ended."""

    IN_MAIN = 0
    LEFT = 1
    ENDED = 2
    HEARD = 3


#: Maximum size in bytes of a bitmap.
_BITMAP_NBYTES_MAX: Final = 8192
#: Maximum total of :attr:`Departure.nbytes` in one message.
_MESSAGE_NBYTES_MAX: Final = PAYLOAD_NBYTES_MAX - 64
#: Upper bounds of the encoded sizes in bytes of a pair of integers, and of a departure without its bitmap and pairs.
_PAIR_NBYTES_MAX: Final = 20
_DEPARTURE_NBYTES_MAX: Final = 64

#: Details of a leaving rank: its numbers of started collectives by group, the ranks that it knows to be lost, and the
#: ranks that it notifies directly.
_Account: TypeAlias = tuple[tuple[tuple[int, int], ...], Losses, Runs]


@dataclass(frozen=True, slots=True)
class Departure:
    """Announces that some ranks have reached a stage of their end.

    Attributes:
        first: Rank of the lowest bit in the first byte of ``bitmap``.
        bitmap: Bit set of the ranks that have reached the stage.
        started: Pairs of a group's tag and the number of collectives that each announced rank has started in the group.
        lost: Ranks that the announced ranks know to be lost.
        told: Ranks that each announced rank notifies directly, although it has received no message from them.
    """

    first: int
    bitmap: bytes
    stage: int
    started: tuple[tuple[int, int], ...] = ()
    lost: Losses = ()
    told: Runs = ()

    @classmethod
    def of(cls, rank: int, stage: Stage, *account: *_Account) -> Departure:
        """Return the announcement that a single rank has reached a stage of its end."""
        return cls(rank, b"\x01", stage, *account)

    @property
    def nbytes(self) -> int:
        """Upper bound of the encoded size in bytes."""
        pair_count = len(self.started) + len(self.lost) + len(self.told)
        return _DEPARTURE_NBYTES_MAX + len(self.bitmap) + pair_count * _PAIR_NBYTES_MAX

    @property
    def ranks(self) -> RankSet:
        """Ranks that have reached the stage."""
        return RankSet.of_bits(int.from_bytes(self.bitmap, "little") << self.first)


@dataclass(frozen=True, slots=True)
class Departed:
    """Notifies a neighbour in the tree of new departures, and of the stage that all ranks have reached."""

    departures: tuple[Departure, ...]
    stage: int


@dataclass(frozen=True, slots=True)
class EndAcknowledged:
    """Acknowledges that the sender's whole subtree knows that all ranks have ended."""


class Departures:
    """Records which ranks have left or ended, and which of these departures each neighbour in the tree knows of.

    Attributes:
        tree: Tree of the living ranks. This rank sends to its neighbours in the tree.
        stage: Stage that all ranks are known to have reached.
    """

    def __init__(self, size: int, rank: int) -> None:
        self._size = size
        self._rank = rank
        self.tree = SpanningTree(size, rank)
        self._known = _Reached()
        self._announced = _Reached()  # departures announced by the root, to be sent to the children
        self._accounts: dict[_Account, int] = {}  # bit sets of ranks, by their details
        self._lost = 0
        self._sent: dict[int, _Reached] = {neighbour: _Reached() for neighbour in self.tree.neighbours}
        self._sent_stage: dict[int, int] = dict.fromkeys(self.tree.neighbours, 0)
        self._informed: set[int] = set()
        self._unanswered: set[int] = set()  # neighbours that are waiting for this rank's acknowledgement
        self.stage = Stage.IN_MAIN

    def add(self, departure: Departure, source: int) -> list[Departure]:
        """Add an announcement from ``source``. Return the part that was not known before.

        Raises:
            RemoteProtocolError: The announcement is invalid.
        """
        is_known_stage = departure.stage in (Stage.LEFT, Stage.ENDED)
        if not is_known_stage or not 0 <= departure.first < self._size or not 0 < self._extent(departure) <= self._size:
            raise RemoteProtocolError(f"the departure {departure!r:.200} is not valid in a world of {self._size} ranks")
        ranks, stage = departure.ranks.bits, Stage(departure.stage)
        account = departure.started, departure.lost, departure.told
        unknown, unaccounted = ranks & ~self._known.at(stage), ranks & ~self._known.left
        if unaccounted:
            self._accounts[account] = self._accounts.get(account, 0) | unaccounted
        self._known.add(ranks, stage)
        if source == self.tree.parent:
            self._sent[source].add(ranks, stage)
        if source != self._rank and source not in self.tree.children:
            self._announced.add(ranks, stage)
        return list(_departures(unknown, stage, account))

    @staticmethod
    def _extent(departure: Departure) -> int:
        """Return one more than the highest rank in the departure, or 0 if it contains no rank."""
        length = int.from_bytes(departure.bitmap, "little").bit_length()
        return length and departure.first + length

    def on_departed(self, message: Departed, source: int) -> list[Departure]:
        """Record the departures in a neighbour's message. Return the departures that were unknown before.

        Raises:
            RemoteProtocolError: The message is invalid.
        """
        new = [part for departure in message.departures for part in self.add(departure, source)]
        if message.stage not in tuple(Stage):
            raise RemoteProtocolError(f"the stage of a departure message must be a known one, got {message.stage}")
        if self.stage >= Stage.ENDED and message.stage < Stage.ENDED and source not in self._informed:
            self._sent_stage[source] = 0  # The neighbour repeats its message, because this rank's answer was lost.
        self.stage = max(self.stage, Stage(message.stage))
        if message.stage == Stage.ENDED:
            self._unanswered.add(source)
        elif message.stage == Stage.HEARD:
            self._sent_stage[source] = Stage.HEARD
        return new

    def on_end_known(self, source: int) -> None:
        """Record that a neighbour's whole subtree knows that all ranks have ended."""
        self._informed.add(source)
        if self.stage == Stage.HEARD:  # The neighbour has not reached the stage HEARD, or has a new parent.
            self._sent_stage[source] = Stage.ENDED

    def take_answers(self) -> set[int]:
        """Remove and return the neighbours to which :class:`EndAcknowledged` must be sent now."""
        ranks: set[int] = set()
        if self._does_subtree_know_end:
            ranks, self._unanswered = self._unanswered, ranks
        return ranks

    def on_lost(self, rank: int) -> None:
        """Record that ``rank`` is lost and need not end, and connect its neighbours in the tree to other ranks."""
        self._lost |= 1 << rank
        self.tree.on_lost(rank)
        self._sent = {neighbour: self._sent.get(neighbour, _Reached()) for neighbour in self.tree.neighbours}
        self._sent_stage = {neighbour: self._sent_stage.get(neighbour, 0) for neighbour in self.tree.neighbours}

    def resend_announcements(self) -> None:
        """Make :meth:`urgent` return unanswered messages a second time."""
        parent = self.tree.parent
        if parent is not None and self._sent_stage[parent] > self.stage:
            self._sent[parent], self._sent_stage[parent] = _Reached(), 0
        if self.stage == Stage.ENDED:
            if parent is not None:
                self._unanswered.add(parent)
            for child in self.tree.children:
                if child not in self._informed:
                    self._sent_stage[child] = 0

    @property
    def is_answered(self) -> bool:
        """Whether this rank's neighbours in the tree have answered all its messages that need an answer."""
        parent = self.tree.parent
        return self.is_over if self.stage >= Stage.ENDED else parent is None or self._sent_stage[parent] <= self.stage

    def urgent(self) -> list[tuple[int, Departed]]:
        """Return the announcements that must be sent to neighbours immediately, each with its receiver."""
        parent = self.tree.parent
        reached = self._reached()
        if parent is None and reached > self.stage:
            self.stage = reached
            self._announced.add_all(self._known)
        messages = []
        for neighbour in self.tree.neighbours:
            stage = min(max(self.stage, reached), Stage.ENDED) if neighbour == parent else self.stage
            sent = self._departures_for(neighbour) if self._sent_stage[neighbour] < stage or neighbour != parent else []
            if self._sent_stage[neighbour] < stage:
                self._sent_stage[neighbour] = stage
                sent = sent or [Departed((), self.stage)]
            messages += [(neighbour, message) for message in sent]
        return messages

    def others(self) -> list[tuple[int, Departed]]:
        """Return the announcements that may be delayed and combined with later ones, each with its receiver."""
        parent = self.tree.parent
        if parent is not None:
            return [(parent, message) for message in self._departures_for(parent)]
        self._announced.add_all(self._known)
        return [(child, message) for child in self.tree.children for message in self._departures_for(child)]

    @property
    def has_more(self) -> bool:
        """Whether :meth:`others` may return messages."""
        parent = self.tree.parent
        sent = self._announced if parent is None else self._sent[parent]
        return self.stage < Stage.ENDED and self._known.has_more_than(sent)

    @property
    def is_over(self) -> bool:
        """Whether every rank knows that all ranks have ended, and this rank's children have been notified of it."""
        return self.stage == Stage.HEARD and all(self._sent_stage[child] == self.stage for child in self.tree.children)

    @property
    def _does_subtree_know_end(self) -> bool:
        return self.stage >= Stage.ENDED and self._informed.issuperset(self.tree.children)

    def _reached(self) -> Stage:
        if self._does_subtree_know_end:
            return Stage.HEARD
        everybody = RankSet(range(self.tree.first, self.tree.last + 1)).bits
        for stage in Stage.ENDED, Stage.LEFT:
            if not everybody & ~(self._known.at(stage) | self._lost):
                return stage
        return Stage.IN_MAIN

    def _departures_for(self, neighbour: int) -> list[Departed]:
        """Return messages with the departures that ``neighbour`` does not know of.

        Return none if all ranks have ended.
        """
        known, sent = self._known if neighbour == self.tree.parent else self._announced, self._sent[neighbour]
        ended = known.ended & ~sent.ended
        left = known.left & ~sent.left & ~ended
        if self.stage >= Stage.ENDED or not ended | left:
            return []
        sent.add_all(known)
        departures = [
            departure
            for account, ranks in self._accounts.items()
            for stage, some in ((Stage.LEFT, left), (Stage.ENDED, ended))
            for departure in _departures(ranks & some, stage, account)
        ]
        self._forget_direct_notices()
        return [Departed(tuple(some), self.stage) for some in _fitting(departures)]

    def _forget_direct_notices(self) -> None:
        """If all neighbours know of an ended rank's end, forget which ranks it notifies directly."""
        settled = self._known.ended
        for sent in self._sent.values():
            settled &= sent.ended
        for account in [account for account, ranks in self._accounts.items() if account[2] and ranks & settled]:
            ranks, plain = self._accounts.pop(account), (*account[:2], ())
            self._accounts[plain] = self._accounts.get(plain, 0) | ranks & settled
            if ranks & ~settled:
                self._accounts[account] = ranks & ~settled


@dataclass(slots=True)
class _Reached:
    """Bit sets of the ranks on which ``main`` has returned, and of the ranks that have ended."""

    left: int = 0
    ended: int = 0

    def at(self, stage: Stage) -> int:
        return self.ended if stage == Stage.ENDED else self.left

    def add(self, ranks: int, stage: Stage) -> None:
        self.left |= ranks
        if stage == Stage.ENDED:
            self.ended |= ranks

    def add_all(self, other: _Reached) -> None:
        self.left |= other.left
        self.ended |= other.ended

    def has_more_than(self, other: _Reached) -> bool:
        return bool(self.left & ~other.left | self.ended & ~other.ended)


def _departures(ranks: int, stage: Stage, account: _Account) -> Iterator[Departure]:
    """Yield announcements that together contain ``ranks``. There are several if one bitmap would be too large."""
    while ranks:
        first = (ranks & -ranks).bit_length() - 1
        piece = ranks >> first & (1 << 8 * _BITMAP_NBYTES_MAX) - 1
        yield Departure(first, piece.to_bytes((piece.bit_length() + 7) // 8, "little"), stage, *account)
        ranks &= ~(piece << first)


def _fitting(departures: Iterable[Departure]) -> Iterator[list[Departure]]:
    """Divide announcements among as few messages as fit into frames."""
    some: list[Departure] = []
    room = _MESSAGE_NBYTES_MAX
    for departure in departures:
        if some and departure.nbytes > room:
            yield some
            some, room = [], _MESSAGE_NBYTES_MAX
        some.append(departure)
        room -= departure.nbytes
    if some:
        yield some


class SpanningTree:
    """Parent, children and subtree of one rank in a binary tree, along which messages reach all ranks in few hops.

    The root is rank 0, and every subtree is a range of consecutive ranks. Lost ranks are omitted. Their children become
    children of the closest living ancestor, or of the lowest living rank. Ranks are notified of a loss at different
    times, and temporarily see different trees. Messages along the tree must therefore tolerate duplicates, and must be
    sent again to new neighbours.

    Attributes:
        level: Depth of this rank in the tree if no rank is lost.
        first, last: First and last rank of this rank's subtree, which may include lost ranks.
    """

    def __init__(self, size: int, rank: int) -> None:
        self._size = size
        self._rank = rank
        self._lost: set[int] = set()
        self._above, self._own_last = path_to(size, rank)
        self.level = len(self._above)
        self._arrange()

    def on_lost(self, rank: int) -> None:
        """Remove a lost rank from the tree."""
        self._lost.add(rank)
        if rank in self.neighbours:
            self._arrange()

    @property
    def neighbours(self) -> tuple[int, ...]:
        """This rank's parent in the tree, if it has one, and its children."""
        return self.children if self.parent is None else (self.parent, *self.children)

    def _arrange(self) -> None:
        living = [rank for rank in reversed(self._above) if rank not in self._lost]
        root = next(rank for rank in range(self._rank + 1) if rank == self._rank or rank not in self._lost)
        self.first, self.last = self._rank, self._own_last
        if living:
            self.parent: int | None = living[0]
        elif root != self._rank:
            self.parent = root
        else:
            self.parent = None
            self.first, self.last = 0, self._size - 1
        if self.parent is None and self._rank:
            tops: Iterator[int] = self._living_below(0, self._size - 1)
            self.children: tuple[int, ...] = tuple(
                rank for rank in (*tops, *self._living_children(self._rank, self._own_last)) if rank != self._rank
            )
        else:
            self.children = tuple(self._living_children(self._rank, self._own_last))

    def _living_children(self, rank: int, last: int) -> Iterator[int]:
        """Yield the living children of ``rank``. Each lost child is replaced by its own living children."""
        for first, end in halves(rank, last):
            yield from self._living_below(first, end)

    def _living_below(self, rank: int, last: int) -> Iterator[int]:
        if rank in self._lost:
            yield from self._living_children(rank, last)
        else:
            yield rank
