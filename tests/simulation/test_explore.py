"""explore: it finds the first seed that fails, repeats it, shrinks its plan, and leaves no process behind."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

import asyncdist as ad
from asyncdist import RankLostError
from asyncdist.simulation import (
    Delay,
    ExploreReport,
    Fault,
    Interrupt,
    Kill,
    Link,
    Network,
    Partition,
    SlowLink,
    SlowRank,
    Stall,
    explore,
    simulate,
)
from asyncdist.simulation.exploration.explore import signature_of
from asyncdist.simulation.exploration.repro_command import repeat_line
from asyncdist.simulation.exploration.shrink import minimize, shrink, simplify

# ------------------------------------------------------------------------------------------------ a protocol with a bug


@dataclass(frozen=True, slots=True)
class Put:
    version: int


async def last_writer(world: ad.World) -> int | None:
    """Rank 1 writes version 1 to rank 0, and asks rank 2, which asks rank 3, to write version 2.

    Wrong: messages from different senders may arrive in either order, so the last to arrive need not be the newest.
    """
    channel = world.channel(Put, tag=100)
    if world.rank == 1:
        await channel.send(Put(1), dest=0)
        await channel.send(Put(2), dest=2)
    elif world.rank > 1:
        await channel.send((await channel.receive()).message, dest=(world.rank + 1) % world.size)
    else:
        await channel.receive()
        last = (await channel.receive()).message.version
        assert last == 2, f"version {last} has replaced a newer one"
        return last
    return None


def racy(seed: int, faults: Sequence[Fault] | None = None) -> ad.SimReport:
    return simulate(last_writer, ranks=4, seed=seed, faults=faults or ())


CONSTANT = Network(link=Link(latency_s=1e-6), eager_nbytes=1 << 20)
FIVE = (
    Stall(0, 0.0, 0.01),
    SlowLink(2, 0, 0.0, 3.0),
    SlowLink(1, 0, 0.0, 1234.5),
    SlowRank(2, 0.0, 7.0),
    Partition((1,), 5.0, 6.0),
)


def one_fault_of_five(seed: int, faults: Sequence[Fault] | None = None) -> ad.SimReport:
    """On links that are equally fast the bug stays hidden: a slow one is needed, and there is one among five faults."""
    return simulate(last_writer, ranks=4, seed=seed, network=CONSTANT, faults=FIVE if faults is None else faults)


def first_failing(scenario: Callable[[int], ad.SimReport], seeds: range) -> int:
    return next(seed for seed in seeds if any(isinstance(r, AssertionError) for r in scenario(seed).results))


@pytest.mark.slow
@pytest.mark.workers
@pytest.mark.parametrize("processes", [1, 2])
def test_the_first_seed_that_fails_is_found_by_any_number_of_processes(
    processes: int, capfd: pytest.CaptureFixture[str]
) -> None:
    first = first_failing(racy, range(1, 1000))
    assert first > 1, "there is something to pass over"
    report = explore(racy, range(1, 1000), processes=processes)
    failure = report.failure
    assert failure is not None
    assert (failure.seed, report.seed_count) == (first, first)
    assert report.digests == {racy(seed).trace_digest for seed in range(1, first)}
    assert failure.kind == "AssertionError"
    assert failure.message.splitlines()[0] == "version 1 has replaced a newer one"
    assert "in last_writer" in failure.traceback
    assert "This ended rank 0." in failure.traceback
    assert "asyncdist/" not in failure.traceback, "the machinery is left out"
    assert failure.trace == tuple(map(str, racy(first).trace[-20:]))
    assert failure.minimal_faults == ()
    assert capfd.readouterr().err == f"{failure}\n"


@pytest.mark.workers
def test_the_line_repeats_the_failure_in_a_fresh_process() -> None:
    failure = explore(racy, range(1, 1000), processes=1, quiet=True).failure
    assert failure is not None
    assert "\n" not in failure.repeat
    again = subprocess.run(failure.repeat, shell=True, capture_output=True, text=True, timeout=60, check=False)
    assert again.returncode == 1
    assert "AssertionError: version 1 has replaced a newer one" in again.stderr
    passing = failure.repeat.replace(f"racy({failure.seed})", f"racy({failure.seed - 1})")
    assert subprocess.run(passing, shell=True, capture_output=True, timeout=60, check=False).returncode == 0


def in_hash_order(seed: int, faults: Sequence[Fault] | None = None) -> ad.SimReport:
    raise AssertionError(f"the order is {list({'alpha', 'beta', 'gamma', 'delta', 'epsilon', 'zeta', 'eta', 'theta'})}")


@pytest.mark.workers
def test_processes_that_explore_have_one_order_of_sets_and_the_line_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    failure = explore(in_hash_order, range(1), processes=2, quiet=True).failure
    assert failure is not None
    assert failure.repeat.startswith("PYTHONHASHSEED=0 ")
    assert "PYTHONHASHSEED" not in os.environ
    again = subprocess.run(failure.repeat, shell=True, capture_output=True, text=True, timeout=60, check=False)
    assert failure.message in again.stderr


@pytest.mark.workers
def test_a_plan_of_five_faults_is_shrunk_to_the_one_that_matters() -> None:
    failure = explore(one_fault_of_five, [3], processes=1, quiet=True).failure
    assert failure is not None
    assert failure.faults == FIVE
    assert failure.minimal_faults == (SlowLink(1, 0, 0.0, 1000.0),)
    again = subprocess.run(failure.repeat, shell=True, capture_output=True, text=True, timeout=60, check=False)
    assert "faults=[SlowLink(source=1, dest=0, at_s=0.0, factor=1000.0)]" in failure.repeat
    assert "AssertionError: version 1 has replaced a newer one" in again.stderr


def test_a_plan_that_does_not_matter_is_shrunk_to_none() -> None:
    failure = explore(broken_without_faults, [3], quiet=True, processes=1).failure
    assert failure is not None
    assert (len(failure.faults), failure.minimal_faults, failure.shrink_run_count) == (1, (), 1)
    assert "faults: 0 of 1 needed: none" in str(failure)


def broken_without_faults(seed: int, faults: Sequence[Fault] | None = None) -> ad.SimReport:
    return racy(first_failing(racy, range(1000)), [Delay(0, 1, 1, 1e-9)] if faults is None else faults)


def fails_otherwise_without_faults(seed: int, faults: Sequence[Fault] | None = None) -> ad.SimReport:
    plan = FIVE if faults is None else faults
    report = simulate(nothing, ranks=3, seed=seed, faults=plan)
    if len(plan) < 2:
        raise ValueError("another error")
    assert len(plan) < 4, "too many faults"
    assert not plan, f"{len(plan)} faults"
    return report


async def nothing(world: ad.World) -> None:
    await world.safe_point()


def test_a_plan_that_fails_in_another_way_is_no_smaller_one() -> None:
    failure = explore(fails_otherwise_without_faults, [0], processes=1, quiet=True).failure
    assert failure is not None
    assert failure.message.startswith("too many faults")
    assert failure.minimal_faults is not None
    assert len(failure.minimal_faults) == 4


# ----------------------------------------------------------------------------------------------- what counts as failure


def passes(seed: int, faults: Sequence[Fault] | None = None) -> ad.SimReport:
    """With all that is no failure: a killed rank, its peers that have lost it, an early exit, leftovers."""
    plan = [Kill(2, at_s=0.001)] if seed % 2 else [SlowRank(1, 0.0, 3.0)]
    report = simulate(ends_well, seed % 2 == 1, ranks=4, seed=seed, faults=plan)
    assert type(report.results[3]) is (RankLostError if seed % 2 else SystemExit)
    return report


async def ends_well(world: ad.World, with_barrier: bool) -> None:
    channel = world.channel(Put, tag=100)
    for version in range(3):
        await world.safe_point()
        channel.send_nowait(Put(version), dest=world.rank)  # one of the others may have ended, and takes nothing more
    if with_barrier:
        await ad.barrier()
    elif world.rank == 3:
        sys.exit(0)


async def sleeps(world: ad.World, fails: bool) -> None:
    await world.sleep(0.5 if world.rank == 2 else 9.0)
    assert not fails, "rank 2 fails by itself"


def gets_a_signal(seed: int, faults: Sequence[Fault] | None = None) -> ad.SimReport:
    plan = [Interrupt(0, 0.5, "SIGINT")] if faults is None else faults
    return simulate(sleeps, seed > 0, ranks=3, seed=seed, faults=plan)


def raises_what_ended_a_rank(seed: int, faults: Sequence[Fault] | None = None) -> ad.SimReport:
    report = gets_a_signal(0, faults)
    report.value()
    return report


@pytest.mark.workers
def test_a_failure_is_told_before_the_exit_that_a_signal_asks_for() -> None:
    failure = explore(gets_a_signal, range(9), processes=1, quiet=True).failure
    assert failure is not None
    assert (failure.seed, failure.kind) == (1, "AssertionError")
    again = subprocess.run(failure.repeat, shell=True, capture_output=True, text=True, timeout=60, check=False)
    assert "AssertionError: rank 2 fails by itself" in again.stderr


def test_a_scenario_that_raises_the_ctrl_c_of_a_rank_does_not_end_exploring() -> None:
    failure = explore(raises_what_ended_a_rank, range(3), processes=1, quiet=True).failure
    assert failure is not None
    assert (failure.seed, failure.kind) == (0, "KeyboardInterrupt")
    assert failure.minimal_faults == (Interrupt(0, 0.0, "SIGINT"),)


@pytest.mark.slow
@pytest.mark.workers
@pytest.mark.parametrize("processes", [1, 2])
def test_seeds_that_pass_are_counted_in_silence(processes: int, capfd: pytest.CaptureFixture[str]) -> None:
    shown: list[ExploreReport] = []
    report = explore(passes, range(40), processes=processes, on_progress=shown.append)
    report.check()
    alone = [passes(seed) for seed in range(40)]
    assert report.digests == {one.trace_digest for one in alone}
    assert report.faults_fired == {"Kill": 20, "SlowRank": sum(one.faults_fired[0] for one in alone[::2])}
    assert (report.failure, report.seed_count) == (None, 40)
    counts = [one.seed_count for one in shown]
    assert counts == sorted(set(counts))
    assert counts[-1] == 40
    assert f"{len(report.digests)} different traces, faults fired: Kill 20, SlowRank" in str(report)
    assert "ended with" not in capfd.readouterr().err, "what 40 seeds warn of"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_exits_with_0_has_returned(rank: int) -> None:
    async def main(world: ad.World) -> str:
        if world.rank == rank:
            sys.exit(0)
        return "value"

    report = simulate(main, ranks=2)
    assert type(report.results[rank]) is SystemExit
    assert report.value() == (None if rank == 0 else "value")


def raises_on_rank_2(seed: int) -> ad.SimReport:
    return simulate(fails_on_rank_2, ranks=4, seed=seed)


async def fails_on_rank_2(world: ad.World) -> None:
    if world.rank == 2:
        raise ZeroDivisionError("on rank 2")


def exits_with_a_code(seed: int) -> ad.SimReport:
    return simulate(exits, ranks=2, seed=seed)


async def exits(world: ad.World) -> None:
    if world.rank == 1:
        sys.exit(3)


def deadlocks(seed: int) -> ad.SimReport:
    return simulate(waits, ranks=2, seed=seed)


async def waits(world: ad.World) -> None:
    await world.channel(Put, tag=100).receive()


def fails_by_pytest(seed: int) -> ad.SimReport:
    pytest.fail("as a test would")


def returns_nothing(seed: int) -> None:
    return None


@pytest.mark.parametrize(
    ("scenario", "kind", "words"),
    [
        (raises_on_rank_2, "ZeroDivisionError", ["on rank 2", "This ended rank 2."]),
        (exits_with_a_code, "SystemExit", ["3", "This ended rank 1."]),
        (deadlocks, "DeadlockError", ["rank 0, main of rank 0", "rank 1, main of rank 1", "tag 100"]),
        (fails_by_pytest, "Failed", ["as a test would"]),
        (returns_nothing, "TypeError", ["returned None", "SimReport"]),
    ],
)
def test_a_failure_of_any_kind_is_told(scenario: Callable[[int], ad.SimReport], kind: str, words: list[str]) -> None:
    report = explore(scenario, [17], processes=1, quiet=True)
    assert report.failure is not None
    assert report.failure.kind == kind
    assert [word for word in words if word not in str(report.failure)] == []
    with pytest.raises(AssertionError, match="seed 17 failed"):
        report.check()


FORGETFUL: list[int] = []


def fails_once(seed: int) -> ad.SimReport:
    FORGETFUL.append(seed)
    assert FORGETFUL.count(seed) > 1, "the first time"
    return simulate(nothing, ranks=1, seed=seed)


def draws_its_own_plan(seed: int) -> ad.SimReport:
    report = simulate(nothing, ranks=2, seed=seed, faults=[SlowRank(1, 0.0, 2.0)])
    raise ValueError(report.faults_fired)


def ignores_its_argument(seed: int, faults: Sequence[Fault] | None = None) -> ad.SimReport:
    report = simulate(nothing, ranks=2, seed=seed, faults=[SlowRank(1, 0.0, 2.0)])
    if faults is None:
        raise ValueError(report.faults_fired)
    return report


def test_what_cannot_be_repeated_or_shrunk_is_said() -> None:
    FORGETFUL.clear()
    notes = [
        explore(scenario, [5], processes=1, quiet=True).failure
        for scenario in (fails_once, draws_its_own_plan, ignores_its_argument)
    ]
    assert [note is not None and note.minimal_faults for note in notes] == [None] * 3
    texts = [str(note) for note in notes]
    assert "something besides the seed decides" in texts[0]
    assert "takes no argument faults" in texts[1]
    assert "given as the argument faults, it does not fail in the same way" in texts[2]


# ------------------------------------------------------------------------------------------------------------ shrinking


def plan_of(numbers: Sequence[int]) -> tuple[Fault, ...]:
    return tuple(Stall(number, 0.0, 1.0) for number in numbers)


@pytest.mark.slow
@given(st.integers(1, 40), st.data())
def test_shrinking_finds_the_faults_that_are_needed_together(size: int, data: st.DataObject) -> None:
    needed = data.draw(st.sets(st.integers(0, size - 1), min_size=1))
    tried: list[Sequence[Fault]] = []

    def fails(plan: Sequence[Fault]) -> bool:
        tried.append(plan)
        return needed <= {fault.rank for fault in plan if isinstance(fault, Stall)}

    assert minimize(plan_of(range(size)), fails) == plan_of(sorted(needed))
    # Zeller's bound for the worst case, with a margin for rounding.
    assert len(tried) <= size * size + 3 * size + 10


@pytest.mark.parametrize(
    ("fault", "limits", "simplest"),
    [
        (Kill(1, at_s=0.45678), {}, Kill(1, at_s=0.0)),
        (Kill(1, at_s=0.45678), {"at_s": 0.4}, Kill(1, at_s=0.5)),
        (Kill(1, at_s=0.44321), {"at_s": 0.441}, Kill(1, at_s=0.443)),
        (Kill(1, at_turn=137), {}, Kill(1, at_turn=1)),
        (Kill(1, at_turn=137), {"at_turn": 131}, Kill(1, at_turn=140)),
        (Kill(3, at_message=137), {"at_message": 90}, Kill(3, at_message=100)),
        (SlowRank(2, 0.1234, 3.14159), {}, SlowRank(2, 0.0, 3.0)),
        (Partition((1, 2), 0.1234, 0.5678), {"at_s": 0.12}, Partition((1, 2), 0.12, 0.6)),
        (Delay(1, 2, 57, 0.777), {"number": 55, "duration_s": 0.5}, Delay(1, 2, 60, 0.8)),
    ],
)
def test_numbers_are_simplified_as_far_as_it_still_fails(
    fault: Fault, limits: dict[str, float], simplest: Fault
) -> None:
    def fails(plan: Sequence[Fault]) -> bool:
        return all(getattr(plan[0], name) >= limit for name, limit in limits.items())

    assert simplify([fault], fails) == (simplest,)


def test_a_fault_that_is_needless_once_the_others_are_simple_is_left_out() -> None:
    """The first one makes up for the odd time of the second."""

    def fails(plan: Sequence[Fault]) -> bool:
        stalls = [fault for fault in plan if isinstance(fault, Stall)]
        found = next((stall.duration_s for stall in stalls if stall.rank == 2), 0.0)
        return found == 1.0 or (found > 1.0 and len(stalls) > 1)

    plan = [Stall(1, 0.0, 3.0), Stall(2, 0.0, 1.04)]
    assert simplify(minimize(plan, fails), fails) == (Stall(1, 0.0, 0.0), Stall(2, 0.0, 1.0))
    assert shrink(plan, fails) == (Stall(2, 0.0, 1.0),)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (AssertionError("rank 3 holds 2 roles"), AssertionError("rank 12 holds 7 roles"), True),
        (AssertionError("lost: [1, 2, 3]"), AssertionError("lost: [7]"), True),
        (AssertionError("at 0.25 s\nassert 1 == 2"), AssertionError("at 1e-06 s\nassert 4 == 5"), True),
        (AssertionError("one story"), AssertionError("another story"), False),
        (AssertionError("one story"), ValueError("one story"), False),
        (ValueError("one story"), ValueError("another story"), True),
        (ExceptionGroup("a", [ValueError(), KeyError()]), ExceptionGroup("b", [KeyError(), ValueError()]), True),
        (ExceptionGroup("a", [ValueError()]), ExceptionGroup("a", [KeyError()]), False),
    ],
)
def test_two_failures_are_the_same_by_class_and_an_assertion_by_its_words(
    one: Exception, other: Exception, same: bool
) -> None:
    assert (signature_of(one) == signature_of(other)) == same


# ------------------------------------------------------------------------------------------------------------ repeating


@dataclass(frozen=True)
class Sized:
    """A scenario that is an object."""

    ranks: int

    def __call__(self, seed: int, faults: Sequence[Fault] | None = None) -> ad.SimReport:
        return simulate(nothing, ranks=self.ranks, seed=seed, faults=faults or ())


def sized(ranks: int, seed: int, faults: Sequence[Fault] | None = None) -> ad.SimReport:
    return Sized(ranks)(seed, faults)


@pytest.mark.parametrize("scenario", [Sized(3), functools.partial(sized, 3)], ids=["object", "partial"])
@pytest.mark.parametrize("faults", [None, (), (SlowRank(1, 0.0, 2.0), Kill(2, at_s=0.0))], ids=["own", "none", "two"])
def test_the_line_is_a_program_that_runs_the_same_seed(
    scenario: Callable[..., ad.SimReport], faults: tuple[Fault, ...] | None
) -> None:
    words = shlex.split(repeat_line(scenario, 7, faults))
    program = words[words.index("-c") + 1]
    names: dict[str, object] = {}
    head, _, call = program.rpartition("; ")
    exec(head, names)
    report = eval(call.removesuffix(".value()"), names)
    expected = scenario(7, faults)
    assert (report.trace_digest, report.faults) == (expected.trace_digest, expected.faults)


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"scenario": lambda seed: None}, TypeError, "<lambda>.*cannot be sent.*top level of a module"),
        ({"scenario": 7}, TypeError, "the scenario is 7"),
        ({"processes": 0}, ValueError, "processes is 0; a whole number of 1 or more"),
        ({"processes": 1.5}, ValueError, "processes is 1.5"),
        ({"seeds": []}, ValueError, r"no seeds in \[\]"),
        ({"seeds": range(0)}, ValueError, r"no seeds in range\(0, 0\)"),
        ({"seeds": [0, "1"]}, TypeError, "a seed is '1'; allowed: a whole number"),
        ({"seeds": [True]}, TypeError, "a seed is True; allowed"),
        ({"seeds": 7}, TypeError, "seeds is 7"),
    ],
)
def test_bad_input_is_one_clear_error(arguments: dict[str, object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        explore(**{"scenario": passes, "processes": 1, **arguments})  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_seeds_of_numpy_are_whole_numbers_as_any() -> None:
    """They were refused, as in ``the seed 0 is not a whole number``."""
    assert simulate(nothing, ranks=1, seed=np.int64(3)).seed == 3
    report = explore(passes, np.arange(3), processes=1)
    assert (report.seed_count, report.failure) == (3, None)
    with pytest.raises(TypeError, match="seed is True; allowed: a whole number"):
        simulate(nothing, ranks=1, seed=True)


def test_seeds_of_an_iterator_are_taken_as_they_are_needed() -> None:
    taken: list[int] = []

    def seeds() -> Iterator[int]:
        for seed in itertools.count():
            taken.append(seed)
            yield seed

    report = explore(racy, seeds(), processes=1, quiet=True)
    assert report.failure is not None
    assert taken[: report.seed_count] == list(range(report.seed_count))
    assert len(taken) <= 2 * report.seed_count + 2


# ------------------------------------------------------------------------------------------------------------ processes


def dies(seed: int) -> ad.SimReport:
    os._exit(3)


@pytest.mark.workers
def test_a_process_that_dies_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"died, in one of the seeds 0 to 3.*processes=1"):
        explore(dies, range(4), processes=2)


UNGUARDED = """
from asyncdist.simulation import explore, simulate

