"""A restarted rank whose script loads the rank's own checkpoint, as at each start, before it joins the running policy.

The newcomer gets the leader's whole state, so nothing of the loaded state may remain.
"""

from __future__ import annotations

import asyncio
import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import asyncdist as ad
from asyncdist.simulation import Kill, Restart, simulate
from protocols import AsyncDiLoCoPolicy, DiLoCoPolicy

END = 60
KINDS: dict[str, Callable[..., Any]] = {
    "overlap": functools.partial(DiLoCoPolicy, average_every=4, fragments=2, overlap_steps=1),
    "late": functools.partial(DiLoCoPolicy, average_every=4, late="skip"),
    "async": functools.partial(AsyncDiLoCoPolicy, average_every=4),
}


async def train(world: ad.World, kind: str, saved: dict[int, Any], loads: bool) -> tuple[int, int, list[Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    policy = KINDS[kind](model, torch.optim.Adam(model.parameters(), lr=0.0))
    if world.incarnation and loads:
        policy.load_state_dict(copy.deepcopy(saved[world.rank]))
    applied_count = 0
    async with policy:
        while policy.iteration < END:
            model(torch.ones(4)).sum().backward()
            policy.optimizer.step()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += 0.01 * (1 + world.rank)
            await asyncio.sleep(0.01)
            applied_count += bool(await policy.step())
            if policy.iteration == 12 and not world.incarnation:
                await policy.settle()
                saved[world.rank] = copy.deepcopy(policy.state_dict())
    moments = [each.untyped_storage().nbytes() for state in policy.optimizer.state.values() for each in state.values()]
    return applied_count, max(moments), [parameter.tolist() for parameter in model.parameters()]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_a_state_loaded_before_the_join_remains(kind: str) -> None:
    """Regression: old means were applied once more, and an old contribution kept the rank from contributing again."""
    faults = (Kill(2, at_s=0.3), Restart(2, at_s=0.4))
    without, loaded = (
        simulate(train, kind, {}, loads, ranks=3, seed=1, faults=faults, strict=True).results for loads in (False, True)
    )
    assert loaded == without
    applied_count, moment_nbytes, _ = loaded[2]
    assert applied_count >= 5, "the newcomer applies means"
    assert moment_nbytes <= 12 * 4, "the optimizer does not keep the received state in memory"
