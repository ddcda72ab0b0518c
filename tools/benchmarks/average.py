"""Compares ``average_models`` and ``average_gradients`` with one raw all-reduce, and with one per parameter.

Two ranks average a model of 200 layers. Each figure is a median over repetitions. In each repetition all contestants
run in turn, each after a barrier. Each contestant has run once before, to warm up.

- Raw, once: MPI's Iallreduce of one float32 tensor of the same size into a second tensor, tested until it is done. The
  in-place call is shown as well. asyncdist is compared with the faster call.
- Per parameter: ``asyncdist.all_reduce`` of each parameter in turn and a division, as a user would write it. The model
  has small layers, so the number of messages dominates. A harder rival does the same with raw Iallreduce.

Before that, the first average of a model in each process is timed, and compared with the median of the next averages.

asyncdist does more than its rivals: it finds the tensors, compares the models of all ranks, copies to flat memory and
back, and divides.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from harness import MIB, Results, Row, collect, main, model_of
from rivals import align, spin

import asyncdist as ad

RANKS: Final = (2,)
RAW_RATIO_MAX: Final = 1.2
FIRST_RATIO_MAX: Final = 1.5
PER_PARAMETER_RATIO_MIN: Final = 3.0
_LAYER_COUNT: Final = 200


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes of the two models, and the number of repetitions."""

    large_nbytes: int
    small_nbytes: int
    repetition_count: int


FULL: Final = Settings(large_nbytes=64 * MIB, small_nbytes=MIB, repetition_count=15)
QUICK: Final = Settings(large_nbytes=4 * MIB, small_nbytes=MIB // 4, repetition_count=3)

Contestant = Callable[[], Awaitable[object]]


async def measure(world: ad.World, settings: Settings) -> Results | None:
    """Measure a large model against one raw all-reduce, and a small model against one all-reduce per parameter."""
    first = await _first_calls(settings)
    large = await _race(_contestants(settings.large_nbytes, per_parameter=False), settings.repetition_count)
    small = await _race(_contestants(settings.small_nbytes, per_parameter=True), settings.repetition_count)
    if first is None or large is None or small is None:
        return None
    raw_s = min(large["raw"], large["raw in place"])
    return {
        "first": {"s": first[0], "later s": statistics.median(first[1:])},
        "large": {
            "nbytes": settings.large_nbytes,
            **{f"{name} s": value for name, value in large.items()},
            "models ratio": large["average_models"] / raw_s,
            "gradients ratio": large["average_gradients"] / raw_s,
        },
        "small": {
            "nbytes": settings.small_nbytes,
            **{f"{name} s": value for name, value in small.items()},
            "models speedup": small["per parameter"] / small["average_models"],
            "gradients speedup": small["per parameter"] / small["average_gradients"],
            "models speedup over raw": small["raw per parameter"] / small["average_models"],
        },
    }


async def _first_calls(settings: Settings) -> list[float] | None:
    """Time this process's first calls of ``average_models``. Return the seconds on rank 0, otherwise None."""
    from mpi4py import MPI

    model = model_of(settings.large_nbytes // 4, _LAYER_COUNT)
    seconds: list[float] = []
    for _ in range(settings.repetition_count + 1):
        await align(MPI.COMM_WORLD)
        began_at = time.perf_counter()
        await ad.average_models(model)
        seconds.append(time.perf_counter() - began_at)
    found: list[Any] | None = await collect(seconds)
    return None if found is None else list(map(max, zip(*found, strict=True)))


def _contestants(nbytes: int, *, per_parameter: bool) -> dict[str, Contestant]:
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    model = model_of(nbytes // 4, _LAYER_COUNT)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    count = sum(parameter.numel() for parameter in model.parameters())
    source, target = torch.ones(count), torch.ones(count)

    async def raw() -> None:
        spin(comm.Iallreduce(source.numpy(), target.numpy(), MPI.SUM))

    async def raw_in_place() -> None:
        spin(comm.Iallreduce(MPI.IN_PLACE, target.numpy(), MPI.SUM))

    async def each() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                await ad.all_reduce(parameter)
                parameter.div_(comm.size)

    async def raw_each() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                spin(comm.Iallreduce(MPI.IN_PLACE, parameter.detach().numpy(), MPI.SUM))
                parameter.div_(comm.size)

    rivals = {"per parameter": each, "raw per parameter": raw_each}
    return {
        **(rivals if per_parameter else {"raw": raw, "raw in place": raw_in_place}),
        "average_models": lambda: ad.average_models(model),
        "average_gradients": lambda: ad.average_gradients(model),
    }


async def _race(contestants: dict[str, Contestant], repetition_count: int) -> dict[str, float] | None:
    """Return each contestant's median seconds on rank 0, otherwise None. The slower rank's time counts."""
    from mpi4py import MPI

    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for repetition in range(repetition_count + 1):
        for name, contestant in contestants.items():
            await align(MPI.COMM_WORLD)
            began_at = time.perf_counter()
            await contestant()
            if repetition:
                seconds[name].append(time.perf_counter() - began_at)
    found: list[Any] | None = await collect(seconds)
    if found is None:
        return None
    return {
        name: statistics.median(map(max, zip(*(rank[name] for rank in found), strict=True))) for name in contestants
    }


def rows(results: Results) -> list[Row]:
    """Return the rows of the table."""
    large, small = results["large"], results["small"]
    size, in_place = f"{large['nbytes'] / MIB:g} MiB", large["raw in place s"]
    first, later = results["first"]["s"], results["first"]["later s"]
    table = [
        Row(
            f"first average_models of a process, {size}",
            f"{first * 1e3:.1f} ms, x{first / later:.2f}",
            f"{later * 1e3:.1f} ms: later calls",
            f"<= x{FIRST_RATIO_MAX:g}",
            first <= FIRST_RATIO_MAX * later,
        )
    ]
    for what in ("models", "gradients"):
        ratio = large[f"{what} ratio"]
        table.append(
            Row(
                f"average_{what}, {size} in {_LAYER_COUNT} layers",
                f"{large[f'average_{what} s'] * 1e3:.1f} ms, x{ratio:.2f}",
                f"{large['raw s'] * 1e3:.1f} ms: one raw all-reduce (in place: {in_place * 1e3:.1f} ms)",
                f"<= x{RAW_RATIO_MAX:g}",
                ratio <= RAW_RATIO_MAX,
            )
        )
    for what in ("models", "gradients"):
        speedup = small[f"{what} speedup"]
        table.append(
            Row(
                f"average_{what}, {small['nbytes'] / MIB:g} MiB in {_LAYER_COUNT} layers",
                f"{small[f'average_{what} s'] * 1e3:.2f} ms, {speedup:.1f} times as fast",
                f"{small['per parameter s'] * 1e3:.2f} ms: one all_reduce per parameter "
                f"(raw: {small['raw per parameter s'] * 1e3:.2f} ms)",
                f">= {PER_PARAMETER_RATIO_MIN:g} times",
                speedup >= PER_PARAMETER_RATIO_MIN,
            )
        )
    return table


if __name__ == "__main__":
    main(measure, full=FULL, quick=QUICK)
