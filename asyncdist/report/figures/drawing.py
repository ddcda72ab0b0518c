"""Helpers for the figures of a report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import plotly.graph_objects as go

from asyncdist.wording import ranks_in_words

#: Maximum numbers of rounds and of ranks that a figure or a table shows.
ROUND_COUNT_MAX: Final = 400
RANK_COUNT_MAX: Final = 64


def name_ranks(figure: go.Figure, size: int, axes: str) -> None:
    """Label every rank on the given axes ("x", "y" or "xy"), unless there are more than 32 ranks."""
    if size <= 32:
        for axis in axes:
            figure.update_layout({f"{axis}axis_dtick": 1})


def new_figure(height: int, x: str, y: str) -> go.Figure:
    """Return an empty figure. ``x`` and ``y`` are the titles of its axes, and ``height`` is in pixels."""
    figure = go.Figure()
    figure.update_layout(
        template="plotly_white",
        height=height,
        margin={"l": 60, "r": 20, "t": 36, "b": 50},
        xaxis_title=x,
        yaxis_title=y,
        legend={"orientation": "h", "x": 0, "xanchor": "left", "y": -0.22, "yanchor": "top"},
    )
    return figure


def scale(title: str, **more: Any) -> dict[str, Any]:
    """Return the colour scale of a heat map. It is below the map, because a narrow window has no space at its side."""
    place = {"orientation": "h", "x": 0.5, "y": -0.22, "yanchor": "top", "thickness": 12, "len": 0.9}
    return {"title": {"text": title, "side": "bottom"}, **place, **more}


def evenly(values: Sequence[Any], count: int) -> list[Any]:
    """Return at most ``count`` evenly spaced elements of ``values``."""
    if len(values) <= count:
        return list(values)
    return [values[int(place)] for place in np.linspace(0, len(values) - 1, count)]


def times(seconds: Any) -> Any:
    """Return times in seconds, rounded to 0.1 ms, in float32."""
    return np.round(np.asarray(seconds, dtype=np.float64), 4).astype(np.float32)


def named_ranks(ranks: Sequence[int]) -> str:
    """Return the names of ranks. At most 8 spans of consecutive ranks are named."""
    return ranks_in_words(ranks, span_count_max=8) if ranks else "no rank"
