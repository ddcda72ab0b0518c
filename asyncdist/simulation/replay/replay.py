"""Runs a main once more as it ran when it was recorded: in the simulator, rank by rank.

Recording and replaying what a process has seen from outside is an old method to debug parallel programs (T. J. LeBlanc
and J. M. Mellor-Crummey, Debugging Parallel Programs with Instant Replay, IEEE Transactions on Computers C-36, 1987).
A rank of asyncdist sees three things from outside: messages, the clock, and losses. It sees them at its safe points, or
while it waits. A recording has them in order, with the random states that the rank began with. What follows from them
is computed anew, and compared with what was recorded: each decision, and the weights.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy
import torch

from asyncdist.recording.reader import RankRecording, Recording, RecordingError
from asyncdist.runtime.world import World
from asyncdist.simulation.arguments import Compute
from asyncdist.simulation.links import Network
from asyncdist.simulation.processes.event_loop import RankLoop
from asyncdist.simulation.replay.comparison import DivergenceError
from asyncdist.simulation.replay.gate import Gate
from asyncdist.simulation.replay.log import RankLog, log_of
from asyncdist.simulation.replay.mailbox import Mailbox
from asyncdist.simulation.replay.transport import ReplayTransport
from asyncdist.simulation.report import SimReport
from asyncdist.simulation.simulate import STOPPED, instrument, simulate
from asyncdist.transports.base import Transport

logger = logging.getLogger("asyncdist.simulation.replay")

#: After so many things in a row in which no rank sees anything the replay is over: a rank waits for what never comes.
_IDLE_EVENT_COUNT: Final = 200_000
#: Things that happen between two looks at that.
_LOOK_EVERY: Final = 64


@dataclass(frozen=True, slots=True)
class Replayed:
    """Says what a replay came to.

    Attributes:
        report: of the simulation; a rank whose record ends before its main has no result.
        decision_count: how many recorded decisions, weights included, were compared, and are the same.
        left_count: how many were not come to, since they need something of a rank whose record ends before.
        cut_ranks: the ranks whose record ends before their main, as where they were killed.
    """

    report: SimReport
    decision_count: int
    left_count: int
    cut_ranks: tuple[int, ...]


def replay(
    main: Callable[..., Coroutine[Any, Any, Any]],
    *args: Any,
    recording: Recording,
    on_open: Callable[[World], object] | None = None,
) -> Replayed:
    """Run ``main(world, *args)`` on the ranks of a recorded run; each sees the messages, and the clock, as it did then.

    Threads of torch are as many as then, since sums depend on them.

    Args:
        main: the coroutine function that was run.
        args: its other arguments.
        recording: of one job, all ranks of which have a file.
        on_open: called with the world of each rank before its main begins.

    Raises:
        DivergenceError: a rank does something else than then; the first difference is named.
        RecordingError: a rank has no file, or was started again meanwhile.
    """
    check_replayable(recording)
    ranks = {each.rank: each for each in recording.ranks}
    logs = {rank: _log_of(each) for rank, each in ranks.items()}
    decision_count = sum(log.decision_count for log in logs.values())
    cut_ranks = tuple(rank for rank, log in sorted(logs.items()) if not log.is_over)
    mailboxes = [Mailbox() for _ in range(recording.size)]
    gates: dict[int, Gate] = {}
    found: list[DivergenceError] = []
    differing: list[DivergenceError] = []

    def is_cut_off(rank: int) -> bool:
        return rank in gates and (gates[rank].goes_no_further or (rank in cut_ranks and gates[rank].has_stopped))

    watch = _Watch(gates)

    def replayed(transport: Transport, loop: RankLoop) -> _ReplayedRank:
        rank = transport.rank
        gate = gates[rank] = Gate(rank, logs[rank], mailboxes[rank], loop, found, is_cut_off)
        return _ReplayedRank(transport, gate, ranks[rank], mailboxes, on_open)

    def is_over() -> bool:
        differing.extend(found[: 1 - len(differing)])  # what is found later comes of the clearing away
        ended = bool(cut_ranks) and len(gates) == recording.size and all(gate.has_stopped for gate in gates.values())
        return bool(differing) or ended or watch.is_over()

    report: SimReport | None = None
    token = instrument.set(replayed)
    threads = torch.get_num_threads()
    torch.set_num_threads(int(ranks[0].header["thread_count"]))
    try:
        report = simulate(
            main,
            *args,
            ranks=recording.size,
            network=Network(eager_nbytes=1 << 40),
            compute=Compute(step_s=0.0),
            after_event=is_over,
        )
    except STOPPED as error:
        logger.debug("the replay stood still: %s", error)
        report = error.report
    finally:
        torch.set_num_threads(threads)
        instrument.reset(token)
    if differing:
        raise differing[0]
    waiting = {rank: gate for rank, gate in gates.items() if not gate.has_stopped}
    if report is None or (waiting and not cut_ranks):
        raise _what_is_missing(waiting or gates, ranks)
    left_count = sum(log.decision_count for log in logs.values())
    if left_count and not cut_ranks and not any(log.error for log in logs.values()):
        raise _what_is_missing({rank: gate for rank, gate in gates.items() if logs[rank].decision_count}, ranks)
    return Replayed(report, decision_count - left_count, left_count, cut_ranks)


class _Watch:
    """Ends a replay in which nothing happens any more.

    Args:
        gates: of all ranks; it changes meanwhile.
    """

    def __init__(self, gates: Mapping[int, Gate]) -> None:
        self._gates = gates
        self._event_count = 0
        self._progress_count = -1
        self._progressed_at_count = 0

    def is_over(self) -> bool:
        """Return whether it is; called after each thing that happens."""
        self._event_count += 1
        if self._event_count % _LOOK_EVERY:
            return False
        progress_count = sum(gate.progress_count for gate in self._gates.values())
        if progress_count != self._progress_count:
            self._progress_count, self._progressed_at_count = progress_count, self._event_count
        return self._event_count > self._progressed_at_count + _IDLE_EVENT_COUNT


def _what_is_missing(gates: Mapping[int, Gate], ranks: Mapping[int, RankRecording]) -> DivergenceError:
    """Return an error that names the first event of the recorded run that does not happen now."""

    def missing(rank: int) -> tuple[float, str]:
        time_s, text = gates[rank].missing()
        return ranks[rank].unix_s(time_s), text

    rank = min(gates, key=missing)
    others = [f"rank {other} is there {gates[other].comparison.where()}" for other in sorted(gates) if other != rank]
    return DivergenceError("; ".join([gates[rank].missing()[1], *others]), rank=rank)


def _log_of(recorded: RankRecording) -> RankLog:
    header = recorded.header
    is_native = bool(header["capabilities"]["native_collectives"])
    return log_of(recorded.events(), int(header.get("sent_before_count", 0)), is_native=is_native)


def check_replayable(recording: Recording) -> None:
    """Raise RecordingError where a recording cannot be replayed; warn of what makes a difference likely."""
    if recording.missing:
        raise RecordingError(f"rank {recording.missing[0]} has no recording; a replay needs those of all ranks")
    again = [each.rank for each in recording.ranks if each.incarnation]
    if again:
        raise RecordingError(f"rank {again[0]} was started again in the recorded run; such a run cannot be replayed")
    first = recording.ranks[0].header
    if first["capabilities"].get("one_sided_reads") and "OneSidedSelectiveAveragingPolicy" in _policies_of(recording):
        raise RecordingError(
            "the ranks of OneSidedSelectiveAveragingPolicy read each other's memory here, without messages;"
            " such a run cannot be replayed"
        )
    if first["torch"] != str(torch.__version__):
        logger.warning("recorded with torch %s; with %s numbers may differ", first["torch"], torch.__version__)
    for each in recording.ranks:
        if each.damage:
            logger.warning("%s: %s", each.path, each.damage)


def _policies_of(recording: Recording) -> set[str]:
    return {event.get("class_name") for each in recording.ranks for event in each.events() if event.kind == "policy"}


class _ReplayedRank:
    """Takes the place of a :class:`asyncdist.runtime.recording.Recording`: the other way round."""

    def __init__(
        self,
        transport: Transport,
        gate: Gate,
        recorded: RankRecording,
        mailboxes: Sequence[Mailbox],
        on_open: Callable[[World], object] | None,
    ) -> None:
        self._header: Mapping[str, Any] = recorded.header
        self._gate = gate
        self._on_open = on_open
        self.transport: Transport = ReplayTransport(transport, gate, mailboxes, recorded.header)

    def begin(self, world: World) -> None:
        """Show the rank what it saw from now on, and draw what it drew."""
        states = self._header["random"]
        version, numbers, gauss = states["python"]
        random.setstate((version, tuple(numbers), gauss))
        name, keys, *rest = states["numpy"]
        numpy.random.set_state((name, numpy.frombuffer(keys, dtype=numpy.uint32), int(rest[0]), int(rest[1]), rest[2]))
        torch.set_rng_state(torch.frombuffer(bytearray(states["torch"]), dtype=torch.uint8))
        self._gate.install(world)
        if self._on_open is not None:
            self._on_open(world)

    def note_end(self, error: BaseException | None) -> None:
        """Compare how main ended."""
        self._gate.note_end(error)

    def close(self) -> None:
        """Do nothing."""
