"""Tests the detection of the launcher from recorded and made-up environments, and which variables are cleared."""

from __future__ import annotations

import os

import pytest
from support.launchers import BY_HAND, HYDRA, OPENMPI, SUBMITIT, TORCHRUN

from asyncdist import environment
from asyncdist.errors import TransportError
from asyncdist.launch import doctor, run_command
from asyncdist.launchers import child_environment as children, detection, slurm
from asyncdist.launchers.backends import BACKENDS, RUN_NAMES
from asyncdist.launchers.variables import Launch
from asyncdist.transports import mpi_launchers, select

# Variables that each launcher really sets, as far as they describe ranks and their places.
RECORDED: dict[str, tuple[dict[str, str], Launch]] = {
    "mpirun of Open MPI 5.0.11": (
        {
            "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            "OMPI_COMM_WORLD_NODE_RANK": "1",
            "OMPI_COMM_WORLD_RANK": "1",
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_UNIVERSE_SIZE": "2",
            "OMPI_WORLD_LOCAL_SIZE": "2",
            "OMPI_WORLD_SIZE": "2",
            "PMIX_HOSTNAME": "host",
            "PMIX_NAMESPACE": "prterun-host-16584@1",
            "PMIX_RANK": "1",
            "PMIX_SERVER_URI41": "prterun-host-16584@0.0;tcp4://127.0.0.1:44547",
            "PRTE_LAUNCHED": "1",
        },
        Launch("mpi", 2, 1, "OMPI_COMM_WORLD_SIZE"),
    ),
    "mpiexec of MPICH 5.0.2": (
        {
            "HYDI_CONTROL_FD": "7",
            "MPI_LOCALNRANKS": "2",
            "MPI_LOCALRANKID": "1",
            "PMI_FD": "9",
            "PMI_HOSTNAME": "host",
            "PMI_RANK": "1",
            "PMI_SIZE": "2",
        },
        Launch("mpi", 2, 1, "PMI_SIZE"),
    ),
    "torchrun of torch 2.13": (
        {
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "41755",
            "OMP_NUM_THREADS": "1",
            "RANK": "1",
            "ROLE_NAME": "default",
            "ROLE_RANK": "1",
            "ROLE_WORLD_SIZE": "2",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_RUN_ID": "c3e6518d-a13e-4bc5-a734-6afbe35028a1",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "WORLD_SIZE": "2",
        },
        Launch("torch", 2, 1, "TORCHELASTIC_RUN_ID"),
    ),
    # Recorded from Slurm 22.05.
    "srun -n 2 without MPI": (
        {
            "SLURM_GTIDS": "0,1",
            "SLURM_JOB_ID": "38749",
            "SLURM_LOCALID": "1",
            "SLURM_NODEID": "0",
            "SLURM_NPROCS": "2",
            "SLURM_PROCID": "1",
            "SLURM_STEP_ID": "1",
            "SLURM_STEP_NODELIST": "host1",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_TASKS_PER_NODE": "2",
            "SLURM_TASKS_PER_NODE": "2",
        },
        Launch("torch", 2, 1, "SLURM_STEP_NUM_TASKS"),
    ),
    "srun --mpi=pmix -n 2": (
        {
            "PMIX_NAMESPACE": "slurm.pmix.1731563.0",
            "PMIX_RANK": "1",
            "SLURM_LOCALID": "1",
            "SLURM_MPI_TYPE": "pmix",
            "SLURM_PMIX_MAPPING_SERV": "(vector,(0,1,2))",
            "SLURM_PROCID": "1",
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_TASKS": "2",
        },
        Launch("mpi", 2, 1, "PMIX_RANK"),
    ),
    "srun --mpi=pmi2 -n 2": (
        {
            "PMI_FD": "12",
            "PMI_RANK": "1",
            "PMI_SIZE": "2",
            "SLURM_LOCALID": "1",
            "SLURM_MPI_TYPE": "pmi2",
            "SLURM_PROCID": "1",
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_TASKS": "2",
        },
        Launch("mpi", 2, 1, "PMI_SIZE"),
    ),
}

