"""Tests the pytest plugin by running pytest on small test files: which tests run, and the fixtures."""

from __future__ import annotations

import shlex

import pytest
from support.plugin import repeat_options, run_tests, section, sections

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
    """A simulation would be refused inside a running loop, and a coroutine that is never awaited would warn."""
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
    result.stdout.fnmatch_lines(["E *TimeLimitError: until_s=5*"])


def test_the_line_repeats_what_fixtures_held(pytester: pytest.Pytester) -> None:
    """Fixtures are made once for all seeds, so the failing seed alone passes."""
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
    assert f"2 seeds before this one had the same store, so the line below runs them too; alone: pytest {name}" in store
    assert (
        "\nother tests may have changed shared (scope: module) before; the command below does not run those tests\n"
        in shared
    )
    assert shared.endswith(f"\nrepeat: pytest {name}_shared")
    assert "before" not in without
    assert without.endswith(f"\nrepeat: pytest '{name}_without[1]' --sim-seed 1")
    again = pytester.runpytest(*shlex.split(store.splitlines()[-1])[2:])
    again.assert_outcomes(failed=1)


@pytest.mark.slow
def test_ranks_that_get_a_signal_and_those_who_hear_of_it(pytester: pytest.Pytester) -> None:
    """The plan's signal is not a failure, and Ctrl-C on a simulated rank does not end the session."""
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
    """A test may expect the loss; otherwise it fails.

    The absence of the killed rank from the last barrier does not count as a failure.
    """
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
    assert lines[2].startswith("Kill(") and not lines[2].endswith(": fired")
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
    assert "rank 1: LocalProtocolError: " in "\n".join(section(result))
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


def test_the_simulate_fixture_shows_a_failed_rank_and_a_deadlock(pytester: pytest.Pytester) -> None:
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
    ("simulate(main, ranks=0)", "ValueError: ranks "),
    ("simulate(main, ranks=2, network=3)", "TypeError: network "),
    ("simulate(print, ranks=2)", "TypeError: main "),
    ("simulate(main, ranks=2, faults=[Kill(7, at_s=1.0)])", "rank 7"),
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
