"""Implements ``asyncdist sim``, which runs a script in the simulator.

The script runs as ``__main__``. Its call of ``asyncdist.run`` simulates all ranks and returns rank 0's value. All
random states and the system's random bytes follow from the seed, and PYTHONHASHSEED is 0 unless it is set. A run
therefore depends only on the script, its arguments, the number of ranks, the seed and the faults.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib.machinery
import importlib.util
import itertools
import os
import random
import reprlib
import runpy
import shlex
import shutil
import sys
import time
import types
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TextIO

import greenlet
import numpy as np
import torch

from asyncdist import rank_program
from asyncdist.blocking.callers import SwitchingCaller, ask_for_world, find_caller
from asyncdist.blocking.stack_bottom import call_at_bottom
from asyncdist.recording.command_output import write_out
from asyncdist.recording.writer import SUFFIX
from asyncdist.runtime.failing.tracebacks import format_error
from asyncdist.runtime.run import run_local_override, run_override
from asyncdist.runtime.world import World
from asyncdist.simulation.determinism.rng import entropy_from
from asyncdist.simulation.exploration.explore import (
    TAIL_EVENT_COUNT,
    ExploreReport,
    explore,
    is_end_by_signal,
    is_good_end,
)
from asyncdist.simulation.exploration.repro_command import (
    ScriptError,
    expression_of,
    format_faults,
    hash_seed_prefix,
    python_command,
)
from asyncdist.simulation.faults import Fault
from asyncdist.simulation.report import SimReport
from asyncdist.simulation.simulate import STOPPED, simulate

#: Maximum number of printed lines with the ranks' results.
_RESULT_LINE_COUNT: Final = 10
_PROGRESS_LINE_EVERY_S: Final = 5.0
#: Maximum time by which a file's modification time lags behind the clock, in nanoseconds.
_FILE_CLOCK_NS: Final = 20_000_000
#: tqdm's progress bar format, but always in seeds per second, never in seconds per seed.
_BAR: Final = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_noinv_fmt}{postfix}]"


@dataclass(frozen=True, slots=True)
class Script:
    """Describes a run of ``asyncdist sim``. An instance is also a scenario for :func:`explore`.

    Attributes:
        until_s: Virtual time by which all ranks must have ended, in seconds, or None.
        record: Absolute path of the folder for recordings, or None.
        module: Full module name of the script if it runs as with ``python -m``, otherwise an empty string.
        has_safe_path: Whether the user has kept the script's folder out of the module path. The process that runs the
            script cannot read this from ``sys.flags``, because :func:`explore` starts all processes with a safe path.
    """

    path: str
    arguments: tuple[str, ...]
    ranks: int
    faults: tuple[Fault, ...] = ()
    until_s: float | None = None
    record: str | None = None
    module: str = field(default="", kw_only=True)
    has_safe_path: bool = field(default_factory=lambda: sys.flags.safe_path, kw_only=True)

    def __call__(self, seed: int, faults: Sequence[Fault] | None = None) -> SimReport[Any]:
        """Run the script once, as a :class:`asyncdist.simulation.Scenario`.

        A fault that does not fire is a failure. An exception that a signal of the plan raises is not.
        """
        with contextlib.redirect_stdout(_null_file()), contextlib.redirect_stderr(_null_file()):
            ended = execute(self, seed, self.faults if faults is None else tuple(faults))
        if ended.error is not None and not _is_end_by_signal(ended.error, ended.report):
            raise ended.error
        if ended.report is None:
            raise _never_ran(self)
        ended.report.check_faults()
        return ended.report

    def simulate(
        self,
        main: Callable[..., Any],
        args: tuple[Any, ...],
        seed: int,
        faults: tuple[Fault, ...],
        strict: bool,
        inherited: list[str],
    ) -> SimReport[Any]:
        """Simulate the ``main`` that the script passes to ``asyncdist.run``, with the arguments of :func:`simulate`."""
        return simulate(
            main,
            *args,
            ranks=self.ranks,
            seed=seed,
            faults=faults,
            strict=strict,
            until_s=self.until_s,
            return_exceptions=True,
            inherited_random=inherited,
            record=self.record,
        )

    @property
    def folder(self) -> str:
        """Folder that Python would put on ``sys.path``: the script's folder, or the parent of the outermost package."""
        return str(Path(self.path).resolve().parents[self.module.count(".")])

    def run_file(self, first_folder: str) -> None:
        """Run the script's file as ``__main__``, on its own, or as a module so that relative imports work.

        A relative path is relative to ``first_folder``, because the script may have changed the current folder.
        """
        if not self.module:
            if zipfile.is_zipfile(place := os.path.join(first_folder, self.path)):
                runpy.run_path(place, run_name="__main__")
            else:
                _run_plain_file(self.path, os.path.abspath(place))
            return
        spec = importlib.util.find_spec(self.module)
        if spec is None or spec.origin is None or not os.path.samefile(spec.origin, self.path):
            raise ScriptError(f"the module {self.module} must be {self.path!r}, but Python finds another module")
        # A test of a replay may have imported the module before.
        warnings.filterwarnings("ignore", "'.*' found in sys.modules after import", RuntimeWarning, "runpy")
        runpy.run_module(self.module, run_name="__main__", alter_sys=True)

    @property
    def is_local(self) -> bool:
        """Whether calls of ``asyncdist.run_local`` are also simulated. Otherwise they run unchanged."""
        return False

    def begin_process(self, rank: int) -> None:
        """Do nothing, because a script needs no preparation beyond its random states."""

    def on_world_opened(self, rank: int, frame: types.FrameType | None) -> None:
        """Do nothing when a script that has no main function opens its world. Subclasses override this method.

        Args:
            frame: Innermost frame of the stack on which the script runs.
        """

    def repeat_line(self, seed: int, faults: Sequence[Fault] | None = None) -> str:
        """Return the command line that runs the script with one seed."""
        plan = self.faults if faults is None else faults
        options = ["--ranks", str(self.ranks), "--seed", str(seed)]
        options += ["--faults", format_faults(plan)] if plan else []
        options += ["--until-s", f"{self.until_s!r}"] if self.until_s is not None else []
        options += ["--record", self.record] if self.record is not None else []
        if self.arguments and self.arguments[0].startswith("-"):  # asyncdist may have an option with the same name
            options.append("--")
        return f"{hash_seed_prefix(default='0')}{_command()} sim {shlex.join([self.path, *options, *self.arguments])}"


