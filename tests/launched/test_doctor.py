"""Tests ``asyncdist doctor`` in separate processes: on a healthy machine, under launchers, and with problems."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support import warm
from support.mpi import base_environment, flavour, require_mpi

import asyncdist as ad
from asyncdist import environment
from asyncdist.launch import mpirun

TIMEOUT_S = 100.0


ROOT = Path(__file__).resolve().parents[2]


def examine(*command: str, is_cold: bool = False, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run ``asyncdist doctor`` without a launcher's variables.

    Root may use mpirun, and doctor starts warm by default.
    """
    families = ("OMPI_", "PMIX_", "PMI_", "SLURM_", "TORCHELASTIC_", "ASYNCDIST_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(families)}
    for name in ("OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        clean.pop(name, None)
    path = os.pathsep.join([str(ROOT), *filter(None, [clean.get("PYTHONPATH")])])
    program = Path(sys.executable).with_name("asyncdist")
    words = ["-m", program.name, "doctor"] if is_cold else warm.command(program, ["doctor"], base_environment(), {})
    return subprocess.run(
        [*command, sys.executable, *words],
        env={**clean, **dict.fromkeys(mpirun.ROOT_VARIABLES, "1"), "PYTHONPATH": path, **environ},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )


@pytest.mark.mpi
@pytest.mark.long
def test_a_healthy_machine() -> None:
    require_mpi()
    ended = examine(is_cold=True)
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stdout
    rows = dict(line.split("  ", 1) for line in ended.stdout.splitlines() if "  " in line)
    assert rows["transport"].strip() == "local, no launcher's variables are set"
    assert rows["asyncdist"].strip() == ad.__version__
    assert "gloo" in rows["torch backends"].strip().split(", ")


@pytest.mark.mpi
@pytest.mark.skipif(os.geteuid() != 0, reason="mpirun starts whatever others ask for")
def test_root_is_told_of_what_a_plain_mpirun_refuses() -> None:
    """Regression: doctor did not mention it, and the next command, a plain mpirun, failed."""
    require_mpi()
    if flavour() != "openmpi":
        pytest.skip("MPICH starts whatever root asks for")
    ended = examine(**{mpirun.ROOT_VARIABLES[1]: ""})
    assert ended.returncode == 0
    assert re.search(r"^note: .*\broot\b", ended.stdout, re.MULTILINE) and ended.stdout.endswith("\nall is well\n")
    launcher = mpirun.find_installation(environment.environment()).launchers["openmpi"]
    for confirmed in ("", "1"):
        environ = {**os.environ, mpirun.ROOT_VARIABLES[0]: "1", mpirun.ROOT_VARIABLES[1]: confirmed}
        started = subprocess.run([launcher, "-n", "1", "true"], env=environ, capture_output=True, timeout=TIMEOUT_S)
        assert (started.returncode == 0) == bool(confirmed), started.stderr


ABORTS = """
import os, sys
def Get_library_version(): return "Open MPI v4.1.4, package: Debian OpenMPI"
THREAD_FUNNELED = 1
def Init_thread(level):
    if not os.environ.get("HOME"):
        sys.stderr.write("[host:123] Error: Unable to get the user home directory\\n" * 2 + "-" * 70 + "\\nSorry!\\n")
    else:
        sys.stderr.write("-" * 70 + '\\nThe application appears to have been direct launched using "srun",\\n')
        sys.stderr.write("but OMPI was not built with SLURM's PMI support.\\n\\nThere are several options\\n")
    sys.stderr.flush()
    os._exit(1)
"""


@pytest.mark.long
def test_an_mpi_that_aborts_in_its_start_is_quoted_with_a_cure(tmp_path: Path) -> None:
    """Regression: Debian's Open MPI under srun aborted doctor before it had printed anything."""
    package = tmp_path / "mpi4py"
    package.mkdir()
    (package / "__init__.py").write_text("class rc: pass")
    (package / "MPI.py").write_text(ABORTS)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    ended = examine(
        is_cold=True,
        PYTHONPATH=path,
        ASYNCDIST_TRANSPORT="mpi",
        SLURM_STEP_NUM_TASKS="4",
        SLURM_PROCID="0",
        SLURM_STEP_ID="0",
    )
    assert ended.returncode == 1
    quoted = 'The application appears to have been direct launched using "srun"'
    assert quoted in ended.stdout and "srun --mpi=pmix" in ended.stdout, ended.stdout + ended.stderr
    ended = examine(is_cold=True, PYTHONPATH=path, HOME="")
    quoted = "Error: Unable to get the user home directory"
    assert quoted in ended.stdout and "HOME" in ended.stdout, ended.stdout + ended.stderr


def test_a_deleted_directory_is_told_of() -> None:
    """Regression: a library of torch ended the process in such a directory."""
    folder = tempfile.mkdtemp()
    code = (
        "import os, runpy, sys; os.rmdir(os.getcwd()); "
        "sys.argv[1:] = ['doctor']; runpy.run_module('asyncdist', run_name='__main__')"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert (ended.returncode, ended.stderr) == (1, "")
    assert ended.stdout == (
        "1 thing to fix:\n  1. the working directory has been deleted\n     -> cd to an existing directory\n"
    )


def test_contradictory_variables_are_an_illness() -> None:
    ended = examine(RANK="3", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    assert ended.returncode == 1
    assert "RANK must be from 0 to 1 with WORLD_SIZE=2, got 3" in ended.stdout


def test_started_for_torch() -> None:
    ended = examine(RANK="0", WORLD_SIZE="2", MASTER_ADDR="no host.invalid", MASTER_PORT="1")
    assert ended.returncode == 1
    assert "transport         torch, from WORLD_SIZE" in ended.stdout
    assert "MASTER_ADDR must be a name that all hosts know" in ended.stdout
    ended = examine(RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    assert (ended.returncode, ended.stdout) == (0, ""), "only rank 0 may print"


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"ASYNCDIST_TRANSPORT": "torch"}, "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
    ],
)
def test_what_a_run_refuses_is_an_illness_in_the_same_words(
    environ: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: doctor found no problem with NCCL, and did not notice that MASTER_ADDR='' names no host."""

    async def main(world: ad.World) -> None:
        raise AssertionError

    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError) as caught:
        ad.run(main)
    ended = examine(**environ)
    assert ended.returncode == 1
    assert words in str(caught.value)
    assert f"  1. {caught.value}\n" in ended.stdout and "  2. " not in ended.stdout


def test_a_sick_first_rank_of_another_host_speaks_for_itself() -> None:
    ended = examine(
        RANK="4", WORLD_SIZE="8", LOCAL_RANK="0", LOCAL_WORLD_SIZE="4", MASTER_ADDR="no host.invalid", MASTER_PORT="1"
    )
    assert ended.returncode == 1
    assert ended.stdout.startswith("rank 4 on ")
    assert "'no host.invalid'" in ended.stdout


def test_a_sick_rank_that_is_not_counted_on_its_host_speaks_too() -> None:
    """Regression: such a rank, as in a replay on another machine, printed nothing and returned an exit code."""
    ended = examine(ASYNCDIST_TRANSPORT="mpi", SLURM_STEP_NUM_TASKS="4", SLURM_PROCID="1", SLURM_STEP_ID="0")
    assert ended.returncode == 1
    assert ended.stdout.startswith("rank 1 on ")
    assert "to fix:\n  1. " in ended.stdout


def mpirun_command(ranks: int) -> list[str]:
    require_mpi()
    installation = mpirun.find_installation(environment.environment())
    chosen = mpirun.choose_flavour(installation, None)
    command = mpirun.build_command(chosen, installation.launchers[chosen], "", [], ranks=ranks)
    return command[: command.index(sys.executable)]


@pytest.mark.mpi
def test_under_mpirun_rank_0_prints() -> None:
    command = mpirun_command(2)
    environ = mpirun.build_environment(flavour(), {}, ranks=2, threads=1)  # type: ignore[arg-type]
    ended = examine(*command, **environ)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("started by") == 1
    assert "rank 0 of 2" in ended.stdout
    assert "transport         mpi, from" in ended.stdout
    assert "MPI_THREAD_FUNNELED (asked" in ended.stdout


@pytest.mark.mpi
def test_a_launcher_that_the_library_does_not_know_is_found_out() -> None:
    """With the mpirun of another MPI, mpirun counts four ranks, and the library makes a world of one rank."""
    require_mpi()
    variables = {"openmpi": ("PMI_SIZE", "PMI_RANK"), "mpich": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")}
    size_name, rank_name = variables[flavour()]
    ended = examine(**{size_name: "4", rank_name: "0"})
    assert ended.returncode == 1, ended.stdout
    assert "4 ranks" in ended.stdout
    assert "are different MPIs" in ended.stdout
    assert "asyncdist run finds it" in ended.stdout
