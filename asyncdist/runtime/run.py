"""Starts a rank, hosts its main coroutine, and ends the rank: ``run``, ``run_local`` and ``open_world``.

A rank opens its transport, performs the handshake with all ranks, and runs ``main(world)`` and its spawned tasks in one
task group. After ``main`` has returned, it waits until all ranks have ended, and closes the transport.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import logging
import os
import re
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from types import FrameType
from typing import Any, Final, Literal, NoReturn, TypeAlias, TypedDict, TypeVar, cast

from asyncdist import environment, validation
from asyncdist.errors import AsyncdistError, LateError, is_consequence
from asyncdist.launchers import child_environment, detection
from asyncdist.live.destinations import destinations
from asyncdist.live.hosted_table import HostedRanksTable
from asyncdist.recording.writer import LIMIT_NBYTES, RecordOptions
from asyncdist.runtime.failing.failure import end_late, refuse
from asyncdist.runtime.hosting import GRACE_S, RankOptions, RankResult, host_rank, hosted
from asyncdist.runtime.outside_loop import call_outside_loop, is_loop_running
from asyncdist.runtime.process import limit_threads, spare_collections
from asyncdist.runtime.signals import Interrupts
from asyncdist.runtime.stall_warnings import WatchdogOptions
from asyncdist.runtime.story.requests import StoryRequests
from asyncdist.runtime.world import World, refuse_inside_a_world
from asyncdist.tensors import torch_modes
from asyncdist.transports import select
from asyncdist.transports.base import Transport
from asyncdist.transports.local import LocalHub

logger = logging.getLogger("asyncdist.runtime.run")

T = TypeVar("T")
#: ``"auto"``, or a name in :data:`asyncdist.launchers.backends.BACKENDS`.
TransportName: TypeAlias = str
LoopName: TypeAlias = Literal["uvloop", "asyncio"]
#: Destinations of counters, as in the argument ``metrics`` of :func:`run`.
MetricsName: TypeAlias = int | str | Sequence[int | str] | None


class WorldOptions(TypedDict, total=False):
    """Options that :func:`run` and :func:`open_world` share, as a type for functions that pass them on."""

    grace_s: float
    strict: bool
    watchdog_s: float
    stall_s: float | None
    stall_aborts: bool
    record: str | os.PathLike[str] | None
    record_limit_nbytes: int
    metrics: MetricsName


#: Default of ``watchdog_s``, in seconds.
WATCHDOG_S: Final = 10.0
#: Default of ``stall_s``: seconds without progress after which the waits of a job's ranks are printed.
STALL_S: Final = 60.0
#: Seconds that ``main`` may wait in one collective before a warning is logged, unless ``stall_s`` is set.
COLLECTIVE_STALL_S: Final = 300.0
#: Pattern of the options with which launchers set the number of ranks.
_RANKS_ASKED_FOR: Final = re.compile(r"(?<!\S)((?:-n|-np|--ranks|--nproc[-_]per[-_]node)[ =]?(\d+))(?!\S)")
#: Prefixes of the names of modules whose stack frames may be between a block and the opening of its world.
_OPENERS: Final = ("contextlib", "asyncdist.blocking.")
#: Function that :func:`run` calls with ``main``, its arguments and ``strict`` instead of hosting a rank, or None.
run_override: ContextVar[Callable[[Callable[..., Any], tuple[Any, ...], bool], Any] | None] = ContextVar(
    "run_override", default=None
)
#: Function that :func:`run_local` calls with ``main``, its arguments and ``strict`` in a replay, or None.
run_local_override: ContextVar[Callable[[Callable[..., Any], tuple[Any, ...], bool], list[Any]] | None] = ContextVar(
    "run_local_override", default=None
)


def run(
    main: Callable[..., Coroutine[Any, Any, T]],
    *args: Any,
    transport: TransportName = "auto",
    ranks: int | None = None,
    loop: LoopName | None = None,
    grace_s: float = GRACE_S,
    strict: bool = False,
    watchdog_s: float = WATCHDOG_S,
    stall_s: float | None = None,
    stall_aborts: bool = False,
    record: str | os.PathLike[str] | None = None,
    record_limit_nbytes: int = LIMIT_NBYTES,
    metrics: MetricsName = None,
) -> T:
    """Run ``main(world, *args)`` as this process's rank, and return its result.

    If an event loop is already running, as in a notebook, local ranks run in a separate thread with the caller's
    context and torch modes. The caller and its loop are blocked until the ranks have ended. A second Ctrl-C raises
    KeyboardInterrupt in ``main`` or, if ``main`` awaits, cancels it again.

    Under a launcher, the first call excludes the existing objects, mostly modules, from garbage collection
    (:func:`gc.freeze`). Reference cycles among them are never freed.

    Args:
        main: Coroutine function whose first argument is the :class:`World`.
        transport: ``"mpi"``, ``"torch"``, ``"local"`` or ``"auto"``. ``"auto"`` selects MPI under an MPI launcher. It
            selects torch if RANK, WORLD_SIZE and MASTER_ADDR are set, for example by torchrun, or if the program has
            made a process group of several ranks. Otherwise, it selects local. ``"torch"`` sends over gloo in process
            groups that asyncdist creates. The program's own groups may use any backend.
        ranks: Number of ranks to host on one loop of this process, only with ``transport="local"``. The result of rank
            0 is returned.
        loop: ``"uvloop"`` (the default if it is installed) or ``"asyncio"``.
        grace_s: Seconds in which the other ranks must stop on their own after a rank has failed. Then the job is
            aborted. After a signal, they have at least 10 s.
        strict: Whether to raise LocalProtocolError instead of logging a warning if an unread message, a request, a
            stream slot, a snapshot or a task is left at the end.
        watchdog_s: Seconds after ``main`` has returned. If all spawned tasks are still waiting then, a warning lists
            them. ``math.inf`` means no warning.
        stall_s: Seconds without a step or a received message on any rank of this host, after which the waits of all its
            ranks are printed once, with line numbers (``docs/hangs.md``). ``math.inf`` means never. The default is the
            environment variable ASYNCDIST_STALL_S (``asyncdist run --stall-s``), or 60. If a value is set, a warning is
            also logged when ``main`` has waited in one line for once to twice this time while other ranks continue. The
            wait may be for a message, a stream, a collective, or ``main``'s own future or event. If no value is set,
            the warning is logged after 300 s and only for collectives, because a ``main`` that waits for messages may
            be a server. Waits with a timeout are not reported, except in ``asyncio.timeout``.
        stall_aborts: Whether to raise StallError instead of logging this warning if ``main`` is waiting for other
            ranks.
        record: Folder in which each rank records its steps, metrics, rounds, messages and waits.
            :mod:`asyncdist.recording.writer` describes the files, and :func:`asyncdist.recording.reader.read_recording`
            reads them. The default is the environment variable ASYNCDIST_RECORD (``asyncdist run --record``). If the
            folder cannot be written, a warning is logged.
        record_limit_nbytes: Size of a rank's file, in bytes, at which recording stops.
        metrics: Destination of each rank's counters: ``"tensorboard:FOLDER"``, ``"wandb"``, ``"wandb:PROJECT"``,
            ``"opentelemetry"``, a port or ``"HOST:PORT"`` for Prometheus, or a list of several. For Prometheus, the
            first rank on a host listens on the given port, and the other ranks on the following ports. The default host
            is 127.0.0.1. By default, the environment variable ASYNCDIST_METRICS (``asyncdist run --metrics``) names the
            destinations. If a destination fails, a warning is logged.

    Raises:
        TypeError: ``main`` is not a coroutine function, or cannot be called with a world and ``args``.
        ValueError: An option is not valid, for example the name of the transport.
        RankLostError: Another rank failed and has printed its traceback.
        StallError: ``main`` waited for other ranks for too long (``stall_aborts``).
        TransportError: The transport cannot be used, or launcher and MPI library do not match.
        LocalProtocolError: This code already runs inside a world. A rank has only one world.
        RuntimeError: A launcher started this process, and a loop is already running. Use :func:`open_world` instead.
        KeyboardInterrupt: SIGINT was received. Raised after the rank has ended.
        SystemExit: This restarted rank was too late (:class:`LateError`).
        BaseException: The exception of ``main``, or an ExceptionGroup with the exceptions of its spawned tasks.
    """
    try:
        options = rank_options(
            watchdog_s, stall_s, stall_aborts, record, record_limit_nbytes, metrics, grace_s=grace_s, strict=strict
        )
        _check_options(transport, ranks, loop, grace_s)
        override = run_override.get()
        with StoryRequests():
            opened = _open_here(transport, ranks) if override is None else None
    except LateError as late:
        end_late(late)
    except (ValueError, AsyncdistError) as refusal:
        refuse(refusal, sys._getframe(1))
        refusal.__traceback__ = None  # Only the message is printed.
        raise
    if override is not None:
        return cast(T, override(main, args, strict))
    if opened is None:
        options = _for_only_rank(options, transport, _module_of(main))
        return _run_local(main, args, ranks or 1, loop, options)[0]
    with Interrupts() as interrupts, _loop_of(loop) as event_loop:
        task = event_loop.create_task(host_rank(main, args, opened, interrupts, options))
        interrupts.cancel_on_first(event_loop, [task])
        outcome = _complete(event_loop, [task], interrupts)[0]
        if isinstance(outcome.error, LateError):
            end_late(outcome.error)
        if outcome.error is not None:  # A later Ctrl-C has this error as its context.
            raise outcome.error
    return cast(T, outcome.value)


def _for_only_rank(options: RankOptions, transport: TransportName, module: str) -> RankOptions:
    """Return the options of a process's only rank. Warn if the script's arguments request several ranks.

    Args:
        module: Name of the module whose code runs as the rank. A warning is logged only if this is ``__main__`` (a
            program) and neither ``transport`` nor the environment selects a transport.
    """
    if transport != "auto" or module != "__main__" or environment.VARIABLES.get(environment.TRANSPORT_VARIABLE):
        return options
    return replace(options, warns_if_alone=not _warn_if_alone(sys.argv))


def _module_of(main: Callable[..., Any]) -> str:
    """Return the name of the module that defines ``main`` or, for a ``functools.partial``, its function."""
    while isinstance(main, functools.partial):
        main = main.func
    return getattr(main, "__module__", "")


def _module_of_block(frame: FrameType | None) -> str:
    """Return the name of the module whose ``with`` block opens a world, searching from ``frame`` outwards."""
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_OPENERS):
        frame = frame.f_back
    return "" if frame is None else frame.f_globals.get("__name__", "")


def _warn_if_alone(words: Sequence[str]) -> bool:
    """Log a warning, and return True, if the script's arguments request several ranks, which need a launcher."""
    found = _RANKS_ASKED_FOR.search(" ".join(words[1:]))
    if found is None or int(found[2]) < 2:
        return False
    logger.warning(
        "this process is the only rank, since %s is an argument of the script; asyncdist run -n %s %s starts %s ranks",
        found[1],
        found[2],
        words[0],
        found[2],
    )
    return True


