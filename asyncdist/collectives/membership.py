"""Tracks in which collectives each member takes part, so that no rank waits for a member that has left.

The members of a group start its collectives in the same order. Each rank counts the collectives that it has started in
each group. It sends the counts of all groups when it leaves the world, and the count of one group when it frees that
group. In collectives with higher numbers, which the departed rank does not enter, the other members get ClosedError.
All earlier collectives continue, because the departed rank completes its part of them.

The count of a lost member is unknown. When a rank is notified of a loss, all its current and later collectives of
groups with the lost rank therefore raise RankLostError. The groups of a mesh's axes also end with the loss of any rank
of the mesh. The remaining ranks make a new group without the lost rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from asyncdist.collectives.agreement.messages import Losses
from asyncdist.collectives.groups import Group, check_open, short
from asyncdist.errors import AsyncdistError, ClosedError, DisagreementError, RankLostError, RemoteError
from asyncdist.transports.rank_sets import RankSet


@dataclass(eq=False, slots=True)
class Participation:
    """A collective in progress on this rank. Calling ``stop`` with an error ends the wait for the collective."""

    group: Group
    number: int
    stop: Callable[[AsyncdistError], object]
    error: AsyncdistError | None = None


class MembershipLog:
    """Counts this rank's collectives. Stops a collective with an error if another member will not take part in it.

    Attributes:
        spoiled_tags: Tags of groups in which a collective failed, so that its messages may still arrive later.
        loss_count: Number of lost ranks that this rank was notified of.
    """

    def __init__(self) -> None:
        self._started: Counter[int] = Counter()
        self._has_left = False
        # Ranks that have left, by the number of collectives that they had started in each group: (tag, number) pairs.
        self._left: dict[tuple[tuple[int, int], ...], RankSet] = {}
        self._freed: dict[int, dict[int, int]] = {}
        self.spoiled_tags: set[int] = set()
        self._lost: set[int] = set()
        self.loss_count = 0
        self._lost_at: dict[int, int] = {}  # number of the last loss of each rank that was ever lost
        self._incarnations: dict[int, int] = {}  # number of restarts of each restarted rank
        self._under_way: dict[Participation, None] = {}  # oldest first

    def begin(self, group: Group) -> int:
        """Count a collective that is about to start, and return its number in the group.

        Raise ClosedError if the collective cannot start.
        """
        check_open(group)
        if self._has_left:
            raise ClosedError(
                f"this rank has left the world, so it cannot start a collective of the group {short(group.ranks)}"
            )
        self._started[group.tag] += 1
        return self._started[group.tag]

    def leave(self) -> None:
        """Refuse further collectives, because this rank is leaving. The result of :meth:`started` is now final."""
        self._has_left = True

    def started(self) -> tuple[tuple[int, int], ...]:
        """Return pairs of a group's tag and its number of started collectives, for the message of a leaving rank."""
        return tuple(self._started.items())

    def check(self, group: Group, number: int) -> None:
        """Raise an error if a collective cannot complete.

        The error is ClosedError if a member has left, and RankLostError if a member is lost.
        """
        if self._left or self._lost_at or self._freed:
            error = self._reason(group, number)
            if error is not None:
                self._started[group.tag] -= 1  # Later collectives of the group will be refused, too.
                raise error

    def enter(self, group: Group, number: int, stop: Callable[[AsyncdistError], object]) -> Participation:
        """Record a collective in progress. ``stop`` is called with an error if a member will not take part in it."""
        entry = Participation(group, number, stop)
        self._under_way[entry] = None
        return entry

    def end(self, entry: Participation) -> None:
        """Record that a collective is no longer in progress. Repeated calls do nothing."""
        self._under_way.pop(entry, None)

    @contextmanager
    def waiting(self, group: Group, number: int, stop: Callable[[AsyncdistError], object]) -> Iterator[Participation]:
        """Record a collective in progress while the block runs. Raise an error if a member will not take part in it."""
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
        """Record that a collective failed with ``error``.

        Its messages may still arrive, unless all members raised the error.
        """
        if not isinstance(error, (RemoteError, DisagreementError)):
            self.spoiled_tags.add(group.tag)

    def is_under_way(self, group: Group) -> bool:
        """Return whether a collective of the group is in progress on this rank."""
        return any(entry.group is group for entry in self._under_way)

    def under_way(self) -> list[tuple[Group, int]]:
        """Return the group and the number of each collective in progress on this rank, oldest first."""
        return [(entry.group, entry.number) for entry in self._under_way]

    def started_of(self, group: Group) -> int:
        """Return the number of collectives of the group that this rank has started."""
        return self._started[group.tag]

    def check_whole(self, group: Group) -> None:
        """Raise RankLostError if a member was restarted after the group was made."""
        for rank in self._incarnations:
            if rank in group.ranks and self.has_lost(group, rank):
                text = f"rank {rank} was restarted, and is not a member of the earlier group {short(group.ranks)}"
                raise RankLostError(f"{text}; make another group", rank=rank)

    def started_before_leaving(self, group: Group, rank: int) -> int | None:
        """Return how many collectives of the group ``rank`` had started when it left.

        Return None if the rank is present or lost.
        """
        if self.has_lost(group, rank):
            return None
        return next((_started_of(group, started) for started, ranks in self._left.items() if rank in ranks), None)

    def has_lost(self, group: Group, rank: int) -> bool:
        """Return whether ``rank`` was lost after the group was made, even if the rank has been restarted since."""
        return self._lost_at.get(rank, 0) > group.lease.made_after

    def on_freed(self, group: Group, rank: int, started: int) -> None:
        """Record that ``rank`` has freed the group, of which it had started ``started`` collectives."""
        self._freed.setdefault(group.tag, {})[rank] = started
        self._fail_incomplete()

    def reset(self, tag: int) -> None:
        """Clear the counts of a tag, because its group was freed or another group will use the tag."""
        for known in (self._started, self._freed):
            known.pop(tag, None)
        self.spoiled_tags.discard(tag)

    def on_lost(self, rank: int) -> None:
        """Record the loss of ``rank``, and end all collectives of its groups."""
        if rank not in self._lost:
            self._lost.add(rank)
            self.loss_count += 1
            self._lost_at[rank] = self.loss_count
        self._fail_incomplete()

    def on_returned(self, rank: int, incarnation: int) -> None:
        """Record the restart of ``rank``, which may now be a member of new groups."""
        self._lost.discard(rank)
        for ranks in self._left.values():
            ranks.discard(rank)
        self._incarnations[rank] = incarnation

    def knows_loss(self, rank: int, incarnation: int) -> bool:
        """Return whether a notice of the loss of ``rank``'s process after ``incarnation`` restarts can be ignored.

        This rank was either notified of that loss before, or was never connected to that process.
        """
        known = self._incarnations.get(rank, 0)
        return incarnation != known or rank in self._lost

    @property
    def lost(self) -> Losses:
        """Lost ranks, each with the number of restarts of its lost process."""
        return tuple((rank, self._incarnations.get(rank, 0)) for rank in sorted(self._lost))

    def on_left(self, ranks: RankSet, started: tuple[tuple[int, int], ...]) -> None:
        """Record that ranks have left the world. Each had started the same numbers of collectives, by group tag."""
        for departed in self._left.values():
            ranks = ranks - departed
        known = self._left.setdefault(started, RankSet())
        known |= ranks
        self._fail_incomplete()

    def _fail_incomplete(self) -> None:
        for entry in list(self._under_way):
            if entry.error is None:
                entry.error = self._reason(entry.group, entry.number)
                if entry.error is not None:
                    self.spoiled_tags.add(entry.group.tag)
                    entry.stop(entry.error)

    def _reason(self, group: Group, number: int) -> AsyncdistError | None:
        for rank in (*group.ranks, *group.lease.bound_to) if self._lost_at else ():
            if self.has_lost(group, rank):
                return RankLostError(_loss_of(rank, group), rank=rank)
        for rank, started in self._freed.get(group.tag, {}).items():
            if started < number:
                return ClosedError(
                    f"rank {rank} has freed the group {short(group.ranks)} and takes no part in this collective",
                    rank=rank,
                )
        absent = RankSet()
        for started_by_tag, departed in self._left.items():
            if _started_of(group, started_by_tag) < number:
                absent |= departed
        for rank in group.ranks if absent else ():
            if rank in absent:
                return ClosedError(
                    f"rank {rank} has left and takes no part in this collective of the group {short(group.ranks)}",
                    rank=rank,
                )
        return None


def _started_of(group: Group, started: tuple[tuple[int, int], ...]) -> int:
    return next((number for tag, number in started if tag == group.tag), 0)


def _loss_of(rank: int, group: Group) -> str:
    argument = "group" if group.lease.serial else ""  # Only the group of all ranks has the serial number 0.
    remedy = f"Pass await ad.surviving_group({argument}) as the group of this call"
    return f"rank {rank} is lost, has left or has never joined, which ends the group {short(group.ranks)}. {remedy}"
