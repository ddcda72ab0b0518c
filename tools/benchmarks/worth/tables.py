"""Makes the tables of the benchmark ``value``: rows for the terminal, and the tables of the page."""

from __future__ import annotations

import statistics

from harness import Results, Row


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
    return statistics.median(run[figure] for run in found["runs"])


def spread(values: list[float]) -> str:
    """Return the median and the range."""
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"
