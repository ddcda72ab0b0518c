"""Tests how the MPI transport opens if the program has used MPI or the network."""

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


@pytest.mark.parametrize(
    ("is_started", "is_second_world", "probed"), [(False, False, {5}), (True, False, {3, 4, 5}), (True, True, {5})]
)
def test_the_programs_own_connections_keep_their_settings(
    is_started: bool, is_second_world: bool, probed: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the program's idle or slow connections to other hosts were closed after 30 s."""
    opened, seen = [3, 4], set[int]()

    def init(self: Any, *_: Any, **__: Any) -> None:
        opened.append(5)
        self.size, self._mpi, self._comm, self._end_comm = 1, None, None, None

    monkeypatch.setitem(sys.modules, "mpi4py.MPI", SimpleNamespace(Is_initialized=lambda: is_started))
    monkeypatch.setattr(mpi.MpiMessages, "__init__", init)
    monkeypatch.setattr(mpi, "open_descriptors", lambda: list(opened))
    monkeypatch.setattr(mpi, "probe_all", seen.update)
    monkeypatch.setattr(mpi, "MpiGroup", lambda *_: None)
    monkeypatch.setattr(mpi.MpiTransport, "_has_started_mpi", is_second_world)
    mpi.MpiTransport()
    assert seen == probed
