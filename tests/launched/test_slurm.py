"""Tests jobs on a real Slurm with two nodes, by ``srun`` with and without an MPI plugin, and by ``sbatch``."""

from __future__ import annotations

import ctypes
import re
import shlex
import sys
from pathlib import Path

import pytest
from support import hosts, mpi, slurm, warm
from support.mpi import ROOT, base_environment

EXAMPLE = ROOT / "docs" / "train.sbatch"
PLUGINS = {"openmpi": "pmix", "mpich": "pmi2"}

TRAIN = """
import os
import sys
import torch
import asyncdist as ad
from support.mpi import report


async def main(world):
    total = await ad.all_reduce(torch.full((300_000,), float(world.rank)))
    threads = os.environ.get("OMP_NUM_THREADS")
    report(world.rank, [world.transport_name, world.size, world.hostname, float(total[-1]), threads])


ad.run(main)
"""


@pytest.fixture
def program(tmp_path: Path) -> list[str]:
    """Return the program of each task: Python, and a script that starts warm."""
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return [sys.executable, *warm.command(path, (), base_environment(), {})]


def require_plugin(name: str) -> None:
    """Skip the test if Slurm's plugin cannot run: the plugin for PMIx loads a library of another package."""
    if name == "pmix":
        try:
            ctypes.CDLL("libpmix.so")
        except OSError as error:
            pytest.skip(f"srun --mpi=pmix needs libpmix-dev: {error}")


def by_rank(transport: str) -> dict[int, list[object]]:
    """Return the expected reports of three ranks on two nodes, of which the first has two."""
    names = ["host1", "host1", "host2"]
    return {rank: [transport, 3, names[rank], 3.0, "1"] for rank in range(3)}


def test_srun_without_a_plugin_runs_on_torch(program: list[str]) -> None:
    assert slurm.run(2, ["srun", "-N", "2", "-n", "3", *program]).check().reports == by_rank("torch")


def test_a_rank_0_that_is_not_on_the_first_host_is_told_at_once(program: list[str]) -> None:
    """Slurm sorts the hosts of a step whatever their ranks are; with the address of rank 0 the ranks connect."""
    step = f"srun -N 2 -n 2 -m arbitrary -w host2,host1 {shlex.join(program)}"
    result = slurm.run(2, ["sh", "-c", f"{step}; export MASTER_ADDR=host2; {step}"]).check()
    assert len(re.findall(r"rank 0 .*\bhost1\b.*\bSLURM_STEP_NODELIST\b", result.stderr)) == 2
    assert {rank: report[:3] for rank, report in result.reports.items()} == {
        0: ["torch", 2, "host2"],
        1: ["torch", 2, "host1"],
    }


@pytest.mark.mpi
def test_srun_with_the_plugin_of_the_mpi_runs_on_it(program: list[str]) -> None:
    mpi.require_mpi()
    name = PLUGINS[mpi.flavour()]
    require_plugin(name)
    plugin = f"--mpi={name}"
    reports = slurm.run(2, ["srun", plugin, "-N", "2", "-n", "3", *program]).check().reports
    assert reports == by_rank("mpi")


@pytest.mark.mpi
def test_worlds_of_one_rank_name_the_plugin_and_what_there_is(program: list[str]) -> None:
    mpi.require_mpi()
    words = ["env", "ASYNCDIST_TRANSPORT=mpi", "srun", "-n", "2", *program]
    result = slurm.run(1, words).check(1)
    assert result.reports == {}
    assert "srun started 2 ranks, but the MPI library sees a world of 1" in result.stderr
    way = f"Start with srun --mpi={PLUGINS[mpi.flavour()]} -n 2 python script.py (srun --mpi=list offers "
    offered = result.stderr.partition(way)[2].partition(")")[0].split(", ")
    assert {"none", "pmi2"} <= set(offered)


