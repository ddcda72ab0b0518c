"""Compares the figures of single calls with their rivals in a few seconds, so that CI notices when a figure worsens.

Two ranks on MPI measure each pair in short blocks that alternate. A ratio is the tenth percentile of our blocks divided
by the tenth percentile of the rival's blocks: other processes on the cores lengthen some blocks, but hardly the
fastest ones. Large transfers are left out, because their ratios depend on the load of the cores. Each limit is the
product of the two numbers in :data:`RATIOS`.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import latency
import step
import torch
from harness import Results, Row, collect, elapsed_us, main, model_of, percentile
from rivals import Rival, rival_of

import asyncdist as ad
from asyncdist.bench.measurements import our_trips
from asyncdist.messaging import wire

RANKS: Final = (2,)
#: Ratio of each figure, the factor by which it may worsen, and the benchmark that measures the figure precisely. The
#: ratio of cold steps was 1.7 to 3.0 on processors with different caches, and so has a wider margin.
RATIOS: Final = {
    "small message / raw buffers": (2.1, 1.4, "latency"),
    "idle step / bare yield": (3.0, 1.4, "step"),
    "idle step after 1 ms of torch / bare yield": (2.6, 2.0, "step"),
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Numbers of blocks of messages, of blocks of steps, and of cold steps."""

    message_count: int
    step_count: int
    cold_count: int


FULL: Final = Settings(message_count=100, step_count=40, cold_count=100)
QUICK: Final = Settings(message_count=5, step_count=3, cold_count=20)

_TRIP_COUNT: Final = 50
_STEP_COUNT: Final = 200


async def measure(world: ad.World, settings: Settings) -> Results | None:
    """Return the ratios on rank 0."""
    rival = rival_of(world)
    messages = await _messages(world, rival, settings.message_count)
    async with step.selective_policy_of(model_of(85_000)) as policy:
        warm = await _steps(policy.step, settings.step_count)
        cold = await step.cold_steps(policy, 1, settings.cold_count)
    ratios = [messages, warm, cold["p10_us"] / cold["alone_p10_us"]]
    found = await collect(ratios)
    return None if found is None else dict(zip(RATIOS, found[0], strict=True))


async def _messages(world: ad.World, rival: Rival, block_count: int) -> float:
    channel, message = world.channel(latency.Ping, tag=100), latency.Ping(1000, 0.5)
    nbytes = wire.HEADER_NBYTES + len(wire.Codec(latency.Ping).encode(message)[1])
    buffers = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2)]
    ours_us, raw_us = [], []
    for _ in range(block_count):
        await rival.align()
        ours_us.append(await our_trips(world, channel, message, _TRIP_COUNT))
        await rival.align()
        began_at = time.perf_counter_ns()
        rival.round_trips(buffers[0], buffers[1], _TRIP_COUNT)
        raw_us.append(elapsed_us(began_at) / (2 * _TRIP_COUNT))
    return _ratio(ours_us, raw_us)


async def _steps(make_step: Callable[[], Awaitable[object]], block_count: int) -> float:
    ours_us: list[float] = []
    yields_us: list[float] = []
    for _ in range(block_count):
        for call, values in ((make_step, ours_us), (functools.partial(asyncio.sleep, 0), yields_us)):
            began_at = time.perf_counter_ns()
            for _ in range(_STEP_COUNT):
                await call()
            values.append(elapsed_us(began_at))
    return _ratio(ours_us, yields_us)


def _ratio(ours: Sequence[float], rival: Sequence[float]) -> float:
    return percentile(ours, 10) / percentile(rival, 10)


def rows(results: dict[str, Any]) -> list[Row]:
    """Return the rows of the table."""
    table = []
    for figure, ratio in results.items():
        usual, margin, precise = RATIOS[figure]
        limit = margin * usual
        table.append(Row(figure, f"x{ratio:.2f}", f"./tools/bench {precise}", f"<= x{limit:.2f}", ratio <= limit))
    return table


if __name__ == "__main__":
    main(measure, full=FULL, quick=QUICK)
