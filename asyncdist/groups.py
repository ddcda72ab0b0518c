"""Groups of ranks.

A :class:`Group` is a list of ranks in the order in which they count, with the backend's communicator where it has one,
and else a tag of its own for collectives. Making one is collective among its members, and only they take part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from asyncdist import tags
from asyncdist.errors import LocalProtocolError
from asyncdist.transports.base import GroupHandle


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Group:
    """Some ranks of the world, in their order.

    Attributes:
        ranks: the members' ranks in the world.
        index: this rank's position among them; -1 where it is none of them, and may only read who they are.
        tag: of its collectives where there is no native communicator.
        native: the backend's communicator, None where it has none.
    """

    ranks: tuple[int, ...]
    index: int
    tag: int
    native: GroupHandle | None

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    @property
    def communicator(self) -> Any:
        """The backend's own object, an ``mpi4py.MPI.Comm`` under MPI; None where it has none."""
        return getattr(self.native, "comm", None)

    @classmethod
    def seen_from_outside(cls, ranks: Sequence[int]) -> Group:
        """A group as a rank sees it that is no member: who they are, and nothing to call."""
        return cls(tuple(ranks), -1, -1, None)


def check_group(group: object) -> None:
    """Refuse what is no :class:`Group`. Raises TypeError."""
    if not isinstance(group, Group):
        raise TypeError(f"group is {group!r:.200}; allowed: a Group, as await new_group(ranks) makes it, or None")


def check_member(group: Group, rank: int) -> None:
    """Refuse what is no group, and a group of which ``rank`` is no member.

    Raises:
        TypeError: it is no :class:`Group`.
        LocalProtocolError: the caller stands outside.
    """
    check_group(group)
    if not 0 <= group.index < group.size or group.ranks[group.index] != rank:
        raise LocalProtocolError(
            f"rank {rank} is not in the group {list(group.ranks)}; only members may call its collectives", rank=rank
        )


def check_ranks(ranks: Sequence[int], *, rank: int, size: int) -> tuple[int, ...]:
    """The members of a new group, checked.

    Raises:
        LocalProtocolError: it is empty, names a rank twice or one that does not exist, or leaves this rank out.
    """
    members = tuple(ranks)
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


def next_tag(tag: int) -> int:
    """The proposal after ``tag`` has been agreed."""
    if tag >= tags.COLLECTIVE_LAST:
        count = tags.COLLECTIVE_LAST - tags.COLLECTIVE_FIRST + 1
        raise LocalProtocolError(f"more than {count} groups on one rank", tag=tag)
    return tag + 1
