"""Tests that a damaged state of a policy, in a checkpoint file with a valid checksum, raises one clear error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import asyncdist as ad
from protocols import (
    AsyncDiLoCoPolicy,
    AsyncSelectiveAveragingPolicy,
    AverageAllPolicy,
    DiLoCoPolicy,
    OneSidedSelectiveAveragingPolicy,
)

#: Policies with their options, whose saved states are damaged.
DAMAGED: dict[type, dict[str, Any]] = {
    AsyncDiLoCoPolicy: {"average_every": 3},
    AverageAllPolicy: {"average_every": 3},
    AsyncSelectiveAveragingPolicy: {"average_every": 3},
    DiLoCoPolicy: {"average_every": 5, "fragments": 2},
    OneSidedSelectiveAveragingPolicy: {"average_every": 3},
}


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def damaged(state: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the state with one entry, or the first item of an entry, replaced by a value of another kind."""
    for name, value in state.items():
        others: list[Any] = [None, "x", -1, {}, [1], torch.zeros(2)]
        if isinstance(value, list | tuple) and value:
            others += [type(value)([other, *value[1:]]) for other in (None, "x", {}, [1])]
        for other in others:
            yield f"{name}: {other!r:.60}", {**state, name: other}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_state_of_a_policy_raises_one_clear_error(kind: Any) -> None:
    """Regression: some raised KeyError or TypeError, even when the policy was entered."""

    async def save(world: ad.World) -> dict[str, Any]:
        model, optimizer = made()
        async with kind(model, optimizer, **DAMAGED[kind]) as policy:
            for step in range(7):
                await policy.step(float(step))
            state: dict[str, Any] = policy.state_dict()
        return state

    async def load(world: ad.World, state: dict[str, Any]) -> None:
        policy = kind(*made(), **DAMAGED[kind])
        policy.load_state_dict(state)
        async with policy:
            pass

    saved, refused_count = ad.simulate(save, ranks=2, seed=1).results[0], 0
    for what, state in damaged(saved):
        try:
            ad.simulate(load, state, ranks=1, seed=1)
        except ValueError as error:
            refused_count += 1
            assert str(error), what
    assert refused_count >= 10
