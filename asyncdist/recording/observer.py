"""What an engine tells of its rank's life: to a recording, and to a replay of one."""

from __future__ import annotations

import itertools
from collections import defaultdict

from asyncdist.waits import WaitId, WaitKind


class Observer:
    """Is told what a rank waits for and what ends that; does nothing with it by itself.

    Names and numbers that it returns are taken by what asks for them.
    """

    def __init__(self) -> None:
        self._send_numbers: defaultdict[tuple[WaitKind, int, int], itertools.count[int]] = defaultdict(
            lambda: itertools.count(1)
        )

    # -- safe points and waits --------------------------------------------------------------------------------------

    def on_safe_point_begun(self, woken_count: int) -> None:
        """Note that a safe point begins, and how many waits have ended since the one before began."""

    def on_safe_point_ended(self, turn: int) -> None:
        """Note that a safe point has ended, and how many passes and yields it has made."""

    def on_wait_begun(self) -> None:
        """Note that a wait has begun, and has been counted."""

    async def before_wait_ends(self) -> None:
        """Let a wait that counts end, whose cause has come: a replay has it wait for all that came before its end."""

    def on_wait_ended(self, counts: bool) -> None:
        """Note that a wait has ended, and whether it counts; it has not been counted yet."""

    # -- what ends them ---------------------------------------------------------------------------------------------

    def on_deadline(self, what: WaitId) -> None:
        """Note that the time has passed up to which a task waited for this."""

    def on_timer(self, what: WaitId) -> None:
        """Note that a timer fires, or something else wakes a task that no message wakes."""

    def on_collective_ended(self, tag: int) -> None:
        """Note that a task goes on after a collective that has ended well, in the group with this tag."""

    def on_collective_failed(self) -> None:
        """Note that a task goes on after a collective that has failed."""

    # -- what follows from nothing but timing -----------------------------------------------------------------------

    def on_reduced(self, tag: int, result: memoryview) -> None:
        """Note what a reduction of floating numbers came to, which depends on the order in which MPI adds them.

        A replay writes there what MPI had.

        Args:
            tag: of the group.
            result: its bytes, writable.
        """

    def measured(self, what: WaitId, value: int) -> int:
        """Return the number to be used in place of ``value``, which follows from nothing but timing."""
        del what
        return value

    def name_send(self, kind: WaitKind, dest: int, tag: int) -> WaitId:
        """Identify a send that a task waits for: by destination and tag, and by its number."""
        return WaitId(kind, tag, dest, next(self._send_numbers[kind, dest, tag]))
