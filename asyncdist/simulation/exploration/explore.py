"""Runs a scenario with many seeds until one fails, shrinks its fault plan, and prints a command to repeat the failure.

A scenario is a module-level function, ``scenario(seed, faults=None) -> SimReport``, that runs a simulation and raises
if the result is wrong. ``faults`` replaces the fault plan that the scenario would derive from the seed, so that the
plan can be shrunk.

The report does not depend on the number of processes, because results are processed in the order of the seeds, up to
the first failure.
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
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol, TypeAlias

from asyncdist import local_host, rank_program, validation
from asyncdist.errors import LateError, RankLostError
from asyncdist.runtime.failing.tracebacks import format_error
from asyncdist.runtime.hosting import RankResult
from asyncdist.simulation.exploration.process_pool import Inline, Pool, open_runner, pack, unpack
from asyncdist.simulation.exploration.repro_command import expression_of, repeat_line
from asyncdist.simulation.exploration.shrink import shrink
from asyncdist.simulation.faults import Fault
from asyncdist.simulation.report import SimReport
from asyncdist.simulation.simulate import observer
from asyncdist.simulation.trace import Trace
from asyncdist.wording import plural

#: Number of trace events that are shown with a failure.
TAIL_EVENT_COUNT: Final = 20
#: Maximum number of runs for shrinking a plan.
_SHRINK_RUN_COUNT: Final = 300
#: Seconds of work that a process receives at a time: short enough for a progress bar, long enough to be efficient.
_CHUNK_S: Final = 0.5
_CHUNK_SEED_COUNT_MAX: Final = 64
#: Two assertion failures count as equal if their messages share this many leading characters, ignoring numbers.
_PREFIX_LENGTH: Final = 40


class Scenario(Protocol):
    """A function that :func:`explore` can run. If it has no parameter ``faults``, its fault plan cannot be shrunk."""

    def __call__(self, seed: int, faults: Sequence[Fault] | None = None) -> SimReport[Any]:
        """Run a simulation, and raise if its result is wrong.

        Args:
            seed: Seed of all random choices.
            faults: Fault plan; None for the plan derived from the seed.
        """


@dataclass(frozen=True, slots=True)
class Failure:
    """Describes the failure that an exploration found.

    Attributes:
        kind, message: Class name and message of the exception.
        traceback: Traceback, beginning with the scenario's first frame.
        trace: Last events of the seed's last simulation.
        faults: Fault plan of the seed's last simulation.
        minimal_faults: Minimal plan, with simple numbers, that fails in the same way. None if no minimal plan was
            found; ``note`` then contains the reason.
        repeat: Shell command that repeats the failure, with the minimal plan if there is one.
    """

    seed: int
    kind: str
    message: str
    traceback: str = field(repr=False)
    trace: tuple[str, ...] = field(repr=False)
    faults: tuple[Fault, ...]
    minimal_faults: tuple[Fault, ...] | None = None
    shrink_run_count: int = 0
    repeat: str = ""
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
    """Reports the progress or the result of an exploration.

    Attributes:
        seed_count: Number of seeds that ran, including the failing seed.
        digests: Distinct trace digests of the seeds that passed.
        faults_fired: Number of fired faults, keyed by class name.
        events: Number of events on all ranks, keyed by kind, as in :attr:`asyncdist.WorldStatistics.events`.
        seconds: Seconds since the first seed began, without shrinking.
        failure: First failure in the order of the seeds, or None.
    """

    seed_count: int
    digests: frozenset[str] = field(repr=False)
    faults_fired: Mapping[str, int]
    seconds: float
    failure: Failure | None = None
    events: Mapping[str, int] = field(default_factory=dict, repr=False)

    @property
    def seeds_per_s(self) -> float:
        """Number of seeds that all processes together run per second."""
        return self.seed_count / self.seconds if self.seconds else 0.0

    @property
    def in_short(self) -> str:
        """Summary of the fired faults and covered events, for a progress bar."""
        roles = sum(kind.startswith("role ") for kind in self.events)
        faults, rounds = sum(self.faults_fired.values()), self.events.get("decided", 0)
        counts = {"different": len(self.digests), "faults": faults, "rounds": rounds, "kinds of roles": roles}
        return ", ".join(f"{count} {what}" for what, count in counts.items() if count)

    def check(self) -> None:
        """Raise AssertionError if a seed failed."""
        if self.failure is not None:
            raise AssertionError(str(self.failure))

    def __str__(self) -> str:
        fired = ", ".join(f"{kind} {count}" for kind, count in sorted(self.faults_fired.items()))
        return (
            f"{plural(self.seed_count, 'seed')} in {self.seconds:.1f} s ({self.seeds_per_s:.1f}/s), "
            f"{plural(len(self.digests), 'different trace')}"
            + (f", faults fired: {fired}" if fired else "")
            + (f", covered: {covered}" if (covered := _covered(self.events)) else "")
        )


def _covered(events: Mapping[str, int]) -> str:
    """Summarise the events of averaging rounds, or return an empty string if there were none."""
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
    """Run ``scenario(seed)`` for each seed until one fails, then shrink its fault plan.

    A seed fails if the scenario raises. It also fails if a rank of the returned report ended with an exception that the
    fault plan does not explain (:meth:`SimReport.check_ranks`).

    Args:
        scenario: Scenario to run (:class:`Scenario`): a function at the top level of a module, or a picklable object.
        seeds: Seeds in the order in which they are tried. An iterator is consumed gradually.
        processes: Number of processes, each with one torch thread; by default the number of cores. With 1, seeds run in
            this process.
        on_progress: Function called with the current report about twice per second, and at the end.
        quiet: Whether to print nothing to standard error after a failure.

    **Cancellation**: KeyboardInterrupt ends the processes at once, even while they run a seed.

    Raises:
        TypeError: The scenario cannot be sent to another process, or a seed is not an integer.
        ValueError: ``seeds`` is empty, or ``processes`` is below 1.
        RuntimeError: A process died, for example in native code or for lack of memory.
    """
    payload = pack(scenario)
    if processes is not None and (type(processes) is not int or processes < 1):
        raise ValueError(f"processes must be an integer >= 1 or None, got {processes!r}")
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
    """Return an iterator over the seeds. A list is checked at once, and an iterator gradually."""
    if not isinstance(seeds, Iterable):
        raise TypeError(f"seeds must be an iterable of integers, as in range(1000), got {seeds!r:.80}")
    iterator = map(_seed, seeds if isinstance(seeds, (range, Iterator)) else [_seed(seed) for seed in seeds])
    first = next(iterator, None)
    if first is None:
        raise ValueError(f"seeds must not be empty, got {seeds!r}")
    return itertools.chain([first], iterator)


def _seed(seed: Any) -> int:
    return validation.whole("a seed", seed)


@dataclass(frozen=True, slots=True)
class _Passed:
    digest: str
    fired: Counter[str]
    events: Counter[str]


@dataclass(frozen=True, slots=True)
class _Failed:
    """A failure, described by strings because a user's exception may not be picklable."""

    failure: Failure
    signature: str


