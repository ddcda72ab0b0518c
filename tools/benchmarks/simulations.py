"""Shared code of the benchmarks that only simulate: one process on each core, and the main function."""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from harness import Results
from rich.progress import track

Run = TypeVar("Run")
Figures = TypeVar("Figures")
Settings = TypeVar("Settings")


def simulated(
    simulate: Callable[[Run], Figures], runs: Sequence[Run], doing: str = "simulating"
) -> Iterator[tuple[Run, Figures]]:
    """Yield each run and its figures, in the order of the runs.

    Args:
        simulate: Function of a module that simulates one run; it is called in another process.
        doing: Label of the progress bar.
    """
    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=spawning, initializer=be_quiet) as pool:
        yield from zip(runs, track(pool.map(simulate, runs), doing, len(runs)), strict=True)


def be_quiet() -> None:
    """Use one core, and log only errors: ranks that are lost, or end before others, are expected in these runs."""
    torch.set_num_threads(1)
    for name in ("asyncdist", "protocols"):
        logging.getLogger(name).setLevel(logging.ERROR)


def main(measure: Callable[[Settings], Results], *, full: Settings, quick: Settings) -> None:
    """Measure, and write the results to the file named on the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    be_quiet()
    given.out.write_text(json.dumps(measure(quick if given.quick else full)))
