"""Tests the errors for wrong options and wrong calls of selective DiLoCo."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from support.facts import naming

import asyncdist as ad
from protocols import SelectiveDiLoCoPolicy


def made(**options: Any) -> SelectiveDiLoCoPolicy:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(4)))
    return SelectiveDiLoCoPolicy(model, torch.optim.SGD(model.parameters()), **{"average_every": 8, **options})


@pytest.mark.parametrize(
    ("options", "kind", "facts"),
    [
        ({"outer_optimizer": None}, ValueError, ("outer_optimizer", "None", "anchor", "lr=1.0")),
        ({"overlap_steps": 5, "fragments": 2}, ValueError, ("overlap_steps", "5", "4", "in flight")),
        ({"donor_ratio": 0.0}, ValueError, ("donor_ratio", "0.0")),
        ({"averaging_strategy": "reset_weights"}, ValueError, ("averaging_strategy", "best_only")),
        ({"outlier_factor": 0.9}, ValueError, ("outlier_factor", "0.9")),
        ({"metric": 0.5}, TypeError, ("metric", "0.5", "held-out")),
        ({"metric_mode": "up"}, ValueError, ("metric_mode", "'up'")),
        ({"replacement_ratio": 0.2}, TypeError, ("replacement_ratio", "donor_ratio")),
        ({"sync_every": 20}, TypeError, ("SelectiveDiLoCoPolicy", "average_every")),
        ({"doner_ratio": 0.5}, TypeError, ("SelectiveDiLoCoPolicy", "donor_ratio")),
        ({"fragments": 9}, ValueError, ("fragments", "9")),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_option_is_refused(options: dict[str, Any], kind: type[Exception], facts: tuple[str, ...]) -> None:
    with pytest.raises(kind, match=naming(*facts)):
        made(**options)


def test_options_at_their_bounds_are_allowed() -> None:
    made(overlap_steps=4, fragments=2, donor_ratio=1, outlier_factor=math.inf)
    made(outer_optimizer=functools.partial(torch.optim.SGD, lr=1.0), averaging_strategy="best_only", metric=lambda: 0.0)


@pytest.mark.parametrize(
    ("given", "kind", "facts"),
    [
        ({"loss": 0.5}, TypeError, ("loss", "0.5", "step(loss=evaluate)")),
        ({"score": torch.tensor(0.5)}, TypeError, ("score", "step(score=evaluate)")),
        ({"local_metric": 1}, TypeError, ("metric", "callable")),
        ({}, ValueError, ("metric", "iteration 0", "step(loss=evaluate)")),
        ({"loss": lambda: "low"}, TypeError, ("metric must be a number", "'low'")),
        ({"loss": lambda: 1.0, "score": lambda: 1.0}, TypeError, ("loss", "score")),
        ({"loss": lambda: 1.0, "tokens": 0}, ValueError, ("tokens", "0")),
    ],
    ids=["loss", "score", "positional", "none", "text", "two", "tokens"],
)
def test_a_wrong_metric_is_refused(given: dict[str, Any], kind: type[Exception], facts: tuple[str, ...]) -> None:
    async def main(world: ad.World) -> None:
        async with made(average_every=1) as policy:
            with pytest.raises(kind, match=naming(*facts)):
                await policy.step(**given)
            assert await policy.step(loss=lambda: 1.0), "the next step must capture the contribution"

    ad.run_local(main, ranks=2)
