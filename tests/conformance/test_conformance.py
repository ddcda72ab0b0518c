"""Runs every case in one process, on local and on simulated ranks."""

from __future__ import annotations

import pytest

import asyncdist as ad
from asyncdist.messaging import streams
from conformance.cases_streams import CHUNK_NBYTES
from conformance.endpoint import all_cases, run_case

NAMES = list(all_cases())
#: Cases that send many megabytes or try hundreds of combinations: one seed is enough.
HEAVY = {
    "collectives.all_reduce",
    "collectives.all_to_all",
    "streams.a_receiver_that_gives_up",
    "streams.a_sender_that_gives_up",
    "streams.between_safe_points_of_ranks_that_compute",
    "streams.every_size_around_the_chunk",
    "transport.large_messages_both_ways_at_once",
}
#: Cases that take more than a quarter of a second of CPU time.
SLOW = HEAVY | {
    "collectives.a_cancelled_collective_leaves_the_group_usable",
    "collectives.all_gather",
    "collectives.all_reduce_of_nan_and_of_zeros_of_both_signs",
    "collectives.broadcast",
    "collectives.gather",
    "population.populations_that_cannot_be_split",
    "transport.fifo_per_source_and_tag",
}
CASES = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in NAMES]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use small chunks, as ``program.py`` does."""
    monkeypatch.setattr(streams, "USER_CHUNK_NBYTES", CHUNK_NBYTES)


@pytest.mark.parametrize("ranks", [*(pytest.param(ranks, marks=pytest.mark.long) for ranks in (2, 3)), 4])
@pytest.mark.parametrize("name", CASES)
def test_local(name: str, ranks: int) -> None:
    ad.run_local(run_case, name, ranks=ranks, loop="asyncio", strict=True)


@pytest.mark.parametrize("name", CASES)
def test_local_on_uvloop(name: str) -> None:
    pytest.importorskip("uvloop")
    ad.run_local(run_case, name, ranks=3, loop="uvloop", strict=True)


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("collectives.")])
def test_one_rank_alone(name: str) -> None:
    ad.run_local(run_case, name, ranks=1, strict=True)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        pytest.param(
            name,
            ranks,
            marks=[*([pytest.mark.slow] if name in SLOW else []), *([pytest.mark.long] if ranks in (2, 4) else [])],
        )
        for name in NAMES
        for ranks in (1, 2, 3, 4)
        if ranks > 1 or not name.startswith("collectives.")
    ],
)
def test_simulated(name: str, ranks: int) -> None:
    ad.simulate(run_case, name, ranks=ranks, seed=0, strict=True).value()


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in HEAVY])
def test_simulated_with_other_seeds(name: str, seed: int) -> None:
    ad.simulate(run_case, name, ranks=3, seed=seed, strict=True).value()
