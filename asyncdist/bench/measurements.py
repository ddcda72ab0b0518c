"""Measures small messages, large tensors and idle steps. Rank 0 returns a table, and the other ranks return None."""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import nn

import asyncdist as ad
from asyncdist.bench.blocking_messages import rival_of
from asyncdist.messaging import wire
from asyncdist.protocols import AsyncSelectiveAveragingPolicy
from asyncdist.wording import aligned

_MIB: Final = 1 << 20
_NEVER: Final = 10**9
_Row: TypeAlias = tuple[str, str, str, str]


@dataclass(frozen=True, slots=True)
class Ping:
    """The message that is sent back and forth."""

    payload: bytes


async def latency(world: ad.World, options: argparse.Namespace) -> str | None:
    """Measure half a round trip of a small message between ranks 0 and 1."""
    rival, peer = await rival_of(world), 1 - world.rank
    channel, loop = world.channel(Ping, tag=100), int(options.loop)
    if world.rank > 1:
        return None

    async def ours(message: Ping) -> float:
        rival.align(world.rank, peer)
        return await our_trips(world, channel, message, loop)

    def rivals(nbytes: int) -> float:
        outgoing, incoming = (torch.zeros(nbytes, dtype=torch.uint8, device="cpu") for _ in range(2))
        rival.align(world.rank, peer)
        began_at = time.perf_counter()
        rival.round_trips(outgoing, incoming, loop, world.rank, peer)
        return 1e6 * (time.perf_counter() - began_at) / (2 * loop)

    times = f"median of {options.repeat} blocks of {loop} round trips"
    rows = await _small_messages(options, ours, rivals)
    headings = ("bytes", "awaited channel", rival.name, "ratio")
    return _table(world, f"latency: one way between ranks 0 and 1, {times}", headings, rows)


async def ringtest(world: ad.World, options: argparse.Namespace) -> str | None:
    """Measure the time of a small message from rank to rank, in a ring of all ranks."""
    rival = await rival_of(world)
    channel, loop = world.channel(Ping, tag=100), int(options.loop)
    rank, size = world.rank, world.size

    async def ours(message: Ping) -> float:
        await ad.barrier()
        began_at = time.perf_counter()
        for _ in range(loop):
            if rank == 0:
                await channel.send(message, (rank + 1) % size)
                await channel.receive()
            else:
                await channel.receive()
                await channel.send(message, (rank + 1) % size)
        return 1e6 * (time.perf_counter() - began_at) / (size * loop)

    def rivals(nbytes: int) -> float:
        tensor = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
        began_at = time.perf_counter()
        for index in range(1 + loop):
            if index == 1:  # the first lap synchronises all ranks
                began_at = time.perf_counter()
            if rank == 0:
                rival.send(tensor, (rank + 1) % size)
                rival.receive(tensor, (rank - 1) % size)
            else:
                rival.receive(tensor, (rank - 1) % size)
                rival.send(tensor, (rank + 1) % size)
        return 1e6 * (time.perf_counter() - began_at) / (size * loop)

    times = f"median of {options.repeat} blocks of {loop} times around"
    rows = await _small_messages(options, ours, rivals)
    headings = ("bytes", "awaited channel", rival.name, "ratio")
    return _table(world, f"ringtest: from rank to rank around all {size}, {times}", headings, rows)


async def bandwidth(world: ad.World, options: argparse.Namespace) -> str | None:
    """Measure round trips of a large tensor between ranks 0 and 1."""
    rival, peer = await rival_of(world), 1 - world.rank
    if world.rank > 1:
        return None
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
        rows.append(_compared(size_mib, ours, theirs, "GB/s"))
    title = f"bandwidth: a tensor from rank 0 to rank 1 and back, median of {options.repeat} round trips"
    return _table(world, title, ("MiB", "stream", rival.name, "ratio"), rows)


async def step(world: ad.World, options: argparse.Namespace) -> str | None:
    """Measure a policy's step in which nothing happens. Nearly every step of a training loop is such a step."""
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
        rows.append(_compared(width * width, statistics.median(steps_us), statistics.median(yields_us), "us"))
    title = f"step: idle, median of {options.repeat * options.loop}, on rank 0 of {world.size}"
    return _table(world, title, ("parameters", "policy.step()", "asyncio.sleep(0)", "ratio"), rows)


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


async def _small_messages(
    options: argparse.Namespace, ours: Callable[[Ping], Awaitable[float]], rivals: Callable[[int], float]
) -> list[_Row]:
    """Measure, for each size, blocks of messages alternately with ``ours`` and ``rivals``. Both send as many bytes."""
    rows = []
    for nbytes in options.sizes:
        message = Ping(bytes(nbytes))
        frame_nbytes = wire.HEADER_NBYTES + len(wire.Codec(Ping).encode(message)[1])
        ours_us, rival_us = [], []
        for _ in range(1 + options.repeat):  # the first block warms up
            ours_us.append(await ours(message))
            rival_us.append(rivals(frame_nbytes))
        rows.append(_compared(nbytes, statistics.median(ours_us[1:]), statistics.median(rival_us[1:]), "us"))
    return rows


def _compared(what: int, ours: float, rivals: float, unit: str) -> _Row:
    return f"{what}", f"{ours:.2f} {unit}", f"{rivals:.2f} {unit}", f"x{ours / rivals:.2f}"


def _table(world: ad.World, title: str, headings: _Row, rows: Sequence[_Row]) -> str | None:
    return f"{title}\n{aligned([headings, *rows])}" if world.rank == 0 else None
