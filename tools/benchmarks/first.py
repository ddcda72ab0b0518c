"""Compares the first average of a model with later ones: ``average_models``, and the rounds of two policies.

Four ranks average a model of 16 layers, several times. Each figure is the CPU time from the call, after a barrier, to
the new weights, on the rank that took most. (The time on the clock depends on the number of cores.) The policies
average in every step. A pause precedes each step, as in training, so that the memory of the previous round is free.

The CPU time of the policy's start, which may do work of the first average in advance, is shown as well.

On MPI, a round of DiLoCo is also compared with one blocking in-place Allreduce of a flat tensor of the same size and a
division, which makes no outer step. Both run in alternation. These times are on the clock, of the slowest rank. The
ratio is the median of the ratios of neighbouring runs.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from harness import MIB, Results, Row, collect, main, model_of, optimizer_of
from rivals import align

import asyncdist as ad
from asyncdist.protocols import AverageAllPolicy, DiLoCoPolicy

RANKS: Final = (4,)
TARGET_RATIO: Final = 1.5
_LAYER_COUNT: Final = 16
_PAUSE_S: Final = 0.05
TARGET_RACED: Final = 1.0
_WIRES: Final = ("float32", "int8")


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes of the models, and the number of averages of each model."""

    model_mib: tuple[int, ...]
    count: int


FULL: Final = Settings(model_mib=(1, 16, 64), count=8)
QUICK: Final = Settings(model_mib=(1,), count=3)


async def measure(world: ad.World, settings: Settings) -> Results | None:
    """Average a new model of each size in each way."""
    torch.set_num_threads(1)
    results: Results = {}
    for mib in settings.model_mib:
        for name, rounds in _WAYS.items():
            model = model_of(mib * MIB // 4, _LAYER_COUNT)
            found = await collect(await rounds(world, model, settings.count))
            if found is not None:
                start, first, *later = (max(values) for values in zip(*found, strict=True))
                results[f"{name}, {mib} MiB"] = {
                    "start s": start,
                    "first s": first,
                    "later s": statistics.median(later),
                }
    if world.transport_name == "mpi":
        for wire in _WIRES:
            found = await collect(await _raced(world, settings, wire))
            if found is not None:
                ours, raw = ([max(pair) for pair in zip(*values, strict=True)] for values in zip(*found, strict=True))
                results[f"raced, {wire}"] = {
                    "nbytes": settings.model_mib[-1] * MIB,
                    "s": statistics.median(ours),
                    "raw s": statistics.median(raw),
                    "ratio": statistics.median(own / other for own, other in zip(ours, raw, strict=True)),
                }
    return results or None


async def _raced(world: ad.World, settings: Settings, wire: str) -> tuple[list[float], list[float]]:
    """Return the seconds of each round of DiLoCo, and of each Allreduce and division."""
    from mpi4py import MPI

    model = model_of(settings.model_mib[-1] * MIB // 4, _LAYER_COUNT)
    flat = torch.ones(sum(parameter.numel() for parameter in model.parameters()))

    async def raw() -> None:
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, flat.numpy(), MPI.SUM)
        flat.div_(world.size)

    seconds: tuple[list[float], list[float]] = [], []
    async with DiLoCoPolicy(model, optimizer_of(model), average_every=1, wire=wire) as policy:
        contestants: tuple[Callable[[], Awaitable[object]], ...] = (policy.step, raw)
        for count in range(settings.count + 1):
            for average, own in zip(contestants, seconds, strict=True):
                await asyncio.sleep(_PAUSE_S)
                await align(MPI.COMM_WORLD)
                began_at = time.perf_counter()
                await average()
                if count:
                    own.append(time.perf_counter() - began_at)
    return seconds


async def _models(world: ad.World, model: torch.nn.Module, count: int) -> list[float]:
    del world
    return [0.0, *await _timed(lambda: ad.average_models(model), count)]


async def _average_all(world: ad.World, model: torch.nn.Module, count: int) -> list[float]:
    del world
    began_at = time.process_time()
    async with AverageAllPolicy(model, optimizer_of(model), average_every=1) as policy:
        return [time.process_time() - began_at, *await _timed(policy.step, count)]


async def _diloco(world: ad.World, model: torch.nn.Module, count: int) -> list[float]:
    del world
    began_at = time.process_time()
    async with DiLoCoPolicy(model, optimizer_of(model), average_every=1) as policy:
        return [time.process_time() - began_at, *await _timed(policy.step, count)]


async def _timed(average: Callable[[], Awaitable[object]], count: int) -> list[float]:
    """Return the seconds of CPU time of each average on this rank."""
    seconds = []
    for _ in range(count):
        await asyncio.sleep(_PAUSE_S)
        await ad.barrier()
        began_at = time.process_time()
        await average()
        seconds.append(time.process_time() - began_at)
    return seconds


_WAYS: Final[dict[str, Callable[[ad.World, torch.nn.Module, int], Awaitable[list[float]]]]] = {
    "average_models": _models,
    "AverageAllPolicy": _average_all,
    "DiLoCoPolicy": _diloco,
}


def rows(results: Results) -> list[Row]:
    """Return the rows of the table."""
    return [_raced_row(name, each) if "ratio" in each else _row(name, each) for name, each in results.items()]


def _raced_row(name: str, figures: dict[str, Any]) -> Row:
    wire, is_coded = name.removeprefix("raced, "), "float32" not in name
    return Row(
        f"a round of DiLoCoPolicy, {figures['nbytes'] / MIB:g} MiB, {wire}",
        f"{figures['s'] * 1e3:.1f} ms, x{figures['ratio']:.2f}",
        f"{figures['raw s'] * 1e3:.1f} ms: in-place Allreduce and division",
        "" if is_coded else f"<= x{TARGET_RACED:g}",
        None if is_coded else figures["ratio"] <= TARGET_RACED,
    )


def _row(name: str, figures: dict[str, Any]) -> Row:
    first, later = figures["first s"], figures["later s"]
    start = f"; start {figures['start s'] * 1e3:.0f} ms" if figures["start s"] else ""
    return Row(
        f"first average, {name}",
        f"{first * 1e3:.1f} ms, x{first / later:.2f}{start}",
        f"{later * 1e3:.1f} ms: later averages",
        f"<= x{TARGET_RATIO:g}",
        first <= TARGET_RATIO * later,
    )


if __name__ == "__main__":
    main(measure, full=FULL, quick=QUICK)
