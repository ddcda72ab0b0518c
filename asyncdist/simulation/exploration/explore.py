"""Runs one scenario on many seeds until one fails; finds the least plan that fails, and the line that repeats it.

A scenario is a function of a module, ``scenario(seed, faults=None) -> SimReport``. It simulates something and raises
where something is wrong; ``faults`` replaces the plan that it would draw from the seed, so that the plan can be shrunk.

What is reported does not depend on the number of processes: results are taken in the order of the seeds, and the first
that fails ends it.
"""

from __future__ import annotations

import inspect
import itertools
import re
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from asyncdist import local_host, validation
from asyncdist.errors import RankLostError
from asyncdist.runtime.failing.tracebacks import format_error
from asyncdist.runtime.hosting import RankResult
from asyncdist.simulation.exploration.process_pool import Inline, Pool, open_runner, pack, unpack
from asyncdist.simulation.exploration.repro_command import expression_of, repeat_line
from asyncdist.simulation.exploration.shrink import shrink
from asyncdist.simulation.faults import Fault
from asyncdist.simulation.report import SimReport
from asyncdist.simulation.simulate import observer
from asyncdist.simulation.trace import Trace

#: Events of the trace that a failure shows.
TAIL_EVENT_COUNT: Final = 20
#: Runs that shrinking a plan may take.
_SHRINK_RUN_COUNT: Final = 300
#: Work that a process is given at a time: often enough for a progress bar, rarely enough to cost nothing.
_CHUNK_S: Final = 0.5
_CHUNK_SEED_COUNT_MAX: Final = 64
#: Of an assertion's message, numbers apart: what has to be equal for two failures to be the same.
_PREFIX_LENGTH: Final = 40


class Scenario(Protocol):
    """Can be explored. A scenario that takes the seed alone is explored as well, but its plan is not shrunk."""

    def __call__(self, seed: int, faults: Sequence[Fault] | None = None) -> SimReport[Any]:
        """Simulate; raise where something is wrong.

        Args:
            seed: of everything that is drawn.
            faults: the plan; None for what belongs to the seed.
        """


@dataclass(frozen=True, slots=True)
class Failure:
    """Describes the failure that explore found.

    Attributes:
        seed: that failed.
        kind: the exception's class.
        message: the exception's text.
        traceback: from the scenario's first frame on.
        trace: the last events of the seed's last simulation.
        faults: the plan of that simulation.
        minimal_faults: as few of them, and as simple, as still fail in the same way; None where that was not to be
            found out, and ``note`` says why.
        shrink_run_count: runs that shrinking took.
        repeat: a line for the shell that fails so again, with the minimal plan if there is one.
        note: what else there is to know, or empty.
    """

    seed: int
    kind: str
    message: str
    traceback: str = field(repr=False)
    trace: tuple[str, ...] = field(repr=False)
    faults: tuple[Fault, ...]
    minimal_faults: tuple[Fault, ...] | None
    shrink_run_count: int
    repeat: str
    note: str = ""

    def __str__(self) -> str:
        lines = [f"seed {self.seed} failed: {self.kind}: {self.message}".rstrip(": "), self.traceback.rstrip("\n")]
        if self.trace:
            lines += ["the last events:", *(f"  {event}" for event in self.trace)]
        if self.minimal_faults is not None and self.faults:
            plan = ", ".join(map(expression_of, self.minimal_faults)) or "none"
            lines.append(f"faults: {len(self.minimal_faults)} of {len(self.faults)} needed: {plan}")
        elif self.faults:
            lines.append(f"faults: {', '.join(map(expression_of, self.faults))}")
        if self.note:
            lines.append(f"note: {self.note}")
        return "\n".join([*lines, f"repeat it: {self.repeat}"])