@pytest.mark.mpi
def test_mpich_under_open_mpis_plugin_is_told_its_own_plugin(program: list[str]) -> None:
    """MPI_Init would otherwise abort with MPICH's own message."""
    mpi.require_mpi()
    if mpi.flavour() != "mpich":
        pytest.skip("Open MPI speaks PMIx")
    require_plugin("pmix")
    result = slurm.run(1, ["srun", "--mpi=pmix", "-n", "2", *program])
    assert result.returncodes != (0,) and result.reports == {} and "Abort(" not in result.stderr
    assert "--mpi=pmix" in result.stderr and "srun --mpi=pmi2 -n 2 python script.py" in result.stderr


@pytest.mark.mpi
def test_asyncdist_run_starts_n_ranks_in_an_allocation(tmp_path: Path) -> None:
    """Open MPI would otherwise start one rank for each task of the allocation, on its nodes."""
    mpi.require_mpi()
    (tmp_path / "train.py").write_text(TRAIN)
    words = ["srun", "-n", "1", sys.executable, "-m", "asyncdist", "run", "-n", "3", str(tmp_path / "train.py")]
    reports = slurm.run(1, words).check().reports
    assert {rank: report[:2] for rank, report in reports.items()} == {rank: ["mpi", 3] for rank in range(3)}


@pytest.mark.long
@pytest.mark.parametrize("transport", ["torch", pytest.param("mpi", marks=pytest.mark.mpi)])
def test_asyncdist_run_starts_ranks_on_hosts_of_an_allocation(transport: str, tmp_path: Path) -> None:
    """The hosts are outside the allocation, and srun's variables describe a different task."""
    if transport == "mpi":
        mpi.require_mpi()
    (tmp_path / "train.py").write_text(TRAIN)
    start = [sys.executable, "-m", "asyncdist", "run", "--ssh", f"{hosts.PROGRAM.parent / 'ssh'} -x"]
    start += ["--hosts", "host2:1,host1:2", "--transport", transport, str(tmp_path / "train.py")]
    task = "if [ $SLURM_PROCID = 1 ]; then export -p | grep ' SLURM_'; fi"
    step = f"srun -n 2 sh -c {shlex.quote(task)} >{tmp_path}/task"
    words = ["salloc", "-Q", "-N", "1", "-n", "2", "sh", "-c", f"{step}; . {tmp_path}/task; {shlex.join(start)}"]
    reports = slurm.run(2, words).check().reports
    assert "SLURM_STEP_NUM_TASKS" in (tmp_path / "task").read_text()
    assert {rank: report[:3] for rank, report in reports.items()} == {
        rank: [transport, 3, host] for rank, host in enumerate(["host2", "host1", "host1"])
    }


def test_two_steps_at_once_do_not_meet(program: list[str]) -> None:
    """Each step gets its own port."""
    step = f"srun -n 2 -N 1 --overlap {shlex.join(program)}"
    start = f"salloc -Q -N 1 -n 2 sh -c '{step} & one=$!; {step}; two=$?; wait $one && exit $two'"
    reports = slurm.run(1, ["sh", "-c", start]).check().reports
    assert {rank: report[1] for rank, report in reports.items()} == {0: 2, 1: 2}


@pytest.mark.long
def test_the_example_for_sbatch(program: list[str], tmp_path: Path) -> None:
    """The script is unchanged except for the numbers of this Slurm's nodes, its Python, and the output file."""
    text = EXAMPLE.read_text()
    for old, new in (("--ntasks-per-node=8", "--ntasks-per-node=2"), ("python train.py", shlex.join(program))):
        assert text.count(old) == 1
        text = text.replace(old, new)
    job = tmp_path / "job.sbatch"
    job.write_text(text)
    log = tmp_path / "log"
    result = slurm.run(2, ["sh", "-c", f"sbatch --wait -o {log} {job}; code=$?; cat {log}; exit $code"]).check()
    assert {report[1] for report in result.reports.values()} == {4}
    assert [result.reports[rank][2] for rank in range(4)] == ["host1", "host1", "host2", "host2"]
