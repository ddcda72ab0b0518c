"""Tracks which collectives each member takes part in, so that no rank waits for a member that has left.

Members start the collectives of a group in one order, so each rank counts those that it has started, by group, and says
the counts when it leaves. In a collective with a higher number the leaver takes no part: a rank that starts it or waits
in it gets ClosedError, and so does what the leaver's cancelled calls have left in the background. One with a lower
number goes on: the leaver has done its part, or does it in the background.

A member that frees a group sends its count of that group: to the others it is as if it had left.

Of a lost member nobody knows what it has started, and the others find out at different times: one may have given up the
collective in which the next one waits for it. So a loss ends, on each rank that hears of it, the collectives of all
groups with that member, those under way and those to come, with RankLostError; also where another member has left,
which may have found out. The groups of a mesh's axes are as one in this: they are bound to all ranks of the mesh. The
others make a group without it.
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
    """A collective of this rank that is under way.

    Attributes:
        group: its members.
        number: its place among those of the group, from 1.
        stop: ends the wait.
        error: why it was stopped.
    """

    group: Group
    number: int
    stop: Callable[[AsyncdistError], None]
    error: AsyncdistError | None = None


@dataclass(slots=True)
class _Leavers:
    """Ranks that have left, and of each group's tag how many collectives each of them had started."""

    started: dict[int, int]
    ranks: RankSet = field(default_factory=RankSet)


class MembershipLog:
    """Tracks which collectives this rank has started, and which members take part in them."""

    def __init__(self) -> None:
        self._started: Counter[int] = Counter()
        self._has_left = False
        self._left: dict[tuple[tuple[int, int], ...], _Leavers] = {}  # by what each of them had started
        self._freed: dict[int, dict[int, int]] = {}
        self._spoiled: set[int] = set()
        self._lost: set[int] = set()
        self._loss_count = 0
        self._lost_at: dict[int, int] = {}  # of each rank that was ever lost, the number of its last loss
        self._incarnations: dict[int, int] = {}  # of ranks that have been started again
        self._under_way: dict[Participation, None] = {}  # in the order in which they began

    def begin(self, group: Group) -> int:
        """Count one more collective of the group; return its number.

        Raises:
            ClosedError: the group was freed here; or this rank has left, so the others take no part in the collective.
        """
        check_open(group)
        if self._has_left:
            raise ClosedError(f"this rank has left and starts no collective of the group {short(group.ranks)} any more")
        self._started[group.tag] += 1
        return self._started[group.tag]

    def leave(self) -> None:
        """Start no collective any more: :meth:`started`, which the others are told now, is final."""
        self._has_left = True

    def started(self) -> tuple[tuple[int, int], ...]:
        """Return how many collectives this rank has started of each group, by tag: a leaving rank sends it."""
        return tuple(self._started.items())

    def check(self, group: Group, number: int) -> None:
        """Refuse a collective that can never complete, before this rank sends anything for it.

        Raises:
            ClosedError: a member has left, or freed the group, before it.
            RankLostError: a member is lost.
        """
        if self._left or self._lost_at or self._freed:
            error = self._reason(group, number)
            if error is not None:
                self._started[group.tag] -= 1  # so are those that were counted after it: they will be refused, too
                raise error

    def enter(self, group: Group, number: int, stop: Callable[[AsyncdistError], None]) -> Participation:
        """Note a collective as under way until :meth:`end`; ``stop`` gets an error if a member takes no part in it."""
        entry = Participation(group, number, stop)
        self._under_way[entry] = None
        return entry

    def end(self, entry: Participation) -> None:
        """Note that the collective is not under way any more. A second call does nothing."""
        self._under_way.pop(entry, None)

    @contextmanager
    def waiting(self, group: Group, number: int, stop: Callable[[AsyncdistError], None]) -> Iterator[Participation]:
        """Wait in a collective, as :meth:`enter` says. Raises as :meth:`check`."""
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
        """Note that a collective ended with an error: its messages may still come, unless all members raised it."""
        if not isinstance(error, (RemoteError, DisagreementError)):
            self._spoiled.add(group.tag)

    @property
    def spoiled_tags(self) -> Collection[int]:
        """Tags of the groups whose messages may still come after all members have ended all their collectives."""
        return self._spoiled

    def is_spoiled(self, group: Group) -> bool:
        """Return whether messages of the group may still come after all members have ended all its collectives."""
        return group.tag in self._spoiled

    def is_under_way(self, group: Group) -> bool:
        """Return whether this rank is in a collective of the group."""
        return any(entry.group is group for entry in self._under_way)

    def under_way(self) -> list[tuple[Group, int]]:
        """Return the collectives that this rank is in, each with its number, oldest first."""
        return [(entry.group, entry.number) for entry in self._under_way]

    def started_of(self, group: Group) -> int:
        """Return how many collectives of the group this rank has started."""
        return self._started[group.tag]

    def check_whole(self, group: Group) -> None:
        """Refuse what is to be started anew on a group that has lost a member, whose place a new process has.

        Where no process has it, the start itself finds out.

        Raises:
            RankLostError: a member was started again since the group was made.
        """
        for rank in self._incarnations:
            if rank in group.ranks and self._has_lost(group, rank):
                text = f"rank {rank} was started again, and is no member of the earlier group {short(group.ranks)}"
                raise RankLostError(f"{text}; make another group", rank=rank)

    def left_after(self, group: Group, rank: int) -> int | None:
        """Return how many ``rank`` had started when it left; None where it has not left, or is lost and did not say."""
        if self._has_lost(group, rank):
            return None
        return next((each.started.get(group.tag, 0) for each in self._left.values() if rank in each.ranks), None)

    def _has_lost(self, group: Group, rank: int) -> bool:
        """Return whether ``rank`` was lost since the group was made; a new process in its place is no member."""
        return self._lost_at.get(rank, 0) > group.lease.made_after

    def on_freed(self, group: Group, rank: int, started: int) -> None:
        """Note that ``rank`` has freed the group after starting ``started`` collectives of it."""
        self._freed.setdefault(group.tag, {})[rank] = started
        self._stop_what_cannot_complete()

    def reset(self, tag: int) -> None:
        """Forget what was counted under a tag: no group has it any more, or a new one has."""
        for known in (self._started, self._freed):
            known.pop(tag, None)
        self._spoiled.discard(tag)

    def on_lost(self, rank: int) -> None:
        """Note that ``rank`` has died: no collective of a group with it goes on."""
        if rank not in self._lost:
            self._lost.add(rank)
            self._loss_count += 1
            self._lost_at[rank] = self._loss_count
        self._stop_what_cannot_complete()

    def on_returned(self, rank: int, incarnation: int) -> None:
        """Note that a new process has the place of ``rank``: it may be in groups that are made from now on."""
        self._lost.discard(rank)
        for leavers in self._left.values():
            leavers.ranks.discard(rank)
        self._incarnations[rank] = incarnation

    def has_heard_of(self, rank: int, incarnation: int) -> bool:
        """Return whether the loss of that process of ``rank`` says nothing new here: it is known, or was never met."""
        known = self._incarnations.get(rank, 0)
        return incarnation != known or rank in self._lost

    @property
    def loss_count(self) -> int:
        """How many losses this rank has heard of."""
        return self._loss_count

    @property
    def lost(self) -> Losses:
        """Ranks that are known to be lost, on this rank or on a rank that has left, with their incarnations."""
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
                return RankLostError(f"rank {rank} is gone, and with it the group {short(group.ranks)}", rank=rank)
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