class _ScriptLoader(importlib.machinery.SourceFileLoader):
    """Loads a script without a file of compiled code. Tracebacks show ``name`` as the file of the code."""

    def __init__(self, place: str, name: str) -> None:
        super().__init__("__main__", place)
        self._name = name

    def get_code(self, fullname: str) -> types.CodeType:
        return self.source_to_code(self.get_data(self.path), self._name)


def _run_plain_file(name: str, place: str) -> None:
    """Run a script as ``__main__``. As in Python, ``__file__`` is absolute, since the script may change the folder."""
    main, outside = types.ModuleType("__main__"), sys.modules["__main__"]
    main.__file__ = place
    sys.modules["__main__"] = main
    try:
        _ScriptLoader(place, name).exec_module(main)
    finally:
        sys.modules["__main__"] = outside


@functools.cache
def _null_descriptor() -> int:
    return os.open(os.devnull, os.O_WRONLY)


def _null_file() -> TextIO:
    """Return a file that discards all output. Its descriptor stays open, because a logger may keep the file."""
    return open(_null_descriptor(), "w", encoding="utf-8", errors="backslashreplace", closefd=False)


def _command() -> str:
    own = Path(sys.executable).with_name("asyncdist")
    return "asyncdist" if shutil.which("asyncdist") == str(own) else f"{python_command()} -m asyncdist"


@dataclass(frozen=True, slots=True)
class _Ended:
    """Describes how a script ended. ``has_run`` tells whether it called ``asyncdist.run``."""

    error: BaseException | None
    report: SimReport[Any] | None
    has_run: bool


class _Host:
    """Replaces ``asyncdist.run`` while a script runs in the simulator."""

    def __init__(self, script: Script, seed: int, faults: tuple[Fault, ...]) -> None:
        self._script = script
        self._seed = seed
        self._faults = faults
        self._states = _random_states()
        self.call_count = 0
        self.report: SimReport[Any] | None = None
        self.interrupt: KeyboardInterrupt | None = None

    def __call__(self, main: Callable[..., Any], args: tuple[Any, ...], strict: bool) -> Any:
        self.call_count += 1
        if self.call_count > 1:
            raise _ran_twice(self._script)
        try:
            self.report = self._script.simulate(main, args, self._seed, self._faults, strict, self._seeded())
        except KeyboardInterrupt as interrupt:
            self.interrupt = interrupt
            raise
        self.report.check_ranks()
        value = self.report.results[0]
        if isinstance(value, BaseException):
            raise value
        return value

    def run_local(self, main: Callable[..., Any], args: tuple[Any, ...], strict: bool) -> list[Any]:
        """Simulate a call of ``asyncdist.run_local``, and return the return values of all ranks."""
        self(main, args, strict)
        assert self.report is not None, "it has run"
        return list(self.report.results)

    def remember_random(self) -> None:
        self._states = _random_states()

    def _seeded(self) -> list[str]:
        now = _random_states()
        return [name for name, state in self._states.items() if state != now[name]]


