"""Tests which policies may skip a step that has nothing to do (``SpawnPolicy._begin_step``)."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections import Counter

import pytest
import torch

import asyncdist as ad
import protocols
from protocols import AsyncSelectiveAveragingPolicy, PolicyEvent
from protocols.policy import SpawnPolicy


def policies() -> list[type[SpawnPolicy]]:
    for found in pkgutil.walk_packages(protocols.__path__, "protocols."):
        importlib.import_module(found.name)
    found, rest = [], [SpawnPolicy]
    while rest:
        subclasses = rest.pop().__subclasses__()
        found += subclasses
        rest += subclasses
    ours = {cls for cls in found if cls.__module__.removeprefix("asyncdist.").startswith("protocols")}
    return sorted(ours, key=lambda cls: cls.__qualname__)


@pytest.mark.parametrize("cls", policies(), ids=lambda cls: cls.__name__)
def test_a_policy_with_its_own_step_decides_when_to_skip_it(cls: type[SpawnPolicy]) -> None:
    """Regression: ranks of a sharded replica skipped a swap for which the others of the replica waited forever.

    They inherited ``_begin_step`` of the policy whose ``_step`` they replace.
    """
    if "_step" in vars(cls) and "_begin_step" not in vars(cls):
        assert "super()._step(" in inspect.getsource(vars(cls)["_step"])


def test_a_callback_for_events_delays_only_steps_with_events() -> None:
    """Regression: with ``on_event``, no step was skipped."""

    async def main(world: ad.World) -> Counter[bool]:
        events: list[PolicyEvent] = []
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        counts: Counter[bool] = Counter()
        async with AsyncSelectiveAveragingPolicy(model, optimizer, average_every=10, on_event=events.append) as policy:
            for step in range(200):
                if step % 10 != 9:  # no report is due
                    counts[policy._begin_step()] += 1
                await policy.step(score=float(world.rank))
        assert events
        return counts

    for counts in ad.simulate(main, ranks=3, seed=1, strict=True).results:
        assert counts[False] > counts[True] > 0
