"""Runs benchmarks on real ranks, and prints a table of the measured figures and their targets.

    ./tools/bench NAME [--transport mpi|torch] [--json PATH] [--report PATH] [--chart PATH] [--quick] [--check]

NAME is a script in this folder, or ``all``. The first lines of each script define what it times. The JSON file is
``{"bench": NAME, "results": {...}}``; for ``all``, the results are keyed by benchmark. ``--report`` writes a Markdown
page with the tables, the machine, the versions and the commit. ``--chart`` draws the results of the benchmarks that
have a chart. ``--quick`` uses tiny settings, which check that everything works; its figures mean nothing. A benchmark
that fails is named at the end; the others are still run and written. The exit code is 1 if a benchmark fails or, with
``--check``, misses a target. Otherwise the exit code is 0.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import report
from harness import Results, Row
from rich.console import Console
from rich.table import Table

NAMES: Final = (
    "ratios",
    "latency",
    "bandwidth",
    "beside",
    "mailbox",
    "step",
    "gpu",
    "faces",
    "one-sided",
    "round",
    "scale",
    "routes",
    "average",
    "first",
    "straggler",
    "idle",
    "awaiting",
    "startup",
    "memory",
    "sim",
    "wire-codecs",
    "grace",
    "replay",
    "record",
    "goodput",
    "value",
    "async-diloco",
    "staleness",
    "compare",
)
#: Benchmarks that can draw a chart of their results.
CHARTS: Final = ("goodput", "scale", "staleness", "value")
_HERE: Final = Path(__file__).resolve().parent
#: Program that makes hosts from namespaces, and its exit code if it cannot make them.
HOSTS: Final = _HERE.parent / "namespaces" / "hosts.py"
UNAVAILABLE: Final = 77
#: Time limit in seconds. Most benchmarks take at most a minute, and ``scale`` takes ten minutes.
_TIMEOUT_S: Final = 3600.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks that the command line (or ``arguments``) names, and return the exit code."""
    options = _options(arguments)
    found: dict[str, Results] = {}
    tables: dict[str, list[Row]] = {}
    missed: list[str] = []
    failed: list[str] = []
    for name in NAMES if options.name == "all" else (options.name,):
        benchmark = importlib.import_module(_module(name))
        began_at = time.perf_counter()
        results = _measure(name, benchmark, transport=options.transport, quick=options.quick)
        if results is None:
            failed.append(name)
            continue
        found[name] = results
        rows = tables[name] = benchmark.rows(results)
        _print(name, rows, time.perf_counter() - began_at)
        missed += [row.figure for row in rows if row.met is False]
    if options.json is not None and found:
        results = found if options.name == "all" else found[options.name]
        options.json.write_text(json.dumps({"bench": options.name, "results": results}, indent=2) + "\n")
    if options.report is not None:
        report.write(options.report, tables)
    if options.chart is not None and found:
        importlib.import_module(_module(options.name)).draw(found[options.name], options.chart)
    if missed:
        print(f"missed: {'; '.join(missed)}")
    if failed:
        print(f"failed, and not in the report: {', '.join(failed)}")
    return 1 if failed or (missed and options.check) else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tools/bench", description="Runs benchmarks, each against its rival.")
    parser.add_argument("name", choices=(*NAMES, "all"), metavar="NAME", help=", ".join((*NAMES, "all")))
    parser.add_argument("--transport", choices=("mpi", "torch"), default="mpi", help="under asyncdist run, or gloo")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results here")
    parser.add_argument("--report", type=Path, metavar="PATH", help="write a page with the tables and the machine here")
    parser.add_argument("--chart", type=Path, metavar="PATH", help=f"draw the results: {', '.join(CHARTS)}")
    parser.add_argument("--quick", action="store_true", help="use tiny settings: checks that everything works")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a figure is missed")
    options = parser.parse_args(arguments)
    if options.chart is not None and options.name not in CHARTS:
        parser.error(f"--chart: {options.name} has none; allowed: {', '.join(CHARTS)}")
    for option, path in (("--json", options.json), ("--report", options.report), ("--chart", options.chart)):
        if path is not None and not path.parent.is_dir():  # report it now, not after an hour of measuring
            parser.error(f"{option} {path}: there is no folder {path.parent}")
    return options


def _measure(name: str, benchmark: Any, *, transport: str, quick: bool) -> Results | None:
    """Run all launches of a benchmark and return their merged results, or None if a launch fails."""
    launches = [functools.partial(start, rank_count=count, transport=transport) for count in benchmark.RANKS or (0,)]
    if hasattr(benchmark, "HOSTS"):
        launches.append(functools.partial(_start_on_hosts, hosts=benchmark.HOSTS, transport=transport))
    results: Results = {}
    for launch in launches:
        with tempfile.TemporaryDirectory() as directory:
            out = Path(directory, "results.json")
            code = launch([str(_HERE / f"{_module(name)}.py"), str(out), *(["--quick"] if quick else [])])
            if code == UNAVAILABLE:
                continue  # the program that makes hosts has printed the reason
            if code != 0 or not out.exists():
                print(f"{name} failed (exit code {code})", file=sys.stderr)
                return None
            results |= json.loads(out.read_text())
    return results


def start(program: Sequence[str], rank_count: int, transport: str) -> int:
    """Run a script on ``rank_count`` ranks, and return its exit code. 0 means one process that simulates ranks."""
    launcher = _launcher(transport, "-n", str(rank_count)) if rank_count else []
    return subprocess.run([sys.executable, *launcher, *program], check=False, timeout=_TIMEOUT_S).returncode


def _start_on_hosts(program: Sequence[str], *, hosts: tuple[int, int, int], transport: str) -> int:
    """Run a script on namespace hosts (number of hosts, ranks per host, Mbit/s), and return its exit code."""
    count, rank_count, rate = hosts
    names = ",".join(f"host{number}:{rank_count}" for number in range(1, count + 1))
    made = [sys.executable, str(HOSTS), str(count), "--rate", str(rate)]
    command = [*made, sys.executable, *_launcher(transport, "--hosts", names), *program]
    return subprocess.run(command, check=False, timeout=_TIMEOUT_S).returncode


def _launcher(transport: str, *where: str) -> list[str]:
    return ["-m", "asyncdist", "run", "--transport", transport, *where]


def _module(name: str) -> str:
    """Return the name of a benchmark's module."""
    return name.replace("-", "_")


def _print(name: str, rows: Sequence[Row], took_s: float) -> None:
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    table = Table(
        title=f"{name}: medians, {os.cpu_count()} cores, {took_s:.0f} s", caption=f"load average {load}", expand=False
    )
    for heading in ("figure", "ours", "against", "must reach", ""):
        table.add_column(heading)
    for row in rows:
        table.add_row(row.figure, row.ours, row.rival, row.target, _mark(row.met))
    _console().print(table)


def _mark(met: bool | None) -> str:
    return "" if met is None else "[green]met[/]" if met else "[red]MISSED[/]"


def _console() -> Console:
    """Return a console whose tables keep their width even if the output is not a terminal."""
    return Console() if sys.stdout.isatty() else Console(width=150)


if __name__ == "__main__":
    sys.exit(main())
