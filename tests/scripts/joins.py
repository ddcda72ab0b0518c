"""Ranks train until a file appears; some join later than others.

    python joins.py FOLDER

Each process writes its identity to FOLDER once it is in the policy; the file's name is its rank and incarnation. It
trains until FOLDER/enough exists, and then reports.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import torch
from support.mpi import report
from torch import nn

import asyncdist as ad
from protocols import AsyncSelectiveAveragingPolicy, PolicyEvent, SnapshotTaken


async def main(world: ad.World) -> None:
    folder = Path(sys.argv[1])
    absent = sorted(world.services.gone)
    torch.manual_seed(0)  # otherwise a warning would report different first weights
    model = nn.Linear(64, 64)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    rows = torch.randn(1, 64, generator=torch.Generator().manual_seed(world.rank))
    rounds: list[int] = []

    def note(event: PolicyEvent) -> None:
        if isinstance(event, SnapshotTaken):
            rounds.append(event.round)

    async with AsyncSelectiveAveragingPolicy(
        model, optimizer, average_every=5, grace_s=0.2, start_timeout_s=100.0, on_event=note
    ) as policy:
        admitted_at = policy.iteration
        name = f"{world.rank}.{world.incarnation}"
        while not (folder / "enough").exists():
            await asyncio.sleep(0.02)
            nn.functional.mse_loss(model(rows), torch.zeros(1, 64)).backward()
            optimizer.step()
            optimizer.zero_grad()
            info = await policy.step(float(world.rank))
            if info:
                rounds.append(info.round)
            if rounds and not (folder / name).exists():
                said = {"pid": os.getpid(), "absent": absent, "admitted_at": admitted_at, "size": world.size}
                (folder / f"{name} aside").write_text(json.dumps(said))
                (folder / f"{name} aside").rename(folder / name)
    report(world.rank, {"incarnation": world.incarnation, "last": max(rounds)})


if __name__ == "__main__":
    ad.run(main)