async def main(world):
    return world.rank

def scenario(seed):
    return simulate(main, ranks=2, seed=seed)

explore(scenario, range(4), processes=2)
"""


@pytest.mark.workers
def test_a_script_without_a_main_guard_is_one_clear_error(tmp_path: Path) -> None:
    """Each of its processes would start the exploration again; Python itself says so at length, in each of them."""
    script = tmp_path / "unguarded.py"
    script.write_text(UNGUARDED)
    environ = {**os.environ, "PYTHONPATH": str(Path(ad.__file__).parents[1])}
    ended = subprocess.run(
        [sys.executable, str(script)], env=environ, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 1
    assert ended.stderr.count("Traceback") == 1, ended.stderr
    assert "needs an if __name__ == '__main__'" in ended.stderr


def endless_but_for_one(seed: int) -> ad.SimReport:
    if seed == 0:
        raise ValueError("seed 0")
    return simulate(for_ever, ranks=1, seed=seed)


async def for_ever(world: ad.World) -> None:
    while True:
        await world.safe_point()


@pytest.mark.workers
def test_a_failure_does_not_wait_for_seeds_behind_it() -> None:
    report = explore(endless_but_for_one, range(100), processes=2, quiet=True)
    assert report.failure is not None
    assert (report.failure.message, report.failure.minimal_faults, report.seed_count) == ("seed 0", (), 1)


ENDLESS = """
import itertools, os, pathlib, sys
import asyncdist as ad
from asyncdist.simulation import explore

