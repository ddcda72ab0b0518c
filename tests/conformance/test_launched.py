"""Runs every case between processes, on MPI and torch, with one job for each number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import torchrun
from support.mpi import Result, require_mpi, run_ranks, run_source

from conformance.endpoint import all_cases

pytestmark = pytest.mark.timeout(300)  # one job runs all cases, on any number of cores

NAMES = list(all_cases())
#: Cases for the code between the transport and the rest of asyncdist.
OF_MESSAGES = [name for name in NAMES if name.startswith(("transport.", "channels.", "streams."))]
PROGRAM = Path(__file__).with_name("program.py")
#: Numbers of ranks of jobs on MPI. With two ranks, both neighbours of a rank are the same rank; with four, some ranks
#: are not neighbours, and pairs make disjoint groups. Other numbers differ only above the transport, and are tested in
#: one process and in the simulator.
JOB_SIZES = (pytest.param(2, marks=pytest.mark.long), 4)
TORCH_JOB_SIZE = 4


@pytest.fixture(scope="session", params=JOB_SIZES, ids=lambda ranks: f"{ranks}ranks")
def job(request: pytest.FixtureRequest) -> tuple[int, Result]:
    """Start one mpirun for each number of ranks; the tests below report its cases one by one."""
    require_mpi()
    return request.param, run_ranks(request.param, PROGRAM, timeout_s=280)


@pytest.mark.mpi
@pytest.mark.parametrize("name", NAMES)
def test_mpi(job: tuple[int, Result], name: str) -> None:
    check(name, *job)


@pytest.fixture(scope="session")
def surviving_job() -> tuple[int, Result]:
    """Start one job that would survive the death of a rank. Its collectives are made of messages."""
    require_mpi()
    return 3, run_ranks(3, PROGRAM, *OF_MESSAGES, timeout_s=280, survive=True)


@pytest.mark.mpi
@pytest.mark.parametrize("name", OF_MESSAGES)
def test_mpi_that_survives(surviving_job: tuple[int, Result], name: str) -> None:
    check(name, *surviving_job)


MORE_THAN_TWO_GIBIBYTES = """
import asyncdist as ad
import numpy as np
import torch
from support.mpi import report

async def main(world):
    tensor = torch.from_numpy(np.zeros((1 << 31) + 4099, np.uint8))  # rank 0's pages stay the kernel's page of zeros
    places = [0, 1 << 30, (1 << 31) - 2, (1 << 31) - 1, 1 << 31, len(tensor) - 1]
    if world.rank == 0:
        tensor[places] = torch.arange(1, 7, dtype=torch.uint8)
    await ad.broadcast(tensor)
    report(world.rank, [tensor[places].tolist(), int(torch.count_nonzero(tensor[::4096]))])

ad.run(main)
"""


@pytest.mark.mpi
@pytest.mark.long
def test_mpi_broadcasts_more_than_two_gibibytes() -> None:
    """Send one tensor between two ranks: this takes 2 GiB of memory, and a second or two."""
    free = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    if int(free.split()[1]) < 6 << 20:
        pytest.skip(f"too little memory: {free}")
    reports = run_source(2, MORE_THAN_TWO_GIBIBYTES, timeout_s=120).check().reports
    assert reports == {rank: [[1, 2, 3, 4, 5, 6], 3] for rank in range(2)}


@pytest.fixture(scope="session")
def torch_job() -> tuple[int, torchrun.Result]:
    """Start one job on torch.distributed; the tests below report its cases one by one."""
    return TORCH_JOB_SIZE, torchrun.run_ranks(TORCH_JOB_SIZE, PROGRAM, timeout_s=280)


@pytest.mark.parametrize("name", NAMES)
def test_torch(torch_job: tuple[int, torchrun.Result], name: str) -> None:
    check(name, *torch_job)


def test_torch_ends_cleanly(torch_job: tuple[int, torchrun.Result]) -> None:
    _, result = torch_job
    assert result.check().stderr == ""


def check(name: str, ranks: int, result: Result | torchrun.Result) -> None:
    outcomes = [result.reports.get(rank, {}).get(name, "not reached") for rank in range(ranks)]
    if set(outcomes) == {"not reached"}:
        pytest.fail("an earlier case ended the job", pytrace=False)
    bad = [f"rank {rank}: {outcome}" for rank, outcome in enumerate(outcomes) if outcome != "passed"]
    assert not bad, "\n".join([*bad, result.output()])


@pytest.mark.mpi
def test_mpi_ends_cleanly(job: tuple[int, Result]) -> None:
    _, result = job
    assert result.check().stderr == ""
