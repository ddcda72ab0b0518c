"""The jobs of ``launched/test_population_training.py``: population based training between real processes.

The argument is ``calm``, or ``killed``, in which the coordinator kills itself. Each rank reports its part of the
ledger.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from simulation.population_training_scenarios import Copy, Plan, Record, Snapshot, train
from support.mpi import report

import asyncdist as ad

CALM = Plan(steps=(40,) * 4, step_s=0.01, options={"average_every": 2})
KILLED = dataclasses.replace(CALM, steps=(80,) * 4, dies_at={0: 20})


async def main(world: ad.World, job: str) -> None:
    record = Record()
    await train(world, CALM if job == "calm" else KILLED, record)
    report(
        world.rank,
        {
            "snapshots": [[*key, dataclasses.asdict(each)] for key, each in record.snapshots.items()],
            "copies": [dataclasses.asdict(each) for each in record.copies],
        },
    )


def record_of(found: dict[str, Any]) -> Record:
    """Return a rank's part of the ledger from its report."""
    return Record(
        snapshots={(number, donor): Snapshot(**each) for number, donor, each in found["snapshots"]},
        copies=[Copy(**{**each, "now": Snapshot(**each["now"])}) for each in found["copies"]],
    )


if __name__ == "__main__":
    ad.run(main, sys.argv[1])
