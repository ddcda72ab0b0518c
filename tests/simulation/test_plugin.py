"""The pytest plugin, by running pytest on small test files; and that importing asyncdist costs next to nothing."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import asyncdist
import asyncdist.simulation  # before any inner session: what that imports first, it takes back

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"mpi4py", "msgspec", "numpy", "torch", "uvloop"}
HEAD = """
import asyncio
import dataclasses
import pytest
import torch
import asyncdist as ad
from asyncdist.simulation import Compute, Interrupt, Kill, Link, Network, Stall

"""


def run_tests(pytester: pytest.Pytester, source: str, *options: str, ini: str = "") -> pytest.RunResult:
    """Run these tests; the module has what HEAD imports."""
    pytester.makeini(f"[pytest]\naddopts = --strict-markers\nasyncio_default_fixture_loop_scope = function\n{ini}")
    pytester.makepyfile(test_it=HEAD + textwrap.dedent(source))
    return pytester.runpytest_inprocess(*options)


def sections(result: pytest.RunResult) -> list[str]:
    """The sections ``simulation`` of the output, one for each test that failed."""
    return re.findall(r"^-+ simulation -+\n(.*?^repeat: [^\n]*)$", result.stdout.str(), re.MULTILINE | re.DOTALL)


def section(result: pytest.RunResult) -> list[str]:
    """The lines of the only one."""
    found = sections(result)
    assert len(found) == 1, result.stdout.str()
    return found[0].splitlines()


def repeat_options(result: pytest.RunResult) -> list[str]:
    """The arguments on the line that repeats a failure."""
    line = section(result)[-1]
    assert line.startswith("repeat: pytest ")
    return shlex.split(line)[2:]


# -- importing asyncdist ----------------------------------------------------------------------------------------------


def fresh(code: str) -> str:
    """What a new interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.workers
@pytest.mark.parametrize("module", ["asyncdist", "asyncdist.cli", "asyncdist.pytest_plugin"])
def test_nothing_heavy_is_imported_before_it_is_used(module: str) -> None:
    loaded = set(fresh(f"import {module}, sys; print(*sys.modules)").split())
    assert module in loaded and not loaded & HEAVY


@pytest.mark.workers
def test_the_first_use_imports_what_it_needs() -> None:
    """The other half: what the test above looks for would be seen."""
    loaded = set(fresh("import asyncdist, sys; asyncdist.run; print(*sys.modules)").split())
    assert {"torch", "asyncdist.runtime.run"} <= loaded


