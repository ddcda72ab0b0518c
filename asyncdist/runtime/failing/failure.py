"""Ends a rank after a failure: notifies the other ranks, waits until they stop, and aborts the job if some do not."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import multiprocessing
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Final, NoReturn

from asyncdist import local_host, rank_program
from asyncdist.errors import DisagreementError, LateError, RankLostError, RemoteError, has_cause_here, is_consequence
from asyncdist.launchers import child_environment, detection, launcher_signals
from asyncdist.messaging.engine import Timer
from asyncdist.runtime.failing.failure_report import FailureReport, is_stop, peer_failed, summarise, termination_of
from asyncdist.runtime.failing.process_ends import exit_immediately
from asyncdist.runtime.failing.replica_mates import ReplicaMates, end_as_lost
from asyncdist.runtime.peers import Failed, FailureAcknowledged
from asyncdist.runtime.signals import SIGNALS, Interrupts, interrupt_error
from asyncdist.runtime.stall_warnings import describe_wait, frames_of
from asyncdist.runtime.world import World
from asyncdist.transports.base import Transport
from asyncdist.transports.rank_sets import RankSet
from asyncdist.waits import WaitId, WaitKind
from asyncdist.wording import ranks_in_words

logger = logging.getLogger("asyncdist.runtime.failing.failure")

#: Seconds that a failed rank waits before it prints its error, because another rank's report may explain the error.
_END_REASON_S: Final = 0.25
#: Seconds that ``main`` may continue after another rank's failure before it is cancelled.
_CANCEL_AFTER_S: Final = 1.0
#: Seconds after which a failed rank again notifies the ranks that have not answered.
_NOTIFY_SILENT_S: Final = 1.0

#: Summaries of the errors of ranks that a signal has ended.
_INTERRUPTS: Final = frozenset(summarise(interrupt_error(number)) for number in SIGNALS)

_report = FailureReport()


class FailureMonitor:
    """Ends ``main``, by an error or a cancellation, after another rank, a service or the watchdog has failed."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._task = asyncio.current_task()
        self._timer: Timer | None = None
        self._active = False
        self.error: BaseException | None = None
        self._is_signalled = False  # whether a signal, which this rank may get too, has ended another rank
        self.waited: str | None = None  # ``main``'s wait when the signal was reported
        world.peers.on_failure(self._hear)
        world.services.on_defect(self.stop)

    def __enter__(self) -> None:
        self._active = True

    def __exit__(self, *_: object) -> None:
        self._active = False
        if self._timer is not None:
            self._timer.cancel()

    def _hear(self, rank: int, summary: str) -> None:
        error = peer_failed(rank, summary)
        if summary in _INTERRUPTS and self.error is None:
            self._is_signalled = True
            try:
                self.waited = describe_wait(self._task, self._world)
            except Exception:  # ``main`` must be stopped anyway.
                logger.warning("the wait of rank %d cannot be described", self._world.rank, exc_info=True)
            if self.waited:
                error.add_note(f"rank {self._world.rank} was waiting for {self.waited}")
        self.stop(error)

    def is_stopped(self) -> bool:
        """Return whether ``main`` has received the error that a signal ended another rank. It may be cleaning up."""
        if not self._is_signalled or self.error is None or self._task is None:
            return False
        raised_in = {frame for frame, _ in traceback.walk_tb(self.error.__traceback__)}
        return not raised_in.isdisjoint(frames_of(self._task))

    def stop(self, error: BaseException) -> None:
        """Make ``main`` end with ``error``, unless an earlier error is already ending it."""
        engine = self._world.services.engine
        if self.error is not None or engine.failure is not None:
            return
        self.error = error
        engine.fail(error)
        if self._active:
            self._timer = engine.call_later(_CANCEL_AFTER_S, WaitId(WaitKind.MAIN_END), self._cancel)

    def _cancel(self) -> None:
        # If a signal has already cancelled ``main``, ``main`` has more time to clean up.
        if self._task is not None and self._active and not self._world.agreements.is_interrupted():
            self._task.cancel()


