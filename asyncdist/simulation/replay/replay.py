"""Replays a recorded run in the simulator: each rank receives the recorded inputs and repeats its computations.

A rank's *record* contains its external inputs (messages, clock readings and losses) in order, and its initial random
states. The replay computes everything else again, and compares each decision and the weights with the record (T. J.
LeBlanc and J. M. Mellor-Crummey, Debugging Parallel Programs with Instant Replay, IEEE Transactions on Computers C-36,
1987).
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy
import torch

from asyncdist.recording.reader import RankRecording, Recording, RecordingError, other_version_warning
from asyncdist.recording.schema import Conditions
from asyncdist.recording.sources import checksum_of_sources
from asyncdist.runtime.world import World
from asyncdist.simulation.arguments import Compute
from asyncdist.simulation.links import Network
from asyncdist.simulation.processes.event_loop import RankLoop
from asyncdist.simulation.replay.comparison import DivergenceError
from asyncdist.simulation.replay.engine import ReplayedEngine
from asyncdist.simulation.replay.gate import Gate
from asyncdist.simulation.replay.log import cut_at_signals, log_of
from asyncdist.simulation.replay.pending_inputs import Mailbox
from asyncdist.simulation.replay.transport import ReplayTransport
from asyncdist.simulation.report import SimReport
from asyncdist.simulation.simulate import STOPPED, instrument, simulate
from asyncdist.transports.base import Transport

logger = logging.getLogger("asyncdist.simulation.replay")

#: Number of consecutive events without progress of any rank after which the replay ends. The number is larger if a
#: recorded rank had no input for a long time, because its tasks may have yielded to each other all that time.
_IDLE_EVENT_COUNT: Final = 200_000
_IDLE_EVENT_COUNT_MAX: Final = 10_000_000
#: Text that is added to the description of a difference.
_OTHER_SOURCES: Final = (
    "; the recording was made with other source files of asyncdist, which may be the cause: record the run again"
)
#: Maximum number of times per second that a recorded rank's tasks could yield to each other.
_YIELDS_PER_S: Final = 1_000_000
#: Number of events between two checks for progress.
_LOOK_EVERY: Final = 64


@dataclass(frozen=True, slots=True)
class Replayed:
    """Describes the result of a replay.

    Attributes:
        report: Report of the simulation, without a result for each rank in ``cut_ranks``.
        decision_count: Number of recorded decisions, including weights, that the replay repeated.
        left_count: Number of recorded decisions that the replay did not reach, because they depend on a rank whose
            record ends earlier.
        cut_ranks: Ranks whose record ends before their ``main`` returns, for example because they were killed.
    """

    report: SimReport[Any]
    decision_count: int
    left_count: int
    cut_ranks: tuple[int, ...]


def replay(
    main: Callable[..., Coroutine[Any, Any, Any]],
    *args: Any,
    recording: Recording,
    on_open: Callable[[World], object] | None = None,
) -> Replayed:
    """Run ``main(world, *args)`` on the ranks of a recorded run, with the recorded messages and clock times.

    torch uses the recorded number of threads, because sums depend on it.

    Args:
        main: Coroutine function that was recorded.
        args: Further arguments of ``main``.
        recording: Recording of one job, with a file for each rank.
        on_open: Function called with the world of each rank before the rank's ``main`` begins.

    Raises:
        DivergenceError: A rank differs from its record. The message describes the first difference.
        RecordingError: A rank has no file, or was restarted in the recorded run.
    """
    check_replayable(recording)
    version = recording.ranks[0].conditions().torch
    if version != str(torch.__version__):
        logger.warning("recorded with torch %s; results may differ with torch %s", version, torch.__version__)
    job = ReplayedJob(recording, on_open)
    report = _run(job, recording, main, args)
    job.check()
    return Replayed(report, job.decision_count - job.left_count, job.left_count, job.cut_ranks)


def _run(
    job: ReplayedJob, recording: Recording, main: Callable[..., Coroutine[Any, Any, Any]], args: tuple[Any, ...]
) -> SimReport[Any]:
    token = instrument.set(job.open_rank)
    threads = torch.get_num_threads()
    torch.set_num_threads(recording.ranks[0].conditions().thread_count)
    try:
        return simulate(
            main,
            *args,
            ranks=recording.size,
            network=Network(eager_nbytes=1 << 40),
            compute=Compute(step_s=0.0),
            after_event=job.is_over,
            return_exceptions=True,
        )
    except STOPPED as error:
        logger.debug("the replay made no progress: %s", error)
        report: SimReport[Any] = error.report
        return report
    finally:
        torch.set_num_threads(threads)
        instrument.reset(token)


def check_replayable(recording: Recording) -> None:
    """Raise RecordingError if a recording cannot be replayed."""
    if recording.missing:
        raise RecordingError(
            f"a replay needs the recordings of all ranks, but rank {recording.missing[0]} has no recording"
        )
    if (told := other_version_warning(recording)) is not None:
        raise RecordingError(f"{told}. A replay needs the same version: install it, or record the run again")
    for each in recording.ranks:
        _check_state_of_torch(each)
    again = [each.rank for each in recording.ranks if each.incarnation]
    if again:
        raise RecordingError(
            f"a run with a restarted or late rank cannot be replayed, and rank {again[0]} was restarted or joined late"
        )
    capabilities = recording.ranks[0].conditions().capabilities
    if capabilities.one_sided_reads and "OneSidedSelectiveAveragingPolicy" in _policies_of(recording):
        raise RecordingError(
            "a run whose ranks read each other's memory without messages cannot be replayed, and this run "
            "used OneSidedSelectiveAveragingPolicy"
        )


def _check_state_of_torch(each: RankRecording) -> None:
    """Raise RecordingError if torch refuses the generator state in a rank's file."""
    try:
        torch.Generator().set_state(torch_state_of(each.conditions()))
    except RuntimeError as error:
        raise RecordingError(f"the generator state in {each.path} must be valid for this torch: {error}") from error


