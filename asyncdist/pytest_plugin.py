"""A pytest plugin: ``@pytest.mark.sim`` runs a coroutine test on simulated ranks, once per seed.

::

    @pytest.mark.sim(ranks=4, seeds=200)
    async def test_everybody_agrees(world: ad.World) -> None:
        numbers = await ad.all_gather(torch.tensor(world.rank))
        assert [int(number) for number in numbers] == list(range(world.size))

``ranks`` is a number, or a list of numbers, each of which makes a separate test. ``seeds`` is a count (default 20) or a
list of seeds. The other options are those of :func:`asyncdist.simulate`: ``network``, ``compute``, ``faults``,
``strict`` (default true) and ``until_s``. Options of a test's mark override those of its class and module. A test must
have the parameter ``world``, the rank's :class:`asyncdist.World`, and may have ``sim_seed``. Both differ between runs,
so they are not fixtures. Fixtures are created once per test, for all of its seeds.

A failed test prints its seed, the end of the trace and a command that reproduces the failure. ``pytest --sim-seed N``
runs only seed N, and ``--sim-seeds N`` runs seeds 0 to N-1.

The plugin, which pytest loads in every session, imports torch only when the first simulated test runs. pytest sees a
marked test as a plain function, so that plugins for coroutine tests ignore it.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import shlex
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType, FunctionType, TracebackType
from typing import TYPE_CHECKING, Any, Final, NoReturn

import pytest

from asyncdist import rank_program, validation
from asyncdist.errors import AsyncdistError, LocalProtocolError, RankLostError
from asyncdist.tags import CONTROL
from asyncdist.wording import plural, ranks_in_words

if TYPE_CHECKING:
    from asyncdist.runtime.world import World
    from asyncdist.simulation import Fault, SimReport, TraceEvent
    from asyncdist.simulation.trace import Trace

_OPTIONS: Final = ("ranks", "seeds", "network", "compute", "faults", "strict", "until_s")
_MARKER: Final = (
    "sim(ranks, seeds=20, network=None, compute=None, faults=(), strict=True, until_s=None): run the coroutine test on "
    "every rank of a simulation, once per seed. ranks is a number, or a list with a number for each separate test; "
    "seeds is a count or a list of seeds. The other options are those of asyncdist.simulate."
)
_SEED_COUNT: Final = 20
#: Parameters of a marked test that are not fixtures, because the simulation provides their values.
_INJECTED: Final = ("world", "sim_seed")
#: Name under which pytest parametrizes a test whose mark lists several numbers of ranks.
_RANKS: Final = "sim_ranks"
_EVENT_COUNT: Final = 30
_LINE_COUNT: Final = 40
_LINE_LENGTH: Final = 160


# -- options ----------------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options ``--sim-seed`` and ``--sim-seeds``."""
    group = parser.getgroup("asyncdist", "simulated tests (asyncdist)")
    group.addoption("--sim-seed", type=int, metavar="N", help="run simulated tests with only this seed")
    group.addoption(
        "--sim-seeds",
        type=int,
        metavar="N",
        help="run simulated tests with seeds 0 to N-1, unless their mark lists its seeds",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark ``sim`` and check the options."""
    config.addinivalue_line("markers", _MARKER)
    count = config.getoption("sim_seeds")
    if count is not None and count < 1:
        raise pytest.UsageError(f"--sim-seeds must be >= 1, got {count}")
    if count is not None and config.getoption("sim_seed") is not None:
        raise pytest.UsageError("only one of --sim-seed and --sim-seeds may be passed")


@dataclass(frozen=True, slots=True)
class _Plan:
    """The options of one test, from all its ``@pytest.mark.sim`` marks."""

    ranks: tuple[int, ...]
    is_parametrized: bool
    seeds: Sequence[int]
    settings: dict[str, Any]


def _plan(item: pytest.Item) -> _Plan | None:
    """Return the options of a test from its ``sim`` marks, or None if it has none. Inner marks override outer marks."""
    given: dict[str, Any] = {}
    marks = list(item.iter_markers("sim"))
    if not marks:
        return None
    for mark in reversed(marks):
        if mark.args:
            _refuse(item, f"takes its options by name, as in ranks=4, got {mark.args[0]!r}")
        unknown = next((name for name in mark.kwargs if name not in _OPTIONS), None)
        if unknown is not None:
            has = f"the options are {', '.join(_OPTIONS)}"
            _refuse(item, f"has no option {unknown!r}; {validation.meant(unknown, _OPTIONS, has)}")
        given.update(mark.kwargs)
    ranks = given.pop("ranks", None)
    is_parametrized = _is_list(ranks)
    counts = validation.whole_numbers(ranks if is_parametrized else (ranks,))
    if not counts or min(counts) < 1:
        _refuse(item, f"must have ranks, an integer >= 1 or a list of such integers, got {ranks!r}")
    return _Plan(counts, is_parametrized, _seeds(item, given.pop("seeds", _SEED_COUNT)), {"strict": True, **given})


def _seeds(item: pytest.Item, asked: Any) -> Sequence[int]:
    """Return the seeds of a test, from the command line or from the test's mark."""
    if _is_list(asked):
        seeds: Sequence[int] = asked if isinstance(asked, range) else validation.whole_numbers(asked)
    else:
        count = max(validation.whole_numbers((asked,)), default=0)
        seeds = range(item.config.getoption("sim_seeds") or count) if count >= 1 else ()
    if not seeds:
        _refuse(item, f"must have seeds, an integer >= 1 or a list of integers, got {asked!r}")
    only = item.config.getoption("sim_seed")
    return seeds if only is None else (only,)


def _is_list(value: Any) -> bool:
    """Return whether ``value`` can be iterated several times, because each test reads its mark again."""
    return isinstance(value, Iterable) and not isinstance(value, Iterator)


def _refuse(item: pytest.Item, problem: str) -> NoReturn:
    pytest.fail(f"{item.nodeid}: @pytest.mark.sim {problem}", pytrace=False)


# -- collection -------------------------------------------------------------------------------------------------------


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Create one pytest item for each number of ranks if the mark lists several numbers."""
    plan = _plan(metafunc.definition)
    if plan is not None and plan.is_parametrized:
        metafunc.fixturenames.append(_RANKS)
        metafunc.parametrize(_RANKS, plan.ranks, ids=[f"ranks{count}" for count in plan.ranks])


@pytest.hookimpl(wrapper=True, trylast=True)  # the innermost wrapper, so that other plugins see plain functions
def pytest_pycollect_makeitem(collector: pytest.Collector, obj: object) -> Generator[None, Any, Any]:
    """Turn marked tests into plain functions, and hide their parameters ``world`` and ``sim_seed``."""
    function: Any = obj
    if type(obj) in (staticmethod, classmethod):  # isinstance would evaluate __class__ of each object in the module
        function = function.__func__
    if type(function) is not FunctionType or not _is_marked(collector, function):
        return (yield)
    parameters = inspect.signature(function).parameters
    shown = [parameter for parameter in parameters.values() if parameter.name not in _INJECTED]
    with pytest.MonkeyPatch.context() as patch:
        if inspect.iscoroutinefunction(function):
            patch.setattr(function, "__signature__", inspect.Signature(shown), raising=False)
        made = yield
    for item in made if isinstance(made, list) else [made]:
        if isinstance(item, pytest.Function):
            _make_plain(item, [name for name in _INJECTED if name in parameters])
    return made


def _is_marked(collector: pytest.Collector, function: FunctionType) -> bool:
    marks = getattr(function, "pytestmark", [])
    marks = marks if isinstance(marks, list) else [marks]
    return any(mark.name == "sim" for mark in marks) or collector.get_closest_marker("sim") is not None


def _make_plain(item: pytest.Function, injected: Sequence[str]) -> None:
    """Replace a test's coroutine function with a plain function that runs simulations."""
    test = item.obj
    plan = _plan(item)
    assert plan is not None
    if not inspect.iscoroutinefunction(test):
        _refuse(item, "must be on a coroutine test (async def); a plain test can use the fixture simulate")
    if "world" not in injected:
        _refuse(item, "must be on a test that takes world, as in async def test(world)")

    @functools.wraps(test)
    def simulate_all(**arguments: Any) -> None:
        __tracebackhide__ = True

        async def run_rank(world: World, seed: int) -> None:
            __tracebackhide__ = True
            values = {"world": world, "sim_seed": seed}
            await test(**{name: values[name] for name in injected}, **arguments)

        ranks: Any = item.callspec.params[_RANKS] if plan.is_parametrized else plan.ranks[0]
        for index, seed in enumerate(plan.seeds):
            record = _Record(ranks, seed, is_seed_chosen=True, earlier_seeds=plan.seeds[:index])
            item.stash[_RECORD] = record
            report = _simulate(record, run_rank, (seed,), plan.settings)
            _check(record, report, test.__code__)

    item.obj = simulate_all
    item.stash[_RECORD] = None
    # If the module has a pytest-asyncio mark, that plugin would warn that this test is no longer a coroutine.
    if item.get_closest_marker("asyncio") is not None:
        item.add_marker(pytest.mark.filterwarnings("ignore:The test .* is marked with '@pytest.mark.asyncio'"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail a test whose ``sim`` mark would have no effect."""
    if isinstance(item, pytest.Function) and _RECORD not in item.stash and item.get_closest_marker("sim") is not None:
        _refuse(item, "must be on a coroutine function, in a module or in a class that is not a unittest.TestCase")


# -- running ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Record:
    """Records how the last simulation of a test ended, for the failure report.

    Attributes:
        is_seed_chosen: Whether ``--sim-seed`` can choose the seed.
        report: Report of the simulation, even after a deadlock.
        waiting: After a deadlock or a time limit, the wait of each task.
        earlier_seeds: Seeds that the test has already run with the same fixtures.
        returned: Ranks whose ``main`` has returned.
        raised: Exception of ``main`` and its virtual time, keyed by rank, in chronological order.
    """

    ranks: int
    seed: int
    is_seed_chosen: bool
    faults: Sequence[Fault] = ()
    trace: Trace | None = None
    report: SimReport[Any] | None = None
    waiting: Sequence[str] = ()
    earlier_seeds: Sequence[int] = ()
    returned: set[int] = field(default_factory=set)
    raised: dict[int, tuple[BaseException, float]] = field(default_factory=dict)

    def begin(self, faults: Sequence[Fault], trace: Trace, _: object) -> None:
        """Store the faults and the trace of a simulation.

        Called when it starts, after its arguments have been checked.
        """
        self.faults, self.trace = faults, trace

    def errors(self) -> dict[int, BaseException]:
        """Return the error that ended each rank, keyed by rank, in chronological order.

        For a rank whose ``main`` raised RankLostError or was cancelled, this is the error in the simulation's report.
        """
        results = self.report.results if self.report is not None else ()
        errors = {}
        for rank in dict.fromkeys([*self.raised, *range(len(results))]):
            error = results[rank] if results else None
            if isinstance(error, BaseException):
                own = self.raised[rank][0] if rank in self.raised else error
                errors[rank] = error if isinstance(own, (RankLostError, asyncio.CancelledError)) else own
        return errors

    def failures(self) -> dict[int, BaseException]:
        """Return the errors that fail the test, keyed by rank. RankLostErrors are last.

        After a rank is killed, the other ranks cannot end normally, because the final barrier lacks that rank. Their
        RankLostErrors are therefore failures only on ranks whose ``main`` has not returned. A rank's exit because of a
        simulated signal is not a failure, nor is the RankLostError that it causes on other ranks.
        """
        from asyncdist.simulation.faults import KILLING

        errors = self.errors()
        interrupted = self.report.interrupted_ranks() if self.report is not None else set()
        has_kill = any(isinstance(fault, KILLING) for fault in self.faults)

        def is_failure(rank: int, error: BaseException) -> bool:
            if isinstance(error, (SystemExit, KeyboardInterrupt)) and rank in interrupted:
                return False
            if isinstance(error, SystemExit):
                return bool(rank_program.exit_code(error.code))
            if isinstance(error, RankLostError) and (has_kill or interrupted):
                lost: Any = error.facts.get("rank")
                if lost in interrupted:
                    return False
                return rank not in self.returned and not isinstance(errors.get(lost), RankLostError)
            return True

        failures = [(rank, error) for rank, error in errors.items() if is_failure(rank, error)]
        return dict(sorted(failures, key=lambda failure: isinstance(failure[1], RankLostError)))


_RECORD: Final = pytest.StashKey[_Record | None]()


def _simulate(record: _Record, main: Any, args: tuple[Any, ...], settings: dict[str, Any]) -> SimReport[Any]:
    """Run ``asyncdist.simulate`` with ``return_exceptions=True``, and record and return its report."""
    __tracebackhide__ = True
    from asyncdist.simulation.simulate import STOPPED, observer, simulate

    watched = _watch(main, record) if inspect.iscoroutinefunction(main) else main  # simulate refuses plain functions
    token = observer.set(record.begin)
    try:
        record.report = simulate(
            watched, *args, ranks=record.ranks, seed=record.seed, return_exceptions=True, **settings
        )
    except STOPPED as error:
        record.report = error.report
        record.waiting = [line.strip() for line in error.message.splitlines()[1:]]
        error.__traceback__ = None  # hides the simulator's own frames
        raise
    except (TypeError, ValueError, LocalProtocolError) as error:
        if record.trace is None:  # an argument was invalid
            error.__traceback__ = None
        raise
    finally:
        observer.reset(token)
    return record.report


def _watch(main: Callable[..., Coroutine[Any, Any, Any]], record: _Record) -> Callable[..., Coroutine[Any, Any, Any]]:
    """Wrap ``main`` to record how it ends, because the simulation's report only shows how the whole rank ends."""

    @functools.wraps(main)
    async def watched(world: World, *args: Any) -> Any:
        __tracebackhide__ = True
        try:
            value = await main(world, *args)
        except BaseException as error:
            record.raised[world.rank] = error, world.time()
            raise
        record.returned.add(world.rank)
        return value

    return watched


def _check(record: _Record, report: SimReport[Any], code: CodeType) -> None:
    """Raise the error of a failed rank, or of a fault that did not occur.

    If the error's traceback does not contain the test's code, remove the traceback.
    """
    __tracebackhide__ = True
    try:
        for error in record.failures().values():
            raise error
        report.check_faults()
    except (AsyncdistError, AssertionError) as error:
        if code not in _codes(error.__traceback__):
            error.__traceback__ = None
        raise


def _codes(trace: TracebackType | None) -> Iterator[CodeType]:
    while trace is not None:
        yield trace.tb_frame.f_code
        trace = trace.tb_next


# -- fixtures ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def sim_seed(request: pytest.FixtureRequest) -> int:
    """Return the seed of ``--sim-seed``, or 0. A ``@pytest.mark.sim`` test gets the current run's seed instead."""
    item = request.node
    if item.get_closest_marker("sim") is not None:
        _refuse(
            item,
            "runs many seeds on the same fixtures, so the test itself must take sim_seed instead of one of its "
            "fixtures",
        )
    seed: int | None = request.config.getoption("sim_seed")
    return 0 if seed is None else seed


@pytest.fixture
def simulate(request: pytest.FixtureRequest, sim_seed: int) -> Callable[..., SimReport[Any]]:
    """Return ``asyncdist.simulate`` with the default seed ``sim_seed``. A failed test reports its last simulation."""
    item = request.node
    item.stash[_RECORD] = None

    def simulate(
        main: Callable[..., Coroutine[Any, Any, Any]],
        *args: Any,
        ranks: int,
        seed: int | None = None,
        return_exceptions: bool = False,
        **settings: Any,
    ) -> SimReport[Any]:
        __tracebackhide__ = True
        record = item.stash[_RECORD] = _Record(ranks, sim_seed if seed is None else seed, is_seed_chosen=seed is None)
        report = _simulate(record, main, args, settings)
        if not return_exceptions:
            report.check_ranks()
        return report

    return simulate


# -- hidden packages -------------------------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Add a note to the report if a test module cannot import ``protocols``, because another module shadows it."""
    report = yield
    if report.failed and isinstance(collector, pytest.Module) and "protocols" in str(report.longrepr):
        note = rank_program.find_shadowing()
        if note is not None:
            report.sections.append(("asyncdist", note))
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Add a note to the error if a test cannot import ``protocols``, because another module shadows it."""
    del item
    try:
        yield
    except ImportError as error:
        rank_program.explain_import(error)
        raise


# -- failure reports --------------------------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the section ``simulation`` to the report of a failed test."""
    report = yield
    record = item.stash.get(_RECORD, None)
    if record is None or call.when != "call":
        return report
    if report.failed:
        text = "\n".join(_lines(item, record))
        add = getattr(report.longrepr, "addsection", None)
        if add is not None:  # a section of longrepr is shown even with --show-capture=no
            add("simulation", text)
        else:
            report.sections.append(("simulation", text))
    item.stash[_RECORD] = None  # frees the trace (megabytes), because items exist until the session ends
    return report


def _lines(item: pytest.Item, record: _Record) -> Iterator[str]:
    report = record.report
    facts = [f"seed {record.seed}", plural(record.ranks, "rank")]
    if report is not None:
        facts += [f"{report.message_count} messages", f"{report.virtual_time_s:.9f} s of virtual time"]
    yield ", ".join(facts)
    if report is not None:
        yield from _limited(_ends(record.errors()))
    if record.trace is not None:
        events = record.trace.events()
        fired = {event.a for event in events if event.kind == "fault"}
        for index, fault in enumerate(record.faults):
            has_fired = report.faults_fired[index] if report is not None else index in fired
            yield f"{fault!r}: {'fired' if has_fired else 'did not fire'}"
        if record.waiting:
            yield "waiting:"
            yield from _limited([f"  {line}" for line in record.waiting])
        title, events = _story(record, events)
        yield f"{title}{', its end' if len(events) > _EVENT_COUNT else ''}:"
        yield from [f"  {event}" for event in events[-_EVENT_COUNT:]] or ["  nothing"]
    yield from _repeat_lines(item, record)


def _ends(errors: dict[int, BaseException]) -> list[str]:
    """Return one line for each rank that failed itself, and one line for all ranks that lost another rank."""
    lines = []
    bereft = sorted(rank for rank, error in errors.items() if isinstance(error, RankLostError))
    for rank, error in sorted(errors.items()):
        if rank not in bereft:
            text = str(error).strip().partition("\n")[0]
            line = f"rank {rank}: {type(error).__name__}{': ' if text else ''}{text}"
            lines.append(line if len(line) <= _LINE_LENGTH else f"{line[:_LINE_LENGTH]}...")
    if bereft:
        lines.append(f"{ranks_in_words(bereft)}: RankLostError")
    return lines


def _limited(lines: Sequence[str]) -> list[str]:
    more = len(lines) - _LINE_COUNT
    return list(lines) if more <= 0 else [*lines[:_LINE_COUNT], f"and {more} more"]


def _story(record: _Record, events: tuple[TraceEvent, ...]) -> tuple[str, tuple[TraceEvent, ...]]:
    """Return a title, and the trace's events until the first failure (all events if no ``main`` has failed)."""
    rank = next(iter(record.failures()), None)
    if rank is None or rank not in record.raised:
        return "trace", events
    time_s = record.raised[rank][1]

    def is_later(event: TraceEvent) -> bool:
        is_end = (event.kind, event.a) == ("end", rank) or (event.kind, event.a, event.tag) == ("send", rank, CONTROL)
        return event.time_s > time_s or (event.time_s == time_s and is_end)

    count = next((index for index, event in enumerate(events) if is_later(event)), len(events))
    return f"trace until rank {rank} failed", events[:count]


def _repeat_lines(item: pytest.Item, record: _Record) -> Iterator[str]:
    """Yield the command that reproduces the failure, and notes on the fixtures and seeds that may have caused it."""
    scopes = _fixture_scopes(item)
    shared = [f"{name} (scope: {scope})" for name, scope in scopes.items() if scope != "function"]
    if shared:
        yield f"other tests may have changed {', '.join(shared)} before; the command below does not run those tests"
    seeds = item.config.getoption("sim_seeds")
    if scopes and record.earlier_seeds:
        count = len(record.earlier_seeds)
        before = f"{count} seed{'s' * (count > 1)} before this one had the same {', '.join(scopes)}"
        yield f"{before}, so the line below runs them too; alone: {_command(item, f' --sim-seed {record.seed}')}"
        yield f"repeat: {_command(item, '' if seeds is None else f' --sim-seeds {seeds}')}"
    else:
        yield f"repeat: {_command(item, f' --sim-seed {record.seed}' if record.is_seed_chosen else '')}"


def _fixture_scopes(item: pytest.Item) -> dict[str, str]:
    asked = list(inspect.signature(getattr(item, "obj")).parameters)  # noqa: B009 - only some items have one
    asked += [name for mark in item.iter_markers("usefixtures") for name in mark.args]
    definitions: dict[str, Any] = getattr(item, "_fixtureinfo").name2fixturedefs  # noqa: B009
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    own = ("sim_seed", "simulate", _RANKS)
    found = {name: definitions[name][-1] for name in asked if name in definitions and name not in own}
    return {name: definition.scope for name, definition in found.items() if name not in parameters}


def _command(item: pytest.Item, options: str) -> str:
    """Return the command that runs this test in the folder in which pytest was started."""
    path = os.path.relpath(item.path, item.config.invocation_params.dir)
    name = shlex.quote(f"{path}::{item.nodeid.partition('::')[2]}")
    from asyncdist.simulation.exploration.repro_command import hash_seed_prefix

    return f"{hash_seed_prefix()}pytest {name}{options}"