def _random_states() -> dict[str, str]:
    """Return this process's random states as comparable strings, keyed by generator."""
    with np.printoptions(threshold=sys.maxsize):
        numpy_state = repr(np.random.get_state(legacy=False))
    torch_state = torch.get_rng_state().numpy().tobytes().hex()
    return {"random": repr(random.getstate()), "numpy": numpy_state, "torch": torch_state}


def execute(script: Script, seed: int, faults: tuple[Fault, ...]) -> _Ended:
    """Run the script. Raise ScriptError unless it calls ``asyncdist.run`` once.

    A KeyboardInterrupt is raised even if the script caught it.
    """
    host = _Host(script, seed, faults)
    error: BaseException | None = None
    token, token_of_local = (
        run_override.set(host),
        run_local_override.set(host.run_local if script.is_local else None),
    )
    try:
        with contextlib.chdir("."), _program(script), entropy_from(random.Random(f"{seed} entropy").randbytes):
            number = random.Random(f"{seed} script").getrandbits(63)  # differs from any seed that the script may set
            random.seed(number)
            np.random.seed(number % 2**32)
            torch.manual_seed(number)
            script.begin_process(0)
            host.remember_random()
            _run_main(script, host)
            if not host.call_count:
                raise _never_ran(script)
    except SystemExit as caught:
        error = caught if rank_program.exit_code(caught.code) else None
    except BaseException as caught:
        is_raised_in_rank = host.report is not None and any(caught is result for result in host.report.results)
        if isinstance(caught, KeyboardInterrupt) and not is_raised_in_rank:
            raise
        error = caught
    finally:
        run_override.reset(token)
        run_local_override.reset(token_of_local)
    if host.interrupt is not None:
        raise host.interrupt
    if host.call_count > 1:
        raise _ran_twice(script)
    if isinstance(error, ScriptError):
        raise error
    report = error.report if isinstance(error, STOPPED) else host.report
    return _Ended(error, report, bool(host.call_count))


def _run_main(script: Script, host: _Host) -> None:
    """Run the script as ``__main__``.

    A script that opens its world without a main function runs as rank 0 from its first line. The other ranks also run
    the script, each on a separate stack, until they open their world.
    """

    def run(*, stays: bool = False) -> None:
        if not stays:
            os.chdir(folder)  # an earlier rank's script may have changed it
        try:
            script.run_file(folder)
        except SystemExit as ended:
            if rank_program.exit_code(ended.code) or find_caller() is None:
                raise
        caller = find_caller()
        if caller is not None:
            caller.end()

    async def main(world: World) -> None:
        caller = SwitchingCaller(world, is_of_script=True)
        if world.rank or world.incarnation:
            caller.on_opened = lambda: script.on_world_opened(world.rank, sys._getframe())
            script.begin_process(world.rank)
            await caller.run(functools.partial(run, stays=bool(world.incarnation)))  # the other ranks are running
        else:
            script.on_world_opened(0, first.gr_frame)
            await caller.continue_stack(first)

    def ask() -> SwitchingCaller:
        caller: SwitchingCaller = here.switch()
        return caller

    folder, here, first = os.getcwd(), greenlet.getcurrent(), greenlet.greenlet(functools.partial(call_at_bottom, run))
    first.gr_context = contextvars.copy_context()
    first.gr_context.run(ask_for_world.set, ask)
    outside, argument = sys.modules["__main__"], sys.argv[0]
    first.switch()
    if not first.dead:
        try:
            host(main, (), strict=False)
        finally:
            sys.modules["__main__"], sys.argv[0] = outside, argument


def _is_end_by_signal(error: BaseException, report: SimReport[Any] | None) -> bool:
    return report is not None and error is report.results[0] and is_end_by_signal(report, 0)


