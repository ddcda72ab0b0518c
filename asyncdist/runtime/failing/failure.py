"""Ends a rank after a failure: notifies the peers, waits until they stop, and aborts the job if some do not."""

from __future__ import annotations

import asyncio
import math
import multiprocessing
from collections.abc import Callable, Collection
from types import FrameType
from typing import Final, NoReturn

from asyncdist import local_host, rank_program
from asyncdist.errors import DisagreementError, LateError, RankLostError, RemoteError, has_cause_here, is_consequence
from asyncdist.launchers import child_environment, detection
from asyncdist.messaging.engine import Timer
from asyncdist.runtime.failing.failure_report import FailureReport, peer_failed, summarise, termination_of
from asyncdist.runtime.failing.process_ends import exit_immediately
from asyncdist.runtime.failing.replica_mates import ReplicaMates, end_as_lost
from asyncdist.runtime.peers import Failed, FailureAcknowledged
from asyncdist.runtime.signals import SIGNALS, Interrupts, interrupt_error
from asyncdist.runtime.stall_warnings import describe_wait
from asyncdist.runtime.world import World
from asyncdist.transports.base import Transport
from asyncdist.waits import WaitId, WaitKind
from asyncdist.wording import ranks_in_words

#: Seconds that a failed rank waits before it prints its error, because another rank's report may explain the error.
_HEAR_WHY_S: Final = 0.25
#: Seconds that main may continue after another rank's failure before it is cancelled.
_CANCEL_AFTER_S: Final = 1.0
#: Seconds after which a failed rank notifies silent peers again.
_TELL_SILENT_S: Final = 1.0

#: Summaries of the failures of peers that a signal has ended.
_INTERRUPTS: Final = frozenset(summarise(interrupt_error(number)) for number in SIGNALS)

_report = FailureReport()


class FailureMonitor:
    """Stops main at a safe point, or by cancelling it, after another rank, a service or the watchdog has failed."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._task = asyncio.current_task()
        self._timer: Timer | None = None
        self._active = False
        self.error: BaseException | None = None
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
        if summary in _INTERRUPTS and (waited := describe_wait(self._task, self._world)):
            error.add_note(f"rank {self._world.rank} was waiting for {waited}")
        self.stop(error)

    def stop(self, error: BaseException) -> None:
        """Make main end with ``error``, unless an earlier error already ends it."""
        if self.error is not None or self._world.services.engine.failure is not None:
            return
        self.error = error
        self._world.services.engine.fail(error)
        if self._active:
            self._timer = self._world.services.engine.call_later(
                _CANCEL_AFTER_S, WaitId(WaitKind.MAIN_END), self._cancel
            )

    def _cancel(self) -> None:
        if self._task is not None and self._active:
            self._task.cancel()


async def fail(
    world: World,
    transport: Transport,
    error: BaseException,
    grace_s: float,
    tell_story: Callable[[], str] | None = None,
) -> None:
    """End this rank after a failure. Notify the peers, wait until they stop, and abort the job if some do not.

    Before an abort, the report of all ranks' waits that ``tell_story()`` returns is printed.
    """
    loop = asyncio.get_running_loop()
    await _end_beside_lost_mates(world, transport, error)
    if is_consequence(error):
        await _wait_for_end_reason(world, _HEAR_WHY_S)
    from_peer = is_consequence(error) and isinstance(world.services.engine.failure, RankLostError)
    in_process = transport.capabilities.shares_process  # run_local raises the error for all ranks of the process.
    teller = await _rank_that_tells(world, error) if not in_process or world.services.reports_in_turn else None
    if not in_process and teller is None:
        _print_failure(world.rank, error, world.services.engine.failure if from_peer else None)
    elif not in_process:
        _print_alike(world.rank, teller, error)
    is_newcomer = not world.services.is_admitted and world.services.engine.failure is None
    if world.services.engine.failure is None:
        world.services.engine.fail(peer_failed(world.rank, summarise(error)))
    world.services.cancel_tasks()
    if is_newcomer:  # A restarted rank that no group has admitted ends like a lost rank, and the others continue.
        world.close()
        transport.close_failed()
        return
    failed = Failed(summarise(error))
    world.peers.announce(FailureAcknowledged() if from_peer else failed)
    began_at = loop.time()
    deadline, tell_silent_at = began_at + grace_s, began_at + min(_TELL_SILENT_S, grace_s / 3)
    has_everybody_answered = Everybody(world, transport, world.peers.answered)

    def settled() -> bool:
        return from_peer or has_everybody_answered() or world.peers.is_failure_led_elsewhere

    pause_s = 0.001
    while not settled() or (not world.services.engine.is_idle and loop.time() < began_at + _CANCEL_AFTER_S):
        if loop.time() >= deadline:
            break
        if loop.time() >= tell_silent_at and not settled():
            tell_silent_at = math.inf
            world.peers.tell_silent(failed)
        world.services.engine.poll()
        try:
            await asyncio.sleep(pause_s)
            pause_s = min(1.5 * pause_s, 0.05)
        except asyncio.CancelledError:  # A signal requests the end, which is already in progress.
            _uncancel()
    if not settled() and not in_process:
        silent = sorted(set(range(world.size)) - world.peers.answered - {world.rank})
        local_host.print_line(
            f"asyncdist: rank {world.rank}: ranks {silent} did not stop within {grace_s:g} s; aborting the job"
        )
        if tell_story is not None:
            local_host.print_line(f"asyncdist: {tell_story()}")
        transport.abort(1)
        exit_immediately(1)
    world.close()
    transport.close_failed()


async def _end_beside_lost_mates(world: World, transport: Transport, error: BaseException) -> None:
    """If another rank of this rank's replica is lost, kill this rank, so that the other replicas continue."""
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


