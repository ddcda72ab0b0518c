"""Restarts killed ranks of ``asyncdist run --transport torch``."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from asyncdist import environment, local_host
from asyncdist.launch import store_server
from asyncdist.launch.supervision import endings

P = TypeVar("P")


class Restarts(Generic[P]):
    """Restarts killed ranks, and records in the store how their processes have ended.

    Args:
        start: Function that starts the process of a rank with the given variables.
        count: Maximum number of restarts of each rank.
        notes: Process that sets keys in the store; None if no rank may join.
        is_open: Whether a new process may replace a killed rank that is not restarted.
        have_joined: Whether these ranks have joined another launcher's world.
    """

    def __init__(
        self,
        start: Callable[[int, Mapping[str, str]], P],
        environments: Mapping[int, Mapping[str, str]],
        count: int,
        notes: subprocess.Popen[bytes] | None = None,
        *,
        is_open: bool = False,
        have_joined: bool = False,
    ) -> None:
        self._notes = notes
        self._start = start
        self._environments = environments
        self._count = count
        self._first = {rank: int(each.get(environment.INCARNATION_VARIABLE, 0)) for rank, each in environments.items()}
        self._newest = dict(self._first)
        self._is_open = is_open
        self.have_joined = have_joined
        self.can_lose_ranks = count > 0 or is_open

    def start(self, rank: int, returncode: int, others: int) -> P | None:
        """Restart a killed rank, and return its process.

        Return None if no restart is left, no other rank is alive, or the process cannot be started.
        """
        why = endings.describe_end(returncode)
        number = self._newest[rank] - self._first[rank]
        has_others = others > 0 or self.have_joined
        left = "the others continue without it" if has_others else "no other rank is left for it to join"
        is_only_one = len(self._environments) == 1  # a job's only rank can start a new world alone
        if (has_others or is_only_one) and number < self._count:
            local_host.print_launcher_line(f"rank {rank} {why}; restarting it ({number + 1} of {self._count})")
            newest = self._newest[rank] + 1
            try:
                process = self._start(rank, {**self._environments[rank], environment.INCARNATION_VARIABLE: str(newest)})
            except local_host.LaunchError as error:  # for example, fork() found no memory
                local_host.print_launcher_line(f"{error}: {left}")
            else:
                self._newest[rank] = newest
                return process
        else:
            again = f"; it is not restarted ({number} of {self._count})" if self._count else ""
            local_host.print_launcher_line(f"rank {rank} {why}{again}: {left}")
        if self._is_open:
            self.note(f"place/{rank}", f"free {self._newest[rank] + 1}")
        else:
            self.note("gone", str(rank))
        return None

    def do_without_store(self, returncode: int) -> None:
        """Report that the store's process has ended. No killed rank is restarted from now on."""
        self._count = 0
        local_host.print_launcher_line(
            f"the process that serves the store {endings.describe_end(returncode)}: no rank can join or be restarted, "
            "and ranks that are not connected yet will fail"
        )

    def survives_loss(self, others: int) -> bool:
        """Return whether the job continues without a rank that is not restarted."""
        return self._is_open and not self.have_joined and others > 0

    def note_exit(self, rank: int, returncode: int) -> None:
        """Record in the store that the process of ``rank`` has ended, so that no rank tries to connect to it."""
        self.note(f"exited/{rank}.{self._newest[rank]}")
        if self._is_open and returncode >= 0:
            self.note(f"place/{rank}", f"free {self._newest[rank] + 1}" if returncode and self.have_joined else "left")

    def note(self, key: str, value: str = "") -> None:
        """Set a key in the store."""
        if self._notes is not None:
            store_server.send_line(self._notes, f"asyncdist/{key} {value}")

    def newcomer(self, rank: int) -> str:
        """Return a clause, for a message, on how this rank joined a running world, or "" for an initial rank."""
        if self.have_joined:
            return "which had joined the others"
        return "which was restarted" if self._newest[rank] else ""
