"""Tests the error for a program that has already ended MPI."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from asyncdist.errors import TransportError
from asyncdist.transports import mpi


def test_a_world_after_the_end_of_mpi_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: MPI aborted the process at the first call."""
    mpi4py: Any = ModuleType("mpi4py")
    mpi4py.MPI = SimpleNamespace(Is_finalized=lambda: True, Is_initialized=lambda: True)
    monkeypatch.setitem(sys.modules, "mpi4py", mpi4py)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi4py.MPI)
    with pytest.raises(TransportError, match=r"MPI\.Finalize"):
        mpi._load_mpi(None, finalizes=True)
