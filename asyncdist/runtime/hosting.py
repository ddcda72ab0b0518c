"""Hosts one rank from the handshake until the rank ends. Runs ``main`` and its spawned tasks in one task group."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from asyncdist import rank_program, validation
from asyncdist.live import last_counters
from asyncdist.live.counters import counters_of
from asyncdist.live.destinations import Destination
from asyncdist.live.exporting import Exporter
from asyncdist.messaging.engine import Engine
from asyncdist.recording.writer import RecordOptions
from asyncdist.runtime import handshake
from asyncdist.runtime.failing.failure import FailureMonitor, fail, fail_alone, own_error, uncancel
from asyncdist.runtime.failing.process_ends import (
    ForkedChildError,
    abandoned_in_children,
    end_at_next_turn,
    ending_forked_children,
)
from asyncdist.runtime.leaving import leave, report_leftovers
from asyncdist.runtime.process import free_ended
from asyncdist.runtime.recording import Recording
from asyncdist.runtime.signals import Interrupts
from asyncdist.runtime.stall_warnings import ENDLESS, EndWatch, StallWatch, WatchdogOptions, describe_wait
from asyncdist.runtime.story.answering import WaitReporter
from asyncdist.runtime.story.requests import register_report, unregister_report
from asyncdist.runtime.world import World, _current_world
from asyncdist.tensors.serialization import name_and_message
from asyncdist.transports.base import Transport

#: Default of ``grace_s``: seconds that a failed rank waits for its peers to stop on their own.
GRACE_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class RankOptions:
    """Options of a hosted rank, mostly arguments of :func:`asyncdist.run`.

    Attributes:
        tells: Whether the rank reports its waits on SIGUSR1 and on a socket.
        last_counters: Folder in which the rank stores its counters after ``main`` has ended, or None.
        instrument: Function that makes the object that replaces :class:`~asyncdist.runtime.recording.Recording` in a
            replay.
        warns_if_alone: See :class:`~asyncdist.runtime.world.World`.
    """

    grace_s: float = GRACE_S
    strict: bool = False
    watchdogs: WatchdogOptions = ENDLESS
    record: RecordOptions | None = None
    metrics: tuple[Destination, ...] = ()
    tells: bool = False
    last_counters: str | None = None
    instrument: Callable[[Transport, asyncio.AbstractEventLoop], Any] | None = None
    warns_if_alone: bool = False


DEFAULT_OPTIONS: Final = RankOptions()


@dataclass(frozen=True, slots=True)
class RankResult:
    """Result of a hosted rank: ``main``'s return value, or the error that ended the rank."""

    value: Any = None
    error: BaseException | None = None


async def host_rank(
    main: Callable[..., Coroutine[Any, Any, Any]],
    args: tuple[Any, ...],
    transport: Transport,
    interrupts: Interrupts | None = None,
    options: RankOptions = DEFAULT_OPTIONS,
    *,
    on_open: Callable[[World], None] | None = None,
) -> RankResult:
    """Host one rank from the handshake until the rank ends, and return its result or error.

    This function never raises, because a SystemExit or KeyboardInterrupt that leaves a task would stop the loop that
    ranks share. ``interrupts`` cancels ``main`` after a signal. ``on_open`` is called with the world before ``main``
    starts.
    """
    interrupts = interrupts or Interrupts()
    try:
        async with hosted(transport, interrupts, options) as world:
            interrupts.check()  # A ``main`` that blocks the loop would never be cancelled.
            if on_open is not None:
                on_open(world)
            # If ranks share this process, ``main`` was checked before they were started.
            if not transport.capabilities.shares_process:
                validation.main_function(main, args)  # An error here is raised by all ranks and reported once.
            with _nest_asyncio_explained():
                value = await main(world, *args)
            # A signal that arrived while ``main`` blocked the loop raises its error now, as in asyncio.run.
            interrupts.check_pending()
            return RankResult(value=value)
    except BaseException as error:
        return RankResult(error=error)