@dataclass(frozen=True, slots=True)
class ExploreReport:
    """Reports how far an exploration came.

    Attributes:
        seed_count: the number of seeds that ran, up to and with the one that failed.
        digests: the different traces among the seeds that passed.
        faults_fired: how often faults of each kind happened, by its name.
        events: how often things of each kind happened on all ranks, those of :attr:`asyncdist.WorldStatistics.events`.
        seconds: the time from the first seed on, without shrinking.
        failure: the first one, in the order of the seeds.
    """

    seed_count: int
    digests: frozenset[str] = field(repr=False)
    faults_fired: Mapping[str, int]
    seconds: float
    failure: Failure | None = None
    events: Mapping[str, int] = field(default_factory=dict, repr=False)

    @property
    def seeds_per_s(self) -> float:
        """Return the number of seeds per second, of all processes together."""
        return self.seed_count / self.seconds if self.seconds else 0.0

    @property
    def in_short(self) -> str:
        """What was covered, for a progress bar."""
        roles = sum(kind.startswith("role ") for kind in self.events)
        faults, rounds = sum(self.faults_fired.values()), self.events.get("decided", 0)
        counts = {"different": len(self.digests), "faults": faults, "rounds": rounds, "kinds of roles": roles}
        return ", ".join(f"{count} {what}" for what, count in counts.items() if count)

    def check(self) -> None:
        """Raise AssertionError with the story of the failure, if there is one."""
        if self.failure is not None:
            raise AssertionError(str(self.failure))

    def __str__(self) -> str:
        fired = ", ".join(f"{kind} {count}" for kind, count in sorted(self.faults_fired.items()))
        return (
            f"{self.seed_count} seed{'s' * (self.seed_count != 1)} in {self.seconds:.1f} s ({self.seeds_per_s:.1f}/s), "
            f"{len(self.digests)} different trace{'s' * (len(self.digests) != 1)}"
            + (f", faults fired: {fired}" if fired else "")
            + (f", covered: {covered}" if (covered := _covered(self.events)) else "")
        )


def _covered(events: Mapping[str, int]) -> str:
    """Return what happened in rounds, in words; empty where there were none."""
    words = {"decided": "rounds", "applied": "applied", "abandoned": "abandoned", "coordinator": "failovers"}
    found = [f"{text} {events[kind]}" for kind, text in words.items() if events.get(kind)]
    roles = [f"{kind.removeprefix('role ')} {count}" for kind, count in sorted(events.items()) if kind[:5] == "role "]
    return ", ".join(found + ([f"roles: {', '.join(roles)}"] if roles else []))


def explore(
    scenario: Callable[..., SimReport[Any]],
    seeds: Iterable[int] = range(10_000),
    *,
    processes: int | None = None,
    on_progress: Callable[[ExploreReport], None] | None = None,
    quiet: bool = False,
) -> ExploreReport:
    """Run ``scenario(seed)`` for each seed until one fails; shrink what failed, and say how to repeat it.

    A seed has failed when the scenario raises, or returns a report in which a rank ended by an exception other than
    RankLostError (that is how the peers of a killed rank end), ``sys.exit(0)`` and what an :class:`Interrupt` ends a
    rank with.

    Args:
        scenario: see :class:`Scenario`; a function at the top level of a module, or an object that pickles.
        seeds: in the order in which they are tried; an iterator is asked for more as they run.
        processes: how many run seeds, each with one torch thread; as many as there are cores by default. With 1 they
            run in this process.
        on_progress: is given the report so far, every half second or so and at the end.
        quiet: do not print the failure on standard error.

    **Cancellation**: KeyboardInterrupt ends the processes at once, in the midst of their seeds.

    Raises:
        TypeError: the scenario cannot be sent to another process, or a seed is not a whole number.
        ValueError: no seeds, or fewer than one process.
        RuntimeError: a process died, as by a crash in native code or for want of memory.
    """
    payload = pack(scenario)
    if processes is not None and (type(processes) is not int or processes < 1):
        raise ValueError(f"processes is {processes!r}; a whole number of 1 or more is needed, or None")
    checked = _checked(seeds)
    progress = _Progress(on_progress)
    with open_runner(payload, processes or local_host.available_cores()) as runner:
        failed = _search(runner, checked, progress)
        failure = None if failed is None else _investigate(runner, scenario, failed)
    report = progress.report(failure)
    if failure is not None and not quiet:
        print(failure, file=sys.stderr)
    return report


def _checked(seeds: Iterable[int]) -> Iterator[int]:
    """Check the seeds: a list at once, those of an iterator one by one."""
    if not isinstance(seeds, Iterable):
        raise TypeError(f"seeds is {seeds!r}; whole numbers are needed, as in range(1000)")
    iterator = map(_seed, seeds if isinstance(seeds, (range, Iterator)) else [_seed(seed) for seed in seeds])
    first = next(iterator, None)
    if first is None:
        raise ValueError(f"there are no seeds in {seeds!r}")
    return itertools.chain([first], iterator)


def _seed(seed: Any) -> int:
    return validation.whole("a seed", seed)


# -- one seed ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Passed:
    digest: str
    fired: Counter[str]
    events: Counter[str]


@dataclass(frozen=True, slots=True)
class _Failed:
    """Keeps a failure as text: exceptions of users need not pickle."""

    seed: int
    kind: str
    message: str
    signature: str
    traceback: str
    trace: tuple[str, ...]
    faults: tuple[Fault, ...]


