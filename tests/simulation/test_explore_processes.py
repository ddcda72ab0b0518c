"""Tests exploring processes that die or get signals; none outlives the process that started it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import is_alive, wait_until

import asyncdist as ad
from asyncdist.simulation import (
    explore,
    simulate,
)


def dies(seed: int) -> ad.SimReport:
    os._exit(3)


@pytest.mark.workers
@pytest.mark.long
def test_a_process_that_dies_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"died while it ran one of the seeds 0 to 3.*processes=1"):
        explore(dies, range(4), processes=2)


UNGUARDED = """
from asyncdist.simulation import explore, simulate

async def main(world):
    return world.rank

def scenario(seed):
    return simulate(main, ranks=2, seed=seed)

explore(scenario, range(4), processes=2)
"""


@pytest.mark.long
@pytest.mark.workers
def test_a_script_without_a_main_guard_is_one_clear_error(tmp_path: Path) -> None:
    """Each process would otherwise start the exploration again, and print Python's long message about this."""
    script = tmp_path / "unguarded.py"
    script.write_text(UNGUARDED)
    environ = {**os.environ, "PYTHONPATH": str(Path(ad.__file__).parents[1])}
    ended = subprocess.run(
        [sys.executable, str(script)], env=environ, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 1
    assert ended.stderr.count("Traceback") == 1, ended.stderr
    assert "under if __name__ == '__main__'" in ended.stderr


def endless_but_for_one(seed: int) -> ad.SimReport:
    if seed == 0:
        raise ValueError("seed 0")
    return simulate(for_ever, ranks=1, seed=seed)


async def for_ever(world: ad.World) -> None:
    while True:
        await world.safe_point()


@pytest.mark.long
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


@pytest.mark.workers
@pytest.mark.parametrize(
    ("processes", "number"),
    [
        (1, signal.SIGINT),
        pytest.param(2, signal.SIGINT, marks=pytest.mark.long),
        pytest.param(2, signal.SIGKILL, marks=pytest.mark.long),
    ],
)
def test_no_process_outlives_a_signal(tmp_path: Path, processes: int, number: signal.Signals) -> None:
    script = tmp_path / "endless.py"
    script.write_text(ENDLESS)
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path), str(processes)], stderr=subprocess.PIPE, text=True, process_group=0
    )
    try:
        assert wait_until(lambda: len(list(tmp_path.glob("*.pid"))) == processes)
        pids = [int(path.stem) for path in tmp_path.glob("*.pid")]
        # A terminal sends its signal to all of them.
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
        _, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == -number
    assert wait_until(lambda: not any(map(is_alive, pids)))
    if number == signal.SIGINT:
        assert error.count("Traceback") == 1, "only the process's own traceback may be printed"


BEGUN: list[int] = []


def interrupted(seed: int) -> ad.SimReport:
    BEGUN.append(seed)
    return simulate(interrupts, ranks=3, seed=seed)


async def interrupts(world: ad.World) -> str:
    """Would continue forever if it took a signal for its own error."""
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