def _open_here(transport: TransportName, ranks: int | None, *, runs_in_callers_loop: bool = False) -> Transport | None:
    """Open the transport of this process, or return None if this process must host all ranks itself.

    Args:
        runs_in_callers_loop: Whether the rank runs in the caller's event loop, which is then already running.
    """
    with child_environment.ranks_shown():
        started = select.detect(transport)
        if started.transport == "local" or ranks is not None:
            return None
        if is_loop_running() and not runs_in_callers_loop:  # MPI may only be called from the main thread.
            raise RuntimeError(
                f"asyncdist.run cannot be called here, because a loop is already running and {started.transport} "
                f"({started.source}) must run in this thread: use async with asyncdist.open_world() as world: await "
                "main(world)"
            )
        limit_threads()
        spare_collections()
        return select.open_transport(started.transport, started)


def _open_for_block(
    transport: TransportName, options: RankOptions, caller: FrameType, *, runs_in_callers_loop: bool = False
) -> tuple[Transport, RankOptions]:
    """Open the transport for a rank whose ``main`` is a block that ``caller`` enters. Also return its options."""
    opened = _open_here(transport, None, runs_in_callers_loop=runs_in_callers_loop)
    if opened is not None:
        return opened, options
    return LocalHub(1).transport(0), _for_only_rank(options, transport, _module_of_block(caller))


