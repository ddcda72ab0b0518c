"""Tests members that call different helpers, in separate processes."""

from __future__ import annotations

import pytest
from scripts import differing_calls
from support import mpi, torchrun

SCRIPT = "tests/scripts/differing_calls.py"


@pytest.mark.smoke
@pytest.mark.mpi
def test_mpi() -> None:
    """MPI does not define the result of matching two different collectives; the frames prevent this."""
    mpi.require_mpi()
    differing_calls.check(mpi.run_ranks(3, SCRIPT, timeout_s=120).check().reports)


@pytest.mark.smoke
def test_torch() -> None:
    differing_calls.check(torchrun.run_ranks(3, SCRIPT, timeout_s=120).check().reports)
