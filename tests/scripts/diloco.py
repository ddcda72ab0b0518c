"""The jobs of ``launched/test_diloco.py``: the training of ``simulation/diloco_scenarios.py`` between real processes.

The argument is a key of ``JOBS``, or ``blocking``. Each rank reports its weights after each step, and the rounds that
it applied.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import torch
from simulation import diloco_quorum_scenarios, eager_scenarios
from simulation.diloco_scenarios import Plan, Record, train
from simulation.training_runs import Layers, drift, weights_of
from support.mpi import report

import asyncdist as ad
from protocols import AverageApplied, DiLoCoPolicy

STEPS = (16,) * 4
CALM = {
    "default": Plan(outer="default", steps=STEPS, every=4, step_s=0.0),
    "streaming": Plan(
        outer="default",
        steps=STEPS,
        every=4,
        fragments=2,
        overlap_steps=3,
        mixing=0.5,
        wire="int8",
        dtype=torch.float32,
    ),
    "local SGD": Plan(outer="none", steps=STEPS, every=3, warmup_steps=2, step_s=0.0),
    "selective": Plan(selects=True, outer="default", steps=STEPS, every=2, step_s=0.0),
}
#: Rank 0 leads until it is killed. Rank 2 is killed later.
KILLED = {
    "killed": Plan(outer="default", steps=STEPS, every=2, fragments=2, overlap_steps=1, dies_at={0: 5, 2: 10}),
}
#: Ranks that do not wait for a slow rank, and the number of averages that each of them applies.
LATE, LATE_COUNT = "late", 3
#: Eager outer steps, with radial means of encoded differences in the second run, and the final weights.
EAGER = {
    "eager": eager_scenarios.Plan(outer="default", steps=STEPS, every=4, fragments=2),
    "eager radial": eager_scenarios.Plan(
        outer="plain", steps=STEPS, every=4, wire="int8", merge="radial", dtype=torch.float32
    ),
}
#: A quorum: the last rank makes no third step before the others have made 30 steps.
QUORUM, QUORUM_WAIT = "quorum", 30
QUORUM_PLAN = diloco_quorum_scenarios.Plan(every=2, quorum=3, steps=(50, 50, 50, 12), fragments=2)
#: The same for selective DiLoCo.
SELECTIVE_KILLED = {
    "selective killed": Plan(selects=True, outer="default", steps=STEPS, every=2, dies_at={0: 5, 2: 10})
}
JOBS = {"calm": CALM, "killed": KILLED, "selective": SELECTIVE_KILLED}
BLOCKING = Plan(outer="dyadic", steps=STEPS, every=4, step_s=0.0)


def seen_by(record: Record, rank: int) -> dict[str, Any]:
    """Return a rank's part of a record as JSON values."""
    return {
        "weights": [[array.tolist() for array in weights] for weights in record.weights[rank]],
        "applied": [(event.round, event.donors, event.iteration) for event in record.applied[rank]],
    }


def record_of(plan: Plan, reports: dict[int, dict[str, Any]]) -> Record:
    """Return the record of all ranks' reports."""
    record = Record()
    shapes = [array.shape for array in weights_of(Layers())]
    for rank, seen in reports.items():
        for weights in seen["weights"]:
            tensors = [
                torch.tensor(own, dtype=plan.dtype).view(shape) for own, shape in zip(weights, shapes, strict=True)
            ]
            record.weights[rank].append([tensor.numpy() for tensor in tensors])
        for number, donors, iteration in seen["applied"]:
            record.applied[rank].append(AverageApplied(number, tuple(donors), (), -1, iteration, {}))
    return record


async def train_beside_slow(world: ad.World) -> int:
    """Train with ``late="skip"`` and a last rank whose steps are long, until some averages were applied.

    Returns:
        The number of this rank's steps.
    """
    model = Layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    is_slow = world.rank == world.size - 1
    async with DiLoCoPolicy(model, optimizer, average_every=2, late="skip") as policy:
        others_ended = asyncio.create_task(ad.barrier()) if is_slow else None
        while not others_ended.done() if others_ended else policy.statistics().average_count < LATE_COUNT:
            _compute(0.05 if is_slow else 0.001)
            await policy.step()
        await (others_ended or ad.barrier())
    return policy.iteration


async def train_with_quorum(world: ad.World) -> dict[str, Any]:
    """Train with a quorum, and return this rank's log. Without the quorum, only the last rank would make 30 steps."""
    logs, is_late = {world.rank: diloco_quorum_scenarios.Log()}, world.rank == world.size - 1
    others: list[asyncio.Task[None]] = []

    async def before_step(step: int) -> None:
        if is_late and step == 2:
            await ad.barrier()
        elif not is_late and step == QUORUM_WAIT:
            others.append(asyncio.create_task(ad.barrier()))

    await diloco_quorum_scenarios.train(world, QUORUM_PLAN, logs, before_step)
    await asyncio.gather(*others)
    return logs[world.rank].as_json()


def _compute(seconds: float) -> None:
    """Block for the time of a training step."""
    time.sleep(seconds)


async def main(world: ad.World, job: str) -> None:
    found: dict[str, Any] = {}
    if job == "calm":
        found[LATE] = await train_beside_slow(world)
        found[QUORUM] = await train_with_quorum(world)
        for name, eager in EAGER.items():
            lives: eager_scenarios.Lives = {}
            await eager_scenarios.train(world, eager, lives)
            found[name] = [[array.tolist() for array in weights] for weights in lives[world.rank, 0].weights]
    for name, plan in JOBS[job].items():
        record = Record()
        await train(world, plan, record)
        found[name] = seen_by(record, world.rank)
        report(world.rank, found)


def without_loop() -> None:
    """Train in blocking code, and report the weights at the end."""
    with ad.blocking.open_world() as world:
        plan, model, record = BLOCKING, Layers(), Record()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with ad.blocking.policy(DiLoCoPolicy(model, optimizer, **plan.options)) as policy:
            for step in range(plan.steps[world.rank]):
                with torch.no_grad():
                    for place, parameter in enumerate(model.parameters()):
                        parameter.add_(torch.from_numpy(drift(world.rank, step, place, parameter.shape)))
                policy.step()
                record.weights[world.rank].append(weights_of(model))
        report(world.rank, {"blocking": seen_by(record, world.rank)})


if __name__ == "__main__":
    if sys.argv[1] == "blocking":
        without_loop()
    else:
        ad.run(main, sys.argv[1])