def test_every_name_is_what_the_type_checker_takes_it_for() -> None:
    """A checker reads the stub, an interpreter asks ``__getattr__``: both say the same of all names."""
    tree = ast.parse(Path(asyncdist.__file__).with_suffix(".pyi").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    homes = {alias.name: node.module for node in imports for alias in node.names}
    assert homes.keys() == set(asyncdist.__all__) and len(asyncdist.__all__) == len(homes) > 80
    for name, module in homes.items():
        wanted = f"asyncdist.{module or name}"
        found = importlib.import_module(wanted)
        assert getattr(asyncdist, name) is (found if module is None else getattr(found, name)), name


@pytest.mark.workers
def test_names_submodules_and_dir_in_a_fresh_interpreter() -> None:
    seen = fresh(
        "import asyncdist as ad\n"
        "assert set(ad.__all__) <= set(dir(ad)) and sorted(dir(ad)) == dir(ad)\n"
        "print(ad.simulation.Kill.__name__, ad.errors.__name__, ad.World.__module__, hasattr(ad, 'rnu'))\n"
        "from asyncdist import *\n"
        "print(run is ad.run, simulate is ad.simulate, all(name in globals() for name in ad.__all__))\n"
        "try:\n    from asyncdist import rnu\n"
        "except ImportError as error:\n    print(error.name, error.msg.partition(' (')[0])\n"
    )
    assert seen.splitlines() == [
        "Kill asyncdist.errors asyncdist.runtime.world False",
        "True True True",
        "asyncdist cannot import name 'rnu' from 'asyncdist'",
    ]


@pytest.mark.workers
def test_a_session_that_simulates_nothing_imports_nothing_heavy(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        f"""
        import sys

        def test_light(pytestconfig):
            assert pytestconfig.pluginmanager.hasplugin("asyncdist")
            assert not {HEAVY!r} & set(sys.modules)
        """
    )
    # Its own plugins alone: what others import is theirs.
    result = pytester.run(sys.executable, "-c", "import os, sys; os.environ['PYTEST_DISABLE_PLUGIN_AUTOLOAD'] = '1'; "
                          "import pytest; sys.exit(pytest.main(['-p', 'asyncdist']))")  # fmt: skip
    result.assert_outcomes(passed=1)


# -- what runs --------------------------------------------------------------------------------------------------------

COUNTED = """
RUNS = []

@pytest.mark.sim(ranks=3{options})
async def test_counted(world, sim_seed):
    await ad.barrier()
    RUNS.append((sim_seed, world.rank, world.size))

def test_the_count():
    assert [seed for seed, rank, size in RUNS if rank == 0] == {seeds}
    assert sorted(RUNS) == sorted((seed, rank, 3) for seed in {seeds} for rank in range(3))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "command_line", "seeds"),
    [
        ("", (), "list(range(20))"),
        (", seeds=4", (), "[0, 1, 2, 3]"),
        (", seeds=(7, -2, 9)", (), "[7, -2, 9]"),
        (", seeds=range(5, 8)", (), "[5, 6, 7]"),
        (", seeds=4", ("--sim-seed", "17"), "[17]"),
        (", seeds=(7, 9)", ("--sim-seed", "17"), "[17]"),
        (", seeds=4", ("--sim-seeds", "6"), "[0, 1, 2, 3, 4, 5]"),
        ("", ("--sim-seeds=2",), "[0, 1]"),
        (", seeds=(7, 9)", ("--sim-seeds", "6"), "[7, 9]"),
    ],
)
def test_every_seed_runs_once_on_every_rank(
    pytester: pytest.Pytester, options: str, command_line: tuple[str, ...], seeds: str
) -> None:
    run_tests(pytester, COUNTED.format(options=options, seeds=seeds), *command_line).assert_outcomes(passed=2)


@pytest.mark.parametrize(
    ("options", "ini"),
    [
        ((), "asyncio_mode = auto"),
        ((), "asyncio_mode = strict"),
        (("-p", "no:asyncio", "-p", "no:anyio"), ""),
    ],
    ids=["auto", "strict", "without"],
)
def test_it_lives_with_pytest_asyncio(pytester: pytest.Pytester, options: tuple[str, ...], ini: str) -> None:
    """A loop that runs already would be refused by simulate; a coroutine nobody awaits would be a warning."""
    source = COUNTED.format(options=", seeds=2", seeds="[0, 1]")
    if ini:
        source = f"{source}\n@pytest.mark.asyncio\nasync def test_ordinary():\n    await asyncio.sleep(0)\n"
    result = run_tests(pytester, source, *options, ini=f"{ini}\nfilterwarnings = error" if ini else "")
    result.assert_outcomes(passed=3 if ini else 2)


@pytest.mark.slow
def test_a_module_whose_every_test_is_marked_for_asyncio(pytester: pytest.Pytester) -> None:
    source = """
        pytestmark = pytest.mark.asyncio

        @pytest.mark.sim(ranks=2)
        async def test_it(world):
            await ad.barrier()
    """
    run_tests(pytester, source, ini="filterwarnings = error").assert_outcomes(passed=1)


@pytest.mark.slow
def test_several_numbers_of_ranks_are_several_tests(pytester: pytest.Pytester) -> None:
    source = """
        @pytest.mark.sim(ranks=[1, 2, 5], seeds=2)
        @pytest.mark.parametrize("factor", [2, 3])
        async def test_sum(world, factor):
            total = await ad.all_reduce(torch.full((1,), factor))
            assert total.item() == factor * world.size and world.size != 5
    """
    result = run_tests(pytester, source, "-v")
    result.assert_outcomes(passed=4, failed=2)
    result.stdout.re_match_lines([r".*::test_sum\[.*ranks1.*\] PASSED", r".*::test_sum\[.*ranks5.*\] FAILED"])
    run_tests(pytester, source, "-k", "ranks2").assert_outcomes(passed=2, deselected=4)


@pytest.mark.slow
def test_fixtures_parameters_classes_and_a_world_of_the_users(pytester: pytest.Pytester) -> None:
    source = """
        @pytest.fixture
        def world():
            pytest.fail("not for simulated tests")

        @pytest.fixture(params=["a", "b"])
        def letter(request):
            return request.param

        class TestIt:
            @pytest.fixture(autouse=True)
            def prepare(self):
                self.prepared = True

            @pytest.mark.sim(ranks=2, seeds=2)
            @pytest.mark.parametrize("number", [1, 2, 3])
            async def test_method(self, world, number, letter, tmp_path, request):
                assert self.prepared and world.size == 2 and number < 4 and letter in "ab" and tmp_path.is_dir()
                assert request.node.name.startswith("test_method") and request.instance is self

            @pytest.mark.sim(ranks=2)
            @staticmethod
            async def test_static(letter, world):
                assert world.size == 2

        @pytest.mark.usefixtures("world")
        def test_of_theirs():
            pass
    """
    run_tests(pytester, source).assert_outcomes(passed=8, errors=1)


def test_a_mark_completes_that_of_its_module(pytester: pytest.Pytester) -> None:
    source = """
        pytestmark = pytest.mark.sim(ranks=3, seeds=2)

        async def helper(world):
            return world.size

        async def test_three(world):
            assert await helper(world) == 3

        class TestIt:
            pytestmark = pytest.mark.sim(ranks=5)

            @pytest.mark.sim(seeds=[8])
            async def test_five(self, world, sim_seed):
                assert (world.size, sim_seed) == (5, 8)
    """
    run_tests(pytester, source).assert_outcomes(passed=2)


@pytest.mark.slow
def test_the_settings_reach_the_simulation(pytester: pytest.Pytester) -> None:
    source = """
        @pytest.mark.sim(ranks=2, seeds=2, compute=Compute(step_s=3.0), network=Network(link=Link(latency_s=0.25)))
        async def test_times(world):
            await world.safe_point()
            assert world.time() == 3.0
            await ad.barrier()
            assert world.time() >= 3.25

        @pytest.mark.sim(ranks=2, seeds=2, until_s=5.0)
        async def test_until(world):
            while True:
                await world.safe_point()
                assert world.time() <= 5.0
    """
    result = run_tests(pytester, source)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        ["E *TimeLimitError: until_s=5 is reached at 5.0* s of virtual time, and these have not ended:"]
    )


def test_the_line_repeats_what_fixtures_held(pytester: pytest.Pytester) -> None:
    """They are made once for all seeds, so that the failing seed alone passes."""
    source = """
        @pytest.fixture
        def store():
            return []

        @pytest.fixture(scope="module")
        def shared():
            return []

        @pytest.mark.sim(ranks=2, seeds=9)
        async def test_store(world, store):
            store.append(world.rank)
            assert len(store) < 6

        @pytest.mark.sim(ranks=2, seeds=9)
        async def test_shared(world, shared, sim_seed):
            assert sim_seed == 0

        @pytest.mark.sim(ranks=2, seeds=9)
        @pytest.mark.parametrize("number", [1])
        async def test_without(world, sim_seed, number):
            assert sim_seed == 0
    """
    store, shared, without = sections(run_tests(pytester, source))
    name = "test_it.py::test"
    assert store.endswith(f"\nrepeat: pytest {name}_store")
    assert (
        f"2 seeds before this one had the same store, so the line below runs them, too; alone: pytest {name}" in store
    )
    assert "\nother tests may have changed shared (scope: module) before; the line below does not run them\n" in shared
    assert shared.endswith(f"\nrepeat: pytest {name}_shared")
    assert "before" not in without
    assert without.endswith(f"\nrepeat: pytest '{name}_without[1]' --sim-seed 1")
    again = pytester.runpytest(*shlex.split(store.splitlines()[-1])[2:])
    again.assert_outcomes(failed=1)


@pytest.mark.slow
def test_ranks_that_get_a_signal_and_those_who_hear_of_it(pytester: pytest.Pytester) -> None:
    """The signal of the plan is no failure, and Ctrl-C on a simulated rank does not end the session."""
    source = """
        @pytest.mark.sim(ranks=3, seeds=2, faults=[Interrupt(1, at_s=0.005)])
        async def test_term(world):
            await world.sleep(1.0)

        @pytest.mark.sim(ranks=3, seeds=2, faults=[Interrupt(1, at_s=0.005, signal="SIGINT")])
        async def test_int(world):
            while True:
                await world.safe_point()
                await ad.barrier()

        @pytest.mark.sim(ranks=3, seeds=2, faults=[Interrupt(1, at_s=0.005), Interrupt(1, at_s=0.006)])
        async def test_twice(world):
            try:
                await world.sleep(1.0)
            finally:
                await asyncio.sleep(1.0)

        @pytest.mark.sim(ranks=3, seeds=2, faults=[Interrupt(1, at_s=0.005)])
        async def test_fails_while_it_tidies_up(world):
            try:
                await world.sleep(1.0)
            finally:
                assert world.rank != 1

        @pytest.mark.sim(ranks=2, seeds=2, faults=[Interrupt(1, at_s=500.0)])
        async def test_never_comes(world):
            if world.rank == 1:
                raise SystemExit(143)
    """
    result = run_tests(pytester, source, "-rA")
    result.stdout.fnmatch_lines_random(
        [
            "PASSED test_it.py::test_term",
            "PASSED test_it.py::test_int",
            "PASSED test_it.py::test_twice",
            "FAILED test_it.py::test_fails_while_it_tidies_up - *assert 1 != 1*",
            "FAILED test_it.py::test_never_comes - SystemExit: 143",
        ]
    )


@pytest.mark.slow
def test_killed_ranks_and_those_who_lose_them(pytester: pytest.Pytester) -> None:
    """A test may expect the loss; without that it fails. That the last barrier lacks the killed rank is no failure."""
    source = """
        KILLED = pytest.mark.sim(ranks=4, seeds=5, faults=[Kill(1, at_s=0.005)])

        async def work(world):
            while True:
                await world.safe_point()
                await ad.barrier()

        @KILLED
        async def test_expects_it(world):
            with pytest.raises(ad.RankLostError):
                await work(world)
            assert world.rank != 1

        @KILLED
        async def test_expects_it_and_goes_on(world):
            with pytest.raises(ad.RankLostError):
                await work(world)
            for _ in range(world.rank * 100):
                await world.safe_point()

        @KILLED
        async def test_does_not(world):
            await work(world)

        @KILLED
        async def test_fails_afterwards(world):
            with pytest.raises(ad.RankLostError):
                await work(world)
            assert world.rank != 2

        @pytest.mark.sim(ranks=2)
        async def test_a_good_exit(world):
            if world.rank == 0:
                raise SystemExit(0)

        @pytest.mark.sim(ranks=2)
        async def test_a_bad_exit(world):
            if world.rank == 0:
                raise SystemExit("broken")
    """
    result = run_tests(pytester, source, "-rA")
    result.stdout.fnmatch_lines_random(
        [
            "PASSED test_it.py::test_expects_it",
            "PASSED test_it.py::test_expects_it_and_goes_on",
            "FAILED test_it.py::test_does_not - *RankLostError*",
            "FAILED test_it.py::test_fails_afterwards - *assert 2 != 2*",
            "PASSED test_it.py::test_a_good_exit",
            "FAILED test_it.py::test_a_bad_exit - SystemExit: broken",
        ]
    )


def test_an_invariant_that_breaks_shows_the_faults_and_the_trace(pytester: pytest.Pytester) -> None:
    source = """
        def test_invariant(simulate):
            async def main(world):
                for _ in range(5):
                    await world.safe_point()
                    seen.append(world.rank)

            def check():
                assert len(seen) < 3

            seen = []
            simulate(main, ranks=2, faults=[Stall(0, at_s=0.0, duration_s=1e-3), Kill(1, at_s=9.0)], after_event=check)
    """
    result = run_tests(pytester, source)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E *assert 3 < 3"])
    lines = section(result)
    assert lines[0] == "seed 0, 2 ranks"
    assert lines[1].startswith("Stall(") and lines[1].endswith(": fired")
    assert lines[2].startswith("Kill(") and lines[2].endswith(": did not fire")
    assert lines[3] == "trace:" and sum(" compute rank " in line for line in lines) >= 3


LEFTOVER = """
@dataclasses.dataclass(frozen=True)
class Word:
    text: str

@pytest.mark.sim(ranks=2, seeds=2{option})
async def test_leftover(world):
    words = world.channel(Word, tag=5)
    if world.rank == 0:
        await words.send(Word("unheard"), 1)
    await ad.barrier()
    await world.sleep(1.0)
"""


def test_what_is_left_over_fails_unless_strict_is_off(pytester: pytest.Pytester) -> None:
    result = run_tests(pytester, LEFTOVER.format(option=""))
    result.assert_outcomes(failed=1)
    assert "rank 1: LocalProtocolError: rank 1 ended with" in "\n".join(section(result))
    run_tests(pytester, LEFTOVER.format(option=", strict=False")).assert_outcomes(passed=1)


def test_skip_and_xfail(pytester: pytest.Pytester) -> None:
    source = """
        @pytest.mark.sim(ranks=2)
        async def test_skipped(world):
            pytest.skip("not today")

        @pytest.mark.xfail(raises=ZeroDivisionError, strict=True)
        @pytest.mark.sim(ranks=2)
        async def test_failing(world):
            1 / world.rank

        @pytest.mark.xfail(raises=ad.DeadlockError, strict=True)
        @pytest.mark.sim(ranks=2)
        async def test_stuck(world):
            await asyncio.get_running_loop().create_future()
    """
    run_tests(pytester, source).assert_outcomes(skipped=1, xfailed=2)


# -- failures ---------------------------------------------------------------------------------------------------------

FAILS_WITH_SEED_3 = """
async def exchange(world, sim_seed):
    total = await ad.all_reduce(torch.ones(1))
    if world.rank == 2 and sim_seed == 3:
        assert total.item() == 5

@pytest.mark.sim(ranks=4)
async def test_three(world, sim_seed):
    for _ in range(20):
        await world.safe_point()
    await exchange(world, sim_seed)
"""


@pytest.mark.slow
def test_a_failure_shows_the_code_the_seed_and_how_to_repeat_it(pytester: pytest.Pytester) -> None:
    result = run_tests(pytester, FAILS_WITH_SEED_3)
    result.assert_outcomes(failed=1)
    text = result.stdout.str()
    assert "E           assert 4.0 == 5" in text or "E       assert 4.0 == 5" in text, "rewritten"
    assert "await exchange(world, sim_seed)" in text and "simulate.py" not in text and "pytest_plugin.py" not in text
    lines = section(result)
    assert re.fullmatch(r"seed 3, 4 ranks, \d+ messages, \d+\.\d{9} s of virtual time", lines[0])
    assert lines[1:3] == ["rank 2: AssertionError: assert 4.0 == 5", "ranks 0, 1, 3: RankLostError"]
    assert repeat_options(result) == ["test_it.py::test_three", "--sim-seed", "3"]

    again = pytester.runpytest_inprocess(*repeat_options(result))
    assert section(again) == lines, "the same run, event by event"
    pytester.runpytest_inprocess("test_it.py::test_three", "--sim-seed", "4").assert_outcomes(passed=1)


def test_the_trace_is_the_last_part_until_the_failure(pytester: pytest.Pytester) -> None:
    """What the failing rank then says to the others, and they to each other, would fill it."""
    lines = section(run_tests(pytester, FAILS_WITH_SEED_3))
    start = lines.index("trace until rank 2 failed, its end:")
    events = lines[start + 1 : -1]
    assert len(events) == 30 and all(line.startswith("  ") for line in events)
    report = asyncdist.simulate(_like_test_three, ranks=4, seed=3)
    kept = [f"  {event}" for event in report.trace]
    first = kept.index(events[0])
    assert kept[first : first + 30] == events
    assert re.match(r"  \S+ send 2 -> \d, tag 7002,", kept[first + 30])


async def _like_test_three(world: asyncdist.World) -> None:
    import torch

    for _ in range(20):
        await world.safe_point()
    await asyncdist.all_reduce(torch.ones(1))
    assert world.rank != 2


@pytest.mark.slow
def test_it_is_shown_with_each_option_that_hides_other_output(pytester: pytest.Pytester) -> None:
    for options in (["--show-capture=no"], ["--tb=short"], ["--tb=native"], ["--tb=line"]):
        result = run_tests(pytester, FAILS_WITH_SEED_3, *options)
        if options == ["--tb=line"]:
            continue  # one line is what was asked for
        assert section(result)[0].startswith("seed 3, "), options


def test_the_first_rank_to_fail_is_shown(pytester: pytest.Pytester) -> None:
    source = """
        @pytest.mark.sim(ranks=4, seeds=1, compute=Compute(step_s=1.0, factors={0: 8.0, 1: 4.0, 2: 4.0}))
        async def test_all_fail(world):
            await world.compute(lambda: None)
            await world.safe_point()
            raise ValueError(f"of rank {world.rank}")
    """
    result = run_tests(pytester, source)
    result.stdout.fnmatch_lines(["E * ValueError: of rank 3"])
    assert section(result)[1:3] == ["rank 3: ValueError: of rank 3", "ranks 0, 1, 2: RankLostError"]


@pytest.mark.slow
def test_a_long_list_is_cut(pytester: pytest.Pytester) -> None:
    source = """
        @pytest.mark.sim(ranks=60, seeds=1)
        async def test_all_fail(world):
            raise ValueError("x" * 1000)
    """
    lines = section(run_tests(pytester, source))
    failures = [line for line in lines if "ValueError" in line]
    assert len(failures) == 40 and max(map(len, failures)) < 200
    assert "and 20 more" in lines


def test_a_failure_of_a_spawned_task(pytester: pytest.Pytester) -> None:
    source = """
        async def fail():
            raise KeyError("spawned")

        @pytest.mark.sim(ranks=2)
        async def test_spawned(world):
            if world.rank == 1:
                world.spawn(fail())
            await world.sleep(1.0)
    """
    result = run_tests(pytester, source)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*raise KeyError(*", "*KeyError: 'spawned'*"])
    assert section(result)[1].startswith("rank 1: ExceptionGroup: ")


def test_a_deadlock_says_who_waits_for_whom(pytester: pytest.Pytester) -> None:
    source = """
        async def wait_for_nothing():
            await asyncio.get_running_loop().create_future()

        @pytest.mark.sim(ranks=3, faults=[Stall(2, at_s=0.0, duration_s=1.0)])
        async def test_stuck(world):
            await world.safe_point()
            if world.rank == 1:
                await wait_for_nothing()
            await world.receive_stream(torch.zeros(4), 1)
    """
    result = run_tests(pytester, source)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E *DeadlockError: nothing is left to happen at *"])
    assert "simulate.py" not in result.stdout.str()
    lines = section(result)
    assert lines[0].startswith("seed 0, 3 ranks, 2 messages, ")
    assert lines[1] == "Stall(rank=2, at_s=0.0, duration_s=1.0): fired"
    assert lines[2] == "waiting:"
    assert lines[3].startswith("  rank 0, main of rank 0: stream from rank 1, tag 8001")
    assert lines[4].startswith("  rank 1, main of rank 1: ") and "in wait_for_nothing (" in lines[4]
    source_lines = (pytester.path / "test_it.py").read_text().splitlines()
    number = 1 + next(index for index, line in enumerate(source_lines) if "create_future()" in line)
    assert f"{pytester.path / 'test_it.py'}:{number}" in lines[4]
    assert lines[5].startswith("  rank 2, main of rank 2: stream from rank 1, tag 8001")
    assert lines[6] == "trace:" and any(line.endswith(" fault 0 of the plan") for line in lines[7:-1])
    assert repeat_options(result) == ["test_it.py::test_stuck", "--sim-seed", "0"]


def test_a_fault_that_does_not_fire_fails_the_test(pytester: pytest.Pytester) -> None:
    source = """
        @pytest.mark.sim(ranks=3, faults=[Kill(1, at_s=500.0), Stall(0, at_s=0.0, duration_s=1.0)])
        async def test_quick(world):
            await world.safe_point()
    """
    result = run_tests(pytester, source)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E *seed 0: these faults did not fire: Kill(rank=1, at_s=500.0*"])
    lines = section(result)
    assert lines[1].startswith("Kill(rank=1, at_s=500.0") and lines[1].endswith(": did not fire")
    assert lines[2] == "Stall(rank=0, at_s=0.0, duration_s=1.0): fired"


@pytest.mark.slow
def test_the_repeat_line_holds_from_another_folder_and_with_parameters(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function")
    folder = pytester.mkdir("some folder")
    (folder / "test_sub.py").write_text(
        "import pytest\n"
        "class TestIt:\n"
        "    @pytest.mark.sim(ranks=[2, 3], seeds=[5, 6])\n"
        "    @pytest.mark.parametrize('word', ['a b', \"it's\"])\n"
        "    async def test_it(self, world, word, sim_seed):\n"
        "        assert word == 'a b' or world.size == 2 or sim_seed == 5\n"
    )
    elsewhere = pytester.mkdir("elsewhere")
    monkeypatch.chdir(elsewhere)
    result = pytester.runpytest_inprocess("../some folder", f"--rootdir={pytester.path}")
    result.assert_outcomes(passed=3, failed=1)
    options = repeat_options(result)
    assert options[0].startswith("../some folder/test_sub.py::TestIt::test_it[") and options[1:] == ["--sim-seed", "6"]
    again = pytester.runpytest_inprocess(*options, f"--rootdir={pytester.path}")
    again.assert_outcomes(failed=1)
    assert section(again) == section(result)


# -- the fixtures -----------------------------------------------------------------------------------------------------

SIMULATES = """
def test_reports(simulate, sim_seed):
    async def main(world, word):
        await ad.barrier()
        return word * world.rank

    report = simulate(main, "ab", ranks=3{seed})
    assert report.results == ("", "ab", "abab")
    assert report.seed == {expected}
    assert report.trace_digest == ad.simulate(main, "ab", ranks=3, seed=report.seed).trace_digest
    assert {condition}
"""


@pytest.mark.parametrize(
    ("seed", "options", "expected", "repeat"),
    [
        ("", (), 0, ["--sim-seed", "0"]),
        ("", ("--sim-seed", "11"), 11, ["--sim-seed", "11"]),
        (", seed=4", (), 4, []),
        (", seed=4", ("--sim-seed", "11"), 4, []),
    ],
)
def test_the_fixture_simulate(
    pytester: pytest.Pytester, seed: str, options: tuple[str, ...], expected: int, repeat: list[str]
) -> None:
    source = SIMULATES.format(seed=seed, expected=expected, condition="report.virtual_time_s > 0")
    run_tests(pytester, source, *options).assert_outcomes(passed=1)
    source = SIMULATES.format(seed=seed, expected=expected, condition="report.virtual_time_s < 0")
    result = run_tests(pytester, source, *options)
    result.assert_outcomes(failed=1)
    lines = section(result)
    assert lines[0].startswith(f"seed {expected}, 3 ranks, ") and lines[1].startswith("trace")
    assert repeat_options(result) == ["test_it.py::test_reports", *repeat]


def test_the_fixture_simulate_shows_a_rank_that_failed_and_a_deadlock(pytester: pytest.Pytester) -> None:
    source = """
        def test_failing(simulate):
            async def main(world):
                assert world.rank == 0

            simulate(main, ranks=2).value()
    """
    result = run_tests(pytester, source)
    result.stdout.fnmatch_lines(["*simulate(main, ranks=2).value()*", "*>*assert world.rank == 0", "E *assert 1 == 0"])
    assert section(result)[1:3] == ["rank 1: AssertionError: assert 1 == 0", "rank 0: RankLostError"]
    source = """
        def test_stuck(simulate):
            async def main(world):
                await asyncio.Event().wait()

            simulate(main, ranks=2)
    """
    result = run_tests(pytester, source)
    result.stdout.fnmatch_lines([">*simulate(main, ranks=2)", "E *DeadlockError*"])
    assert "simulate.py" not in result.stdout.str()
    assert section(result)[1] == "waiting:"


BAD_CALLS = [
    ("simulate(main, ranks=0)", "ValueError: ranks is 0; "),
    ("simulate(main, ranks=2, network=3)", "TypeError: network is 3; a Network is needed"),
    ("simulate(print, ranks=2)", "TypeError: main must be a coroutine function"),
    ("simulate(main, ranks=2, faults=[Kill(7, at_s=1.0)])", "names rank 7; ranks go from 0 to 1"),
    ("simulate(main, ranks=2, sedes=3)", "unexpected keyword argument 'sedes'"),
]


def test_a_bad_argument_of_simulate_is_shown_at_the_call(pytester: pytest.Pytester) -> None:
    tests = [f"def test_{number}(simulate):\n    {call}\n" for number, (call, _) in enumerate(BAD_CALLS)]
    result = run_tests(pytester, "async def main(world): pass\n\n" + "\n".join(tests))
    result.assert_outcomes(failed=len(BAD_CALLS))
    for call, words in BAD_CALLS:
        result.stdout.fnmatch_lines([f">*{call.replace('[', '[[]')}", f"E *{words}*"])
    assert "simulate.py" not in result.stdout.str()


def test_a_failure_without_a_simulation_has_no_section(pytester: pytest.Pytester) -> None:
    source = """
        def test_before(simulate):
            assert False

        def test_plain():
            assert False

        @pytest.fixture
        def broken():
            assert False

        @pytest.mark.sim(ranks=2)
        async def test_setup(world, broken):
            pass
    """
    result = run_tests(pytester, source)
    result.assert_outcomes(failed=2, errors=1)
    assert "- simulation -" not in result.stdout.str()


# -- bad input --------------------------------------------------------------------------------------------------------


BAD_MARKS = [
    ("sim(ranks=0)", "async def test_it(world)", "needs ranks, a whole number of 1 or more *it is 0"),
    ("sim(ranks=-3)", "async def test_it(world)", "needs ranks*it is -3"),
    ("sim(ranks=2.0)", "async def test_it(world)", "needs ranks*it is 2.0"),
    ("sim(ranks=True)", "async def test_it(world)", "needs ranks*it is True"),
    ("sim(ranks='2')", "async def test_it(world)", "needs ranks*it is '2'"),
    ("sim(ranks=[2, 0])", "async def test_it(world)", "needs ranks*it is [[]2, 0]"),
    ("sim(ranks=[])", "async def test_it(world)", "needs ranks*it is [[]]"),
    ("sim()", "async def test_it(world)", "needs ranks*it is None"),
    ("sim", "async def test_it(world)", "needs ranks*it is None"),
    ("sim(4)", "async def test_it(world)", "takes its options by name, as in ranks=4; it was given 4"),
    ("sim(ranks=2, seed=3)", "async def test_it(world)", "has no option 'seed'; it has ranks, seeds, *"),
    ("sim(ranks=2, seeds=0)", "async def test_it(world)", "needs seeds, *it is 0"),
    ("sim(ranks=2, seeds=[])", "async def test_it(world)", "needs seeds, *it is [[]]"),
    ("sim(ranks=2, seeds='12')", "async def test_it(world)", "needs seeds, *it is '12'"),
    ("sim(ranks=2, seeds=iter([1]))", "async def test_it(world)", "needs seeds, *it is <list_iterator *"),
    ("sim(ranks=2, seeds=[1, 2.5])", "async def test_it(world)", "needs seeds, *it is [[]1, 2.5]"),
    ("sim(ranks=2)", "async def test_it()", "is for tests that take world, as in async def test(world)"),
    ("sim(ranks=2)", "def test_it(world)", "is for coroutine tests (async def); a plain one can take *"),
    ("sim(ranks=[2, 3])", "def test_it()", "is for coroutine tests (async def)*"),
    ("sim(ranks=2)", "async def test_it(world, unknown)", "fixture 'unknown' not found"),
]


def test_a_bad_mark_is_an_error_that_says_so(pytester: pytest.Pytester) -> None:
    """In a file each: a bad mark is an error of its module, as for pytest's own marks."""
    for number, (mark, test, _) in enumerate(BAD_MARKS):
        source = f"import pytest\n\n@pytest.mark.{mark}\n{test}:\n    pass\n"
        pytester.makepyfile(**{f"test_bad{number:02}": source})
    result = run_tests(pytester, "def test_good(): pass\n", "--continue-on-collection-errors")
    result.assert_outcomes(errors=len(BAD_MARKS), passed=1)
    for number, (_, _, words) in enumerate(BAD_MARKS):
        if "not found" not in words:
            words = f"test_bad{number:02}.py::test_it*: @pytest.mark.sim {words}"
        result.stdout.fnmatch_lines([f"*{words}*"])


def test_whole_numbers_of_numpy_are_taken_as_any(pytester: pytest.Pytester) -> None:
    """They were refused: ``ranks`` and ``seeds`` had to be of Python's own type."""
    source = """
        import numpy as np
        import pytest

        @pytest.mark.sim(ranks=np.int64(2), seeds=np.int64(2))
        async def test_one(world):
            assert world.size == 2

        @pytest.mark.sim(ranks=np.arange(1, 3), seeds=np.arange(2))
        async def test_several(world):
            assert type(world.size) is int
    """
    run_tests(pytester, source).assert_outcomes(passed=3)


BAD_SETTINGS = [
    ("network=7", "TypeError: network is 7; a Network is needed"),
    ("compute=7", "TypeError: compute is 7; a Compute is needed"),
    ("faults=[Kill(2, at_s=1.0)]", "ValueError: Kill(rank=2, *) names rank 2; ranks go from 0 to 1"),
    ("until_s=-1", "ValueError: until_s is -1*"),
]


def test_a_bad_setting_fails_the_test_in_one_line(pytester: pytest.Pytester) -> None:
    tests = [
        f"@pytest.mark.sim(ranks=2, {option})\nasync def test_{number}(world):\n    pass\n"
        for number, (option, _) in enumerate(BAD_SETTINGS)
    ]
    result = run_tests(pytester, "\n".join(tests))
    result.assert_outcomes(failed=len(BAD_SETTINGS))
    result.stdout.fnmatch_lines([f"E *{words}" for _, words in BAD_SETTINGS])
    assert "simulate.py" not in result.stdout.str()
    assert result.stdout.str().count("\nseed 0, 2 ranks\nrepeat: ") == len(BAD_SETTINGS)


def test_a_test_of_unittest_is_refused(pytester: pytest.Pytester) -> None:
    """It would run, but not simulated."""
    source = """
        import unittest

        @pytest.mark.sim(ranks=2)
        class TestIt(unittest.IsolatedAsyncioTestCase):
            async def test_it(self):
                pass
    """
    result = run_tests(pytester, source)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*@pytest.mark.sim is for coroutine functions, *no unittest.TestCase*"])


def test_a_fixture_of_a_simulated_test_has_no_seed(pytester: pytest.Pytester) -> None:
    source = """
        @pytest.fixture
        def model(sim_seed):
            return sim_seed

        @pytest.mark.sim(ranks=2)
        async def test_it(world, model):
            pass

        def test_plain(model):
            assert model == 0
    """
    result = run_tests(pytester, source)
    result.assert_outcomes(errors=1, passed=1)
    result.stdout.fnmatch_lines(["*runs many seeds on the same fixtures: take sim_seed in the test*"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--sim-seeds", "0"), "--sim-seeds is 0; at least 1 is needed"),
        (("--sim-seed", "1", "--sim-seeds", "2"), "--sim-seed and --sim-seeds exclude each other"),
        (("--sim-seed", "one"), "invalid int value: 'one'"),
    ],
)
def test_bad_options(pytester: pytest.Pytester, options: tuple[str, ...], words: str) -> None:
    result = run_tests(pytester, "def test_it(): pass\n", *options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*{words}*"])


def test_the_mark_and_the_options_are_described(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function")
    pytester.runpytest_inprocess("--markers").stdout.fnmatch_lines(["@pytest.mark.sim(ranks, seeds=20, *"])
    pytester.runpytest_inprocess("--help").stdout.fnmatch_lines(["*--sim-seed=N *", "*--sim-seeds=N *"])