SLURM = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2", "SLURM_STEP_ID": "0"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Launch("local", 1, 0, "no launcher")),
        (OPENMPI, Launch("mpi", 4, 2, "OMPI_COMM_WORLD_SIZE")),
        (HYDRA, Launch("mpi", 4, 2, "PMI_SIZE")),
        (OPENMPI | HYDRA, Launch("mpi", 4, 2, "OMPI_COMM_WORLD_SIZE")),
        ({"PMIX_RANK": "3"}, Launch("mpi", None, 3, "PMIX_RANK")),
        ({"PMIX_RANK": "2"} | SLURM, Launch("mpi", 4, 2, "PMIX_RANK")),
        (SLURM, Launch("torch", 4, 2, "SLURM_STEP_NUM_TASKS")),
        (SLURM | {"SLURM_MPI_TYPE": "none"}, Launch("torch", 4, 2, "SLURM_STEP_NUM_TASKS")),
        (SLURM | {"SLURM_MPI_TYPE": "cray_shasta"}, Launch("mpi", 4, 2, "SLURM_STEP_NUM_TASKS")),
        (SLURM | {"ASYNCDIST_TRANSPORT": "mpi"}, Launch("mpi", 4, 2, "SLURM_STEP_NUM_TASKS")),
        (SLURM | {"ASYNCDIST_TRANSPORT": "torch", "PMIX_RANK": "2"}, Launch("torch", 4, 2, "SLURM_STEP_NUM_TASKS")),
        (TORCHRUN, Launch("torch", 4, 2, "TORCHELASTIC_RUN_ID")),
        (BY_HAND, Launch("torch", 4, 2, "WORLD_SIZE")),
        # Batch scripts set these for the processes that they start.
        ({"MASTER_ADDR": "h", "MASTER_PORT": "29500"}, Launch("local", 1, 0, "no launcher")),
        ({"LOCAL_RANK": "1"}, Launch("local", 1, 0, "no launcher")),
        # A program that sets all four inside an srun step means torch; one that sets some of them for all steps does
        # not.
        (BY_HAND | SLURM, Launch("torch", 4, 2, "WORLD_SIZE")),
        (SLURM | {"WORLD_SIZE": "4", "MASTER_ADDR": "h"}, Launch("torch", 4, 2, "SLURM_STEP_NUM_TASKS")),
        (BY_HAND | OPENMPI, Launch("mpi", 4, 2, "OMPI_COMM_WORLD_SIZE")),
        # mpirun's daemons inside Slurm leave one task per host.
        (
            OPENMPI | SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
            Launch("mpi", 4, 2, "OMPI_COMM_WORLD_SIZE"),
        ),
        # torchrun is started by srun, once per host.
        (TORCHRUN | SLURM | {"SLURM_PROCID": "1"}, Launch("torch", 4, 2, "TORCHELASTIC_RUN_ID")),
    ],
)
def test_launcher_is_detected(environ: dict[str, str], expected: Launch) -> None:
    assert detection.detect(environ) == expected


@pytest.mark.parametrize(
    ("environ", "wanted", "group", "transport"),
    [
        ({}, "auto", (1, 4), "torch"),
        ({"RANK": "1"}, "auto", (1, 4), "torch"),
        ({}, "auto", (0, 1), "local"),
        ({}, "local", (1, 4), "local"),
        ({"ASYNCDIST_TRANSPORT": "local"}, "auto", (1, 4), "local"),
        (OPENMPI, "auto", (1, 4), "mpi"),
    ],
)
def test_programs_own_process_group_counts_without_a_launcher(
    environ: dict[str, str], wanted: str, group: tuple[int, int], transport: str
) -> None:
    found = detection.detect(environ, wanted=wanted, group=group)
    assert found.transport == transport
    if transport == "torch":
        assert (found.rank, found.expected_size, found.source) == (1, 4, "torch.distributed.init_process_group")


@pytest.mark.parametrize("name", RECORDED)
def test_launcher_is_detected_from_all_that_it_sets(name: str) -> None:
    environ, expected = RECORDED[name]
    assert detection.detect(environ) == expected
    assert name.startswith("srun") or detection.local_size(environ) == 2
    assert detection.local_rank(environ) == 1 or "pmi2" in name


