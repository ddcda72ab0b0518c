"""Simulates a run of a policy that is saved and resumed, which must end with the weights of an uninterrupted run.

``scenario(seed)`` draws a policy, its options and the step of the checkpoint. Weights, optimizers and policies are
saved with ``save_population``. All policies here are deterministic: their ranks wait for each other.
"""

from __future__ import annotations

import functools
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

import asyncdist as ad
from asyncdist.simulation import Fault, SimReport, simulate
from protocols import AsyncDiLoCoPolicy, DiLoCoPolicy, SelectiveDiLoCoPolicy
from simulation.simple_scenarios import POLICIES, module_of

STEP_COUNT: Final = 20
MOMENTUM: Final = functools.partial(torch.optim.SGD, lr=0.5, momentum=0.5, nesterov=True)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run that is saved after ``saved_at`` of 20 steps."""

    policy: str
    options: dict[str, Any]
    ranks: int
    saved_at: int


def draw_plan(seed: int) -> Plan:
    rng = random.Random(f"saved {seed}")
    kind = rng.choice(("diloco", "diloco", "selective", "async", "simple"))
    every = rng.randint(2, 6)
    weights = rng.choice(("equal", "tokens"))
    outer = rng.choice((MOMENTUM, functools.partial(torch.optim.Adam, lr=0.1), None))
    wire = rng.choice(({}, {"wire": "int8", "error_feedback": 0.9})) if outer or kind != "diloco" else {}
    options: dict[str, Any] = {"average_every": every, "weights": weights, **wire}
    name = {"diloco": "DiLoCoPolicy", "selective": "SelectiveDiLoCoPolicy", "async": "AsyncDiLoCoPolicy"}.get(kind, "")
    ranks = rng.randint(2, 4)
    if kind == "diloco":
        overlap = rng.randrange(every)
        fragments = rng.randint(1, min(2, every))
        options |= {"outer_optimizer": outer, "overlap_steps": overlap, "fragments": fragments}
        options |= {"warmup_steps": rng.choice((0, 0, 7)), "mixing": rng.choice((0.0, 0.5)) if overlap else 0.0}
    elif kind == "selective":
        options |= {"outer_optimizer": outer or MOMENTUM, "outlier_factor": float("inf")}
    elif kind == "async":
        options |= {"outer_optimizer": outer or MOMENTUM, "late": "wait", "quorum": ranks}
    else:
        name = rng.choice(sorted(POLICIES))
        options = dict(rng.choice(module_of(name).OPTIONS))
    return Plan(policy=name, options=options, ranks=ranks, saved_at=rng.randint(3, STEP_COUNT - 2))


def new_policy(plan: Plan) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    kinds: dict[str, Any] = {
        **POLICIES,
        **{kind.__name__: kind for kind in (DiLoCoPolicy, SelectiveDiLoCoPolicy, AsyncDiLoCoPolicy)},
    }
    return model, optimizer, kinds[plan.policy](model, optimizer, **plan.options)


async def train(world: ad.World, plan: Plan, folder: Path, first: int, last: int) -> list[list[float]]:
    """Train from one step to another, and return the weights; load and save a checkpoint at step ``saved_at``."""
    model, optimizer, policy = new_policy(plan)
    held_out = torch.linspace(-1.0, 1.0, 24).view(6, 4)

    def evaluate() -> float:
        with torch.no_grad():
            return float((model.eval()(held_out) - held_out[:, :1]).square().mean())

    if first:
        await ad.load_population(folder, model, optimizer, policy=policy)
    async with policy:
        for step in range(first, last):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * step + world.rank))
            optimizer.zero_grad()
            (model.train()(x) - x[:, :1]).square().mean().backward()
            optimizer.step()
            counts = plan.options.get("weights") == "tokens"
            named: dict[str, Any] = {"tokens": 1 + (step + world.rank) % 3} if counts else {}
            if isinstance(policy, SelectiveDiLoCoPolicy):
                named["loss"] = evaluate
            await policy.step(**named)
        if last == plan.saved_at:
            await ad.save_population(folder, model, optimizer, policy=policy)
    return [tensor.tolist() for tensor in model.state_dict().values()]


def scenario(seed: int, faults: Sequence[Fault] | None = None) -> SimReport[Any]:
    """Run one seed, without faults; AssertionError if the resumed run ends with other weights."""
    del faults
    plan = draw_plan(seed)
    with tempfile.TemporaryDirectory() as place:

        def run(first: int, last: int, seed: int) -> SimReport[Any]:
            return simulate(train, plan, Path(place), first, last, ranks=plan.ranks, seed=seed, until_s=1e4)

        straight = run(0, STEP_COUNT, seed)
        run(0, plan.saved_at, seed)
        resumed = run(plan.saved_at, STEP_COUNT, seed + 1)
    for rank, (right, found) in enumerate(zip(straight.results, resumed.results, strict=True)):
        assert found == right, f"rank {rank} of {plan} ended with other weights than an uninterrupted run"
    return resumed
