"""Makes the tables of the benchmark ``value``: rows for the terminal, and the figures of the page and its charts.

    python tools/benchmarks/worth/tables.py results.json [chart.png]

prints the page's tables from the results of ``./tools/bench value --json results.json``, and draws the charts again.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # if this is the program

from harness import Results, Row

from worth.tasks import TASKS


def rows(results: Results) -> list[Row]:
    """Return one row for each part and method: medians over the seeds, with the best and the worst seed."""
    return [
        Row(
            f"{part}; {method} ({found['value']:g})",
            spread([run["curve"][-1] for run in found["runs"]]),
            f"{median(found, 'models_sent'):.1f} models sent, waited {100 * median(found, 'waited'):.0f} %",
        )
        for part, by_method in results.items()
        for method, found in by_method.items()
    ]


def median(found: Results, figure: str) -> float:
    """Return the median of a figure over the seeds."""
    return float(statistics.median(run[figure] for run in found["runs"]))


def spread(values: list[float]) -> str:
    """Return the median and the range."""
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def times(results: Results) -> dict[str, dict[float, float]]:
    """Return, by method and slowdown, the median time to the target quality; infinite if most seeds do not reach it."""
    found: dict[str, dict[float, float]] = {}
    for part, by_method in results.items():
        if not part.startswith("times, "):
            continue
        slowdown = float(part.removeprefix("times, "))
        for method, each in by_method.items():
            target = TASKS["gaussians"].target
            found.setdefault(method, {})[slowdown] = statistics.median(_time(run, target) for run in each["runs"])
    return found


def _time(run: Results, target: float) -> float:
    """Return the time of the first mark at which the quality is reached."""
    marks = len(run["curve"])
    reached = (run["seconds"] * (mark + 1) / marks for mark, quality in enumerate(run["curve"]) if quality <= target)
    return next(reached, math.inf)


def best_shares(results: Results) -> dict[str, tuple[float, float, int]]:
    """Return, by method, the share of the seeds under failures that end within 5 % of the seed's best method.

    Also return the median quality and the number of seeds.
    """
    part = results["gaussians, failures"]
    finals = {method: [run["curve"][-1] for run in found["runs"]] for method, found in part.items()}
    best = [min(each) for each in zip(*finals.values(), strict=True)]
    return {
        method: (
            sum(value <= 1.05 * least for value, least in zip(values, best, strict=True)) / len(best),
            statistics.median(values),
            len(best),
        )
        for method, values in finals.items()
    }


def page(results: Results) -> str:
    """Return the page's tables in Markdown."""
    lines = []
    for task in TASKS:
        parts = [part for part in results if part.startswith(f"{task}, ")]
        if not parts:
            continue
        names = list(dict.fromkeys(method for part in parts for method in results[part]))
        lines += [
            f"### {task}",
            "",
            "| method | " + " | ".join(part.removeprefix(f"{task}, ") for part in parts) + " |",
        ]
        lines += ["|---" * (len(parts) + 1) + "|"]
        for name in names:
            cells = [_cell(results[part].get(name)) for part in parts]
            lines += [f"| {name} | " + " | ".join(cells) + " |"]
        lines += ["", "| method | option | steps | models sent | waited | worst rank |", "|---|---|---|---|---|---|"]
        for name in names:
            for part in parts:
                found = results[part].get(name)
                if found is not None:
                    steps = statistics.median(sum(run["steps"]) for run in found["runs"])
                    lines += [
                        f"| {part}; {name} | {found['value']:g} | {steps:.0f} | {median(found, 'models_sent'):.2f} | "
                        f"{100 * median(found, 'waited'):.0f} % | {median(found, 'worst'):.3f} |"
                    ]
        lines += [""]
    for method, by_slowdown in times(results).items():
        lines += [f"| {method} | " + " | ".join(f"{each:.0f}" for each in by_slowdown.values()) + " |"]
    if "gaussians, failures" in results:
        lines += [f"| {name} | {share:.2f} | {loss:.3f} |" for name, (share, loss, _) in best_shares(results).items()]
    return "\n".join(lines)


def _cell(found: Results | None) -> str:
    if found is None:
        return ""
    values = [run["curve"][-1] for run in found["runs"]]
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text())
    given = given.get("results", given)
    print(page(given))
    if len(sys.argv) > 2:
        from worth import charts

        charts.draw(given, Path(sys.argv[2]))
