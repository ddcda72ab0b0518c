"""Compares a round of selective averaging, from the decision to the applied weights, with its ideal cost.

**Time** (2 ranks, 64 MiB of float32, one donor, one replacer). Both ranks call ``policy.step()`` in a tight loop.
Blocks in which rank 1 is replaced alternate with blocks in which rank 0 is replaced. Each block has its own policy,
whose first round fills the buffers and is not counted.

- Ours: ``StepInfo.seconds`` of each round, from the assignment's arrival at the replacer to the new weights. The
  coordinator sends the assignment when it decides, so the true time is longer by one small message (microseconds). As a
  check, ``period_s`` is the wall-clock time between two applications of new weights, including the reports, the
  decision and the end of the round.
- The ideal time is measured before each block, in the same processes. It is the sum of four times: a raw message of the
  same size (half a ping-pong of the rival), a snapshot (one copy of the parameters into a flat tensor), one addition of
  a flat tensor, and one copy back into the parameters. The ranks are measured in turn, while the other rank polls a
  barrier. This time contains no checks, decisions or messages.

**Bytes** (4 ranks): policies make exactly one round. The streams of all ranks together must carry the model's size,
times donors, times replacers.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from harness import MIB, Results, Row, collect, main, model_of, optimizer_of, state_nbytes
from rivals import Rival, rival_of

import asyncdist as ad
from protocols import AsyncSelectiveAveragingPolicy, StepInfo

RANKS: Final = (2, 4)
TARGET_RATIO: Final = 1.6
_AVERAGE_EVERY: Final = 20
_LAYER_COUNT: Final = 16


@dataclass(frozen=True, slots=True)
class Settings:
    """Number of blocks (half of them for each direction) and of timed rounds in each; the model of the byte count."""

    model_mib: int
    block_count: int
    round_count: int
    counted_model_mib: int


FULL: Final = Settings(model_mib=64, block_count=8, round_count=8, counted_model_mib=64)
QUICK: Final = Settings(model_mib=1, block_count=2, round_count=2, counted_model_mib=1)


@dataclass(frozen=True, slots=True)
class Stop:
    """The replacer's notice that it has applied enough rounds."""


async def measure(world: ad.World, settings: Settings) -> Results | None:
    """Measure the time with two ranks, or the bytes with more ranks."""
    if world.size == 2:
        return await _measure_time(world, settings)
    return await _measure_bytes(world, settings)


# -- time -------------------------------------------------------------------------------------------------------------


