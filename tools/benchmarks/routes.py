"""Measures a round of selective averaging on the sharded route against the direct route, on real ranks.

The last quarter of the ranks repeatedly apply the average of the others, in alternating blocks on both routes. Each
block has its own policy, whose first round fills the buffers and is not counted. Meanwhile all ranks train, in steps of
2 ms in which they leave the processor to others. A round's time is ``StepInfo.seconds`` of each replacer, from the
arrival of its assignment to its new weights.

- **On this host**: with 8 ranks, more than there are cores, the sharded route is to be no slower.
- **Between two hosts** of two ranks each, made of namespaces (``./tools/hosts``), whose network cards carry 200 Mbit/s.
  On the direct route, each of three donors sends a model to one replacer, and two of these models pass one card. On the
  sharded route, one model passes in each direction. This part needs Linux, root and iproute2, and is otherwise left
  out.
"""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass
from typing import Any, Final

from harness import MIB, Results, Row, collect, compute, main, model_of, optimizer_of

import asyncdist as ad
from protocols import AsyncSelectiveAveragingPolicy

RANKS: Final = (8,)
#: Number of hosts, ranks per host, and rate of each network card in Mbit/s.
HOSTS: Final = (2, 2, 200)
ROUTES: Final = ("direct", "sharded")
TARGET_HERE: Final = 1.0
TARGET_HOSTS: Final = 1.5
_AVERAGE_EVERY: Final = 5
_STEP_S: Final = 0.002


@dataclass(frozen=True, slots=True)
class Settings:
    """Number of blocks on each route and of timed rounds in each; the models on one host, and between hosts."""

    here_mib: int
    hosts_mib: int
    block_count: int
    round_count: int


FULL: Final = Settings(here_mib=32, hosts_mib=8, block_count=3, round_count=5)
QUICK: Final = Settings(here_mib=4, hosts_mib=1, block_count=1, round_count=1)


@dataclass(frozen=True, slots=True)
class Stop:
    """The last rank's notice that it has applied enough rounds."""


async def measure(world: ad.World, settings: Settings) -> Results | None:
    """Return the seconds of rounds, keyed by number of ranks and by route."""
    model_mib = settings.here_mib if world.size in RANKS else settings.hosts_mib
    model = model_of(model_mib * MIB // 4)
    channel = world.channel(Stop, tag=100)
    found: dict[str, list[float]] = {route: [] for route in ROUTES}
    for _, route in itertools.product(range(settings.block_count), ROUTES):
        policy = AsyncSelectiveAveragingPolicy(
            model,
            optimizer_of(model),
            average_every=_AVERAGE_EVERY,
            replacement_ratio=0.25,
            round_timeout_s=120.0,
            route=route,  # type: ignore[arg-type]
        )
        async with policy:
            found[route] += (await _rounds(world, channel, policy, 1 + settings.round_count))[1:]
    ranks = await collect(found)
    if ranks is None:
        return None
    seconds = {route: [each for rank in ranks for each in rank[route]] for route in ROUTES}
    medians = {f"{route}_s": statistics.median(seconds[route]) for route in ROUTES}
    return {str(world.size): {"model_mib": model_mib, "rounds": len(seconds["sharded"]), **medians}}


async def _rounds(
    world: ad.World, channel: ad.Channel[Stop], policy: AsyncSelectiveAveragingPolicy, count: int
) -> list[float]:
    """Step until the last rank has applied ``count`` rounds, and return the seconds of this rank's rounds."""
    seconds: list[float] = []
    last = world.size - 1
    stop = None if world.rank == last else world.spawn(channel.receive())
    while len(seconds) < count if stop is None else not stop.done():
        compute(_STEP_S)
        info = await policy.step(-float(world.rank))
        if info:
            seconds.append(info.seconds)
    if stop is None:
        for rank in range(last):
            await channel.send(Stop(), rank)
    return seconds


def rows(results: Results) -> list[Row]:
    """Return the rows of the table."""
    on_hosts, of_each, rate = HOSTS
    here = _row(f"{RANKS[0]} ranks of one host", results[str(RANKS[0])], TARGET_HERE)
    where = f"{on_hosts} hosts of {of_each} ranks at {rate} Mbit/s"
    beside = results.get(str(on_hosts * of_each))
    if beside is None:
        return [here, Row(where, "left out: no hosts can be made here")]
    return [here, _row(where, beside, TARGET_HOSTS)]


def _row(where: str, figures: dict[str, Any], target: float) -> Row:
    direct, sharded = (figures[f"{route}_s"] for route in ROUTES)
    return Row(
        f"{where}, {figures['model_mib']} MiB: a round, sharded",
        f"{1e3 * sharded:.0f} ms, of {figures['rounds']} rounds",
        f"{1e3 * direct:.0f} ms: direct, x{direct / sharded:.2f} as long",
        f">= x{target:g}",
        direct / sharded >= target,
    )


if __name__ == "__main__":
    main(measure, full=FULL, quick=QUICK)