def test_a_torchrun_that_mpirun_starts_counts_its_own_ranks() -> None:
    """Regression: the local size was 1, the number of torchruns that mpirun had started on this host."""
    outer = {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    environ = OPENMPI | outer | TORCHRUN | {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    assert (detection.local_size(environ), detection.local_rank(environ)) == (2, 1)


def test_each_transport_can_be_opened_and_started() -> None:
    assert {"local", *select.OPENERS} == set(BACKENDS) >= set(doctor.RENDEZVOUS)
    assert set(run_command.RUNNERS) == set(RUN_NAMES)


@pytest.mark.parametrize("transport", BACKENDS)
def test_a_job_started_in_a_rank_has_its_own_variables(transport: str) -> None:
    names = {name for each in BACKENDS[transport].variables for name in each} - {""}
    assert children.without_launchers({"KEPT": "1"} | dict.fromkeys(names, "1")) == {"KEPT": "1"}


@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize("wanted", BACKENDS)
@pytest.mark.parametrize("by", ["argument", "variable"])
def test_the_transport_that_is_named_wins(name: str, wanted: str, by: str) -> None:
    environ, found = RECORDED[name]
    if by == "argument":
        launched = detection.detect(environ | {"ASYNCDIST_TRANSPORT": "never looked at"}, wanted=wanted)
    else:
        launched = detection.detect(environ | {"ASYNCDIST_TRANSPORT": wanted})
    assert launched.transport == wanted
    if wanted == found.transport:
        assert (launched.expected_size, launched.rank) == (2, 1)


@pytest.mark.parametrize("value", ["", "auto"])
def test_a_variable_that_names_no_transport_changes_nothing(value: str) -> None:
    assert detection.detect(OPENMPI | {"ASYNCDIST_TRANSPORT": value}) == detection.detect(OPENMPI)


def test_named_transport_ignores_leftover_launcher_variables() -> None:
    """The variables of other launchers may have invalid values."""
    nonsense = {"RANK": "5", "PMI_SIZE": "many", "PMI_RANK": "7", "SLURM_STEP_NUM_TASKS": "x", "SLURM_PROCID": "y"}
    assert detection.detect(nonsense, wanted="local") == Launch("local", 1, 0, "no launcher")
    assert detection.detect(nonsense | {"WORLD_SIZE": "6"}, wanted="torch").expected_size == 6
    assert detection.detect(BY_HAND | {"WORLD_SIZE": "1"}, wanted="mpi") == Launch("mpi", None, 0, "no launcher")


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
        {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0", "SLURM_STEP_ID": str(2**32 - 5)},
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0"},
    ],
    ids=["sbatch shell", "batch step", "srun of one task"],
)
def test_a_shell_or_one_task_in_slurm_is_one_process(environ: dict[str, str]) -> None:
    assert detection.detect(environ).transport == "local"


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "four", "OMPI_COMM_WORLD_RANK": "0"}, ["OMPI_COMM_WORLD_SIZE", "'four'"]),
        ({"PMI_SIZE": "4", "PMI_RANK": "-1"}, ["PMI_RANK", "'-1'"]),
        ({"PMI_SIZE": "4", "PMI_RANK": "4"}, ["PMI_RANK must be from 0 to 3 with PMI_SIZE=4, got 4"]),
        ({"PMI_SIZE": "0", "PMI_RANK": "0"}, ["PMI_SIZE must be >= 1, got 0"]),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, ["OMPI_COMM_WORLD_SIZE='4'", "OMPI_COMM_WORLD_RANK"]),
        (
            {"TORCHELASTIC_RUN_ID": "x"},
            ["TORCHELASTIC_RUN_ID='x'", "RANK and WORLD_SIZE and MASTER_ADDR and MASTER_PORT are not"],
        ),
        (
            {"RANK": "5"},
            ["RANK='5'", "WORLD_SIZE and MASTER_ADDR and MASTER_PORT are not", "ASYNCDIST_TRANSPORT=local"],
        ),
        ({"WORLD_SIZE": "5", "MASTER_ADDR": "h"}, ["WORLD_SIZE='5'", "RANK and MASTER_PORT are not"]),
        (BY_HAND | {"RANK": "4"}, ["RANK must be from 0 to 3 with WORLD_SIZE=4, got 4"]),
        (BY_HAND | {"MASTER_PORT": "http"}, ["MASTER_PORT must be an integer >= 0, got 'http'"]),
        (BY_HAND | {"MASTER_PORT": "65536"}, ["MASTER_PORT must be from 1 to 65535, got 65536"]),
        (
            BY_HAND | {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"},
            ["LOCAL_RANK must be from 0 to 1 with LOCAL_WORLD_SIZE=2, got 2"],
        ),
        (BY_HAND | {"LOCAL_WORLD_SIZE": "5"}, ["LOCAL_WORLD_SIZE=5", "WORLD_SIZE=4"]),
        (
            OPENMPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            ["OMPI_COMM_WORLD_LOCAL_RANK must be from 0 to 1 with", "got 3"],
        ),
        (
            {"ASYNCDIST_TRANSPORT": "tcp"},
            ["ASYNCDIST_TRANSPORT must be one of 'auto', 'local', 'mpi', 'torch'", ", got 'tcp'"],
        ),
        ({"PMIX_RANK": "first"}, ["PMIX_RANK must be an integer >= 0, got 'first'"]),
        # All of these variables at once.
        (
            TORCHRUN | {"RANK": "9", "MASTER_PORT": "0", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "one"},
            ["got 9", "got 0", "LOCAL_WORLD_SIZE must be an integer >= 0, got 'one'"],
        ),
        (OPENMPI | {"PMI_SIZE": "2", "PMI_RANK": "0"}, ["OMPI_COMM_WORLD_SIZE=4", "PMI_SIZE=2"]),
        # Regression: each task of submitit's local executor silently trained alone.
        (SUBMITIT, ["SUBMITIT_LOCAL_NTASKS=2", "TorchDistributedEnvironment().export()", "ASYNCDIST_TRANSPORT=local"]),
    ],
)
def test_bad_launcher_variables_are_named_with_their_values(environ: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        detection.detect(environ)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"SUBMITIT_LOCAL_NTASKS": "1"}, ("local", 1, 0)),
        ({"ASYNCDIST_TRANSPORT": "local"}, ("local", 1, 0)),
        (BY_HAND, ("torch", 4, 2)),  # as TorchDistributedEnvironment().export() sets them
        (OPENMPI, ("mpi", 4, 2)),  # a task that runs mpirun
    ],
)
def test_tasks_of_submitit_that_are_accepted(changes: dict[str, str], expected: tuple[str, int, int]) -> None:
    launch = detection.detect(SUBMITIT | changes)
    assert (launch.transport, launch.expected_size, launch.rank) == expected
    assert detection.detect(SUBMITIT, group=(1, 2)).transport == "torch"


