"""Tests that commands import no module from the working directory, which may be shared by all users, as /tmp is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from asyncdist import environment
from asyncdist.launch import doctor, mpirun
from asyncdist.launchers.variables import NO_LAUNCHER, Launch

PLANT = "from pathlib import Path; Path(__file__).with_name('ran').touch(); raise ImportError('planted')"


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working directory with modules of another user, and the file that they create when they run."""
    for name in ("asyncdist", "mpi4py", "torch", "numpy", "json"):
        tmp_path.joinpath(f"{name}.py").write_text(PLANT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(environment.SAFE_PATH_VARIABLE, raising=False)
    return tmp_path / "ran"


def test_the_search_for_an_mpi_runs_no_planted_module(planted: Path) -> None:
    """Regression: asyncdist run and doctor in /tmp ran an mpi4py.py that another user had put there."""
    assert "planted" not in mpirun.find_installation(environment.environment()).version
    assert not planted.exists()


def test_the_search_for_an_mpi_runs_no_planted_program(planted: Path) -> None:
    """Regression: with a "." at the end of PATH, the working directory's mpirun ran as well as the first one."""
    for name in ("mpirun", "mpiexec", "nvidia-smi"):
        program = planted.with_name(name)
        program.write_text(f"#!/bin/sh\ntouch {planted}\n")
        program.chmod(0o755)
    environ = {**environment.environment(), "PATH": f"{environment.VARIABLES['PATH']}:.:"}
    assert mpirun.find_installation(environ).launchers == mpirun.find_installation(environment.environment()).launchers
    with environment.variable_set("PATH", "."):
        doctor._explain_no_gpu()
    assert not planted.exists()


def test_the_start_of_mpi_by_doctor_runs_no_planted_module(planted: Path) -> None:
    installation = mpirun.Installation(library="openmpi", version="", wheels=(), launchers={})
    doctor._start_mpi(Launch("local", 1, 0, NO_LAUNCHER), installation, environment.environment())
    assert not planted.exists()


def test_a_live_job_runs_no_planted_module(planted: Path) -> None:
    begin = "from asyncdist.launch import live_table; live_table.run(['-n', '1', '--transport', 'torch', 'missing.py'])"
    ended = subprocess.run([sys.executable, "-P", "-c", begin], capture_output=True, text=True, timeout=60, check=False)
    assert "the script 'missing.py' does not exist" in ended.stderr
    assert not planted.exists()


def test_exploring_processes_run_no_planted_module(planted: Path) -> None:
    """Regression: asyncdist sim --explore in /tmp ran a multiprocessing.py that another user had put there."""
    planted.with_name("multiprocessing.py").write_text(PLANT)
    scripts = planted.with_name("scripts")
    scripts.mkdir()
    scripts.joinpath("helper.py").write_text("SECONDS = 0.1")  # the script's own folder is still searched
    scripts.joinpath("train.py").write_text(
        "import asyncio, asyncdist as ad, helper\n"
        "async def main(world): await asyncio.sleep(helper.SECONDS)\n"
        "ad.run(main)\n"
    )
    program = Path(sys.executable).with_name("asyncdist")
    command = [program, "sim", "scripts/train.py", "--ranks", "2", "--explore", "1", "--processes", "2"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "1 seed in" in ended.stdout + ended.stderr
    assert not planted.exists()
