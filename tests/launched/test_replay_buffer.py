"""Tests replay buffers between processes; ``scripts/replay.py`` and the files next to it contain the programs."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import mpi, torchrun

SCRIPT = Path(__file__).parents[1] / "scripts" / "replay.py"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("transport", [pytest.param("mpi", marks=[pytest.mark.mpi, pytest.mark.long]), "torch"])
def test_between_processes(transport: str) -> None:
    if transport == "mpi":
        mpi.require_mpi()
    start = mpi.run_ranks if transport == "mpi" else torchrun.run_ranks
    result = start(4, SCRIPT, timeout_s=280).check()
    assert result.reports[3] == {"added": [300, 300, 300], "size": 900, "seen": 900}
    assert all(result.reports[rank] == "every item as it was sent" for rank in range(3))


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("transport", [pytest.param("mpi", marks=pytest.mark.mpi), "torch"])
def test_several_buffer_ranks_between_processes(transport: str) -> None:
    """Several buffers are tested in local/test_replay_buffer.py; here each is a process."""
    if transport == "mpi":
        mpi.require_mpi()
    start = mpi.run_ranks if transport == "mpi" else torchrun.run_ranks
    reports = start(5, "tests/scripts/replay_roles.py", timeout_s=280).check().reports
    for buffer, clients in ((3, [0, 2]), (4, [1])):
        assert reports[buffer] == {
            "added": [[rank, 10_100] for rank in clients],
            "seen": 10_100 * len(clients),
            "size": 10_100 * len(clients),
        }
        assert all(reports[rank] == {"buffer": buffer, "drawn of": clients} for rank in clients)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "transport", [pytest.param("mpi", marks=pytest.mark.mpi), pytest.param("torch", marks=pytest.mark.long)]
)
def test_scores_priorities_and_back_pressure_between_processes(transport: str) -> None:
    if transport == "mpi":
        mpi.require_mpi()
    start = mpi.run_ranks if transport == "mpi" else torchrun.run_ranks
    reports = start(4, "tests/scripts/replay_priorities.py", timeout_s=280).check().reports
    assert reports[3] == {"added": [6226] * 3, "stale": 0}
    assert all(reports[rank] == {"most": 4, "chosen": 3} for rank in range(3))
