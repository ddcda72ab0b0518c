"""Explores one scenario on the copy of the tree that PYTHONPATH names. ``run.py`` starts one such process per mutant.

    python hunt.py TOP MODULE:SCENARIO [--start N] [--seeds N] [--budget-s S]

Writes one JSON object to standard output: the number of seeds, the seconds they took and, if a seed failed, the seed,
its error and the smallest fault plan with which it fails.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

import asyncdist
import protocols
from asyncdist.simulation import explore


def main() -> int:
    """Run the command line; the exit code is 0 whether or not a seed fails."""
    parser = argparse.ArgumentParser()
    parser.add_argument("top", type=Path)
    parser.add_argument("scenario")
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--budget-s", type=float, default=float("inf"))
    options = parser.parse_args()
    for package in (asyncdist, protocols):
        found = Path(str(package.__file__)).resolve()
        assert found.is_relative_to(options.top.resolve()), f"{found} is not in the copy {options.top}"
    torch.set_num_threads(1)
    module, _, function = options.scenario.partition(":")
    scenario = getattr(importlib.import_module(module), function)
    seeds = itertools.count(options.start)
    limited = within(seeds if options.seeds is None else itertools.islice(seeds, options.seeds), options.budget_s)
    json.dump(hunt(scenario, limited), sys.stdout)
    return 0


def within(seeds: Iterable[int], budget_s: float) -> Iterator[int]:
    """Yield the seeds until ``budget_s`` seconds have passed."""
    until = time.perf_counter() + budget_s
    return itertools.takewhile(lambda _: time.perf_counter() < until, seeds)


def hunt(scenario: Any, seeds: Iterator[int]) -> dict[str, Any]:
    """Explore the scenario on the seeds, and return the result as JSON values."""
    report = explore(scenario, seeds, processes=1, quiet=True)
    found: dict[str, Any] = {"seed": None, "count": report.seed_count, "seconds": report.seconds}
    failure = report.failure
    if failure is not None:
        found["seed"] = failure.seed
        found["error"] = f"{failure.kind}: {failure.message}".partition("\n")[0]
        found["story"] = str(failure)
        found["fault_count"] = len(failure.faults)
        found["faults"] = [repr(f) for f in failure.faults if failure.minimal_faults is None]
        found["faults"] += map(repr, failure.minimal_faults or ())
    return found


if __name__ == "__main__":
    sys.exit(main())
