"""Runs benchmarks on real ranks and prints what they found beside what they must reach.

    ./tools/bench NAME [--transport mpi|torch] [--json PATH] [--chart PATH] [--quick] [--check]

NAME is one of the scripts beside this one, or ``all``. Each says in its first lines what exactly it times. The JSON is
``{"bench": NAME, "results": {...}}``; for ``all`` the results are those of each benchmark by name. ``--chart`` draws
them, where a benchmark has a picture. ``--quick`` takes tiny settings, to see that everything works, and its figures
mean nothing. The exit code is 0 whatever the figures are, 1 if a benchmark failed, and with ``--check`` also if a
figure was missed.
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

from harness import Results, Row
from rich.console import Console
from rich.table import Table

NAMES: Final = (
    "latency",
    "bandwidth",
    "beside",
    "step",
    "gpu",
    "faces",
    "one-sided",
    "round",
    "scale",
    "routes",
    "average",
    "straggler",
    "idle",
    "memory",
    "sim",
    "grace",
    "replay",
    "record",
    "goodput",
    "value",
)
#: Those that can draw what they have found.
CHARTS: Final = ("goodput", "scale", "value")
_HERE: Final = Path(__file__).resolve().parent
#: Makes hosts of namespaces; its exit code where it cannot.
HOSTS: Final = _HERE.parent / "namespaces" / "hosts.py"
UNAVAILABLE: Final = 77
#: Generous: most take a minute or less, scale ten.
_TIMEOUT_S: Final = 3600.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line, or ``arguments`` in its place, names; the exit code."""
    options = _options(arguments)
    found: dict[str, Results] = {}
    missed: list[str] = []
    for name in NAMES if options.name == "all" else (options.name,):
        benchmark = importlib.import_module(_module(name))
        began_at = time.perf_counter()
        results = _measure(name, benchmark, transport=options.transport, quick=options.quick)
        if results is None:
            return 1
        found[name] = results
        rows = benchmark.rows(results)
        _print(name, rows, time.perf_counter() - began_at)
        missed += [row.figure for row in rows if row.met is False]
    if options.json is not None:
        results = found if options.name == "all" else found[options.name]
        options.json.write_text(json.dumps({"bench": options.name, "results": results}, indent=2) + "\n")
    if options.chart is not None:
        importlib.import_module(_module(options.name)).draw(found[options.name], options.chart)
    if missed:
        print(f"missed: {'; '.join(missed)}")
    return 1 if missed and options.check else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tools/bench", description="Benchmarks, each beside its rival.")
    parser.add_argument("name", choices=(*NAMES, "all"), metavar="NAME", help=", ".join((*NAMES, "all")))
    parser.add_argument("--transport", choices=("mpi", "torch"), default="mpi", help="under asyncdist run, or gloo")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results here")
    parser.add_argument("--chart", type=Path, metavar="PATH", help=f"draw the results: {', '.join(CHARTS)}")
    parser.add_argument("--quick", action="store_true", help="tiny settings: whether it works, not how fast")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a figure is missed")
    options = parser.parse_args(arguments)
    if options.chart is not None and options.name not in CHARTS:
        parser.error(f"--chart: {options.name} has none; allowed: {', '.join(CHARTS)}")
    for option, path in (("--json", options.json), ("--chart", options.chart)):
        if path is not None and not path.parent.is_dir():  # said now, not after an hour of measuring
            parser.error(f"{option} {path}: there is no folder {path.parent}")
    return options


def _measure(name: str, benchmark: Any, *, transport: str, quick: bool) -> Results | None:
    """The results of all launches of a benchmark together; None when one of them failed."""
    launches = [functools.partial(start, rank_count=count, transport=transport) for count in benchmark.RANKS or (0,)]
    if hasattr(benchmark, "HOSTS"):
        launches.append(functools.partial(_start_on_hosts, hosts=benchmark.HOSTS, transport=transport))
    results: Results = {}
    for launch in launches:
        with tempfile.TemporaryDirectory() as directory:
            out = Path(directory, "results.json")
            code = launch([str(_HERE / f"{_module(name)}.py"), str(out), *(["--quick"] if quick else [])])
            if code == UNAVAILABLE:
                continue  # the program that makes hosts has said why
            if code != 0 or not out.exists():
                print(f"{name} failed (exit code {code})", file=sys.stderr)
                return None
            results |= json.loads(out.read_text())
    return results


def start(program: Sequence[str], rank_count: int, transport: str) -> int:
    """Run a script with its arguments on so many ranks, or alone where it simulates them (0); the exit code."""
    launcher = _launcher(transport, "-n", str(rank_count)) if rank_count else []
    return subprocess.run([sys.executable, *launcher, *program], check=False, timeout=_TIMEOUT_S).returncode


def _start_on_hosts(program: Sequence[str], *, hosts: tuple[int, int, int], transport: str) -> int:
    """Run a script on hosts made of namespaces: their number, ranks of each, and Mbit/s; the exit code."""
    count, rank_count, rate = hosts
    names = ",".join(f"host{number}:{rank_count}" for number in range(1, count + 1))
    made = [sys.executable, str(HOSTS), str(count), "--rate", str(rate)]
    command = [*made, sys.executable, *_launcher(transport, "--hosts", names), *program]
    return subprocess.run(command, check=False, timeout=_TIMEOUT_S).returncode


def _launcher(transport: str, *where: str) -> list[str]:
    return ["-m", "asyncdist", "run", "--transport", transport, *where]


def _module(name: str) -> str:
    """The script's, without its ending."""
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
    """Tables keep their width where output is no terminal."""
    return Console() if sys.stdout.isatty() else Console(width=150)


if __name__ == "__main__":
    sys.exit(main())
