"""Tests the errors and warnings of wrong calls of DiLoCo's step."""

from __future__ import annotations

import warnings

import pytest
import torch
from support.facts import naming

import asyncdist as ad
from protocols import DiLoCoPolicy


def policy() -> DiLoCoPolicy:
    model = torch.nn.Linear(2, 2)
    return DiLoCoPolicy(model, torch.optim.SGD(model.parameters()), average_every=2)


def test_a_step_that_is_never_awaited_is_reported_at_its_line() -> None:
    """Regression: the warning named a line of the policy."""

    async def train(world: ad.World) -> None:
        async with policy() as own:
            own.step().close()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ad.run_local(train, ranks=1)
    (found,) = [each for each in caught if "awaited" in str(each.message)]
    assert found.filename == __file__


def test_a_tensor_is_not_a_number_of_tokens() -> None:
    async def train(world: ad.World) -> None:
        async with policy() as own:
            await own.step(tokens=torch.tensor(3))  # type: ignore[arg-type]

    with pytest.raises(ValueError, match=naming("tokens", "tokens.item()", "tensor(3)")):
        ad.run_local(train, ranks=1)
