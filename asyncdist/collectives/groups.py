"""Defines groups of ranks, and checks arguments that name them.

A :class:`Group` is an ordered list of ranks, with the backend's communicator if it has one, or else a tag of its own
for collectives. Making a group is collective among its members; each member frees it on its own
(:mod:`asyncdist.collectives.group_ledger`).
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
    """The lifetime of a group.

    Attributes:
        serial: Serial number among the groups of these ranks in this order; equal on all members. 0 if the group cannot
            be freed.
        key: Number derived from the ranks and the serial number; equal on all members.
        give_back: Frees the group; None if it cannot be freed.
        is_freed: Whether this rank has freed the group.
        subjects: Subjects of agreements that are used only during the group's lifetime.
        made_after: Number of losses that this rank knew of when the group was made; a later loss of a member ends it.
        bound_to: Ranks that are not members, but whose loss ends the group's collectives.
        joint_work: The newest call of this rank that makes several collectives as one, while it is in progress
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
    """Some ranks of the world in a fixed order. As an asynchronous context manager, the group is freed at the end.

    Attributes:
        ranks: Ranks of the members in the world.
        index: Position of this rank among them; -1 if it is not a member, and may only read ``ranks``.
        tag: Tag of its collectives if there is no native communicator.
        native: Native communicator of the backend; or None.
        lease: Lifetime of the group.
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
        """The backend's own object, an ``mpi4py.MPI.Comm`` on MPI; None if it has none."""
        return getattr(self.native, "comm", None)

    @property
    def key(self) -> int:
        """A number that no other group ever has, unlike the tag, which is reused."""
        return self.lease.key or self.tag

    @property
    def number(self) -> str:
        """A string that no other group of these ranks ever has."""
        return f"{self.tag}.{self.lease.serial}"

    async def free(self) -> None:
        """Release the group's tag and communicator, which are limited. A second call does nothing.

        The call waits only for the collectives that this rank has started, and then notifies the other members. From
        then on, collectives of the group raise ClosedError on this rank, and on the others unless this member took part
        in them. Tag and communicator are reused when all members have freed the group or left. After a failure of the
        job, the call does nothing.

        **Cancellation**: the group is freed anyway, in the background.

        Raises:
            LocalProtocolError: It is the group of the whole world, or this rank is not a member.
        """
        if self.lease.give_back is None:
            raise LocalProtocolError(f"the group {short(self.ranks)} was not made by new_group and cannot be freed")
        await self.lease.give_back(self)

    async def __aenter__(self) -> Group:
        """Return the group. Raises ClosedError if it was freed."""
        check_open(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.free()

    @classmethod
    def seen_from_outside(cls, ranks: Sequence[int]) -> Group:
        """Make the group object of a rank that is not a member, which has only ``ranks``."""
        return cls(tuple(ranks), -1, -1, None)


async def free_all(groups: Iterable[Group]) -> None:
    """Free some groups in turn. **Cancellation**: raised after the last one has been freed."""
    cancellation: asyncio.CancelledError | None = None
    for group in groups:
        try:
            await group.free()
        except asyncio.CancelledError as error:
            cancellation = error
    if cancellation is not None:
        raise cancellation


def check_group(group: object) -> None:
    """Raise TypeError unless ``group`` is a :class:`Group`."""
    if not isinstance(group, Group):
        raise TypeError(f"group must be a Group, as returned by await new_group(ranks), or None, got {group!r:.200}")


def check_open(group: Group) -> None:
    """Raise ClosedError if the group was freed on this rank."""
    if group.lease.is_freed:
        raise ClosedError(f"the group {short(group.ranks)} was freed on this rank", ranks=group.ranks[:16])


def short(ranks: tuple[int, ...]) -> str:
    """Return the ranks of a group as a string, for messages."""
    shown = ", ".join(map(str, ranks[:16]))
    return f"[{shown}]" if len(ranks) <= 16 else f"[{shown}, ...] of {len(ranks)}"


def check_member(group: Group, rank: int) -> None:
    """Raise unless ``group`` is an open group with ``rank`` as a member.

    Raises:
        TypeError: It is not a :class:`Group`.
        LocalProtocolError: ``rank`` is not a member.
        ClosedError: The group was freed.
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
        LocalProtocolError: ``ranks`` is empty, has a duplicate or an invalid rank, or lacks this rank.
    """
    given = tuple(ranks)
    members = validation.whole_numbers(given) or given
    wrong = [member for member in members if type(member) is not int or not 0 <= member < size]
    if wrong:
        raise LocalProtocolError(f"ranks must be from 0 to {size - 1}, got {wrong[0]!r}")
    if not members:
        raise LocalProtocolError("ranks must have at least one rank, the caller's among them, got none")
    if len(set(members)) != len(members):
        raise LocalProtocolError(f"ranks must name each member once, got {list(members)}")
    if rank not in members:
        raise LocalProtocolError(
            f"rank {rank} is not in the group {list(members)}; only members make a group", rank=rank
        )
    return members
