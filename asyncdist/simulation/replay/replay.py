"""Runs a main once more as it ran when it was recorded: in the simulator, rank by rank.

Recording and replaying what a process has seen from outside is an old method to debug parallel programs (T. J. LeBlanc
and J. M. Mellor-Crummey, Debugging Parallel Programs with Instant Replay, IEEE Transactions on Computers C-36, 1987).
A rank of asyncdist sees three things from outside: messages, the clock, and losses. It sees them at its safe points, or
while it waits. A recording has them in order, with the random states that the rank began with. What follows from them
is computed anew, and compared with what was recorded: each decision, and the weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import torch

from asyncdist.recording.reader import RankRecording, Recording, RecordingError, told_of_other_version
from asyncdist.runtime.world import World
from asyncdist.simulation.arguments import Compute
from asyncdist.simulation.links import Network
from asyncdist.simulation.replay.job import ReplayedJob, torch_state_of
from asyncdist.simulation.report import SimReport
from asyncdist.simulation.simulate import STOPPED, instrument, simulate

logger = logging.getLogger("asyncdist.simulation.replay")


@dataclass(frozen=True, slots=True)
class Replayed:
    """Says what a replay came to.

    Attributes:
        report: of the simulation; a rank whose record ends before its main has no result.
        decision_count: how many recorded decisions, weights included, were compared, and are the same.
        left_count: how many were not come to, since they need something of a rank whose record ends before.
        cut_ranks: the ranks whose record ends before their main, as where they were killed.
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
    version = recording.ranks[0].conditions().torch
    if version != str(torch.__version__):
        logger.warning("recorded with torch %s; with %s numbers may differ", version, torch.__version__)
    job = ReplayedJob(recording, on_open)
    report = _run(job, recording, main, args)
    job.check()
    return Replayed(report, job.decision_count - job.left_count, job.left_count, job.cut_ranks)


def _run(
    job: ReplayedJob, recording: Recording, main: Callable[..., Coroutine[Any, Any, Any]], args: tuple[Any, ...]
) -> SimReport[Any]:
    """Simulate the job's ranks until they have ended, or none goes further."""
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
        )
    except STOPPED as error:
        logger.debug("the replay stood still: %s", error)
        report: SimReport[Any] = error.report
        return report
    finally:
        torch.set_num_threads(threads)
        instrument.reset(token)


def check_replayable(recording: Recording) -> None:
    """Raise RecordingError where a recording cannot be replayed."""
    if recording.missing:
        raise RecordingError(f"rank {recording.missing[0]} has no recording; a replay needs those of all ranks")
    if (told := told_of_other_version(recording)) is not None:
        raise RecordingError(f"{told}; a replay needs the same version: install it, or record the run anew")
    for each in recording.ranks:
        _check_state_of_torch(each)
    again = [each.rank for each in recording.ranks if each.incarnation]
    if again:
        raise RecordingError(
            f"rank {again[0]} was started again, or came later, in the recorded run; such a run cannot be replayed"
        )
    capabilities = recording.ranks[0].conditions().capabilities
    if capabilities.one_sided_reads and "OneSidedSelectiveAveragingPolicy" in _policies_of(recording):
        raise RecordingError(
            "the ranks of OneSidedSelectiveAveragingPolicy read each other's memory here, without messages;"
            " such a run cannot be replayed"
        )


def _check_state_of_torch(each: RankRecording) -> None:
    """Raise RecordingError where a rank's file has no state that torch's generator takes."""
    try:
        torch.Generator().set_state(torch_state_of(each.conditions()))
    except RuntimeError as error:
        raise RecordingError(f"{each.path} has a state of torch's generator that torch refuses: {error}") from error


def _policies_of(recording: Recording) -> set[str]:
    return {event.get("class_name") for each in recording.ranks for event in each.events() if event.kind == "policy"}
