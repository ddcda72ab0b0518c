"""Tests that a run depends only on its arguments (durations, random numbers, digests), and refuses other inputs."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.random import rand as rand_imported_early
from scripts.population import Mixed, sgd
from support.waits import waits_of_mains

import asyncdist as ad
from asyncdist.simulation import (
    Compute,
    Corrupt,
    Delay,
    Duration,
    Exponential,
    Fault,
    Kill,
    Link,
    LogNormal,
    Network,
    Partition,
    SimReport,
    SlowLink,
    SlowRank,
    Stall,
    Uniform,
    simulate,
)
from asyncdist.simulation.distributions import draw, sampler
from asyncdist.simulation.trace import KEPT_EVENT_COUNT, Trace
from protocols import AsyncSelectiveAveragingPolicy

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Number:
    value: int


async def nothing(world: ad.World) -> int:
    return world.rank


# -- durations ------------------------------------------------------------------------------------------------------


def test_durations_are_distributed_as_they_say() -> None:
    rng = random.Random(1)
    uniform = [Uniform(2.0, 3.0).draw(rng) for _ in range(4000)]
    assert min(uniform) >= 2.0 and max(uniform) <= 3.0
    assert statistics.mean(uniform) == pytest.approx(2.5, abs=0.02)
    exponential = [Exponential(0.5).draw(rng) for _ in range(4000)]
    assert min(exponential) >= 0.0
    assert statistics.mean(exponential) == pytest.approx(0.5, rel=0.05)
    assert statistics.median(exponential) == pytest.approx(0.5 * math.log(2.0), rel=0.08)
    normal = [LogNormal(4.0, 0.5).draw(rng) for _ in range(4000)]
    assert min(normal) > 0.0
    assert statistics.median(normal) == pytest.approx(4.0, rel=0.05)
    assert statistics.stdev(map(math.log, normal)) == pytest.approx(0.5, rel=0.05)
    assert [kind.draw(rng) for kind in (Uniform(0.0, 0.0), Exponential(0.0), LogNormal(0.0))] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("duration", [0.5, Uniform(1.0, 2.0), Exponential(3.0), LogNormal(4.0, 0.5), LogNormal(0.0)])
def test_a_sampler_draws_what_the_duration_does(duration: Duration) -> None:
    """The values are equal to the bit, even if others draw from the same generator in between."""
    one, other = random.Random("draws"), random.Random("draws")
    sample = sampler(duration, one)
    for _ in range(50):
        assert sample() == draw(duration, other)
        assert one.gauss(0.0, 1.0) == other.gauss(0.0, 1.0)
        assert sample() == draw(duration, other)
        assert sample() == draw(duration, other)
        assert one.random() == other.random()


def test_compute_of_stragglers_and_pauses() -> None:
    compute = Compute(step_s=2.0, factors={1: 5.0, 2: 0.5}, pause_probability=0.25, pause_s=100.0)
    rng = random.Random(1)
    for rank, step_s in ((0, 2.0), (1, 10.0), (2, 1.0)):
        draw_s = compute.sampler(rank, rng)
        drawn = Counter(draw_s() for _ in range(2000))
        assert set(drawn) == {step_s, step_s + 100.0}
        assert drawn[step_s + 100.0] == pytest.approx(500, rel=0.15)
    assert Compute(step_s=1.0, pause_probability=1.0, pause_s=1.0).sampler(0, rng)() == 2.0


# -- random numbers -------------------------------------------------------------------------------------------------


async def draw_numbers(world: ad.World, seed: int | None) -> list[float]:
    """Return the numbers that user code draws from every global generator between its safe points."""
    if seed is not None:
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
    drawn: list[float] = []
    for _ in range(12):
        drawn += torch.rand(3).tolist()
        drawn += [torch.randn(()).item(), float(torch.randint(1000, ()))]
        # A pair of normal numbers is drawn at once; the second number is kept, in three different places.
        drawn += [np.random.randn(), np.random.rand(), float(np.random.randint(1000)), np.random.sample()]
        drawn += [random.gauss(0.0, 1.0), random.random(), float(random.randrange(1000))]
        drawn += [float(np.random.permutation(10)[0]), random.uniform(0, 1), rand_imported_early()]
        await world.progress()
    return drawn


async def draw_on_each_rank(world: ad.World, base: int | None) -> list[float]:
    return await draw_numbers(world, None if base is None else base + world.rank)


@pytest.mark.slow
@pytest.mark.parametrize("sim_seed", [0, 1, 2])
def test_a_simulated_rank_draws_what_a_real_one_would(sim_seed: int) -> None:
    """The expected numbers come from each rank alone in its own process, without interleaving."""
    alone = [ad.run_local(draw_numbers, 100 + rank, ranks=1)[0] for rank in range(4)]
    report = simulate(draw_on_each_rank, 100, ranks=4, seed=sim_seed)
    report.value()
    assert list(report.results) == alone


def test_draws_of_an_unseeded_rank_follow_from_seed_and_rank() -> None:
    """A real process gets its state from the operating system, but a simulation depends only on its arguments."""
    torch.manual_seed(1)
    first = simulate(draw_on_each_rank, None, ranks=3, seed=5)
    np.random.seed(77)
    random.seed(78)
    torch.rand(10)
    second = simulate(draw_on_each_rank, None, ranks=3, seed=5)
    first.value()
    assert first.results == second.results
    assert first.trace_digest == second.trace_digest
    other = simulate(draw_on_each_rank, None, ranks=3, seed=6)
    drawn = [tuple(result) for report in (first, other) for result in report.results]
    assert len(set(drawn)) == 6, "all ranks and seeds must draw different numbers"


@pytest.mark.parametrize("inherited", [(), ("numpy",)])
def test_a_rank_may_have_another_generator_of_numpy(inherited: tuple[str, ...]) -> None:
    """Regression: PCG64 outside main was an error in ``asyncdist sim``, and in main it had no effect."""

    async def main(world: ad.World) -> list[float]:
        drawn = [np.random.rand()]
        if world.rank == 1:
            np.random.set_bit_generator(np.random.PCG64(5))
        await ad.barrier()
        drawn.append(np.random.rand())
        return drawn

    outside = np.random.get_bit_generator()
    expected = float(np.random.RandomState(np.random.PCG64(4)).rand())  # type: ignore[arg-type]
    np.random.set_bit_generator(np.random.PCG64(4))
    try:
        first, second = simulate(main, ranks=2, inherited_random=inherited).results
        assert np.random.rand() == expected
    finally:
        np.random.set_bit_generator(outside)
    assert (first[0] == second[0] == expected) == bool(inherited)
    assert second[1] == np.random.RandomState(np.random.PCG64(5)).rand() != first[1]  # type: ignore[arg-type]


def test_a_function_imported_inside_main_draws_for_its_caller() -> None:
    """Inside the simulation it draws for the calling rank, and afterwards for the program that simulated."""
    kept: list[Callable[[], float]] = []

    async def main(world: ad.World) -> list[float]:
        from random import random as imported

        kept.append(imported)
        random.seed(world.rank)
        drawn = []
        for _ in range(3):
            await world.progress()
            drawn.append(kept[0]())  # the function that rank 0 has imported
        return drawn

    report = simulate(main, ranks=2)
    report.value()
    alone = [random.Random(rank) for rank in range(2)]
    assert list(report.results) == [[state.random() for _ in range(3)] for state in alone]
    random.seed(5)
    assert kept[0]() == random.Random(5).random()


def caller_state() -> tuple[Any, ...]:
    name, keys, position, has_gauss, gauss = np.random.get_state()
    functions = (random.random, random.gauss, np.random.rand, np.random.seed)
    return torch.get_rng_state().tolist(), random.getstate(), name, keys.tolist(), position, has_gauss, gauss, functions


@pytest.mark.parametrize("end", ["return", "raise", "deadlock", "kill"])
def test_the_callers_own_random_state_is_untouched(end: str) -> None:
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    np.random.randn()  # the second number of a pair is kept
    random.gauss(0.0, 1.0)

    async def main(world: ad.World) -> None:
        try:
            await draw_numbers(world, None)
            if end == "raise":
                raise RuntimeError("expected")
            if end == "deadlock":
                await asyncio.Event().wait()
            if end == "kill" and world.rank == 1:
                await world.sleep(100.0)
        finally:
            random.random()
            np.random.randn()
            torch.rand(1)

    before = caller_state()
    faults = [Kill(1, at_s=1.0)] if end == "kill" else []
    try:
        report = simulate(main, ranks=2, faults=faults, return_exceptions=True)
        assert end != "deadlock"
        assert any(isinstance(result, RuntimeError) for result in report.results) == (end == "raise")
    except ad.DeadlockError:
        assert end == "deadlock"
    assert caller_state() == before


# -- determinism ----------------------------------------------------------------------------------------------------

STORY_FAULTS: tuple[Fault, ...] = (
    Stall(1, at_s=0.002, duration_s=0.01),
    SlowRank(2, at_s=0.0, factor=2.0),
    SlowLink(0, 3, at_s=0.0, factor=4.0),
    Partition((0, 1), at_s=0.004, until_s=0.008),
    Delay(2, 0, number=3, duration_s=0.005),
    Corrupt(0, 1, number=15),
    Kill(3, at_s=0.05),
)


async def story(world: ad.World) -> list[float]:
    """Use a policy, streams, collectives, wildcard receives, sets of tasks and of strings, and a failing task group."""
    channel = world.channel(Number, tag=5)
    model = Mixed()
    for tensor in model.parameters():
        torch.nn.init.normal_(tensor)

    async def chatter(index: int) -> None:
        try:
            await world.sleep(random.random() * 1e-3)
            channel.send_nowait(Number(index), random.randrange(world.size))
            await asyncio.Event().wait()
        finally:
            channel.send_nowait(Number(100 + index), index % world.size)

    async def fail() -> None:
        await world.sleep(1e-3)
        raise ValueError("expected")

    try:
        async with asyncio.TaskGroup() as tasks:  # cancels its tasks in the order of a set
            for index in range(8):
                tasks.create_task(chatter(index))
            tasks.create_task(fail())
    except* ValueError:
        pass
    left, right = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    room = torch.zeros(50_000)
    await asyncio.gather(world.send_stream(torch.rand(50_000), right), world.receive_stream(room, left))
    done, pending = await asyncio.wait(
        [asyncio.ensure_future(world.sleep(random.random() * 1e-4)) for _ in range(5)], timeout=5e-5
    )
    for index, task in enumerate([*done, *pending]):
        channel.send_nowait(Number(200 + index + task.done()), right)
    await asyncio.wait([*done, *pending])
    async with AsyncSelectiveAveragingPolicy(
        model, sgd(model), average_every=2, replacement_ratio=0.5, grace_s=0.002, round_timeout_s=0.02
    ) as policy:
        for _ in range(25):
            await policy.step(random.gauss(0.0, 1.0))
    heard = 0
    while (envelope := channel.receive_nowait()) is not None:
        heard += envelope.message.value
    return [float(heard), room.sum().item(), *(tensor.double().sum().item() for tensor in model.state_dict().values())]


def tell_story(seed: int) -> SimReport:
    logging.disable(logging.ERROR)
    try:
        return simulate(story, ranks=5, seed=seed, faults=STORY_FAULTS)
    finally:
        logging.disable(logging.NOTSET)


def outcome(report: SimReport) -> tuple[Any, ...]:
    return (
        report.trace_digest,
        [repr(result) for result in report.results],
        report.virtual_time_s,
        report.message_count,
        report.byte_count,
        report.event_count,
        report.faults_fired,
        report.statistics,
        report.trace,
    )


@pytest.mark.slow
def test_equal_arguments_give_equal_runs_and_other_seeds_others() -> None:
    digests = set()
    fired: Counter[int] = Counter()
    for seed in range(6):
        first, second = tell_story(seed), tell_story(seed)
        assert outcome(first) == outcome(second), f"seed {seed}"
        digests.add(first.trace_digest)
        fired.update(index for index, count in enumerate(first.faults_fired) if count)
    assert len(digests) == 6
    assert set(fired) == set(range(len(STORY_FAULTS))), f"fired: {fired}"


@pytest.mark.workers
@pytest.mark.long
def test_digests_do_not_depend_on_the_process_or_its_hash_seed() -> None:
    program = """