def _attempt(scenario: Callable[..., Any], seed: int, faults: Sequence[Fault] | None = None) -> _Passed | _Failed:
    seen: list[tuple[tuple[Fault, ...], Trace, Mapping[int, RankResult]]] = []
    token = observer.set(lambda *simulation: seen.__setitem__(slice(None), [simulation]))
    try:
        report = scenario(seed) if faults is None else scenario(seed, faults=tuple(faults))
        check_ranks_ended_well(report)
    except BaseException as error:  # also SystemExit, and pytest.fail
        plan, trace, outcomes = seen[-1] if seen else ((), None, {})
        if isinstance(error, KeyboardInterrupt) and all(error is not outcome.error for outcome in outcomes.values()):
            raise  # not the end of a simulated rank, but that of this process
        tail = () if trace is None else tuple(map(str, trace.events()[-TAIL_EVENT_COUNT:]))
        kind = type(error).__qualname__
        return _Failed(seed, kind, str(error), signature_of(error), format_error(error), tail, plan)
    finally:
        observer.reset(token)
    fired: Counter[str] = Counter()
    for fault, count in zip(report.faults, report.faults_fired, strict=True):
        fired[type(fault).__name__] += count
    events: Counter[str] = Counter()
    for statistics in report.statistics:
        events.update({} if statistics is None else statistics.events)
    return _Passed(report.trace_digest, +fired, events)


def check_ranks_ended_well(report: SimReport[Any]) -> None:
    """Raise what ended a rank, unless it is the loss of another, ``sys.exit(0)`` or a signal of the fault plan."""
    if not isinstance(report, SimReport):
        raise TypeError(f"the scenario returned {report!r}; it must return the SimReport of its simulation")
    for rank, result in enumerate(report.results):
        if isinstance(result, BaseException) and not is_good_end(result) and not report.is_exit_by_signal(rank):
            result.add_note(f"This ended rank {rank}.")
            raise result


def is_end_by_signal(report: SimReport[Any], rank: int) -> bool:
    """Return whether a signal of the fault plan ended that rank: its own, or that of the rank whose loss ended it.

    A signal ends the whole job, which nothing that a program does can prevent. It may well survive a killed rank.
    """
    result, interrupted = report.results[rank], report.interrupted_ranks()
    if isinstance(result, RankLostError) and interrupted:
        return result.rank in interrupted or isinstance(report.results[result.rank], RankLostError)
    return report.is_exit_by_signal(rank)


def is_good_end(error: BaseException) -> bool:
    """Return whether a rank may end so without something being wrong."""
    return isinstance(error, RankLostError) or (isinstance(error, SystemExit) and not error.code)


