"""Tests that differences between two processes, or two moments of one process, do not change equal simulations."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import secrets
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import asyncdist as ad
from asyncdist.simulation import SimReport, simulate

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Number:
    value: int


@dataclass(frozen=True, slots=True)
class Words:
    value: str


# -- programs whose order of things was that of addresses -----------------------------------------------------------


async def as_completed(world: ad.World) -> list[int]:
    """Complete coroutines: asyncio makes a set of them."""

    async def work(index: int) -> int:
        await world.sleep(random.random())
        return index

    return [await done for done in asyncio.as_completed([work(index) for index in range(20)])]


async def wait_for_tasks_and_futures(world: ad.World) -> list[int]:
    """``asyncio.wait`` returns sets of futures of all kinds."""
    loop = asyncio.get_running_loop()

    def made(index: int) -> asyncio.Future[Any]:
        kinds: list[Callable[[], asyncio.Future[Any]]] = [
            loop.create_future,
            asyncio.Future,
            lambda: asyncio.gather(world.sleep(0.0), world.sleep(0.0)),
            lambda: asyncio.ensure_future(world.sleep(0.0)),
        ]
        return kinds[index % 4]()

    futures = [made(index) for index in range(24)]
    for future in futures:
        if not isinstance(future, asyncio.Task) and not hasattr(future, "_children"):
            loop.call_later(0.1, lambda future=future: future.done() or future.set_result(None))
    done, pending = await asyncio.wait(futures, timeout=0.05)
    order = [futures.index(future) for future in done] + [futures.index(future) for future in pending]
    done.add(pending.pop())
    order += [futures.index(future) for future in done]
    done, pending = await asyncio.wait(pending)
    return order + [futures.index(future) for future in done]


async def own_sets_of_futures(world: ad.World) -> list[int]:
    """Keep sets of futures, as a class keeps its waiters."""
    loop = asyncio.get_running_loop()
    futures: list[asyncio.Future[Any]] = [loop.create_future() for _ in range(20)]
    futures += [asyncio.gather(world.sleep(0.0)) for _ in range(20)]
    await asyncio.gather(*futures[20:])
    return [futures.index(future) for future in set(futures)]


async def all_tasks(world: ad.World) -> list[str]:
    tasks = [asyncio.create_task(world.sleep(1.0)) for _ in range(40)]
    names = [task.get_name() for task in asyncio.all_tasks()]
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    return names


async def left_generators(world: ad.World) -> list[str]:
    """Leave generators: each is in a cycle with an error that it remembers, so only the garbage collector finds it."""
    story: list[str] = []
    channel = world.channel(Number, tag=5)

    async def stream(number: int) -> AsyncIterator[int]:
        try:
            yield number
        finally:
            rank = ad.current_world().rank
            story.append(f"{number} of {rank} at {world.time():.9f}")
            channel.send_nowait(Number(number), (rank + 1) % world.size)

    async def take_one(number: int) -> None:
        generator, last_error = stream(number), None
        try:
            raise ValueError(await anext(generator))
        except ValueError as error:
            last_error = error
        assert last_error is not None

    for number in range(200):
        await take_one(number)
        for _ in range(40):
            await asyncio.sleep(0)
        await world.sleep(0.001)
    assert all(f" of {world.rank} " in line for line in story), "an object was closed on another rank's loop"
    assert 50 < len(story) < 200, "the garbage collector must run now and then"
    return story


# -- random numbers that do not depend on the seed ---------------------------------------------------------------------


async def entropy(world: ad.World) -> list[Any]:
    drawn = [
        np.random.default_rng().random(),
        random.Random().random(),
        random.SystemRandom().random(),
        str(uuid.uuid4()),
        secrets.token_hex(),
        secrets.randbelow(10**9),
        os.urandom(8),
        os.getrandom(8),
        np.random.RandomState().rand(),
        np.random.SeedSequence().entropy,
        torch.seed(),
        torch.rand(()).item(),
    ]
    random.seed()
    np.random.seed()
    drawn += [random.random(), np.random.rand()]
    assert len(set(map(repr, drawn))) == len(drawn)
    await world.channel(Words, tag=5).send(Words(drawn[3]), dest=(world.rank + 1) % world.size)
    return drawn


async def sets_of_words(world: ad.World) -> None:
    """The order of a set of strings depends on the hash seed; its encoded form does not."""
    words = {f"word {number}" for number in range(20)}
    assert await ad.compute_and_broadcast(lambda: words, root=0) == words
    assert await ad.compute_and_broadcast(lambda: frozenset(words), root=0) == words


PROGRAMS = (
    as_completed,
    wait_for_tasks_and_futures,
    own_sets_of_futures,
    all_tasks,
    left_generators,
    entropy,
    sets_of_words,
)


def outcome(program: Callable[..., Any]) -> tuple[str, str, int]:
    report = simulate(program, ranks=3)
    report.value()
    return report.trace_digest, repr(report.results), report.event_count


def disturb() -> None:
    """Do what a process may do between two simulations: simulate, create garbage, and use memory differently."""
    simulate(story, ranks=2, seed=random.randrange(10**6))
    kept = [object() for _ in range(random.randrange(1000))]
    for _ in range(random.randrange(600)):
        cycle: list[Any] = [kept]
        cycle.append(cycle)
    os.urandom(3)


async def story(world: ad.World) -> None:
    tasks = [asyncio.ensure_future(world.sleep(1.0)) for _ in range(5)]
    await ad.barrier()
    assert not tasks[0].done()


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_equal_calls_give_equal_runs_after_any_history(program: Callable[..., Any]) -> None:
    found = set()
    for _ in range(4):
        found.add(outcome(program))
        disturb()
    assert len(found) == 1


@pytest.mark.workers
@pytest.mark.long
def test_equal_calls_give_equal_runs_in_other_processes() -> None:
    program = "from simulation.test_purity import PROGRAMS, outcome\nfor program in PROGRAMS: print(outcome(program))"
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    outputs = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        for hash_seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert outputs[0] == [str(outcome(program)) for program in PROGRAMS]


def test_other_seeds_and_other_ranks_draw_other_entropy() -> None:
    drawn = [entry for seed in (1, 2) for result in simulate(entropy, ranks=2, seed=seed).results for entry in result]
    assert len(set(map(repr, drawn))) == len(drawn)


async def uses_a_temporary_folder(world: ad.World) -> str:
    with tempfile.TemporaryDirectory():
        pass
    return str(uuid.uuid4())


def test_temporary_files_do_not_change_later_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: tempfile drew the seed of its names only in the first simulation of a process."""
    monkeypatch.setattr(tempfile, "_name_sequence", None)
    first, second = (simulate(uses_a_temporary_folder, ranks=2).results for _ in range(2))
    assert first == second
    assert tempfile._name_sequence is None, "names are real again"  # type: ignore[attr-defined]