def run_local(
    main: Callable[..., Coroutine[Any, Any, T]],
    *args: Any,
    ranks: int,
    loop: LoopName | None = None,
    strict: bool = False,
    watchdog_s: float = WATCHDOG_S,
    stall_s: float | None = None,
    stall_aborts: bool = False,
    record: str | os.PathLike[str] | None = None,
    record_limit_nbytes: int = LIMIT_NBYTES,
    metrics: MetricsName = None,
    live: bool = False,
) -> list[T]:
    """Host ``ranks`` ranks on one loop of this process, and return the result of each rank's ``main``.

    The ranks share a thread, so a computing rank blocks the others. They also share torch's random state. Grad mode,
    inference mode and autocast are separate for each rank. If an event loop is already running, as in a notebook, the
    ranks run in a separate thread.

    The other options are the same as for :func:`run`.

    Args:
        main: Coroutine function whose first argument is the :class:`World`.
        ranks: Number of ranks.
        live: Whether to show the progress of policies in a table, in the notebook's cell or the terminal.

    Raises:
        AsyncdistError: ``live`` is set, and the package rich is not installed.
        BaseException: The exception of the first rank that failed.
    """
    options = rank_options(watchdog_s, stall_s, stall_aborts, record, record_limit_nbytes, metrics, strict=strict)
    _check_options("local", ranks, loop, GRACE_S)
    override = run_local_override.get()
    if override is not None:
        return override(main, args, strict)
    if not live:
        return _run_local(main, args, ranks, loop, options)
    validation.main_function(main, args)
    view = HostedRanksTable()
    with view.shown() as refresh:
        return _run_local(view.watched(main), args, ranks, loop, options, meanwhile=refresh)