def signature_of(error: BaseException) -> str:
    """Return what is equal for equal failures: the class, and of an assertion how its message begins."""
    name = f"{type(error).__module__}.{type(error).__qualname__}"
    if isinstance(error, BaseExceptionGroup):
        return f"{name}({', '.join(sorted({signature_of(inner) for inner in error.exceptions}))})"
    if isinstance(error, AssertionError):
        first = str(error).partition("\n")[0]
        return f"{name}: {re.sub(r'#(, #)+', '#', re.sub(r'[0-9][0-9.]*(e[+-]?[0-9]+)?', '#', first))[:_PREFIX_LENGTH]}"
    return name


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Holds the results of some seeds in a row, up to the first that failed."""

    results: list[_Passed | _Failed]
    seconds: float


def _run_chunk(payload: bytes, seeds: Sequence[int]) -> _Chunk:
    scenario = unpack(payload)
    began_at = time.perf_counter()
    results: list[_Passed | _Failed] = []
    for seed in seeds:
        results.append(_attempt(scenario, seed))
        if isinstance(results[-1], _Failed):
            break
    return _Chunk(results, time.perf_counter() - began_at)


def _run_plan(payload: bytes, seed: int, faults: Sequence[Fault]) -> _Passed | _Failed:
    return _attempt(unpack(payload), seed, faults)


# -- the search -------------------------------------------------------------------------------------------------------


class _Progress:
    def __init__(self, on_progress: Callable[[ExploreReport], None] | None) -> None:
        self._on_progress = on_progress
        self._began_at: float | None = None
        self._seconds = 0.0
        self._seed_count = 0
        self._digests: set[str] = set()
        self._fired: Counter[str] = Counter()
        self._events: Counter[str] = Counter()

    def add(self, chunk: _Chunk) -> None:
        now = time.perf_counter()
        if self._began_at is None:  # starting processes is not counted
            self._began_at = now - chunk.seconds
        self._seconds = now - self._began_at
        self._seed_count += len(chunk.results)
        for result in chunk.results:
            if isinstance(result, _Passed):
                self._digests.add(result.digest)
                self._fired += result.fired
                self._events += result.events
        if self._on_progress is not None:
            self._on_progress(self.report())

    def report(self, failure: Failure | None = None) -> ExploreReport:
        digests, fired, events = frozenset(self._digests), dict(self._fired), dict(self._events)
        return ExploreReport(self._seed_count, digests, fired, self._seconds, failure, events)


def _search(runner: Inline | Pool, seeds: Iterator[int], progress: _Progress) -> _Failed | None:
    """Return the first seed that fails, in their order; None when all have passed."""
    pending: deque[tuple[list[int], Future[_Chunk]]] = deque()
    size = 1
    while True:
        try:
            while len(pending) < runner.window and (chunk := list(itertools.islice(seeds, size))):
                pending.append((chunk, runner.submit(_run_chunk, chunk)))
            if not pending:
                return None
            done = pending[0][1].result()
        except BrokenProcessPool:
            raise RuntimeError(
                f"a process that ran seeds died, in one of the seeds {pending[0][0][0]} to {pending[-1][0][-1]}: it "
                "crashed in native code, was killed, or could not import this script, in which a call of explore at "
                "top level needs an if __name__ == '__main__'. With processes=1 seeds run in this process"
            ) from None
        pending.popleft()
        progress.add(done)
        last = done.results[-1]
        if isinstance(last, _Failed):
            runner.drop_the_rest()
            return last
        wanted = len(done.results) * _CHUNK_S / max(done.seconds, 1e-6)
        size = max(1, min(int(wanted), 2 * size, _CHUNK_SEED_COUNT_MAX))


def _investigate(runner: Inline | Pool, scenario: Any, failed: _Failed) -> Failure:
    """Shrink the plan, and describe the failure."""
    attempts = _Attempts(runner, failed)
    try:
        minimal, note = _shrink(attempts, failed.faults, is_possible=takes_faults(scenario))
    except BrokenProcessPool:
        minimal, note = None, "a process died when the plan was to be shrunk"
    return Failure(
        seed=failed.seed,
        kind=failed.kind,
        message=failed.message,
        traceback=failed.traceback,
        trace=failed.trace,
        faults=failed.faults,
        minimal_faults=minimal,
        shrink_run_count=attempts.count,
        repeat=repeat_line(scenario, failed.seed, minimal if minimal != failed.faults else None, runner.hash_seed),
        note=note,
    )


def _shrink(
    attempts: _Attempts, faults: tuple[Fault, ...], *, is_possible: bool
) -> tuple[tuple[Fault, ...] | None, str]:
    """Return the minimal plan, or None, and a note."""
    if not faults:
        if attempts.fails_again():
            return (), ""
        return None, "it passed when it ran again: something besides the seed decides, such as a module's global"
    if not is_possible:
        return None, "the plan is as the seed drew it: the scenario takes no argument faults, so it cannot be shrunk"
    if attempts.fails(()):
        return (), ""
    if not attempts.fails(faults):
        return None, "the plan cannot be shrunk: given as the argument faults, it does not fail in the same way"
    minimal = shrink(faults, attempts.fails)
    is_minimal = not attempts.is_exhausted
    return minimal, "" if is_minimal else f"a smaller plan may exist: shrinking ended after {_SHRINK_RUN_COUNT} runs"


class _Attempts:
    """Tells whether a plan fails as the first one did. Each plan is tried once, and the number of tries is limited."""

    def __init__(self, runner: Inline | Pool, failed: _Failed) -> None:
        self._runner = runner
        self._failed = failed
        self._known: dict[tuple[Fault, ...], bool] = {}
        self.count = 0

    @property
    def is_exhausted(self) -> bool:
        return self.count >= _SHRINK_RUN_COUNT

    def fails(self, faults: Sequence[Fault]) -> bool:
        plan = tuple(faults)
        if plan not in self._known:
            if self.is_exhausted:
                return False
            self.count += 1
            self._known[plan] = self._is_the_same(self._runner.submit(_run_plan, self._failed.seed, plan).result())
        return self._known[plan]

    def fails_again(self) -> bool:
        self.count += 1
        chunk: _Chunk = self._runner.submit(_run_chunk, [self._failed.seed]).result()
        return self._is_the_same(chunk.results[0])

    def _is_the_same(self, result: _Passed | _Failed) -> bool:
        return isinstance(result, _Failed) and result.signature == self._failed.signature


def takes_faults(scenario: Any) -> bool:
    """Return whether the scenario's plan can be replaced."""
    try:
        inspect.signature(scenario).bind(0, faults=())
    except (TypeError, ValueError):
        return False
    return True