async def fail(
    world: World,
    transport: Transport,
    error: BaseException,
    grace_s: float,
    report_waits: Callable[[], str] | None = None,
) -> None:
    """End this rank after a failure. Notify the other ranks, wait until they stop, and abort the job if some do not.

    If a signal ends this rank, the other ranks have ``launcher_signals.STOP_S`` to clean up, as under a launcher. The
    report of all ranks' waits that ``report_waits()`` returns is printed after ``grace_s`` seconds, before any abort.
    """
    loop, engine = asyncio.get_running_loop(), world.services.engine
    await _end_with_replica(world, transport, error)
    if is_consequence(error):
        await _wait_for_end_reason(world, _END_REASON_S)
    from_peer = is_consequence(error) and isinstance(engine.failure, RankLostError)
    in_process = transport.capabilities.shares_process  # run_local raises the error for all ranks of the process.
    first_rank = await _rank_with_same_error(world, error) if not in_process or world.services.reports_in_turn else None
    if not in_process:
        with _notified_anyway(world.rank, error):
            if first_rank is None:
                _print_failure(world.rank, error, engine.failure if from_peer else None)
            else:
                _print_same_error(world.rank, first_rank, error)
    is_newcomer = not world.services.is_admitted and engine.failure is None
    if engine.failure is None:
        engine.fail(peer_failed(world.rank, summarise(error)))
    world.services.cancel_tasks()
    if is_newcomer:  # No group has admitted this restarted rank. It ends like a lost rank, and the others continue.
        world.close()
        transport.close_failed()
        return
    failed = Failed(summarise(error))
    world.peers.announce(FailureAcknowledged() if from_peer else failed)
    began_at = loop.time()
    abort_s = max(grace_s, launcher_signals.STOP_S) if is_stop(error) and not in_process else grace_s
    report_at, notify_silent_at = began_at + grace_s, began_at + min(_NOTIFY_SILENT_S, grace_s / 3)
    has_everybody_answered = all_others_in(world, transport, world.peers.answered)

    def settled() -> bool:
        return from_peer or has_everybody_answered() or world.peers.is_failure_led_by_lower_rank

    pause_s = 0.001
    while not settled() or (not engine.is_idle and loop.time() < began_at + _CANCEL_AFTER_S):
        if loop.time() >= report_at and not settled() and not in_process:
            report_at = math.inf
            _report_silent(world, grace_s, abort_s, report_waits)
        if loop.time() >= began_at + abort_s:
            break
        if loop.time() >= notify_silent_at and not settled():
            notify_silent_at = math.inf
            world.peers.notify_silent(failed)
        engine.poll()
        try:
            await asyncio.sleep(pause_s)
            pause_s = min(1.5 * pause_s, 0.05)
        except asyncio.CancelledError:  # A signal requests the end, which is already in progress.
            uncancel()
    if not settled() and not in_process:
        transport.abort(1)
        exit_immediately(1)
    world.close()
    transport.close_failed()


def _report_silent(world: World, grace_s: float, abort_s: float, report_waits: Callable[[], str] | None) -> None:
    """Report the ranks that have not stopped. If the job is not aborted yet, only the lowest stopped rank does so."""
    answered = world.peers.answered
    if abort_s > grace_s and min(answered, default=world.rank) < world.rank:
        return
    silent = sorted(set(range(world.size)) - answered - {world.rank})
    abort = "aborting the job" if abort_s <= grace_s else f"the job will be aborted after {abort_s:g} s"
    local_host.print_line(f"asyncdist: rank {world.rank}: ranks {silent} did not stop within {grace_s:g} s; {abort}")
    if report_waits is not None:
        try:
            local_host.print_line(f"asyncdist: {report_waits()}")
        except Exception as failure:  # The job must be aborted anyway.
            local_host.print_line(f"asyncdist: the waits could not be reported: {summarise(failure)}")


async def _end_with_replica(world: World, transport: Transport, error: BaseException) -> None:
    """If another rank of this rank's replica is lost, kill this rank, so that the other replicas can continue."""
    lost = await world.services.shared(ReplicaMates).lost_soon() if isinstance(error, Exception) else ()
    if not lost:
        return
    verb = "is" if len(lost) == 1 else "are"
    cause = f"{ranks_in_words(lost)} of its replica {verb} lost, and the other replicas continue"
    _report.print_line(f"rank {world.rank} ends, because {cause}: {summarise(error)}", error)
    world.services.cancel_tasks()
    world.close()
    transport.close_failed()
    end_as_lost()


async def _rank_with_same_error(world: World, error: BaseException) -> int | None:
    """Return the lower rank that prints the same traceback as this rank would print, or None."""
    if not isinstance(error, Exception) or is_consequence(error):
        return None
    await _wait_for_end_reason(world, _END_REASON_S * world.rank / world.size)
    peer_failure, summary = world.services.engine.failure, summarise(error)
    if (
        not isinstance(peer_failure, RankLostError)
        or peer_failure.args[0] != peer_failed(peer_failure.rank, summary).args[0]
    ):
        return None
    return int(peer_failure.rank)


