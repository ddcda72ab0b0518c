"""Tests ``seed_all``: each rank gets its own random states, the same in each run."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import asyncdist as ad
from protocols import AsyncSelectiveAveragingPolicy


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


def test_a_policys_first_call_of_model_builder_draws_no_numbers() -> None:
    """Regression: the numbers of numpy and random that the model's builder draws were missing in the training."""

    def build() -> nn.Module:
        drawn.append(all_draws())
        return nn.Linear(1, 1)

    def all_draws() -> tuple[float, float, float]:
        return random.random(), float(np.random.random()), torch.rand(()).item()

    async def main(_: ad.World) -> list[Any]:
        model = nn.Linear(1, 1)
        ad.seed_all(1)
        AsyncSelectiveAveragingPolicy(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            average_every=1,
            averaging_strategy="reset_weights",
            model_builder=build,
        )
        return [all_draws()]

    drawn: list[Any] = []
    assert list(ad.run_local(main, ranks=1)) == [drawn]
