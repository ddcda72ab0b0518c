"""Keeps the groups of a rank; gives tag and communicator back when all members have freed the group.

A member frees a group by itself and tells the others how many collectives of it it has started. Each of them has then
completed here, so when all members have said the same number no message of the group is under way, and tag and
communicator are given back on each member as soon as it has heard that (MPI_Comm_free is local in practice: MPI-4.1
section 7.4.3). Where the numbers differ a collective was left unfinished, and its messages may still come; where a
member is lost nobody knows how many it had started. Such a group keeps its tag and its communicator to the end.

Numbers of tags are agreed when a group is made: the smallest that no member has in use
(:mod:`asyncdist.collectives.agreement.agreements`). So a tag tells apart the groups of one rank at one time, and no
more.
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

#: The world's group has the tag before them.
_FIRST_TAG: Final = tags.COLLECTIVE_FIRST + 1
_COUNT_MAX: Final = tags.COLLECTIVE_LAST - tags.COLLECTIVE_FIRST

#: Some ranks in their order, and which of their groups it is.
_Key: TypeAlias = tuple[Runs, int]


@dataclass(frozen=True, slots=True)
class Freed:
    """Member to member: the sender has freed this group.

    Attributes:
        ranks: its members, in its order.
        serial: which group of these ranks it is.
        started: how many of its collectives this member has started; all have ended here.
        lost: ranks that the sender knows to be lost, which may be why it frees the group.
    """

    ranks: Runs
    serial: int
    started: int
    lost: Losses = ()


@dataclass(slots=True, eq=False)
class _Entry:
    """Holds what is known of a group of this rank.

    Attributes:
        group: the group.
        freed: how many collectives each member that has freed it had started.
        done_count: so many members, the first in the group's order, are known to have freed it or to have left.
    """

    group: Group
    freed: dict[int, int] = field(default_factory=dict)
    done_count: int = 0


class GroupLedger:
    """Keeps the groups of one rank.

    Args:
        membership: counts their collectives.
        give_back: what :meth:`Group.free` awaits.
        forget: is told of a group that is over on all members.
    """

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

    def taken(self) -> Runs:
        """Return the numbers that are in use here."""
        return runs_of(tuple(sorted(entry.group.tag - _FIRST_TAG for entry in self._entries.values())))

    def tag_of(self, number: int) -> int:
        """Return the tag of an agreed number.

        Raises:
            LocalProtocolError: the tags have run out.
        """
        if number >= _COUNT_MAX:
            raise LocalProtocolError(
                f"more than {_COUNT_MAX} groups at a time on one rank; free those that are not needed any more",
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
        """Make the group object on this rank, once all members have agreed on the group.

        ``made_after`` is how many losses this rank had heard of when it began to ask for the group.
        """
        lease = Lease(serial, wire.scope_of(ranks, "group", serial), self._give_back)
        lease.made_after = made_after
        group = Group(ranks, ranks.index(rank), tag, native, lease)
        self._membership.reset(tag)
        entry = self._entries[_key_of(group)] = _Entry(group)
        for source, started in self._early.pop(_key_of(group), {}).items():
            self._note(entry, source, started)
        return group

    def free(self, group: Group) -> Freed:
        """Note that this rank has freed the group, with no collective under way; return the message for the others."""
        started = self._membership.started_of(group)
        self._note(self._entries[_key_of(group)], group.ranks[group.index], started)
        return Freed(runs_of(group.ranks), group.lease.serial, started, self._membership.lost)

    def on_freed(self, message: Freed, source: int) -> None:
        """Note that another member has freed a group, which may still be being made here."""
        entry = self._entries.get((message.ranks, message.serial))
        if entry is None:
            if len(self._early) >= _COUNT_MAX:
                raise RemoteProtocolError(f"rank {source} frees one of {_COUNT_MAX} groups that nobody has made here")
            self._early.setdefault((message.ranks, message.serial), {})[source] = message.started
        else:
            self._note(entry, source, message.started)

    def on_gone(self) -> None:
        """Look at all groups again: a rank has left, and so freed all groups that it was in, or is lost."""
        for entry in list(self._entries.values()) if self._entries else ():
            self._release(entry)

    def _note(self, entry: _Entry, rank: int, started: int) -> None:
        entry.freed[rank] = started
        if rank != entry.group.ranks[entry.group.index]:
            self._membership.on_freed(entry.group, rank, started)
        self._release(entry)

    def _release(self, entry: _Entry) -> None:
        """Give the group's tag and communicator back, if nobody needs them any more and nothing is left on its way."""
        group = entry.group
        if group.ranks[group.index] not in entry.freed or self._membership.is_spoiled(group):
            return
        while entry.done_count < group.size:  # each member is heard once: to look at all of them then is cubic in a job
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
        """Return how many collectives ``rank`` had started when it freed the group or left; None if unknown."""
        started = entry.freed.get(rank)
        return self._membership.left_after(entry.group, rank) if started is None else started


def _key_of(group: Group) -> _Key:
    return runs_of(group.ranks), group.lease.serial
