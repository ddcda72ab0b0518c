"""Starts a rank, hosts its main coroutine, and ends it: ``run``, ``run_local`` and ``open_world``.

The life of a rank: make the loop; open the transport; agree with all ranks on versions and on the job's nonce; run
``main(world)`` and every task it spawned under one task group; then leave: tell the peers, wait for the services of
protocols (a coordinator serves until its last member has left), a polled barrier, take the receives back, close the
transport. Leaving is in :mod:`asyncdist.runtime.leaving`; a failure anywhere replaces it by
:mod:`asyncdist.runtime.failing.failure`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import logging
import os
import re
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any, Final, Literal, NoReturn, TypeAlias, TypedDict, TypeVar, cast

from asyncdist import environment, validation
from asyncdist.errors import AsyncdistError, LateError, is_consequence
from asyncdist.live.destinations import destinations
from asyncdist.live.population import PopulationView
from asyncdist.recording.writer import LIMIT_NBYTES, RecordOptions
from asyncdist.runtime.failing.failure import end_late, refuse
from asyncdist.runtime.hosting import GRACE_S, RankOptions, RankResult, host_rank, hosted
from asyncdist.runtime.notebooks import call_beside_loop, is_loop_running
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
#: ``"auto"``, ``"local"``, ``"mpi"`` or ``"torch"``.
TransportName: TypeAlias = str
LoopName: TypeAlias = Literal["uvloop", "asyncio"]
#: Where counters go: see ``metrics`` of :func:`run`.
MetricsName: TypeAlias = int | str | Sequence[int | str] | None


class WorldOptions(TypedDict, total=False):
    """Names the options that :func:`run` and :func:`open_world` share, for callables that pass them on."""

    grace_s: float
    strict: bool
    watchdog_s: float
    stall_s: float | None
    stall_aborts: bool
    record: str | os.PathLike[str] | None
    record_limit_nbytes: int
    metrics: MetricsName


#: How long spawned tasks may only wait, after main of their rank has returned, before a warning is logged.
WATCHDOG_S: Final = 10.0
#: After how long a job in which nothing moves is told, where ``stall_s`` is not set.
STALL_S: Final = 60.0
#: How long main may wait in one collective, while others go on, before a warning is logged, where it is not set.
COLLECTIVE_STALL_S: Final = 300.0
#: How launchers are asked for so many ranks.
_RANKS_ASKED_FOR: Final = re.compile(r"(?<!\S)((?:-n|-np|--ranks|--nproc[-_]per[-_]node)[ =]?(\d+))(?!\S)")
#: Takes the place of :func:`run` where something else hosts the ranks; is given main, its arguments and ``strict``.
run_elsewhere: ContextVar[Callable[[Callable[..., Any], tuple[Any, ...], bool], Any] | None] = ContextVar(
    "run_elsewhere", default=None
)
#: The same for :func:`run_local`, where its ranks are replayed.
run_local_elsewhere: ContextVar[Callable[[Callable[..., Any], tuple[Any, ...], bool], list[Any]] | None] = ContextVar(
    "run_local_elsewhere", default=None
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
    """Run ``main(world, *args)`` as this process's rank and return what it returns.

    Where a loop is running already, in a notebook, local ranks get a thread of their own with the caller's context and
    torch modes, and this call, and that loop, wait for them. There a second Ctrl-C raises KeyboardInterrupt in main.

    Under a launcher the first call takes what exists by then, modules above all, out of garbage collection
    (:func:`gc.freeze`): cycles among those objects are kept to the end of the process.

    Args:
        main: a coroutine function; its first argument is the :class:`World`.
        transport: ``"mpi"``, ``"torch"``, ``"local"``, or ``"auto"``: MPI under an MPI launcher, torch under torchrun
            or where RANK, WORLD_SIZE and MASTER_ADDR say so, or where the program has made a process group of several
            ranks, else local. ``"torch"`` sends over gloo, in groups of its own; the program's own groups may use any
            backend.
        ranks: with ``"local"``, how many ranks to host on one loop of this process; rank 0's value is returned.
        loop: ``"uvloop"`` (the default where it is installed) or ``"asyncio"``.
        grace_s: seconds that the peers of a failed rank get to stop by themselves before they are aborted.
        strict: raise LocalProtocolError when something is left over at the end: an unread message, a request, a
            stream slot, a snapshot, a task. Without it they are logged.
        watchdog_s: when main has returned, and the tasks that it spawned have done nothing but wait for so many
            seconds, one warning says which of them waits for what; ``math.inf`` for never.
        stall_s: when no rank on this host has made a step or received a message for so many seconds, the story of all
            of them is printed, once: who waits for whom, for what and in which line (``docs/hangs.md``). By
            default what the variable ASYNCDIST_STALL_S says (``asyncdist run --stall-s``), and without it 60 s;
            ``math.inf`` for never. Where it is set, a main that has waited in one and the same line for so long (up to
            twice as long), while others go on, is warned of as well: for a message, a stream, a collective, or a future
            or an event of its own. Where it is not, after 300 s, and in collectives alone: a main that waits for
            messages may be a server.
        stall_aborts: raise StallError there, in place of the warning, where main waits for its peers.
        record: a folder, in which each rank writes down what happens: steps, metrics, rounds, messages, waits. See
            :mod:`asyncdist.recording.writer` for the files, which
            :func:`asyncdist.recording.reader.read_recording` reads. By default what the variable
            ASYNCDIST_RECORD says (``asyncdist run --record``). Where it cannot be written, a warning says so.
        record_limit_nbytes: the size at which a rank's file ends, in bytes.
        metrics: where the counters of each rank go: a port, or ``"HOST:PORT"``, at which the first rank of a host
            serves them to Prometheus, and the others at those that follow, on 127.0.0.1 where no host is named;
            ``"tensorboard:FOLDER"``, ``"wandb"``, ``"wandb:PROJECT"`` or ``"opentelemetry"``; or several of these. By
            default what the variable ASYNCDIST_METRICS says (``asyncdist run --metrics``). Where one of them fails, a
            warning says so.

    Raises:
        TypeError: main is not a coroutine function, or cannot be called with a world and ``args``.
        ValueError: there is no such transport.
        RankLostError: another rank failed; it has printed its traceback.
        StallError: main waited for its peers for too long (``stall_aborts``).
        TransportError: the transport cannot be used, or launcher and MPI library do not match.
        LocalProtocolError: called inside a world; a rank has one.
        RuntimeError: a loop is running already, under a launcher; use :func:`open_world` there.
        KeyboardInterrupt: after SIGINT, when everything has ended.
        SystemExit: this rank was started again, and too late: see :class:`LateError`.
        BaseException: what ``main`` raised, or an ExceptionGroup with what its spawned tasks raised.
    """
    try:
        options = rank_options(
            watchdog_s,
            stall_s,
            stall_aborts,
            grace_s=grace_s,
            strict=strict,
            record=record,
            limit_nbytes=record_limit_nbytes,
            metrics=metrics,
        )
        _check_options(transport, ranks, loop, grace_s)
        elsewhere = run_elsewhere.get()
        with StoryRequests():
            opened = _open_here(transport, ranks) if elsewhere is None else None
    except LateError as late:
        end_late(late)
    except (ValueError, AsyncdistError) as refusal:
        refuse(refusal, sys._getframe(1))
        refusal.__traceback__ = None  # its words say it all
        raise
    if elsewhere is not None:
        return cast(T, elsewhere(main, args, strict))
    if opened is None:
        if transport == "auto" and ranks is None and getattr(main, "__module__", None) == "__main__":
            _warn_if_alone(sys.argv)
        return _run_local(main, args, ranks or 1, loop, options)[0]
    with Interrupts() as interrupts, _loop_of(loop) as event_loop:
        task = event_loop.create_task(host_rank(main, args, opened, interrupts, options))
        interrupts.cancel_on_first(event_loop, [task])
        outcome = _complete(event_loop, [task])[0]
        if isinstance(outcome.error, LateError):
            end_late(outcome.error)
        if outcome.error is not None:  # inside: a Ctrl-C from here on has this error as its context
            raise outcome.error
    return cast(T, outcome.value)


def _warn_if_alone(words: Sequence[str]) -> None:
    """Warn if the command line of this process, which no launcher has started, asks for several ranks.

    Args:
        words: The script and its arguments.
    """
    found = _RANKS_ASKED_FOR.search(" ".join(words[1:]))
    if found is not None and int(found[2]) > 1 and not environment.VARIABLES.get(environment.TRANSPORT_VARIABLE):
        logger.warning(
            "this process is the only rank: %s is an argument of the script; asyncdist run -n %s %s starts %s ranks",
            found[1],
            found[2],
            words[0],
            found[2],
        )


def _open_here(transport: TransportName, ranks: int | None) -> Transport | None:
    """Open the transport of this process; None where all ranks are in it."""
    with environment.ranks_shown():
        return _open_launched(transport, ranks)


def _open_launched(transport: TransportName, ranks: int | None) -> Transport | None:
    started = select.detect(transport)
    if started.transport == "local" or ranks is not None:
        return None
    if is_loop_running():  # MPI may be called from the main thread alone
        raise RuntimeError(
            f"a loop is running already, and {started.transport} ({started.source}) is for this thread: use "
            "async with asyncdist.open_world() as world: await main(world)"
        )
    limit_threads()
    spare_collections()
    return select.open_transport(started.transport, started)


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
    """Host ``ranks`` ranks on one loop of this process; returns the value of each.

    A rank that computes stops the others, since they share a thread. They also share torch's random state. Grad mode,
    inference mode and autocast are each rank's own. Where a loop is running already, in a notebook, the ranks get a
    thread of their own, as :func:`run` says.

    Options are those of ``run``. With ``live`` a table in the notebook's cell, or the terminal, shows what policies do.

    Raises:
        BaseException: what the first rank to fail raised; AsyncdistError where rich is missing, which draws the table.
    """
    options = rank_options(
        watchdog_s,
        stall_s,
        stall_aborts,
        strict=strict,
        record=record,
        limit_nbytes=record_limit_nbytes,
        metrics=metrics,
    )
    _check_options("local", ranks, loop, GRACE_S)
    elsewhere = run_local_elsewhere.get()
    if elsewhere is not None:
        return elsewhere(main, args, strict)
    if not live:
        return _run_local(main, args, ranks, loop, options)
    validation.main_function(main, args)
    view = PopulationView()
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
    with Interrupts(spares_process=is_loop_running()) as interrupts:  # here: signals come to the main thread
        outcomes = call_beside_loop(
            functools.partial(_host_locally, main, args, ranks, loop, interrupts, options), meanwhile
        )
    failures = {rank: outcome.error for rank, outcome in enumerate(outcomes) if outcome.error is not None}
    if failures:
        _raise_first(failures, ranks, interrupts)
    return [outcome.value for outcome in outcomes]


def _raise_first(failures: Mapping[int, BaseException], ranks: int, interrupts: Interrupts) -> NoReturn:
    """Raise what the first rank to fail raised, with a note that names the rank, and the notes of all at a signal."""
    rank = next((rank for rank, error in failures.items() if not is_consequence(error)), min(failures))
    first = failures[rank]
    if interrupts.received is not None:
        for other in failures.values():
            for note in getattr(other, "__notes__", ()) if other is not first else ():
                first.add_note(note)
    elif ranks > 1:
        first.add_note(f"rank {rank} of {ranks} raised it")
    raise first


def _host_locally(
    main: Callable[..., Coroutine[Any, Any, Any]],
    args: tuple[Any, ...],
    ranks: int,
    loop: LoopName | None,
    interrupts: Interrupts,
    options: RankOptions,
) -> list[RankResult]:
    """Host all ranks on one new loop in this thread; returns how each ended."""
    hub = LocalHub(ranks)
    with _loop_of(loop) as event_loop, torch_modes.of_ranks(event_loop, ranks) as contexts:
        tasks = [
            event_loop.create_task(host_rank(main, args, hub.transport(rank), interrupts, options), context=context)
            for rank, context in enumerate(contexts)
        ]
        interrupts.cancel_on_first(event_loop, tasks)
        return _complete(event_loop, tasks)


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
    """Open a world inside a running loop, for notebooks and tests: ``async with ad.open_world() as world``.

    Args: as :func:`run`; ``ranks`` is 1, since one rank runs the block.

    Raises:
        ValueError: several ``ranks``; the error names the line that hosts them.
        LocalProtocolError: called inside a world, a simulated or local one included; a rank has one.
        BaseException: as :func:`run`.
    """
    refuse_inside_a_world()
    if ranks != 1:
        raise ValueError(
            f"ranks is {ranks!r}, and the block of open_world is run by one rank: put it into a main, and host several "
            f"with asyncdist.run(main, transport='local', ranks={ranks!r}), in a notebook too"
        )
    options = rank_options(
        watchdog_s,
        stall_s,
        stall_aborts,
        grace_s=grace_s,
        strict=strict,
        record=record,
        limit_nbytes=record_limit_nbytes,
        metrics=metrics,
    )
    started = select.detect(transport)
    chosen = started.transport
    opened = LocalHub(1).transport(0) if chosen == "local" else select.open_transport(chosen, started)
    async with hosted(opened, Interrupts(), options) as world:
        yield world


def prepare_rank(
    caller: FrameType,
    *,
    transport: TransportName,
    options: RankOptions,
) -> Callable[[Interrupts], AbstractAsyncContextManager[World]]:
    """Open the transport for a rank whose main is the body of a context, as :func:`run` does.

    Args:
        caller: the frame of the user's call, for errors.
        transport, options: as there.

    Returns:
        What makes that context, to be entered on a loop.
    """
    try:
        _check_options(transport, None, None, options.grace_s)
        opened = _open_here(transport, None) or LocalHub(1).transport(0)
    except LateError as late:
        end_late(late)
    except (ValueError, AsyncdistError) as refusal:
        refuse(refusal, caller)
        refusal.__traceback__ = None  # its words say it all
        raise
    return functools.partial(hosted, opened, options=options)


# -- a process --------------------------------------------------------------------------------------------------------


def _complete(loop: asyncio.AbstractEventLoop, tasks: Sequence[asyncio.Task[RankResult]]) -> list[RankResult]:
    """Run until every task has ended, also past an exit or interrupt that a spawned task raised through the loop."""
    while pending := [task for task in tasks if not task.done()]:
        with contextlib.suppress(SystemExit, KeyboardInterrupt):
            loop.run_until_complete(asyncio.wait(pending))
    return [task.result() for task in tasks]


@contextmanager
def _loop_of(name: LoopName | None) -> Iterator[asyncio.AbstractEventLoop]:
    """Make a loop of that kind, and close it at the end with everything that is still on it."""
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
    *,
    grace_s: float = GRACE_S,
    strict: bool = False,
    record: str | os.PathLike[str] | None = None,
    limit_nbytes: int = LIMIT_NBYTES,
    metrics: MetricsName = None,
) -> RankOptions:
    """Return how a rank is hosted, from the options of :func:`run`."""
    chosen = environment.stall_s() if stall_s is None else stall_s
    if chosen is None:
        watchdogs = WatchdogOptions(watchdog_s, COLLECTIVE_STALL_S, stall_aborts, True, STALL_S)
    else:
        watchdogs = WatchdogOptions(watchdog_s, chosen, stall_aborts, False, chosen)
    folder = environment.record() if record is None else record
    sinks = destinations(environment.metrics(), environment.METRICS_VARIABLE) if metrics is None else None
    return RankOptions(
        grace_s,
        strict,
        watchdogs,
        RecordOptions.of(folder, limit_nbytes),
        destinations(metrics) if sinks is None else sinks,
        tells=True,
        last_counters=environment.last_counters(),
    )


def _check_options(transport: str, ranks: int | None, loop: str | None, grace_s: float) -> None:
    environment.check_transport(transport)
    if ranks is not None:
        validation.count("ranks", ranks)
    if ranks is not None and transport != "local":
        raise ValueError(f"ranks={ranks} needs transport='local'; elsewhere the launcher decides how many there are")
    if loop not in (None, "uvloop", "asyncio"):
        raise ValueError(f"loop is {loop!r}; allowed are 'uvloop', 'asyncio'")
    validation.seconds("grace_s", grace_s, finite=False)
    refuse_inside_a_world()
