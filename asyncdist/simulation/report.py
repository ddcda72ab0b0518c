"""Defines the report of a simulation: results, messages, and the faults that fired."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from asyncdist import rank_program
from asyncdist.errors import LateError, RankLostError, is_consequence
from asyncdist.runtime.world import WorldStatistics
from asyncdist.simulation.faults import KILLING, Fault, Interrupt, Join, Restart
from asyncdist.simulation.trace import TraceEvent, unpack

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class SimReport(Generic[T_co]):
    """Reports how a simulation ended.

    Attributes:
        results: Return value of each rank's ``main``, or the exception that ended it. Unless ``return_exceptions`` is
            set, the fault plan explains each exception (:meth:`check_ranks`). None for a rank that was killed or had
            not ended when the simulation stopped.
        packed_trace: Last events, in packed form; :attr:`trace` unpacks them.
        trace_digest: Hexadecimal digest of all events and message contents; equal for equal arguments.
        virtual_time_s: Virtual seconds until the last rank ended.
        message_count, byte_count: Number and total size of the messages sent.
        event_count: Number of events: turns, timers and arrivals.
        faults_fired: Number of times that each fault of the plan ``faults`` fired.
        statistics: Final statistics of each rank; None for a rank that never started.
        killed_ranks: Ranks whose most recent process was killed.
    """

    # The type has Any, because otherwise users would need a type check to exclude BaseException and None.
    results: tuple[T_co | Any, ...]
    seed: int
    packed_trace: bytes = field(repr=False)
    trace_digest: str
    virtual_time_s: float
    message_count: int
    byte_count: int
    event_count: int
    faults: tuple[Fault, ...]
    faults_fired: tuple[int, ...]
    statistics: tuple[WorldStatistics | None, ...] = field(repr=False)
    killed_ranks: frozenset[int] = frozenset()

    @property
    def trace(self) -> tuple[TraceEvent, ...]:
        """Last events of the simulation, oldest first."""
        return unpack(self.packed_trace)

    def value(self) -> T_co | Any:
        """Return rank 0's value, or raise an exception that ended a rank.

        Exceptions that did not result from another rank's failure take precedence. Among these, exceptions raised by a
        signal of the fault plan come last. A rank that calls ``sys.exit(0)`` is considered to have returned None.
        """
        failures = self._failures()
        if failures:
            planned = set(filter(self.is_exit_by_signal, failures))
            raise failures[min(failures, key=lambda rank: (is_consequence(failures[rank]), rank in planned))]
        return None if _is_exit(self.results[0]) else self.results[0]

    def check_ranks(self) -> None:
        """Raise an exception that ended a rank, unless the fault plan explains all of them.

        Exceptions that did not result from another rank's failure take precedence. The plan explains the exit of a rank
        that received a signal of the plan. A plan that has killed a rank or sent a signal also explains a
        :class:`RankLostError`. A plan that has restarted a rank or let it join explains a :class:`LateError`.
        :func:`simulate` calls this method, unless ``return_exceptions`` is set.
        """
        failure = self.unexplained_failure()
        if failure is not None:
            raise failure

    def unexplained_failure(self) -> BaseException | None:
        """Return the exception that :meth:`check_ranks` would raise, with a note that names the rank, or None."""
        failures = {rank: error for rank, error in self._failures().items() if not self._is_explained(rank, error)}
        if not failures:
            return None
        rank = min(failures, key=lambda rank: is_consequence(failures[rank]))
        note = f"rank {rank} of {len(self.results)} raised this error (seed {self.seed})"
        if note not in getattr(failures[rank], "__notes__", ()):
            failures[rank].add_note(note)
        return failures[rank]

    def _failures(self) -> dict[int, BaseException]:
        """Return the exceptions that ended ranks, keyed by rank, except successful exits."""
        results = enumerate(self.results)
        return {rank: each for rank, each in results if isinstance(each, BaseException) and not _is_exit(each)}

    def _is_explained(self, rank: int, error: BaseException) -> bool:
        kinds = {type(fault) for fault, count in zip(self.faults, self.faults_fired, strict=True) if count}
        if isinstance(error, RankLostError):
            return not kinds.isdisjoint((*KILLING, Interrupt))
        if isinstance(error, LateError):
            return not kinds.isdisjoint((Restart, Join))
        return self.is_exit_by_signal(rank)

    def interrupted_ranks(self) -> set[int]:
        """Return the ranks that received a signal of the fault plan."""
        fired = zip(self.faults, self.faults_fired, strict=True)
        return {fault.rank for fault, count in fired if isinstance(fault, Interrupt) and count}

    def is_exit_by_signal(self, rank: int) -> bool:
        """Return whether ``rank`` ended with the exception that a signal of the fault plan raises."""
        return isinstance(self.results[rank], (SystemExit, KeyboardInterrupt)) and rank in self.interrupted_ranks()

    def check_faults(self) -> None:
        """Raise AssertionError if a fault of the plan did not fire, and therefore tested nothing."""
        idle = [fault for fault, count in zip(self.faults, self.faults_fired, strict=True) if not count]
        if idle:
            raise AssertionError(
                f"all faults of the plan must fire, but with seed {self.seed} these did not: "
                f"{', '.join(map(repr, idle))}"
            )


def _is_exit(result: Any) -> bool:
    return isinstance(result, SystemExit) and not rank_program.exit_code(result.code)