@contextlib.contextmanager
def _program(script: Script) -> Iterator[None]:
    """Set ``sys.argv`` and ``sys.path`` as Python would for this script."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [script.path, *script.arguments]
    if not script.has_safe_path:
        sys.path.insert(0, script.folder)
    try:
        yield
    except ImportError as error:
        rank_program.explain_import(error)  # the script's folder must still be on sys.path
        raise
    finally:
        sys.argv, sys.path[:] = argv, path


def _never_ran(script: Script) -> ScriptError:
    return ScriptError(
        f"the script {script.path!r} must call asyncdist.run on the main thread, but it ended without a call, so "
        "nothing was simulated (the script runs once, as __main__)"
    )


def _ran_twice(script: Script) -> ScriptError:
    return ScriptError(
        f"the script {script.path!r} must call asyncdist.run exactly once in a simulation, but it called it again"
    )


def run_once(script: Script, seed: int) -> int:
    """Run the script once, print how it ended, and return the exit code.

    The code is 1 if the script or a rank failed or a fault did not fire, and 0 otherwise. Raise ScriptError if the
    script does not call ``asyncdist.run`` exactly once.
    """
    torch.set_num_threads(1)
    began_ns = time.time_ns()
    try:
        ended = execute(script, seed, script.faults)
    except KeyboardInterrupt:
        print_out(*_how_to_see(script, began_ns))
        raise
    report, error = ended.report, ended.error
    print_out()
    if not ended.has_run and (error is None or isinstance(error, SystemExit)):
        return _exit_before_run(script, error)
    failed = print_failures(report, error)
    idle: list[Fault] = []
    if report is not None:
        results = [] if isinstance(error, STOPPED) else results_of(report)
        print_out(*results, *_summary(report))
        idle = [fault for fault, count in zip(report.faults, report.faults_fired, strict=True) if not count]
    if idle:
        print(f"asyncdist sim: these faults did not fire: {', '.join(map(expression_of, idle))}", file=sys.stderr)
    print_out(f"repeat it: {script.repeat_line(seed)}", *_how_to_see(script, began_ns))
    return 1 if failed or idle else 0


def _how_to_see(script: Script, began_ns: int) -> list[str]:
    """Return the command line that reports the recordings written since ``began_ns``, if there are any."""
    if script.record is None:
        return []
    found = {path: path.stat() for path in Path(script.record).glob(f"*{SUFFIX}")}
    jobs = {path: path.name.rpartition("-rank")[0] for path in found}
    new = [path for path, file in found.items() if file.st_size and file.st_mtime_ns >= began_ns - _FILE_CLOCK_NS]
    if not new:
        return []
    job = jobs[max(new, key=lambda path: found[path].st_mtime_ns)]
    option = f" --job {job}" if len(set(jobs.values())) > 1 else ""
    return [f"see it: {_command()} report {shlex.quote(script.record)}{option}"]


def print_out(*lines: str) -> None:
    """Print lines and flush standard output. Raise ScriptError if this fails, but ignore a broken pipe."""
    why = write_out(lambda: sys.stdout.write("".join(f"{line}\n" for line in lines)))
    if why is not None:
        raise ScriptError(why)


def _exit_before_run(script: Script, error: SystemExit | None) -> int:
    """Return the exit code of a script that ended before it ran ranks, as with ``--help``."""
    code = None if error is None else error.code
    if isinstance(code, str):
        print(code, file=sys.stderr)
    print(f"asyncdist sim: {script.path!r} exited before asyncdist.run, so nothing was simulated", file=sys.stderr)
    return code if isinstance(code, int) else int(code is not None)


def print_failures(report: SimReport[Any] | None, error: BaseException | None, command: str = "sim") -> bool:
    """Print the first failure and its traceback, for the subcommand ``command``. Return whether there was a failure."""
    results = () if report is None else report.results
    failed = {rank: result for rank, result in enumerate(results) if isinstance(result, BaseException)}
    if error is None:  # the script may have caught the error that a rank raised
        error = next((result for result in failed.values() if not is_good_end(result)), None)
    if error is None:
        return False
    ranks = [rank for rank, result in failed.items() if result is error]
    who = f"rank {ranks[0]}" if ranks else "the simulation" if isinstance(error, STOPPED) else "the script"
    print(f"asyncdist {command}: {who} failed:", file=sys.stderr)
    if isinstance(error, STOPPED):
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    elif isinstance(error, SystemExit):
        print(f"exit code {error.code}" if isinstance(error.code, int) else error.code, file=sys.stderr)
    elif isinstance(error, KeyboardInterrupt):
        print("KeyboardInterrupt", file=sys.stderr)
    else:
        sys.stderr.write(format_error(error))
    if report is not None:
        tail = report.trace[-TAIL_EVENT_COUNT:]
        print("the last events:", *tail, sep="\n  ", file=sys.stderr, flush=True)
    return True


def results_of(report: SimReport[Any], without: str = "None") -> list[str]:
    """Return a line for each range of ranks with equal results. ``without`` replaces a missing result."""
    texts = [without if result is None else _brief(result) for result in report.results]
    for rank in report.killed_ranks:
        texts[rank] = "killed"
    lines = []
    for text, group in itertools.groupby(range(len(texts)), key=texts.__getitem__):
        ranks = list(group)
        lines.append(f"rank {ranks[0]}: {text}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}: {text}")
    return _abbreviated(lines)


def _summary(report: SimReport[Any]) -> list[str]:
    fired = [
        f"{count} x {expression_of(fault)}"
        for fault, count in zip(report.faults, report.faults_fired, strict=True)
        if count
    ]
    return [
        f"{len(report.results)} ranks, seed {report.seed}: {report.virtual_time_s:.6f} s of virtual time, "
        f"{report.message_count} messages, {report.byte_count} bytes, {report.event_count} events",
        *([f"faults fired: {', '.join(fired)}"] if fired else []),
        f"digest of the trace: {report.trace_digest}",
    ]


def _brief(result: Any) -> str:
    if isinstance(result, BaseException):
        first = str(result).partition("\n")[0]
        return f"{type(result).__name__}: {first}" if first else type(result).__name__
    short = reprlib.Repr()
    short.maxother = short.maxstring = 100
    return " ".join(short.repr(result).split())


def _abbreviated(lines: list[str]) -> list[str]:
    if len(lines) <= _RESULT_LINE_COUNT:
        return lines
    return [*lines[: _RESULT_LINE_COUNT - 2], f"... {len(lines) - _RESULT_LINE_COUNT + 1} more ...", lines[-1]]


def run_many(script: Script, seeds: range, processes: int | None) -> int:
    """Run the script with each seed until one fails, and show a progress bar.

    If the script is to be recorded, the failing seed runs once more, with the minimal fault plan. Return the exit code,
    1 if a seed failed and 0 otherwise. Raise ScriptError if the script does not call ``asyncdist.run`` exactly once.
    """
    torch.set_num_threads(1)
    is_terminal = sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).columns > 0
    progress = _bar if is_terminal else _lines
    so_far: list[ExploreReport] = []
    try:
        with progress(len(seeds)) as show:

            def on_progress(report: ExploreReport) -> None:
                so_far[:] = [report]
                show(report)

            quick = replace(script, record=None)
            report = explore(quick, seeds, processes=processes, on_progress=on_progress, quiet=True)
    except KeyboardInterrupt:
        print_out(*map(str, so_far))  # The summary is printed, because the exploration may have taken hours.
        raise
    if report.failure is not None and report.failure.kind == ScriptError.__qualname__:
        raise ScriptError(report.failure.message)
    print_out(str(report))
    if report.failure is None:
        return 0
    print(report.failure, file=sys.stderr)
    if script.record is not None:
        failure, began_ns = report.failure, time.time_ns()
        with contextlib.suppress(Exception, SystemExit):
            script(failure.seed, failure.faults if failure.minimal_faults is None else failure.minimal_faults)
        print_out(*_how_to_see(script, began_ns))
    return 1


@contextlib.contextmanager
def _bar(count: int) -> Iterator[Callable[[ExploreReport], None]]:
    from tqdm import tqdm

    with tqdm(total=count, file=sys.stderr, dynamic_ncols=True, bar_format=_BAR, unit=" seeds") as bar:

        def show(report: ExploreReport) -> None:
            bar.start_t = time.time() - report.seconds  # excludes the processes' startup time from the rate
            bar.last_print_t = max(bar.last_print_t, bar.start_t)
            bar.set_postfix_str(report.in_short, refresh=False)
            bar.update(report.seed_count - bar.n)

        yield show


@contextlib.contextmanager
def _lines(count: int) -> Iterator[Callable[[ExploreReport], None]]:
    shown_at = time.monotonic()

    def show(report: ExploreReport) -> None:
        nonlocal shown_at
        if time.monotonic() - shown_at >= _PROGRESS_LINE_EVERY_S:
            shown_at = time.monotonic()
            print(f"of {count} seeds: {report}", file=sys.stderr, flush=True)

    yield show
