"""Tests one-sided reads between real processes, with one job for many tests: 4 ranks under mpirun, and 3 on torch.

Under mpirun they share memory; on torch the owners answer.

``scripts/one_sided_stories.py`` contains the programs; its job fails if anything is left over.
"""

from __future__ import annotations

import functools
import tempfile
from typing import Any

import pytest
import torch
from scripts.one_sided import Applied, verify
from support import torchrun
from support.endings import stopped_by
from support.mpi import require_mpi, run_ranks, run_source

from protocols import AverageApplied

pytestmark = pytest.mark.timeout(300)
SIZES = (4,)
TORCH_SIZE = 3


@functools.cache
def stories(ranks: int, transport: str) -> list[dict[str, Any]]:
    """Return the observations of each rank."""
    start = run_ranks if transport == "mpi" else torchrun.run_ranks
    with tempfile.TemporaryDirectory() as folder:
        result = start(ranks, "tests/scripts/one_sided_stories.py", folder, timeout_s=240).check()
    return [result.reports[rank] for rank in range(ranks)]


def told(ranks: int, name: str, transport: str = "mpi") -> list[dict[str, Any]]:
    if transport == "mpi":
        require_mpi()
    return [report[name] for report in stories(ranks, transport)]


def typed(state: dict[str, list[float]]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(numbers, dtype=getattr(torch, name)) for name, numbers in state.items()}


@pytest.mark.parametrize(
    ("ranks", "transport", "story", "exposure", "is_followed"),
    [
        *(pytest.param(ranks, "mpi", "walk", "_SharedWindow", False, marks=pytest.mark.mpi) for ranks in SIZES),
        *(pytest.param(ranks, "mpi", "apart", "StreamedWindow", False, marks=pytest.mark.mpi) for ranks in SIZES),
        (TORCH_SIZE, "torch", "walk", "StreamedWindow", True),
    ],
)
def test_every_one_sided_average_is_that_of_its_snapshots(
    ranks: int, transport: str, story: str, exposure: str, is_followed: bool
) -> None:
    """Each average was read in one version, of any dtypes, and is recomputed here from the donors' reports.

    Snapshots are read from shared memory or, as between hosts, from owners that answer. On torch, where ranks may
    join later, the policy adds and removes the window's members.
    """
    reports = told(ranks, story, transport)
    snapshots = {
        (rank, version): typed(state) for rank, report in enumerate(reports) for version, state in report["snapshots"]
    }
    for rank, report in enumerate(reports):
        assert (report["exposure"], report["is followed"]) == (exposure, is_followed)
        assert len(report["applied"]) >= 4
        for number, donors, weights, best, versions, state, before in report["applied"]:
            event = AverageApplied(number, tuple(donors), tuple(weights), best, 0, typed(state), tuple(versions))
            verify(Applied(rank, event, typed(before), typed(state)), snapshots, momentum=0.25)


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", SIZES)
def test_defect_14_no_version_is_ever_mixed_with_another(ranks: int) -> None:
    writer, *readers = told(ranks, "torn")
    assert writer["whole"] == 0
    for reader in readers:
        assert reader["mixed"] == 0 and reader["whole"] >= 1 and reader["whole"] + reader["torn"] >= 300, reader
        assert reader["both slots"] == ["whole", "whole"]


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", SIZES)
def test_defect_14_a_read_needs_no_help_of_the_one_who_is_read(ranks: int) -> None:
    assert not any(report["helped"] for report in told(ranks, "asleep"))


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", SIZES)
def test_memory_of_a_policy_that_all_have_left_is_given_back(ranks: int) -> None:
    assert [report["mapped"] for report in told(ranks, "again")] == [[0] * 4] * ranks


JOBS = [*(pytest.param(ranks, "mpi", marks=pytest.mark.mpi) for ranks in SIZES), (TORCH_SIZE, "torch")]


@pytest.mark.parametrize(("ranks", "transport"), JOBS)
def test_a_policy_on_a_group_never_touches_the_others(ranks: int, transport: str) -> None:
    first, *others, last = told(ranks, "group", transport)
    assert first["donors"] == [[ranks - 1]] * 3 and first["floating"] == [ranks - 1.0]
    assert last["donors"] == [] and all(report["same"] for report in [*others, last])


@pytest.mark.parametrize(("ranks", "transport"), JOBS)
def test_the_memory_of_a_departed_rank_stays_readable(ranks: int, transport: str) -> None:
    for rank, report in enumerate(told(ranks, "leaver", transport)[:-1]):
        assert report["donors"][-2:] == [[other for other in range(ranks - 1) if other != rank]] * 2


@pytest.mark.mpi
def test_a_rank_that_fails_ends_the_job_with_windows_open() -> None:
    result = run_source(
        3,
        """
        import asyncdist as ad
        from scripts.population import Mixed, sgd
        from protocols import OneSidedSelectiveAveragingPolicy

        async def main(world):
            model = Mixed(float(world.rank))
            async with OneSidedSelectiveAveragingPolicy(model, sgd(model), average_every=1, age_range=(2, 3)) as policy:
                while True:
                    await policy.step(1.0)
                    if world.rank == 1 and policy.iteration == 20:
                        raise RuntimeError("out of luck")

        ad.run(main)
        """,
        timeout_s=100,
    ).check(returncode=None)
    assert result.stderr.count("RuntimeError: out of luck") >= 1, result.output()
    assert {*stopped_by(result.stderr, 1)} == {0, 2}, result.output()
