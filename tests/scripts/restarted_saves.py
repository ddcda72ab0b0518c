"""A rank is killed while it saves; its next process adds itself to the checkpoints of the others.

    python restarted_saves.py FOLDER

Each rank reports its number of restarts, and its weight at the last save.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
from support.mpi import report

import asyncdist as ad
from asyncdist.functional.checkpoints import checkpoint_files
from protocols import DiLoCoPolicy

LOST, SAVE_EVERY, KILLED_AT, REJOINED_AFTER = 1, 20, 40, 60


def die(*_: object) -> None:
    """Kill this process while it writes its file."""
    os.kill(os.getpid(), signal.SIGKILL)


async def main(world: ad.World, folder: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    policy = DiLoCoPolicy(model, optimizer, average_every=10)
    rejoined = folder / "rejoined"
    begun, end = 0, sys.maxsize
    async with policy:
        if world.incarnation:
            begun = policy.iteration
            rejoined.write_text(str(begun // SAVE_EVERY * SAVE_EVERY + REJOINED_AFTER))
        while policy.iteration < end:
            with torch.no_grad():
                model.weight += 0.01 * (world.rank + 1)
            await world.sleep(0.002)
            await policy.step()
            if policy.iteration % SAVE_EVERY == 0:
                if (world.rank, world.incarnation, policy.iteration) == (LOST, 0, KILLED_AT):
                    checkpoint_files._save = die
                await ad.save_population(folder / "saved", model, optimizer, policy=policy, keep=2)
                if rejoined.exists() and (text := rejoined.read_text()):
                    end = int(text)
    report(world.rank, [world.incarnation, begun, model.weight.item()])


ad.run(main, Path(sys.argv[1]))