async def _rank_that_tells(world: World, error: BaseException) -> int | None:
    """Return the lower rank that prints the same traceback as this rank would, or None if there is none."""
    if not isinstance(error, Exception) or is_consequence(error):
        return None
    await _wait_for_end_reason(world, _HEAR_WHY_S * world.rank / world.size)
    heard, summary = world.services.engine.failure, summarise(error)
    if not isinstance(heard, RankLostError) or heard.args[0] != peer_failed(heard.rank, summary).args[0]:
        return None
    return int(heard.rank)


def _print_alike(rank: int, teller: int | None, error: BaseException) -> None:
    _report.print_line(f"rank {rank} failed in the same way as rank {teller}: {summarise(error)}", error)


async def _wait_for_end_reason(world: World, seconds: float) -> None:
    """Wait for a peer's failure report, which may be in transit and may explain this rank's error."""
    engine = world.services.engine
    deadline = engine.loop.time() + seconds
    while engine.failure is None:
        try:
            if not await engine.until(
                lambda: engine.failure is not None, WaitId(WaitKind.PEER_FAILURE), deadline=deadline
            ):
                return
        except asyncio.CancelledError:  # A signal requests the end, which is already in progress.
            _uncancel()
        except Exception:
            if engine.failure is None:
                raise


def refuse(error: BaseException, caller: FrameType) -> None:
    """Shorten the report of an error that keeps a world from opening.

    All ranks detect such an error, for example an invalid option. Only the first rank of a host prints a traceback. The
    others print one line.
    """
    local_rank = detection.local_rank()
    is_child = multiprocessing.parent_process() is not None or child_environment.rank_above() is not None
    if local_rank or is_child:
        place = f"{caller.f_code.co_filename}:{caller.f_lineno}"
        who = f"{'a child of ' * is_child}local rank {local_rank or 0}"
        _report.shorten(error, f"{who}, {place}: {type(error).__name__}: {error}")


def fail_alone(transport: Transport, error: BaseException) -> None:
    """End a rank that has failed in the handshake. Abort the job, unless all ranks have detected the failure."""
    if transport.size == 1 or transport.capabilities.shares_process:
        return
    if isinstance(error, DisagreementError):
        _report.print_line(f"rank {transport.rank} stopped: {error.args[0]}", error)
        transport.close_failed()
    else:
        _print_failure(transport.rank, error, None)
        transport.abort(1)
        exit_immediately(1)


def _print_failure(rank: int, error: BaseException, heard: BaseException | None) -> None:
    """Print the error that ends this rank, or one line if a peer's failure has caused it."""
    if heard is not None:
        _report.print_line(_with_notes(f"rank {rank} stopped: {heard.args[0]}", heard), error)
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
    return "; ".join([line, *getattr(error, "__notes__", ())])


def own_error(
    caught: BaseException, monitor: FailureMonitor | None, interrupts: Interrupts, rank: int
) -> BaseException:
    """Return the error to raise to the caller: this rank's own error, or the other rank's failure that caused it."""
    cause = monitor.error if monitor is not None and not has_cause_here(caught) else None
    cause = interrupts.error(rank) or cause
    if cause is not None:
        _uncancel()
    elif isinstance(caught, SystemExit) and isinstance(caught.code, int):
        caught.code = rank_program.exit_code(caught.code)
    return cause or caught


def _uncancel() -> None:
    task = asyncio.current_task()
    while task is not None and task.uncancel():
        pass


class Everybody:
    """Callable that returns whether every other rank is lost or in one of several growing sets.

    The check runs for each message, even with thousands of ranks, so it first compares the sizes of the sets.
    """

    def __init__(self, world: World, transport: Transport, *groups: Collection[int]) -> None:
        self._groups = groups
        self._own_rank = world.rank
        self._size = world.size
        self._transport = transport
        self._found_count = 0  # number of ranks, from rank 0, that have all been found

    def __call__(self) -> bool:
        """Return whether every other rank is lost, or in one of the sets of ranks passed to the constructor."""
        lost = self._transport.lost_ranks()
        groups = (*self._groups, lost) if lost else self._groups
        counts = [len(group) - (self._own_rank in group) for group in groups]
        if max(counts) == self._size - 1:
            return True
        if sum(counts) >= self._size - 1:  # Otherwise at least one rank is in none of the sets.
            self._go_on(groups)
        return self._found_count == self._size

    def _go_on(self, groups: Collection[Collection[int]]) -> None:
        rank = self._found_count
        while rank < self._size and (rank == self._own_rank or any(rank in group for group in groups)):
            rank += 1
        self._found_count = rank
