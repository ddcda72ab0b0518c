"""The report of a job: one HTML page that needs no network."""

from __future__ import annotations

import html
import math
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from asyncdist.recording.reader import Recording
from asyncdist.report.summary import Round, Summary, summarise

#: Ranks that have a line of their own; of more, quantiles are drawn.
LINE_COUNT_MAX: Final = 64
#: Rounds that are drawn, and replacements that are marked: evenly among all.
ROUND_COUNT_MAX: Final = 400
MARK_COUNT_MAX: Final = 1500
#: Columns of what is drawn over time.
COLUMN_COUNT: Final = 200
_QUANTILES: Final = (0.05, 0.25, 0.5, 0.75, 0.95)
#: Losses and ends that are listed.
_NEWS_COUNT_MAX: Final = 200

_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1100px; padding: 0 1em; color: #1c1e21; }}
h1 {{ font-size: 1.6em; }} h2 {{ font-size: 1.2em; margin: 2em 0 0.2em; }} p {{ margin: 0.2em 0 0.6em; color: #555; }}
table {{ border-collapse: collapse; }} td, th {{ padding: 0.15em 0.8em 0.15em 0; text-align: left; }}
</style>
<script>{plotly}</script></head><body>
<h1>{title}</h1>
{body}
<script>{drawing}</script></body></html>
"""
#: A figure is drawn when the reader is about to come to it: all of them at once take seconds.
_DRAWING: Final = """
const figures = new Set(document.querySelectorAll(".figure"));
const draw = (place) => {
  if (!figures.delete(place)) return;
  const figure = JSON.parse(place.firstElementChild.textContent);
  Plotly.newPlot(place, figure.data, figure.layout, {displaylogo: false, responsive: true});
};
const drawAll = () => figures.forEach(draw);
if ("IntersectionObserver" in window) {
  const look = (entries) => entries.forEach((entry) => entry.isIntersecting && draw(entry.target));
  const observer = new IntersectionObserver(look, {rootMargin: "400px"});
  figures.forEach((place) => observer.observe(place));
  window.addEventListener("beforeprint", drawAll);
} else {
  drawAll();
}
"""


def render(recording: Recording) -> str:
    """Return the page of a recording."""
    summary = summarise(recording)
    sections = []
    for title, note, figure in _sections(summary, recording.ranks[0].header.transport.startswith("sim")):
        sections.append(f"<h2>{html.escape(title)}</h2>\n<p>{html.escape(note)}</p>")
        if figure is not None:
            data = str(figure.to_json()).replace("<", "\\u003c")  # which might end the script, or begin a comment
            drawn = f'<script type="application/json">{data}</script>'
            sections.append(f'<div class="figure" style="height: {figure.layout.height}px">{drawn}</div>')
    body = "\n".join([_facts(recording, summary), *sections, _news(summary)])
    return _PAGE.format(title=f"Job {html.escape(recording.job)}", plotly=get_plotlyjs(), body=body, drawing=_DRAWING)


def _facts(recording: Recording, summary: Summary) -> str:
    header = recording.ranks[0].header
    steps = sum(rank.step_seconds.count for rank in summary.ranks)
    hosts = sorted({each.header.hostname for each in recording.ranks})
    facts = [
        ("script", " ".join([header.script, *header.arguments]) or "none"),
        ("began", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(summary.began_at_s))),
        ("lasted", f"{summary.duration_s:.3f} s"),
        ("ranks", f"{recording.size} on {', '.join(hosts[:8])}{' ...' if len(hosts) > 8 else ''}"),
        ("transport", header.transport),
        ("steps", f"{steps:,} of all ranks"),
        ("rounds", f"{len(summary.rounds):,}, with {len(summary.applied):,} replacements"),
        ("messages", f"{_size(summary.nbytes.sum())}; what hosts share in memory is not among them"),
    ]
    if recording.missing:
        facts.append(("without a recording", f"ranks {', '.join(map(str, recording.missing))}"))
    facts += [("damaged", f"{each.path.name}: {each.damage}") for each in recording.ranks if each.damage]
    rows = "\n".join(f"<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>" for name, text in facts)
    return f"<table>{rows}</table>"


def _name_ranks(figure: go.Figure, size: int, axes: str) -> None:
    """Give the axes of ranks whole numbers alone."""
    if size <= 32:
        for axis in axes:
            figure.update_layout({f"{axis}axis_dtick": 1})


def _sections(summary: Summary, is_simulated: bool) -> Iterator[tuple[str, str, go.Figure | None]]:
    """Yield titles, notes, and figures, None where nothing is to be drawn: plotly makes up the numbers of its axes."""
    yield from _of_populations(summary)
    yield "Rounds", *_rounds(summary)
    yield "Step times", *_step_times(summary, is_simulated)
    yield "Step times over time", *_over_time(summary, "interval_bins", "seconds between two steps, mean")
    yield "Stragglers", *_over_time(summary, "lag_bins", "seconds after the first rank at the same iteration, mean")
    yield "Bytes between ranks", *_bytes(summary)


def _of_populations(summary: Summary) -> Iterator[tuple[str, str, go.Figure | None]]:
    """Yield metric and lineage of each population: weights of one never become those of another."""
    if len(summary.populations) < 2:
        whose = [(0, "")]
    else:
        named = [each.name for each in summary.populations]
        whose = [
            (place, f" of {name}{f' #{named[:place].count(name) + 1}' if name in named[:place] else ''}")
            for place, name in enumerate(named)
        ]
    for place, name in whose:
        yield f"Metric{name}", *_metric(summary, place)
        yield f"Whose weights live in whom{f',{name}' if name else ''}", *_lineage(summary, place)


def _figure(height: int, x: str, y: str) -> go.Figure:
    figure = go.Figure()
    figure.update_layout(
        template="plotly_white",
        height=height,
        margin={"l": 60, "r": 20, "t": 20, "b": 50},
        xaxis_title=x,
        yaxis_title=y,
    )
    return figure


def _evenly(values: Sequence[Any], count: int) -> list[Any]:
    """Return so many of the values at most, evenly spread."""
    if len(values) <= count:
        return list(values)
    return [values[int(place)] for place in np.linspace(0, len(values) - 1, count)]


def _metric(summary: Summary, place: int) -> tuple[str, go.Figure | None]:
    metrics = [metric for population in summary.populations[place : place + 1] for metric in population.metrics]
    if not any(metric.count for metric in metrics):
        return "No metric was given.", None
    figure = _figure(420, "seconds since the job began", "metric")
    series = [np.array(metric.rows(), dtype=float).reshape(-1, 2) for metric in metrics]
    if summary.size <= LINE_COUNT_MAX:
        for rank, rows in enumerate(series):
            figure.add_scattergl(
                x=_times(rows[:, 0]), y=rows[:, 1].astype(np.float32), mode="lines", name=f"rank {rank}", line_width=1
            )
        note = (
            "One line for each rank. A dot is a replacement: the rank took the weights of others; it lies at the bottom"
            " where the rank's metric was no finite number."
        )
    else:
        columns = np.linspace(0, summary.duration_s, COLUMN_COUNT)
        values = np.array([_held(rows, columns) for rows in series])
        for name, row in zip(("least", "quarter", "median", "three quarters", "most"), _spread(values), strict=True):
            figure.add_scatter(x=_times(columns), y=row.astype(np.float32), mode="lines", name=name)
        note = f"Of {summary.size} ranks: least, quartiles, most. A dot is a replacement."
    marks = _evenly([each for each in summary.applied if each.population == place], MARK_COUNT_MAX)
    heights = np.array([_held(series[each.rank], np.array([each.time_s]))[0] for each in marks])
    finite = np.concatenate([rows[:, 1] for rows in series])
    finite = finite[np.isfinite(finite)]
    heights[~np.isfinite(heights)] = finite.min() if len(finite) else 0.0
    texts = [f"rank {each.rank}, round {each.round}: {_names(each.donors)}" for each in marks]
    figure.add_scattergl(
        x=_times(np.array([each.time_s for each in marks])),
        y=heights.astype(np.float32),
        mode="markers",
        name="replaced",
        text=texts,
        marker={"size": 5, "color": "black", "symbol": "circle-open"},
    )
    thinned = any(metric.count > len(rows) for metric, rows in zip(metrics, series, strict=True))
    return note + (" Long series are thinned: every n-th value is drawn." if thinned else ""), figure


def _spread(values: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of columns before the first value of any rank
        return np.nanquantile(values, (0.0, 0.25, 0.5, 0.75, 1.0), axis=0)


def _held(rows: Any, times: Any) -> Any:
    """Return the latest value at each of the times; NaN before the first."""
    if not len(rows):
        return np.full(len(times), np.nan)
    places = np.searchsorted(rows[:, 0], times, side="right") - 1
    return np.where(places >= 0, rows[np.maximum(places, 0), 1], np.nan)


def _times(times: Any) -> Any:
    return np.round(np.asarray(times, dtype=np.float64), 4).astype(np.float32)


def _names(ranks: Sequence[int]) -> str:
    names = ", ".join(map(str, ranks[:8]))
    return f"{names} and {len(ranks) - 8} more" if len(ranks) > 8 else names or "nobody"


def _lineage(summary: Summary, place: int) -> tuple[str, go.Figure | None]:
    if not any(each.population == place for each in summary.applied):
        return "No weights were replaced.", None
    shares = summary.populations[place].shares
    figure = _figure(460, "rank at first", "rank at the end")
    figure.add_heatmap(z=shares, zmin=0, zmax=float(shares.max()), colorscale="Viridis", colorbar_title="share")
    figure.update_yaxes(autorange="reversed")
    _name_ranks(figure, summary.size, "xy")
    mean = shares.astype(np.float64).mean(axis=0)
    effective = 1 / float(np.square(mean).sum())
    note = (
        "Each row is what the last weights of a rank go back to, as shares of what the ranks had at first; training "
        f"itself counts as nobody's. The population goes back to {effective:.1f} ranks (1 / the sum of squared shares)."
    )
    return note, figure


def _rounds(summary: Summary) -> tuple[str, go.Figure | None]:
    if not summary.rounds:
        return "None was decided.", None
    figure = _figure(420, "seconds since the job began", "milliseconds since the decision")
    shown: list[Round] = _evenly(summary.rounds, ROUND_COUNT_MAX)
    texts = [
        f"round {each.number[-1]}: {_names(each.donors)} gave to {_names(each.replacers)}, {each.route}; {each.reason}"
        for each in shown
    ]
    began = np.array([each.began_s for each in shown])
    for name, field in (("donors fixed", "frozen_s"), ("last replacer applied", "applied_s"), ("over", "ended_s")):
        took = 1e3 * (np.array([getattr(each, field) for each in shown], dtype=float) - began)
        figure.add_scattergl(x=_times(began), y=took.astype(np.float32), mode="markers", name=name, text=texts)
    note = (
        f"{len(shown)} of {len(summary.rounds)} rounds, by the time of their decision; what has not come is not drawn."
    )
    return note, figure


def _step_times(summary: Summary, is_simulated: bool) -> tuple[str, go.Figure | None]:
    if not any(rank.intervals.count for rank in summary.ranks):
        return "No policy has made two steps.", None
    figure = _figure(420, "rank", "milliseconds")
    ranks = np.arange(summary.size)
    for fraction in _QUANTILES:
        values = [1e3 * rank.intervals.quantile(fraction) for rank in summary.ranks]
        name = f"{fraction:.0%} of steps are below"
        figure.add_scatter(x=ranks, y=np.array(values, dtype=np.float32), mode="markers+lines", name=name)
    own = [1e6 * rank.step_seconds.quantile(0.5) for rank in summary.ranks]
    known = [value for value in own if not math.isnan(value)]
    told = f" policy.step itself took {np.median(known):.0f} us in the median." if known and not is_simulated else ""
    figure.update_yaxes(type="log")
    _name_ranks(figure, summary.size, "x")
    return f"From the end of one step to that of the next.{told}", figure


def _over_time(summary: Summary, bins: str, what: str) -> tuple[str, go.Figure | None]:
    figure, columns = _figure(420, "seconds since the job began", "rank"), COLUMN_COUNT
    series = [getattr(rank, bins) for rank in summary.ranks]
    begin_s = min((each.first_s for each in series if each.first_s < summary.duration_s), default=0.0)
    values = np.array([each.means(begin_s, summary.duration_s, columns) for each in series])
    middles = begin_s + (np.arange(columns) + 0.5) * (summary.duration_s - begin_s) / columns
    for row in values:  # a value holds until the next one
        known = np.flatnonzero(np.isfinite(row))
        if len(known):
            filled = np.maximum.accumulate(np.where(np.isfinite(row), np.arange(columns), -1))
            held = (filled >= 0) & (np.arange(columns) <= known[-1])
            row[held] = row[filled[held]]
    if not np.isfinite(values).any():
        return "Nothing to be compared was recorded.", None
    highest = float(np.nanquantile(values, 0.99)) or float(np.nanmax(values)) or 1.0  # of a scale that begins with 0
    figure.add_heatmap(
        x=_times(middles), z=values.astype(np.float32), zmin=0, zmax=highest, colorscale="Magma", colorbar_title="s"
    )
    _name_ranks(figure, summary.size, "y")
    return f"{what[0].upper()}{what[1:]}, in {columns} columns. The brightest hundredth has one colour.", figure


def _bytes(summary: Summary) -> tuple[str, go.Figure | None]:
    if not summary.nbytes.any():
        return "There were none.", None
    figure = _figure(460, "to rank", "from rank")
    with np.errstate(divide="ignore"):
        exponents = np.log10(summary.nbytes)
    exponents[~np.isfinite(exponents)] = np.nan
    least, most = np.nanmin(exponents), np.nanmax(exponents)
    apart = 0.05 * (most - least)  # or the one's text lies on the other's
    powers = [least, *(n for n in np.arange(math.ceil(least), most) if least + apart < n < most - apart), most]
    figure.add_heatmap(
        z=exponents.astype(np.float32),
        text=[[_size(nbytes) for nbytes in row] for row in summary.nbytes] if summary.size <= LINE_COUNT_MAX else None,
        hovertemplate="from %{y} to %{x}: %{text}<extra></extra>" if summary.size <= LINE_COUNT_MAX else None,
        colorscale="Viridis",
        colorbar={"title": "bytes", "tickvals": powers, "ticktext": [_size(10.0**power) for power in powers]},
    )
    figure.update_yaxes(autorange="reversed")
    _name_ranks(figure, summary.size, "xy")
    return "All messages, those of coordination included.", figure


def _size(nbytes: float) -> str:
    """Return a number of bytes with three digits, such as ``"1.25 MB"``."""
    for unit, count in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= count:
            return f"{nbytes / count:.3g} {unit}"
    return f"{nbytes:.0f} B"


def _news(summary: Summary) -> str:
    title = "<h2>Losses, failovers and errors</h2>"
    if not summary.news:
        return f"{title}\n<p>None.</p>"
    shown = summary.news[:_NEWS_COUNT_MAX]
    rows = "\n".join(
        f"<tr><td>{time_s:.3f} s</td><td>rank {rank}</td><td>{html.escape(text)}</td></tr>"
        for time_s, rank, text in shown
    )
    more = f"<p>and {len(summary.news) - len(shown)} more</p>" if len(summary.news) > len(shown) else ""
    return f"{title}\n<table><tr><th>when</th><th>told by</th><th>what</th></tr>{rows}</table>{more}"
