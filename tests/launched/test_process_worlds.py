"""Tests a world that lasts as long as its process, or was never left: how the other ranks are notified of each end."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import mpi, torchrun, warm
from support.endings import stopped_by

from asyncdist.launchers import addresses

PROGRAM = """
import contextvars, sys, time
import asyncdist as ad
from support.mpi import report

def installs():
    sys.excepthook = lambda *_: print("another hook", file=sys.stderr)  # as libraries do, that chain nothing

def opens():
    return ad.blocking.process_world()

world = contextvars.copy_context().run(opens) if {how!r} == "elsewhere" else opens()
ad.seed_all(1)
if {how!r} == "hook":
    installs()
report(world.rank, "began")
ad.blocking.barrier()
if world.rank == 1 and {how!r} in ("raise", "hook"):
    raise ZeroDivisionError("mine")
if world.rank == 1 and {how!r} == "exit":
    sys.exit(3)
if {how!r} in ("raise", "hook", "exit"):
    for _ in range(3000):
        world.sleep(0.01)
report(world.rank, "ended")
"""


@pytest.mark.mpi
@pytest.mark.parametrize("how", ["elsewhere", "raise", "hook", "exit"])
@pytest.mark.long
def test_the_others_hear_how_a_rank_ends(how: str) -> None:
    result = mpi.run_source(2, PROGRAM.replace("{how!r}", repr(how)))
    if how == "elsewhere":
        assert result.check().reports == {0: "ended", 1: "ended"}
        assert result.stderr == ""
        return
    result.check(returncode=None)
    assert result.reports == {0: "began", 1: "began"}, "rank 0 must have stopped, too"
    told = "SystemExit: 3" if how == "exit" else "ZeroDivisionError: mine"
    assert stopped_by(result.stderr, 1, told) == [0]


def test_after_its_script_a_rank_names_a_failed_one_in_one_line() -> None:
    """Regression: the rank also printed the traceback of the error that ended its world, thirty lines of asyncdist."""
    source = """
        import asyncdist as ad

        world = ad.blocking.process_world()
        ad.blocking.barrier()
        if world.rank == 1:
            raise ZeroDivisionError("mine")
        print("its script has ended")
    """
    ended = torchrun.run_source(3, source).check(1, 1, 1)
    assert ended.stdout.count("its script has ended") == 2
    assert stopped_by(ended.stderr, 1, "ZeroDivisionError: mine") == [0, 2], ended.stderr
    assert ended.stderr.count("Traceback") == 1, ended.stderr


PLAIN = """
import contextlib, signal, sys
import asyncdist as ad

world = ad.blocking.process_world()
ad.blocking.barrier()
with contextlib.suppress(SystemExit):
    sys.exit(4)
if {code} and world.rank == 0:
    for _ in range(3000):
        world.sleep(0.01)
elif world.rank == 1:
    {end}
