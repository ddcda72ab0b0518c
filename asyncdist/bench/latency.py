"""Measures the latency of a small message between two ranks: half a round trip."""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

import asyncdist as ad
from asyncdist.bench.blocking_messages import Rival, rival_of
from asyncdist.bench.tables import Table, compared_us
from asyncdist.messaging import wire

RANKS_MIN = 2


@dataclass(frozen=True, slots=True)
class Ping:
    """The message that is sent back and forth."""

    payload: bytes


async def measure(world: ad.World, options: argparse.Namespace) -> Table | None:
    """Measure round trips of asyncdist and the other library alternately, for each size. Return the table on rank 0."""
    rival = await rival_of(world)
    channel = world.channel(Ping, tag=100)
    if world.rank > 1:
        return None
    rows = []
    for nbytes in options.sizes:
        message = Ping(bytes(nbytes))
        frame_nbytes = wire.HEADER_NBYTES + len(wire.Codec(Ping).encode(message)[1])
        ours_us, rival_us = [], []
        for _ in range(1 + options.repeat):  # the first block warms up
            rival.align(world.rank, 1 - world.rank)
            ours_us.append(await our_trips(world, channel, message, options.loop))
            rival_us.append(_rival_trips(world, rival, frame_nbytes, options.loop))
        rows.append(compared_us(f"{nbytes}", statistics.median(ours_us[1:]), statistics.median(rival_us[1:])))
    times = f"median of {options.repeat} blocks of {options.loop} round trips"
    title = f"latency: one way between ranks 0 and 1, {times}"
    return Table(title, ("bytes", "awaited channel", rival.name, "ratio"), rows) if world.rank == 0 else None


async def our_trips(world: ad.World, channel: ad.Channel[Any], message: Any, count: int) -> float:
    """Send a message back and forth between ranks 0 and 1, and return the one-way time in microseconds."""
    peer = 1 - world.rank
    began_at = time.perf_counter()
    if world.rank == 0:
        for _ in range(count):
            await channel.send(message, peer)
            await channel.receive()
    else:
        for _ in range(count):
            await channel.receive()
            await channel.send(message, peer)
    return 1e6 * (time.perf_counter() - began_at) / (2 * count)


def _rival_trips(world: ad.World, rival: Rival, nbytes: int, count: int) -> float:
    """Return the other library's one-way time in microseconds. Its messages have as many bytes as asyncdist's."""
    outgoing, incoming = (torch.zeros(nbytes, dtype=torch.uint8, device="cpu") for _ in range(2))
    rival.align(world.rank, 1 - world.rank)
    began_at = time.perf_counter()
    rival.round_trips(outgoing, incoming, count, world.rank, 1 - world.rank)
    return 1e6 * (time.perf_counter() - began_at) / (2 * count)
