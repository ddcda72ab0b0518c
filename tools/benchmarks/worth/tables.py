"""Makes the tables of the benchmark ``value``: rows for the terminal, and the tables of docs/value.md.

    python tools/benchmarks/worth/tables.py

writes the tables into docs/value.md, and draws the charts next to it, from ``RESULTS``: the file that ``./tools/bench
value --json tools/benchmarks/worth/results.json`` has made.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # if this file is run as a script

from harness import Results, Row

RESULTS: Final = Path(__file__).with_name("results.json")
PAGE: Final = Path(__file__).resolve().parents[3] / "docs" / "value.md"
#: Column headings of the settings, keyed by name of the results' part.
HEADINGS: Final = {
    "equal": "equal",
    "slow 10": "slow",
    "speeds": "speeds",
    "diverges": "diverges",
    "slow and diverging": "both",
    "lost": "lost",
    "links": "slow links",
}


def rows(results: Results) -> list[Row]:
    """Return one row for each part and method: medians over the seeds, with the best and the worst seed."""
    return [
        Row(
            f"{part}; {method} ({found['value']:g})",
            spread(found["loss"]),
            f"{median(found, 'models_sent'):.1f} models sent, waited {100 * median(found, 'waited'):.0f} %",
        )
        for part, by_method in results.items()
        for method, found in by_method.items()
    ]


def median(found: Results, figure: str) -> float:
    """Return the median of a figure over the seeds."""
    return float(statistics.median(found[figure]))


def spread(values: Sequence[float]) -> str:
    """Return the median and the range."""
    return f"{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})"


def times(results: Results) -> dict[str, dict[float, float | None]]:
    """Return the median time to the target quality, by method and slowdown; None if most seeds miss it."""
    found: dict[str, dict[float, float | None]] = {}
    for part, by_method in results.items():
        if part.startswith("times, "):
            for method, each in by_method.items():
                reached = sorted(each["time"], key=lambda time: (time is None, time or 0.0))
                found.setdefault(method, {})[float(part.removeprefix("times, "))] = reached[len(reached) // 2]
    return found


def best_shares(results: Results) -> dict[str, tuple[float, float, int]]:
    """Return how often each method's runs under failures are nearly the best.

    The first number is the share of the seeds that end within 5 % of the seed's best method. The others are the median
    quality and the number of seeds.
    """
    finals = {method: found["loss"] for method, found in results["gaussians, failures"].items()}
    best = [min(each) for each in zip(*finals.values(), strict=True)]
    return {
        method: (
            sum(value <= 1.05 * least for value, least in zip(values, best, strict=True)) / len(best),
            statistics.median(values),
            len(best),
        )
        for method, values in finals.items()
    }


# -- the tables of the page -------------------------------------------------------------------------------------------


def _table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    head, *body = ("| " + " | ".join(line) + " |" for line in (headings, *lines))
    return "\n".join((head, "|---" * len(headings) + "|", *body))


def _by_setting(results: Results, parts: Sequence[str], headings: Sequence[str]) -> str:
    """Return the losses by method and part; the best median of each part is bold."""
    methods = list(dict.fromkeys(method for part in parts for method in results[part]))
    best = {part: min(f"{median(found, 'loss'):.2f}" for found in results[part].values()) for part in parts}

    def cell(part: str, method: str) -> str:
        if method not in results[part]:
            return ""
        middle, rest = spread(results[part][method]["loss"]).split(" ", 1)
        return f"**{middle}** {rest}" if middle == best[part] else f"{middle} {rest}"

    return _table(("method", *headings), [[name, *(cell(part, name) for part in parts)] for name in methods])


def _settings(results: Results) -> str:
    return _by_setting(results, [f"gaussians, {name}" for name in HEADINGS], list(HEADINGS.values()))


def _shards(results: Results) -> str:
    return _by_setting(
        results, ["gaussians, one class", "gaussians, dirichlet 0.1"], ["one class a rank", "Dirichlet 0.1"]
    )


def _costly(task: str) -> Callable[[Results], str]:
    return lambda results: _by_setting(results, [f"{task}, equal", f"{task}, slow 10"], ["equal", "slow"])


def _costs(results: Results) -> str:
    """Return the costs with equal ranks and with a slow one."""
    equal, slow = results["gaussians, equal"], results["gaussians, slow 10"]
    return _table(
        ("method", "steps", "models sent by a rank", "wait"),
        [
            [
                name,
                f"{median(equal[name], 'steps'):.0f}; {median(slow[name], 'steps'):.0f}",
                f"{median(equal[name], 'models_sent'):.1f}; {median(slow[name], 'models_sent'):.1f}",
                f"{100 * median(equal[name], 'waited'):.0f} %; {100 * median(slow[name], 'waited'):.0f} %",
            ]
            for name in equal
        ],
    )


def _times(results: Results) -> str:
    found = times(results)
    slowdowns = sorted({slowdown for by_slowdown in found.values() for slowdown in by_slowdown})
    return _table(
        ("method", *(f"{slowdown:g}" for slowdown in slowdowns)),
        [
            [name, *("" if (each := by_slowdown[at]) is None else f"{each:,.0f}" for at in slowdowns)]
            for name, by_slowdown in found.items()
        ],
    )


def _chosen(results: Results) -> str:
    """Return each method's tuned option. A star marks a value at the edge of the tried values."""
    from worth.methods import METHODS

    equal, links = results["gaussians, equal"], results["gaussians, links"]
    factor_of = {"lr factor": ("learning rate", "× {:g}"), "average_every factor": ("steps between rounds", "{:g}")}

    def shown(name: str, found: Results | None) -> str:
        if found is None:
            return ""
        value, values = found["value"], METHODS[name].values
        scale = 16 if METHODS[name].option == "average_every factor" else 1
        text = factor_of.get(METHODS[name].option, ("", "{:g}"))[1].format(scale * value)
        return text + (" *" if value in (values[0], values[-1]) else "")

    return _table(
        ("name", "tuned option", "equal ranks", "slow links"),
        [
            [
                name,
                factor_of.get(METHODS[name].option, (METHODS[name].option,))[0],
                shown(name, equal[name]),
                shown(name, links.get(name)),
            ]
            for name in equal
        ],
    )


def _failures(results: Results) -> str:
    equal = results["gaussians, equal"]
    return _table(
        ("method", "within 5 % of the best", "test loss", "without failures"),
        [
            [name, f"{share * count:.0f} of {count}", f"{loss:.2f}", f"{median(equal[name], 'loss'):.2f}"]
            for name, (share, loss, count) in best_shares(results).items()
        ],
    )


TABLES: Final[dict[str, Callable[[Results], str]]] = {
    "times": _times,
    "settings": _settings,
    "costs": _costs,
    "failures": _failures,
    "shards": _shards,
    "grid": _costly("grid"),
    "language": _costly("language"),
    "chosen": _chosen,
}


def page(results: Results, text: str) -> str:
    """Return the page's text with the tables of these results between their comments."""
    return re.sub(
        r"(<!-- table: (\w+) -->\n).*?(\n<!-- end of table -->)",
        lambda found: found[1] + TABLES[found[2]](results) + found[3],
        text,
        flags=re.DOTALL,
    )


if __name__ == "__main__":
    from worth import charts

    given = json.loads(RESULTS.read_text())["results"]
    PAGE.write_text(page(given, PAGE.read_text()))
    charts.draw(given, PAGE.with_suffix(".png"))