def _attempt(scenario: Callable[..., Any], seed: int, faults: Sequence[Fault] | None) -> _Passed | _Failed:
    seen: list[tuple[tuple[Fault, ...], Trace, Mapping[int, RankResult]]] = []
    token = observer.set(lambda *simulation: seen.__setitem__(slice(None), [simulation]))
    try:
        report = scenario(seed) if faults is None else scenario(seed, faults=tuple(faults))
        if not isinstance(report, SimReport):
            raise TypeError(f"the scenario must return the SimReport of its simulation, got {report!r:.80}")
        report.check_ranks()
    except BaseException as error:  # includes SystemExit and pytest.fail
        plan, trace, outcomes = seen[-1] if seen else ((), None, {})
        if isinstance(error, KeyboardInterrupt) and all(error is not outcome.error for outcome in outcomes.values()):
            raise  # this process was interrupted, not a simulated rank
        tail = () if trace is None else tuple(map(str, trace.events()[-TAIL_EVENT_COUNT:]))
        failure = Failure(seed, type(error).__qualname__, str(error), format_error(error), tail, plan)
        return _Failed(failure, signature_of(error))
    finally:
        observer.reset(token)
    fired: Counter[str] = Counter()
    for fault, count in zip(report.faults, report.faults_fired, strict=True):
        fired[type(fault).__name__] += count
    events: Counter[str] = Counter()
    for statistics in report.statistics:
        events.update({} if statistics is None else statistics.events)
    return _Passed(report.trace_digest, +fired, events)


def is_end_by_signal(report: SimReport[Any], rank: int) -> bool:
    """Return whether a signal of the fault plan ended ``rank``, directly or through the loss of the signalled rank.

    A program may survive the loss of a killed rank, but it cannot prevent a signal from ending the whole job.
    """
    result, interrupted = report.results[rank], report.interrupted_ranks()
    if isinstance(result, RankLostError) and interrupted:
        return result.rank in interrupted or isinstance(report.results[result.rank], RankLostError)
    return report.is_exit_by_signal(rank)


def is_good_end(error: BaseException) -> bool:
    """Return whether a rank may end with this exception without making its seed fail."""
    return isinstance(error, RankLostError | LateError) or (
        isinstance(error, SystemExit) and not rank_program.exit_code(error.code)
    )


def signature_of(error: BaseException) -> str:
    """Return the same string for equal failures: the class and, for assertions, the beginning of the message."""
    name = f"{type(error).__module__}.{type(error).__qualname__}"
    if isinstance(error, BaseExceptionGroup):
        return f"{name}({', '.join(sorted({signature_of(inner) for inner in error.exceptions}))})"
    if isinstance(error, AssertionError):
        first = str(error).partition("\n")[0]
        return f"{name}: {re.sub(r'#(, #)+', '#', re.sub(r'[0-9][0-9.]*(e[+-]?[0-9]+)?', '#', first))[:_PREFIX_LENGTH]}"
    return name


