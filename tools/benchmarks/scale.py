"""What a round of selective averaging moves, by the number of ranks and by route; in the simulator.

One round of each population, with a quarter of the ranks replaced and a model of 1 MiB of float32. All bytes of the
round are counted, messages and frames included: those of a run with the round, less those of the same run without.
The busiest rank is the one that sends, or takes in, the most bytes in streams. All are told in models.

On the direct route a round moves D x R models, and a replacer takes in D of them. On the sharded one it is to move no
more than D + R models and 2 % for messages, and no rank more than 2.1.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from harness import Results, Row, model_of, optimizer_of, state_nbytes

import asyncdist as ad
from protocols import AsyncSelectiveAveragingPolicy

#: It needs no launcher.
RANKS: Final = ()
ROUTES: Final = ("direct", "sharded")
RATIO: Final = 0.25
TARGET_TOTAL: Final = 1.02
TARGET_RANK: Final = 2.1
_AVERAGE_EVERY: Final = 2


@dataclass(frozen=True, slots=True)
class Settings:
    """Populations of these sizes, the model, and the steps in which one round has its place."""

    sizes: tuple[int, ...]
    parameter_count: int
    steps: int


FULL: Final = Settings(sizes=(8, 16, 32, 64, 128), parameter_count=1 << 18, steps=40)
QUICK: Final = Settings(sizes=(8, 12), parameter_count=1 << 16, steps=40)


async def _train(world: ad.World, route: str, ratio: float, settings: Settings) -> tuple[int, int, int, int]:
    """Take part in one round: the threshold is crossed always, and the cooldown after the first round never ends."""
    model = model_of(settings.parameter_count)
    policy = AsyncSelectiveAveragingPolicy(
        model,
        optimizer_of(model),
        average_every=_AVERAGE_EVERY,
        replacement_ratio=ratio,
        threshold=float(world.size),
        cooldown=10**9,
        quorum=1.0,
        grace_s=60.0,
        route=route,  # type: ignore[arg-type]
    )
    async with policy:
        for _ in range(settings.steps):
            await policy.step(float(world.rank))
    statistics = world.statistics()
    applied = policy.statistics().replacement_count
    return statistics.stream_sent_nbytes, statistics.stream_received_nbytes, applied, state_nbytes(model)


def _measure(size: int, route: str, settings: Settings) -> dict[str, float]:
    """One round's bytes, in models."""
    idle, report = (
        ad.simulate(_train, route, ratio, settings, ranks=size, seed=size, strict=True) for ratio in (0.0, RATIO)
    )
    sent, received, applied, nbytes = zip(*report.results, strict=True)
    replacer_count = round(RATIO * size)
    assert sum(applied) == replacer_count, f"{sum(applied)} of {replacer_count} replacers have applied an average"
    model_nbytes = nbytes[0]
    return {
        "donors": size - replacer_count,
        "replacers": replacer_count,
        "total": (report.byte_count - idle.byte_count) / model_nbytes,
        "streams": sum(sent) / model_nbytes,
        "messages": report.message_count - idle.message_count,
        "out": max(sent) / model_nbytes,
        "in": max(received) / model_nbytes,
    }


def rows(results: Results) -> list[Row]:
    """The table."""
    found = []
    for size, by_route in results.items():
        for route, figures in by_route.items():
            is_promised = route == "sharded"
            least = figures["donors"] + figures["replacers"]
            busiest = max(figures["out"], figures["in"])
            against = least if is_promised else figures["donors"] * figures["replacers"]
            found += [
                Row(
                    f"{size} ranks, {route}: all bytes of a round",
                    f"{figures['total']:.2f} models",
                    f"{against:g}: {'D + R' if is_promised else 'D x R'}",
                    f"<= {TARGET_TOTAL:g} of it" if is_promised else "",
                    figures["total"] <= TARGET_TOTAL * least if is_promised else None,
                ),
                Row(
                    f"{size} ranks, {route}: the busiest rank, out and in",
                    f"{figures['out']:.2f}, {figures['in']:.2f} models",
                    "",
                    f"<= {TARGET_RANK:g}" if is_promised else "",
                    busiest <= TARGET_RANK if is_promised else None,
                ),
            ]
    return found


def main() -> None:
    """Measure, and write the results to the file named on the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    settings = QUICK if given.quick else FULL
    torch.set_num_threads(1)
    began_at = time.perf_counter()
    results = {str(size): {route: _measure(size, route, settings) for route in ROUTES} for size in settings.sizes}
    given.out.write_text(json.dumps(results))
    print(f"{time.perf_counter() - began_at:.0f} s")


if __name__ == "__main__":
    main()
