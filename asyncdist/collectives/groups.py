"""Defines groups of ranks, and checks arguments that name them.

A :class:`Group` is a list of ranks in the order in which they count, with the backend's communicator where it has one,
and else a tag of its own for collectives. Making one is collective among its members alone. Each member frees it by
itself (:mod:`asyncdist.collectives.group_ledger`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncdist import validation
from asyncdist.errors import ClosedError, LocalProtocolError
from asyncdist.transports.base import GroupHandle


@dataclass(slots=True, eq=False)
class Lease:
    """Says how long a group may be used.

    Attributes:
        serial: which group of these ranks it is, in this order of theirs; equal on all members, 0 where it cannot be
            freed.
        key: a number for these ranks and that serial, equal on all members.
        give_back: frees the group; None where it cannot be freed.
        is_freed: whether this rank has freed it.
        subjects: what its members agree on as long as they have it, and never again.
        made_after: how many losses this rank had heard of when the group was made; a later one of a member ends it.
        bound_to: ranks that are no members, and whose loss ends the group's collectives as a member's does.
        joint_work: the newest call of this rank that does several collectives as one, while it is under way
            (:mod:`asyncdist.functional.joint_work`).
    """

    serial: int = 0
    key: int = 0
    give_back: Callable[[Group], Awaitable[None]] | None = None
    is_freed: bool = False
    subjects: list[str] = field(default_factory=list)
    origin: int = 0
    bound_to: tuple[int, ...] = ()
    joint_work: object = None
    made_after: int = 0


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Group:
    """Some ranks of the world, in a fixed order. As an asynchronous context manager it is freed at the end.

    Attributes:
        ranks: the members' ranks in the world.
        index: this rank's position among them; -1 where it is not a member, and may only read who they are.
        tag: used by its collectives where there is no native communicator.
        native: the backend's communicator, None where it has none.
        lease: how long it may be used.
    """

    ranks: tuple[int, ...]
    index: int
    tag: int
    native: GroupHandle | None
    lease: Lease = field(default_factory=Lease, repr=False)

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    @property
    def communicator(self) -> Any:
        """The backend's own object, an ``mpi4py.MPI.Comm`` under MPI; None where it has none."""
        return getattr(self.native, "comm", None)

    @property
    def key(self) -> int:
        """Names this group among all that there ever are; its tag is used again when it was freed."""
        return self.lease.key or self.tag

    @property
    def number(self) -> str:
        """A number, as text, that no other group of these ranks ever has."""
        return f"{self.tag}.{self.lease.serial}"

    async def free(self) -> None:
        """Give back the group's tag and communicator, which are limited. A second call does nothing.

        A member need not wait for the others: it waits for the collectives that it has started itself, and tells them.
        From then on a collective of the group raises ClosedError here, and on the others unless this member has taken
        part in it. Tag and communicator are used again when all members have freed the group or have left. After a
        failure of the job it does nothing.

        **Cancellation**: the group is freed all the same, in the background.

        Raises:
            LocalProtocolError: it is the group of the whole world, or one that this rank only sees from outside.
        """
        if self.lease.give_back is None:
            raise LocalProtocolError(f"the group {short(self.ranks)} was not made by new_group, and cannot be freed")
        await self.lease.give_back(self)

    async def __aenter__(self) -> Group:
        """Use it. Raises ClosedError where it was freed."""
        check_open(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.free()

    @classmethod
    def seen_from_outside(cls, ranks: Sequence[int]) -> Group:
        """Make the group as a rank that is not a member sees it: its ranks, and nothing to call."""
        return cls(tuple(ranks), -1, -1, None)


async def free_all(groups: Iterable[Group]) -> None:
    """Free some groups, one after the other. **Cancellation**: it is raised when the last one has been freed."""
    cancellation: asyncio.CancelledError | None = None
    for group in groups:
        try:
            await group.free()
        except asyncio.CancelledError as error:
            cancellation = error
    if cancellation is not None:
        raise cancellation


def check_group(group: object) -> None:
    """Refuse anything but a :class:`Group`. Raises TypeError."""
    if not isinstance(group, Group):
        raise TypeError(f"group is {group!r:.200}; allowed: a Group, as await new_group(ranks) makes it, or None")


def check_open(group: Group) -> None:
    """Refuse a group that was freed here. Raises ClosedError."""
    if group.lease.is_freed:
        raise ClosedError(f"the group {short(group.ranks)} was freed on this rank", ranks=group.ranks[:16])


def short(ranks: tuple[int, ...]) -> str:
    """Return the ranks of a group as text, for messages."""
    shown = ", ".join(map(str, ranks[:16]))
    return f"[{shown}]" if len(ranks) <= 16 else f"[{shown}, ...] of {len(ranks)}"


def check_member(group: Group, rank: int) -> None:
    """Refuse anything but a group that has ``rank`` as a member.

    Raises:
        TypeError: it is not a :class:`Group`.
        LocalProtocolError: ``rank`` is not a member.
        ClosedError: the group was freed.
    """
    check_group(group)
    check_open(group)
    if not 0 <= group.index < group.size or group.ranks[group.index] != rank:
        raise LocalProtocolError(
            f"rank {rank} is not in the group {list(group.ranks)}; only members may call its collectives", rank=rank
        )


def check_ranks(ranks: Sequence[int], *, rank: int, size: int) -> tuple[int, ...]:
    """Check and return the members of a new group.

    Raises:
        LocalProtocolError: it is empty, names a rank twice or one that does not exist, or leaves this rank out.
    """
    given = tuple(ranks)
    members = validation.whole_numbers(given) or given
    wrong = [member for member in members if type(member) is not int or not 0 <= member < size]
    if wrong:
        raise LocalProtocolError(f"a group holds ranks from 0 to {size - 1}, not {wrong[0]!r}")
    if not members:
        raise LocalProtocolError("ranks is empty; allowed: one rank or more, the caller's among them")
    if len(set(members)) != len(members):
        raise LocalProtocolError(f"a group names each member once; got {list(members)}")
    if rank not in members:
        raise LocalProtocolError(
            f"rank {rank} is not in the group {list(members)}; only members make a group", rank=rank
        )
    return members