def test_singleton_worlds_are_explained() -> None:
    with pytest.raises(TransportError) as caught:
        mpi_launchers.check_world_size(Launch("mpi", 4, 0, "OMPI_COMM_WORLD_SIZE"), 1, "MPICH 5.0.2")
    for words in ("started 4 ranks", "world of 1", "MPICH 5.0.2", "asyncdist run -n 4", "pip install"):
        assert words in str(caught.value)
    assert (caught.value.expected, caught.value.actual) == (4, 1)


@pytest.mark.parametrize(
    ("library", "way"),
    [("Open MPI v4.1.4", "srun --mpi=pmix -n 4"), ("MPICH 5.0.2", "srun --mpi=pmi2 -n 4"), ("Other", "or srun --mpi")],
)
def test_singleton_worlds_of_srun_name_the_plugin_to_join_them(
    library: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "list_plugins", lambda: ["none", "pmi2", "pmix"])
    with pytest.raises(TransportError, match="srun started 4 ranks") as caught:
        mpi_launchers.check_world_size(Launch("mpi", 4, 0, "SLURM_STEP_NUM_TASKS"), 1, library)
    assert "(srun --mpi=list offers none, pmi2, pmix), with ASYNCDIST_TRANSPORT=torch" in str(caught.value)
    assert library in str(caught.value) and way in str(caught.value)
    assert "different MPIs" not in str(caught.value)
    assert (caught.value.expected, caught.value.actual) == (4, 1)


def test_open_mpi_under_the_plugin_of_mpich_names_its_own_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: pmi2 sets the variables of MPICH's mpirun, so the error named two mpiruns although none was used."""
    monkeypatch.setattr(slurm, "list_plugins", list)
    environ, started = RECORDED["srun --mpi=pmi2 -n 2"]
    with pytest.raises(TransportError, match=r"srun started 2 ranks.*srun --mpi=pmix -n 2 ") as caught:
        mpi_launchers.check_world_size(started, 1, "Open MPI v5.0.11", environ=environ)
    assert "(srun --mpi=list shows the plugins)" in str(caught.value)
    assert "different MPIs" not in str(caught.value)
    for hydra in (HYDRA, environ | {"HYDI_CONTROL_FD": "7"}, environ | {"SLURM_STEP_NUM_TASKS": "1"}):
        assert not slurm.is_sruns("PMI_SIZE", hydra)