async def main(world):
    while True:
        await world.safe_point()

def scenario(seed):
    pathlib.Path(sys.argv[1], f"{os.getpid()}.pid").touch()
    return ad.simulate(main, ranks=2, seed=seed)

if __name__ == "__main__":
    explore(scenario, itertools.count(), processes=int(sys.argv[2]))
"""


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie that nobody has reaped does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except FileNotFoundError:
        return Path("/proc/self").exists() is False


def wait_until(condition: Callable[[], bool], timeout_s: float = 60) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@pytest.mark.workers
@pytest.mark.parametrize(("processes", "number"), [(1, signal.SIGINT), (2, signal.SIGINT), (2, signal.SIGKILL)])
def test_no_process_outlives_a_signal(tmp_path: Path, processes: int, number: signal.Signals) -> None:
    script = tmp_path / "endless.py"
    script.write_text(ENDLESS)
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path), str(processes)], stderr=subprocess.PIPE, text=True, process_group=0
    )
    try:
        assert wait_until(lambda: len(list(tmp_path.glob("*.pid"))) == processes)
        pids = [int(path.stem) for path in tmp_path.glob("*.pid")]
        # The terminal sends its signal to all of them.
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
        _, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == -number
    assert wait_until(lambda: not any(map(is_alive, pids)))
    if number == signal.SIGINT:
        assert error.count("Traceback") == 1, "that of the process itself"


BEGUN: list[int] = []


def interrupted(seed: int) -> ad.SimReport:
    BEGUN.append(seed)
    return simulate(interrupts, ranks=3, seed=seed)


async def interrupts(world: ad.World) -> str:
    """Would go on for ever after a signal that it took for an error of its own."""
    with contextlib.suppress(BaseException):
        if world.rank == 1:
            signal.raise_signal(signal.SIGINT)
    while not HANDLED:
        await world.safe_point()
    return "went on"


HANDLED: list[int] = []


def test_an_interrupt_ends_a_simulation_between_two_events() -> None:
    BEGUN.clear()
    HANDLED.clear()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        explore(interrupted, [5, 6], processes=1)
    assert BEGUN == [5]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_interrupts_stays_in_place() -> None:
    HANDLED.clear()
    own = signal.signal(signal.SIGINT, lambda number, _: HANDLED.append(number))
    try:
        assert interrupted(5).results == ("went on",) * 3
    finally:
        signal.signal(signal.SIGINT, own)
    assert HANDLED == [signal.SIGINT]


def test_random_numbers_of_the_outside_are_left_alone() -> None:
    random.seed(5)
    expected = random.Random(5).random()
    explore(racy, range(3), processes=1, quiet=True)
    assert random.random() == expected


def fails_with_three_and_dies_with_one(seed: int, faults: Sequence[Fault] | None = None) -> ad.SimReport:
    """What is tried first when a plan of three is halved kills the process."""
    plan = FIVE[:3] if faults is None else faults
    if len(plan) == 1:
        os._exit(3)
    report = simulate(nothing, ranks=3, seed=seed, faults=plan)
    assert len(plan) < 3, "three"
    return report


@pytest.mark.workers
def test_a_process_that_dies_while_shrinking_takes_no_failure_along() -> None:
    failure = explore(fails_with_three_and_dies_with_one, [0], processes=2, quiet=True).failure
    assert failure is not None
    assert (failure.kind, failure.minimal_faults) == ("AssertionError", None)
    assert failure.note == "a process died when the plan was to be shrunk"
