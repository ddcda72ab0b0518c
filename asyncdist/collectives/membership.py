"""Tracks which collectives each member takes part in, so that no rank waits for a member that has left.

Members start the collectives of a group in one order. Each rank therefore counts its started collectives by group, and
sends the counts when it leaves. It takes no part in collectives with higher numbers: ranks that start or await them get
ClosedError. Collectives with lower numbers continue: the leaver has done its part, or does it in the background.

A member that frees a group sends its count of that group, which has the same effect for that group as leaving.

The count of a lost member is unknown, and the others detect the loss at different times: one member may have abandoned
a collective in which the next one still waits for it. A loss therefore ends, on each rank that learns of it, all
current and later collectives of all groups with the lost rank, with RankLostError. The groups of a mesh's axes are
bound to all ranks of the mesh. The survivors make a new group without the lost rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from asyncdist.collectives.agreement.messages import Losses
from asyncdist.collectives.groups import Group, check_open, short
from asyncdist.errors import AsyncdistError, ClosedError, DisagreementError, RankLostError, RemoteError
from asyncdist.transports.rank_sets import RankSet


@dataclass(eq=False, slots=True)
class Participation:
    """A collective in progress on this rank.

    Attributes:
        group: Group of the collective.
        number: Number among the collectives of the group, from 1.
        stop: Ends the wait with an error.
        error: Error with which the wait was ended; or None.
    """

    group: Group
    number: int
    stop: Callable[[AsyncdistError], None]
    error: AsyncdistError | None = None


@dataclass(slots=True)
class _Leavers:
    """Ranks that have left with the same counts of started collectives, by the groups' tags."""

    started: dict[int, int]
    ranks: RankSet = field(default_factory=RankSet)