def test_mpich_under_open_mpi_is_refused_before_it_aborts() -> None:
    version = "MPICH Version:      5.0.2\nMPICH Release date: Fri Sep 25 2026\nMPICH ABI:          18:2:6\n\x00"
    said = r"Open MPI's mpirun started 4 ranks.*\(MPICH Version: 5\.0\.2\)"
    with pytest.raises(TransportError, match=said) as caught:
        mpi_launchers.check_library(detection.detect(OPENMPI), version)
    assert "\n" not in str(caught.value)
    mpi_launchers.check_library(detection.detect(OPENMPI), "Open MPI v5.0.11")
    mpi_launchers.check_library(detection.detect(HYDRA), "MPICH Version: 5.0.2")


MPICH = (
    "MPICH Version:      {version}\nMPICH ABI:   18:2:6\nMPICH configure:    --with-device=ch4 {pmix}\nMPICH CC: cc\n"
)


@pytest.mark.parametrize(
    ("version", "tasks", "started", "way"),
    [
        ("5.0.2", {}, "srun started 2 ranks, and connects them", "srun --mpi=pmi2 -n 2 "),
        ("4.1", {}, "srun started 2 ranks, and connects them", "srun --mpi=pmi2 -n 2 "),
        (
            "5.0.2",
            {"SLURM_STEP_NUM_TASKS": "1", "PMIX_RANK": "0", "SLURM_PROCID": "0"},
            "1 rank, and connects it",
            "-n 1 ",
        ),
    ],
)
def test_mpich_without_pmix_is_refused_before_it_aborts(
    version: str, tasks: dict[str, str], started: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "list_plugins", lambda: ["none", "pmi2"])
    environ = RECORDED["srun --mpi=pmix -n 2"][0] | tasks
    with pytest.raises(TransportError, match=started) as caught:
        library = MPICH.format(version=version, pmix="")
        mpi_launchers.check_library(detection.detect(environ), library, environ=environ)
    said = str(caught.value)
    assert f"(MPICH Version: {version}) was built without PMIx" in said and way in said
    assert "none, pmi2)" in said and "\n" not in said


@pytest.mark.parametrize(
    ("version", "changes"),
    [
        (MPICH.format(version="5.0.2", pmix="--with-pmix=/usr"), {}),
        (MPICH.format(version="4.1", pmix=""), {"SLURM_STEP_NUM_TASKS": "1", "PMIX_RANK": "0", "SLURM_PROCID": "0"}),
        (MPICH.format(version="5.0.2", pmix=""), {"PMIX_NAMESPACE": "prterun-host-16584@1"}),
        ("MPI VERSION    : CRAY MPICH version 8.1.32.110", {}),
        ("Open MPI v5.0.11", {}),
    ],
)
def test_other_libraries_and_launchers_with_pmix_are_accepted(version: str, changes: dict[str, str]) -> None:
    environ = RECORDED["srun --mpi=pmix -n 2"][0] | changes
    mpi_launchers.check_library(detection.detect(environ), version, environ=environ)


@pytest.mark.parametrize("expected", [3, None])
def test_a_world_of_the_right_or_of_unknown_size_is_accepted(expected: int | None) -> None:
    mpi_launchers.check_world_size(Launch("mpi", expected, 0, "OMPI_COMM_WORLD_SIZE"), 3, "any")
    with pytest.raises(TransportError):
        mpi_launchers.check_world_size(Launch("mpi", 4, 0, "OMPI_COMM_WORLD_SIZE"), 3, "any")


@pytest.mark.parametrize(
    ("environ", "cores", "threads"),
    [
        ({}, 8, None),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 8, 2),
        ({"MPI_LOCALNRANKS": "4"}, 2, 1),
        ({"LOCAL_WORLD_SIZE": "3"}, 8, 2),
        ({"MPI_LOCALNRANKS": "1"}, 8, None),
        ({"MPI_LOCALNRANKS": "4", "OMP_NUM_THREADS": "3"}, 8, None),
    ],
)
def test_threads_are_a_share_of_the_cores_unless_the_user_chose(
    environ: dict[str, str], cores: int, threads: int | None
) -> None:
    assert detection.threads_per_rank(environ, cores) == threads


