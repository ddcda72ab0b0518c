"""Runs the cases of ``helpers`` under mpirun and on torch."""

from __future__ import annotations

import pytest
from helpers.cases import all_cases
from support import torchrun
from support.mpi import Result, require_mpi, run_ranks

pytestmark = pytest.mark.timeout(300)  # one job runs all cases, on any number of cores

NAMES = list(all_cases())
#: Cases that only call other helpers: CI runs them in one process and in the simulator.
OF_OTHERS = [name for name in NAMES if name.startswith(("roles.", "soups."))]
JOB_SIZES = pytest.mark.parametrize("ranks", [1, 4], ids=lambda ranks: f"{ranks}ranks", scope="session")


@pytest.fixture(scope="session")
def job(ranks: int) -> tuple[int, Result]:
    """Start one mpirun for each number of ranks; the tests below report its cases one by one.

    Two and three ranks are tested in one process: a case only computes with messages, which the conformance suite
    tests.
    """
    require_mpi()
    names = [name for name in NAMES if name not in OF_OTHERS]
    return ranks, run_ranks(ranks, "tests/helpers/program.py", *names, timeout_s=280)


@pytest.fixture(scope="session")
def job_of_others(ranks: int) -> tuple[int, Result]:
    require_mpi()
    return ranks, run_ranks(ranks, "tests/helpers/program.py", *OF_OTHERS, timeout_s=280)


@pytest.mark.mpi
@JOB_SIZES
@pytest.mark.parametrize("name", [name for name in NAMES if name not in OF_OTHERS])
def test_mpi(job: tuple[int, Result], name: str) -> None:
    check(name, *job)


@pytest.mark.mpi
@pytest.mark.long
@JOB_SIZES
@pytest.mark.parametrize("name", OF_OTHERS)
def test_mpi_others(job_of_others: tuple[int, Result], name: str) -> None:
    check(name, *job_of_others)


@pytest.fixture(scope="session")
def torch_job() -> torchrun.Result:
    """Start one job of four ranks, the smallest number that makes two groups with gaps."""
    return torchrun.run_ranks(4, "tests/helpers/program.py", timeout_s=280)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.long
def test_torch(torch_job: torchrun.Result, name: str) -> None:
    check(name, 4, torch_job)


@pytest.mark.long
def test_torch_ends_cleanly(torch_job: torchrun.Result) -> None:
    assert torch_job.check().stderr == ""


def check(name: str, ranks: int, result: Result | torchrun.Result) -> None:
    outcomes = [result.reports.get(rank, {}).get(name, "not reached") for rank in range(ranks)]
    if set(outcomes) == {"not reached"}:
        pytest.fail("an earlier case ended the job", pytrace=False)
    bad = [f"rank {rank}: {outcome}" for rank, outcome in enumerate(outcomes) if outcome != "passed"]
    assert not bad, "\n".join([*bad, result.output()])


@pytest.mark.mpi
@JOB_SIZES
def test_mpi_ends_cleanly(job: tuple[int, Result]) -> None:
    _, result = job
    assert result.check().stderr == ""