class MembershipLog:
    """Tracks which collectives this rank has started, and which members take part in them."""

    def __init__(self) -> None:
        self._started: Counter[int] = Counter()
        self._has_left = False
        self._left: dict[tuple[tuple[int, int], ...], _Leavers] = {}  # by their counts of started collectives
        self._freed: dict[int, dict[int, int]] = {}
        self._spoiled: set[int] = set()
        self._lost: set[int] = set()
        self._loss_count = 0
        self._lost_at: dict[int, int] = {}  # for each rank that was ever lost, the number of its last loss
        self._incarnations: dict[int, int] = {}  # of restarted ranks
        self._under_way: dict[Participation, None] = {}  # in the order of their beginning

    def begin(self, group: Group) -> int:
        """Count one more collective of the group; return its number.

        Raises:
            ClosedError: The group was freed on this rank, or this rank has left.
        """
        check_open(group)
        if self._has_left:
            raise ClosedError(f"this rank has left, and cannot start a collective of the group {short(group.ranks)}")
        self._started[group.tag] += 1
        return self._started[group.tag]

    def leave(self) -> None:
        """Start no further collectives, so that :meth:`started` is final."""
        self._has_left = True

    def started(self) -> tuple[tuple[int, int], ...]:
        """Return the number of started collectives of each group, by tag, for the message of a leaving rank."""
        return tuple(self._started.items())

    def check(self, group: Group, number: int) -> None:
        """Raise if a collective can never complete, before this rank sends anything for it.

        Raises:
            ClosedError: A member has left, or freed the group, before the collective.
            RankLostError: A member is lost.
        """
        if self._left or self._lost_at or self._freed:
            error = self._reason(group, number)
            if error is not None:
                self._started[group.tag] -= 1  # later ones will be refused, too
                raise error

    def enter(self, group: Group, number: int, stop: Callable[[AsyncdistError], None]) -> Participation:
        """Note that a collective is in progress until :meth:`end`; ``stop`` gets an error if a member takes no part."""
        entry = Participation(group, number, stop)
        self._under_way[entry] = None
        return entry

    def end(self, entry: Participation) -> None:
        """Note that the collective is no longer in progress. A second call does nothing."""
        self._under_way.pop(entry, None)

    @contextmanager
    def waiting(self, group: Group, number: int, stop: Callable[[AsyncdistError], None]) -> Iterator[Participation]:
        """Note that a collective is in progress while the body runs. Raises as :meth:`check`."""
        self.check(group, number)
        entry = self.enter(group, number, stop)
        try:
            yield entry
        except BaseException as error:
            self.spoil(group, error)
            raise
        finally:
            self.end(entry)

    def spoil(self, group: Group, error: BaseException) -> None:
        """Note that a collective has failed: its messages may still arrive, unless all members raised ``error``."""
        if not isinstance(error, (RemoteError, DisagreementError)):
            self._spoiled.add(group.tag)

    @property
    def spoiled_tags(self) -> Collection[int]:
        """Tags of groups whose messages may still arrive after all members have ended all their collectives."""
        return self._spoiled

    def is_spoiled(self, group: Group) -> bool:
        """Return whether messages of the group may still arrive after all members have ended all its collectives."""
        return group.tag in self._spoiled

    def is_under_way(self, group: Group) -> bool:
        """Return whether this rank is in a collective of the group."""
        return any(entry.group is group for entry in self._under_way)

    def under_way(self) -> list[tuple[Group, int]]:
        """Return the collectives in progress on this rank, each with its number, oldest first."""
        return [(entry.group, entry.number) for entry in self._under_way]

    def started_of(self, group: Group) -> int:
        """Return the number of collectives of the group that this rank has started."""
        return self._started[group.tag]

    def check_whole(self, group: Group) -> None:
        """Raise RankLostError if a member was restarted since the group was made.

        If a lost member was not restarted, a collective start detects the loss itself.
        """
        for rank in self._incarnations:
            if rank in group.ranks and self._has_lost(group, rank):
                text = f"rank {rank} was restarted, and is not a member of the earlier group {short(group.ranks)}"
                raise RankLostError(f"{text}; make another group", rank=rank)

    def left_after(self, group: Group, rank: int) -> int | None:
        """Return the number of collectives that ``rank`` had started when it left; None if present or lost."""
        if self._has_lost(group, rank):
            return None
        return next((each.started.get(group.tag, 0) for each in self._left.values() if rank in each.ranks), None)

    def _has_lost(self, group: Group, rank: int) -> bool:
        """Return whether ``rank`` was lost since the group was made, even if it was restarted."""
        return self._lost_at.get(rank, 0) > group.lease.made_after

    def on_freed(self, group: Group, rank: int, started: int) -> None:
        """Note that ``rank`` has freed the group after starting ``started`` collectives of it."""
        self._freed.setdefault(group.tag, {})[rank] = started
        self._stop_what_cannot_complete()

    def reset(self, tag: int) -> None:
        """Forget the counts of a tag, because its group was freed or a new group has it."""
        for known in (self._started, self._freed):
            known.pop(tag, None)
        self._spoiled.discard(tag)

    def on_lost(self, rank: int) -> None:
        """Note that ``rank`` is lost, and end all collectives of its groups."""
        if rank not in self._lost:
            self._lost.add(rank)
            self._loss_count += 1
            self._lost_at[rank] = self._loss_count
        self._stop_what_cannot_complete()

    def on_returned(self, rank: int, incarnation: int) -> None:
        """Note that ``rank`` was restarted, so that it may be a member of new groups."""
        self._lost.discard(rank)
        for leavers in self._left.values():
            leavers.ranks.discard(rank)
        self._incarnations[rank] = incarnation

    def has_heard_of(self, rank: int, incarnation: int) -> bool:
        """Return whether this rank knows of the loss of that process of ``rank``, or never met it."""
        known = self._incarnations.get(rank, 0)
        return incarnation != known or rank in self._lost

    @property
    def loss_count(self) -> int:
        """Number of losses that this rank knows of."""
        return self._loss_count

    @property
    def lost(self) -> Losses:
        """Ranks that are known to be lost, to this rank or to a rank that has left, with their incarnations."""
        return tuple((rank, self._incarnations.get(rank, 0)) for rank in sorted(self._lost))

    def on_left(self, ranks: RankSet, started: tuple[tuple[int, int], ...]) -> None:
        """Note that ranks have left, and how many collectives each of them had started by tag."""
        for leavers in self._left.values():
            ranks = ranks - leavers.ranks
        self._left.setdefault(started, _Leavers(dict(started))).ranks |= ranks
        self._stop_what_cannot_complete()

    def _stop_what_cannot_complete(self) -> None:
        for entry in list(self._under_way):
            if entry.error is None:
                entry.error = self._reason(entry.group, entry.number)
                if entry.error is not None:
                    self._spoiled.add(entry.group.tag)
                    entry.stop(entry.error)

    def _reason(self, group: Group, number: int) -> AsyncdistError | None:
        for rank in (*group.ranks, *group.lease.bound_to) if self._lost_at else ():
            if self._has_lost(group, rank):
                return RankLostError(f"rank {rank} is gone, which ends the group {short(group.ranks)}", rank=rank)
        for rank, started in self._freed.get(group.tag, {}).items():
            if started < number:
                return ClosedError(
                    f"rank {rank} has freed the group {short(group.ranks)} and takes no part in this collective of it",
                    rank=rank,
                )
        absent = RankSet()
        for leavers in self._left.values():
            if leavers.started.get(group.tag, 0) < number:
                absent |= leavers.ranks
        for rank in group.ranks if absent else ():
            if rank in absent:
                return ClosedError(
                    f"rank {rank} has left and takes no part in this collective of the group {short(group.ranks)}",
                    rank=rank,
                )
        return None
