"""Measures an idle step: a call of ``policy.step()`` in which no report is due and no average arrives.

Both ranks time every ``await policy.step()`` of a tight loop at once, with ``time.perf_counter_ns`` before and after
it. The policy is fully active, with posted receives and a coordinator on rank 0, but no report is due. In every step,
another task of the rank runs once, which is checked, and its time is included. In the same loop, a bare
``asyncio.sleep(0)``, in which the task also runs once, is timed for comparison.

Then *cold* steps are measured, as in a training loop: torch trains a small model for 1, 5 or 20 ms before each timed
step and before each bare yield, in alternation, so that the code of both is not in the caches. No other task is ready
then. The rival is a bare yield in a similar loop without a world, in a thread of the same process, in alternating
blocks. Yields in the rank's own loop take longer, because the loop's timers fire in them.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import torch
from harness import Results, Row, collect, elapsed_us, main, model_of, optimizer_of, percentile, ratio_of_medians
from torch import nn

import asyncdist as ad
from protocols import AsyncSelectiveAveragingPolicy, SpawnPolicy

RANKS: Final = (2,)
TARGET_US: Final = 10.0
TARGET_SPREAD: Final = 1.5
TARGET_COLD_RATIO: Final = 1.6
_NEVER: Final = 10**9
_WARM_UP_COUNT: Final = 300
_COLD_BLOCK_COUNT: Final = 20


@dataclass(frozen=True, slots=True)
class Settings:
    """Models by name; ``block_count`` blocks of ``step_count`` steps for each of them, in alternation.

    Blocks are short and many, because a core is at times a third slower, which must affect all models equally.

    Attributes:
        cold_counts: Number of cold steps, keyed by the milliseconds of training before each step.
    """

    models: tuple[tuple[str, int], ...]
    block_count: int
    step_count: int
    cold_counts: tuple[tuple[int, int], ...]


_MODELS: Final = (("85 k", 85_000), ("1.1 M", 1_100_000), ("20 M", 20_000_000))
FULL: Final = Settings(_MODELS, block_count=16, step_count=1250, cold_counts=((1, 2000), (5, 800), (20, 400)))
QUICK: Final = Settings(_MODELS, block_count=1, step_count=50, cold_counts=((1, 3),))


class OtherTask:
    """A task of the rank that counts its turns."""

    def __init__(self) -> None:
        self.turn_count = 0

    async def run(self) -> None:
        while True:
            self.turn_count += 1
            await asyncio.sleep(0)


class Training:
    """Trains a small model for a given time, and thereby replaces the contents of the caches."""

    def __init__(self) -> None:
        self._model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.ReLU())))
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        self._batch = torch.ones(32, 256)

    def run(self, seconds: float) -> None:
        """Make steps of training until ``seconds`` have passed."""
        ends_at = time.perf_counter() + seconds
        while time.perf_counter() < ends_at:
            self._optimizer.zero_grad()
            self._model(self._batch).square().mean().backward()
            self._optimizer.step()


def selective_policy_of(model: nn.Module) -> SpawnPolicy:
    """Return a policy whose report is never due."""
    return AsyncSelectiveAveragingPolicy(model, optimizer_of(model), average_every=_NEVER)


async def measure(
    world: ad.World, settings: Settings, *, policy_of: Callable[[nn.Module], SpawnPolicy] = selective_policy_of
) -> Results | None:
    """Alternate the models; each block has its own policy."""
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
    async with policy_of(models[settings.models[0][0]]) as policy:
        cold = {
            f"cold {work_ms} ms": await cold_steps(policy, work_ms, count) for work_ms, count in settings.cold_counts
        }
    own = {**{name: _figures(values) for name, values in steps_us.items()}, "yield": _figures(yields_us), **cold}
    ranks = await collect(own)
    if ranks is None:
        return None
    return {name: {f"rank {rank}": found[name] for rank, found in enumerate(ranks)} for name in own}


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


async def cold_steps(policy: SpawnPolicy, work_ms: int, count: int) -> dict[str, float]:
    """Time steps, yields in the same loop, and yields in a loop without a world, after ``work_ms`` ms of training."""
    training = Training()
    steps_us: list[float] = []
    yields_us: list[float] = []
    alone_us: list[float] = []
    alone = type(asyncio.get_running_loop())()
    with ThreadPoolExecutor(1) as thread:
        for index in range(-_COLD_BLOCK_COUNT, count, _COLD_BLOCK_COUNT):
            if index == 0:  # the first block has warmed up
                for values in (steps_us, yields_us, alone_us):
                    values.clear()
            for _ in range(_COLD_BLOCK_COUNT):
                steps_us.append(await _cold_us(training, work_ms, policy.step))
                yields_us.append(await _cold_us(training, work_ms, _bare_yield))
            alone_us += thread.submit(alone.run_until_complete, _yields_alone(training, work_ms)).result()
    alone.close()
    return {
        **_quantiles("", steps_us),
        **_quantiles("yield_", yields_us),
        **_quantiles("alone_", alone_us),
        "ratio": ratio_of_medians(steps_us, alone_us),
    }


async def _yields_alone(training: Training, work_ms: int) -> list[float]:
    return [await _cold_us(training, work_ms, _bare_yield) for _ in range(_COLD_BLOCK_COUNT)]


async def _cold_us(training: Training, work_ms: int, call: Callable[[], Awaitable[object]]) -> float:
    training.run(work_ms / 1e3)
    began_at = time.perf_counter_ns()
    await call()
    return elapsed_us(began_at)


def _bare_yield() -> Awaitable[None]:
    return asyncio.sleep(0)


def _quantiles(prefix: str, values_us: list[float]) -> dict[str, float]:
    return {f"{prefix}median_us": statistics.median(values_us), f"{prefix}p10_us": percentile(values_us, 10)}


def _figures(values_us: list[float]) -> dict[str, float]:
    return {"median_us": statistics.median(values_us), "p99_us": percentile(values_us, 99)}


def rows(results: Results, *, kind: str = "idle step") -> list[Row]:
    """Return the rows of the table."""
    models = {name: ranks for name, ranks in results.items() if name != "yield" and not name.startswith("cold")}
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
    table += [
        _cold_row(f"{kind}, {rank}, {name}", figures)
        for name, ranks in results.items()
        if name.startswith("cold")
        for rank, figures in ranks.items()
    ]
    return table


def _cold_row(figure: str, cold: dict[str, float]) -> Row:
    yields = f"alone; {cold['yield_median_us']:.1f} in the rank's loop"
    return Row(
        figure,
        f"{cold['median_us']:.1f} us (p10 {cold['p10_us']:.1f}), x{cold['ratio']:.2f}",
        f"{cold['alone_median_us']:.1f} us (p10 {cold['alone_p10_us']:.1f}; a bare yield {yields})",
        f"<= x{TARGET_COLD_RATIO:g}",
        cold["ratio"] <= TARGET_COLD_RATIO,
    )


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
