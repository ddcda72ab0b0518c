"""State machines of the ranks that share a sharded model. The first rank leads, and the others repeat its events.

Every rank of a replica has its own :class:`RoundMember`. The followers' state machines receive the leader's events in
the same order, so that all ranks of a replica have the same role in a round. Only failures of exchanges may differ.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from typing import Any, Final, TypeAlias

from asyncdist.protocols.selective.member import EnterEpoch, Instructions, RoundMember
from asyncdist.protocols.selective.messages import Assign, End, Frozen

#: Events other than messages about a round: the coordinator is lost, and a new coordinator has taken over.
GONE: Final = "gone"
EPOCH: Final = "epoch"

#: Event that a replica's leader sends to its followers: kind, round or epoch, and the message's fields.
LeaderEvent: TypeAlias = tuple[str, int, tuple[Any, ...]]


class LeadingMember(RoundMember):
    """Runs the state machine of a replica's first rank, and records its events for the replica's other ranks.

    Attributes:
        assignment_count: Number of assignments received. It identifies a round even if a new coordinator reuses its
            number.
        unsent_events: Events that have not been sent to the followers yet.
    """

    def __init__(self) -> None:
        super().__init__()
        self.assignment_count = 0
        self.unsent_events: list[LeaderEvent] = []

    def take_events(self) -> tuple[LeaderEvent, ...]:
        """Remove and return the recorded events, which the leader then sends to its followers."""
        events, self.unsent_events = tuple(self.unsent_events), []
        return events

    def on_assign(self, assign: Assign, round: int) -> Instructions:
        """Begin the assigned role in a new averaging round, and record the assignment for the followers."""
        self.assignment_count += 1
        self._add(Assign.__name__, round, *astuple(replace(assign, restarted=())))
        return super().on_assign(assign, round)

    def on_frozen(self, frozen: Frozen, round: int) -> Instructions:
        """Begin to add up the donors' snapshots, and record the ``Frozen`` message for the followers."""
        self._add(Frozen.__name__, round, *astuple(frozen))
        return super().on_frozen(frozen, round)

    def on_end(self, reason: str, round: int) -> Instructions:
        """End this member's role in ``round``, and record the end for the followers."""
        self._add(End.__name__, round, reason)
        return super().on_end(reason, round)

    def on_coordinator_gone(self, why: str) -> Instructions:
        """End the current role after the loss of the coordinator, and record the loss for the followers."""
        self._add(GONE, 0, why)
        return super().on_coordinator_gone(why)

    def on_epoch(self, epoch: int, incarnation: int) -> Instructions:
        """Follow the new coordinator with number ``epoch``, and record the event for the followers."""
        self._add(EPOCH, epoch)
        return super().on_epoch(epoch, incarnation)

    def on_failed(self, round: int, reason: str) -> Instructions:
        """Abandon a round whose average could not be received or applied, and record its end for the followers."""
        instructions = super().on_failed(round, reason)
        if instructions:
            self._add(End.__name__, round, reason)
        return instructions

    def _add(self, kind: str, number: int, *fields: Any) -> None:
        self.unsent_events.append((kind, number, fields))


class FollowingMember(RoundMember):
    """Runs the state machine of another rank of a replica, which repeats the events of the replica's first rank.

    Attributes:
        assignment_count: Number of assignments received; equal to the leader's if both are in the same round.
        failure: Reason why this rank has abandoned the last assigned round, or "".
    """

    def __init__(self) -> None:
        super().__init__()
        self.assignment_count = 0
        self.failure = ""

    def on_assign(self, assign: Assign, round: int) -> Instructions:
        """Begin the assigned role in a new averaging round, and count the assignment."""
        self.assignment_count += 1
        self.failure = ""
        return super().on_assign(assign, round)

    def on_failed(self, round: int, reason: str) -> Instructions:
        """Abandon a round whose average could not be received, and store the reason for the leader."""
        instructions = super().on_failed(round, reason)
        if instructions:
            self.failure = reason
        return instructions

    def repeat(self, events: Sequence[LeaderEvent], counterparts: Mapping[int, int]) -> Iterator[Instructions]:
        """Repeat the leader's events, and yield the instructions for each event.

        The caller must execute the instructions for one event before it requests the next.

        Args:
            counterparts: Rank of each replica that has the same shards as this rank, by the replica's leader.
        """
        for kind, number, fields in events:
            if kind == Assign.__name__:
                yield self.on_assign(_assign_among(Assign(*fields), counterparts), number)
            elif kind == Frozen.__name__:
                yield self.on_frozen(_frozen_among(Frozen(*fields), counterparts), number)
            elif kind == End.__name__:
                yield self.on_end(fields[0], number)
            elif kind == GONE:
                yield self.on_coordinator_gone(fields[0])
            else:
                assert kind == EPOCH, f"unknown event {kind!r} of the leader"
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
