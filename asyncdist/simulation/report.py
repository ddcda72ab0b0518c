"""Reports on a simulation: what its ranks returned, what was sent, which faults happened."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from asyncdist.errors import is_consequence
from asyncdist.runtime.world import WorldStatistics
from asyncdist.simulation.faults import Fault, Interrupt
from asyncdist.simulation.trace import TraceEvent, unpack

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class SimReport(Generic[T_co]):
    """Reports how a simulation ended.

    Attributes:
        results: per rank what main returned, or the exception that ended it; None for a rank that was killed, or had
            not ended when the simulation was stopped.
        seed: the seed of the run.
        packed_trace: the last events; :attr:`trace` has them in words.
        trace_digest: the digest of all events and of what the messages held, in hex; equal for equal arguments.
        virtual_time_s: when the last rank ended.
        message_count: number of messages sent, with and without a frame.
        byte_count: number of bytes in them.
        event_count: number of things that happened: turns, timers, arrivals.
        faults: the fault plan.
        faults_fired: how often each fault of the plan happened, in the plan's order.
        statistics: those of each rank at its end; None for a rank that never began.
        killed_ranks: those whose last process was killed; one that was started again afterwards is none of them.
    """

    # The rest is an exception or None. As in typeshed, Any spares users a check of each value that they know to be one.
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
        """Return the last events, oldest first."""
        return unpack(self.packed_trace)

    def value(self) -> T_co | Any:
        """Return rank 0's value. Raise the first failure, if any rank failed: a cause before its consequences.

        An exit by a signal of the fault plan comes after the failures that the plan does not ask for.
        ``sys.exit(0)`` is a way to return, without a value.
        """
        failures = {
            rank: result
            for rank, result in enumerate(self.results)
            if isinstance(result, BaseException) and not _is_exit(result)
        }
        if failures:
            planned = set(filter(self.is_exit_by_signal, failures))
            raise failures[min(failures, key=lambda rank: (is_consequence(failures[rank]), rank in planned))]
        return None if _is_exit(self.results[0]) else self.results[0]

    def interrupted_ranks(self) -> set[int]:
        """Return the ranks that have got a signal of the fault plan."""
        fired = zip(self.faults, self.faults_fired, strict=True)
        return {fault.rank for fault, count in fired if isinstance(fault, Interrupt) and count}

    def is_exit_by_signal(self, rank: int) -> bool:
        """Return whether ``rank`` ended with the exception that a signal of the fault plan makes it raise."""
        return isinstance(self.results[rank], (SystemExit, KeyboardInterrupt)) and rank in self.interrupted_ranks()

    def check_faults(self) -> None:
        """Raise AssertionError naming the faults of the plan that did not happen: they have tested nothing."""
        idle = [fault for fault, count in zip(self.faults, self.faults_fired, strict=True) if not count]
        if idle:
            raise AssertionError(f"seed {self.seed}: these faults did not fire: {', '.join(map(repr, idle))}")


def _is_exit(result: Any) -> bool:
    """Return whether a rank ended by ``sys.exit(0)`` or the like."""
    return isinstance(result, SystemExit) and not result.code
