"""Measures how long four ranks take from the command to the first line of main, against starts without asyncdist.

- MPI: ``asyncdist run -n 4``, against ``mpirun -n 4 python -c "import torch, mpi4py.MPI"``.
- torch: ``asyncdist run --transport torch -n 4``, against ``torchrun --nproc-per-node 4`` with ``init_process_group``.

The jobs start in turn. The time ends when the last rank has printed its clock, in main or after the imports. The CPU
time covers all processes of the job, from start to exit. The target is for the CPU time: on a machine that is in use,
Linux gives each session its share of the cores (autogroup), and torchrun makes a session of each rank.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from harness import Results, Row, arguments

from asyncdist.launch import mpirun

RANKS: Final = ()  # the benchmark starts the ranks itself
TARGET_RATIO: Final = 1.15
OURS: Final = """
import time
import torch
import asyncdist as ad

async def main(world: ad.World) -> None:
    print(f"begun at {time.time()}\\n", end="", flush=True)

ad.run(main)
"""
BARE: Final = 'import time, torch, mpi4py.MPI; print("begun at", time.time(), flush=True)'
TORCH: Final = """
import time
import torch
from torch import distributed

distributed.init_process_group("gloo")
print(f"begun at {time.time()}\\n", end="", flush=True)  # one write: torchrun's ranks share the unbuffered output
distributed.destroy_process_group()
"""


@dataclass(frozen=True, slots=True)
class Settings:
    """Number of starts of each kind, of which the first ``unmeasured_count`` fill the caches of the file system."""

    rank_count: int
    start_count: int
    unmeasured_count: int


FULL: Final = Settings(rank_count=4, start_count=8, unmeasured_count=1)
QUICK: Final = Settings(rank_count=1, start_count=1, unmeasured_count=0)


def measure(settings: Settings) -> Results:
    """Start each kind of job in turn."""
    with tempfile.TemporaryDirectory() as folder:
        commands = _commands(Path(folder), str(settings.rank_count))
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        cpu_seconds: dict[str, list[float]] = {name: [] for name in commands}
        for start in range(settings.start_count):
            for name, command in commands.items():
                took_s, cpu_s = _start(command, settings.rank_count)
                if start >= settings.unmeasured_count:
                    seconds[name].append(took_s)
                    cpu_seconds[name].append(cpu_s)
    results: Results = {name: {"s": statistics.median(values)} for name, values in seconds.items()}
    for name, values in cpu_seconds.items():
        results[name]["cpu_s"] = statistics.median(values)
    return results


def _commands(folder: Path, count: str) -> dict[str, list[str]]:
    ours, on_torch = folder / "ours.py", folder / "on_torch.py"
    ours.write_text(OURS)
    on_torch.write_text(TORCH)
    python = sys.executable
    launcher = next(iter(mpirun.find_installation(os.environ).launchers.values()))
    asyncdist = [python, "-m", "asyncdist", "run", "-n", count]
    return {
        "ours on MPI": [*asyncdist, str(ours)],
        "bare MPI": [launcher, "-n", count, "--host", f"localhost:{count}", "--bind-to", "none", python, "-c", BARE],
        "ours on torch": [*asyncdist, "--transport", "torch", str(ours)],
        "torchrun": [python, "-m", "torch.distributed.run", "--nproc-per-node", count, "--standalone", str(on_torch)],
    }


def _start(command: Sequence[str], rank_count: int) -> tuple[float, float]:
    """Run a job. Return the seconds until its last rank begins, and its CPU time in seconds."""
    environ = {**os.environ, **dict.fromkeys(mpirun.ROOT_VARIABLES, "1"), "OMP_NUM_THREADS": "1"}
    cpu_began_s, began_at = _cpu_s(), time.time()
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=300)
    begun = [float(line.split()[-1]) for line in ended.stdout.splitlines() if line.startswith("begun at")]
    if len(begun) != rank_count:
        raise RuntimeError(f"{' '.join(command)} printed {ended.stdout!r}")
    return max(begun) - began_at, _cpu_s() - cpu_began_s


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def rows(results: Results) -> list[Row]:
    """Return the rows of the table."""
    found = []
    for ours, rival in (("ours on MPI", "bare MPI"), ("ours on torch", "torchrun")):
        for unit, what in (("s", "seconds to main"), ("cpu_s", "CPU time of the job")):
            value, other = results[ours][unit], results[rival][unit]
            has_target = unit == "cpu_s"
            found.append(
                Row(
                    f"{what}, {ours}",
                    f"{value:.2f} s, x{value / other:.2f}",
                    f"{rival}: {other:.2f} s",
                    f"<= x{TARGET_RATIO:g}" if has_target else "",
                    value / other <= TARGET_RATIO if has_target else None,
                )
            )
    return found


if __name__ == "__main__":
    out, is_quick = arguments()
    out.write_text(json.dumps(measure(QUICK if is_quick else FULL)))