"""


@pytest.mark.parametrize(
    ("end", "code", "told"),
    [
        pytest.param("sys.exit(3)", 3, "SystemExit: 3", marks=pytest.mark.slow),
        pytest.param("signal.raise_signal(15)", 143, "SystemExit: 143 (SIGTERM)", marks=pytest.mark.long),
        pytest.param("pass", 0, "", marks=pytest.mark.long),
    ],
)
def test_a_rank_of_plain_python_fails_with_its_exit_code(tmp_path: Path, end: str, code: int, told: str) -> None:
    """Regression: without ``asyncdist run``, the rank left the world as if it had succeeded."""
    (tmp_path / "train.py").write_text(PLAIN.format(end=end, code=code))
    command, port = [sys.executable, str(tmp_path / "train.py")], addresses.find_free_port()
    ended = torchrun.run_jobs([(command, torchrun.rank_environment(rank, 2, port)) for rank in range(2)], 100)
    ended.check(int(code > 0), code)
    assert stopped_by(ended.stderr, 1, told) == [0] * (code > 0), ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("script", ["train.py", "wrapper.py"])
def test_a_restarted_rank_that_is_too_late_succeeds(tmp_path: Path, script: str) -> None:
    """Regression: the rank printed a traceback, and the job failed; later, only if another program started Python."""
    source = "import asyncdist as ad; ad.blocking.process_world(); raise ad.LateError('this rank comes too late')"
    (tmp_path / "train.py").write_text(source)
    (tmp_path / "wrapper.sh").write_text(f"exec {sys.executable} train.py\n")
    wrapper = "import subprocess, sys; sys.exit(subprocess.run(['sh', 'wrapper.sh']).returncode)"
    (tmp_path / "wrapper.py").write_text(wrapper)
    program = [script] if script == "wrapper.py" else warm.command(tmp_path / script, (), mpi.base_environment(), {})
    command = [sys.executable, "-m", "asyncdist", "run", "--transport", "torch", "-n", "1", *program]
    ended = subprocess.run(
        command, cwd=tmp_path, env=mpi.base_environment(), capture_output=True, text=True, timeout=100, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "asyncdist: this rank comes too late, so nothing is left to do\n")


def test_ctrl_c_is_one_line_of_each_rank(tmp_path: Path) -> None:
    """Regression: each rank also printed the traceback of its code, and the tracebacks of several ranks were mixed."""
    (tmp_path / "train.py").write_text(
        "import signal; import asyncdist as ad\n"
        "world = ad.blocking.process_world(); ad.blocking.barrier()\n"
        "signal.raise_signal(signal.SIGINT)\n"
    )
    environ = mpi.base_environment()
    program = warm.command(tmp_path / "train.py", (), environ, {})
    command = [sys.executable, "-m", "asyncdist", "run", "--transport", "torch", "-n", "2", *program]
    ended = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=100, check=False)
    lines = [line for line in ended.stderr.splitlines() if not line.startswith("asyncdist run: ")]
    assert ended.returncode == 130 and any("was interrupted" in line for line in lines), ended.stderr
    assert len(lines) <= 2 and all(line.startswith("asyncdist: rank ") for line in lines), ended.stderr


def test_ctrl_c_in_lone_training_shows_the_line_of_the_script(tmp_path: Path) -> None:
    """Regression: the output was a traceback in two parts and forty lines, most of them about ending worlds."""
    (tmp_path / "train.py").write_text(
        "import signal; import asyncdist as ad\n"
        "world = ad.blocking.process_world(); ad.blocking.barrier()\n"
        "signal.raise_signal(signal.SIGINT)\n"
    )
    command = [sys.executable, str(tmp_path / "train.py")]
    ended = subprocess.run(
        command, env=mpi.base_environment(), capture_output=True, text=True, timeout=100, check=False
    )
    assert ended.returncode == -signal.SIGINT, ended.stderr
    assert ended.stderr.count("Traceback") == 1 and "During handling" not in ended.stderr, ended.stderr
    assert ended.stderr.splitlines()[2].strip() == "signal.raise_signal(signal.SIGINT)", ended.stderr
    assert len(ended.stderr.splitlines()) <= 7 and ended.stderr.endswith("\nKeyboardInterrupt\n"), ended.stderr


def test_a_world_that_nobody_leaves_is_left_at_the_end_and_named(tmp_path: object) -> None:
    source = """
        import asyncdist as ad

        def steps():
            with ad.blocking.open_world() as world:
                while True:
                    world.safe_point()
                    yield world.rank

        found = steps()
        next(found)
        if REST:
            del found
        print("end")
    """
    for rest in ("True", "False"):
        ended = torchrun.run_source(2, source.replace("REST", rest)).check()
        assert ended.stdout.count("end") == 2
        assert ("was never left" in ended.stderr) == (rest == "False"), ended.stderr


def test_a_save_in_progress_is_completed_after_the_script(tmp_path: Path) -> None:
    """Regression: "cannot schedule new futures after shutdown", and the process ended with code 0."""
    program = """
import sys, torch
import asyncdist as ad
ad.blocking.process_world()
ad.blocking.async_save_population(sys.argv[1], torch.nn.Linear(100, 100))
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert (tmp_path / "checkpoint-000001" / "manifest.json").exists(), completed.stderr


@pytest.mark.parametrize(
    "call",
    [pytest.param("ad.run(train)", marks=pytest.mark.long), "blocking_train(ad.blocking.process_world())"],
)
def test_a_program_without_a_launcher_is_told_once(tmp_path: Path, call: str) -> None:
    """Regression: DiLoCo trained on one rank, and nothing was said."""
    script = tmp_path / "train.py"
    script.write_text(
        """
import torch
import asyncdist as ad
from protocols import DiLoCoPolicy

def new_policy():
    model = torch.nn.Linear(2, 1)
    return DiLoCoPolicy(model, torch.optim.SGD(model.parameters(), 0.1), average_every=2)

async def train(world):
    for _ in range(2):
        async with new_policy() as policy:
            await policy.step()

def blocking_train(world):
    for _ in range(2):
        with ad.blocking.policy(new_policy()) as policy:
            policy.step()

"""
        + call
    )
    completed = torchrun.run_alone(script).check()
    expected = "this process trains alone, so nothing is averaged; to start four ranks, use asyncdist run -n 4"
    assert completed.stderr == f"{expected} {script}\n" and not completed.stdout
