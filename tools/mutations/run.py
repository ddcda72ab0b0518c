"""Checks that the simulator finds known defects, which are put back into the code one at a time (mutation testing).

    ./tools/mutants [NAME ...] [--budget-s 60 | --seeds N] [--jobs 2] [--json PATH]
    ./tools/mutants NAME --seed N
    ./tools/mutants --check

A mutant is one edit of the code that puts a defect back; ``table.py`` lists them. Each mutant is applied to a copy of
the source tree, and its scenario is run on that copy with increasing seeds until a seed fails or the time budget is
spent. The same seeds then run on an unmodified copy, and none may fail. The exit code is 0 if every mutant was found
and its fault plan was shrunk to at most two faults. ``--seed`` runs one seed alone and prints how it fails. ``--check``
only checks that the text which each mutant replaces is still in its file.
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

from mutant import Mutant
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from table import LEFT_OUT, MUTANTS
from tree import TOP, copy_tree, mutated, python_path

BUDGET_S: Final = 60.0
#: Seconds allowed in addition to the budget, for the import of torch and for shrinking.
_GRACE_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Hunt:
    """The result of the search for one mutant.

    Attributes:
        mutant: The mutant.
        trouble: Why the mutant does not count as found; "" if it does.
        seed, count, seconds: First failing seed, number of seeds tried, and duration of the search.
        error: Error of the failing seed.
        faults: Smallest fault plan with which the seed still fails.
        fault_count: Number of faults in the plan that the seed drew.
        story: Report of the failure by ``explore``, with traceback and trace.
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
    """Search for one mutant of the tree at ``original``, in child processes: on ``seeds``, or until time is up."""
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
    """Run ``hunt.py`` on the copy at ``top``; return its result, or a string with the reason why there is none."""
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
    """Search for the mutants that the command line names, and return the exit code."""
    options = _options()
    mutants = [mutant for mutant in MUTANTS if not options.names or mutant.name in options.names]
    misplaced = _misplaced(mutants)
    for line in misplaced:
        print(line, file=sys.stderr)
    if misplaced or options.check:
        return 1 if misplaced else 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        original = copy_tree(TOP, Path(folder))  # edits during the run must not affect later mutants
        if options.seed is not None:
            return _repeat(mutants[0], original, options.seed)
        hunts = _hunt_all(mutants, original, options)
    _print([hunts[mutant.name] for mutant in mutants], everything=not options.names)
    if options.json is not None:
        entries = [{**asdict(hunts[mutant.name]), "mutant": mutant.name} for mutant in mutants]
        options.json.write_text(json.dumps(entries, indent=2) + "\n")
    return 1 if any(found.trouble for found in hunts.values()) else 0


def _misplaced(mutants: Sequence[Mutant]) -> list[str]:
    """Return one line for each mutant whose edit does not apply or leaves invalid Python."""
    found = []
    for mutant in mutants:
        try:
            compile(mutated(mutant), mutant.file, "exec")
        except (ValueError, SyntaxError) as error:
            found.append(f"mutant {mutant.name}: {error}")
    return found


def _repeat(mutant: Mutant, original: Path, seed: int) -> int:
    found = hunt(mutant, original, range(seed, seed + 1), budget_s=BUDGET_S)
    print(
        found.story.rpartition("\n")[0] or f"{mutant.name}: {found.trouble}"
    )  # the story's last line names the temporary copy
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
        except KeyboardInterrupt:  # Ctrl-C has reached the child processes too; start no further ones
            pool.shutdown(cancel_futures=True)
            sys.exit(130)
    return hunts


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tools/mutants", description="Puts known defects back and checks that the simulator finds them."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants to search for (default: all)")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds on one core for each mutant")
    parser.add_argument("--seeds", type=int, help="most seeds to try per mutant (default: no limit but the budget)")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--check", action="store_true", help="only check that all edits apply")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at once")
    parser.add_argument("--seed", type=int, help="run only this seed of one mutant, and print how it fails")
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
