"""Draws, for a report, the hyperparameters of population based training over time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import plotly.graph_objects as go

from asyncdist.report.figures.drawing import RANK_COUNT_MAX, evenly, new_figure, times
from asyncdist.report.summary import Summary

#: Maximum numbers of hyperparameters, and of values per rank, to draw.
FIGURE_COUNT_MAX: Final = 12
VALUE_COUNT_MAX: Final = 200
#: Ratio of the largest to the smallest value from which the axis is logarithmic.
_LOG_FACTOR: Final = 20.0


def hyperparameter_sections(summary: Summary) -> Iterator[tuple[str, str, go.Figure]]:
    """Yield title, note and figure of each hyperparameter that population based training has changed."""
    names = list(dict.fromkeys(name for _, _, values in summary.hyperparameters for name in values))
    for name in names[:FIGURE_COUNT_MAX]:
        yield f"Hyperparameter {name}", *_figure_of(summary, name)


def _figure_of(summary: Summary, name: str) -> tuple[str, go.Figure]:
    figure = new_figure(320, "seconds since the job began", name)
    by_rank: dict[int, list[tuple[float, Any]]] = {}
    for time_s, rank, values in summary.hyperparameters:
        if name in values:
            by_rank.setdefault(rank, []).append((time_s, values[name]))
    ranks = evenly(sorted(by_rank), RANK_COUNT_MAX)
    for rank in ranks:
        points = evenly(by_rank[rank], VALUE_COUNT_MAX)
        points = [*points, (summary.duration_s, points[-1][1])]
        moments = times([time_s for time_s, _ in points])
        line = {"mode": "lines", "line": {"shape": "hv"}, "name": f"rank {rank}"}
        figure.add_scatter(x=moments, y=[_shown(value) for _, value in points], **line)
    numbers = [value for rank in ranks for _, value in by_rank[rank] if type(value) in (int, float)]
    if numbers and min(numbers) > 0 and max(numbers) >= _LOG_FACTOR * min(numbers):
        figure.update_yaxes(type="log")
    note = (
        "The value with which each rank trained. A line jumps when its rank copies another rank. Look for lines that"
        " gather: those values were better at that time. Lines at the end of a range ask for a wider range."
    )
    if len(by_rank) > len(ranks):
        note += f" {len(ranks)} of {len(by_rank)} ranks are shown."
    return note, figure


def _shown(value: Any) -> Any:
    return value if type(value) in (int, float) else str(value)
