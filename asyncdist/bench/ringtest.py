"""Measures the time of a small message from rank to rank, in a ring of all ranks."""

from __future__ import annotations

import argparse
import statistics
import time

import torch

import asyncdist as ad
from asyncdist.bench.blocking_messages import Rival, rival_of
from asyncdist.bench.latency import Ping
from asyncdist.bench.tables import Table, compared_us
from asyncdist.messaging import wire

RANKS_MIN = 2


async def measure(world: ad.World, options: argparse.Namespace) -> Table | None:
    """Measure rings of asyncdist and the other library alternately, for each size. Return the table on rank 0."""
    rival = await rival_of(world)
    channel = world.channel(Ping, tag=100)
    rows = []
    for nbytes in options.sizes:
        message = Ping(bytes(nbytes))
        frame_nbytes = wire.HEADER_NBYTES + len(wire.Codec(Ping).encode(message)[1])
        ours_us, rival_us = [], []
        for _ in range(1 + options.repeat):  # the first block warms up
            ours_us.append(await _our_ring(world, channel, message, options.loop))
            rival_us.append(_rival_ring(world, rival, frame_nbytes, options.loop))
        rows.append(compared_us(f"{nbytes}", statistics.median(ours_us[1:]), statistics.median(rival_us[1:])))
    times = f"median of {options.repeat} blocks of {options.loop} times around"
    title = f"ringtest: from rank to rank around all {world.size}, {times}"
    return Table(title, ("bytes", "awaited channel", rival.name, "ratio"), rows) if world.rank == 0 else None


async def _our_ring(world: ad.World, channel: ad.Channel[Ping], message: Ping, count: int) -> float:
    """Send a message ``count`` times around all ranks, and return the time from rank to rank in microseconds."""
    following = (world.rank + 1) % world.size
    await ad.barrier()
    began_at = time.perf_counter()
    for _ in range(count):
        if world.rank == 0:
            await channel.send(message, following)
            await channel.receive()
        else:
            await channel.receive()
            await channel.send(message, following)
    return 1e6 * (time.perf_counter() - began_at) / (world.size * count)


def _rival_ring(world: ad.World, rival: Rival, nbytes: int, count: int) -> float:
    """Return the other library's time from rank to rank in microseconds.

    Its messages have as many bytes as asyncdist's.
    """
    tensor = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
    previous, following = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    began_at = time.perf_counter()
    for index in range(1 + count):
        if index == 1:  # the first lap synchronises all ranks
            began_at = time.perf_counter()
        if world.rank == 0:
            rival.send(tensor, following)
            rival.receive(tensor, previous)
        else:
            rival.receive(tensor, previous)
            rival.send(tensor, following)
    return 1e6 * (time.perf_counter() - began_at) / (world.size * count)
