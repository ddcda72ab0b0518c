"""Tests that masks with infinities or the lowest finite number stay, and do not prevent averages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import asyncdist as ad
from protocols import AsyncDiLoCoPolicy, DiLoCoPolicy, PopulationAveragingPolicy, SparseAveragingPolicy

POLICIES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "local SGD": (DiLoCoPolicy, {"average_every": 2, "outer_optimizer": None}),
    "local SGD with mixing": (DiLoCoPolicy, {"average_every": 2, "outer_optimizer": None, "mixing": 0.5}),
    "DiLoCo": (DiLoCoPolicy, {"average_every": 2}),
    "async": (AsyncDiLoCoPolicy, {"average_every": 2, "late": "wait", "quorum": 3}),
    "PAPA": (PopulationAveragingPolicy, {"average_every": 2, "pull": 0.25}),
    "SPARTA": (SparseAveragingPolicy, {"average_every": 2, "fraction": 1.0}),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("is_parameter", [True, False])
@pytest.mark.parametrize("value", [-torch.inf, torch.finfo(torch.float32).min])
def test_a_mask_stays_and_the_weights_are_averaged(policy: str, is_parameter: bool, value: float) -> None:
    """Regression: PAPA made infinities NaN; the norm of finfo.min overflowed, so local SGD averaged no rank."""
    kind, options = POLICIES[policy]
    mask = torch.triu(torch.full((3, 3), value), 1)

    async def main(world: ad.World) -> float:
        torch.manual_seed(0)
        model: Any = nn.Linear(3, 3)
        if is_parameter:
            model.mask = nn.Parameter(mask.clone(), requires_grad=False)
        else:
            model.register_buffer("mask", mask.clone())
        first = model.weight.detach()[0, 0].item()
        async with kind(model, torch.optim.SGD([model.weight], lr=0.1), **options) as own:
            for _ in range(2):
                with torch.no_grad():
                    model.weight.add_(1.0 + world.rank)
                info = await own.step()
        assert info.donors == (0, 1, 2) and not info.recovered
        assert torch.equal(model.mask.detach(), mask)
        return model.weight.detach()[0, 0].item() - first

    changes = ad.simulate(main, ranks=3, seed=1, strict=True).results
    kept = {"PAPA": 0.75, "local SGD with mixing": 0.5}.get(policy, 0.0)
    assert [changes[rank] - changes[1] for rank in range(3)] == pytest.approx([-2 * kept, 0, 2 * kept], abs=1e-5)
    assert abs(changes[1]) > 0.1
