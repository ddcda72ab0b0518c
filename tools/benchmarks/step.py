"""Measures an idle step: a call of ``policy.step()`` in which no report is due and no average arrives.

Timed: every single ``await policy.step()`` of a tight loop, with ``time.perf_counter_ns`` on both sides, on both ranks
at once. The policy runs in earnest: its receives are posted, on rank 0 its coordinator is there too; only no report is
due. Another task of the rank gets its turn in every step, which is checked for each one, and that turn is part of the
time. Beside it, timed in the same loop: a bare ``asyncio.sleep(0)``, which gives that task its turn and does no more.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from harness import Results, Row, collect, main, model_of, optimizer_of, percentile
from torch import nn

import asyncdist as ad
from protocols import AsyncSelectiveAveragingPolicy, SpawnPolicy

RANKS: Final = (2,)
TARGET_US: Final = 10.0
TARGET_SPREAD: Final = 1.5
_NEVER: Final = 10**9
_WARM_UP_COUNT: Final = 300


@dataclass(frozen=True, slots=True)
class Settings:
    """Models by name; ``block_count`` blocks of ``step_count`` steps for each of them, in alternation.

    Many short blocks: a core is a third slower at times, for longer than a block, and is to be so for all models.
    """

    models: tuple[tuple[str, int], ...]
    block_count: int
    step_count: int


_MODELS: Final = (("85 k", 85_000), ("1.1 M", 1_100_000), ("20 M", 20_000_000))
FULL: Final = Settings(_MODELS, block_count=16, step_count=1250)
QUICK: Final = Settings(_MODELS, block_count=1, step_count=50)


class OtherTask:
    """A task of the rank that counts its turns."""

    def __init__(self) -> None:
        self.turn_count = 0

    async def run(self) -> None:
        while True:
            self.turn_count += 1
            await asyncio.sleep(0)


def selective_policy_of(model: nn.Module) -> SpawnPolicy:
    """A policy whose report is never due."""
    return AsyncSelectiveAveragingPolicy(model, optimizer_of(model), average_every=_NEVER)


async def measure(
    world: ad.World, settings: Settings, *, policy_of: Callable[[nn.Module], SpawnPolicy] = selective_policy_of
) -> Results | None:
    """Alternate the models; each block has a policy of its own."""
    models = {name: model_of(parameter_count) for name, parameter_count in settings.models}
    steps_us: dict[str, list[float]] = {name: [] for name in models}
    yields_us: list[float] = []
    other = OtherTask()
    running = world.spawn(other.run())
    for _ in range(settings.block_count):
        for name, model in models.items():
            async with policy_of(model) as policy:
                await _block(policy, other, settings.step_count, steps_us[name], yields_us)
    running.cancel()
    figures = {name: _figures(values) for name, values in steps_us.items()}
    ranks = await collect({"models": figures, "yield": _figures(yields_us)})
    if ranks is None:
        return None
    results = {name: {f"rank {rank}": found["models"][name] for rank, found in enumerate(ranks)} for name in figures}
    return {**results, "yield": {f"rank {rank}": found["yield"] for rank, found in enumerate(ranks)}}


async def _block(
    policy: SpawnPolicy, other: OtherTask, count: int, steps_us: list[float], yields_us: list[float]
) -> None:
    clock = time.perf_counter_ns
    for index in range(_WARM_UP_COUNT + count):
        turns = other.turn_count
        began_at = clock()
        await policy.step()
        stepped_at = clock()
        assert other.turn_count > turns, f"the other task had no turn in step {index}"
        yielding_at = clock()
        await asyncio.sleep(0)
        yielded_at = clock()
        if index >= _WARM_UP_COUNT:
            steps_us.append((stepped_at - began_at) / 1e3)
            yields_us.append((yielded_at - yielding_at) / 1e3)


def _figures(values_us: list[float]) -> dict[str, float]:
    return {"median_us": statistics.median(values_us), "p99_us": percentile(values_us, 99)}


def rows(results: Results, *, kind: str = "idle step") -> list[Row]:
    """Return the rows of the table."""
    models = {name: ranks for name, ranks in results.items() if name != "yield"}
    table = []
    for rank, bare in results["yield"].items():
        medians = [ranks[rank]["median_us"] for ranks in models.values()]
        for name, ranks in models.items():
            table.append(_row(f"{kind}, {rank}, {name} parameters", ranks[rank], bare))
        spread = max(medians) / min(medians)
        table.append(
            Row(
                f"{kind}, {rank}, largest over smallest median",
                f"x{spread:.2f}",
                target=f"<= x{TARGET_SPREAD:g}",
                met=spread <= TARGET_SPREAD,
            )
        )
    return table


def _row(figure: str, step: dict[str, Any], bare: dict[str, Any]) -> Row:
    return Row(
        figure,
        f"{step['median_us']:.2f} us (p99 {step['p99_us']:.1f})",
        f"{bare['median_us']:.2f} us (a bare yield)",
        f"<= {TARGET_US:g} us",
        step["median_us"] <= TARGET_US,
    )


if __name__ == "__main__":
    main(measure, full=FULL, quick=QUICK)
