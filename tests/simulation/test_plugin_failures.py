"""Tests how the pytest plugin shows failures and bad input, by running pytest on small test files."""

from __future__ import annotations

import re

import pytest
from support.plugin import repeat_options, run_tests, section
from support.waits import waits_of_mains

import asyncdist

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
    assert "E           assert 4.0 == 5" in text or "E       assert 4.0 == 5" in text, (
        "pytest must have rewritten the assertion"
    )
    assert "await exchange(world, sim_seed)" in text and "simulate.py" not in text and "pytest_plugin.py" not in text
    lines = section(result)
    assert re.fullmatch(r"seed 3, 4 ranks, \d+ messages, \d+\.\d{9} s .*", lines[0])
    assert lines[1:3] == ["rank 2: AssertionError: assert 4.0 == 5", "ranks 0, 1, 3: RankLostError"]
    assert repeat_options(result) == ["test_it.py::test_three", "--sim-seed", "3"]

    again = pytester.runpytest_inprocess(*repeat_options(result))
    assert section(again) == lines, "the repeated run must be the same, event by event"
    pytester.runpytest_inprocess("test_it.py::test_three", "--sim-seed", "4").assert_outcomes(passed=1)


def test_the_trace_is_the_last_part_until_the_failure(pytester: pytest.Pytester) -> None:
    """The messages that the failing rank and the others then send to each other would otherwise fill the trace."""
    lines = section(run_tests(pytester, FAILS_WITH_SEED_3))
    start = lines.index("trace until rank 2 failed, its end:")
    events = lines[start + 1 : -1]
    assert len(events) == 30 and all(line.startswith("  ") for line in events)
    report = asyncdist.simulate(_like_test_three, ranks=4, seed=3, return_exceptions=True)
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
            continue  # one line was requested
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
    assert section(result)[1:3] == ["rank 3: ValueError: of rank 3", "ranks 0-2: RankLostError"]


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
    waits = waits_of_mains("\n".join(lines[3:6]))
    assert set(waits) == {0, 1, 2}
    assert "rank 1, tag 8001" in waits[0] and "rank 1, tag 8001" in waits[2]
    source_lines = (pytester.path / "test_it.py").read_text().splitlines()
    number = 1 + next(index for index, line in enumerate(source_lines) if "create_future()" in line)
    assert f"wait_for_nothing ({pytester.path / 'test_it.py'}:{number})" in waits[1]
    assert lines[6] == "trace:" and any(" fault 0 " in line for line in lines[7:-1])
    assert repeat_options(result) == ["test_it.py::test_stuck", "--sim-seed", "0"]


def test_a_fault_that_does_not_fire_fails_the_test(pytester: pytest.Pytester) -> None:
    source = """
        @pytest.mark.sim(ranks=3, faults=[Kill(1, at_s=500.0), Stall(0, at_s=0.0, duration_s=1.0)])
        async def test_quick(world):
            await world.safe_point()
    """
    result = run_tests(pytester, source)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["E *all faults of the plan must fire, but with seed 0 these did not: Kill(rank=1, at_s=500.0*"]
    )
    lines = section(result)
    assert lines[1].startswith("Kill(rank=1, at_s=500.0") and lines[1].endswith(": did not fire")
    assert lines[2] == "Stall(rank=0, at_s=0.0, duration_s=1.0): fired"


@pytest.mark.slow
def test_the_repeat_line_works_in_another_folder_with_parameters(
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


# -- bad input --------------------------------------------------------------------------------------------------------


BAD_MARKS = [
    ("sim(ranks=0)", "async def test_it(world)", "must have ranks, an integer >= 1 *got 0"),
    ("sim(ranks=-3)", "async def test_it(world)", "must have ranks, an integer >= 1 *got -3"),
    ("sim(ranks=2.0)", "async def test_it(world)", "must have ranks, an integer >= 1 *got 2.0"),
    ("sim(ranks=True)", "async def test_it(world)", "must have ranks, an integer >= 1 *got True"),
    ("sim(ranks='2')", "async def test_it(world)", "must have ranks, an integer >= 1 *got '2'"),
    ("sim(ranks=[2, 0])", "async def test_it(world)", "must have ranks, an integer >= 1 *got [[]2, 0]"),
    ("sim(ranks=[])", "async def test_it(world)", "must have ranks, an integer >= 1 *got [[]]"),
    ("sim()", "async def test_it(world)", "must have ranks, an integer >= 1 *got None"),
    ("sim", "async def test_it(world)", "must have ranks, an integer >= 1 *got None"),
    ("sim(4)", "async def test_it(world)", "takes its options by name, as in ranks=4, got 4"),
    ("sim(ranks=2, seed=3)", "async def test_it(world)", "has no option 'seed'; did you mean seeds?"),
    ("sim(ranks=2, seeds=0)", "async def test_it(world)", "must have seeds, *got 0"),
    ("sim(ranks=2, seeds=[])", "async def test_it(world)", "must have seeds, *got [[]]"),
    ("sim(ranks=2, seeds='12')", "async def test_it(world)", "must have seeds, *got '12'"),
    ("sim(ranks=2, seeds=iter([1]))", "async def test_it(world)", "must have seeds, *got <list_iterator *"),
    ("sim(ranks=2, seeds=[1, 2.5])", "async def test_it(world)", "must have seeds, *got [[]1, 2.5]"),
    ("sim(ranks=2)", "async def test_it()", "must be on a test that takes world, as in async def test(world)"),
    ("sim(ranks=2)", "def test_it(world)", "must be on a coroutine test (async def); a plain test can use *"),
    ("sim(ranks=[2, 3])", "def test_it()", "must be on a coroutine test*"),
    ("sim(ranks=2)", "async def test_it(world, unknown)", "fixture 'unknown' not found"),
]


def test_a_bad_mark_is_an_error_that_says_so(pytester: pytest.Pytester) -> None:
    """Each mark is in its own file: a bad mark is an error of its module, as with pytest's own marks."""
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
    """Regression: ``ranks`` and ``seeds`` were refused unless they had Python's own type."""
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
    ("network=7", "TypeError: network * 7*"),
    ("compute=7", "TypeError: compute * 7*"),
    ("faults=[Kill(2, at_s=1.0)]", "ValueError: Kill(rank=2, *rank 2*"),
    ("until_s=-1", "ValueError: until_s *-1*"),
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
    """Such a test would run, but not be simulated."""
    source = """
        import unittest

        @pytest.mark.sim(ranks=2)
        class TestIt(unittest.IsolatedAsyncioTestCase):
            async def test_it(self):
                pass
    """
    result = run_tests(pytester, source)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*@pytest.mark.sim must be on a coroutine function, *not a unittest.TestCase*"])


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
    result.stdout.fnmatch_lines(["*runs many seeds on the same fixtures, so the test itself must take sim_seed*"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--sim-seeds", "0"), "--sim-seeds must be >= 1, got 0"),
        (("--sim-seed", "1", "--sim-seeds", "2"), "only one of --sim-seed and --sim-seeds may be passed"),
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
