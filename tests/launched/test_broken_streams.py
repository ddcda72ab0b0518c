"""Tests that a rank on MPI that cannot print its error still ends the job."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import mpi

#: Generous limit: it fails only tests that hang.
TIMEOUT_S = 60.0

RUN = """
import sys, asyncdist as ad

class WithoutText(ValueError):
    def __str__(self):
        raise AttributeError("reason")

async def main(world):
    await ad.barrier()
    if world.rank == 1:
        sys.stdout = sys.stderr = None
        raise WithoutText
    await ad.barrier()

ad.run(main, record=sys.argv[1])
"""

PLAIN = """
import sys
from mpi4py import MPI

def hook(*_):
    sys.stdout.write("too late")

if MPI.COMM_WORLD.rank == 1:
    sys.excepthook = hook
    sys.stdout.close()
    raise ValueError("boom-7")
MPI.COMM_WORLD.Barrier()
"""

pytestmark = pytest.mark.mpi


def test_a_rank_that_cannot_print_its_error_ends_the_job(tmp_path: Path) -> None:
    """Regression: the other ranks were not notified, and waited in the barrier forever."""
    result = mpi.run_source(2, RUN, tmp_path / "recording", timeout_s=TIMEOUT_S).check(returncode=None)
    assert "rank 0 stopped: rank 1 failed: WithoutText" in result.stderr, result.output()


def test_a_plain_script_that_cannot_print_its_error_ends_the_job() -> None:
    """Regression: MPI_Abort was not called after an error of the user's sys.excepthook, or if stdout was closed."""
    result = mpi.run_source(2, PLAIN, timeout_s=TIMEOUT_S).check(returncode=None)
    assert "ValueError: boom-7" in result.stderr, result.output()