def _policies_of(recording: Recording) -> set[str]:
    return {event.get("class_name") for each in recording.ranks for event in each.events() if event.kind == "policy"}


class ReplayedJob:
    """Stores the records of a replay's ranks, and tracks the ranks' progress.

    Attributes:
        left_count: Number of recorded decisions that the replay has not reached, counted when the simulation is over.
        cut_ranks: Ranks whose record ends before ``main`` returns.
    """

    def __init__(self, recording: Recording, on_open: Callable[[World], object] | None) -> None:
        self._size = recording.size
        self._on_open = on_open
        self._recorded = {each.rank: each for each in recording.ranks}
        records = cut_at_signals({rank: list(each.events()) for rank, each in self._recorded.items()})
        self._logs = {rank: log_of(records[rank], each.conditions()) for rank, each in self._recorded.items()}
        self._mailboxes = [Mailbox() for _ in range(recording.size)]
        self._gates: dict[int, Gate] = {}
        self._found: list[DivergenceError] = []
        self._event_count = 0
        self._progress_count = -1
        self._progressed_at_count = 0
        self._is_judged = False
        self._difference: DivergenceError | None = None
        self._has_other_sources = any(each.header.sources != checksum_of_sources() for each in recording.ranks)
        self.decision_count = self.left_count = self._count_remaining()
        self.cut_ranks = tuple(rank for rank, log in sorted(self._logs.items()) if not log.is_over)

    def open_rank(self, transport: Transport, loop: RankLoop) -> ReplayedRank:
        """Return an object that replays a rank, to be used instead of the object that records it."""
        rank = transport.rank
        gate = Gate(rank, self._logs[rank], self._mailboxes[rank], loop, self._found, self._is_cut_off)
        gate.inputs.reached_s = self._recorded[rank].header.clock_s
        self._gates[rank] = gate
        return ReplayedRank(transport, loop, gate, self._recorded[rank], self._mailboxes, self._begin)

    def _begin(self, world: World) -> None:
        world.services.end_recording = lambda what, seconds: self._judge()
        if self._on_open is not None:
            self._on_open(world)

    def is_over(self) -> bool:
        """Return whether the replay is over. Called after each event."""
        return bool(self._found) or (bool(self.cut_ranks) and self._have_all_stopped()) or self._is_idle()

    def _have_all_stopped(self) -> bool:
        return len(self._gates) == self._size and all(gate.has_stopped for gate in self._gates.values())

    def _is_idle(self) -> bool:
        """Return whether many events have passed since a rank last made progress. Called after each event."""
        self._event_count += 1
        if self._event_count % _LOOK_EVERY:
            return False
        progress_count = sum(gate.inputs.progress_count for gate in self._gates.values())
        if progress_count != self._progress_count:
            self._progress_count, self._progressed_at_count = progress_count, self._event_count
        idle_count = self._event_count - self._progressed_at_count
        return idle_count > _IDLE_EVENT_COUNT and idle_count > self._idle_count_max()

    def _idle_count_max(self) -> float:
        idle_s = max((gate.inputs.idle_s() for gate in self._gates.values()), default=0.0)
        return min(_IDLE_EVENT_COUNT + idle_s * _YIELDS_PER_S, _IDLE_EVENT_COUNT_MAX)

    def check(self) -> None:
        """Raise DivergenceError if a rank differs from its record. Called when the simulation is over."""
        self._judge()
        if self._difference is not None:
            raise self._difference

    def _judge(self) -> None:
        """Find the first difference from the records. Later calls do nothing, because cancelled ranks deviate."""
        if self._is_judged:
            return
        self._is_judged = True
        self.left_count = self._count_remaining()
        difference = self._difference = self._found[0] if self._found else self._find_difference()
        if difference is not None and self._has_other_sources:
            difference.message += _OTHER_SOURCES

    def _find_difference(self) -> DivergenceError | None:
        deferred = [gate.comparison.deferred for gate in self._gates.values() if gate.comparison.deferred is not None]
        if deferred:
            return deferred[0]
        cut_off = self._cut_off({rank for rank, gate in self._gates.items() if gate.is_at_cut})
        waiting = [rank for rank, gate in self._gates.items() if not gate.has_stopped and rank not in cut_off]
        if waiting:
            return self._first_missing(waiting)
        if self.left_count and not self.cut_ranks and not any(log.error for log in self._logs.values()):
            return self._first_missing([rank for rank in self._gates if self._logs[rank].decision_count])
        return None

    def _is_cut_off(self, rank: int, or_waits: bool) -> bool:
        """Return whether a rank has stopped (or, if ``or_waits``, waits) at the end of its own or a needed record."""
        return rank in self._cut_off(
            {each for each, gate in self._gates.items() if gate.has_stopped_at_cut or (or_waits and gate.is_at_cut)}
        )

    def _cut_off(self, ranks: Collection[int]) -> set[int]:
        """Return the stopped ranks ``ranks`` and all ranks that need their messages, directly or indirectly."""
        cut_off = set(ranks)
        while more := {
            rank
            for rank, gate in self._gates.items()
            if rank not in cut_off and not gate.has_stopped and not cut_off.isdisjoint(gate.awaited_ranks())
        }:
            cut_off |= more
        return cut_off

    def _count_remaining(self) -> int:
        return sum(log.decision_count for log in self._logs.values())

    def _first_missing(self, ranks: Iterable[int]) -> DivergenceError:
        """Return an error that names the first recorded event that these ranks have not replayed."""
        missing = {rank: self._gates[rank].missing() for rank in ranks}
        first = min(missing, key=lambda rank: (self._recorded[rank].unix_s(missing[rank][0]), missing[rank][1]))
        others = [rank for rank in sorted(missing) if rank != first]
        places = [f"rank {rank} is {self._gates[rank].comparison.where()}" for rank in others]
        return DivergenceError("; ".join([missing[first][1], *places]), rank=first)


