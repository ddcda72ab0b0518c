"""Draws the figures of a report: averaging rounds, hyperparameters, and parts that all figures share."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import plotly.graph_objects as go

from asyncdist.report.averages import Average
from asyncdist.report.summary import Summary
from asyncdist.wording import ranks_in_words, seconds_in_words, size_in_words

#: Maximum numbers of rounds and of ranks that a figure or a table shows.
ROUND_COUNT_MAX: Final = 400
RANK_COUNT_MAX: Final = 64
#: Maximum numbers of hyperparameters, and of values per rank, to draw.
FIGURE_COUNT_MAX: Final = 12
VALUE_COUNT_MAX: Final = 200
#: Minimum ratio of the largest to the smallest value for which the axis is logarithmic.
_LOG_FACTOR: Final = 20.0


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
    """Return the colour scale of a heat map. It is below the map, because a narrow window has no space at the side."""
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


def average_sections(summary: Summary) -> Iterator[tuple[str, str, go.Figure | str | None]]:
    """Yield title, note and figure of each report section on averages, if a policy averages contributions."""
    if not summary.averages.ranks:
        return
    for place in sorted(summary.averages.populations):
        rounds = summary.averages.rounds(place)
        name = summary.populations[place].name if place < len(summary.populations) else ""
        whose = f" of {name}" if name and len(summary.populations) > 1 else ""
        if rounds:
            yield f"Rounds of averaging{whose}", *_average_rounds(rounds)
            yield f"Mean changes{whose}", *_changes(rounds)
    yield "Contributions and waits", *_table(summary)


def _average_rounds(rounds: Sequence[Average]) -> tuple[str, go.Figure]:
    shown = [each for each in evenly(rounds, ROUND_COUNT_MAX) if each.contribution_count]
    figure = new_figure(420, "seconds since the job began", "milliseconds since the first contribution")
    texts = [_text_of(each) for each in shown]
    first = np.array([each.first_s for each in shown])
    for name, field in (("last contribution", "last_s"), ("last rank applied", "applied_s")):
        took = 1e3 * (np.array([getattr(each, field) for each in shown], dtype=float) - first)
        figure.add_scattergl(x=times(first), y=took.astype(np.float32), mode="markers", name=name, text=texts)
    waited = 1e3 * np.array([each.waited_s if each.applied_count else math.nan for each in shown])
    figure.add_scattergl(x=times(first), y=waited.astype(np.float32), mode="markers", name="longest wait", text=texts)
    note = (
        "Each round is a column of points, at the time of its first contribution: when the last rank contributed, when"
        " the last rank applied the average, and the longest wait of a rank. A text shows the fragment, the ranks"
        f" and the last rank. {len(shown)} of {len(rounds)} rounds are shown. Look for high points of the last"
        " contribution: the other ranks waited for that rank. Look for waits without them: the exchange took the time."
    )
    return note, figure


def _text_of(each: Average) -> str:
    text = f"round {each.key.round}, fragment {each.fragment}: average of {named_ranks(each.donors)}"
    if each.gains:
        text += f" (gains {', '.join(f'{gain:.3g}' for gain in each.gains)})"
    if each.left_out:
        text += f", without {named_ranks(each.left_out)}"
    return f"{text}; last contribution from rank {each.last_rank}"


def _changes(rounds: Sequence[Average]) -> tuple[str, go.Figure | None]:
    told = [each for each in rounds if each.outer_norm is not None or each.cosine is not None]
    if not told:
        return "Weights were averaged, without an outer optimizer.", None
    shown = evenly(told, ROUND_COUNT_MAX)
    figure = new_figure(420, "seconds since the job began", "norm of the mean change")
    fragments = sorted({each.fragment for each in shown})
    for fragment in fragments:
        its = [each for each in shown if each.fragment == fragment]
        x, of = times([each.applied_s for each in its]), f", fragment {fragment}" if len(fragments) > 1 else ""
        for name, field, axis in (("norm", "outer_norm", "y"), ("cosine", "cosine", "y2")):
            with np.errstate(over="ignore"):  # values beyond float32 are not drawn
                y = np.array([_or_nan(getattr(each, field)) for each in its]).astype(np.float32)
            if np.isfinite(y).any():
                dash = "dot" if axis == "y2" else "solid"
                figure.add_scatter(x=x, y=y, mode="lines+markers", name=f"{name}{of}", yaxis=axis, line_dash=dash)
    figure.update_layout(
        yaxis2={"title": "mean cosine", "overlaying": "y", "side": "right", "range": [-1.05, 1.05], "dtick": 0.5}
    )
    figure.update_layout(margin_r=60)
    note = (
        "The norm of the mean change D, the outer optimizer's gradient, and the mean cosine between the changes of two"
        " ranks. Look for a norm that grows from round to round: the outer learning rate or momentum is too large. A"
        " cosine near 1 means that the ranks learn the same, near 0 that they learn different things, which is normal"
        " after many steps; a negative one, that they work against each other."
    )
    return note, figure


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _table(summary: Summary) -> tuple[str, str]:
    ranks = sorted(summary.averages.ranks)
    more = len(ranks) - RANK_COUNT_MAX
    if more > 0:
        by_wait = sorted(ranks, key=lambda rank: summary.averages.ranks[rank].waited_s)
        ranks = sorted((*by_wait[: RANK_COUNT_MAX // 2], *by_wait[-RANK_COUNT_MAX // 2 :]))
    heads = (
        "rank",
        "contributed",
        "left out",
        "last of all",
        "applied",
        "waited",
        "longest wait",
        "sent",
        "as float32",
    )
    rows = [f"<tr>{''.join(f'<th>{html.escape(head)}</th>' for head in heads)}</tr>"]
    for rank in ranks:
        own = summary.averages.ranks[rank]
        cells = (
            *(f"{rank}", f"{own.contribution_count:,}", f"{own.left_out_count:,}", f"{own.last_count:,}"),
            *(f"{own.applied_count:,}", f"{seconds_in_words(own.waited_s)}", f"{seconds_in_words(own.waited_max_s)}"),
            *(size_in_words(own.wire_nbytes), size_in_words(own.unencoded_nbytes)),
        )
        rows.append(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>")
    note = (
        "For each rank: the rounds to which it contributed, the rounds that left its contribution out, and the rounds "
        "in which it was the last. Then the averages that it applied, and the time for which it waited for them. "
        "Finally the size of its contributions, encoded and as float32. Look for a rank that is often the last and "
        "waits little: the other ranks wait for it."
    )
    if more > 0:
        note += f" {RANK_COUNT_MAX} ranks with the longest and the shortest waits are shown; {more} are not."
    return note, f"<table>{''.join(rows)}</table>"


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
