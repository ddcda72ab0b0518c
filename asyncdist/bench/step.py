"""Measures the time of a policy's step in which nothing happens. Nearly every step of a training loop is one."""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import time

import torch
from torch import nn

import asyncdist as ad
from asyncdist.bench.tables import Table, compared_us
from asyncdist.protocols import AsyncSelectiveAveragingPolicy

RANKS_MIN = 1
_NEVER = 10**9


async def measure(world: ad.World, options: argparse.Namespace) -> Table | None:
    """Measure a policy's idle steps for each model size. Return the table on rank 0."""
    rows = []
    for parameter_count in options.sizes:
        width = max(1, round(math.sqrt(parameter_count)))
        model = nn.Linear(width, width, bias=False, device="cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        steps_us, yields_us = [], []
        async with AsyncSelectiveAveragingPolicy(model, optimizer, average_every=_NEVER) as policy:
            for _ in range(options.loop):
                await policy.step()  # warms up
            for _ in range(options.repeat * options.loop):
                began_at = time.perf_counter()
                await policy.step()
                stepped_at = time.perf_counter()
                await asyncio.sleep(0)
                steps_us.append(1e6 * (stepped_at - began_at))
                yields_us.append(1e6 * (time.perf_counter() - stepped_at))
        rows.append(compared_us(f"{width * width}", statistics.median(steps_us), statistics.median(yields_us)))
    title = f"step: idle, median of {options.repeat * options.loop}, on rank 0 of {world.size}"
    return Table(title, ("parameters", "policy.step()", "asyncio.sleep(0)", "ratio"), rows) if world.rank == 0 else None
