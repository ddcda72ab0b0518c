"""Puts known defects back, one at a time, and lets the simulator find them.

    ./tools/mutants [NAME ...] [--budget-s 60 | --seeds N] [--jobs 2] [--json PATH]
    ./tools/mutants NAME --seed N
    ./tools/mutants --check

Each mutant of ``table.py`` is applied to a copy of the tree, and its scenario is run there, seed after seed, until one
fails or the budget is spent. Then the same seeds are run in an unmutated copy, where none may fail. The exit code is 0
if every mutant was found, and its fault plan shrunk to two faults at most. ``--seed`` runs that seed alone and prints
how it fails. ``--check`` only looks whether all replacements still have their place.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from table import LEFT_OUT, MUTANTS, Mutant
from tree import TOP, copy_tree, mutated, python_path

BUDGET_S: Final = 60.0
#: Beyond the budget: the import of torch, and shrinking.
_GRACE_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Hunt:
    """What came of one mutant.

    Attributes:
        mutant: which.
        trouble: why it does not count as found; "" if it does.
        seed, count, seconds: the first failing seed, how many were tried, and for how long.
        error: how it showed.
        faults: the smallest fault plan that shows it.
        fault_count: faults of the plan that the seed drew.
        story: the failure as explore tells it, with traceback and trace.
    """

    mutant: Mutant
    trouble: str
    seed: int | None = None
    count: int = 0
    seconds: float = 0.0
    error: str = ""
    faults: tuple[str, ...] = ()
    fault_count: int = 0
    story: str = ""

    @property
    def repeat_line(self) -> str:
        return f"./tools/mutants {self.mutant.name} --seed {self.seed}"


def hunt(mutant: Mutant, original: Path, seeds: range | None, *, budget_s: float) -> Hunt:
    """Hunt one mutant of the tree at ``original``, in processes of its own: on those seeds, or as time allows."""
    with tempfile.TemporaryDirectory(prefix=f"{mutant.name}-") as folder:
        top = copy_tree(original, Path(folder), mutant)
        start = 0 if seeds is None else seeds.start
        limits = ["--start", str(start), "--budget-s", str(budget_s)]
        limits += [] if seeds is None else ["--seeds", str(len(seeds))]
        found = _run(top, mutant.scenario, limits, timeout_s=budget_s + _GRACE_S)
        if isinstance(found, str):
            return Hunt(mutant, found)
        if found["seed"] is None:
            return Hunt(mutant, "survived", count=found["count"], seconds=found["seconds"])
        limits = ["--start", str(start), "--seeds", str(found["seed"] - start + 1)]
        sound = _run(original, mutant.scenario, limits, timeout_s=2 * budget_s + _GRACE_S)
        trouble = ""
        if isinstance(sound, str):
            trouble = f"without the mutant: {sound}"
        elif sound["seed"] is not None:
            trouble = f"seed {sound['seed']} fails without the mutant: {sound['error']}"
        elif len(found["faults"]) > 2:
            trouble = f"{len(found['faults'])} faults are left of {found['fault_count']}"
        found["faults"] = tuple(found["faults"])
        return Hunt(mutant, trouble, **found)


def _run(top: Path, scenario: str, limits: Sequence[str], *, timeout_s: float) -> dict[str, Any] | str:
    """``hunt.py`` in that copy: what it found, or why it said nothing."""
    command = [sys.executable, str(top / "tools" / "mutations" / "hunt.py"), str(top), scenario, *limits]
    environment = {**os.environ, "PYTHONPATH": python_path(top), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        completed = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=top, env=environment, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        return f"hung for {timeout_s:g} s"
    if completed.returncode:
        return f"the hunt itself failed: {(completed.stderr.strip().splitlines() or ['in silence'])[-1]}"
    return dict(json.loads(completed.stdout))


def main() -> int:
    """Hunt what the command line names; the exit code."""
    options = _options()
    mutants = [mutant for mutant in MUTANTS if not options.names or mutant.name in options.names]
    misplaced = _misplaced(mutants)
    for line in misplaced:
        print(line, file=sys.stderr)
    if misplaced or options.check:
        return 1 if misplaced else 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        original = copy_tree(TOP, Path(folder))  # one state for all, whatever is edited meanwhile
        if options.seed is not None:
            return _repeat(mutants[0], original, options.seed)
        hunts = _hunt_all(mutants, original, options)
    _print([hunts[mutant.name] for mutant in mutants], everything=not options.names)
    if options.json is not None:
        entries = [{**asdict(hunts[mutant.name]), "mutant": mutant.name} for mutant in mutants]
        options.json.write_text(json.dumps(entries, indent=2) + "\n")
    return 1 if any(found.trouble for found in hunts.values()) else 0


def _misplaced(mutants: Sequence[Mutant]) -> list[str]:
    """What is wrong with replacements that do not apply, or do not leave a program."""
    found = []
    for mutant in mutants:
        try:
            compile(mutated(mutant), mutant.file, "exec")
        except (ValueError, SyntaxError) as error:
            found.append(f"mutant {mutant.name}: {error}")
    return found


def _repeat(mutant: Mutant, original: Path, seed: int) -> int:
    found = hunt(mutant, original, range(seed, seed + 1), budget_s=BUDGET_S)
    print(found.story.rpartition("\n")[0] or f"{mutant.name}: {found.trouble}")  # its last line names the copy
    return 1 if found.trouble else 0


def _hunt_all(mutants: Sequence[Mutant], original: Path, options: argparse.Namespace) -> dict[str, Hunt]:
    hunts: dict[str, Hunt] = {}
    seeds = None if options.seeds is None else range(options.seeds)
    with ThreadPoolExecutor(options.jobs) as pool:
        pending = [pool.submit(hunt, mutant, original, seeds, budget_s=options.budget_s) for mutant in mutants]
        try:
            for done in as_completed(pending):
                found = done.result()
                hunts[found.mutant.name] = found
                how = found.trouble or f"found: {found.repeat_line}"
                print(f"{len(hunts)}/{len(mutants)} {found.mutant.name}: {how}", flush=True)
        except KeyboardInterrupt:  # the terminal has told the processes too; no further ones
            pool.shutdown(cancel_futures=True)
            sys.exit(130)
    return hunts


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tools/mutants", description="Known defects, and the simulator that finds them."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants; all by default")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="for each mutant, in seconds on one core")
    parser.add_argument("--seeds", type=int, help="try so many seeds at most; all that the budget allows by default")
    parser.add_argument("--json", type=Path, help="write what was found there, too")
    parser.add_argument("--check", action="store_true", help="only look whether all replacements apply")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at once")
    parser.add_argument("--seed", type=int, help="run this seed alone, of one mutant, and print how it fails")
    options = parser.parse_args()
    known = [mutant.name for mutant in MUTANTS]
    unknown = [name for name in options.names if name not in known]
    if unknown:
        parser.error(f"no mutant is called {unknown[0]!r}; there are {', '.join(known)}")
    if options.seed is not None and len(options.names) != 1:
        parser.error("--seed needs the name of one mutant")
    if options.jobs < 1 or not options.budget_s > 0 or (options.seeds is not None and options.seeds < 1):
        parser.error("--jobs and --seeds must be 1 or more, and --budget-s above 0")
    return options


def _print(hunts: list[Hunt], *, everything: bool) -> None:
    table = Table("mutant", "defect", "seed", "seeds", "seconds", "faults", "how it showed", title="mutants")
    for found in hunts:
        faults = f"{len(found.faults)} of {found.fault_count}" if found.seed is not None else ""
        seed = "" if found.seed is None else str(found.seed)
        how = found.trouble or found.error
        row = (found.mutant.name, str(found.mutant.defect), seed, str(found.count), f"{found.seconds:.1f}", faults)
        table.add_row(*row, escape(how), style="red" if found.trouble else None)
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    for found in hunts:
        for fault in found.faults:
            console.print(f"{found.mutant.name}, seed {found.seed}, needs {escape(fault)}", highlight=False)
    if everything:
        for defect, why in LEFT_OUT.items():
            console.print(f"defect {defect} has no mutant: {why}", highlight=False)
    found_count = sum(not found.trouble for found in hunts)
    console.print(f"{found_count} of {len(hunts)} mutants found")


if __name__ == "__main__":
    sys.exit(main())