async def _measure_time(world: ad.World, settings: Settings) -> Results | None:
    model = model_of(settings.model_mib * MIB // 4, _LAYER_COUNT)
    ideal = Ideal(model, rival_of(world))
    channel = world.channel(Stop, tag=100)
    rounds_s: list[float] = []
    periods_s: list[float] = []
    timing: dict[str, list[float]] = {}
    for block in range(settings.block_count):
        await ideal.measure(world)
        replacer = 1 - block % 2
        policy = AsyncSelectiveAveragingPolicy(
            model, optimizer_of(model), average_every=_AVERAGE_EVERY, replacement_ratio=0.5, timing=timing
        )
        async with policy:
            infos, applied_at = await _rounds(world, channel, policy, replacer, 1 + settings.round_count)
        rounds_s += [info.seconds for info in infos[1:]]
        periods_s += [later - earlier for earlier, later in itertools.pairwise(applied_at)]
    found = await collect({"rounds": rounds_s, "periods": periods_s, "ideal": ideal.parts_s, "timing": timing})
    return None if found is None else _time_results(found, settings)


async def _rounds(
    world: ad.World, channel: ad.Channel[Stop], policy: AsyncSelectiveAveragingPolicy, replacer: int, count: int
) -> tuple[list[StepInfo], list[float]]:
    """Step until the replacer has applied ``count`` rounds. On the replacer, return the results and times."""
    infos: list[StepInfo] = []
    applied_at: list[float] = []
    if world.rank == replacer:
        while len(infos) < count:
            info = await policy.step(0.0)
            if info:
                infos.append(info)
                applied_at.append(time.perf_counter())
        await channel.send(Stop(), 1 - world.rank)
    else:
        stop = world.spawn(channel.receive())
        while not stop.done():
            await policy.step(1.0)
    return infos, applied_at


def _time_results(found: list[dict[str, Any]], settings: Settings) -> Results:
    ours_s = statistics.median(value for rank in found for value in rank["rounds"])
    parts = {
        name: statistics.median(value for rank in found for value in rank["ideal"][name]) for name in found[0]["ideal"]
    }
    ideal_s = sum(parts.values())
    return {
        "model_mib": settings.model_mib,
        "ours_s": ours_s,
        "ideal_s": ideal_s,
        "ratio": ours_s / ideal_s,
        "period_s": statistics.median(value for rank in found for value in rank["periods"]),
        "ours_by_replacer_s": {f"rank {n}": statistics.median(rank["rounds"]) for n, rank in enumerate(found)},
        "ours_parts_s": {
            name: statistics.median(value for rank in found for value in rank["timing"].get(name, []))
            for name in ("snapshot", "apply")
        },
        "ideal_parts_s": parts,
    }


class Ideal:
    """The least time that a round could take, in parts.

    Attributes:
        parts_s: Durations of each part on this rank, one for each call of :meth:`measure`.
    """

    def __init__(self, model: torch.nn.Module, rival: Rival) -> None:
        self._rival = rival
        self._is_first = ad.current_world().rank == 0  # the rank that sees a whole round trip
        self.parts_s: dict[str, list[float]] = {"transfer": [], "snapshot": [], "add": [], "apply": []}
        self._parameters = list(model.parameters())
        count = sum(parameter.numel() for parameter in self._parameters)
        self._snapshot, self._received, self._sum = (torch.zeros(count) for _ in range(3))
        sizes = [parameter.numel() for parameter in self._parameters]
        self._views = [
            piece.view_as(parameter)
            for piece, parameter in zip(torch.split(self._snapshot, sizes), self._parameters, strict=True)
        ]
        self._is_warm = False

    async def measure(self, world: ad.World) -> None:
        """Measure each part once. The first call also warms up. All ranks must call this method."""
        for _ in range(1 if self._is_warm else 2):
            parts = {name: values[:] for name, values in self.parts_s.items()} if not self._is_warm else None
            await self._rival.align()
            self._transfer()
            for rank in range(world.size):
                await ad.barrier()
                if world.rank == rank:
                    self._copies()
            if parts is not None:
                self.parts_s = parts
                self._is_warm = True
        await ad.barrier()

    def _transfer(self) -> None:
        began_at = time.perf_counter()
        self._rival.round_trip(self._snapshot, self._received)
        if self._is_first:
            self.parts_s["transfer"].append((time.perf_counter() - began_at) / 2)

    def _copies(self) -> None:
        with torch.no_grad():
            with self._timed("snapshot"):
                for parameter, view in zip(self._parameters, self._views, strict=True):
                    view.copy_(parameter)
            with self._timed("add"):
                self._sum.add_(self._received)
            with self._timed("apply"):
                for parameter, view in zip(self._parameters, self._views, strict=True):
                    parameter.copy_(view)

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        began_at = time.perf_counter()
        yield
        self.parts_s[part].append(time.perf_counter() - began_at)


# -- bytes ------------------------------------------------------------------------------------------------------------


async def _measure_bytes(world: ad.World, settings: Settings) -> Results | None:
    model = model_of(settings.counted_model_mib * MIB // 4, _LAYER_COUNT)
    channel = world.channel(Stop, tag=100)
    results = {}
    for replacer_count in range(1, world.size):
        before = world.statistics()
        await _one_round(world, channel, model, replacer_count)
        after = world.statistics()
        sent = after.stream_sent_nbytes - before.stream_sent_nbytes
        received = after.stream_received_nbytes - before.stream_received_nbytes
        found = await collect([sent, received])
        if found is not None:
            donor_count = world.size - replacer_count
            expected = donor_count * replacer_count * state_nbytes(model)
            results[f"{donor_count} donors, {replacer_count} replacers"] = {
                "sent_nbytes": sum(rank[0] for rank in found),
                "received_nbytes": sum(rank[1] for rank in found),
                "expected_nbytes": expected,
            }
    return {"ranks": world.size, "wire": results} if world.rank == 0 else None


async def _one_round(world: ad.World, channel: ad.Channel[Stop], model: torch.nn.Module, replacer_count: int) -> None:
    """Make exactly one round: the threshold is always crossed, and the cooldown after the first round never ends."""
    policy = AsyncSelectiveAveragingPolicy(
        model,
        optimizer_of(model),
        average_every=_AVERAGE_EVERY,
        replacement_ratio=replacer_count / world.size,
        threshold=2.0,
        cooldown=10**9,
    )

    async def all_replaced() -> None:
        for _ in range(replacer_count):
            await channel.receive()

    is_replacer = world.rank < replacer_count
    async with policy:
        stop: asyncio.Task[None] = world.spawn(all_replaced())
        while not stop.done():
            if await policy.step(0.0 if is_replacer else 1.0):
                for rank in range(world.size):
                    await channel.send(Stop(), rank)


def rows(results: Results) -> list[Row]:
    """Return the rows of the table."""
    parts = ", ".join(f"{name} {value * 1e3:.1f}" for name, value in results["ideal_parts_s"].items())
    table = [
        Row(
            f"round, {results['model_mib']} MiB, from decision to weights",
            f"{results['ours_s'] * 1e3:.1f} ms, x{results['ratio']:.2f}",
            f"{results['ideal_s'] * 1e3:.1f} ms ({parts})",
            f"<= x{TARGET_RATIO:g}",
            results["ratio"] <= TARGET_RATIO,
        ),
        Row("round after round, from weights to weights", f"{results['period_s'] * 1e3:.1f} ms"),
    ]
    for roles, figures in results["wire"].items():
        sent, expected = figures["sent_nbytes"], figures["expected_nbytes"]
        table.append(
            Row(
                f"bytes sent in a round, {roles}",
                f"{sent / MIB:g} MiB",
                target=f"exactly {expected / MIB:g} MiB",
                met=sent == expected == figures["received_nbytes"],
            )
        )
    return table


if __name__ == "__main__":
    main(measure, full=FULL, quick=QUICK)
