"""Tests that progress below the precision of a model's weights adds up in anchors, which are in float32 or wider."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import asyncdist as ad
from protocols import AsyncDiLoCoPolicy, DiLoCoPolicy, GossipPolicy
from protocols.policy import SpawnPolicy

SGD = partial(torch.optim.SGD, lr=1.0)
CASES: dict[str, tuple[type[SpawnPolicy], dict[str, Any]]] = {
    "diloco": (DiLoCoPolicy, {"outer_optimizer": SGD}),
    "diloco with int8": (DiLoCoPolicy, {"outer_optimizer": SGD, "wire": "int8"}),
    "diloco with late ranks": (DiLoCoPolicy, {"outer_optimizer": SGD, "late": "skip", "quorum": 2}),
    "eager diloco": (DiLoCoPolicy, {"outer_optimizer": SGD, "eager": True}),
    "async diloco": (AsyncDiLoCoPolicy, {"outer_optimizer": partial(torch.optim.SGD, lr=0.5)}),
    "noloco": (GossipPolicy, {"outer_lr": 0.5, "topology": "ring"}),
    "gossip with nesterov": (GossipPolicy, {"outer_momentum": 0.5, "nesterov": True, "topology": "ring"}),
    "push-sum": (GossipPolicy, {"push_sum": True, "topology": "exponential"}),
}


async def train(world: ad.World, policy_class: Any, options: dict[str, Any], dtype: torch.dtype) -> float:
    """Move one rank's weights by one unit in the last place of bfloat16 every second round, from 1 on."""
    model = nn.Linear(4, 1, bias=False).to(dtype)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    async with policy_class(model, optimizer, average_every=1, **options) as policy:
        for step in range(40):
            if world.rank == 0 and step % 2 == 0:
                with torch.no_grad():
                    model.weight += 2.0**-7
            await policy.step()
    return model.weight[0, 0].item()


@pytest.mark.parametrize("name", CASES)
def test_progress_of_half_a_unit_adds_up_in_bfloat16(name: str) -> None:
    """Regression: each difference contained the rounding of the anchor, which moved it back to the nearest weight."""
    wide, narrow = (
        ad.simulate(train, *CASES[name], dtype, ranks=2, seed=1).results for dtype in (torch.float32, torch.bfloat16)
    )
    assert min(wide) > 1.03
    assert narrow == pytest.approx(wide, abs=2.0**-6)
