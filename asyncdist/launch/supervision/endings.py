"""Describes how ranks have ended, and decides which rank has ended an MPI job. All functions are pure."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from asyncdist.launchers import launcher_signals
from asyncdist.wording import ranks_in_words

#: Return codes of ranks that were stopped by another rank or by mpirun, and are not the cause.
_STOPPED: Final = frozenset({-signal.SIGTERM, 128 + signal.SIGTERM, -signal.SIGKILL})
#: Exit code of a rank that Open MPI ends after a lost connection. It is the value of MPI_ERR_UNKNOWN.
_CONNECTION_LOST: Final = 14
#: Most frequent reason for a signal that no process has sent. Open MPI's shared memory gets its pages at the first use.
_HINTS: Final[Mapping[int, str]] = {
    signal.SIGKILL: " (the kernel kills processes when memory is short: see dmesg)",
    signal.SIGBUS: " (often because shared memory is full: see df /dev/shm)",
}


def exit_code(returncode: int) -> int:
    """Return the exit code that a shell shows for a process with the return code ``returncode``."""
    return returncode if returncode >= 0 else 128 - returncode


def describe_end(returncode: int, *, was_passed_on: bool = False) -> str:
    """Describe how a process has ended. ``was_passed_on`` is true if the launcher sent the signal that killed it."""
    if returncode > 0:
        return f"ended with exit code {returncode}"
    how = f"was killed by {launcher_signals.signal_name(-returncode)}"
    if was_passed_on:
        return f"{how}, which asyncdist run passed on: the script has no handler for it"
    return how + _HINTS.get(-returncode, "")


@dataclass(slots=True)
class JobEnds:
    """Records how the ranks under mpirun have ended, and decides the job's exit code and which ends to report.

    Attributes:
        survival_option: Option with which the other ranks would have survived the loss of a rank; "" if there is none.
        survives: Whether the job continues when ranks die.
        is_across_hosts: Whether ranks communicate over a network, so that Open MPI ends a rank that loses a connection.
        passed_on: Signals that the launcher has passed on to the ranks.
        codes: Exit code of each ended rank, in chronological order; negative for a signal.
        cause: Rank whose exit code or signal shows that it has ended the job; None if there is none.
        asked_to_end: Signal by which the launcher was asked to end the job, or None.
    """

    ranks: int
    survival_option: str = ""
    survives: bool = False
    is_across_hosts: bool = False
    passed_on: set[int] = field(default_factory=set)
    codes: dict[int, int] = field(default_factory=dict)
    cause: int | None = None
    asked_to_end: int | None = None

    def note(self, rank: int, code: int) -> str | None:
        """Record how a rank has ended. Return a line to print immediately, or None.

        A rank that ends with code 1, as Python does after any exception, may only have reacted to another rank's
        failure. The same is true of a rank that Open MPI ends after a lost connection to another host.
        """
        is_first = not any(code and not self._is_of_connection(code) for code in self.codes.values())
        self.codes[rank] = code
        is_known = self.survives or self.asked_to_end is not None or self.cause is not None
        is_kill = is_first and code == -signal.SIGKILL
        if is_known or (self._is_consequence(code) and not is_kill):
            return None
        self.cause = rank
        stopping = "; stopping the others" if is_first and len(self.codes) < self.ranks else ""
        was_passed_on = -code in self.passed_on
        has_cure = self.survival_option and code < 0 and stopping and not was_passed_on
        cure = f" ({self.survival_option} lets them continue)" if has_cure else ""
        return f"rank {rank} {describe_end(code, was_passed_on=was_passed_on)}{stopping}{cure}"

    def conclude(self, mpirun_code: int) -> tuple[int, list[str]]:
        """Return the job's exit code and the lines to print, after mpirun has ended with ``mpirun_code``."""
        code = exit_code(mpirun_code)
        if self.asked_to_end is not None:
            return 128 + self.asked_to_end, []
        if mpirun_code < 0 and self.cause is None:
            return code, [f"mpirun {describe_end(mpirun_code)}"]
        if self.survives:
            return self._conclude_survivors(code)
        if self.cause is not None:
            return exit_code(self.codes[self.cause]), []
        first = next(filter(None, self.codes.values()), 0)
        if not first:
            return code, []
        return code or exit_code(first), [self._all_that_ended(first)]

    def _all_that_ended(self, code: int) -> str:
        alike = [rank for rank, theirs in self.codes.items() if theirs == code]
        return f"{ranks_in_words(alike)} {describe_end(code)}"

    def _is_consequence(self, code: int) -> bool:
        """Return whether a rank may have ended with ``code`` because of another rank."""
        return code in (0, 1) or code in _STOPPED or self._is_of_connection(code)

    def _is_of_connection(self, code: int) -> bool:
        return self.is_across_hosts and code == _CONNECTION_LOST

    def _conclude_survivors(self, code: int) -> tuple[int, list[str]]:
        """Return the exit code and the lines to print for a job that continues when ranks are lost.

        mpirun's code may belong to a rank that was stopped by another rank. Therefore, the code of a rank that failed
        on its own is preferred.
        """
        codes = list(self.codes.values())
        if code:
            failed = next((theirs for theirs in codes if theirs > 0 and not self._is_consequence(theirs)), 0)
            return (failed, [self._all_that_ended(failed)]) if failed else (code, [])
        if len(codes) < self.ranks or 0 in codes:
            return 0, []
        lines = [
            f"rank {rank} {describe_end(theirs, was_passed_on=-theirs in self.passed_on)}"
            for rank, theirs in sorted(self.codes.items())
        ]
        return exit_code(codes[-1]), [*lines, "no rank is left"]