from simulation.test_models import tell_story
for seed in (3, 4):
    report = tell_story(seed)
    print(report.trace_digest, report.results)
"""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    outputs = []
    for hash_seed in ("1", "2"):
        environ = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(
            [sys.executable, "-c", program], env=environ, cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, ended.stderr
        outputs.append(ended.stdout)
    assert outputs[0] == outputs[1]
    assert tell_story(3).trace_digest in outputs[0]


@pytest.mark.slow
def test_the_digest_covers_every_event_also_those_no_longer_kept() -> None:
    traces = [Trace() for _ in range(3)]
    for trace in traces:
        for i in range(KEPT_EVENT_COUNT + 10):
            trace.add(i * 0.5, "send", 1 if i or trace is not traces[2] else 2, 0, 5, 100)
    assert traces[0].digest == traces[1].digest == traces[0].digest
    assert traces[0].digest != traces[2].digest, "traces must differ from the first event on"
    assert traces[0].events() == traces[2].events()
    assert len(traces[0].events()) == KEPT_EVENT_COUNT
    traces[1].add(0.0, "end", 0, 0, 0, 0)
    assert traces[0].digest != traces[1].digest
    assert "send 1 -> 0, tag 5, 100 bytes" in str(traces[0].events()[0])


# -- results --------------------------------------------------------------------------------------------------------


def test_results_are_the_values_of_all_ranks() -> None:
    assert simulate(nothing, ranks=3).results == (0, 1, 2)
    assert simulate(nothing, ranks=3).value() == 0


def test_until_s_is_a_limit_that_says_where_each_rank_is() -> None:
    async def main(world: ad.World) -> str:
        while world.rank == 1:
            await world.safe_point()
        if world.rank == 2:
            await world.sleep(100.0)
        return "ended"

    with pytest.raises(ad.TimeLimitError) as caught:
        simulate(main, ranks=3, until_s=10.0)
    assert isinstance(caught.value, TimeoutError)
    first, *_ = str(caught.value).splitlines()
    assert first == "until_s=10 is reached at 10.000000000 s of virtual time, and these have not ended:"
    waits = waits_of_mains(str(caught.value))
    assert set(waits) == {0, 1, 2}
    for rank, name in ((1, "safe_point"), (2, "sleep")):
        assert name in waits[rank].partition(",")[0] and main.__qualname__ in waits[rank]
    assert caught.value.report.results == (None, None, None), (
        "rank 0 has returned, but leaves together with the others, so there are no results"
    )
    assert caught.value.report.virtual_time_s == 10.0

    async def short(world: ad.World) -> str:
        await world.sleep(100.0)
        return "ended"

    assert simulate(short, ranks=2, until_s=1000.0).results == ("ended", "ended")


def test_strict_finds_what_is_left_over() -> None:
    async def main(world: ad.World) -> None:
        channel = world.channel(Number, tag=5)
        await channel.send(Number(1), world.rank)
        await world.sleep(1.0)

    with pytest.raises(ad.LocalProtocolError, match=r"\b1 .*Number, tag 5"):
        simulate(main, ranks=1, strict=True).value()


def test_what_after_event_raises_ends_the_run() -> None:
    class Broken(Exception):
        pass

    seen: list[int] = []

    def check() -> None:
        seen.append(1)
        if len(seen) == 20:
            raise Broken

    with pytest.raises(Broken):
        simulate(draw_on_each_rank, 1, ranks=2, after_event=check)
    assert len(seen) >= 20
    counted: list[int] = []
    report = simulate(draw_on_each_rank, 1, ranks=2, after_event=lambda: counted.append(1))
    assert len(counted) == report.event_count


# -- bad input ------------------------------------------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")


def plain_function(world: ad.World) -> None:
    """A function that is not a coroutine function."""


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"ranks": 0}, ValueError, r"ranks .*\b0\b"),
        ({"ranks": -3}, ValueError, r"ranks .*-3"),
        ({"ranks": 2.0}, ValueError, r"ranks .*2\.0"),
        ({"ranks": True}, ValueError, r"ranks .*True"),
        (
            {"main": plain_function},
            TypeError,
            r"plain_function \(.*py:\d+\)",
        ),
        ({"main": "train"}, TypeError, r"main .*'train'"),
        ({"seed": 1.5}, TypeError, r"seed .*1\.5"),
        ({"until_s": -1.0}, ValueError, r"until_s .*-1\.0"),
        ({"until_s": NAN}, ValueError, r"until_s .*nan"),
        ({"network": 5}, TypeError, r"network must be a Network, got 5"),
        ({"compute": 0.1}, TypeError, r"compute must be a Compute, got 0\.1"),
        ({"after_event": 3}, TypeError, r"after_event must be a function without arguments, got 3"),
        ({"faults": Kill(0, at_s=1.0)}, TypeError, r"faults must be a list of faults, got Kill\("),
        ({"faults": ["kill"]}, TypeError, r"a fault, got 'kill'"),
        ({"faults": [Kill(2, at_s=1.0)]}, ValueError, r"Kill\(rank=2.* must name ranks from 0 to 1, got rank 2"),
        ({"faults": [Kill(-1, at_s=1.0)]}, ValueError, r"rank -1\b"),
        ({"faults": [Stall(5, 0.0, 1.0)]}, ValueError, r"Stall\(rank=5.*\brank 5\b"),
        ({"faults": [SlowRank(7, 0.0, 2.0)]}, ValueError, r"\brank 7\b"),
        ({"faults": [SlowLink(0, 2, 0.0, 2.0)]}, ValueError, r"\brank 2\b"),
        ({"faults": [Partition((0, 9), 0.0, 1.0)]}, ValueError, r"\brank 9\b"),
        (
            {"faults": [Partition((), 0.0, 1.0)]},
            ValueError,
            r"must be some of the .* ranks, but not all",
        ),
        ({"faults": [Partition((1, 0, 1), 0.0, 1.0)]}, ValueError, r"\b2 ranks\b"),
        ({"faults": [Delay(0, 3, 1, 1.0)]}, ValueError, r"\brank 3\b"),
        ({"faults": [Corrupt(4, 1, 1)]}, ValueError, r"\brank 4\b"),
        ({"inherited_random": None}, ValueError, "inherited_random must be .*'numpy', 'random', 'torch', got None"),
        ({"inherited_random": "torch"}, ValueError, "inherited_random must be a list .*, got 'torch'"),
        ({"inherited_random": ["jax"]}, ValueError, r"inherited_random .*\['jax'\]"),
        ({"network": Network(links={(0, 2): Link()})}, ValueError, r"\(0, 2\) .*\brank 2\b"),
        ({"compute": Compute(factors={2: 1.0})}, ValueError, r"Compute\.factors .*\brank 2\b"),
    ],
)
def test_bad_arguments_are_named_with_what_is_allowed(options: dict[str, Any], kind: type, said: str) -> None:
    main = options.pop("main", nothing) if "main" in options else nothing
    with pytest.raises(kind, match=said):
        simulate(main, **{"ranks": 2, **options})


@pytest.mark.parametrize(
    ("make", "options", "said"),
    [
        (Link, {"latency_s": -1e-6}, r"latency_s .*-1e-06"),
        (Link, {"latency_s": NAN}, r"latency_s .*nan"),
        (Link, {"latency_s": INF}, r"latency_s .*inf"),
        (Link, {"latency_s": "fast"}, r"latency_s .*'fast'"),
        (Link, {"latency_s": True}, r"latency_s .*True"),
        (Link, {"bandwidth_nbytes_per_s": 0}, r"bandwidth_nbytes_per_s .*\b0\b"),
        (Link, {"bandwidth_nbytes_per_s": NAN}, r"bandwidth_nbytes_per_s .*nan"),
        (Network, {"ranks_per_host": 0}, r"ranks_per_host .*\b0\b"),
        (Network, {"eager_nbytes": -1}, r"eager_nbytes .*-1"),
        (Network, {"eager_nbytes": 1.5}, r"eager_nbytes .*1\.5"),
        (Network, {"loss_detection_s": -1.0}, r"loss_detection_s .*-1\.0"),
        (Network, {"link": 0.1}, r"link must be a Link, got 0\.1"),
        (Network, {"links": {(0, 1): 0.1}}, r"\(0, 1\) must be a Link, got 0\.1"),
        (Compute, {"step_s": -1.0}, r"step_s .*-1\.0"),
        (Compute, {"pause_probability": -0.1}, r"pause_probability .*-0\.1"),
        (Compute, {"pause_probability": 1.5}, r"pause_probability .*1\.5"),
        (Compute, {"pause_probability": NAN}, r"pause_probability .*nan"),
        (Compute, {"factors": {0: -2.0}}, r"factor .*\brank 0\b.*-2\.0"),
        (Uniform, {"low": 2.0, "high": 1.0}, r"Uniform.high must be >= low=2\.0, got 1\.0"),
        (Uniform, {"low": NAN, "high": 1.0}, r"Uniform\.low .*nan"),
        (Exponential, {"mean": -1.0}, r"Exponential\.mean .*-1\.0"),
        (LogNormal, {"median": 1.0, "sigma": NAN}, r"LogNormal\.sigma .*nan"),
        (LogNormal, {"median": 1e-6, "sigma": 1e6}, r"LogNormal\.sigma .*1000000\.0"),
        (Network, {"links": 3}, r"links must be a dict that maps \(source, dest\) to a Link, got 3"),
        (Network, {"links": [Link()]}, r"links must be a dict .*, got \[Link"),
        (Network, {"links": {0: Link()}}, r"a key of links must be a pair of ranks \(source, dest\), got 0"),
        (Network, {"links": {(0,): Link()}}, r"links .*\(0,\)"),
        (Network, {"links": {(0, 1, 1): Link()}}, r"links .*\(0, 1, 1\)"),
        (Compute, {"factors": [1.0, 2.0]}, r"factors must be a dict that maps ranks to factors, got \[1\.0, 2\.0\]"),
        (Kill, {"rank": 0}, r"must have exactly one of at_s, at_turn and at_message"),
        (Kill, {"rank": 0, "at_s": 1.0, "at_turn": 3}, r"at_s, at_turn"),
        (Kill, {"rank": 0, "at_s": NAN}, r"at_s .*nan"),
        (Kill, {"rank": 0, "at_turn": 0}, r"at_turn .*\b0\b"),
        (Kill, {"rank": 0, "at_message": 1.5}, r"at_message .*1\.5"),
        (Stall, {"rank": 0, "at_s": 0.0, "duration_s": -1.0}, r"duration_s .*-1\.0"),
        (SlowRank, {"rank": 0, "at_s": 0.0, "factor": NAN}, r"factor .*nan"),
        (SlowLink, {"source": 0, "dest": 1, "at_s": 0.0, "factor": -2.0}, r"factor .*-2\.0"),
        (Partition, {"ranks": (0,), "at_s": 2.0, "until_s": 1.0}, r"until_s must be >= at_s"),
        (Partition, {"ranks": 0, "at_s": 0.0, "until_s": 1.0}, r"ranks of Partition must be a tuple of ranks, got 0"),
        (Delay, {"source": 0, "dest": 1, "number": 0, "duration_s": 1.0}, r"number .*\b0\b"),
        (Delay, {"source": 0, "dest": 1, "number": 1, "duration_s": INF}, r"duration_s .*inf"),
        (Corrupt, {"source": 0, "dest": 1, "number": 1.5}, r"number .*1\.5"),
        (Corrupt, {"source": 0, "dest": 1, "number": 1, "byte": "a"}, r"byte .*'a'"),
    ],
)
def test_bad_models_are_named_with_what_is_allowed(make: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        make(**options)


def test_whole_numbers_of_numpy_count_and_are_written_as_pythons() -> None:
    fault = Delay(0, 0, np.int64(2), 0.5)  # type: ignore[arg-type]
    assert repr(fault) == "Delay(source=0, dest=0, number=2, duration_s=0.5)"

    async def main(world: ad.World) -> None:
        channel = world.channel(Number, tag=5)
        for _ in range(2):
            await channel.send(Number(1), world.rank)
            await channel.receive()

    report = simulate(main, ranks=np.int64(1), faults=[fault])  # type: ignore[arg-type]
    report.value()
    report.check_faults()
    assert report.virtual_time_s > 0.5, "a rank's messages to itself must be delayed, too"


def test_other_numbers_of_numpy_count_and_are_written_as_pythons() -> None:
    """Regression: a duration of NumPy was accepted, but could not be drawn, and was written as np.float64(0.5)."""
    for kind in (np.float32, np.float64):
        half = kind(0.5)
        models: list[Any] = [
            *(Uniform(half, half), Exponential(half), LogNormal(half, half), Link(latency_s=half)),
            Network(host_bandwidth_nbytes_per_s=half, ranks_per_host=1, loss_detection_s=half),
            Compute(step_s=half, pause_s=half, factors={0: half}, pause_probability=half, overrun_probability=half),
            *(Kill(0, at_s=half), SlowLink(0, 1, factor=kind(2), at_s=half)),
        ]
        values = [getattr(each, field.name) for each in models for field in fields(each)]
        assert [value for value in values if isinstance(value, np.generic)] == []
    compute = Compute(step_s=np.float32(0.5), pause_s=np.int64(1), pause_probability=0.5)  # type: ignore[arg-type]

    async def main(world: ad.World) -> None:
        await world.safe_point()

    network = Network(loss_detection_s=np.int64(1), link=Link(latency_s=np.float32(0.5)))  # type: ignore[arg-type]
    simulate(main, ranks=2, compute=compute, network=network)


def test_no_simulation_inside_a_simulation() -> None:
    async def main(world: ad.World, runs: Any) -> None:
        runs(nothing)

    with pytest.raises(ad.LocalProtocolError, match="<World rank 0 of 1, sim>"):
        simulate(main, lambda inner: simulate(inner, ranks=1), ranks=1).value()
    with pytest.raises(ad.LocalProtocolError, match="<World rank 0 of 1, sim>"):
        simulate(main, lambda inner: ad.run(inner), ranks=1).value()
    with pytest.raises(ad.LocalProtocolError, match="<World rank 0 of 1, sim>"):
        simulate(main, lambda inner: ad.run_local(inner, ranks=1), ranks=1).value()
