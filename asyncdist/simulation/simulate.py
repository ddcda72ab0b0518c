"""Runs the unmodified ``async def train(world)`` on many simulated ranks in this process, in virtual time.

A simulation is a function of its arguments: latencies, computing times and the order of simultaneous events are all
derived from the seed. The ranks share the process, and therefore also module globals.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import logging
import math
import os
import random
import signal
import sys
import threading
import types
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Generator, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Final, TypeVar, assert_never

from asyncdist import validation
from asyncdist.errors import DeadlockError, TimeLimitError
from asyncdist.messaging.engine import Engine
from asyncdist.recording.writer import LIMIT_NBYTES, RecordOptions
from asyncdist.runtime.handshake import first_ranks
from asyncdist.runtime.hosting import RankOptions, RankResult, host_rank
from asyncdist.runtime.outside_loop import call_outside_loop, is_loop_running
from asyncdist.runtime.signals import Interrupts
from asyncdist.runtime.stall_warnings import describe_task_wait
from asyncdist.runtime.world import World, refuse_inside_a_world
from asyncdist.simulation.arguments import OVERRUN_S, OVERRUN_STEP_COUNT, Compute, check_arguments
from asyncdist.simulation.determinism.asyncio_objects import Generators, ordered_sets
from asyncdist.simulation.determinism.patched_clocks import patched_clocks
from asyncdist.simulation.determinism.rng import INHERITABLE, RandomStates
from asyncdist.simulation.determinism.sandbox import one_at_a_time, refused_outside
from asyncdist.simulation.distributions import check_number
from asyncdist.simulation.fabric import Fabric
from asyncdist.simulation.faults import Fault, Interrupt, Join, Kill, RankFault, Restart, SlowRank, Stall
from asyncdist.simulation.links import Network
from asyncdist.simulation.processes.clearing import cancel_tasks_quietly, end_recording, forget_earlier
from asyncdist.simulation.processes.event_loop import RankLoop
from asyncdist.simulation.processes.memory import MANY_RANKS, collecting_at_fixed_points
from asyncdist.simulation.report import SimReport
from asyncdist.simulation.scheduler import EndlessLoopError, Scheduler
from asyncdist.simulation.trace import Trace
from asyncdist.simulation.transport import SimTransport
from asyncdist.transports.base import Transport

logger = logging.getLogger("asyncdist.simulation")

T = TypeVar("T")

#: Exceptions that stop a simulation early. Each has an attribute ``report``, the report so far.
STOPPED: Final = (DeadlockError, TimeLimitError, EndlessLoopError)

#: Number of ranks above which the intervals between garbage collections stop growing, to limit memory use.
_COLLECTING_RANKS_MAX: Final = 1024
#: Function called when a simulation begins, with its fault plan, trace and outcomes. :func:`explore` sets it.
observer: ContextVar[Callable[[tuple[Fault, ...], Trace, Mapping[int, RankResult]], None] | None] = ContextVar(
    "observer", default=None
)
#: Whether a script is being replayed. The simulations that it runs could then replace the recording.
keeps_recordings: ContextVar[bool] = ContextVar("keeps_recordings", default=False)
#: Function that returns a replacement for a rank's recording, given the rank's transport and loop. A replay sets it.
instrument: ContextVar[Callable[[Transport, Any], Any] | None] = ContextVar("instrument", default=None)


def simulate(
    main: Callable[..., Coroutine[Any, Any, T]],
    *args: Any,
    ranks: int,
    seed: int = 0,
    network: Network | None = None,
    compute: Compute | None = None,
    faults: Sequence[Fault] = (),
    strict: bool = False,
    until_s: float | None = None,
    after_event: Callable[[], object] | None = None,
    return_exceptions: bool = False,
    inherited_random: Collection[str] = (),
    record: str | os.PathLike[str] | None = None,
    record_limit_nbytes: int = LIMIT_NBYTES,
) -> SimReport[T]:
    """Run ``main(world, *args)`` on ``ranks`` simulated ranks.

    The result is a function of the arguments and of PYTHONHASHSEED, which determines the order of sets of strings
    (``asyncdist sim`` sets it to 0). Simulations in several threads run in turn. If an event loop is already running,
    as in a notebook, the simulation runs in another thread while that loop waits.

    Args:
        main: Coroutine function, as for :func:`asyncdist.run`.
        args: Further arguments of ``main``; the same objects for every rank.
        seed: Seed of all random choices, including the ranks' initial random states.
        network: Latency, bandwidth and hosts; :class:`Network` by default.
        compute: Computing time of user code; :class:`Compute` by default.
        faults: Fault plan. A killed rank ends without executing another line. Its ``finally`` blocks run when the
            simulation is over, but the messages that they send are dropped.
        strict, record, record_limit_nbytes: See :func:`asyncdist.run`.
        until_s: Virtual time by which all ranks must have ended, in seconds, or None.
        after_event: Function called after every event, to check invariants. ``simulate`` raises its exception. If it
            returns a true value, the simulation stops, even if ranks are still running.
        return_exceptions: Whether exceptions that end ranks are only returned in ``results``. By default, ``simulate``
            raises the first exception that the fault plan does not explain (:meth:`SimReport.check_ranks`).
        inherited_random: Names of generators (``"random"``, ``"numpy"``, ``"torch"``) that begin with the caller's
            state on each rank. The states of other generators are derived from the seed and the rank.

    Raises:
        BaseException: An exception that ended a rank unexplained by the fault plan, with a note that names the rank.
        DeadlockError: No event was left, and not every ``main`` had returned. This message and the next two list what
            each task is waiting for.
        TimeLimitError: ``until_s`` was reached before all ranks had ended.
        KeyboardInterrupt: SIGINT was received between two events.
        LocalProtocolError: ``simulate`` was called inside a world or a simulation, or a task loops without waiting. On
            a rank: the program used a thread, a process, a socket or another source of nondeterminism.
        TypeError, ValueError: An argument is of the wrong type or out of range.
    """
    validation.main_function(main, args)
    ranks, seed, network, compute, faults = check_arguments(ranks, seed, network, compute, faults)
    if record is not None and keeps_recordings.get():
        validation.refuse("record", record, "None in a replayed script, because the recording would be replaced")
    recorded = RecordOptions.of(record, record_limit_nbytes, replaces=True)
    options = RankOptions(strict=strict, record=recorded, instrument=instrument.get())
    if until_s is not None:
        until_s = check_number("until_s", until_s)
    if after_event is not None and not callable(after_event):
        raise TypeError(f"after_event must be a function without arguments, got {after_event!r}")
    if is_loop_running():
        refuse_inside_a_world()
    _check_inherited(inherited_random)
    make = functools.partial(_Simulation, ranks, seed, network, compute, faults, inherited_random)
    run = functools.partial(_Simulation.run, options=options, until_s=until_s, after_event=after_event)
    # _run_alone drops the simulation before these contexts exit, so that their last garbage collection frees it.
    with one_at_a_time(), collecting_at_fixed_points(min(ranks, _COLLECTING_RANKS_MAX)):
        report = _run_alone(make, lambda simulation: run(simulation, main, args))
    if not return_exceptions:
        report.check_ranks()
    return report


def _check_inherited(names: Any) -> None:
    if isinstance(names, str) or not isinstance(names, Collection) or not set(names) <= INHERITABLE:
        allowed = f"a list of names out of {', '.join(map(repr, sorted(INHERITABLE)))}"
        validation.refuse("inherited_random", names, allowed)


def _run_alone(make: Callable[[], _Simulation], run: Callable[[_Simulation], SimReport[Any]]) -> SimReport[Any]:
    """Run a simulation with patched modules and random states, restore them, and return the report."""
    simulation = make()

    def run_here() -> SimReport[Any]:
        with refused_outside(), patched_clocks(), ordered_sets(), simulation.states.of_this_thread():
            return run(simulation)

    try:
        with simulation.interruptible():
            return call_outside_loop(run_here)
    except STOPPED as error:
        raise error.with_traceback(None)  # noqa: B904 - the same error: the simulator's own frames say nothing


@types.coroutine
def _no_time() -> Generator[None, None, None]:
    yield from ()


class _Clock:
    """Makes a simulated rank spend virtual time on its computations at safe points and in threads."""

    def __init__(self, simulation: _Simulation, loop: RankLoop) -> None:
        self._simulation = simulation
        self._loop = loop

    def before_safe_point(self) -> Awaitable[None]:
        seconds = self._simulation.draw_busy_s(self._loop)
        if seconds:
            return self._loop.be_busy(seconds)
        self._loop.has_computed()
        return _no_time()

    def run_concurrently(self, call: Callable[[], T]) -> asyncio.Future[T]:
        loop, over = self._loop, self._loop.create_future()
        seconds = self._simulation.draw_compute_s(loop.rank)
        before_s = seconds * self._simulation.draw_share()

        def run() -> None:
            if self._simulation.has_died(loop):
                over.cancel()
                return
            result = call()
            # If ``call`` blocks, it delays only its own result, because it would run in a thread in a real run.
            loop.call_later(seconds - before_s + loop.unblock(), over.set_result, result)

        loop.call_later(
            before_s, run, context=contextvars.Context()
        )  # a thread does not inherit its caller's context variables
        return over


class _Simulation:
    def __init__(
        self,
        size: int,
        seed: int,
        network: Network,
        compute: Compute,
        faults: tuple[Fault, ...],
        inherited_random: Collection[str],
    ) -> None:
        self.states = RandomStates(size, seed, inherited_random)
        self._size = size
        self._seed = seed
        self._faults = faults
        self._fired = [0] * len(faults)
        # Each rank has its own generator, so that an additional message does not change all later computing times.
        self._compute_samplers = [compute.sampler(r, random.Random(f"{seed} compute {r}")) for r in range(size)]
        self._slowdowns = [1.0] * size  # factors of the computing times of ranks and their later processes
        self._slowness = [max(1.0, compute.factors.get(rank, 1.0)) for rank in range(size)]  # the same for their turns
        self._slow_faults: dict[int, list[int]] = {}  # indices of faults that slowed a rank while it had no process
        self._overruns = random.Random(f"{seed} overruns")
        self._overrun_probability = compute.draw_overrun_probability(self._overruns)
        many_rank_count = min(size, _COLLECTING_RANKS_MAX) if size >= MANY_RANKS else 0
        self._scheduler = Scheduler(random.Random(f"{seed} ties"), many_rank_count)
        self._trace = Trace()
        self._fabric = Fabric(
            size,
            network,
            faults,
            self._scheduler,
            random.Random(f"{seed} network"),
            self._trace,
            self._fire,
            self._kill,
        )
        self._first_ranks = first_ranks([self._fabric.network.host_of(rank) for rank in range(size)])
        self._turn_counts: Counter[int] = Counter()
        self._turn_kills = {
            (f.rank, f.at_turn): index
            for index, f in enumerate(faults)
            if isinstance(f, Kill) and f.at_turn is not None
        }
        self._loops = [self._new_loop(rank) for rank in range(size)]
        self._earlier_loops: list[RankLoop] = []  # loops of killed processes that were replaced
        self._fabric.connect(self._loops)
        self._interrupts = [Interrupts() for _ in range(size)]
        self._hosts: dict[int, asyncio.Task[None]] = {}
        self._start: Callable[[int], asyncio.Task[None]]
        self._outcomes: dict[int, RankResult] = {}
        self._worlds: dict[int, World] = {}
        self._absent = {fault.rank for fault in faults if isinstance(fault, Join)}  # ranks that have not joined yet
        self._killed = set(self._absent)  # ranks without a process
        self._generators = Generators()
        self._is_interrupted = self._is_being_cleared = False

    def _new_loop(self, rank: int) -> RankLoop:
        loop = RankLoop(  # type: ignore[abstract]
            self._scheduler,
            rank,
            before_turn=self._before_turn if self._turn_kills else None,
            enter=self.states.switch,
            background=Engine._tick,
        )
        loop.slowness = self._slowness[rank]
        return loop

    def run(
        self,
        main: Callable[..., Coroutine[Any, Any, Any]],
        args: tuple[Any, ...],
        *,
        options: RankOptions,
        until_s: float | None,
        after_event: Callable[[], object] | None,
    ) -> SimReport[Any]:
        observe = observer.get()
        if observe is not None:
            observe(self._faults, self._trace, self._outcomes)
        for index, fault in enumerate(self._faults):
            if isinstance(fault, (Stall, SlowRank)) and not fault.at_s:
                self._strike(index, fault)  # takes effect before the rank begins
            elif isinstance(fault, RankFault) and fault.at_s is not None:
                self._scheduler.at(fault.at_s, self._strike, (index, fault))
        self._start = functools.partial(self._start_rank, main=main, args=args, options=options)
        for rank in self._absent:
            self._fabric.liveness.empty(rank)
        self._hosts = {rank: self._start(rank) for rank in range(self._size) if rank not in self._absent}
        with self._generators.followed():
            return self._run_all(until_s, after_event)

    def _start_rank(self, rank: int, *, main: Any, args: tuple[Any, ...], options: RankOptions) -> asyncio.Task[None]:
        loop = self._loops[rank]
        context = loop.context = contextvars.copy_context()
        loop.generators = self._generators.of
        call_soon = functools.partial(loop.call_soon, context=context)
        transport = SimTransport(self._fabric, rank, call_soon)
        transport.hosts = self._first_ranks
        host = self._host(transport, main, args, options)
        return loop.create_task(host, name=f"main of rank {rank}", context=context)

    def _run_all(self, until_s: float | None, after_event: Callable[[], object] | None) -> SimReport[Any]:
        try:
            if not self._let_happen(until_s, after_event):
                what = "nothing is left to happen"
                deadlock = DeadlockError(self._whereabouts(what, "and these wait"), seed=self._seed)
                deadlock.report = self._report()
                raise deadlock from deadlock.report.unexplained_failure()
            if self._is_interrupted:
                raise KeyboardInterrupt(self._whereabouts(f"interrupted (seed {self._seed})", "where these are"))
            if not self._scheduler.stopped:
                what = f"until_s={until_s:g} is reached"
                limit = TimeLimitError(self._whereabouts(what, "and these have not ended"), seed=self._seed)
                limit.report = self._report()
                raise limit from limit.report.unexplained_failure()
            return self._report()
        finally:
            try:
                self._clear()
            finally:  # even if a task raises KeyboardInterrupt during the clean-up
                self.states.restore()

    def _let_happen(self, until_s: float | None, after_event: Callable[[], object] | None) -> bool:
        """Run events. Return False if no event is left, or raise EndlessLoopError with a list of the looping tasks."""
        try:
            return self._scheduler.run(until_s=math.inf if until_s is None else until_s, after_event=after_event)
        except EndlessLoopError as error:
            ranks = [error.rank] if "rank" in error.facts else self._unended_ranks()
            lines = [f"{error.message}. The tasks:", *(line for rank in ranks for line in self._waiting(rank))]
            endless = EndlessLoopError("\n".join(lines), **error.facts)
            endless.report = self._report()
            raise endless from None

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Make SIGINT end the simulation between two events, so that no rank reports it as its own error."""
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return

        def stop(number: int, _: types.FrameType | None) -> None:
            self._is_interrupted = self._scheduler.stopped = True
            signal.signal(number, signal.default_int_handler)

        signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if self._is_interrupted and not isinstance(sys.exception(), KeyboardInterrupt):
                raise KeyboardInterrupt

    async def _host(self, transport: SimTransport, main: Any, args: tuple[Any, ...], options: RankOptions) -> None:
        rank = transport.rank
        loop, interrupts = self._loops[rank], self._interrupts[rank]
        if interrupts.received is None:  # otherwise the fault cancels this task
            interrupts.cancel_on_first(loop, [task for task in (asyncio.current_task(),) if task is not None])
        loop.on_exit = interrupts.end_with

        def on_open(world: World) -> None:
            if not self._worlds:
                forget_earlier(world, options.record)
            self._worlds[rank] = world
            world.services.engine.virtual_clock = _Clock(self, loop)

        outcome = await host_rank(main, args, transport, interrupts, options, on_open=on_open)
        try:
            await loop.shutdown_asyncgens()
        except asyncio.CancelledError:
            error = interrupts.error(rank) or interrupts.raised
            if error is None:
                raise
            outcome = RankResult(error=error)  # a signal ends the rank even after its ``main`` has returned
        if not self.has_died(loop) and not self._scheduler.stopped:
            self._outcomes[rank] = outcome
            self._trace.add(self._scheduler.now, "end", rank, 0, 0, 0)
            self._stop_if_over()

    def draw_busy_s(self, loop: RankLoop) -> float:
        """Sample a rank's computing time before a safe point. The time may end just after one of the rank's timers."""
        seconds = self.draw_compute_s(loop.rank)
        if self._overrun_probability and self._overruns.random() < self._overrun_probability:
            now = loop.time()
            due = loop.timers_due(now + seconds, now + OVERRUN_STEP_COUNT * seconds)
            if due:
                return self._overruns.choice(due) - now + OVERRUN_S * self._overruns.random()
        return seconds

    def draw_share(self) -> float:
        return self._scheduler.random()

    def has_died(self, loop: RankLoop) -> bool:
        """Return whether the process of ``loop`` was killed, or the clean-up has begun."""
        return loop.rank in self._killed or loop is not self._loops[loop.rank]

    def _stop_if_over(self) -> None:
        if len(self._outcomes) + len(self._killed) == self._size:
            self._scheduler.stopped = True

    def draw_compute_s(self, rank: int) -> float:
        self._trace.add(self._scheduler.time(), "compute", rank, 0, 0, 0)
        return self._compute_samplers[rank]() * self._slowdowns[rank]

    def _strike(self, index: int, fault: RankFault) -> None:
        """Apply a fault that is due, unless its rank has died or ended."""
        rank, loop = fault.rank, self._loops[fault.rank]
        if isinstance(fault, (Restart, Join)):
            is_its_turn = isinstance(fault, Join) == (rank in self._absent)
            if rank in self._killed and is_its_turn and not self._is_being_cleared:
                self._restart(rank, index)
            return
        if isinstance(fault, SlowRank):
            self._slowdowns[rank] *= fault.factor
            self._slowness[rank] *= max(1.0, fault.factor)
            loop.slowness = self._slowness[rank]
            if rank in self._killed:
                self._slow_faults.setdefault(rank, []).append(index)
        if rank in self._killed or rank in self._outcomes:
            return
        match fault:
            case Stall():
                loop.stall(fault.duration_s)
            case SlowRank():
                pass  # it has taken effect above
            case Interrupt() if self._interrupts[rank].received is None:
                self._interrupts[rank].received = getattr(signal, fault.signal)
                loop.call_soon(self._hosts[rank].cancel)
            case Kill() | Interrupt():  # a second signal ends the process
                self._kill(rank, index)
                return
            case _:
                assert_never(fault)
        self._fire(index)

    def _before_turn(self, rank: int) -> None:
        self._turn_counts[rank] += 1
        index = self._turn_kills.get((rank, self._turn_counts[rank]))
        if index is not None:
            self._kill(rank, index)

    def _fire(self, index: int) -> None:
        if not self._fired[index]:
            self._trace.add(self._scheduler.now, "fault", index, 0, 0, 0)
        self._fired[index] += 1

    def _kill(self, rank: int, index: int) -> None:
        if rank in self._killed or rank in self._outcomes:
            return
        self._fire(index)
        self._killed.add(rank)
        self._trace.add(self._scheduler.now, "kill", rank, 0, 0, 0)
        end_recording(self._worlds.get(rank))
        self._fabric.kill(rank)
        self._loops[rank].die()
        self._stop_if_over()

    def _restart(self, rank: int, index: int) -> None:
        for each in (index, *self._slow_faults.pop(rank, ())):
            self._fire(each)
        self._killed.discard(rank)
        self._trace.add(self._scheduler.now, "join" if rank in self._absent else "restart", rank, 0, 0, 0)
        self._absent.discard(rank)
        self._loops[rank].on_exit = None  # refers to the tasks of the rank's earlier process
        self._earlier_loops.append(self._loops[rank])
        self._loops[rank] = self._new_loop(rank)
        self._interrupts[rank] = Interrupts()
        self._worlds.pop(rank, None)
        self._fabric.connect(self._loops)
        self._fabric.restart(rank)
        self.states.restart(rank, self._fabric.liveness.incarnation_of(rank))
        self._hosts[rank] = self._start(rank)

    def _whereabouts(self, what: str, of_whom: str) -> str:
        """Describe the event ``what`` and, in one line per task, what the unfinished ranks are waiting for."""
        lines = [f"{what} at {self._scheduler.now:.9f} s of virtual time, {of_whom}:"]
        for rank in self._unended_ranks():
            lines += self._waiting(rank)
        return "\n".join(lines)

    def _unended_ranks(self) -> list[int]:
        return [rank for rank in range(self._size) if rank not in self._outcomes and rank not in self._killed]

    def _waiting(self, rank: int) -> list[str]:
        world = self._worlds.get(rank)
        tasks = self._loops[rank].unfinished_tasks()
        texts = [f", {task.get_name()}: {describe_task_wait(task, world)}" for task in tasks]
        texts += [f": {text}" for text in (world.services.early_frames() if world is not None else ())]
        return [f"  rank {rank}{text}" for text in texts]

    def _clear(self) -> None:
        """Cancel the unfinished tasks of dead ranks or, if the simulation stopped early, of all ranks."""
        for rank in self._unended_ranks():
            end_recording(self._worlds.get(rank), self._hosts[rank])
        self._fabric.mute()
        self._trace.end()
        loops = [*self._earlier_loops, *self._loops]
        if any(loop.unfinished_tasks() for loop in loops):
            self._is_being_cleared = True
            self._killed.update(range(self._size))  # prevents further kills and restarts
            cancel_tasks_quietly(loops, self._scheduler)

    def _report(self) -> SimReport[Any]:
        results: list[Any] = []
        for rank in range(self._size):
            outcome = self._outcomes.get(rank)
            results.append(None if outcome is None else outcome.error or outcome.value)
        worlds = [self._worlds.get(rank) for rank in range(self._size)]
        return SimReport(
            results=tuple(results),
            seed=self._seed,
            packed_trace=self._trace.tail(),
            trace_digest=self._trace.digest,
            virtual_time_s=self._scheduler.now,
            message_count=self._fabric.message_count,
            byte_count=self._fabric.byte_count,
            event_count=self._scheduler.event_count,
            faults=self._faults,
            faults_fired=tuple(self._fired),
            statistics=tuple(world.statistics() if world is not None else None for world in worlds),
            killed_ranks=frozenset(self._killed - self._absent),
        )
