"""Compares which collective each rank calls, where all ranks share a process: in a simulation.

Members of a group call its collectives in one order, with the same root, reduction, shape and dtype (MPI-4.1 section
6.1). Where they do not, what they send meets what it does not belong to, or nothing at all. Between processes nobody
sees that without a message more in every collective; here it costs a dict.
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

#: Operations that begin with headers, which say themselves what they belong to.
HELPER: Final = "a helper"
#: Modules that a user has not written.
_OURS: Final = ("asyncdist.", "asyncio.")


class CollectiveCall(NamedTuple):
    """Holds what all members must pass alike. It is a tuple since one is made in every call.

    Attributes:
        operation: its name, or ``HELPER``.
        root: a rank of the world, where it has one.
        reduction: as ``"sum"``, where it has one.
        dtype, shape: of this rank's tensor, where it has one.
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
    """Remembers the first member that has called a collective, until all have."""

    rank: int
    call: CollectiveCall
    place: str
    missing_count: int


class CollectiveChecker:
    """Compares the calls of all ranks of this process."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, int, int], int] = {}
        self._open: dict[tuple[int, int, int], _First] = {}

    def note(self, ranks: Sequence[int], group_key: int, rank: int, call: CollectiveCall) -> None:
        """Note that ``rank`` calls its next collective of a group. The stack gives the line of the user's code.

        Args:
            ranks: the group's.
            group_key: names the group among those with the same first rank.
            rank: the caller, by its number in the world.
            call: what it calls.

        Raises:
            DisagreementError: another member has called something else in its place.
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
                f"rank {first.rank} calls {first.call}{first.place}, rank {rank} {call}{_users_line()}, each as its "
                f"collective number {number} of one group; allowed: the same on all members",
                ranks=(first.rank, rank),
            )
        first.missing_count -= 1
        if not first.missing_count:
            del self._open[key]

    def forget(self, ranks: Sequence[int], group_key: int, rank: int) -> None:
        """Forget a group that all members have freed, and the calls of ``rank`` in it that were refused."""
        number = self._counts.pop((ranks[0], group_key, rank), 0)
        while self._open.pop((ranks[0], group_key, number), None) is not None:
            number -= 1


def _users_line() -> str:
    """Say where the innermost code of the user calls a collective, and which; empty where no such code is found."""
    inner = sys._getframe(2)
    while (frame := inner.f_back) is not None:
        if not str(frame.f_globals.get("__name__")).startswith(_OURS):
            name = inner.f_code.co_name.removeprefix("_")  # all_gather() returns a coroutine of _all_gather
            return f" ({name} at {_file_of(frame)}:{frame.f_lineno})"
        inner = frame
    return ""


def _file_of(frame: FrameType) -> str:
    """Return the path of a file below the folder in which Python found it.

    Peers are sent it, and a simulation must send the same bytes in whichever folder its program lies.
    """
    name = str(frame.f_globals.get("__name__"))
    return "/".join(Path(frame.f_code.co_filename).parts[-1 - name.count(".") :])
