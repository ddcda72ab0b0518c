"""The libraries in which people train: each with one line of asyncdist, in processes, with the real library."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scripts import integrations
from support import mpi, torchrun, warm

SCRIPT = Path(integrations.__file__)
#: What each library is to have seen: one process, and a folder for each rank.
SEEN: dict[str, dict[str, Any]] = {
    "plain": {},
    "accelerate": {"processes": 1},
    "lightning": {"processes": 1, "folders": True},
    "transformers": {"processes": 1, "folders": True, "seed": 42},
    "torchgfn": {},
}


def check(reports: Any, ranks: int, library: str) -> None:
    """The last rank has the mean of the others, which have their own weights."""
    assert sorted(reports) == list(range(ranks))
    for rank, report in reports.items():
        expected = dict(SEEN[library])
        if "folders" in expected:
            assert f"rank{rank}" in report["folders"] and set(report["folders"]) <= {f"rank{r}" for r in range(ranks)}
            expected["folders"] = report["folders"]
            expected["replacements"] = int(rank == ranks - 1 > 0)
        if "seed" in expected:
            expected["seed"] += rank
        weight = sum(range(ranks - 1)) / (ranks - 1) if rank == ranks - 1 else float(rank)
        assert report == {"weights": [weight] * 4, **expected}


def warm_environment() -> dict[str, str]:
    return warm.environment(mpi.base_environment(), *warm.LIBRARIES, simulates=True)


@pytest.mark.mpi
@pytest.mark.timeout(300)
@pytest.mark.parametrize("library", SEEN)
def test_on_mpi(library: str, tmp_path: Path) -> None:
    check(
        mpi.run_ranks(3, SCRIPT, library, tmp_path, timeout_s=240, env=warm_environment()).check().reports, 3, library
    )


@pytest.mark.mpi  # Lightning asks mpi4py, where that is installed, and so loads MPI
@pytest.mark.timeout(300)
@pytest.mark.parametrize("library", ["lightning", "transformers"])
def test_on_torch(library: str, tmp_path: Path) -> None:
    check(
        torchrun.run_ranks(2, SCRIPT, library, tmp_path, timeout_s=240, env=warm_environment()).check().reports,
        2,
        library,
    )


@pytest.mark.mpi
@pytest.mark.parametrize("library", ["plain", "lightning"])
def test_alone_it_trains_and_says_once_that_nothing_is_averaged(library: str, tmp_path: Path) -> None:
    ended = torchrun.run_jobs([([sys.executable, str(SCRIPT), library, str(tmp_path)], {})], 100.0).check()
    assert ended.stderr.count("trains alone") == 1, ended.stderr
    assert ended.reports[0]["weights"] == [0.0] * 4


def test_simulated(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "asyncdist", "sim", str(SCRIPT), "--ranks", "3", "plain", "none"]
    environment = {**mpi.base_environment(), mpi.REPORTS: str(tmp_path)}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "ranks 0 to 2: None" in ended.stdout
    check({rank: json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)}, 3, "plain")
