"""Keeps a leader's role in a round, and what has happened to it, for the other ranks of its replica.

Each of these has a :class:`RoundMember` of its own, which is told the same in the same order (:func:`follow`). So all
ranks of a replica have one role, but for what happens to their own streams. Like `protocols.selective.member` it is
synchronous, and knows neither a loop nor a clock.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from typing import Any, Final, TypeAlias

from asyncdist.protocols.selective.member import EnterEpoch, Instructions, RoundMember
from asyncdist.protocols.selective.messages import Assign, End, Frozen

#: The coordinator is gone, as the reason says; another one has begun an epoch.
GONE: Final = "gone"
EPOCH: Final = "epoch"

#: What the leader tells its replica: a kind, the round or the epoch, and the fields of the coordinator's message.
Happening: TypeAlias = tuple[str, int, tuple[Any, ...]]


class LeadingMember(RoundMember):
    """Is the member whose events others repeat.

    Attributes:
        assignment_count: of assignments so far. Rounds may have the number of an earlier coordinator's.
        happenings: since the replica was told of the last one.
    """

    __slots__ = ("assignment_count", "happenings")

    def __init__(self) -> None:
        super().__init__()
        self.assignment_count = 0
        self.happenings: list[Happening] = []

    def take_happenings(self) -> tuple[Happening, ...]:
        """Return, once, what has happened."""
        happenings, self.happenings = tuple(self.happenings), []
        return happenings

    def on_assign(self, assign: Assign, round: int) -> Instructions:
        """As :class:`RoundMember`."""
        self.assignment_count += 1
        self._add(Assign.__name__, round, *astuple(replace(assign, restarted=())))
        return super().on_assign(assign, round)

    def on_frozen(self, frozen: Frozen, round: int) -> Instructions:
        """As :class:`RoundMember`."""
        self._add(Frozen.__name__, round, *astuple(frozen))
        return super().on_frozen(frozen, round)

    def on_end(self, reason: str, round: int) -> Instructions:
        """As :class:`RoundMember`."""
        self._add(End.__name__, round, reason)
        return super().on_end(reason, round)

    def on_coordinator_gone(self, why: str) -> Instructions:
        """As :class:`RoundMember`."""
        self._add(GONE, 0, why)
        return super().on_coordinator_gone(why)

    def on_epoch(self, epoch: int, incarnation: int) -> Instructions:
        """As :class:`RoundMember`."""
        self._add(EPOCH, epoch)
        return super().on_epoch(epoch, incarnation)

    def on_failed(self, round: int, reason: str) -> Instructions:
        """As :class:`RoundMember`; the whole replica gives the round up."""
        instructions = super().on_failed(round, reason)
        if instructions:
            self._add(End.__name__, round, reason)
        return instructions

    def on_refused(self, round: int, reason: str) -> Instructions:
        """As :class:`RoundMember`; the whole replica gives the round up."""
        instructions = super().on_refused(round, reason)
        if instructions:
            self._add(End.__name__, round, reason)
        return instructions

    def _add(self, kind: str, number: int, *fields: Any) -> None:
        self.happenings.append((kind, number, fields))


class FollowingMember(RoundMember):
    """Is the member of a rank that follows its replica's leader.

    Attributes:
        assignment_count: of assignments so far; equal to the leader's where both speak of one round.
        failure: why this rank has given that round up; "" if it has not.
    """

    __slots__ = ("assignment_count", "failure")

    def __init__(self) -> None:
        super().__init__()
        self.assignment_count = 0
        self.failure = ""

    def on_assign(self, assign: Assign, round: int) -> Instructions:
        """As :class:`RoundMember`."""
        self.assignment_count += 1
        self.failure = ""
        return super().on_assign(assign, round)

    def on_failed(self, round: int, reason: str) -> Instructions:
        """As :class:`RoundMember`."""
        instructions = super().on_failed(round, reason)
        if instructions:
            self.failure = reason
        return instructions

    def repeat(self, happenings: Sequence[Happening], counterparts: Mapping[int, int]) -> Iterator[Instructions]:
        """Repeat what has happened at the leader, and yield this member's answer to each event in turn.

        The instructions of one event are to be carried out before the next event.

        Args:
            happenings: At the leader.
            counterparts: Maps each replica's leader to the rank that this rank exchanges with, in the same order.
        """
        for kind, number, fields in happenings:
            if kind == Assign.__name__:
                yield self.on_assign(_assign_among(Assign(*fields), counterparts), number)
            elif kind == Frozen.__name__:
                yield self.on_frozen(_frozen_among(Frozen(*fields), counterparts), number)
            elif kind == End.__name__:
                yield self.on_end(fields[0], number)
            elif kind == GONE:
                yield self.on_coordinator_gone(fields[0])
            else:
                assert kind == EPOCH, f"the leader tells of {kind!r}"
                yield (EnterEpoch(number),)


def _assign_among(assign: Assign, counterparts: Mapping[int, int]) -> Assign:
    def among(ranks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(counterparts[rank] for rank in ranks)

    return replace(
        assign,
        donors=among(assign.donors),
        replacers=among(assign.replacers),
        best=counterparts.get(assign.best, -1),
        reducers=among(assign.reducers),
        sources=among(assign.sources),
    )


def _frozen_among(frozen: Frozen, counterparts: Mapping[int, int]) -> Frozen:
    return replace(
        frozen,
        donors=tuple(counterparts[rank] for rank in frozen.donors),
        best=counterparts.get(frozen.best, -1),
        reducers=tuple(counterparts[rank] for rank in frozen.reducers),
    )
