"""Tests ``explore``: it finds the first failing seed, repeats it, and distinguishes failures."""

from __future__ import annotations

import functools
import itertools
import os
import random
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import asyncdist as ad
from asyncdist import RankLostError, environment
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
from asyncdist.simulation.exploration.repro_command import repeat_line
from protocols import AsyncSelectiveAveragingPolicy

# ------------------------------------------------------------------------------------------------ a protocol with a bug


@dataclass(frozen=True, slots=True)
class Put:
    version: int


async def last_writer(world: ad.World) -> int | None:
    """Rank 1 writes version 1 to rank 0, and asks rank 2, which asks rank 3, to write version 2.

    The assumption is wrong: messages from different senders may arrive in either order, so the last may not be the
    newest.
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
    return simulate(last_writer, ranks=4, seed=seed, faults=faults or (), return_exceptions=True)


CONSTANT = Network(link=Link(latency_s=1e-6), eager_nbytes=1 << 20)
FIVE = (
    Stall(0, 0.0, 0.01),
    SlowLink(2, 0, 0.0, 3.0),
    SlowLink(1, 0, 0.0, 1234.5),
    SlowRank(2, 0.0, 7.0),
    Partition((1,), 5.0, 6.0),
)


def one_fault_of_five(seed: int, faults: Sequence[Fault] | None = None) -> ad.SimReport:
    """On equally fast links the bug stays hidden: it needs a slow link, which is one of five faults."""
    return simulate(last_writer, ranks=4, seed=seed, network=CONSTANT, faults=FIVE if faults is None else faults)


def first_failing(scenario: Callable[[int], ad.SimReport], seeds: range) -> int:
    return next(seed for seed in seeds if any(isinstance(r, AssertionError) for r in scenario(seed).results))


@pytest.mark.slow
@pytest.mark.workers
@pytest.mark.parametrize("processes", [1, 2])
def test_any_number_of_processes_finds_the_first_failing_seed(
    processes: int, capfd: pytest.CaptureFixture[str]
) -> None:
    first = first_failing(racy, range(1, 1000))
    assert first > 1, "seed 1 must pass, so that the search has a seed to skip"
    report = explore(racy, range(1, 1000), processes=processes)
    failure = report.failure
    assert failure is not None
    assert (failure.seed, report.seed_count) == (first, first)
    assert report.digests == {racy(seed).trace_digest for seed in range(1, first)}
    assert failure.kind == "AssertionError"
    assert failure.message.splitlines()[0] == "version 1 has replaced a newer one"
    assert "in last_writer" in failure.traceback
    assert "rank 0 of 4 raised this error" in failure.traceback
    assert "asyncdist/" not in failure.traceback, "the traceback must not show frames of asyncdist"
    assert failure.trace == tuple(map(str, racy(first).trace[-20:]))
    assert failure.minimal_faults == ()
    assert capfd.readouterr().err == f"{failure}\n"


@pytest.mark.workers
@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.workers
def test_the_repeat_line_fixes_the_order_of_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """All exploring processes have one order of sets."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    failure = explore(in_hash_order, range(1), processes=2, quiet=True).failure
    assert failure is not None
    assert failure.repeat.startswith(f"PYTHONHASHSEED={environment.hash_seed() or 0} ")
    assert "PYTHONHASHSEED" not in os.environ
    again = subprocess.run(failure.repeat, shell=True, capture_output=True, text=True, timeout=60, check=False)
    assert failure.message in again.stderr


def with_one_thread(seed: int, faults: Sequence[Fault] | None = None) -> ad.SimReport:
    assert torch.get_num_threads() == 1
    return simulate(meets, ranks=2, seed=seed)


async def meets(world: ad.World) -> None:
    await ad.barrier()


