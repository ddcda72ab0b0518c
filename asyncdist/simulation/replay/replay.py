"""Replays a recorded run in the simulator: each rank receives the recorded inputs and repeats its computations.

A rank's *record* contains its external inputs (messages, clock readings and losses) in order, and its initial random
states. The replay computes everything else again, and compares each decision and the weights with the record (T. J.
LeBlanc and J. M. Mellor-Crummey, Debugging Parallel Programs with Instant Replay, IEEE Transactions on Computers C-36,
1987).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import torch

from asyncdist.recording.reader import RankRecording, Recording, RecordingError, other_version_warning
from asyncdist.runtime.world import World
from asyncdist.simulation.arguments import Compute
from asyncdist.simulation.links import Network
from asyncdist.simulation.replay.job import ReplayedJob, torch_state_of
from asyncdist.simulation.report import SimReport
from asyncdist.simulation.simulate import STOPPED, instrument, simulate

logger = logging.getLogger("asyncdist.simulation.replay")


@dataclass(frozen=True, slots=True)
class Replayed:
    """Result of a replay.

    Attributes:
        report: Report of the simulation, without a result for each rank in ``cut_ranks``.
        decision_count: Number of recorded decisions, including weights, that the replay repeated.
        left_count: Number of recorded decisions that the replay did not reach, because they depend on a rank whose
            record ends earlier.
        cut_ranks: Ranks whose record ends before their main returns, for example because they were killed.
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
        on_open: Function called with the world of each rank before the rank's main begins.

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
