"""Tests policies by random runs over every event of the local transport, and checks every promise."""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from scripts.population import (
    Mixed,
    Story,
    flat_state,
    identity,
    sgd,
)
from support.local import run
from support.selective import STRATEGIES

import asyncdist as ad
from asyncdist.transports import matching
from protocols import (
    AsyncSelectiveAveragingPolicy,
    parameter_stream,
)


@dataclass
class Walk:
    """One random population, drawn from a seed."""

    seed: int
    strategy: str

    def __post_init__(self) -> None:
        draw = random.Random(f"{self.seed} {self.strategy}")
        self.ranks = draw.randint(2, 6)
        self.width = draw.choice([1, 4, 40])
        self.momentum = draw.choice([0.0, 0.0, 0.3])
        self.pace = [draw.choice([0, 0, 1, 3, 12]) for _ in range(self.ranks)]
        self.steps = [draw.choice([120, 120, 120, draw.randint(1, 90)]) for _ in range(self.ranks)]
        self.seconds = draw.random() < 0.3
        self.options: dict[str, Any] = {
            "average_every": draw.randint(1, 4),
            "replacement_ratio": draw.choice([0.2, 0.5, 0.8, 1.0]),
            "averaging_strategy": self.strategy,
            "momentum": self.momentum,
            "metric_mode": draw.choice(["max", "min"]),
            "optimizer_state": draw.choice(["keep", "reset"]),
            "quorum": draw.choice([0.0, 0.3, 0.5, 1.0]),
            "grace_s": draw.choice([0.0, 0.0, 0.002]),
            "round_timeout_s": draw.choice([30.0, 30.0, 0.002, 0.0001]),
            "max_report_age_s": draw.choice([600.0, 0.01]),
            "threshold": draw.choice([None, None, 0.0]),
            "cooldown": draw.choice([0, 7]),
        }
        self.chunk_nbytes = draw.choice([64, 256, 4 << 20])
        self.eager_nbytes = draw.choice([0, 200, 65536])


async def walk_rank(world: ad.World, walk: Walk, story: Story, walked: list[int]) -> int:
    draw = random.Random(f"{walk.seed} {world.rank}")
    torch.manual_seed(walk.seed * 100 + world.rank)
    model = Mixed(float(world.rank), width=walk.width)
    builder = (lambda: Mixed(9.0, width=walk.width)) if walk.strategy == "reset_weights" else None
    objects = identity(model)
    async with AsyncSelectiveAveragingPolicy(
        model, sgd(model), model_builder=builder, on_event=story.listener(world.rank), **walk.options
    ) as policy:
        for _ in range(walk.steps[world.rank]):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter))
                model.counts += 1
            if draw.random() < 0.02:
                with torch.no_grad():
                    model.embed.weight[0, 0] = draw.choice([math.nan, math.inf])
            elif draw.random() < 0.1:
                model.embed.weight.data.nan_to_num_(0.5, 0.5, 0.5)
            before = flat_state(model)
            story.before[world.rank] = before
            info = await policy.step(draw.choice([math.nan, *(draw.gauss(0, 1) for _ in range(8))]))
            if not info:
                after = flat_state(model)
                assert all(torch.equal(before[n].view(torch.uint8), after[n].view(torch.uint8)) for n in before)
            walked[world.rank] += 1
            for _ in range(draw.randint(0, walk.pace[world.rank])):
                await world.safe_point()
    assert identity(model) == objects
    return policy.statistics().replacement_count


def check_walk(seed: int, strategy: str, monkeypatch: pytest.MonkeyPatch) -> int:
    walk, story = Walk(seed, strategy), Story()
    monkeypatch.setattr(parameter_stream.messages, "CHUNK_NBYTES", walk.chunk_nbytes)
    monkeypatch.setattr(matching, "EAGER_NBYTES", walk.eager_nbytes)
    walked = [0] * walk.ranks

    async def main(world: ad.World) -> int:
        async with asyncio.timeout(60):  # the error of a hang contains the seed
            return await walk_rank(world, walk, story, walked)

    try:
        counts = run(main, walk.ranks)
        assert walked == walk.steps
        assert story.verify(momentum=walk.momentum) == sum(counts)
    except BaseException as error:
        error.add_note(f"seed {seed}, strategy {strategy!r}: {walk}, walked {walked}")
        raise
    return sum(counts)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", [pytest.param(name, marks=[pytest.mark.long] * (name != "mean")) for name in STRATEGIES]
)
def test_random_walks_keep_every_promise(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates, metrics, weights, deadlines and ends are random; every average equals its donors' snapshots' mean."""
    applied = [check_walk(seed, strategy, monkeypatch) for seed in range(6)]
    assert sum(applied) > 25, applied