def test_torch_has_one_thread_with_any_number_of_processes() -> None:
    """Regression: sums depended on ``processes``, because one process used all cores, and a pool's workers one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert explore(with_one_thread, range(1), processes=1, quiet=True).failure is None
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)
    statements = shlex.split(repeat_line(with_one_thread, 7))[-1].split("; ")
    assert statements[:2] == ["import torch", "torch.set_num_threads(1)"]


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
    """Run with everything that is not a failure: a killed rank, peers that have lost it, an early exit, leftovers."""
    plan = [Kill(2, at_s=0.001)] if seed % 2 else [SlowRank(1, 0.0, 3.0)]
    report = simulate(ends_well, seed % 2 == 1, ranks=4, seed=seed, faults=plan)
    assert type(report.results[3]) is (RankLostError if seed % 2 else SystemExit)
    return report


async def ends_well(world: ad.World, with_barrier: bool) -> None:
    channel = world.channel(Put, tag=100)
    for version in range(3):
        await world.safe_point()
        channel.send_nowait(Put(version), dest=world.rank)  # one of the others may have ended, and receives nothing
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
@pytest.mark.long
def test_a_failure_is_printed_before_the_exit_by_a_signal() -> None:
    failure = explore(gets_a_signal, range(9), processes=1, quiet=True).failure
    assert failure is not None
    assert (failure.seed, failure.kind) == (1, "AssertionError")
    again = subprocess.run(failure.repeat, shell=True, capture_output=True, text=True, timeout=60, check=False)
    assert "AssertionError: rank 2 fails by itself" in again.stderr


def test_a_ranks_keyboard_interrupt_does_not_end_exploring() -> None:
    failure = explore(raises_what_ended_a_rank, range(3), processes=1, quiet=True).failure
    assert failure is not None
    assert (failure.seed, failure.kind) == (0, "KeyboardInterrupt")
    assert failure.minimal_faults == (Interrupt(0, 0.0, "SIGINT"),)


@pytest.mark.slow
@pytest.mark.workers
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.long)])
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
    assert str(len(report.digests)) in str(report) and "Kill 20, SlowRank" in str(report)
    assert "ended with" not in capfd.readouterr().err, "the warnings of 40 seeds must not be printed"


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
        (raises_on_rank_2, "ZeroDivisionError", ["on rank 2", "rank 2 of 4 raised this error (seed 17)"]),
        (exits_with_a_code, "SystemExit", ["3", "rank 1 of 2 raised this error (seed 17)"]),
        (deadlocks, "DeadlockError", ["rank 0", "rank 1", "tag 100"]),
        (fails_by_pytest, "Failed", ["as a test would"]),
        (returns_nothing, "TypeError", ["got None", "SimReport"]),
    ],
)
def test_a_failure_of_any_kind_is_told(scenario: Callable[[int], ad.SimReport], kind: str, words: list[str]) -> None:
    report = explore(scenario, [17], processes=1, quiet=True)
    assert report.failure is not None
    assert report.failure.kind == kind
    assert [word for word in words if word not in str(report.failure)] == []
    with pytest.raises(AssertionError, match="seed 17"):
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
    assert "depends on more than the seed" in texts[0]
    assert "takes no argument faults" in texts[1]
    assert "it does not fail in the same way when passed as faults" in texts[2]


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
    report = eval(call.removesuffix(".check_ranks()"), names)
    expected = scenario(7, faults)
    assert (report.trace_digest, report.faults) == (expected.trace_digest, expected.faults)


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"scenario": lambda seed: None}, TypeError, "function at the top level of a module.*got .*<lambda>"),
        ({"scenario": 7}, TypeError, "the scenario must be a function of the seed, got 7"),
        ({"processes": 0}, ValueError, r"processes .*\b0\b"),
        ({"processes": 1.5}, ValueError, r"processes .*1\.5"),
        ({"seeds": []}, ValueError, r"seeds must not be empty, got \[\]"),
        ({"seeds": range(0)}, ValueError, r"seeds must not be empty, got range\(0, 0\)"),
        ({"seeds": [0, "1"]}, TypeError, r"a seed .*'1'"),
        ({"seeds": [True]}, TypeError, r"a seed .*True"),
        ({"seeds": 7}, TypeError, "seeds must be an iterable of integers.*got 7"),
    ],
)
def test_bad_input_is_one_clear_error(arguments: dict[str, object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        explore(**{"scenario": passes, "processes": 1, **arguments})  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_seeds_of_numpy_are_whole_numbers_as_any() -> None:
    """Regression: they were refused: ``the seed 0 is not a whole number``."""
    assert simulate(nothing, ranks=1, seed=np.int64(3)).seed == 3
    report = explore(passes, np.arange(3), processes=1)
    assert (report.seed_count, report.failure) == (3, None)
    with pytest.raises(TypeError, match="seed must be an integer, got True"):
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


def test_random_numbers_of_the_outside_are_left_alone() -> None:
    random.seed(5)
    expected = random.Random(5).random()
    explore(racy, range(3), processes=1, quiet=True)
    assert random.random() == expected


def fails_with_three_and_dies_with_one(seed: int, faults: Sequence[Fault] | None = None) -> ad.SimReport:
    """The first attempt to halve a plan of three faults kills the process."""
    plan = FIVE[:3] if faults is None else faults
    if len(plan) == 1:
        os._exit(3)
    report = simulate(nothing, ranks=3, seed=seed, faults=plan)
    assert len(plan) < 3, "three"
    return report


@pytest.mark.workers
@pytest.mark.long
def test_a_failure_survives_a_process_that_dies_while_shrinking() -> None:
    failure = explore(fails_with_three_and_dies_with_one, [0], processes=2, quiet=True).failure
    assert failure is not None
    assert (failure.kind, failure.minimal_faults) == ("AssertionError", None)
    assert failure.note == "a process died while the plan was being shrunk"


async def trains(world: ad.World) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    async with AsyncSelectiveAveragingPolicy(model, optimizer, average_every=5) as policy:
        for _ in range(100):
            await policy.step(float(world.rank))


def population(seed: int, faults: Sequence[Fault] | None = None) -> ad.SimReport:
    return ad.simulate(trains, ranks=3, seed=seed, faults=[Kill(0, 0.02)] if faults is None else faults)


@pytest.mark.slow
def test_what_was_covered_is_counted_over_all_seeds_and_ranks() -> None:
    report = explore(population, range(4), processes=1)
    report.check()
    alone = [population(seed) for seed in range(4)]
    statistics = [each for one in alone for each in one.statistics if each is not None]
    for kind in ("decided", "applied", "coordinator", "role giving", "role asking"):
        assert report.events[kind] == sum(each.events.get(kind, 0) for each in statistics) > 0, kind
    assert f"covered: rounds {report.events['decided']}, applied {report.events['applied']}" in str(report)
    assert f"giving {report.events['role giving']}" in str(report)
    roles = sum(kind.startswith("role ") for kind in report.events)
    assert report.in_short == f"4 different, 4 faults, {report.events['decided']} rounds, {roles} kinds of roles"
