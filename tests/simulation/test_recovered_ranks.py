"""Tests contributions of ranks that have recovered from weights that were not finite."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import asyncdist as ad
from protocols import AsyncDiLoCoPolicy, DiLoCoPolicy
from protocols.step_info import Contributed


@pytest.mark.parametrize("policy_class", [AsyncDiLoCoPolicy, DiLoCoPolicy])
def test_a_recovered_rank_does_not_contribute_the_anchor(policy_class: Any) -> None:
    """Regression: a rank that recovered in a due step contributed a difference of zero, which halved the mean."""

    async def train(world: ad.World) -> tuple[list[float], float]:
        model = nn.Linear(4, 1, bias=False)
        with torch.no_grad():
            model.weight.zero_()
        optimizer, norms = torch.optim.SGD(model.parameters(), lr=0.0), list[float]()

        def on_event(event: object) -> None:
            if isinstance(event, Contributed):
                norms.append(event.norm)

        outer = partial(torch.optim.SGD, lr=1.0)
        options: dict[str, Any] = {"late": "skip", "quorum": 2, "outer_optimizer": outer, "on_event": on_event}
        async with policy_class(model, optimizer, average_every=5, **options) as policy:
            for _ in range(60):
                with torch.no_grad():
                    model.weight += 0.01 if world.rank == 0 else math.nan
                await policy.step()
                await world.sleep(0.01 if world.rank == 1 else 0.012)
        return norms, model.weight.mean().item()

    (norms, mean), (others, _) = ad.simulate(train, ranks=2, seed=1).results
    assert len(others) > 5 and not any(map(math.isfinite, others)), others
    assert mean == pytest.approx(0.6, abs=0.011), "rank 0 must keep all of its progress"
    assert all(norm == pytest.approx(0.1, rel=1e-3) for norm in norms)