#: Results of consecutive seeds, up to and including the first failure, and the seconds that they took.
_Chunk: TypeAlias = tuple[list[_Passed | _Failed], float]


def _run_chunk(payload: bytes, seeds: Sequence[int], faults: Sequence[Fault] | None = None) -> _Chunk:
    scenario = unpack(payload)
    began_at = time.perf_counter()
    results: list[_Passed | _Failed] = []
    for seed in seeds:
        results.append(_attempt(scenario, seed, faults))
        if isinstance(results[-1], _Failed):
            break
    return results, time.perf_counter() - began_at


class _Progress:
    def __init__(self, on_progress: Callable[[ExploreReport], None] | None) -> None:
        self._on_progress = on_progress
        self._began_at: float | None = None
        self._seconds = 0.0
        self._seed_count = 0
        self._digests: set[str] = set()
        self._fired: Counter[str] = Counter()
        self._events: Counter[str] = Counter()

    def add(self, results: Sequence[_Passed | _Failed], seconds: float) -> None:
        now = time.perf_counter()
        if self._began_at is None:  # excludes the processes' startup time
            self._began_at = now - seconds
        self._seconds = now - self._began_at
        self._seed_count += len(results)
        for result in results:
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
    """Return the first failure in the order of the seeds, or None if all seeds pass."""
    pending: deque[tuple[list[int], Future[_Chunk]]] = deque()
    size = 1
    while True:
        try:
            while len(pending) < runner.window and (chunk := list(itertools.islice(seeds, size))):
                pending.append((chunk, runner.submit(_run_chunk, chunk)))
            if not pending:
                return None
            results, seconds = pending[0][1].result()
        except BrokenProcessPool:
            raise RuntimeError(
                f"a process died while it ran one of the seeds {pending[0][0][0]} to {pending[-1][0][-1]}: it crashed "
                "in native code, was killed, or could not import this script. Call explore under if __name__ == "
                "'__main__', or pass processes=1 to run the seeds in this process"
            ) from None
        pending.popleft()
        progress.add(results, seconds)
        last = results[-1]
        if isinstance(last, _Failed):
            runner.drop_the_rest()
            return last
        wanted = len(results) * _CHUNK_S / max(seconds, 1e-6)
        size = max(1, min(int(wanted), 2 * size, _CHUNK_SEED_COUNT_MAX))


def _investigate(runner: Inline | Pool, scenario: Any, failed: _Failed) -> Failure:
    attempts, failure = _Attempts(runner, failed), failed.failure
    try:
        minimal, note = _shrink(attempts, failure.faults, is_possible=takes_faults(scenario))
    except BrokenProcessPool:
        minimal, note = None, "a process died while the plan was being shrunk"
    repeat = repeat_line(scenario, failure.seed, minimal if minimal != failure.faults else None, runner.hash_seed)
    return replace(failure, minimal_faults=minimal, shrink_run_count=attempts.count, repeat=repeat, note=note)


def _shrink(
    attempts: _Attempts, faults: tuple[Fault, ...], *, is_possible: bool
) -> tuple[tuple[Fault, ...] | None, str]:
    """Return the minimal plan, or None, and a note that explains the result."""
    if not faults:
        if attempts.fails(None):
            return (), ""
        return (
            None,
            "it passed when it ran again: its result depends on more than the seed, for example on a module's global",
        )
    if not is_possible:
        return None, "the plan cannot be shrunk, because the scenario takes no argument faults"
    if attempts.fails(()):
        return (), ""
    if not attempts.fails(faults):
        return None, "the plan cannot be shrunk, because it does not fail in the same way when passed as faults"
    minimal = shrink(faults, attempts.fails)
    is_minimal = not attempts.is_exhausted
    return minimal, "" if is_minimal else f"a smaller plan may exist: shrinking ended after {_SHRINK_RUN_COUNT} runs"


class _Attempts:
    """Tests whether fault plans fail in the same way as the original plan, in a limited number of runs."""

    def __init__(self, runner: Inline | Pool, failed: _Failed) -> None:
        self._runner = runner
        self._failed = failed
        self._known: dict[tuple[Fault, ...] | None, bool] = {}
        self.count = 0

    @property
    def is_exhausted(self) -> bool:
        return self.count >= _SHRINK_RUN_COUNT

    def fails(self, faults: Sequence[Fault] | None) -> bool:
        """Return whether the seed fails in the same way with a plan, or with its own plan if ``faults`` is None."""
        plan = None if faults is None else tuple(faults)
        if plan not in self._known:
            if self.is_exhausted:
                return False
            self.count += 1
            (result,), _ = self._runner.submit(_run_chunk, [self._failed.failure.seed], plan).result()
            self._known[plan] = isinstance(result, _Failed) and result.signature == self._failed.signature
        return self._known[plan]


def takes_faults(scenario: Any) -> bool:
    """Return whether the scenario has a parameter ``faults``."""
    try:
        inspect.signature(scenario).bind(0, faults=())
    except (TypeError, ValueError):
        return False
    return True
