"""The jobs of ``launched/test_async_diloco.py``: asynchronous DiLoCo between real processes, with kills and restarts.

The argument names a key of ``JOBS``. With a quorum of all ranks that wait, the weights are those of DiLoCo, so that its
oracle computes them. Each rank reports its weights after each step, and the versions that it applied.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import dataclass
from typing import Any

import torch
from scripts.population import sgd
from simulation.diloco_scenarios import Plan
from simulation.training_runs import Layers, drift, weights_of
from support.mpi import report

import asyncdist as ad
from protocols import AsyncDiLoCoPolicy, AverageApplied, PolicyEvent


@dataclass(frozen=True, kw_only=True)
class Job:
    """One job.

    Attributes:
        plan: Plan of DiLoCo with the same weights; ``dies_at`` is the step before which a rank is killed.
        options: Options of asynchronous DiLoCo that the plan does not contain.
        waits_for: Rank for whose return the other ranks wait while they train.
    """

    plan: Plan
    options: dict[str, Any]
    waits_for: int | None = None


LOCKSTEP = {"quorum": 4, "late": "wait", "mirror_every": 1}
JOBS = {
    "calm": Job(plan=Plan(outer="default", steps=(16,) * 4, every=4), options=LOCKSTEP),
    # Rank 0 leads until it is killed.
    "killed": Job(plan=Plan(outer="default", steps=(24,) * 4, every=3, dies_at={0: 13}), options=LOCKSTEP),
    # Each step is a version, so that a newcomer begins as the oracle's rank does.
    "restarted": Job(
        plan=Plan(outer="default", steps=(40,) * 4, every=1, dies_at={2: 12}), options=LOCKSTEP, waits_for=2
    ),
    # Rank 0 serves the first island until it is killed, and rank 3 is the global server.
    "islands": Job(
        plan=Plan(outer="dyadic", steps=(80,) * 4, every=2, dies_at={0: 33}), options={"islands": 2, "global_every": 2}
    ),
    "skipping": Job(plan=Plan(outer="dyadic", steps=(60,) * 4, every=5, dies_at={0: 33}), options={"mirror_every": 1}),
}


async def main(world: ad.World, name: str) -> None:
    job, rank = JOBS[name], world.rank
    plan, model = job.plan, Layers(job.plan.dtype)
    seen: dict[str, Any] = {"weights": {}, "applied": [], "incarnation": world.incarnation}

    def note(event: PolicyEvent) -> None:
        if isinstance(event, AverageApplied):
            seen["applied"].append((event.round, event.donors, event.iteration))

    options = {each: plan.options[each] for each in ("average_every", "outer_optimizer")} | job.options
    async with AsyncDiLoCoPolicy(model, sgd(model), on_event=note, **options) as policy:
        seen["began_at"] = policy.iteration
        while policy.iteration < plan.steps[rank]:
            step = policy.iteration
            if step in plan.dies_at.values() and not world.incarnation:
                if "late" in job.options:
                    await ad.barrier()  # all ranks have the anchor
                if plan.dies_at.get(rank) == step:
                    os.kill(os.getpid(), signal.SIGKILL)
            while job.waits_for is not None and step == 30 and not world.services.restarted.get(job.waits_for):
                if rank == job.waits_for:
                    break
                await asyncio.sleep(0.01)
            with torch.no_grad():
                for place, parameter in enumerate(model.parameters()):
                    parameter.add_(torch.from_numpy(drift(rank, step, place, parameter.shape)))
            await asyncio.sleep(plan.step_s)
            await policy.step()
            seen["weights"][step] = [array.tolist() for array in weights_of(model)]
    seen["statistics"] = {
        "version": policy.statistics().version,
        "contributions": policy.statistics().contribution_count,
        "postponed": policy.statistics().postponed_count,
        "lost": policy.statistics().lost_outer_state_count,
        "merges": policy.statistics().merge_count,
        "global": policy.statistics().global_version,
    }
    report(rank, seen)


if __name__ == "__main__":
    ad.run(main, sys.argv[1])
