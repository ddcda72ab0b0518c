"""Tests the errors and warnings of wrong calls of DiLoCo's step."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from support.facts import naming
from support.local import run

import asyncdist as ad
from protocols import AsyncDiLoCoPolicy, DiLoCoPolicy, SelectiveDiLoCoPolicy


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


@pytest.mark.parametrize("kind", [DiLoCoPolicy, AsyncDiLoCoPolicy, SelectiveDiLoCoPolicy])
def test_tokens_belong_to_all_steps_or_to_none(kind: Any) -> None:
    """Regression: a step without tokens counted as 1, a thousandth of the others, and nothing said so."""

    async def train(world: ad.World) -> None:
        for first, second in ((1000, None), (None, 1000)):
            model = torch.nn.Linear(2, 2)
            options = {"metric": lambda: 0.0} if kind is SelectiveDiLoCoPolicy else {}
            optimizer = torch.optim.SGD(model.parameters())
            async with kind(model, optimizer, average_every=4, weights="tokens", **options) as own:
                await own.step(tokens=first)
                with pytest.raises(ValueError, match=naming("tokens", "in all steps or in no step", str(second))):
                    await own.step(tokens=second)
                await own.step(tokens=first)

    run(train, 1)


@pytest.mark.parametrize("kind", [DiLoCoPolicy, AsyncDiLoCoPolicy])
def test_tokens_without_effect_are_refused(kind: Any) -> None:
    """Regression: without weights="tokens" they were ignored."""

    async def train(world: ad.World) -> None:
        model = torch.nn.Linear(2, 2)
        async with kind(model, torch.optim.SGD(model.parameters()), average_every=2) as own:
            with pytest.raises(ValueError, match=naming("tokens", "weights='tokens'", "8")):
                await own.step(tokens=8)
            await own.step()

    run(train, 1)


def test_a_positional_number_of_rated_tokens_is_refused() -> None:
    """Regression: with weights="rate" a positional number of tokens was taken for a metric."""

    async def train(world: ad.World) -> None:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters())
        async with AsyncDiLoCoPolicy(model, optimizer, average_every=2, weights="rate") as own:
            with pytest.raises(TypeError, match=r"step\(tokens=n\)"):
                await own.step(8)
            await own.step(tokens=8)

    run(train, 1)
