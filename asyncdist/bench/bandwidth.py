"""Measures the bandwidth of a large tensor between two ranks, over round trips."""

from __future__ import annotations

import argparse
import statistics
import time

import torch

import asyncdist as ad
from asyncdist.bench.blocking_messages import rival_of
from asyncdist.bench.tables import Table, compared_gb_s

RANKS_MIN = 2
_MIB = 1 << 20


async def measure(world: ad.World, options: argparse.Namespace) -> Table | None:
    """Measure round trips of asyncdist and the other library alternately, for each size. Return the table on rank 0."""
    rival = await rival_of(world)
    if world.rank > 1:
        return None
    peer = 1 - world.rank
    rows = []
    for size_mib in options.sizes:
        outgoing = torch.full((size_mib * _MIB,), world.rank, dtype=torch.uint8, device="cpu")
        incoming = torch.zeros_like(outgoing)
        ours_s, rival_s = [], []
        for _ in range(1 + options.repeat):  # the first round trip warms up
            rival.align(world.rank, peer)
            ours_s.append(await our_trip(world, outgoing, incoming))
            rival.align(world.rank, peer)
            began_at = time.perf_counter()
            rival.round_trips(outgoing, incoming, 1, world.rank, peer)
            rival_s.append(time.perf_counter() - began_at)
        ours, theirs = (2 * size_mib * _MIB / statistics.median(times[1:]) / 1e9 for times in (ours_s, rival_s))
        rows.append(compared_gb_s(f"{size_mib}", ours, theirs))
    title = f"bandwidth: a tensor from rank 0 to rank 1 and back, median of {options.repeat} round trips"
    return Table(title, ("MiB", "stream", rival.name, "ratio"), rows) if world.rank == 0 else None


async def our_trip(world: ad.World, outgoing: torch.Tensor, incoming: torch.Tensor) -> float:
    """Stream a tensor from rank 0 to rank 1 and another one back, and return the time in seconds."""
    peer = 1 - world.rank
    began_at = time.perf_counter()
    if world.rank == 0:
        await world.send_stream(outgoing, peer)
        await world.receive_stream(incoming, peer)
    else:
        await world.receive_stream(incoming, peer)
        await world.send_stream(outgoing, peer)
    return time.perf_counter() - began_at