def test_after_a_simulation_entropy_is_the_systems_again() -> None:
    originals = [os.urandom, random.Random.seed, torch.seed, torch.random.seed, asyncio.all_tasks]
    simulate(entropy, ranks=2)
    assert originals == [os.urandom, random.Random.seed, torch.seed, torch.random.seed, asyncio.all_tasks]
    assert "set" not in asyncio.tasks.__dict__
    assert len({uuid.uuid4() for _ in range(3)} | {np.random.default_rng().random() for _ in range(3)}) == 6


# -- the digest -------------------------------------------------------------------------------------------------------


def test_the_digest_covers_what_messages_hold() -> None:
    async def by_channel(world: ad.World, value: int) -> None:
        channel = world.channel(Number, tag=5)
        await channel.send(Number(value), 1 - world.rank)
        await channel.receive()

    async def by_stream(world: ad.World, value: int) -> None:
        tensor = torch.full((100_000,), float(value))
        tensor[:-1] = 0.0
        await asyncio.gather(
            world.send_stream(tensor, 1 - world.rank), world.receive_stream(torch.empty(100_000), 1 - world.rank)
        )

    for main in (by_channel, by_stream):
        one, two, again = (simulate(main, value, ranks=2) for value in (1, 2, 1))
        assert one.trace == two.trace, "the runs may differ only in the contents of messages"
        assert one.trace_digest != two.trace_digest
        assert one.trace_digest == again.trace_digest


# -- threads ----------------------------------------------------------------------------------------------------------


async def drawing(world: ad.World) -> list[float]:
    drawn = []
    for _ in range(30):
        drawn += [random.random(), np.random.rand(), torch.rand(()).item()]
        await world.safe_point()
    return drawn


def test_simulations_of_several_threads_do_not_mix() -> None:
    """Regression: they drew numbers from each other, and the last left another simulation's functions in ``random``."""
    alone = [simulate(drawing, ranks=3, seed=seed) for seed in range(4)]
    before = [random.random, np.random.rand, threading.Thread.start, time.sleep, os.urandom]
    reports: dict[int, SimReport] = {}

    def run(seed: int) -> None:
        reports[seed] = simulate(drawing, ranks=3, seed=seed)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(4):
        assert reports[seed].results == alone[seed].results
        assert reports[seed].trace_digest == alone[seed].trace_digest
    assert before == [random.random, np.random.rand, threading.Thread.start, time.sleep, os.urandom]


def test_a_thread_alongside_a_simulation_draws_from_no_rank() -> None:
    alone = simulate(drawing, ranks=2).results
    has_begun, is_over = threading.Event(), threading.Event()

    def draw() -> None:
        has_begun.wait()
        while not is_over.is_set():
            random.random(), np.random.rand(), os.urandom(4), uuid.uuid4()

    def tell() -> None:
        has_begun.set()

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        beside = simulate(drawing, ranks=2, after_event=tell).results
    finally:
        is_over.set()
        thread.join()
    assert beside == alone


def test_a_simulation_inside_a_simulation_is_refused() -> None:
    """Both simulations are in one thread; the inner one may begin anywhere."""

    def nested() -> None:
        simulate(story, ranks=1)

    with pytest.raises(ad.LocalProtocolError, match="cannot be started inside another simulation"):
        simulate(story, ranks=1, after_event=nested)
    simulate(story, ranks=1)


# -- asynchronous generators -------------------------------------------------------------------------------------------


def test_generators_left_by_main_are_closed_as_asyncio_does() -> None:
    async def main(world: ad.World, story: list[str]) -> None:
        async def stream(number: int) -> AsyncIterator[int]:
            try:
                yield number
            finally:
                await asyncio.sleep(0.5)
                story.append(f"{number} of rank {world.rank}")

        world.kept = [stream(number) for number in range(3)]  # type: ignore[attr-defined]
        for generator in world.kept:  # type: ignore[attr-defined]
            await anext(generator)

    story: list[str] = []
    report = simulate(main, story, ranks=2)
    report.value()
    assert sorted(story) == sorted(f"{number} of rank {rank}" for number in range(3) for rank in range(2))
    assert report.virtual_time_s > 0.5


def test_the_collector_is_restored_after_a_simulation() -> None:
    before = gc.get_threshold(), gc.isenabled(), sys.get_asyncgen_hooks()
    simulate(left_generators, ranks=2)
    assert before == (gc.get_threshold(), gc.isenabled(), sys.get_asyncgen_hooks())
