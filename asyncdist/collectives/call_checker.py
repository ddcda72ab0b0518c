"""Checks, in simulations only, that all members of a group make the same collective calls.

Members must call their group's collectives in one order, with equal root, reduction, shape and dtype (MPI-4.1 section
6.1). If they do not, messages are matched wrongly or never. In a simulation, all ranks share a process. Between
processes, this check would take an additional message per collective.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final, NamedTuple

import torch

from asyncdist.errors import DisagreementError

#: Name under which all operations that exchange headers are compared. Their headers contain the actual operation.
HELPER: Final = "a helper"
#: Name prefixes of modules that are not the user's code.
_OURS: Final = ("asyncdist.", "asyncio.")


class CollectiveCall(NamedTuple):
    """Arguments of a collective call that must be equal on all members.

    Attributes:
        root: Rank of the root in the world, or None if the collective has no root.
        reduction: Name of the reduction, for example ``"sum"``, or None if there is none.
        dtype, shape: Dtype and shape of the caller's tensor, or None if they are not compared.
    """

    operation: str
    root: int | None = None
    reduction: str | None = None
    dtype: torch.dtype | None = None
    shape: Sequence[int] | None = None

    def __str__(self) -> str:
        if self.operation == HELPER:
            return HELPER
        words = [] if self.reduction is None else [self.reduction]
        if self.dtype is not None and self.shape is not None:
            words.append(f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}")
        words += [] if self.root is None else [f"root={self.root}"]
        return f"{self.operation}({', '.join(words)})"


@dataclass(slots=True)
class _First:
    """The first member's record of a collective call, kept until all members have made the call."""

    rank: int
    call: CollectiveCall
    place: str
    missing_count: int


class CollectiveChecker:
    """Checks that all simulated ranks of this process make the same collective calls in each group."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, int, int], int] = {}
        self._open: dict[tuple[int, int, int], _First] = {}

    def note(self, ranks: Sequence[int], group_key: int, rank: int, call: CollectiveCall) -> None:
        """Record the next collective call of ``rank`` in a group, and compare it with the other members' calls.

        Args:
            group_key: Number that identifies the group among groups with the same first rank.
            rank: Rank of the caller in the world.

        Raises:
            DisagreementError: Another member has made a different call as its collective of the same number.
        """
        if len(ranks) == 1:
            return
        member = ranks[0], group_key, rank
        number = self._counts[member] = self._counts.get(member, 0) + 1
        key = ranks[0], group_key, number
        first = self._open.get(key)
        if first is None:
            self._open[key] = _First(rank, call, _users_line(), len(ranks) - 1)
            return
        if call != first.call:
            raise DisagreementError(
                f"all members must make the same call, but rank {first.rank} calls {first.call}{first.place} and rank "
                f"{rank} calls {call}{_users_line()} as collective number {number} of one group",
                ranks=(first.rank, rank),
            )
        first.missing_count -= 1
        if not first.missing_count:
            del self._open[key]

    def forget(self, ranks: Sequence[int], group_key: int, rank: int) -> None:
        """Remove the records of ``rank`` for a group that all members have freed, including refused calls."""
        number = self._counts.pop((ranks[0], group_key, rank), 0)
        while self._open.pop((ranks[0], group_key, number), None) is not None:
            number -= 1


def _users_line() -> str:
    """Return the innermost line of user code on the stack and the collective that it calls, or an empty string."""
    inner = sys._getframe(2)
    while (frame := inner.f_back) is not None:
        if not str(frame.f_globals.get("__name__")).startswith(_OURS):
            name = inner.f_code.co_name.removeprefix("_")  # all_gather()'s coroutine is _all_gather, for example.
            return f" ({name} at {_file_of(frame)}:{frame.f_lineno})"
        inner = frame
    return ""


def _file_of(frame: FrameType) -> str:
    """Return the path of a frame's file relative to its entry in ``sys.path``, which is equal on all machines."""
    name = str(frame.f_globals.get("__name__"))
    return "/".join(Path(frame.f_code.co_filename).parts[-1 - name.count(".") :])
