"""Compares asyncdist with other libraries that move data between processes, on the same work in the same run.

The work is in ``peers/work.py``: a message of 64 bytes, a tensor of 64 MiB and the mean of a tensor of 16 MiB, between
two processes of this host. Each library does the work as its documentation shows, in ``peers``. Some offer only a part.
All libraries are run in turn, several times, and the medians of these runs are compared, so that other load on the
machine falls on all of them. A library that is not installed or fails is skipped, with the reason.
``peers/requirements.txt`` installs all libraries.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from harness import Results, Row

RANKS: Final = ()
_PEERS: Final = Path(__file__).parent / "peers"
_TIMEOUT_S: Final = 90.0
_MPIRUN: Final = ("mpirun", "--oversubscribe", "-n", "2", sys.executable)
_TORCHRUN: Final = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
_ALONE: Final = (sys.executable,)
_OURS: Final = (sys.executable, "-m", "asyncdist", "run", "-n", "2")


@dataclass(frozen=True, slots=True)
class Peer:
    """A library and how its script is started.

    Attributes:
        title: Name of the library, and of its part that is used.
        script: Name of the script in ``peers``.
        launcher: Command that starts the script.
        package: Name of the distribution to install.
        module: Name of the module to import.
    """

    title: str
    script: str
    launcher: tuple[str, ...]
    package: str
    module: str


OURS: Final = (
    Peer("asyncdist on MPI", "ours", _OURS, "asyncdist", "asyncdist"),
    Peer("asyncdist on torch", "ours", (*_OURS, "--transport", "torch"), "asyncdist", "asyncdist"),
)
INSTALLED: Final = (
    Peer("mpi4py, buffers", "mpi4py_buffers", _MPIRUN, "mpi4py", "mpi4py"),
    Peer("gloo, blocking", "gloo", _TORCHRUN, "torch", "torch"),
    Peer("asyncio streams", "asyncio_streams", _ALONE, "uvloop", "uvloop"),
)
PEERS: Final = (
    *INSTALLED,
    Peer("mpi4py, objects", "mpi4py_objects", _MPIRUN, "mpi4py", "mpi4py"),
    Peer("mpi4py.futures", "mpi4py_futures", (*_MPIRUN, "-m", "mpi4py"), "mpi4py", "mpi4py"),
    Peer("torch.distributed.rpc", "torch_rpc", _TORCHRUN, "torch", "torch"),
    Peer("PeriodicModelAverager", "periodic_averager", _TORCHRUN, "torch", "torch"),
    Peer("pyzmq asyncio", "pyzmq", _ALONE, "pyzmq", "zmq"),
    Peer("dask.distributed comm", "dask_comm", _ALONE, "distributed", "distributed"),
    Peer("Ray actors", "ray_actors", _ALONE, "ray", "ray"),
    Peer("Monarch actors", "monarch_actors", _ALONE, "torchmonarch", "monarch"),
    Peer("ucxx endpoints", "ucxx_endpoints", _ALONE, "ucxx-cu12", "ucxx"),
    Peer("torchft gloo", "torchft_gloo", _TORCHRUN, "torchft", "torchft"),
    Peer("hivemind averager", "hivemind_averager", _ALONE, "hivemind", "hivemind"),
)
#: Key, description and unit of each part of the work.
_PARTS: Final = (
    ("small_us", "message of 64 bytes", "us"),
    ("large_ms", "tensor of 64 MiB", "ms"),
    ("mean_ms", "mean of 16 MiB", "ms"),
)


@dataclass(frozen=True, slots=True)
class Settings:
    """The libraries to run, and the number of times that each is run."""

    peers: tuple[Peer, ...]
    round_count: int


FULL: Final = Settings(PEERS, round_count=3)
QUICK: Final = Settings(INSTALLED, round_count=1)


def measure(settings: Settings) -> Results:
    """Run all libraries in turn, and return the median of each figure, or the reason why a library was skipped."""
    figures: dict[str, list[dict[str, float | None]]] = {}
    skipped: dict[str, str] = {}
    for _ in range(settings.round_count):
        for peer in (*OURS, *settings.peers):
            if peer.title in skipped:
                continue
            found, reason = _run(peer)
            if found is None:
                skipped[peer.title] = reason
            else:
                figures.setdefault(peer.title, []).append(found)
    medians = {title: _medians(runs) for title, runs in figures.items() if title not in skipped}
    return {"medians": medians, "skipped": skipped}


def _medians(runs: Sequence[dict[str, float | None]]) -> dict[str, float]:
    keys = [key for key, value in runs[0].items() if value is not None]
    return {key: statistics.median(run[key] or 0.0 for run in runs) for key in keys}


def _run(peer: Peer) -> tuple[dict[str, float | None] | None, str]:
    """Run a library's script. Return its figures, or None and the reason why there are none."""
    if importlib.util.find_spec(peer.module) is None:
        return None, f"not installed: pip install {peer.package}"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "figures.json")
        command = [*peer.launcher, str(_PEERS / f"{peer.script}.py"), str(out)]
        # Open MPI refuses to run as root, which is usual in containers, unless these variables are set.
        environment = os.environ | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        environment |= {"OMP_NUM_THREADS": "1", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
        try:
            ended = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return None, f"did not end within {_TIMEOUT_S:g} s"
        if not out.exists():
            errors = [line for line in ended.stderr.splitlines() if "Error" in line] or [
                f"exit code {ended.returncode}"
            ]
            return None, f"failed: {errors[0][:100]}"
        figures: dict[str, float | None] = json.loads(out.read_text())
        return figures, ""


def rows(results: Results) -> list[Row]:
    """Return the rows of the table: for each part of the work, a row per library, the fastest first."""
    medians: dict[str, dict[str, float]] = results["medians"]
    titles = [peer.title for peer in OURS]
    packages = {peer.title: peer.package for peer in PEERS}
    table = []
    for key, part, unit in _PARTS:
        ours = " / ".join(f"{medians[title][key]:.3g}" for title in titles if title in medians) + f" {unit}"
        others = sorted(
            (medians[title][key], title) for title in medians if title not in titles and key in medians[title]
        )
        for value, title in others:
            ratios = " / ".join(f"x{value / medians[name][key]:.2g}" for name in titles if name in medians)
            version = importlib.metadata.version(packages[title])
            table.append(Row(f"{part}: {title} {version}", ours, f"{value:.3g} {unit} ({ratios})"))
    table += [Row(f"skipped: {title}", "", reason) for title, reason in results["skipped"].items()]
    return table


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--quick", action="store_true")
    options: Any = parser.parse_args()
    options.out.write_text(json.dumps(measure(QUICK if options.quick else FULL)))


if __name__ == "__main__":
    main()
