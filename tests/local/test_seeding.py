"""Tests ``seed_all``: each rank gets its own random states, the same in each run."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

import asyncdist as ad


async def draw(world: ad.World) -> tuple[int, float, float, float]:
    number = ad.seed_all(7)
    return number, random.random(), float(np.random.rand()), float(torch.rand(()))


def test_ranks_differ_and_runs_do_not() -> None:
    first, again = (ad.simulate(draw, ranks=4, seed=seed).results for seed in (0, 1))
    assert list(first) == list(again) and len(set(first)) == 4
    assert ad.run(draw) == first[0], "a process of its own must draw the same numbers"
    with ad.blocking.open_world() as world:
        assert ad.seed_all(7) == first[0][0] == ad.seed_all(7, world=world.awaited)


@pytest.mark.parametrize("seed", [-1, 1.5, "7"])
def test_what_is_no_seed(seed: int) -> None:
    async def main(_: ad.World) -> None:
        ad.seed_all(seed)

    with pytest.raises(ValueError, match="seed must be an integer >= 0, got"):
        ad.run(main)
    with pytest.raises(RuntimeError, match=r"asyncdist\.run"):
        ad.seed_all(1)


def test_a_seed_of_any_integer_type_is_used() -> None:
    """Regression: a tensor passed the check and then raised TypeError."""

    async def main(_: ad.World) -> list[int]:
        return [ad.seed_all(seed) for seed in (7, np.int64(7), torch.tensor(7))]  # type: ignore[arg-type]

    assert len(set(ad.run(main))) == 1