def test_outer_launchers_variables_are_cleared_and_users_kept() -> None:
    users = {"PATH": "p", "OMPI_MCA_btl": "self", "PMIX_MCA_x": "1", "HYDRA_IFACE": "lo", "OMP_NUM_THREADS": "2"}
    meeting = {"MASTER_ADDR": "h", "MASTER_PORT": "29500"}
    for name, (environ, _) in RECORDED.items():
        left = children.without_launchers(environ | users)
        assert users.items() <= left.items()
        # Slurm's variables are examined last.
        assert detection.detect(left).source == ("SLURM_STEP_NUM_TASKS" if "srun" in name else "no launcher")
    assert children.without_launchers(users | meeting | OPENMPI) == users | meeting
    assert children.without_launchers(users | TORCHRUN) == users
    survives = users | {"OMPI_MCA_mpi_ft_enable": "1"}
    assert children.without_launchers(survives) == survives
    for rank in (OPENMPI, {"ASYNCDIST_RANK": "7 PMIX_RANK=0"}):
        assert children.without_launchers(survives | rank) == users, "mpirun --with-ft has started the outer job only"


#: Variables of users that begin like a launcher's.
SIMILAR = dict.fromkeys(
    ("GROUP_NAME", "ROLE_ARN", "RANKING_MODEL", "WORLD_SIZE_MB", "MASTER_PORTAL", "LOCAL_DATA", "MPI_LOCAL_DIR"), "u"
)


def test_users_variables_that_resemble_a_launchers_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: GROUP_NAME and others vanished from a nested job, and from a rank that imported an integration."""
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK")
    for rank in (TORCHRUN | dict.fromkeys(names, "1"), OPENMPI, HYDRA | {"MPI_LOCALNRANKS": "1"}):
        assert children.without_launchers(SIMILAR | rank) == SIMILAR
        environ = SIMILAR | rank
        monkeypatch.setattr(children.os, "environ", environ)
        monkeypatch.setattr(children, "hidden", {})
        children.hide_ranks()
        assert environ == SIMILAR and children.hidden == rank


def test_lone_mpi_rank_among_torchrun_workers_is_refused() -> None:
    with pytest.raises(TransportError) as caught:
        detection.check_alone(TORCHRUN | {"ASYNCDIST_TRANSPORT": "mpi"})
    for words in ("ASYNCDIST_TRANSPORT=mpi asks for MPI", "TORCHELASTIC_RUN_ID says", "one of 4 ranks"):
        assert words in str(caught.value)
    for environ in ({}, {"RANK": "1"}, BY_HAND | {"RANK": "0", "WORLD_SIZE": "1"}):
        detection.check_alone(environ)


def test_a_rank_of_another_job_is_no_child_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMIX_NAMESPACE", "prterun-1@1")
    monkeypatch.setenv("ASYNCDIST_RANK", "")  # so that the variable is restored afterwards
    children.become_rank()
    assert children.rank_above() is None
    marked = environment.environment() | {
        "ASYNCDIST_RANK": os.environ["ASYNCDIST_RANK"].replace(str(os.getpid()), "7", 1)
    }
    assert children.rank_above(marked) == 7
    assert children.rank_above({name: text for name, text in marked.items() if name != "PMIX_NAMESPACE"}) == 7
    assert children.rank_above(marked | {"PMIX_NAMESPACE": "prterun-2@1"}) is None
    assert children.rank_above(children.without_launchers(marked)) is None


@pytest.mark.parametrize(
    ("universe", "size", "hinted"), [("2", "4", True), ("4", "4", False), ("8", "4", False), ("", "4", False)]
)
def test_a_job_that_mpirun_holds_for_oversubscribed_gets_a_hint(universe: str, size: str, hinted: bool) -> None:
    hint = mpi_launchers.oversubscription_hint({"OMPI_UNIVERSE_SIZE": universe, "OMPI_COMM_WORLD_SIZE": size})
    assert (hint is not None) == hinted
    assert not hinted or "--host localhost:4 --bind-to none" in str(hint)


def test_worlds_and_jobs_of_mpi_have_different_numbers() -> None:
    """Regression: two jobs whose mpirun had the same pid, and all worlds of a process, had equal numbers."""
    jobs = [{"PMIX_NAMESPACE": "prterun-host-1@1", **more} for more in ({}, {"ASYNCDIST_RUN_ID": "a"})]
    numbers = [mpi_launchers.job_number(count, job) for job in jobs for count in range(2)]
    assert len(set(numbers)) == 4
    assert all(number is not None and 0 <= number < 1 << 32 for number in numbers)
    assert mpi_launchers.job_number(0, {}) is None