def _run_local(
    main: Callable[..., Coroutine[Any, Any, T]],
    args: tuple[Any, ...],
    ranks: int,
    loop: LoopName | None,
    options: RankOptions,
    meanwhile: Callable[[], None] | None = None,
) -> list[T]:
    validation.main_function(main, args)

    def host() -> list[RankResult]:
        hub = LocalHub(ranks)
        with _loop_of(loop) as event_loop, torch_modes.of_ranks(event_loop, ranks) as contexts:
            tasks = [
                event_loop.create_task(host_rank(main, args, hub.transport(rank), interrupts, options), context=context)
                for rank, context in enumerate(contexts)
            ]
            interrupts.cancel_on_first(event_loop, tasks)
            return _complete(event_loop, tasks, interrupts)

    # Signal handlers must be set here, because only the main thread may set them.
    with Interrupts(spares_process=is_loop_running()) as interrupts:
        outcomes = call_outside_loop(host, meanwhile, interrupts.wake_loop)
    failures = {rank: outcome.error for rank, outcome in enumerate(outcomes) if outcome.error is not None}
    if failures:
        _raise_first(failures, ranks, interrupts)
    return [outcome.value for outcome in outcomes]


def _raise_first(failures: Mapping[int, BaseException], ranks: int, interrupts: Interrupts) -> NoReturn:
    rank = next((rank for rank, error in failures.items() if not is_consequence(error)), min(failures))
    first = failures[rank]
    if interrupts.received is not None:
        for other in failures.values():
            for note in getattr(other, "__notes__", ()) if other is not first else ():
                first.add_note(note)
    elif ranks > 1:
        first.add_note(f"rank {rank} of {ranks} raised this error")
    raise first


@asynccontextmanager
async def open_world(
    *,
    transport: TransportName = "auto",
    ranks: int = 1,
    grace_s: float = GRACE_S,
    strict: bool = False,
    watchdog_s: float = WATCHDOG_S,
    stall_s: float | None = None,
    stall_aborts: bool = False,
    record: str | os.PathLike[str] | None = None,
    record_limit_nbytes: int = LIMIT_NBYTES,
    metrics: MetricsName = None,
) -> AsyncIterator[World]:
    """Open a world inside a running event loop, for notebooks and tests: ``async with ad.open_world() as world``.

    The options are the same as for :func:`run`. ``ranks`` must be 1, because a single rank runs the block. Under a
    launcher, torch's threads are limited, and existing objects are excluded from garbage collection, as by :func:`run`.

    Raises:
        ValueError: ``ranks`` is not 1, or another option is not valid. If ``ranks`` is not 1, the message names the
            call that hosts several ranks.
        LocalProtocolError: This code already runs inside a world, even a simulated or local one.
        SystemExit: This restarted rank was too late (:class:`LateError`).
        BaseException: An exception raised by the block, or an exception that :func:`run` raises.
    """
    refuse_inside_a_world()
    if ranks != 1:
        raise ValueError(
            f"ranks must be 1 for open_world, whose block is run by one rank, got {ranks!r}. For several ranks, put "
            f"the block into a main and call asyncdist.run(main, transport='local', ranks={ranks!r}), which also works "
            "in notebooks"
        )
    options = rank_options(
        watchdog_s, stall_s, stall_aborts, record, record_limit_nbytes, metrics, grace_s=grace_s, strict=strict
    )
    _check_options(transport, None, None, grace_s)
    try:
        opened, options = _open_for_block(transport, options, sys._getframe(1), runs_in_callers_loop=True)
        async with hosted(opened, Interrupts(), options) as world:
            yield world
    except LateError as late:
        end_late(late)


