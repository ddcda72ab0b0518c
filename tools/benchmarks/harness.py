"""Shared code of the benchmarks: models, statistics, the main function of a rank, and rows of the table.

A benchmark is one script, run by ``asyncdist run``. It has ``RANKS`` (one launch for each number), ``FULL`` and
``QUICK`` settings, the coroutine ``measure(world, settings)``, whose value on rank 0 is its results, and
``rows(results)``, which compares them with their targets. Rivals run in the same processes, in alternation.

This module does not import mpi4py at the top, because ``bench.py``, which is not a rank, imports the benchmarks.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from torch import nn

import asyncdist as ad

#: Results of a benchmark: JSON values by name.
Results: TypeAlias = dict[str, Any]

MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Attributes:
        figure: Name of the measured quantity.
        ours: Measured value of asyncdist, with its unit.
        rival: Value of the rival, with its unit.
        target: Value to reach.
        met: Whether the target is met; None if no target is set.
    """

    figure: str
    ours: str
    rival: str = ""
    target: str = ""
    met: bool | None = None


def main(
    measure: Callable[[ad.World, Any], Coroutine[Any, Any, Results | None]], *, full: object, quick: object
) -> None:
    """Run one rank of a benchmark. Rank 0 writes the results to the file named on the command line."""
    out, is_quick = arguments()
    results = ad.run(measure, quick if is_quick else full, strict=True)
    if results is not None:
        out.write_text(json.dumps(results))


def arguments() -> tuple[Path, bool]:
    """Parse the command line: return the file for the results, and whether the quick settings are used."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    return options.out, options.quick


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that at least ``percent`` % of the values do not exceed (nearest rank)."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def ratio_of_medians(ours: Sequence[float], rival: Sequence[float]) -> float:
    """Return the median of ``ours`` divided by the median of ``rival``."""
    return statistics.median(ours) / statistics.median(rival)


def model_of(parameter_count: int, layer_count: int = 8) -> nn.Module:
    """Return an MLP of square layers with about ``parameter_count`` float32 parameters, equal on all ranks."""
    width = round(math.sqrt(parameter_count / layer_count))
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed takes a millisecond, because it formats the stack three times for uninitialised devices.
        torch.default_generator.manual_seed(0)
        return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layer_count)))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return an arbitrary optimizer of the model, because the benchmarks do not train."""
    # For a process's first optimizer, the wrapper of this method imports torch's compiler, which takes a second.
    method = getattr(torch.optim.Optimizer.add_param_group, "__wrapped__", torch.optim.Optimizer.add_param_group)
    vars(method).setdefault("__dynamo_disable", method)
    return torch.optim.SGD(model.parameters(), lr=0.0)


async def collect(value: object) -> list[Any] | None:
    """Gather a JSON value from every rank. Return the list in rank order on rank 0, None on other ranks."""
    text = json.dumps(value).encode()
    longest = await ad.all_reduce(torch.tensor(len(text)), op="max")
    padded = torch.frombuffer(bytearray(text.ljust(int(longest))), dtype=torch.uint8)
    gathered = await ad.gather(padded)
    return None if gathered is None else [json.loads(bytes(tensor.numpy())) for tensor in gathered]


def elapsed_us(began_at_ns: int) -> float:
    """Return the microseconds since ``began_at_ns``, a reading of ``time.perf_counter_ns``."""
    return (time.perf_counter_ns() - began_at_ns) / 1e3


def compute(seconds: float) -> None:
    """Block the event loop for some seconds, as a training step does."""
    time.sleep(seconds)


def state_nbytes(model: nn.Module) -> int:
    """Return the size of the model's state in bytes."""
    return sum(tensor.nbytes for tensor in model.state_dict().values())
