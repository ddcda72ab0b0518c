"""Tests that ranks with one seed begin with equal weights and read different rows, with each library."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from scripts import rows
from support import mpi, torchrun, warm

SCRIPT = Path(rows.__file__)
LIBRARIES = [name for name in rows.LIBRARIES if "replicas" not in name]


def run(how: str, ranks: int, folder: Path, *libraries: str) -> dict[str, list[dict[str, Any]]]:
    """Return each rank's report, by library."""
    environment = warm.environment(mpi.base_environment(), *warm.LIBRARIES)
    start = {"mpi": mpi.run_ranks, "torch": torchrun.run_ranks}[how]
    ended: Any = start(ranks, SCRIPT, folder, *libraries, timeout_s=400, env=environment)
    reports = ended.check().reports
    assert "--prefix" not in ended.stderr, "only rank 0 may print the trainer's output"
    return {library: [reports[rank][library] for rank in range(ranks)] for library in libraries}


def differ(values: list[Any]) -> bool:
    return all(values.count(each) == 1 for each in values)


def check(library: str, ranks: list[dict[str, Any]], size: int = 1) -> None:
    """Compare the ranks; each ``size`` consecutive ranks are one replica."""
    first, read, kept, last = ([rank[name] for rank in ranks] for name in ("first", "rows", "kept", "last"))
    assert all(weights == first[0] for weights in first), f"{library}: ranks began with different weights"
    assert differ(kept), f"{library}: all ranks dropped the same units"
    replicas = [list(chain.from_iterable(read[start : start + size])) for start in range(0, len(ranks), size)]
    for replica in replicas:
        assert sorted(replica) == list(range(rows.ROWS)), f"{library}: a replica must read each row exactly once"
    assert differ(replicas), f"{library}: the replicas read the same rows"
    for start in range(0, len(ranks), size):
        assert all(weights == last[start] for weights in last[start : start + size]), (
            f"{library}: the ranks of a replica ended with different weights"
        )
    assert differ(last[::size]), f"{library}: the replicas ended with equal weights"


@pytest.mark.mpi
@pytest.mark.timeout(500)
@pytest.mark.parametrize("how", ["mpi", pytest.param("torch", marks=pytest.mark.long)])
def test_ranks_begin_equal_and_read_other_rows(how: str, tmp_path: Path) -> None:
    """Regression: if a program or trainer set the seed itself, all ranks were equal, or differed at once."""
    for library, ranks in run(how, 2, tmp_path, *LIBRARIES).items():
        check(library, ranks)


@pytest.mark.mpi
@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("how", "libraries"),
    [
        ("torch", ["lightning_replicas", "lightning_sampler_of_replicas"]),
        ("mpi", ["transformers_replicas"]),
        pytest.param("mpi", ["lightning_replicas"], marks=pytest.mark.long),
        pytest.param("torch", ["transformers_lengths_of_replicas"], marks=pytest.mark.long),
    ],
)
def test_replicas_divide_their_rows_and_read_other_ones(how: str, libraries: list[str], tmp_path: Path) -> None:
    """Regression: under Lightning ranks 0 and 2, and 1 and 3, read the same rows; under transformers all ranks did."""
    for library, ranks in run(how, 4, tmp_path, *libraries).items():
        check(library, ranks, size=2)
