"""Tracks the groups of a rank, and releases a group's tag and communicator when all members have freed the group.

Each member frees a group on its own, and sends the others the number of collectives that it has started and completed.
If all numbers are equal, no message of the group is in progress. Each member then releases the tag and the communicator
(MPI_Comm_free is local in practice: MPI-4.1 section 7.4.3). If the numbers differ or a member is lost, messages may
still arrive, and the group's tag and communicator are never released.

When the members make a group, they agree on its tag: the smallest number that no member has in use.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from asyncdist import tags
from asyncdist.collectives.agreement.messages import Losses, Runs, runs_of
from asyncdist.collectives.groups import Group, Lease
from asyncdist.collectives.membership import MembershipLog
from asyncdist.errors import LocalProtocolError, RemoteProtocolError
from asyncdist.messaging import wire
from asyncdist.transports.base import GroupHandle

#: First tag for groups, which follows the tag of the group of all ranks, and maximum number of groups.
_FIRST_TAG: Final = tags.COLLECTIVE_FIRST + 1
_COUNT_MAX: Final = tags.COLLECTIVE_LAST - tags.COLLECTIVE_FIRST

#: Identity of a group: its ranks in order, and its serial number among the groups of these ranks.
_Key: TypeAlias = tuple[Runs, int]


@dataclass(frozen=True, slots=True)
class Freed:
    """Notifies the other members that the sender has freed a group.

    Attributes:
        serial: Serial number of the group among the groups of the same ranks.
        started: Number of the group's collectives that the sender has started and completed.
        lost: Ranks that the sender knows to be lost.
    """

    ranks: Runs
    serial: int
    started: int
    lost: Losses = ()


@dataclass(slots=True, eq=False)
class _Entry:
    """A group of this rank, and the members that have freed it.

    Attributes:
        freed: Number of collectives that each member had started when it freed the group, by rank.
        done_count: Number of members, from the first, that are known to have freed the group or left the world.
    """

    group: Group
    freed: dict[int, int] = field(default_factory=dict)
    done_count: int = 0


class GroupLedger:
    """Records the groups of one rank and, for each of them, the members that have freed it."""

    def __init__(
        self,
        membership: MembershipLog,
        give_back: Callable[[Group], Awaitable[None]],
        forget: Callable[[Group], None],
    ) -> None:
        self._membership = membership
        self._give_back = give_back
        self._forget = forget
        self._entries: dict[_Key, _Entry] = {}
        self._early: dict[_Key, dict[int, int]] = {}

    def numbers_in_use(self) -> Runs:
        """Return the group numbers in use on this rank. A group's number determines its tag."""
        return runs_of(tuple(sorted(entry.group.tag - _FIRST_TAG for entry in self._entries.values())))

    def tag_of(self, number: int) -> int:
        """Return the tag for the group number that the members agreed on.

        Raise LocalProtocolError if this rank has too many groups.
        """
        if number >= _COUNT_MAX:
            raise LocalProtocolError(
                f"a rank can have at most {_COUNT_MAX} groups at a time; free groups that are no longer needed with "
                "await group.free()",
                number=number,
            )
        return _FIRST_TAG + number

    def open(
        self,
        ranks: tuple[int, ...],
        rank: int,
        tag: int,
        serial: int,
        native: GroupHandle | None,
        *,
        made_after: int = 0,
    ) -> Group:
        """Make the group object on this rank, after all members have agreed on the group.

        ``made_after`` is the number of lost ranks that this rank was notified of before it requested the group.
        """
        lease = Lease(serial, wire.scope_of(ranks, "group", serial), self._give_back, made_after=made_after)
        group = Group(ranks, ranks.index(rank), tag, native, lease)
        self._membership.reset(tag)
        entry = self._entries[_key_of(group)] = _Entry(group)
        for source, started in self._early.pop(_key_of(group), {}).items():
            self._note(entry, source, started)
        return group

    def free(self, group: Group, lost: Losses) -> Freed:
        """Record that this rank has freed the group. Return the message that notifies the other members."""
        started = self._membership.started_of(group)
        self._note(self._entries[_key_of(group)], group.ranks[group.index], started)
        return Freed(runs_of(group.ranks), group.lease.serial, started, lost)

    def on_freed(self, message: Freed, source: int) -> None:
        """Record that another member has freed a group. This rank may not have opened the group yet."""
        entry = self._entries.get((message.ranks, message.serial))
        if entry is None:
            if len(self._early) >= _COUNT_MAX:
                raise RemoteProtocolError(
                    f"rank {source} freed more than {_COUNT_MAX} groups that do not exist on this rank"
                )
            self._early.setdefault((message.ranks, message.serial), {})[source] = message.started
        else:
            self._note(entry, source, message.started)

    def on_gone(self) -> None:
        """Release the groups that all members have freed. A rank frees its groups by leaving the world."""
        for entry in list(self._entries.values()) if self._entries else ():
            self._release(entry)

    def _note(self, entry: _Entry, rank: int, started: int) -> None:
        entry.freed[rank] = started
        if rank != entry.group.ranks[entry.group.index]:
            self._membership.on_freed(entry.group, rank, started)
        self._release(entry)

    def _release(self, entry: _Entry) -> None:
        """Release a group's tag and communicator if all members have freed it and no message of it is in progress."""
        group = entry.group
        if group.ranks[group.index] not in entry.freed or group.tag in self._membership.spoiled_tags:
            return
        # Continue at the last checked member. Checking from the first member each time would take cubic time.
        while entry.done_count < group.size:
            if self._started_by(entry, group.ranks[entry.done_count]) is None:
                return
            entry.done_count += 1
        counts = {self._started_by(entry, rank) for rank in group.ranks}
        if len(counts) == 1 and None not in counts:
            del self._entries[_key_of(group)]
            self._membership.reset(group.tag)
            if group.native is not None:
                group.native.free()
            self._forget(group)

    def _started_by(self, entry: _Entry, rank: int) -> int | None:
        """Return how many collectives ``rank`` had started when it freed the group or left, or None if unknown."""
        started = entry.freed.get(rank)
        return self._membership.started_before_leaving(entry.group, rank) if started is None else started


def _key_of(group: Group) -> _Key:
    return runs_of(group.ranks), group.lease.serial
