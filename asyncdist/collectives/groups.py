"""Defines groups of ranks, among which collectives run, and checks group arguments.

All members make a group together. Each member frees it on its own (:mod:`asyncdist.collectives.group_ledger`).
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
    """Changeable state of a group: its identity, and whether this rank has freed it.

    Attributes:
        serial: Serial number of the group among the groups of the same ranks in the same order, equal on all members. 0
            if the group cannot be freed.
        key: Number derived from the ranks and the serial number, equal on all members.
        subjects: Names of agreements whose state is removed together with the group.
        bound_to: Ranks that are not members, but whose loss ends the group's collectives.
        joint_work: Newest call in progress on this rank that combines several collectives
            (:mod:`asyncdist.functional.joint_work`).
        made_after: Number of lost ranks that this rank was notified of before it made the group. If a member is lost
            later, the group's collectives end.
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
    """An ordered set of ranks among which collectives run. As a context manager, it frees itself on exit.

    Attributes:
        ranks: Ranks of the members in the world.
        index: Index of this rank in ``ranks``, or -1 if this rank is not a member and may only read ``ranks``.
        tag: Tag of the messages that the group's collectives send.
        native: Native communicator of the backend, or None.
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
        """The backend's communicator, an ``mpi4py.MPI.Comm`` on MPI, or None if there is none."""
        return getattr(self.native, "comm", None)

    @property
    def key(self) -> int:
        """Number that identifies the group and, unlike the tag, is never reused by another group."""
        return self.lease.key or self.tag

    @property
    def number(self) -> str:
        """String that identifies the group among all groups of these ranks, past and future."""
        return f"{self.tag}.{self.lease.serial}"

    async def free(self) -> None:
        """Free the group, whose tag and communicator are limited resources. Repeated calls do nothing.

        The method waits for the collectives that this rank has started, and then notifies the other members. Later
        collectives of the group raise ClosedError on all members. The tag and the communicator are released when all
        members have freed the group or left the world. After a failure of the job, the method does nothing.

        **Cancellation**: the group is freed anyway, in the background.

        Raises:
            LocalProtocolError: This is the group of the whole world, or this rank is not a member.
        """
        if self.lease.give_back is None:
            raise LocalProtocolError(
                f"the group {short(self.ranks)} cannot be freed, because new_group did not make it"
            )
        await self.lease.give_back(self)

    async def __aenter__(self) -> Group:
        """Return the group. Raise ClosedError if the group was freed."""
        check_open(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.free()

    @classmethod
    def seen_from_outside(cls, ranks: Sequence[int]) -> Group:
        """Make a group object for a rank that is not a member, and may therefore only read its ``ranks``."""
        return cls(tuple(ranks), -1, -1, None)


async def free_all(groups: Iterable[Group]) -> None:
    """Free groups one after another. **Cancellation**: takes effect after the last group has been freed."""
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
        raise TypeError(f"group must be a Group from await new_group(ranks), or None, got {group!r:.200}")


def check_open(group: Group) -> None:
    """Raise ClosedError if the group was freed on this rank."""
    if group.lease.is_freed:
        raise ClosedError(
            f"the group {short(group.ranks)} was freed on this rank; make a new group with await new_group(ranks)",
            ranks=group.ranks[:16],
        )


def short(ranks: tuple[int, ...]) -> str:
    """Format at most 16 of a group's ranks for error messages."""
    shown = ", ".join(map(str, ranks[:16]))
    return f"[{shown}]" if len(ranks) <= 16 else f"[{shown}, ...] of {len(ranks)}"


def check_member(group: Group, rank: int) -> None:
    """Raise an error unless ``group`` is a :class:`Group` that has ``rank`` as a member and is not freed."""
    check_group(group)
    check_open(group)
    if not 0 <= group.index < group.size or group.ranks[group.index] != rank:
        raise LocalProtocolError(
            f"only members may call a group's collectives, but rank {rank} is not in the group {list(group.ranks)}",
            rank=rank,
        )


def check_ranks(ranks: Sequence[int], *, rank: int, size: int) -> tuple[int, ...]:
    """Return the members of a new group. Raise LocalProtocolError if a rank is invalid, repeated or missing."""
    given = tuple(ranks)
    members = validation.whole_numbers(given) or given
    wrong = [member for member in members if type(member) is not int or not 0 <= member < size]
    if wrong:
        raise LocalProtocolError(f"ranks must be from 0 to {size - 1}, got {wrong[0]!r}")
    if not members:
        raise LocalProtocolError(f"ranks must include this rank, {rank}, got no rank")
    if len(set(members)) != len(members):
        raise LocalProtocolError(f"ranks must be distinct, got {list(members)}")
    if rank not in members:
        raise LocalProtocolError(f"ranks must include this rank, {rank}, got {list(members)}", rank=rank)
    return members
