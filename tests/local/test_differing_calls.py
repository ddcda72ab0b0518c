"""Tests members that call different helpers, or with different roots, or one of them with an invalid argument.

All members get an error that names the ranks, and stay in step. No member gets a wrong value or waits forever.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch
from scripts import differing_calls
from support.seeds import seeds

import asyncdist as ad
from asyncdist.errors import DisagreementError, RemoteError


def test_local() -> None:
    differing_calls.check(ad.run_local(differing_calls.main, ranks=3, strict=True))


@pytest.mark.parametrize("seed", seeds(10))
def test_simulated(seed: int) -> None:
    differing_calls.check(ad.simulate(differing_calls.main, ranks=3, seed=seed, strict=True).results)


def test_both_sides_are_named() -> None:
    async def main(world: ad.World) -> None:
        if world.rank == 1:
            await ad.gather_from_all_ranks(lambda: 1, root=1)
        else:
            await ad.average_models(torch.nn.Linear(1, 1))

    with pytest.raises(
        DisagreementError, match=r"rank 0 calls average_models\(\) and rank 1 calls gather_from_all_ranks\(root=1\)"
    ):
        ad.run_local(main, ranks=2)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: ad.gather_from_all_ranks(5),  # type: ignore[arg-type]
        lambda: ad.gather_from_all_ranks(lambda: 1, 7),
        lambda: ad.gather_from_all_ranks(lambda: 1, root=9),
        lambda: ad.gather_from_all_ranks(lambda: 1, root=True),
    ],
)
def test_rank_that_catches_its_own_wrong_call_blocks_no_other(wrong: Callable[[], Awaitable[Any]]) -> None:
    async def main(world: ad.World) -> str:
        try:
            await (wrong() if world.rank == 1 else ad.gather_from_all_ranks(lambda: 1))
        except Exception as error:
            found = type(error).__name__ + (f" of rank {error.rank}" if isinstance(error, RemoteError) else "")
        await ad.barrier()
        return found

    there, here, other = ad.run_local(main, ranks=3, strict=True)
    assert here in ("TypeError", "ValueError", "LocalProtocolError")
    assert there == other == "RemoteError of rank 1"


def test_all_to_all_without_rows_takes_part() -> None:
    """Regression: a rank whose tensor had no rows returned at once, and the others waited forever."""

    async def main(world: ad.World, rows: tuple[int, int]) -> int:
        return len(await ad.all_to_all(torch.zeros(rows[world.rank])))

    assert ad.simulate(main, (0, 0), ranks=2, seed=1, strict=True).results == (0, 0)
    with pytest.raises(ad.DisagreementError, match="all_to_all"):
        ad.simulate(main, (0, 4), ranks=2, seed=1)