class ReplayedRank:
    """Replays one rank, with the interface of :class:`asyncdist.runtime.recording.Recording`."""

    def __init__(
        self,
        transport: Transport,
        loop: RankLoop,
        gate: Gate,
        recorded: RankRecording,
        mailboxes: Sequence[Mailbox],
        on_open: Callable[[World], object],
    ) -> None:
        self._conditions = recorded.conditions()
        self._gate = gate
        self._on_open = on_open
        self.transport: Transport = ReplayTransport(transport, gate, mailboxes, recorded.header, self._conditions)
        self.engine = ReplayedEngine(self.transport, loop, gate)

    def begin(self, world: World) -> None:
        """Restore the rank's random states, and begin to deliver its recorded inputs."""
        draw_as(self._conditions)
        world.services.reports_in_turn = not self._conditions.capabilities.shares_process
        world.services.events.sink = self._gate.on_event
        self.engine.begin()
        self._on_open(world)

    def note_end(self, error: BaseException | None) -> None:
        """Compare the end of ``main`` with the recorded end."""
        self._gate.note_end(error)

    def close(self) -> None:
        """Do nothing, because a replay has no file to close."""


def draw_as(conditions: Conditions) -> None:
    """Restore, in this thread, the random states that a rank had when it opened its world."""
    states = conditions.random
    version, numbers, gauss = states.python
    random.setstate((version, tuple(numbers), gauss))
    if states.numpy is not None:
        name, keys, *rest = states.numpy
        numpy.random.set_state((name, numpy.frombuffer(keys, dtype=numpy.uint32), int(rest[0]), int(rest[1]), rest[2]))
    torch.set_rng_state(torch_state_of(conditions))


def torch_state_of(conditions: Conditions) -> torch.Tensor:
    """Return the state that torch's generator had when a rank opened its world."""
    return torch.frombuffer(bytearray(conditions.random.torch), dtype=torch.uint8)