@contextlib.contextmanager
def _nest_asyncio_explained() -> Iterator[None]:
    """Add a note that explains the error that nest_asyncio raises because it cannot patch uvloop's loops."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        is_patched = any(name.startswith("nest_asyncio") for name in sys.modules)
        _, text = name_and_message(error)  # str may raise
        is_of_loop = "patch loop" in text or "loop is already running" in text
        if is_patched and is_of_loop and type(asyncio.get_running_loop()).__module__ == "uvloop":
            error.add_note(
                "asyncdist runs ranks on uvloop if it is installed, and nest_asyncio cannot patch uvloop's loops: "
                'use asyncdist.run(main, loop="asyncio")'
            )
        raise


@asynccontextmanager
async def hosted(
    transport: Transport, interrupts: Interrupts, options: RankOptions = DEFAULT_OPTIONS
) -> AsyncIterator[World]:
    """Run the ``async with`` block as one rank, from the handshake until the rank ends."""
    loop = asyncio.get_running_loop()
    recording = (options.instrument or functools.partial(Recording, options.record))(transport, loop)
    transport, engine = recording.transport, recording.engine
    engine.start()
    exporter: Exporter | None = None
    reporter: WaitReporter | None = None
    token = None
    stack = contextlib.ExitStack()
    stack.enter_context(abandoned_in_children(functools.partial(_abandon, engine, loop)))
    try:
        try:
            world = await handshake.complete_handshake(transport, engine, loop)
        except BaseException as caught:
            error = own_error(caught, None, interrupts, transport.rank)
            fail_alone(transport, error)
            _raise_as_it_is(error)
        world.peers.warns_of_losses = options.tells and transport.capabilities.logs_losses
        world.warns_if_alone = options.warns_if_alone
        main, monitor = asyncio.current_task(), FailureMonitor(world)
        success: SystemExit | None = None  # sys.exit(0) counts as a normal return
        try:
            recording.begin(world)
            exporter = _exporter(world, transport, options)
            token = _current_world.set(world)
            engine.start()  # The second call makes messages run in the context of this rank.
            world.agreements.is_interrupted = lambda: interrupts.received is not None
            interrupts.ask_before(world.rank, functools.partial(_note_interrupt, main, world, monitor))
            interrupts.spare(main, monitor.is_stopped)
            reporter = _reporter(world, transport, options, stack)
            try:
                async with _task_group(world, monitor, options.watchdogs, reporter):
                    with ending_forked_children():
                        yield world
            except (SystemExit, asyncio.CancelledError) as caught:
                success = _successful_exit(caught, world, interrupts)
                if success is None:
                    raise
            interrupts.note_leaving(main)
            recording.note_end(None)
            _leave_counters(world, options)
            leftovers = await leave(world, transport)
        except BaseException as caught:
            error = own_error(caught, monitor, interrupts, world.rank)
            recording.note_end(error)
            _leave_counters(world, options)
            report = None if reporter is None else reporter.report_abort
            await fail(world, transport, error, options.grace_s, report)
            if error is caught:
                raise
            _raise_as_it_is(error)
        transport.close()
        # Leftovers are reported last, so that their error does not end the other ranks.
        report_leftovers(world, leftovers, strict=options.strict and success is None)
        if success is not None:
            raise success
    finally:
        stack.close()
        if exporter is not None:
            exporter.end()
        engine.stop()
        recording.close()
        if token is not None:
            with contextlib.suppress(ValueError):  # An async generator may be finalised in another context.
                _current_world.reset(token)
        if engine.virtual_clock is None:
            free_ended(is_last=True)


def _successful_exit(
    caught: SystemExit | asyncio.CancelledError, world: World, interrupts: Interrupts
) -> SystemExit | None:
    """Return the successful SystemExit, raised by ``main`` or other code in the loop, that ended this rank, or None."""
    ended_by: BaseException | None = caught
    if isinstance(caught, asyncio.CancelledError):
        ended_by = interrupts.raised if interrupts.received is None else None
    if (
        not isinstance(ended_by, SystemExit)
        or rank_program.exit_code(ended_by.code)
        or world.services.engine.failure is not None
    ):
        return None
    uncancel()
    return ended_by


def _abandon(engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
    rank = engine.transport.rank
    engine.abandon(
        ForkedChildError(f"this process is a forked child of rank {rank} and cannot use its world", rank=rank)
    )
    end_at_next_turn(loop, rank)


def _note_interrupt(task: asyncio.Task[Any] | None, world: World, monitor: FailureMonitor) -> str | None:
    waited = monitor.waited if monitor.is_stopped() else describe_wait(task, world)
    world.services.events.add("interrupted", waited or "")
    return waited


def _exporter(world: World, transport: Transport, options: RankOptions) -> Exporter | None:
    """Start exporting the rank's counters. Return the exporter, or None if no export is requested."""
    if not options.metrics:
        return None
    world.services.count_waits()
    exporter = Exporter(options.metrics, functools.partial(counters_of, world.services), transport.local_rank)
    exporter.begin()
    return exporter


def _leave_counters(world: World, options: RankOptions) -> None:
    """Store the rank's last counters, if requested. Tables show them after the rank has ended."""
    if options.last_counters is not None:
        last_counters.leave(options.last_counters, counters_of(world.services))


def _reporter(
    world: World, transport: Transport, options: RankOptions, stack: contextlib.ExitStack
) -> WaitReporter | None:
    """Let the rank report its waits, on SIGUSR1 or on request over a socket, until ``stack`` is closed."""
    main = asyncio.current_task()
    if not options.tells or main is None:
        return None
    reporter = WaitReporter(world, main, options.watchdogs.job_stall_s)
    register_report(reporter, reporter.report, reporter.forget_in_child)
    stack.callback(unregister_report, reporter)
    if not transport.capabilities.shares_process:
        reporter.begin()
        stack.callback(reporter.end)
    return reporter


@asynccontextmanager
async def _task_group(
    world: World, monitor: FailureMonitor, watchdogs: WatchdogOptions, reporter: WaitReporter | None
) -> AsyncIterator[None]:
    """Run ``main``, which is the ``async with`` block, in one task group with the tasks that it spawns."""
    error_of_main: BaseException | None = None
    watch = EndWatch(world, watchdogs.watchdog_s)
    stop = monitor.stop if watchdogs.stall_aborts else None
    stall_watch = StallWatch(world, asyncio.current_task(), watchdogs, stop)
    if reporter is not None:
        stall_watch.is_reported_by_others = reporter.has_reported_standstill
    try:
        with monitor:
            async with asyncio.TaskGroup() as task_group:
                world.attach_tasks(task_group)
                stall_watch.begin()
                try:
                    yield
                except BaseException as error:
                    error_of_main = error
                    raise
                finally:
                    stall_watch.end()
                watch.begin()
        world.check()
    except BaseExceptionGroup as group:
        if error_of_main is not None and group.exceptions == (error_of_main,):
            _raise_as_it_is(error_of_main)
        raise
    finally:
        watch.end()
        world.attach_tasks(None)


def _raise_as_it_is(error: BaseException) -> NoReturn:
    """Raise ``error`` with its original context. IPython may fail to display the exception group in the new context."""
    context = error.__context__
    try:
        raise error
    finally:
        error.__context__ = context
