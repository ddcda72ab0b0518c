"""Measures what averaging is worth: the quality of the models that each policy gives after equal virtual time.

Four ranks train small tasks (:mod:`worth.tasks`), simulated. The training is real torch; the virtual time of a step
follows from a stated model (:mod:`worth.settings`). The figures therefore do not depend on the machine's speed, and
equal seeds give equal figures. Each method (:mod:`worth.methods`) has one tuned option with three values. The value
with the best held-out loss on a separate seed is chosen, and other seeds are reported (:mod:`worth.plan`).

``--runs PATH`` of this script keeps each run's results in a file, and takes them from there in the next call.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import simulations
from harness import Results, Row
from worth import charts, tables
from worth.plan import FULL, QUICK, Part
from worth.runs import Run, final, simulate, time_to
from worth.tasks import TASKS

RANKS: Final = ()
#: Number of runs that take less time than new processes take to import torch.
_FEW: Final = 16


def measure(parts: Sequence[Part], runs_path: Path | None = None) -> Results:
    """Return the chosen value and the figures of all seeds' runs, keyed by part and method."""
    known = _known(runs_path)
    tuning = [run for part in parts for runs in part.tuning().values() for run in runs if len(runs) > 1]
    _simulate(tuning, known, runs_path, "tuning")
    chosen = {part.name: {method: _best(runs, known) for method, runs in part.tuning().items()} for part in parts}
    _simulate([run for part in parts for run in _runs(part, chosen)], known, runs_path, "simulating")
    return {
        part.name: {
            method: {"value": value, **_figures(part, [known[str(run)] for run in part.runs(method, value)])}
            for method, value in chosen[part.name].items()
        }
        for part in parts
    }


def _figures(part: Part, runs: list[Results]) -> Results:
    """Return lists of figures, one item for each seed, with four digits."""
    figures: Results = {
        "loss": [_short(final(run)) for run in runs],
        "worst": [_short(run["worst"]) for run in runs],
        "steps": [sum(run["steps"]) for run in runs],
        **{name: [_short(run[name]) for run in runs] for name in ("models_sent", "waited")},
    }
    if part.name.startswith("times, "):
        figures["time"] = [time_to(run, TASKS[part.task].target) for run in runs]
    return figures


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _runs(part: Part, chosen: dict[str, dict[str, float]]) -> list[Run]:
    return [run for method, value in chosen[part.name].items() for run in part.runs(method, value)]


def _best(runs: list[Run], known: dict[str, Results]) -> float:
    """Return the value with the least held-out loss. A single value is not tried."""
    return runs[0].value if len(runs) == 1 else min(runs, key=lambda run: float(known[str(run)]["held_out"])).value


def _simulate(wanted: Sequence[Run], known: dict[str, Results], runs_path: Path | None, what: str) -> None:
    """Simulate the runs that are not known yet."""
    runs = [run for run in dict.fromkeys(wanted) if str(run) not in known]
    few = ((run, simulate(run)) for run in runs)
    for run, figures in few if len(runs) <= _FEW else simulations.simulated(simulate, runs, what):
        known[str(run)] = figures
        if runs_path is not None:
            with runs_path.open("a") as file:
                file.write(json.dumps([str(run), figures]) + "\n")


def _known(runs_path: Path | None) -> dict[str, Results]:
    if runs_path is None or not runs_path.exists():
        return {}
    return dict(json.loads(line) for line in runs_path.read_text().splitlines())


def rows(results: Results) -> list[Row]:
    """Return the table's rows: medians over the seeds, with the best and the worst seed."""
    return tables.rows(results)


def draw(results: Results, path: Path) -> None:
    """Write the charts: the chart of times to the path, and the others into the same folder."""
    charts.draw(results, path)


def main() -> None:
    """Measure, and write the results to the file named on the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--runs", type=Path)
    given = parser.parse_args()
    simulations.be_quiet()
    given.out.write_text(json.dumps(measure(QUICK if given.quick else FULL, given.runs)))


if __name__ == "__main__":
    main()