def prepare_rank(
    caller: FrameType, *, transport: TransportName, options: RankOptions
) -> Callable[[Interrupts], AbstractAsyncContextManager[World]]:
    """Open the transport for a rank whose ``main`` is the block of a context manager.

    Returns:
        A function that makes the context manager, which must be entered on a loop.
    """
    try:
        _check_options(transport, None, None, options.grace_s)
        opened, options = _open_for_block(transport, options, caller)
    except LateError as late:
        end_late(late)
    except (ValueError, AsyncdistError) as refusal:
        refuse(refusal, caller)
        refusal.__traceback__ = None  # Only the message is printed.
        raise
    return functools.partial(hosted, opened, options=options)


# -- a process --------------------------------------------------------------------------------------------------------


def _complete(
    loop: asyncio.AbstractEventLoop, tasks: Sequence[asyncio.Task[RankResult]], interrupts: Interrupts
) -> list[RankResult]:
    """Run the loop until all ranks have ended. A SystemExit or KeyboardInterrupt from other code ends them."""
    while pending := [task for task in tasks if not task.done()]:
        try:
            loop.run_until_complete(asyncio.wait(pending))
        except (SystemExit, KeyboardInterrupt) as error:
            # If a task in a rank's task group has raised it, the group is notified first, and ends its rank.
            loop.call_soon(interrupts.end_with, error)
    return [task.result() for task in tasks]


@contextmanager
def _loop_of(name: LoopName | None) -> Iterator[asyncio.AbstractEventLoop]:
    """Yield a new loop of the given kind. At the end of the context, cancel the remaining tasks and close the loop."""
    factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    if name == "uvloop" or (name is None and importlib.util.find_spec("uvloop") is not None):
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        yield runner.get_loop()


def rank_options(
    watchdog_s: float,
    stall_s: float | None,
    stall_aborts: bool,
    record: str | os.PathLike[str] | None = None,
    limit_nbytes: int = LIMIT_NBYTES,
    metrics: MetricsName = None,
    *,
    grace_s: float = GRACE_S,
    strict: bool = False,
) -> RankOptions:
    """Return the options of a hosted rank for the given arguments of :func:`run`."""
    chosen = environment.stall_s() if stall_s is None else stall_s
    if chosen is None:
        watchdogs = WatchdogOptions(watchdog_s, COLLECTIVE_STALL_S, stall_aborts, True, STALL_S)
    else:
        watchdogs = WatchdogOptions(watchdog_s, chosen, stall_aborts, False, chosen)
    folder = environment.setting(environment.RECORD_VARIABLE) if record is None else record
    variable = environment.METRICS_VARIABLE
    sinks = destinations(environment.setting(variable), variable) if metrics is None else destinations(metrics)
    return RankOptions(
        grace_s,
        strict,
        watchdogs,
        RecordOptions.of(folder, limit_nbytes),
        sinks,
        tells=True,
        last_counters=environment.setting(environment.LAST_COUNTERS_VARIABLE),
    )


def _check_options(transport: str, ranks: int | None, loop: str | None, grace_s: float) -> None:
    detection.check_transport(transport)
    if ranks is not None:
        validation.count("ranks", ranks)
    if ranks is not None and transport != "local":
        raise ValueError(
            "ranks must be None unless transport is 'local', because the launcher sets the number of ranks, got "
            f"{ranks}"
        )
    if loop not in (None, "uvloop", "asyncio"):
        raise ValueError(f"loop must be 'uvloop' or 'asyncio', got {loop!r}")
    validation.seconds("grace_s", grace_s, finite=False)
    refuse_inside_a_world()
