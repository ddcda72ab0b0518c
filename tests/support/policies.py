"""Trains ranks of one process in lockstep under selective averaging, with weights that identify their rank."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from scripts.population import (
    Mixed,
    Story,
    clone_state,
    flat_state,
    sgd,
)
from torch import nn

import asyncdist as ad
from protocols import (
    AsyncSelectiveAveragingPolicy,
    SelectiveStatistics,
    StepInfo,
)
from support.local import run

#: Number of steps within which a rank of these small populations must have been replaced; rounds take about ten.
PLENTY = 400


class Lockstep:
    """Keeps some ranks of this process at the same step, whatever each of them does in it."""

    def __init__(self, ranks: int) -> None:
        self._barrier = asyncio.Barrier(ranks)

    async def steps(self, count: int) -> AsyncIterator[int]:
        for step in range(count):
            yield step
            await self._barrier.wait()


@dataclass
class Member:
    """The observations of one rank of :func:`train`."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    infos: list[StepInfo] = field(default_factory=list)
    statistics: SelectiveStatistics | None = None
    start: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def replacements(self) -> list[StepInfo]:
        return [info for info in self.infos if info]


def train(
    *,
    ranks: int = 4,
    steps: int = 60,
    story: Story | None = None,
    metric: Callable[[int], Any] = float,
    value: Callable[[int], float] = float,
    **options: Any,
) -> list[Member]:
    """Train ranks whose weights are constant; weights and metrics equal the rank by default."""
    lockstep = Lockstep(ranks)

    async def main(world: ad.World) -> Member:
        model = Mixed(value(world.rank))
        member = Member(model, sgd(model), start=clone_state(model))
        settings = {"average_every": 2, "replacement_ratio": 0.25, **options}
        if story is not None:
            settings["on_event"] = story.listener(world.rank)
        async with AsyncSelectiveAveragingPolicy(model, member.optimizer, **settings) as policy:
            async for _ in lockstep.steps(steps):
                if story is not None:
                    story.before[world.rank] = flat_state(model)
                member.infos.append(await policy.step(metric(world.rank)))
        member.statistics = policy.statistics()
        return member

    return run(main, ranks)


# -- what is averaged, and how ----------------------------------------------------------------------------------------


def fill_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
