"""The jobs of ``launched/test_simple_policies.py``: simple policies between real processes.

The argument is ``calm``, for all policies in turn, or the name of a policy, in which ranks are killed. Each rank
reports its weights after each step, and the rounds that it applied.
"""

from __future__ import annotations

import dataclasses
import sys

from scripts.diloco import seen_by
from simulation.diloco_scenarios import Record
from simulation.simple_scenarios import POLICIES, Plan, module_of, train
from support.mpi import report

import asyncdist as ad

CALM = {name: Plan(policy=name, options=module_of(name).OPTIONS[0], steps=(12,) * 4, step_s=0.0) for name in POLICIES}
#: Rank 0 leads the exchange until it is killed. Rank 2 is killed later.
KILLED = {name: dataclasses.replace(plan, step_s=0.01, dies_at={0: 4, 2: 8}) for name, plan in CALM.items()}


async def main(world: ad.World, job: str) -> None:
    found = {}
    for name, plan in (CALM if job == "calm" else {job: KILLED[job]}).items():
        record = Record()
        await train(world, plan, record)
        found[name] = seen_by(record, world.rank)
        report(world.rank, found)


if __name__ == "__main__":
    ad.run(main, sys.argv[1])