@contextlib.contextmanager
def _notified_anyway(rank: int, error: BaseException) -> Iterator[None]:
    """Suppress any exception that prevents ``error`` from being printed, so that the other ranks are notified of it."""
    try:
        yield
    except BaseException as failure:  # The user's exception, its notes or the stream may do anything.
        with contextlib.suppress(BaseException):
            local_host.print_line(
                f"asyncdist: rank {rank} failed: {summarise(error)}; printing it failed: {summarise(failure)}"
            )


def _print_same_error(rank: int, first_rank: int, error: BaseException) -> None:
    _report.print_line(f"rank {rank} failed in the same way as rank {first_rank}: {summarise(error)}", error)


async def _wait_for_end_reason(world: World, seconds: float) -> None:
    """Wait for another rank's failure report, which may be in transit and may explain this rank's error."""
    engine = world.services.engine
    deadline = engine.loop.time() + seconds
    while engine.failure is None:
        try:
            what = WaitId(WaitKind.PEER_FAILURE)
            if not await engine.until(lambda: engine.failure is not None, what, deadline=deadline):
                return
        except asyncio.CancelledError:  # A signal requests the end, which is already in progress.
            uncancel()
        except Exception:
            if engine.failure is None:
                raise


def refuse(error: BaseException, caller: FrameType) -> None:
    """Shorten the report of an error that prevents a world from being opened.

    All ranks detect such an error, for example an invalid option. Only the first rank on a host prints a traceback. The
    others print one line.
    """
    local_rank = detection.local_rank()
    is_child = multiprocessing.parent_process() is not None or child_environment.rank_above() is not None
    if local_rank or is_child:
        place = f"{caller.f_code.co_filename}:{caller.f_lineno}"
        who = f"{'a child of ' * is_child}local rank {local_rank or 0}"
        _report.shorten(error, f"{who}, {place}: {type(error).__name__}: {error}")


def fail_alone(transport: Transport, error: BaseException) -> None:
    """End a rank that has failed in the handshake. Abort the job, unless all ranks detect the failure themselves."""
    if transport.size == 1 or transport.capabilities.shares_process:
        return
    if isinstance(error, DisagreementError):
        _report.print_line(f"rank {transport.rank} stopped: {error.args[0]}", error)
        transport.close_failed()
    else:
        with _notified_anyway(transport.rank, error):
            _print_failure(transport.rank, error, None)
        transport.abort(1)
        exit_immediately(1)


def _print_failure(rank: int, error: BaseException, peer_failure: BaseException | None) -> None:
    """Print the error that ends this rank, or one line if another rank's failure has caused it."""
    if peer_failure is not None:
        _report.print_line(_with_notes(f"rank {rank} stopped: {peer_failure.args[0]}", peer_failure), error)
    elif isinstance(error, RemoteError):
        _report.print_line(f"rank {rank} stopped: {error}", error)
    elif isinstance(error, KeyboardInterrupt):
        _report.print_line(_with_notes(f"rank {rank} was interrupted", error), error)
    elif name := termination_of(error):
        _report.print_line(_with_notes(f"rank {rank} was terminated ({name})", error), error)
    elif not isinstance(error, SystemExit | LateError):
        _report.print_traceback(error, rank)


def end_late(error: LateError) -> NoReturn:
    """End this restarted process successfully, because the other ranks have already ended."""
    local_host.print_line(f"asyncdist: {error.message}, so nothing is left to do")
    raise SystemExit(0) from error


def _with_notes(line: str, error: BaseException) -> str:
    return "; ".join([line, *map(str, getattr(error, "__notes__", ()))])


def own_error(
    caught: BaseException, monitor: FailureMonitor | None, interrupts: Interrupts, rank: int
) -> BaseException:
    """Return the error to raise to the caller: this rank's own error, or the other rank's failure that caused it."""
    cause = monitor.error if monitor is not None and not has_cause_here(caught) else None
    cause = interrupts.error(rank) or cause
    if cause is None and isinstance(caught, asyncio.CancelledError):
        cause = interrupts.raised
    if cause is not None:
        uncancel()
    error = cause or caught
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        error.code = rank_program.exit_code(error.code)
    return error


def uncancel() -> None:
    """Withdraw all requests to cancel the current task."""
    task = asyncio.current_task()
    while task is not None and task.uncancel():
        pass


def all_others_in(world: World, transport: Transport, *groups: RankSet) -> Callable[[], bool]:
    """Return a function that checks whether every other rank is lost or in one of ``groups``, which may change."""

    def is_complete() -> bool:
        lost = transport.lost_ranks()
        if len(lost) + sum(map(len, groups)) < world.size - 1:  # Usually true. This check runs for each message.
            return False
        found = RankSet(lost)
        found.add(world.rank)
        for group in groups:
            found |= group
        return len(found) == world.size

    return is_complete
